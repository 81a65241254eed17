"""``hybrid``: whatever is chosen is exact; the choice is that of the paper's greedy algorithm, done plainly."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Linear
from torch_geometric.nn import GAT, GCN, GraphSAGE, MessagePassing

from pygdist.backends import CommBackend, Costs, HybridBackend, Savings
from pygdist.backends.planning import greedy
from pygdist.backends.planning import kept_plans as plans
from pygdist.backends.planning.expected import EpochCosts, _followed, expected_epoch
from pygdist.backends.planning.greedy import Halo, greedy_choice
from pygdist.backends.planning.hop_costs import HopCosts
from pygdist.backends.planning.kept_plans import Plan, _similar, load_plan, save_plan
from pygdist.backends.planning.network import Network
from pygdist.backends.recomputing.rows import replicas_of
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard, write_store
from pygdist.graph.neighbourhood import Neighbourhood
from pygdist.native import load
from pygdist.routing import distribute
from pygdist.testing import RankPool, assert_exact, random_graph

needs_native = pytest.mark.skipif(load() is None, reason="hybrid plans in the native library")

LAYERS = ["GCNConv", "GATConv", "SAGEConv-max", "GINEConv", "APPNP", "TAGConv", "SAGEConv-jk", "BatchNorm"]


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize(
    "backend",
    [HybridBackend(costs=Costs(vertex=1.0, edge=1.0, value=6.0)), HybridBackend(cache_ratio=0.5, memory_gib=1e-5)],
    ids=["costs", "little-memory"],
)
def test_any_choice_equals_one_process(backend: HybridBackend, num_layers: int, pool: RankPool) -> None:
    assert_exact(backend, layers=LAYERS, world_sizes=[3], graphs=["power-law"], num_layers=num_layers, pool=pool)


def _near(rng: np.random.Generator, owned: int, halo: int, beyond: int) -> Neighbourhood:
    """Owned rows read the halo, the halo reads anything; rows beyond have no edges here."""
    num_rows = owned + halo + beyond
    degree = np.concatenate([rng.integers(0, 6, owned + halo), np.zeros(beyond, dtype=np.int64)])
    indptr = np.concatenate([[0], np.cumsum(degree)])
    return Neighbourhood(
        n_id=torch.arange(num_rows),
        owner=torch.zeros(num_rows, dtype=torch.int64),
        num_hops=3,
        indptr=torch.from_numpy(indptr),
        index=torch.from_numpy(rng.integers(0, num_rows, indptr[-1])),
        start=torch.from_numpy(indptr[:-1]),
    )


def _plainly(halo: Halo, costs: Costs) -> Tensor:
    """Algorithm 4 as it is written, with sets."""
    indptr, index, owned, widths = halo.around.indptr.tolist(), halo.around.index.tolist(), halo.num_owned, halo.widths
    replicas: list[set[int]] = [set() for _ in widths]

    def below(row: int, level: int) -> list[set[int]]:
        """New rows at each level from ``level`` down: those of a row that is there are there."""
        rows = [set() for _ in range(level + 1)]
        rows[level] = {row} - replicas[level]
        for at in range(level, 0, -1):
            for one in rows[at]:
                rows[at - 1] |= {one, *index[indptr[one] : indptr[one + 1]]}
            rows[at - 1] = {one for one in rows[at - 1] if one >= owned} - replicas[at - 1]
        return rows

    def cost(rows: list[set[int]]) -> float:
        return sum(
            (costs.vertex + (indptr[row + 1] - indptr[row]) * costs.edge) * widths[at - 1]
            for at in range(1, len(rows))
            for row in rows[at]
        )

    chosen = torch.zeros(len(widths), halo.num_halo, dtype=torch.bool)
    for hop, width in enumerate(widths):
        fetch = costs.value * width
        first = [cost(below(owned + row, hop)) for row in range(halo.num_halo)]
        for row in sorted(range(halo.num_halo), key=first.__getitem__):
            rows = below(owned + row, hop)
            if cost(rows) < fetch:
                chosen[hop, row] = True
                for level, new in enumerate(rows):
                    replicas[level] |= new
    return chosen


def _greedy(halo: Halo, costs: Costs, share: float | None = None, memory_gib: float | None = None) -> Tensor:
    """The halo rows that are chosen, ``(hops, num_halo)``; rows beyond them never are."""
    chosen = greedy_choice(halo, costs.by_hop(halo.widths), value_bytes=1, share=share, memory_gib=memory_gib)
    assert chosen.sum() == chosen[:, halo.rows].sum()
    return chosen[:, halo.rows]


@pytest.mark.parametrize("ratio", [0, 1])
def test_all_or_none_are_chosen_without_the_native_library(ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greedy, "require", lambda *_: pytest.fail("the native library is asked for"))
    halo = Halo(_near(np.random.default_rng(5), owned=9, halo=20, beyond=12), 9, 20, (3, 3))
    assert (_greedy(halo, Costs(vertex=1.0, edge=1.0, value=0.0), share=ratio) == bool(ratio)).all()
    checked = HybridBackend(cache_ratio=ratio).exact_case(2)
    assert isinstance(checked, HybridBackend)
    assert checked.cache_ratio == ratio


@needs_native
@pytest.mark.parametrize("widths", [(4,), (4, 3), (2, 5, 3)])
def test_the_choice_is_that_of_the_greedy_algorithm(widths: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(widths))
    some = 0
    for value in (0.0, 3.0, 10.0, 40.0, 1e9):
        halo = Halo(_near(rng, owned=9, halo=17, beyond=12), 9, 17, widths)
        costs = Costs(vertex=1.0, edge=0.5, value=value)
        chosen = _greedy(halo, costs)
        # rows of equal cost may be taken in another order where costs beyond the limit are not told apart
        assert torch.equal(chosen, _plainly(halo, costs))
        some += 0 < chosen[-1].sum() < 17
    assert some or len(widths) == 1


@needs_native
def test_a_share_takes_the_cheapest() -> None:
    halo = Halo(_near(np.random.default_rng(5), owned=9, halo=20, beyond=12), 9, 20, (3, 3))
    chosen = _greedy(halo, Costs(vertex=1.0, edge=1.0, value=0.0), share=0.25)
    assert chosen.sum(1).tolist() == [5, 5]
    degree = halo.around.indptr.diff()[halo.rows]
    assert degree[chosen[1] == 1].max() <= degree[chosen[1] == 0].min()


@needs_native
def test_a_share_of_a_dense_graph_is_chosen_without_walking_all_of_it_for_each_row() -> None:
    rng = np.random.default_rng(0)
    owned, halo, degree = 10, 4000, 300  # 3 hops below a row: 1.2 M edges, and that 4000 times
    num_rows = owned + halo
    around = Neighbourhood(
        n_id=torch.arange(num_rows),
        owner=torch.zeros(num_rows, dtype=torch.int64),
        num_hops=3,
        indptr=torch.arange(num_rows + 1) * degree,
        index=torch.from_numpy(rng.integers(0, num_rows, num_rows * degree)),
        start=torch.arange(num_rows) * degree,
    )
    costs = Costs(vertex=1.0, edge=1.0, value=0.0)
    chosen = _greedy(Halo(around, owned, halo, (3, 3, 3)), costs, share=0.5)
    assert chosen.sum(1).tolist() == [2000, 2000, 2000]


@needs_native
def test_no_more_than_the_memory_holds() -> None:
    halo = Halo(_near(np.random.default_rng(5), owned=9, halo=20, beyond=12), 9, 20, (12, 12))
    costs = Costs(vertex=0.0, edge=0.0, value=1.0)
    row_bytes = 3 * 12  # the row, its gradient and what a layer keeps for it
    for memory_gib, count in ((None, 40), (20 * row_bytes / 2**30, 20), (0.0, 0)):
        assert _greedy(halo, costs, memory_gib=memory_gib).sum() == count


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"cache_ratio": 1.5}, r"cache_ratio is 1.5, expected a number from 0 \(fetch all\)"),
        ({"cache_ratio": 0.5, "memory_gib": -1}, "memory_gib is -1, expected a number of GiB, 0 or more"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, float], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        HybridBackend(**arguments)


def test_costs_that_make_no_sense() -> None:
    with pytest.raises(InputError, match="costs: vertex, edge and value must be finite numbers of seconds"):
        Costs(vertex=-1.0, edge=0.0, value=0.0)


def _plan(
    rank: int, world_size: int, folder: str, arguments: dict[str, Any], same_network: bool = False
) -> dict[str, Any]:
    """What is expected of a plan; with it rows are as with everything fetched."""
    torch.set_num_threads(1 + rank % 2)  # ranks need not be alike
    if same_network:  # so few rows tell little of how fast it is
        plans._similar = lambda before, now: True
    shard = Shard.load(folder, rank)
    outputs, expected = [], {}
    for backend in (HybridBackend(**arguments), CommBackend()):
        backend.bind(shard, Communicator(dist.new_group()))
        torch.manual_seed(0)
        model = GraphSAGE(shard.x.size(1), 8, 2, 4, dropout=0.5, norm="BatchNorm").double()
        distribute(model, backend=backend, check=False)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model.eval()
        generator = torch.get_rng_state()
        with torch.no_grad():
            out = model(shard.x, shard.adjacency)
        assert torch.equal(torch.get_rng_state(), generator)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert not any(module.training for module in model.modules())
        assert all(parameter.grad is None for parameter in model.parameters())
        outputs.append(out)
        if isinstance(backend, HybridBackend):
            assert backend.expected is not None
            expected = asdict(backend.expected)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-10)
    torch.set_num_threads(1)
    plans._similar = _similar
    return expected


def test_a_kept_plan_is_taken_on_a_network_as_fast_as_it_was(tmp_path: Path) -> None:
    path, alone = tmp_path / "plans" / "key", Communicator()
    chosen = torch.stack([torch.arange(19) % 3 == 0, torch.arange(19) % 2 == 0])
    save_plan(path, 0, Plan(chosen, {"value_s": 2e-9, "choice": "the best"}))
    for value_s, taken in ((2e-9, True), (3e-9, True), (1.1e-9, True), (5e-9, False), (0.9e-9, False)):
        assert (load_plan(path, alone, 2, 19, value_s) is not None) == taken
    plan = load_plan(path, alone, 2, 19, 2e-9)
    assert plan is not None
    assert torch.equal(plan.chosen, chosen)
    assert plan.facts == {"value_s": 2e-9, "choice": "the best"}
    # not what was made for another model, nor what broke off
    assert load_plan(path, alone, 3, 19, 2e-9) is None
    assert load_plan(path.with_name("other"), alone, 2, 19, 2e-9) is None
    assert load_plan(path, alone, 2, 20, 2e-9) is None
    whole = (tmp_path / "plans" / "key.0.npz").read_bytes()
    for broken in (b"half", whole[: len(whole) // 2]):
        (tmp_path / "plans" / "key.0.npz").write_bytes(broken)
        assert load_plan(path, alone, 2, 19, 2e-9) is None


@needs_native
@given(seed=st.integers(0, 2**16), hops=st.integers(1, 3))
def test_what_is_planned_for_is_what_is_made(seed: int, hops: int) -> None:
    rng = np.random.default_rng(seed)
    around = _near(rng, owned=9, halo=17, beyond=12)
    halo = Halo(around, 9, 17, (1,) * hops)
    chosen = halo.choice(torch.from_numpy(rng.random((hops, 17)) < 0.4))
    needed, edges, edges_from_here = _followed(halo, chosen)
    made = replicas_of(around, 9, list(chosen))
    assert torch.equal(needed, torch.stack(made))
    for hop in range(1, hops + 1):
        computed = (torch.arange(38) < 9) | made[hop]
        target = torch.repeat_interleave(torch.arange(38), around.indptr.diff())
        here = (around.index < 9) | made[hop - 1][around.index]
        assert edges[hop - 1] == int(computed[target].sum())
        assert edges_from_here[hop - 1] == int((computed[target] & here).sum())


@pytest.mark.slow
@needs_native
def test_costs_are_measured_once_and_the_plan_is_kept(tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph("power-law", num_nodes=300)
    write_store(data, parts[3], tmp_path / "parts", num_parts=3, method="x", arguments={}, notes=[])
    first = pool.run(_plan, 3, str(tmp_path / "parts"), {})
    assert first[0] == first[1] == first[2]
    assert first[0]["epoch_s"] > 0
    assert len(first[0]["computed"]) == 2
    files = sorted(path.name for path in (tmp_path / "parts" / "plans").iterdir())
    (summary,) = [name for name in files if name.endswith(".json")]
    assert files == [*(summary.replace("json", f"{rank}.npz") for rank in range(3)), summary]
    facts = json.loads((tmp_path / "parts" / "plans" / summary).read_text())
    assert facts["expected"] == {**first[0], "computed": list(first[0]["computed"])}
    assert facts["ranks"] == 3
    assert facts["timed"]["passes"] == [1, 2]  # features need no gradient

    # the next run takes it; one asks for a new one
    path = tmp_path / "parts" / "plans" / summary
    path.write_text(json.dumps({**facts, "timed": {**facts["timed"], "row": [1.0, 0.0, 0.0]}}))
    again = pool.run(_plan, 3, str(tmp_path / "parts"), {}, True)
    assert again[0]["epoch_s"] > 50  # the largest part has so many rows, and more
    assert again[0] == again[1] == again[2]
    assert pool.run(_plan, 3, str(tmp_path / "parts"), {"replan": True})[0]["epoch_s"] < 50

    # another model or rank is another plan; one that broke off is no plan
    (tmp_path / "parts" / "plans" / summary).write_text("{")
    assert pool.run(_plan, 3, str(tmp_path / "parts"), {})[0]["epoch_s"] < 50
    pool.run(_plan, 3, str(tmp_path / "parts"), {"memory_gib": 1.0})
    assert len(list((tmp_path / "parts" / "plans").glob("*.json"))) == 2


def _first_hop(rank: int, world_size: int, folder: str, mib: float) -> tuple[float, int]:
    """Seconds of an edge in the first hop, as planned with, and bytes that training then keeps of it."""
    backend = HybridBackend()
    backend.bind(Shard.load(folder, rank), Communicator(dist.new_group()))
    model = GCN(5, 40, num_layers=2, out_channels=4).double()
    distribute(model, backend=backend, savings=Savings(first_hop_mib=mib), check=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it does not fit
        for _ in range(2):
            model(backend.shard.x, backend.shard.adjacency).sum().backward()
    (plan,) = [json.loads(path.read_text()) for path in (Path(folder) / "plans").glob("*.json")]
    return plan["costs"]["edge"][0], backend.kept_bytes


@needs_native
@pytest.mark.parametrize("kept", [True, False])
def test_a_first_hop_too_large_to_be_kept_is_planned_as_such(kept: bool, tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph("power-law", num_nodes=9000)
    write_store(data, parts[2], tmp_path / "parts", num_parts=2, method="x", arguments={}, notes=[])
    # what fits for the first few rows that are tried does not for all
    mib = 64 if kept else 5 * 8 * 1500 / 2**20
    for cost, kept_bytes in pool.run(_first_hop, 2, str(tmp_path / "parts"), mib):
        assert (cost == 0, kept_bytes > 0) == (kept, kept)


def _exchanges(rank: int, world_size: int, folder: str, name: str) -> tuple[list[int], int]:
    """How many exchanges the hops of a plan have, and how many are made in a forward pass where all is fetched."""
    hybrid, comm = HybridBackend(replan=True), CommBackend()
    for backend in (hybrid, comm):
        backend.bind(Shard.load(folder, rank), Communicator(dist.new_group()))
        layers = {"GCN": GCN, "GAT": GAT, "GATv2": partial(GAT, v2=True)}[name]
        model = distribute(
            layers(5, 8, num_layers=2, out_channels=4).double(),
            backend=backend,
            savings=Savings(first_hop=False),
            check=False,
        )
        for _ in range(2):  # in the first, GCN's weights are exchanged too
            backend.communicator.meter.reset()
            model(backend.shard.x, backend.shard.adjacency)
    (plan,) = [json.loads(path.read_text()) for path in (Path(folder) / "plans").glob("*.json")]
    return plan["timed"]["exchanges"], comm.communicator.meter.read().calls


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize(("name", "expected"), [("GCN", [1, 1]), ("GAT", [2, 2]), ("GATv2", [1, 1])])
def test_hops_have_as_many_exchanges_as_they_make(
    name: str, expected: list[int], tmp_path: Path, pool: RankPool
) -> None:
    data, parts = random_graph("power-law", num_nodes=300)
    write_store(data, parts[2], tmp_path / "parts", num_parts=2, method="x", arguments={}, notes=[])
    for planned, made in pool.run(_exchanges, 2, str(tmp_path / "parts"), name):
        assert planned == expected
        assert made == sum(expected)


@needs_native
def test_the_expected_epoch_follows_the_costs() -> None:
    """Worked out by hand for one rank beside another that wants nothing."""
    around = Neighbourhood(  # 2 owned rows, 2 of the halo; row 3 reads row 2
        n_id=torch.arange(4),
        owner=torch.tensor([0, 0, 0, 0]),
        num_hops=2,
        indptr=torch.tensor([0, 2, 3, 3, 4]),
        index=torch.tensor([2, 3, 0, 2]),
        start=torch.tensor([0, 2, 3, 3]),
    )
    halo = Halo(around, 2, 2, (1, 1))
    costs = EpochCosts(
        hops=HopCosts(row=(1.0, 10.0, 100.0), edge=(2.0, 20.0), fetch=(3.0, 30.0)),
        network=Network(value_s=0.1, latency_s=0.5, busy=0.0),
        other_s=1000.0,
        overlap=False,
    )
    nothing, third = halo.choice(False), halo.choice(torch.tensor([[False, False], [False, True]]))
    fetched = expected_epoch(Communicator(), halo, nothing, costs)
    assert fetched.compute_s == 2 * (1 + 10 + 100) + 3 * (2 + 20)
    assert fetched.exchange_s == 2 * (3 + 30) + 2 * 0.5
    assert fetched.epoch_s == fetched.compute_s + fetched.exchange_s + 1000
    # row 3 is computed after hop 1: it, its edge, and below it rows 2 and 3 of features
    again = expected_epoch(Communicator(), halo, third, costs)
    assert again.compute_s == fetched.compute_s + 2 * 1 + 10 + 2
    assert again.exchange_s == 30 + 0.5
    assert again.computed == (0.0, 0.5)
    # below row 3 are two more rows, on which the model works after hop 2 too where rows of several depths meet
    meeting = expected_epoch(Communicator(), halo, third, replace(costs, shrinks=False))
    assert meeting.compute_s == again.compute_s + 1 * 10 + 2 * 100
    # of hop 1 one edge, of hop 2 one needs nothing to arrive
    overlapping = replace(costs, overlap=True)
    hidden = expected_epoch(Communicator(), halo, nothing, overlapping)
    assert hidden.epoch_s == fetched.epoch_s - min(2, 6.5) - min(20, 60.5)
    # nor does anything hide what a hop exchanges before its rows
    before = expected_epoch(Communicator(), halo, nothing, replace(overlapping, exchanges=(2, 1)))
    assert before.epoch_s == hidden.epoch_s + 0.5
    # what the exchange computes itself is in nothing's shadow
    busy = expected_epoch(Communicator(), halo, nothing, replace(overlapping, network=replace(costs.network, busy=0.9)))
    assert busy.epoch_s == pytest.approx(fetched.epoch_s - 0.65 - 6.05)


def _traffic(rank: int, world_size: int, folder: str, ratio: float) -> tuple[int, list[list[int]]]:
    """Bytes that a rank sends in an epoch; for each hop the nodes that it chose to compute again."""
    communicator, shard = Communicator(dist.new_group()), Shard.load(folder, rank)
    backend = HybridBackend(cache_ratio=ratio)
    backend.bind(shard, communicator)
    chosen: list[list[int]] = []
    choose = backend.choose

    def noted(around: Neighbourhood, widths: tuple[int, ...], probe: Any) -> list[torch.Tensor]:
        masks = choose(around, widths, probe)
        chosen.extend(around.n_id[mask].tolist() for mask in masks)
        return masks

    backend.choose = noted  # type: ignore[method-assign]
    torch.manual_seed(0)
    model = GCN(5, 6, num_layers=3, out_channels=4).double()
    distribute(model, backend=backend, savings=Savings(first_hop=False), check=False)
    for _ in range(2):
        communicator.meter.reset()
        model(shard.x, shard.adjacency).sum().backward()
    return communicator.meter.read().sent_bytes, chosen


@needs_native
@pytest.mark.parametrize("ratio", [0.0, 0.4, 1.0])
def test_bytes_are_those_of_the_rows_that_are_fetched(ratio: float, tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph("power-law", num_nodes=200)
    write_store(data, parts[3], tmp_path / "parts", num_parts=3, method="x", arguments={}, notes=[])
    sources: dict[int, set[int]] = {}
    for source, target in data.edge_index.t().tolist():
        sources.setdefault(target, set()).add(source)
    ranks = pool.run(_traffic, 3, str(tmp_path / "parts"), ratio)
    expected = 0
    for rank, (_, chosen) in enumerate(ranks):
        owned = set((parts[3] == rank).nonzero()[0].tolist())
        halo = set().union(*(sources.get(node, set()) for node in owned)) - owned
        needed: set[int] = set()  # of others' rows, after the hop
        for hop, width in zip((3, 2, 1), (4, 6, 5), strict=True):  # on the narrower side of each weight
            needed |= {*chosen[hop - 1]}.union(*(sources.get(node, set()) for node in needed)) - owned
            # gradients of what was fetched go back, but for features
            expected += len(halo - needed) * width * 8 * (2 if hop > 1 else 1)
        if ratio == 0.4:
            assert 0 < len(chosen[2]) < len(halo)
    assert sum(sent for sent, _ in ranks) == expected
    assert (expected > 0) == (ratio < 1)


class EdgesOnly(MessagePassing):
    """Sums what edges bring, and reads nothing of their sources."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = Linear(4, 3)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x, edge_attr=self.lin(edge_attr))
        return out

    def message(self, x_i: Tensor, edge_attr: Tensor) -> Tensor:
        return edge_attr + x_i[:, :1]


def _edges_only(rank: int, world_size: int, folder: str) -> None:
    shard, outputs = Shard.load(folder, rank), []
    for backend in (HybridBackend(), CommBackend()):
        backend.bind(shard, Communicator(dist.new_group()))
        torch.manual_seed(0)
        model = distribute(EdgesOnly().double(), backend=backend, check=False)
        outputs.append(model(shard.x, shard.adjacency, shard.edge_attr))
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)


@needs_native
def test_hops_that_read_no_sources_are_planned_too(tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph("power-law")
    write_store(data, parts[3], tmp_path / "parts", num_parts=3, method="x", arguments={}, notes=[])
    pool.run(_edges_only, 3, str(tmp_path / "parts"))


def test_who_computes_nothing_again_looks_no_further_than_its_own_edges() -> None:
    assert [HybridBackend(cache_ratio=ratio).hops_around(3) for ratio in (0, 0.5, None)] == [1, 3, 3]
