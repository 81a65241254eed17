"""Ranks that run a model in other ways: all raise one error that says which rank is where, long before any timeout."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_geometric.nn import GCN, BatchNorm, GCNConv, GraphConv, MeanAggregation

from pygdist.backends import ReplicaBackend, resolve_backend
from pygdist.comm import Communicator
from pygdist.comm.process import watch
from pygdist.errors import InputError
from pygdist.graph import Adjacency, Shard, write_store
from pygdist.kernels import CSR
from pygdist.routing import distribute
from pygdist.testing import RankPool, random_graph
from tests.turns import by_turns

pytestmark = pytest.mark.slow
BACKENDS = ["comm", "cache", "hybrid", "tensor"]


@pytest.fixture
def store(tmp_path: Path) -> str:
    data, parts = random_graph("directed")
    write_store(data, parts[2], tmp_path / "parts", num_parts=2, method="x", arguments={}, notes=[])
    return str(tmp_path / "parts")


def _evaluate(model: nn.Module, inputs: dict[str, Any]) -> None:
    model.eval()


def _evaluate_one(model: nn.Module, inputs: dict[str, Any]) -> None:
    model.get_submodule("act").eval()


def _freeze(model: nn.Module, inputs: dict[str, Any]) -> None:
    model.get_parameter("convs.0.lin.weight").requires_grad_(False)


def _no_weight(model: nn.Module, inputs: dict[str, Any]) -> None:
    inputs["edge_weight"] = None


def _other_dtype(model: nn.Module, inputs: dict[str, Any]) -> None:
    inputs["x"] = inputs["x"].float()


CHANGES: dict[Callable[[nn.Module, dict[str, Any]], None], str] = {
    _evaluate: "rank 0 is in training, rank 1 is in evaluation: all ranks must run GCN in the same way",
    _evaluate_one: "rank 0 is in training, rank 1 is in training, but not act: all ranks",
    _freeze: "rank 0 has no frozen parameters, rank 1 has frozen convs.0.lin.weight: all ranks",
    _no_weight: "rank 0 gives edge_weight: tensor of torch.float64, 1 dimensions, rank 1 gives edge_weight: None",
    _other_dtype: "rank 1 gives x: tensor of torch.float32, 2 dimensions: all ranks",
}


def _other_graph(rank: int, world_size: int, store: str, backend: str, both: bool) -> str:
    """What a model says of the edges of a graph with other sources, on both ranks or on one."""
    bound, shard = resolve_backend(backend), Shard.load(store, rank)
    bound.bind(shard, Communicator(dist.new_group()))
    model = distribute(GCN(5, 8, 2, 3).double(), backend=bound)
    assert model(shard.x, copy.deepcopy(shard.adjacency)).isfinite().all()
    csr = shard.adjacency.csr()
    other = Adjacency.from_csr(CSR(csr.indptr, csr.index.flip(0), csr.num_cols))
    try:
        model(shard.x, other if both or rank == 1 else shard.adjacency)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("backend", ["comm", "tensor"])
def test_edges_of_another_graph_are_refused(backend: str, store: str, pool: RankPool) -> None:
    """Halo rows would be those of other nodes."""
    for said in pool.run(_other_graph, 2, store, backend, True):
        assert "GCN gets the edges of another graph" in said
    for said in pool.run(_other_graph, 2, store, backend, False):
        assert "rank 0 gets the edges of its graph, rank 1 gets the edges of another graph" in said


def _changed(rank: int, world_size: int, store: str, backend: str, change: Any) -> tuple[str, float]:
    bound, shard = resolve_backend(backend), Shard.load(store, rank)
    bound.bind(shard, Communicator(dist.new_group()))
    torch.manual_seed(0)
    model = distribute(GCN(5, 8, 2, 3, norm="batch_norm", dropout=0.5).double(), backend=bound, check=False)
    inputs = {"x": shard.x, "edge_index": shard.adjacency, "edge_weight": shard.edge_weight}
    model(**inputs).sum().backward()
    if rank == 1:
        change(model, inputs)
    began, said = time.monotonic(), ""
    try:
        model(**inputs).sum().backward()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return said, time.monotonic() - began


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_rank_runs_the_model_in_another_way(backend: str, change: Any, store: str, pool: RankPool) -> None:
    for said, took_s in pool.run(_changed, 2, store, backend, change):
        assert said.startswith("InputError: ")
        assert CHANGES[change] in said
        assert took_s < 10


class Flagged(nn.Module):
    """Takes a flag, in a dictionary, which asks for something that a rank cannot compute."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(5, 3)

    def forward(self, x: Tensor, edge_index: Tensor, options: dict[str, Any]) -> Tensor:
        out: Tensor = self.conv(x, edge_index)
        return out - out.mean(0) if options["centred"] else out


def _flagged(rank: int, world_size: int, store: str, backend: str, flags: list[bool]) -> str:
    bound, shard = resolve_backend(backend), Shard.load(store, rank)
    bound.bind(shard, Communicator(dist.new_group()))
    torch.manual_seed(0)
    model = distribute(Flagged().double(), backend=bound)
    model(shard.x, shard.adjacency, {"centred": False})
    try:
        model(shard.x, shard.adjacency, {"centred": flags[rank]})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_flags_are_equal_on_all_ranks_and_compared_anew(backend: str, store: str, pool: RankPool) -> None:
    for said in pool.run(_flagged, 2, store, backend, [False, True]):
        assert said.startswith("InputError: rank 0 gives centred: False, rank 1 gives centred: True: all ranks")
    for said in pool.run(_flagged, 2, store, backend, [True, True]):
        assert said.startswith("InputError: Flagged would train other numbers")
    assert pool.run(_flagged, 2, store, backend, [False, False]) == ["", ""]


class OnOneRank(nn.Module):
    """Does something where the rank's rows are below a limit; the values stay the same, or change on all ranks alike.

    Args:
        kind: Its name.
        norm: The layers normalise the weights of edges.
    """

    def __init__(self, kind: str, norm: bool) -> None:
        super().__init__()
        self.kind = kind
        self.convs = nn.ModuleList([GCNConv(5, 5) if norm else GraphConv(5, 5) for _ in range(2)])

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        if bool((x < -1.0).any()):
            match self.kind:
                case "copy":
                    x = x.clone()
                case "view":
                    x = x[:]
                case "graded":
                    x = x.detach().clone().requires_grad_()
                case "graded-weight":
                    edge_weight = edge_weight.detach().clone().requires_grad_()
                case "converted":
                    x = x.float().double()
                case "written":
                    x = x.clone()
                    x += 0.0
                case "weight-copy":
                    edge_weight = edge_weight.clone()
                case "fewer-edges":
                    keep = edge_weight > 0.3
                    edge_index, edge_weight = edge_index[:, keep], edge_weight[keep]
                case "no-weight":
                    edge_weight = None  # type: ignore[assignment]
        for conv in self.convs:
            x = conv(x, edge_index, edge_weight)
        return x


def _on_one_rank(rank: int, world_size: int, store: str, backend: str, kind: str, norm: bool, data: Any) -> Any:
    bound, shard, worst = resolve_backend(backend), Shard.load(store, rank), 0.0
    bound.bind(shard, Communicator(dist.new_group()))
    watch().lost_after_s = 8.0
    torch.manual_seed(0)
    plain = OnOneRank(kind, norm).double()
    model = distribute(copy.deepcopy(plain), backend=bound, check=False)
    for training in (True, True, True, False, True):
        try:
            with torch.set_grad_enabled(training):
                out = model(shard.x, shard.adjacency, shard.edge_weight)
            if training:
                out.sum().backward()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        expected = plain(data.x, data.edge_index, data.edge_weight)
        worst = max(worst, float((out - expected[shard.owned_id]).abs().max()))
    return worst


@pytest.mark.parametrize(
    ("kind", "backend"),
    by_turns(
        2,
        ["copy", "view", "graded", "graded-weight", "converted", "written", "weight-copy", "fewer-edges", "no-weight"],
        BACKENDS,
    ),
)
def test_what_one_rank_alone_does_to_its_tensors(kind: str, backend: str, tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph("directed")
    data.x = data.x.float().double()
    first = torch.from_numpy(parts[2]) == 0
    data.x[first] = data.x[first].abs()  # rank 0 sees nothing below the limit
    write_store(data, parts[2], tmp_path / "parts", num_parts=2, method="x", arguments={}, notes=[])
    norm = "weight" in kind
    results = pool.run(_on_one_rank, 2, str(tmp_path / "parts"), backend, kind, norm, data)
    if isinstance(results[0], str):
        assert kind in ("fewer-edges", "no-weight"), results
        assert results[0] == results[1]
        assert results[0].startswith("InputError: ")
        assert backend in ("cache", "hybrid") or ", rank 1 gives edge_" in results[0]
    else:
        assert max(results) < 1e-10


# -- passes that rows decide on --------------------------------------------------------------------------------------


class Deciding(nn.Module):
    """Decides on its layers by rows: those that a rank sees, or, where ``whole``, a mean of all nodes.

    Args:
        kind: Its name.
        whole: Decide by all nodes.
    """

    def __init__(self, kind: str, whole: bool = False) -> None:
        super().__init__()
        self.kind, self.readout = kind, MeanAggregation() if whole else None
        self.first, self.again, self.last = GCNConv(5, 4), GCNConv(4, 4), GCNConv(4, 3)
        self.norm, self.other = BatchNorm(4), BatchNorm(4)

    def _seen(self, x: Tensor) -> Tensor:
        return x[:2].mean(0) if self.readout is None else self.readout(x)[0]

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h, seen = self.first(x, edge_index), self._seen(x)
        match self.kind:
            case "while":
                change = seen.sum() + 2.5
                while change > 1.0:
                    h, change = self.again(h, edge_index).tanh(), change - 1.0
            case "for":
                for _ in range(2 + 2 * int(seen[0].sigmoid().round())):
                    h = self.again(h, edge_index).tanh()
            case "if":
                h = self.again(h, edge_index) if seen.mean() > 0 else h
            case "either-norm":
                h = self.norm(h) if seen.mean() > 0 else self.other(h)
        out: Tensor = self.last(h, edge_index)
        return out


DECISIONS = ["while", "for", "if", "either-norm"]
ADVICE = "by what MeanAggregation() or SumAggregation(), as a module of the model, makes of"


@pytest.fixture(scope="module")
def deciding(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """A graph on which rank 0 decides otherwise than the others, and a folder of its parts."""
    data, parts = random_graph("directed")
    folder = tmp_path_factory.mktemp("deciding")
    for size in (2, 3):
        data.x = _features(data, size)
        for placement, hops in (("nodes", 1), ("replicas", 3)):
            write_store(
                data, parts[size], folder / f"{size}-{placement}", num_parts=size, method="x", arguments={}, notes=[],
                placement=placement, num_hops=hops,
            )  # fmt: skip
    return data, str(folder)


def _decided(rank: int, world_size: int, folder: str, name: str, kinds: list[str], whole: bool, check: bool) -> Any:
    """What two steps of each model say, or how far a pass is from one process."""
    placement = "replicas" if name == "replica" else "nodes"
    shard, said = Shard.load(f"{folder}/{world_size}-{placement}", rank), {}
    watch().beat_s, watch().lost_after_s = 0.3, 8.0
    for kind in kinds:
        bound = ReplicaBackend(hops=3) if name == "replica" else resolve_backend(name)
        bound.bind(shard, Communicator(dist.new_group()))
        torch.manual_seed(0)
        plain = Deciding(kind, whole).double()
        model = distribute(copy.deepcopy(plain), backend=bound, check=check)
        began = time.monotonic()
        try:
            for _ in range(2):
                out = model(shard.x, shard.adjacency)
                out.square().sum().backward()
            said[kind] = shard.owned_id, out.detach(), [one.grad for one in model.parameters()]
        except Exception as error:
            said[kind] = f"{type(error).__name__}: {error}"
        assert time.monotonic() - began < 30
    return said


@pytest.mark.parametrize(("backend", "world_size"), by_turns(2, [*BACKENDS, "replica"], [2, 3]))
def test_the_check_tells_of_passes_that_rows_decide_on(
    backend: str, world_size: int, deciding: tuple[Any, str], pool: RankPool
) -> None:
    """By the line of the condition, or of the number of steps."""
    for told in pool.run(_decided, world_size, deciding[1], backend, DECISIONS, False, True):
        for kind in DECISIONS:
            assert ADVICE in told[kind], (kind, told[kind])
            assert len(told[kind]) < 660  # the command line cuts longer lines
            assert re.match(r"InputError: Deciding .* decides by rows .*test_agreement.py:\d+\)", told[kind])


@pytest.mark.parametrize(("backend", "kind"), by_turns(2, BACKENDS, DECISIONS))
def test_ranks_are_told_of_passes_that_rows_decide_on(
    backend: str, kind: str, deciding: tuple[Any, str], pool: RankPool
) -> None:
    """Without the check: by the exchange in which they would meet, or by the watchdog."""
    for told in pool.run(_decided, 2, deciding[1], backend, [kind], False, False):
        assert told[kind].startswith("UnequalRanksError: the ranks are at different places of the model: rank 0: ")
        assert ADVICE in told[kind]
        assert ("'norm" if kind == "either-norm" else "propagate 2" if kind == "if" else "'again', GCN") in told[kind]


@pytest.mark.parametrize(("backend", "world_size"), by_turns(2, BACKENDS, [2, 3]))
def test_passes_that_all_nodes_decide_on_are_exact(
    backend: str, world_size: int, deciding: tuple[Any, str], pool: RankPool
) -> None:
    data, folder = deciding
    ranks = pool.run(_decided, world_size, folder, backend, DECISIONS, True, True)
    for kind in DECISIONS:
        torch.manual_seed(0)
        plain = Deciding(kind, whole=True).double()
        data_x = _features(data, world_size)
        for _ in range(2):
            expected = plain(data_x, data.edge_index)
            expected.square().sum().backward()
        for told in ranks:
            assert not isinstance(told[kind], str), told[kind]
            rows, out, _ = told[kind]
            torch.testing.assert_close(out, expected[rows].detach(), rtol=0, atol=1e-10)
        for at, one in enumerate(plain.parameters()):
            shares = [told[kind][2][at] for told in ranks]
            if one.grad is None:
                assert shares == [None] * world_size
            else:
                torch.testing.assert_close(sum(shares), one.grad, rtol=0, atol=1e-10)


def _features(data: Any, world_size: int) -> Tensor:
    """The features of the graph that has so many parts."""
    of_first = torch.from_numpy(random_graph("directed")[1][world_size]) == 0
    return torch.where(of_first[:, None], data.x.abs(), -data.x.abs())
