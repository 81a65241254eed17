"""``pygdist verify`` takes the configuration of a run, prints differences, and its exit code says if they pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pygdist.commands.verify import _report
from pygdist.testing.exactness import Difference, _difference
from tests.cli.commands import assert_mistake, pygdist

VERIFY = ("verify", "--config=run.yaml", "--world-size=2")

OWN = """
from pygdist.backends import Abilities, CommBackend

class Halved(CommBackend):
    name = ""
    abilities = Abilities(exact=False)

    def __init__(self, factor: float = 0.5):
        super().__init__()
        self.factor = factor

    def source_rows(self, x):
        rows = super().source_rows(x).clone()
        rows[self.shard.num_owned:] *= self.factor
        return rows
"""


def test_exact_in_float64_and_progress_is_told(folder: Path) -> None:
    outcome = pygdist(*VERIFY, "--double", folder=folder)
    assert outcome.code == 0, outcome.err
    for word in ("loss", "output", "gradients of convs.0.lin.weight", "parameters of", "equal within 1e-10"):
        assert word in outcome.out
    assert "one step on one process (pyg), 120 nodes, 720 edges" in outcome.err
    assert "the same step on 2 processes, backend comm" in outcome.err
    assert not (folder / "runs").exists()


def test_a_wrong_backend_of_the_users_own_package_is_found_out(folder: Path) -> None:
    (folder / "mine.py").write_text(OWN)
    (folder / "own.yaml").write_text("model:\n  backend:\n    class_path: mine.Halved\n    init_args: {factor: 0.25}\n")
    outcome = pygdist(*VERIFY, "--config=own.yaml", folder=folder, env={"PYTHONPATH": str(folder)})
    assert outcome.code == 1, outcome.err
    assert "NOT equal within 1e-05" in outcome.out
    assert "backend Halved" in outcome.err


@pytest.mark.parametrize(("tolerance", "code"), [(1e-5, 0), (1e-7, 1)])
def test_the_exit_code_is_that_of_the_largest_relative_difference(
    tolerance: float, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"loss": Difference(1e-9, 1e-8), "output": Difference(1e-3, 1e-6)}
    assert _report(found, tolerance, "2 against one") == code
    assert "1e-06 (output)" in capsys.readouterr().out.replace("1.0e", "1e")


def test_infinite_numbers_are_no_small_difference(capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.inf])
    for pair in ((ours, theirs), (theirs, ours), (theirs, theirs)):
        found = {"loss": Difference(0.0, 0.0), "output": _difference(*pair, scale=1.0)}
        assert _report(found, 1e-5, "2 against one") == 1
        assert "NOT equal" in capsys.readouterr().out


@pytest.mark.slow
def test_gat_on_cora(shared_data: Path, tmp_path: Path) -> None:
    raw = tmp_path / "Cora" / "raw"
    raw.mkdir(parents=True)
    for path in (shared_data / "Planetoid" / "Cora" / "raw").iterdir():
        (raw / path.name).symlink_to(path)
    outcome = pygdist(
        "verify",
        "--model.model=torch_geometric.nn.GAT",
        "--model.model.init_args={in_channels: -1, hidden_channels: 8, num_layers: 2, out_channels: 7, heads: 2}",
        "--data.dataset=Planetoid",
        f"--data.dataset_args={{root: {tmp_path}, name: Cora}}",
        "--data.cache_dir=cache",
        "--trainer.accelerator=cpu",
        "--world-size=3",
        folder=tmp_path,
    )
    assert outcome.code == 0, outcome.err + outcome.out
    assert "3 processes against one (pyg)" in outcome.out


def test_pairs_of_nodes_are_not_compared(folder: Path) -> None:
    said = "--task=links: verify compares a step on labels of nodes"
    assert_mistake(pygdist(*VERIFY, "--task=links", folder=folder), said)


@pytest.mark.parametrize("options", [("pull", "--data.batches=NeighborBatches"), ("replica",)], ids=lambda one: one[0])
def test_parts_and_mini_batches_are_not_compared(options: tuple[str, ...], folder: Path) -> None:
    name, *more = options
    said = f"backend '{name}' trains on parts or mini-batches; verify the model"
    assert_mistake(pygdist(*VERIFY, f"--model.backend={name}", *more, folder=folder), said)
