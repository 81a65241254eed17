"""Every notebook runs from top to bottom, and the quickstart's two runs agree."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parents[1] / "notebooks"
_MISSING = [name for name in ("nbclient", "nbformat", "ipykernel") if importlib.util.find_spec(name) is None]

pytestmark = pytest.mark.skipif(bool(_MISSING), reason=f"not installed: {', '.join(_MISSING)}")

_CHECKS = {
    "quickstart.ipynb": """
assert len(losses_one) == len(losses_two) == EPOCHS
assert difference < 1e-4, difference
assert abs(accuracy_one - accuracy_two) < 1e-3, (accuracy_one, accuracy_two)
"""
}


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("path", sorted(_FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(_FOLDER.parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(_CHECKS.get(path.name, "")))
    # the kernel of this environment, whatever kernel of that name the user has installed
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    if path.name == "quickstart.ipynb":
        printed = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", []))
        assert "requires training on a single device" in printed, "what PyG says to two devices"


@pytest.mark.parametrize("path", sorted(_FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_committed_outputs_are_small_and_without_errors(path: Path) -> None:
    import nbformat

    assert path.stat().st_size < 300_000
    outputs = [out for cell in nbformat.read(path, as_version=4).cells for out in cell.get("outputs", [])]
    assert outputs, "committed with its outputs"
    assert all(out["output_type"] != "error" for out in outputs)
