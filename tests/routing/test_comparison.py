"""The check before the first pass compares each form of call once, on all ranks, and leaves no trace."""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric import nn as pyg
from torch_geometric.data import Data
from torch_geometric.nn import GCN, GCNConv, MessagePassing, SAGEConv
from torch_geometric.transforms import ToUndirected, VirtualNode

from pygdist.backends import resolve_backend
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard, write_store
from pygdist.routing import check as checks
from pygdist.routing import distribute, undistribute
from pygdist.routing.miniature import awkward_graph
from pygdist.testing import RankPool, random_graph
from tests.routing.bound import backends_, bound
from tests.routing.models import OVER_NODES, WRONG, Then


class Restless(nn.Module):
    """Changes itself and draws random numbers; hooks count its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.calls = SAGEConv(5, 3), pyg.BatchNorm(3), [0]

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.calls[0] += 1
        out: Tensor = self.norm(self.conv(x, edge_index))
        return functional.dropout(out, 0.5, self.training)


def _passes(rank: int, world_size: int, folder: str, backend_name: str, check: bool) -> tuple[list[Any], int, bool]:
    communicator = Communicator(dist.new_group())
    shard, backend = bound(backend_name, folder, rank, communicator)
    torch.manual_seed(3)
    model = Restless().double()
    random.seed(4)
    np.random.seed(5)  # noqa: NPY002 (the global one is what a model may use)
    distribute(model, backend=backend, check=check)
    with torch.inference_mode():  # as in Lightning's sanity check
        model.eval()(shard.x, shard.adjacency)
    communicator.meter.reset()
    model.train()
    outs = [model(shard.x, shard.adjacency).detach() for _ in range(2)]
    outs += [*model.state_dict().values(), torch.tensor([random.random(), np.random.rand()]), torch.rand(2)]  # noqa: NPY002
    return outs, communicator.meter.total.sent_bytes, model.calls == [3] and model.training


@backends_
def test_the_check_changes_nothing(backend: str, parts: str, pool: RankPool) -> None:
    """Neither outputs, running statistics, dropout and generators, nor the bytes of passes and counts of calls."""
    with_check, without = (pool.run(_passes, 2, parts, backend, check) for check in (True, False))
    for (ours, num_bytes, as_called), (theirs, expected, _) in zip(with_check, without, strict=True):
        assert as_called
        assert num_bytes == expected
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def _checked(
    rank: int, world_size: int, folder: str, make: Callable[[], Any], calls: int = 1, backend_name: str = "comm"
) -> tuple[int, str]:
    """How often models were compared, and what their passes said."""
    communicator, said = Communicator(dist.new_group()), ""
    torch.manual_seed(0)
    with mock.patch.object(checks, "run_parts", wraps=checks.run_parts) as runs:
        for model in itertools.islice(itertools.cycle([make()]), calls):
            shard, backend = bound(backend_name, folder, rank, communicator)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                try:
                    distribute(model.double(), backend=backend)
                    model.called(shard) if hasattr(model, "called") else model(shard.x, shard.adjacency)
                    if isinstance(model, Changing):
                        model.change()
                except (InputError, OSError) as error:
                    said += str(error)
            said += "".join(str(one.message) for one in warned)
            undistribute(model)
    return runs.call_count, said


class Twice(nn.Module):
    """Takes one field of the graph as several arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lin = GCNConv(5, 3), nn.Linear(5, 3)

    def forward(self, xs: list[Tensor], edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(xs[0], edge_index) + self.lin(xs[1])
        return out

    def called(self, shard: Shard) -> None:
        self([shard.x, shard.x], shard.adjacency)


class Labelled(nn.Module):
    """Knows the labels of some nodes; those of others are -1."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.labels = GCNConv(5, 3), nn.Embedding(3, 5)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor, edge_index: Tensor) -> Tensor:
        known = torch.zeros_like(x)
        known[mask] = self.labels(y[mask])
        out: Tensor = self.conv(x + known, edge_index)
        return out

    def called(self, shard: Shard) -> None:
        assert shard.y is not None
        self(shard.x, shard.y, shard.y >= 0, shard.adjacency)


class Spare(nn.Module):
    """Does more with more arguments, as models do that see no edges in training."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.conv = nn.Linear(5, 3), GCNConv(3, 3)

    def forward(self, x: Tensor, edge_index: Tensor | None = None) -> Tensor:
        out: Tensor = self.lin(x)
        return out if edge_index is None else self.conv(out, edge_index) - out.mean(0)

    def called(self, shard: Shard) -> None:
        self(shard.x)
        self(shard.x)
        self(shard.x, shard.adjacency)


def test_each_form_of_call_is_compared(parts: str, pool: RankPool) -> None:
    for runs, said in pool.run(_checked, 2, parts, Spare):
        assert runs == 3  # of the first form, of the other, and once more to find the module
        assert "the first difference is in Spare.forward (by" in said


@pytest.mark.parametrize("make", [Twice, Labelled])
def test_models_that_are_called_in_other_ways_are_compared(make: Any, parts: str, pool: RankPool) -> None:
    assert pool.run(_checked, 2, parts, make) == [(1, "")] * 2


class OddPart(nn.Module):
    """Does not run on a part, for a reason of its own."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.conv, self.error = GCNConv(5, 3), error

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if type(edge_index) is not Tensor:
            raise self.error
        out: Tensor = self.conv(x, edge_index)
        return out


def test_what_fails_on_parts_alone_is_told_in_one_line(parts: str, pool: RankPool) -> None:
    for _, said in pool.run(_checked, 2, parts, partial(OddPart, KeyError("an odd part"))):
        assert (
            "OddPart ran on a small graph on one process, and failed on a part of it: KeyError: 'an odd part' (" in said
        )
        assert "test_comparison.py:" in said
        assert "propagate" not in said


def test_a_file_that_is_missing_is_no_matter_of_parts(parts: str, pool: RankPool) -> None:
    missing = FileNotFoundError(2, "No such file or directory", "weights.pt")
    for _, said in pool.run(_checked, 2, parts, partial(OddPart, missing)):
        assert said == "[Errno 2] No such file or directory: 'weights.pt'"


def _mended(rank: int, world_size: int, folder: str, backend_name: str) -> tuple[Tensor, Tensor]:
    shard, backend = bound(backend_name, folder, rank, Communicator(dist.new_group()))
    torch.manual_seed(0)
    return shard.owned_id, distribute(SAGEConv(5, 3).double(), backend=backend)(shard.x, shard.adjacency).detach()


@backends_
@pytest.mark.parametrize("transform", [ToUndirected(), VirtualNode()], ids=lambda one: type(one).__name__)
def test_what_messages_advise_for_edges_is_exact(transform: Any, backend: str, tmp_path: Path, pool: RankPool) -> None:
    given, part = random_graph("directed")
    data = transform(Data(x=given.x, edge_index=given.edge_index))
    owner = np.append(part[2], 0)[: data.num_nodes]
    folder = tmp_path / ("replicas" if backend == "replica" else "nodes")
    write_store(data, owner, folder, num_parts=2, method="test", arguments={}, num_hops=3)
    torch.manual_seed(0)
    expected = SAGEConv(5, 3).double()(data.x, data.edge_index)
    for rows, out in pool.run(_mended, 2, str(tmp_path), backend):
        assert torch.allclose(out, expected[rows], rtol=0, atol=1e-12)


class Encodes(GCN):
    """Is called by a method of another name, as PyG's autoencoders are."""

    def encode(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.forward(x, edge_index)

    def called(self, shard: Shard) -> None:
        for _ in range(2):
            self.encode(shard.x, shard.adjacency)


def test_other_methods_than_forward_are_told(parts: str, pool: RankPool) -> None:
    (first, said), (second, other) = pool.run(_checked, 2, parts, partial(Encodes, 5, 4, num_layers=2, out_channels=3))
    assert (first, second, other) == (0, 0, "")
    assert said.count("GCNConv runs outside of a call of the model, as in model.encode(...)") == 1


class Changing(nn.Module):
    """Does something else if its configuration says so."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.config = GCNConv(5, 3), SimpleNamespace(centred=False)

    def change(self) -> None:
        self.config = SimpleNamespace(centred=True)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index)
        return out - out.mean(0) if self.config.centred else out


def test_a_model_is_compared_once_unless_it_changes(parts: str, pool: RankPool) -> None:
    assert pool.run(_checked, 2, parts, partial(GCN, 5, 4, num_layers=2, out_channels=3), 3) == [(1, "")] * 2
    for runs, said in pool.run(_checked, 2, parts, Changing, 2):
        assert runs == 3  # the second difference is traced to its module
        assert "the first difference is in Changing.forward (by" in said


def _unlike() -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return GCN(5, 4, num_layers=2, out_channels=3)


def test_ranks_with_other_parameters_are_refused(parts: str, pool: RankPool) -> None:
    for _, said in pool.run(_checked, 2, parts, _unlike):
        assert "the ranks' copies of GCN have other parameters" in said


class Nested(nn.Module):
    """The second of three modules computes over all nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Then(_as_it_is), Then(_centred, GCNConv(3, 3)), Then(_as_it_is, GCNConv(3, 3))])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, edge_index)
        return x


def _as_it_is(x: Tensor, _: Tensor) -> Tensor:
    return x


def _centred(x: Tensor, _: Tensor) -> Tensor:
    return x - x.mean(0)


def test_the_module_is_named_on_all_of_three_ranks(tmp_path: Path, pool: RankPool) -> None:
    data, part = random_graph("isolated")
    write_store(data, part[3], tmp_path / "nodes", num_parts=3, method="test", arguments={})
    for _, said in pool.run(_checked, 3, str(tmp_path), Nested):
        assert "Nested would train other numbers with backend 'comm' on 3 ranks" in said
        assert "the first difference is in 'blocks.1' (Then)" in said


class Outputs(nn.Module):
    """Puts out more than a row per node, or something else."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.conv, self.kind, self.sum = pyg.GATConv(5, 3), kind, pyg.SumAggregation()

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        out: Tensor = self.conv(x, edge_index)
        outputs: dict[str, Callable[[], Any]] = {
            "some": lambda: (out, out[x[:, 0] > 0]),
            "edges": lambda: out[edge_index[1]],
            "attention": lambda: self.conv(x, edge_index, return_attention_weights=True),
            "loss": lambda: {"out": out, "loss": self.conv.lin.weight.square().sum()},
            "loss of all rows": lambda: (out, self.sum(out.square().sum(1, keepdim=True)).sum()),
            "loss of rows": lambda: {"out": out, "loss": out.square().sum()},
            "loss in a module": lambda: (out, setattr(self.conv, "loss", out.square().mean())),
            "nested": lambda: [(out, {"hidden": out.tanh()})],
            "nothing": lambda: SimpleNamespace(out=out),
            "nan": lambda: out.acos() / 0 - out.mean(0),
        }
        return outputs[self.kind]()


@pytest.mark.parametrize("kind", ["some", "edges", "attention", "loss", "loss of all rows", "nested"])
def test_outputs_of_any_kind_are_accepted(kind: str, parts: str, pool: RankPool) -> None:
    assert pool.run(_checked, 2, parts, partial(Outputs, kind)) == [(1, "")] * 2


@pytest.mark.parametrize(
    ("kind", "said"), [("nothing", "its output has no tensor with a row"), ("nan", "infinite or NaN")]
)
def test_a_comparison_that_tells_nothing_is_no_comparison(kind: str, said: str, parts: str, pool: RankPool) -> None:
    (_, first), (_, second) = pool.run(_checked, 2, parts, partial(Outputs, kind))
    assert "trains without having been compared" in first
    assert said in first
    assert second == ""


def test_terms_of_a_loss_over_the_rows_of_a_rank_are_refused_or_told(parts: str, pool: RankPool) -> None:
    for _, said in pool.run(_checked, 2, parts, partial(Outputs, "loss of rows")):
        assert "the first difference is in 'output 1' (by" in said
        assert OVER_NODES in said
    (_, first), (_, second) = pool.run(_checked, 2, parts, partial(Outputs, "loss in a module"))
    assert "computes 'conv.loss' over the rows of each rank alone" in first
    assert second == ""


class OnOneRank(nn.Module):
    """Holds an iterator on the first rank alone, as a progress bar is one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bar = GCNConv(5, 3), iter([1]) if dist.get_rank() == 0 else None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index)
        return out


def test_no_rank_compares_alone(parts: str, pool: RankPool) -> None:
    (first, said), (second, _) = pool.run(_checked, 2, parts, OnOneRank)
    assert (first, second) == (0, 0)
    assert "OnOneRank.bar is an iterator" in said


def test_parameters_are_made_before_they_are_compared(parts: str, pool: RankPool) -> None:
    assert pool.run(_checked, 2, parts, partial(GCN, -1, 4, num_layers=2, out_channels=3), 2) == [(1, "")] * 2


def _compiled(rank: int, world_size: int, folder: str) -> bool:
    shard, backend = bound("comm", folder, rank, Communicator(dist.new_group()))
    torch.manual_seed(0)
    plain = GCN(5, 4, num_layers=2, out_channels=3).double()
    expected = distribute(copy.deepcopy(plain), backend=backend, check=False)(shard.x, shard.adjacency)
    backend.unbind()
    backend.bind(shard, Communicator(dist.new_group()))
    model = torch.compile(distribute(plain, backend=backend), backend="aot_eager")
    return torch.allclose(model(shard.x, shard.adjacency), expected)


@pytest.mark.slow
def test_a_compiled_model_is_compared(parts: str, pool: RankPool) -> None:
    assert all(pool.run(_compiled, 2, parts))


class OfThisGraph(nn.Module):
    """Runs on no graph of the size of the small one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(5, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index)
        if edge_index.size(1) == awkward_graph(2).edge_index.size(1):
            raise ValueError("expected another graph")
        return out


def test_a_model_of_one_graph_runs_with_a_warning(parts: str, pool: RankPool) -> None:
    (_, said), (_, other) = pool.run(_checked, 2, parts, OfThisGraph)
    assert "trains without having been compared" in said
    assert "there it ends with ValueError: expected another graph (" in said
    assert other == ""


class NoisyMessages(MessagePassing):
    """Adds noise to messages in training."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return cast(Tensor, self.propagate(edge_index, x=x))

    def message(self, x_j: Tensor) -> Tensor:
        return x_j + torch.randn_like(x_j) if self.training else x_j


def test_the_check_hides_no_draws_from_a_backend(parts: str, pool: RankPool) -> None:
    """A slice of columns has noise of its own, which the backend tensor finds out by drawing twice."""
    for said in pool.run(_checked, 2, parts, partial(Then, lambda x, _: x, NoisyMessages()), 1, "tensor"):
        assert "draws random numbers in its hops while it trains" in said[1]


def _fail_on_the_small_graph(edge_index: Tensor) -> float:
    if edge_index.size(1) == awkward_graph(2).edge_index.size(1):
        raise ValueError("expected another graph")
    return 1.0


class OddInTraining(nn.Module):
    """Multiplies its rows, in training, by a number."""

    def __init__(self, number: Callable[[Tensor], float]) -> None:
        super().__init__()
        self.conv, self.number = GCNConv(5, 3), number

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index)
        return out * self.number(edge_index) if self.training else out


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (lambda _: random.random(), "training draws other random numbers each time"),
        (lambda _: np.random.rand(), "training draws other random numbers each time"),  # noqa: NPY002 (as models do)
        (_fail_on_the_small_graph, "training ends with ValueError: expected another graph ("),
    ],
)
def test_training_that_cannot_be_compared_is_told(
    number: Callable[[Tensor], float], reason: str, parts: str, pool: RankPool
) -> None:
    (_, first), (_, second) = pool.run(_checked, 2, parts, partial(OddInTraining, number))
    assert "OddInTraining was compared with one process on a small graph in evaluation alone" in first
    assert reason in first
    assert second == ""


def _unchecked(rank: int, world_size: int, folder: str) -> bool:
    shard, backend = bound("comm", folder, rank, Communicator(dist.new_group()))
    torch.manual_seed(0)
    model = distribute(WRONG["mean"][0]().double(), backend=backend, check=False)
    return bool(model(shard.x, shard.adjacency).isfinite().all())


def test_the_check_can_be_left_out(parts: str, pool: RankPool) -> None:
    assert all(pool.run(_unchecked, 2, parts))


def test_one_process_is_its_own_reference(tmp_path: Path) -> None:
    data, part = random_graph("directed")
    write_store(data, part[1], tmp_path / "parts", num_parts=1, method="test", arguments={})
    shard, backend = Shard.load(tmp_path / "parts", 0), resolve_backend("comm")
    backend.bind(shard, Communicator())
    with mock.patch.object(checks, "run_whole", side_effect=AssertionError("nothing to compare with")):
        distribute(WRONG["mean"][0]().double(), backend=backend)(shard.x, shard.adjacency)
