"""Every notebook runs from top to bottom, and its numbers are those that its text claims."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parents[1] / "notebooks"
_MISSING = [
    name for name in ("cloudpickle", "nbclient", "nbformat", "ipykernel") if importlib.util.find_spec(name) is None
]

pytestmark = pytest.mark.skipif(bool(_MISSING), reason=f"not installed: {', '.join(_MISSING)}")

#: Run as a last cell of each notebook.
_CHECKS = {
    "quickstart.ipynb": """
assert len(losses_one) == len(losses_two) == len(losses_fast) == EPOCHS
assert difference < 1e-4, difference
assert abs(loss_lightning - losses_one[-1]) < 1e-4, (loss_lightning, losses_one[-1])
assert accuracy_two > 0.5, accuracy_two
assert losses_one[-1] < losses_one[0] / 1.5, losses_one
""",
    "compare_backends.ipynb": """
assert list(results) == BACKENDS, results
differences = {name: figures["difference of loss"] for name, figures in results.items()}
late = differences.pop("late")
assert max(differences.values()) < 1e-4 < late, (differences, late)
sent = {name: figures["MB sent per epoch"] for name, figures in results.items()}
assert 0 < sent["cache"] < sent["comm"] / 5, sent
assert all(figures["seconds per epoch"] > 0 and figures["MiB peak of a rank"] > 0 for figures in results.values())
assert second[-1] < first[-1] < first[0], (first, second)
""",
    "your_backend.ipynb": """
assert set(differences) == {"GCNConv", "GATConv", "SAGEConv-max"} and max(differences.values()) < 1e-10, differences
assert "output of rank 0 differs" in mistake, mistake
final = {name: ranks[0][0][-1] for name, ranks in runs.items()}
assert max(final.values()) - min(final.values()) < 1e-4, final
sent = {name: sum(one for _, one in ranks) for name, ranks in runs.items()}
assert sent["comm, majority"] < sent["comm"] < sent["everything"], sent
assert halo["majority"] < min(halo["hash"], halo["chunk"]), halo
""",
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
    notebook.cells.append(nbformat.v4.new_code_cell(_CHECKS[path.name]))
    # the kernel of this environment, whatever kernel of that name the user has installed
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()


@pytest.mark.parametrize("path", sorted(_FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_committed_outputs_are_small_and_without_errors(path: Path) -> None:
    import nbformat

    assert path.stat().st_size < 300_000
    outputs = [out for cell in nbformat.read(path, as_version=4).cells for out in cell.get("outputs", [])]
    assert outputs, "committed with its outputs"
    assert all(out["output_type"] != "error" for out in outputs)


@pytest.mark.parametrize("path", sorted(_FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_first_cell_installs_what_is_missing_and_nothing_else(path: Path) -> None:
    import nbformat

    first = next(cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
    assert first.source.splitlines()[:3] == ["try:", "    import pygdist", "except ImportError:"]
    assert first.source.splitlines()[3].strip().startswith("%pip install -q ..[notebook]")
