"""A backend's state is in checkpoints, node by node: it goes on with any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch_geometric.nn import GCN
from typing_extensions import override

from pygdist import InputError
from pygdist.backends import Abilities, Backend, CommBackend
from pygdist.comm import Communicator
from pygdist.graph import Shard, write_store
from pygdist.lightning import backend_states, module
from pygdist.testing import RankPool
from tests.lightning import runs


class Counting(CommBackend):
    """Counts the training passes of each node, and marks it by its id: what a wrong node gets shows."""

    name = ""
    abilities = Abilities(stateful=True)
    per_graph = ("marks", "passes")
    marks: Tensor
    passes: Tensor

    @override
    def bind(self, shard: Shard, communicator: Communicator) -> None:
        super().bind(shard, communicator)
        self.marks, self.passes = torch.zeros(shard.num_owned, 2), torch.zeros(shard.num_owned, dtype=torch.int16)

    @override
    def begin_forward(self) -> None:
        super().begin_forward()
        if torch.is_grad_enabled():
            self.passes += 1
            self.marks += torch.stack([self.shard.owned_id, -self.shard.owned_id], dim=1)

    @override
    def state_dict(self) -> dict[str, Tensor]:
        return {"passes": self.passes, "marks": self.marks}

    @override
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.marks, self.passes = state["marks"], state["passes"]


class AtTheEnd(Callback):
    """Keeps the state with which training ends."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        backend: Any = pl_module.backend
        self.state = {"n_id": backend.shard.owned_id, "passes": backend.passes, "marks": backend.marks}


def _fit(
    rank: int, world_size: int, folder: str, backend: Backend, epochs: int, resume: str | None = None
) -> tuple[dict[str, Tensor], list[str]]:
    """Train up to ``epochs``, saving after each and once more at last; the state, and what was said of it."""
    said: list[str] = []
    classifier, data = runs.module(folder, backend=backend)
    end, each = AtTheEnd(), ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    callbacks = [each, *([end] if isinstance(backend, Counting) else [])]
    trainer = runs.trainer(rank, world_size, folder, max_epochs=epochs, callbacks=callbacks, enable_checkpointing=True)
    with (
        mock.patch.object(module, "rank_zero_info", said.append),
        mock.patch.object(module, "rank_zero_warn", said.append),
    ):
        trainer.fit(classifier, datamodule=data, ckpt_path=resume)
        trainer.save_checkpoint(Path(folder) / "after.ckpt")
        trainer.save_checkpoint(Path(folder) / "weights.ckpt", weights_only=True)
        trainer.test(
            classifier, datamodule=data, ckpt_path=str(Path(folder) / f"epoch={epochs - 1}.ckpt"), verbose=False
        )
    return getattr(end, "state", {}), said


def _assert_state(states: list[dict[str, Tensor]], passes: int) -> None:
    assert torch.cat([one["n_id"] for one in states]).sort().values.tolist() == list(range(160))
    for one in states:
        assert torch.equal(one["passes"], torch.full_like(one["passes"], passes))
        assert torch.equal(one["marks"], passes * torch.stack([one["n_id"], -one["n_id"]], dim=1).float())


@pytest.mark.slow
def test_rows_find_their_nodes_on_another_number_of_ranks(pool: RankPool, tmp_path: Path) -> None:
    first = pool.run(_fit, 2, str(tmp_path / "first"), Counting(), 2)
    _assert_state([state for state, _ in first], 2)
    saved = torch.load(tmp_path / "first" / "epoch=1.ckpt", weights_only=True)["backend_state"]
    assert saved["backend"].endswith("test_backend_states.Counting")
    assert {name: (value.dtype, value.shape) for name, value in saved["rows"].items()} == {
        "passes": (torch.int16, (160,)),
        "marks": (torch.float32, (160, 2)),
    }
    for world_size in (3, 1):
        resume = str(tmp_path / "first" / "epoch=1.ckpt")
        again = pool.run(_fit, world_size, str(tmp_path / str(world_size)), Counting(), 5, resume)
        _assert_state([state for state, _ in again], 5)


def test_the_model_of_such_a_checkpoint_is_one_of_pyg(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_fit, 2, str(tmp_path), Counting(), 1)
    for name in ("epoch=0.ckpt", "weights.ckpt"):
        state = torch.load(tmp_path / name, weights_only=True)["state_dict"]
        GCN(12, 8, num_layers=2, out_channels=4).load_state_dict(
            {key.removeprefix("model."): value for key, value in state.items()}
        )


def test_a_checkpoint_without_the_state_loads_and_one_says_why_it_has_none(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_fit, 2, str(tmp_path / "comm"), CommBackend(), 2)
    plain = torch.load(tmp_path / "comm" / "epoch=1.ckpt", weights_only=True)
    assert "backend_state" not in plain
    answers = pool.run(_fit, 2, str(tmp_path / "counting"), Counting(), 3, str(tmp_path / "comm" / "epoch=1.ckpt"))
    _assert_state([state for state, _ in answers], 1)
    for _, said in answers:
        assert len(said) == 2
        assert said[0].startswith("the checkpoint has no state of backend")
        assert said[1].startswith("the run has ended or failed, so the checkpoint lacks the state")
    for name, there in (("epoch=2.ckpt", True), ("after.ckpt", False), ("weights.ckpt", False)):
        assert ("backend_state" in torch.load(tmp_path / "counting" / name, weights_only=True)) == there
    # and a backend that has no state leaves that of another be
    resumed = pool.run(_fit, 2, str(tmp_path / "back"), CommBackend(), 4, str(tmp_path / "counting" / "epoch=2.ckpt"))
    assert [said for _, said in resumed] == [[], []]


def _wrong(rank: int, world_size: int, store: str, kind: str) -> str:
    shard, backend = Shard.load(store, rank), Counting()
    communicator = Communicator(dist.new_group())
    backend.bind(shard, communicator)
    if rank == 1:
        backend.marks = torch.zeros(shard.num_owned + 1, 2) if kind == "rows" else backend.marks.double()
    with pytest.raises(InputError) as error:
        backend_states.gathered(backend, shard, communicator)
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "said"), [("rows", "marks must have a row for each of the"), ("dtype", "differ between ranks")]
)
def test_a_state_that_does_not_fit_is_refused_on_all_ranks(
    kind: str, said: str, pool: RankPool, tmp_path: Path
) -> None:
    graph, store = runs.graph(), tmp_path / "parts"
    part = (torch.arange(160) % 2).numpy()
    write_store(graph, part, store, num_parts=2, method="given", arguments={}, notes=[])
    for message in pool.run(_wrong, 2, str(store), kind):
        assert "Counting.state_dict()" in message
        assert said in message


def test_the_state_of_another_graph_is_refused(tmp_path: Path) -> None:
    part = torch.zeros(160, dtype=torch.int64).numpy()
    write_store(runs.graph(), part, tmp_path / "one", num_parts=1, method="given", arguments={}, notes=[])
    shard, backend = Shard.load(tmp_path / "one", 0), Counting()
    backend.bind(shard, Communicator())
    saved = backend_states.gathered(backend, shard, Communicator())
    assert saved is not None
    saved["rows"]["marks"] = saved["rows"]["marks"][:100]
    with pytest.raises(InputError, match="has 100 rows of marks, but the graph has 160 nodes"):
        backend_states.scatter(saved, backend, shard, Communicator())
