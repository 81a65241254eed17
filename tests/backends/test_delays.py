"""``delayed`` with a delay: ages of sums, bytes, gradients, evaluation, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_geometric import nn as pyg

from pygdist import distribute, undistribute
from pygdist.backends import DelayedBackend, Savings
from pygdist.backends.clones.exchange import CloneExchange
from pygdist.backends.clones.flights import DelayedSum, bin_of
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard
from pygdist.testing import RankPool
from pygdist.testing.graphs import random_graph
from tests.backends.vertex_cuts import write_random_cut
from tests.turns import by_turns

HIDDEN, CLASSES = 6, 3
PLAIN = Savings(first_hop=False)


def _bound(store: str, rank: int, **arguments: Any) -> tuple[Shard, DelayedBackend]:
    shard, backend = Shard.load(store, rank), DelayedBackend(**arguments)
    backend.bind(shard, Communicator(dist.new_group()))
    return shard, backend


def _sum_of(backend: DelayedBackend, hop: int, way: str = "forward", call: int = 0) -> DelayedSum:
    assert backend._delays is not None
    return backend._delays._sums[f"{call}.{hop}.0.{way}"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A graph whose edges are dealt to three parts at random."""
    return write_random_cut(tmp_path_factory.mktemp("cut"), "power-law", 3)


# -- ages --------------------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Sums rows that are scaled by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.zeros(())), pyg.SimpleConv(aggr="sum")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.layer(x * self.scale, edge_index)
        return out


@pytest.mark.parametrize("delay", [1, 2, 5])
def test_staleness_of_each_part_is_that_of_its_way(delay: int, store: str, pool: RankPool) -> None:
    for worst, rows in pool.run(_check_staleness, 3, store, delay):
        assert worst < 1e-12
        assert rows


def _check_staleness(rank: int, world_size: int, store: str, delay: int) -> tuple[float, int]:
    """Set the scale of pass *e* to *e*; then a root reads leaves of pass *f - r*, where *f* served its bin last."""
    shard, backend = _bound(store, rank, delay=delay, keep=True)
    model, exchange = distribute(Scaled().double(), backend=backend, savings=PLAIN, check=False), backend.exchange
    roots, leaves = _sums_of_scale_one(shard, exchange)
    worst, rows = 0.0, 0
    for epoch in range(6 * delay):
        model.scale.data.fill_(epoch)
        model(shard.x, shard.adjacency).sum().backward()
        if epoch < 3 * delay:
            continue
        last = epoch - (epoch - bin_of(shard.n_id, delay)) % delay  # pass in which the row's bin was served last
        late = (last - delay).view(-1, 1)
        expected = {"root": roots * late, "leaf": leaves[0] * late + leaves[1] * (late - delay)}
        delayed = _sum_of(backend, 1)
        assert delayed.remote is not None
        assert bool(delayed.has.all())
        for row, remote in zip(delayed.rows.tolist(), delayed.remote, strict=True):
            kind = "root" if row < shard.num_owned else "leaf"
            worst, rows = max(worst, float((remote - expected[kind][row]).abs().max())), rows + 1
    return worst, rows


def _sums_of_scale_one(shard: Shard, exchange: CloneExchange) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return what leaves contribute to each root, and what its root and all other leaves contribute to each leaf."""
    around = shard.surroundings
    x = torch.cat([shard.x, exchange.communicator.exchange_rows(shard.x, shard.plan)])
    assert around is not None
    source, target = shard.adjacency.as_tensor()
    here = torch.zeros_like(x).index_add(0, target, x[source])
    total = exchange.summed_up(here, exchange.up, "sums")
    roots = torch.zeros_like(x)
    roots[: shard.num_owned] = total - here[: shard.num_owned]
    of_root, of_leaves = torch.zeros_like(x), torch.zeros_like(x)
    down = exchange.down
    of_root[down.rows] = exchange.sent_down(here[: shard.num_owned], down, "roots")
    of_leaves[down.rows] = exchange.sent_down(roots[: shard.num_owned], down, "leaves")
    sends = torch.zeros(len(x), 1, dtype=torch.bool)
    sends[exchange.up.rows] = True
    return roots, (of_root, of_leaves - torch.where(sends, here, 0.0))


# -- frozen models -----------------------------------------------------------------------------------------------------


class Stacked(nn.Module):
    """Three layers; remembers what each returns."""

    def __init__(self, layer: str, in_channels: int) -> None:
        super().__init__()
        make = {
            "GCN": pyg.GCNConv,
            "SAGE": pyg.SAGEConv,
            "GIN": lambda before, after: pyg.GINConv(nn.Linear(before, after)),
            "many": lambda before, after: pyg.SAGEConv(before, after, aggr=["sum", "mean", "var"]),
        }[layer]
        self.layers = nn.ModuleList(make(width, HIDDEN) for width in (in_channels, HIDDEN, HIDDEN))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.seen = []
        for layer in self.layers:
            x = layer(x, edge_index).tanh()
            self.seen.append(x.detach())
        return x


@pytest.mark.parametrize(("layer", "delay"), by_turns(3, ["GCN", "SAGE", "GIN", "many"], [2, 1, 5]))
def test_frozen_models_that_keep_sums_become_exact(layer: str, delay: int, store: str, pool: RankPool) -> None:
    answers = pool.run(_check_frozen, 3, store, layer, delay)
    for number in range(3):
        first = 3 * delay if number == 0 else (number + 1) * (3 * delay - 1) + 1
        assert max(differences[number][first] for differences, _ in answers) < 1e-12
    assert max(differences[0][3 * delay - 1] for differences, _ in answers) > 1e-6
    assert max(gradient for _, gradient in answers) < 1e-10


def _check_frozen(rank: int, world_size: int, store: str, layer: str, delay: int) -> tuple[list[list[float]], float]:
    """Return, for each layer and pass, the largest difference of rows that are read from those of cd-0.

    The other number is that of the stale gradients of the last pass.
    """
    shard, backend = _bound(store, rank, delay=delay, keep=True, gradients="stale")
    torch.manual_seed(0)
    model = Stacked(layer, shard.x.size(1)).double()
    exact, late = _pair(model, shard, backend)
    exact(shard.x, shard.adjacency).square().sum().backward()
    read = torch.cat([torch.arange(shard.num_owned), backend.exchange.down.rows])
    differences: list[list[float]] = [[], [], []]
    for _ in range(18 * delay + 1):  # gradients begin to be right when sums are
        late.zero_grad()
        late(shard.x, shard.adjacency).square().sum().backward()
        for number, (one, other) in enumerate(zip(late.seen, exact.seen, strict=True)):
            differences[number].append(float((one - other)[read].abs().max()))
    summed = backend.communicator.sum_over_ranks
    pairs = zip(late.parameters(), exact.parameters(), strict=True)
    return differences, max(float((summed(one.grad) - summed(other.grad)).abs().max()) for one, other in pairs)


def _pair(model: Stacked, shard: Shard, backend: DelayedBackend) -> tuple[Stacked, Stacked]:
    """Return two copies of a model: on cd-0, and on ``backend``."""
    at_once = DelayedBackend()
    at_once.bind(shard, backend.communicator)
    exact = distribute(copy.deepcopy(model), backend=at_once, check=False)
    return exact, distribute(model, backend=backend, savings=PLAIN, check=False)


def test_rows_use_what_arrives_in_its_pass_alone(store: str, pool: RankPool) -> None:
    for worst, others in pool.run(_check_pass_alone, 3, store, 3):
        assert worst < 1e-12
        assert others > 1e-6


def _check_pass_alone(rank: int, world_size: int, store: str, delay: int) -> tuple[float, float]:
    """Compare rows of the bin that arrived, and the others, with the exact ones."""
    shard, backend = _bound(store, rank, delay=delay)
    torch.manual_seed(0)
    exact, late = _pair(Stacked("SAGE", shard.x.size(1)).double(), shard, backend)
    with torch.no_grad():
        exact(shard.x, shard.adjacency)
    worst = others = 0.0
    for epoch in range(5 * delay):
        late(shard.x, shard.adjacency).sum().backward()
        if epoch >= 3 * delay:
            delayed = _sum_of(backend, 1)
            difference = (late.seen[0] - exact.seen[0]).abs().amax(1)
            worst = max(worst, float(difference[delayed.rows[delayed.has]].max()))
            others = max(others, float(difference[delayed.rows[~delayed.has]].max()))
    return worst, others


@pytest.mark.parametrize("gradients", ["local", "stale"])
@pytest.mark.parametrize("keep", [False, True])
def test_exact_warm_up_is_one_pass_of_cd_0(keep: bool, gradients: Any, store: str, pool: RankPool) -> None:
    for worst in pool.run(_check_warm_up, 3, store, keep, gradients):
        assert worst < 1e-12


def _check_warm_up(rank: int, world_size: int, store: str, keep: bool, gradients: Any) -> float:
    shard, backend = _bound(store, rank, delay=2, keep=keep, gradients=gradients, warm_up="exact")
    torch.manual_seed(0)
    pair = _pair(Stacked("GCN", shard.x.size(1)).double(), shard, backend)
    for model in pair:
        model(shard.x, shard.adjacency).square().sum().backward()
    if keep:  # what arrived stays, and the model does too
        pair[1](shard.x, shard.adjacency)
    rows = zip(*([out[: shard.num_owned] for out in model.seen] for model in pair), strict=True)
    worst = [float((one - other).abs().max()) for one, other in rows]
    summed = backend.communicator.sum_over_ranks  # the share of each rank depends on the order of product and sum
    both = zip(*([summed(parameter.grad) for parameter in model.parameters()] for model in pair), strict=True)
    return max(*worst, *(float((one - other).abs().max()) for one, other in both))


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradients", ["local", "stale"])
@pytest.mark.parametrize("keep", [False, True])
def test_live_gradients_treat_what_arrived_as_constants(keep: bool, gradients: Any, store: str, pool: RankPool) -> None:
    for worst in pool.run(_check_live, 3, store, keep, gradients):
        assert worst < 1e-10


def _check_live(rank: int, world_size: int, store: str, keep: bool, gradients: Any) -> float:
    """Compare gradients with those of the same pass in plain torch, in which sums of other parts are given."""
    shard, backend = _bound(store, rank, delay=2, keep=keep, gradients=gradients)
    torch.manual_seed(0)
    model = distribute(Stacked("SAGE", shard.x.size(1)).double(), backend=backend, savings=PLAIN, check=False)
    optimizer, worst = torch.optim.SGD(model.parameters(), lr=0.05), 0.0
    x = torch.cat([shard.x, backend.communicator.exchange_rows(shard.x, shard.plan)])
    for _ in range(9):
        optimizer.zero_grad()
        model(shard.x, shard.adjacency).square().sum().backward()
        ours = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.zero_grad()
        _replayed(model, x, shard, backend)[: shard.num_owned].square().sum().backward()
        theirs = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        worst = max(worst, *(float((one - other).abs().max()) for one, other in zip(ours, theirs, strict=True)))
        for parameter in model.parameters():  # every rank makes the same step
            parameter.grad = backend.communicator.sum_over_ranks(parameter.grad)
        optimizer.step()
    return worst


def _replayed(model: Stacked, x: Tensor, shard: Shard, backend: DelayedBackend) -> Tensor:
    source, target = shard.adjacency.as_tensor()
    here = torch.bincount(target, minlength=len(x)).double()
    whole = backend.sums_of_parts(here)
    for number, layer in enumerate(model.layers, start=1):
        assert isinstance(layer, pyg.SAGEConv)
        z = torch.zeros_like(x).index_add(0, target, x[source])
        forward = _sum_of(backend, number)
        scale = torch.where(here > 0, whole / here.clamp(min=1), 1.0)
        scale[forward.rows[forward.has]] = 1
        if z.requires_grad and backend.delays.gradients == "stale":
            z.register_hook(_adding(_arrived(_sum_of(backend, number, "backward"), z)))
        mean = (z * scale.view(-1, 1) + _arrived(forward, z)) / whole.clamp(min=1).view(-1, 1)
        x = (layer.lin_l(mean) + layer.lin_r(x)).tanh()
    return x


def _arrived(sums: DelayedSum, like: Tensor) -> Tensor:
    out = torch.zeros_like(like)
    assert sums.remote is not None
    out[sums.rows[sums.has]] = sums.remote[sums.has]
    return out


def _adding(arrived: Tensor) -> Any:
    return lambda grad: grad + arrived


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("gradients", ["local", "stale"])
def test_bytes_are_those_of_the_bin(gradients: Any, wire_dtype: Any, store: str, pool: RankPool) -> None:
    answers, delay = pool.run(_check_bytes, 3, store, gradients, wire_dtype), 3
    size = 2 if wire_dtype else 8
    up, down, sent = (torch.tensor([answer[kind] for answer in answers]).sum(0) for kind in ("up", "down", "sent"))
    of_gradients = 3 if gradients == "stale" else 0  # hops, whose leaves that get sums send, and those that send get
    leaves = sum(answer["leaves"][0] for answer in answers)
    assert int(sent[0]) == 8 * (3 * leaves + int(up.sum()))  # degrees, and numbers of in-edges
    for epoch in range(1, len(sent)):
        number, answered = epoch % delay, epoch > delay
        rows = 3 * (up[number] + answered * down[number])
        rows += of_gradients * (down[number] + answered * up[number])
        assert int(sent[epoch]) == int(rows) * HIDDEN * size
    whole = (3 + of_gradients) * int(up.sum() + down.sum()) * HIDDEN * size
    assert int(sent[delay + 1 : 2 * delay + 1].sum()) == whole


def _check_bytes(rank: int, world_size: int, store: str, gradients: Any, wire_dtype: Any) -> dict[str, list[int]]:
    shard, backend = _bound(store, rank, delay=3, gradients=gradients, wire_dtype=wire_dtype)
    torch.manual_seed(0)
    model = Stacked("GCN", shard.x.size(1)).double()
    distribute(model, backend=backend, savings=Savings(first_hop=False, cheaper_side=False), check=False)
    sent, place, clones = [], bin_of(shard.n_id, 3), shard.clones
    for _ in range(8):
        backend.communicator.meter.reset()
        model(shard.x, shard.adjacency).sum().backward()
        sent.append(backend.communicator.meter.total.sent_bytes)
    backend.communicator.compare_calls()
    assert clones is not None
    up, down = (torch.bincount(place[rows], minlength=3).tolist() for rows in (clones.up_rows, clones.down_rows))
    return {"sent": sent, "up": up, "down": down, "leaves": [shard.num_halo]}


# -- never -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", ["GCN", "SAGE", "GAT", "max", "Cheb"])
def test_never_trains_each_part_by_itself_and_evaluates_exactly(layer: str, store: str, pool: RankPool) -> None:
    for alone, sent, evaluated in pool.run(_check_never, 3, store, layer):
        assert alone < 1e-12
        assert sent == 0
        assert evaluated < 1e-12


def _check_never(rank: int, world_size: int, store: str, layer: str) -> tuple[float, int, float]:
    """Compare training with plain PyG on the part, and evaluation with that on the whole graph."""
    shard, backend = _bound(store, rank, delay="never")
    torch.manual_seed(0)
    if layer == "Cheb":
        plain: nn.Module = pyg.ChebConv(shard.x.size(1), CLASSES, K=3).double()
    else:
        cls = {"GCN": pyg.GCN, "SAGE": pyg.GraphSAGE, "GAT": pyg.GAT, "max": pyg.GraphSAGE}[layer]
        options = {"aggr": "max"} if layer == "max" else {}
        plain = cls(shard.x.size(1), HIDDEN, 2, CLASSES, **options).double()
    model = distribute(copy.deepcopy(plain), backend=backend, check=False)
    x, edges = (
        torch.cat([shard.x, backend.communicator.exchange_rows(shard.x, shard.plan)]),
        shard.adjacency.as_tensor(),
    )
    data, worst, whole = random_graph("power-law")[0], 0.0, 0.0
    for _ in range(2):
        backend.communicator.meter.reset()
        out = model.train()(shard.x, shard.adjacency)
        out.square().sum().backward()
        sent = backend.communicator.meter.total.sent_bytes
        expected = plain(x, edges)[: shard.num_owned]
        worst = max(worst, float((out - expected).detach().abs().max()))
        with torch.no_grad():
            difference = model.eval()(shard.x, shard.adjacency) - plain(data.x, data.edge_index)[shard.owned_id]
        whole = max(whole, float(difference.abs().max()))
    return worst, sent, whole


# -- evaluation, and what is refused -----------------------------------------------------------------------------------


def test_evaluation_is_exact_and_leaves_flights_alone(store: str, pool: RankPool) -> None:
    """Two copies make the same passes; one is evaluated in between, with and without gradients."""
    for worst, apart in pool.run(_check_evaluation, 3, store):
        assert worst < 1e-12
        assert apart == 0


def _check_evaluation(rank: int, world_size: int, store: str) -> tuple[float, float]:
    data, worst, apart = random_graph("power-law")[0], 0.0, 0.0
    torch.manual_seed(0)
    plain = Stacked("SAGE", data.x.size(1)).double()
    runs = []
    for _ in range(2):
        shard, backend = _bound(store, rank, delay=2, keep=True)
        runs.append((shard, distribute(copy.deepcopy(plain), backend=backend, savings=PLAIN, check=False)))
    for _ in range(8):
        outs = [model.train()(shard.x, shard.adjacency) for shard, model in runs]
        apart = max(apart, float((outs[0] - outs[1]).detach().abs().max()))
        for out in outs:
            out.sum().backward()
        shard, model = runs[0]
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                found = model.eval()(shard.x, shard.adjacency)
            difference = found - plain(data.x, data.edge_index)[shard.owned_id]
            worst = max(worst, float(difference.detach().abs().max()))
    return worst, apart


def test_first_hop_over_fixed_rows_is_exchanged_once_and_exact(store: str, pool: RankPool) -> None:
    for worst, sent in pool.run(_check_first_hop, 3, store):
        assert worst < 1e-12
        assert sent == [1, 0, 0]


def _check_first_hop(rank: int, world_size: int, store: str) -> tuple[float, list[int]]:
    shard, backend = _bound(store, rank, delay=2)
    model, sent = distribute(pyg.SAGEConv(shard.x.size(1), CLASSES).double(), backend=backend, check=False), []
    data = random_graph("power-law")[0]
    plain, worst = copy.deepcopy(model), 0.0
    undistribute(plain)
    for _ in range(3):
        backend.communicator.meter.reset()
        out = model(shard.x, shard.adjacency)
        sent.append(int(backend.communicator.meter.total.sent_bytes > 0))
        worst = max(worst, float((out - plain(data.x, data.edge_index)[shard.owned_id]).abs().max()))
    return worst, sent


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (pyg.GAT(4, 4, 2), "divides by sums of exponentials"),
        (pyg.GraphSAGE(4, 4, 2, aggr="max"), "aggregates by MaxAggregation"),
        (pyg.GraphSAGE(4, 4, 2, aggr=["mean", "min"]), "aggregates by MinAggregation"),
        (pyg.GraphSAGE(4, 4, 2, aggr="softmax"), "aggregates by SoftmaxAggregation"),
        (pyg.SGConv(4, 4, cached=True), "keeps the sums of its first pass"),
        (pyg.PNAConv(4, 4, ["mean"], ["identity"], torch.ones(5)), "cannot be put together"),
    ],
)
def test_what_parts_of_other_passes_cannot_compute_is_refused(model: nn.Module, words: str) -> None:
    with pytest.raises(InputError, match=words):
        distribute(model, backend=DelayedBackend(delay=5))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"delay": -1}, "delay is -1, expected a number of training passes"),
        ({"delay": True}, "delay is True"),
        ({"delay": 1.5}, "delay is 1.5"),
        ({"delay": "always"}, "delay is 'always'"),
        ({"delay": 2, "gradients": "late"}, "gradients is 'late', expected one of local, stale"),
        ({"keep": True}, "keep=True has no effect with delay=0"),
        ({"delay": "never", "gradients": "stale"}, "gradients=stale has no effect with delay=never"),
        ({"warm_up": "exact"}, "warm_up=exact has no effect with delay=0"),
    ],
)
def test_options_without_a_meaning_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        DelayedBackend(**arguments)


def test_two_models_on_one_backend_are_refused(store: str, pool: RankPool) -> None:
    for said in pool.run(_check_two_models, 3, store):
        assert "two models train on one backend 'delayed'" in said


def _check_two_models(rank: int, world_size: int, store: str) -> str:
    shard, backend = _bound(store, rank, delay=2)
    first, second = (
        distribute(Stacked("SAGE", 5).double(), backend=backend, savings=PLAIN, check=False) for _ in range(2)
    )
    for _ in range(4):
        first(shard.x, shard.adjacency).sum().backward()
    with pytest.raises(InputError) as caught:
        second(shard.x, shard.adjacency)
    for model in (first, second, first):  # distributed again, each begins anew, with flights of its own
        distribute(undistribute(model), backend=backend, savings=PLAIN, check=False)
        for epoch in range(4):
            model(shard.x, shard.adjacency).sum().backward()
            assert backend._delays is not None
            assert backend._delays.epoch == epoch
    return str(caught.value)


# -- models that do not make one pass in a step ------------------------------------------------------------------------


def test_two_views_in_a_step_have_sums_of_their_own(store: str, pool: RankPool) -> None:
    for worst in pool.run(_check_two_views, 3, store):
        assert worst < 1e-12


def _check_two_views(rank: int, world_size: int, store: str) -> float:
    """Call the model with features and their negatives before each backward pass, as contrastive losses do."""
    shard, backend = _bound(store, rank, delay=2, keep=True)
    torch.manual_seed(0)
    late = distribute(Stacked("SAGE", shard.x.size(1)).double(), backend=backend, savings=PLAIN, check=False)
    worst = 0.0
    for epoch in range(9):
        outs = [late(x, shard.adjacency) for x in (shard.x, -shard.x)]
        sum(out.sum() for out in outs).backward()  # type: ignore[union-attr]
        if epoch >= 7:
            for x, number in ((shard.x, 0), (-shard.x, 1)):
                late_rows = _sum_of(backend, 1, call=number)
                assert bool(late_rows.has.all())
                worst = max(worst, _difference_of_sums(shard, backend, late_rows, x))
    return worst


def _difference_of_sums(shard: Shard, backend: DelayedBackend, late: DelayedSum, x: Tensor) -> float:
    """Compare what other parts contribute to the sums of a frozen model's first hop with the right numbers."""
    rows = torch.cat([x, backend.communicator.exchange_rows(x, shard.plan)])
    source, target = shard.adjacency.as_tensor()
    here = torch.zeros_like(rows).index_add(0, target, rows[source])
    whole, read = backend.sums_of_parts(here), late.rows
    assert late.remote is not None
    return float((late.remote - (whole - here)[read]).abs().max())


def test_models_that_skip_layers_are_refused(store: str, pool: RankPool) -> None:
    for said in pool.run(_check_skipped, 3, store):
        assert "the model made 2 hops in this training pass, and 3 in those before" in said


def _check_skipped(rank: int, world_size: int, store: str) -> str:
    shard, backend = _bound(store, rank, delay=2)
    model = distribute(Stacked("SAGE", shard.x.size(1)).double(), backend=backend, savings=PLAIN, check=False)
    model(shard.x, shard.adjacency).sum().backward()
    model.layers = model.layers[::2]
    with pytest.raises(InputError) as caught:
        model(shard.x, shard.adjacency)
    return str(caught.value)


# -- states ------------------------------------------------------------------------------------------------------------


def test_a_state_that_is_loaded_is_the_state_until_a_pass_and_after(store: str, pool: RankPool) -> None:
    for same, apart in pool.run(_check_state, 3, store):
        assert same
        assert apart == 0


def _check_state(rank: int, world_size: int, store: str) -> tuple[bool, float]:
    """Save, train on, go back to what was saved, and train on again."""
    shard, backend = _bound(store, rank, delay=3, keep=True, gradients="stale")
    torch.manual_seed(0)
    model, outputs = Stacked("SAGE", shard.x.size(1)).double(), []
    distribute(model, backend=backend, savings=PLAIN, check=False)
    for _ in range(8):
        model(shard.x, shard.adjacency).sum().backward()
    saved = {name: value.clone() for name, value in backend.part_state().items()}
    same = True
    for _ in range(2):
        assert backend.load_part_state(saved)
        again = backend.part_state()
        same &= again.keys() == saved.keys() and all(torch.equal(again[name], saved[name]) for name in saved)
        outputs.append([])
        for _ in range(5):
            outputs[-1].append(model(shard.x, shard.adjacency))
            outputs[-1][-1].sum().backward()
    assert not DelayedBackend(delay=2).delays.numbers.equal(backend.delays.numbers)
    return same, max(float((one - other).detach().abs().max()) for one, other in zip(*outputs, strict=True))
