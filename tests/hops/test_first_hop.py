"""First hops over fixed rows: nothing is sent or aggregated for them twice, and nothing stale is ever used."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, SAGEConv, SGConv, SimpleConv

from pygdist import Shard, distribute
from pygdist.backends import CommBackend, Savings
from pygdist.comm import Communicator
from pygdist.graph import write_store
from pygdist.graph.identity import identity_of
from pygdist.hops.first_hop import _Changing
from pygdist.testing import RankPool, random_graph
from pygdist.testing.layers import build
from tests.backends.training import (
    Columns,
    backend_of,
    epoch,
    evaluated,
    one_rank,
    same,
    single,
    stored,
)

# columns that a second layer of 6 -> 3 channels aggregates
SECOND = {"GCNConv": 3, "SAGEConv-mean": 3, "GINConv": 3}
FIRST = {"GCNConv": 5, "SAGEConv-mean": 5, "GINConv": 5}


@pytest.fixture
def graph(tmp_path: Path) -> tuple[Data, Shard]:
    return one_rank(tmp_path)


def _bound(store: str, rank: int) -> tuple[Shard, CommBackend]:
    shard, backend = Shard.load(store, rank), CommBackend()
    backend.bind(shard, Communicator(dist.new_group(), check_order=True))
    return shard, backend


def _check_first_hop_once(rank: int, world_size: int, store: str, name: str, data: Data) -> None:
    shard, backend = _bound(store, rank)
    plain, model = build(name, 5, 3), distribute(build(name, 5, 3), backend=backend, check=False)
    meter = backend.communicator.meter
    for number in range(4):
        expected = epoch(plain, data.x, data.edge_index)
        meter.reset()
        with Columns() as columns:
            ours = epoch(model, shard.x, shard.adjacency, summed=True)
        traffic = meter.reset()
        same(ours, [expected[0][shard.owned_id], *expected[1:]])
        if number > 0:
            assert columns.take() == [SECOND[name]] * 2 * world_size, "a product for each chunk, there and back"
            assert traffic.calls == 2, "one exchange for the second hop, one for its backward"
            rows = shard.plan.num_sent + shard.plan.num_received
            assert traffic.sent_bytes + traffic.received_bytes == 2 * rows * SECOND[name] * 8
        else:
            assert columns.take() == [FIRST[name]] * world_size + [SECOND[name]] * 2 * world_size


@pytest.mark.parametrize("name", SECOND)
def test_after_the_first_epoch_the_first_hop_sends_nothing_and_aggregates_nothing(
    name: str, pool: RankPool, tmp_path: Path
) -> None:
    data, store = stored(tmp_path, "directed", 2)
    pool.run(_check_first_hop_once, 2, store, name, data)


# --- inputs that change -----------------------------------------------------------------------------------------------


def _dropout(x: Tensor, number: int) -> Tensor:
    torch.manual_seed(number)
    return functional.dropout(x, 0.5)


def _noise(x: Tensor, number: int) -> Tensor:
    torch.manual_seed(number)
    return x + torch.randn_like(x)


def _in_place(x: Tensor, number: int) -> Tensor:
    return x.add_(0.5) if number == 2 else x


def _in_inference_mode(x: Tensor, number: int) -> Tensor:
    with torch.inference_mode():
        x.mul_(1.5 if number == 2 else 1)
    return x


def _by_index(x: Tensor, number: int) -> Tensor:
    if number == 2:
        x[3] = 7.0
    return x


_OTHERS: dict[int, Tensor] = {}


def _replaced(x: Tensor, number: int) -> Tensor:
    return x if number < 2 else _OTHERS.setdefault(id(x), x.cos())


def _other_memory(x: Tensor, number: int) -> Tensor:
    if number >= 2:
        for _ in range(3):  # each takes the memory of the one before the last
            x.data = x.data * 1.1
    return x


def _alternating(x: Tensor, number: int) -> Tensor:
    return x if number % 2 else _OTHERS.setdefault(id(x), x.cos())


CHANGES = [_dropout, _noise, _in_place, _in_inference_mode, _by_index, _replaced, _other_memory, _alternating]


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv-mean", "GINConv", "SGConv", "ARMAConv"])
def test_rows_that_change_are_aggregated_anew(name: str, change: Any, graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    _OTHERS.clear()
    plain, model = build(name, 5, 3), single(build(name, 5, 3), shard)
    x, ours = data.x.clone(), shard.x.clone()
    for number in range(6):
        expected = epoch(plain, change(x, number), data.edge_index)
        same(epoch(model, change(ours, number), shard.adjacency), expected)
        if number > 0 and change in (_dropout, _noise):
            assert backend_of(model).kept_bytes == 0, "rows that never come again take memory"
    if change in (_in_place, _by_index, _replaced):
        assert backend_of(model).kept_bytes > 0, "the rows have settled"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GCNConv", "GraphConv", "SGConv", "TAGConv", "ARMAConv"])
@pytest.mark.parametrize("how", ["in place", "replaced", "learned"])
def test_edge_weights_that_change_are_noticed(name: str, how: str, graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    plain, model = build(name, 5, 3), single(build(name, 5, 3), shard)
    weights = [data.edge_weight.clone(), shard.edge_weight.clone()]
    for number in range(5):
        if number == 2 and how == "in place":
            for weight in weights:
                weight.mul_(2)
        elif number == 2:
            weights = [weight.sqrt() for weight in weights]
        if how == "learned" and number == 3:
            for weight in weights:
                weight.requires_grad_()
        expected = epoch(plain, data.x, data.edge_index, edge_weight=weights[0])
        same(epoch(model, shard.x, shard.adjacency, edge_weight=weights[1]), expected)


def test_dropout_lets_go_of_the_rows_of_the_epochs_before(graph: tuple[Data, Shard]) -> None:
    _, shard = graph
    model = single(build("SAGEConv-mean", 5, 3), shard)
    alive = []
    for number in range(4):
        x = _dropout(shard.x, number)
        alive.append(weakref.ref(x))
        epoch(model, x, shard.adjacency)
        del x
    gc.collect()
    assert [ref() is not None for ref in alive] == [False] * 4


# --- evaluation -------------------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Dropout on the input, as most published models have it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = build(name, 5, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.inner(functional.dropout(x, 0.5, self.training), edge_index)
        return out


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("first", [0, 1, 2], ids=["first", "after-one-epoch", "after-two-epochs"])
@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv-mean", "GINConv", "SGConv"])
@pytest.mark.parametrize("dropping", [False, True], ids=["fixed", "dropout"])
def test_evaluation_between_epochs_is_right(
    name: str, first: int, mode: Any, dropping: bool, graph: tuple[Data, Shard]
) -> None:
    data, shard = graph
    plain, model = (Dropping(name), Dropping(name)) if dropping else (build(name, 5, 3), build(name, 5, 3))
    single(model, shard)
    for number in range(4):
        if number >= first:
            for _ in range(2):
                expected = evaluated(plain, data.x, data.edge_index, mode=mode)
                same([evaluated(model, shard.x, shard.adjacency, mode=mode)], [expected])
        torch.manual_seed(number)
        expected = epoch(plain, data.x, data.edge_index)
        torch.manual_seed(number)
        same(epoch(model, shard.x, shard.adjacency), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_uses_what_training_kept(mode: Any, graph: tuple[Data, Shard]) -> None:
    _, shard = graph
    model = single(build("SAGEConv-mean", 5, 3), shard)
    epoch(model, shard.x, shard.adjacency)
    with Columns() as columns:
        evaluated(model, shard.x, shard.adjacency, mode=mode)
    assert columns.take() == [SECOND["SAGEConv-mean"]]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_of_a_model_with_input_dropout_keeps_its_own_first_hop(mode: Any, graph: tuple[Data, Shard]) -> None:
    _, shard = graph
    model = single(Dropping("SAGEConv-mean"), shard)
    found = []
    for number in range(3):
        epoch(model, shard.x, shard.adjacency)
        with Columns() as columns:
            evaluated(model, shard.x, shard.adjacency, mode=mode)
        found.append(len(columns.take()))
        assert number > 0 or backend_of(model).kept_bytes > 0
    assert found == [2, 2, 1], "known to be fixed when they come the second time"


class WritesInPlace(nn.Module):
    """One that overwrites what its layer returns."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv, self.lin = conv.double(), nn.Linear(5, 3).double()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        hidden = self.conv(x, edge_index)
        hidden.view(-1)[0] += 1.0
        hidden.relu_()
        out: Tensor = self.lin(hidden)
        return out


class Returns(nn.Module):
    """One whose output is the kept result."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lin = SimpleConv("sum"), nn.Linear(5, 3).double()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index)
        return out


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("make", [lambda: SimpleConv("sum"), lambda: GCNConv(5, 5, bias=False)], ids=["sum", "gcn"])
def test_writing_into_a_result_does_not_spoil_what_is_kept(make: Any, mode: Any, graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    plain = WritesInPlace(make())
    model = single(copy.deepcopy(plain), shard)
    for _ in range(4):
        expected = evaluated(plain, data.x, data.edge_index, mode=mode)
        same([evaluated(model, shard.x, shard.adjacency, mode=mode)], [expected])
        same(epoch(model, shard.x, shard.adjacency), epoch(plain, data.x, data.edge_index))
        same([evaluated(model, shard.x, shard.adjacency, mode=mode)], [evaluated(plain, data.x, data.edge_index)])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_writing_into_the_output_does_not_spoil_what_is_kept(mode: Any, graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    model = single(Returns(), shard)
    expected = Returns()(data.x, data.edge_index)
    model(shard.x, shard.adjacency)
    for _ in range(3):
        out = evaluated(model, shard.x, shard.adjacency, mode=mode)
        same([out], [expected])
        with mode():
            out.zero_()
        same([model(shard.x, shard.adjacency)], [expected])


# --- limits -----------------------------------------------------------------------------------------------------------


def test_nothing_is_kept_where_it_is_not_wanted(graph: tuple[Data, Shard]) -> None:
    _, shard = graph
    model = single(build("SAGEConv-mean", 5, 3), shard, Savings(first_hop=False))
    for _ in range(3):
        with Columns() as columns:
            epoch(model, shard.x, shard.adjacency)
        assert len(columns.take()) == 3
        assert backend_of(model).kept_bytes == 0


@pytest.mark.parametrize("mib", [0, 1e-4])
def test_what_does_not_fit_is_not_kept_and_said_once(mib: float, graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    plain, model = build("SAGEConv-mean", 5, 3), single(build("SAGEConv-mean", 5, 3), shard, Savings(first_hop_mib=mib))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            same(epoch(model, shard.x, shard.adjacency), epoch(plain, data.x, data.edge_index))
            evaluated(model, shard.x, shard.adjacency)
            assert backend_of(model).kept_bytes == 0
    said = [str(warning.message) for warning in caught if "first_hop_mib" in str(warning.message)]
    assert len(said) == 1
    assert "SAGEConv computes its first hop in every epoch" in said[0]


def _check_one_part_too_large(rank: int, world_size: int, store: str, data: Data) -> None:
    shard, backend = _bound(store, rank)
    largest = max(int(rows) for rows in backend.communicator.gather([float(shard.num_owned)]).flatten())
    model = distribute(
        build("SAGEConv-mean", 5, 3),
        backend=backend,
        savings=Savings(first_hop_mib=(largest * 5 * 8 - 1) / 2**20),
        check=False,
    )
    plain = build("SAGEConv-mean", 5, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            expected = epoch(plain, data.x, data.edge_index)
            ours = epoch(model, shard.x, shard.adjacency, summed=True)
            same(ours, [expected[0][shard.owned_id], *expected[1:]])
            assert backend.kept_bytes == 0
    assert sum("first_hop_mib" in str(warning.message) for warning in caught) == 1


def test_a_part_too_large_on_one_rank_is_kept_by_none(pool: RankPool, tmp_path: Path) -> None:
    data, _ = random_graph("directed")
    owner = (torch.arange(37) >= 30).long().numpy()
    write_store(data, owner, tmp_path / "store", num_parts=2, method="test", arguments={})
    pool.run(_check_one_part_too_large, 2, str(tmp_path / "store"), data)


# --- several inputs, copies, other graphs -----------------------------------------------------------------------------


class Twice(nn.Module):
    """One layer on two fixed inputs, and the layer once more under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(5, 5).double()
        self.again, self.lin = self.conv, nn.Linear(5, 3).double()

    def forward(self, x: Tensor, other: Tensor, edge_index: Tensor) -> Tensor:
        hidden = self.conv(x, edge_index) * self.conv(other, edge_index) + self.again(x, edge_index)
        out: Tensor = self.lin(hidden)
        return out


def test_a_layer_used_on_two_fixed_inputs_keeps_both(graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    torch.manual_seed(0)
    plain = Twice()
    model = single(copy.deepcopy(plain), shard)
    other = data.x.cos()
    for number in range(4):
        with Columns() as columns:
            ours = epoch(model, shard.x, other, shard.adjacency)
        same(ours, epoch(plain, data.x, other, data.edge_index))
        assert columns.take() == ([5, 5] if number == 0 else [])
    assert backend_of(model).kept_bytes == 2 * 37 * 5 * 8


def test_hops_beyond_the_first_over_fixed_rows_are_kept_too(graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    torch.manual_seed(0)
    plain = SGConv(5, 3, K=3).double()
    model = single(copy.deepcopy(plain), shard)
    for number in range(3):
        with Columns() as columns:
            ours = epoch(model, shard.x, shard.adjacency)
        same(ours, epoch(plain, data.x, data.edge_index))
        assert columns.take() == ([5, 5, 5] if number == 0 else [])


def test_a_layer_called_outside_its_model_does_not_pile_up_results(graph: tuple[Data, Shard]) -> None:
    _, shard = graph
    model = single(build("SAGEConv-mean", 5, 3), shard)
    epoch(model, shard.x, shard.adjacency)
    for number in range(50):
        model.layers[0](_noise(shard.x, number), shard.adjacency).sum().backward()
    assert backend_of(model).kept_bytes <= 2 * 37 * 5 * 8


def test_a_layer_called_outside_its_model_uses_what_is_kept(graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    plain, model = build("SAGEConv-mean", 5, 3), single(build("SAGEConv-mean", 5, 3), shard)
    for number in range(40):
        with Columns() as columns:
            ours = model.layers[0](shard.x, shard.adjacency)
        same([ours], [plain.layers[0](data.x, data.edge_index)])
        assert columns.take() == ([5] if number == 0 else [])


def test_another_graph_lets_go_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (_, shard), (other, second) = one_rank(tmp_path), one_rank(tmp_path / "other", "power-law")
    model, plain = single(build("SAGEConv-mean", 5, 3), shard), build("SAGEConv-mean", 5, 3)
    backend = backend_of(model)
    epoch(model, shard.x, shard.adjacency)
    assert backend.kept_bytes > 0
    backend.bind(second, Communicator())
    assert backend.kept_bytes == 0
    model.load_state_dict(plain.state_dict())
    for _ in range(3):
        same(epoch(model, second.x, second.adjacency), epoch(plain, other.x, other.edge_index))
    backend.unbind()
    assert backend.kept_bytes == 0


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_trained_model_trains_on(copier: Any, graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    plain, model = build("GCNConv", 5, 3), single(build("GCNConv", 5, 3), shard)
    epoch(model, shard.x, shard.adjacency)
    epoch(plain, data.x, data.edge_index)
    twin = copier(model)
    raw = len(pickle.dumps(model))
    epoch(model, shard.x, shard.adjacency)
    assert len(pickle.dumps(model)) == raw, "results are no part of a pickle"
    for _ in range(3):
        same(epoch(twin, shard.x, shard.adjacency), epoch(plain, data.x, data.edge_index))
    del twin
    gc.collect()
    assert backend_of(model).kept_bytes == 37 * 5 * 8


class Checkpointed(nn.Module):
    """Computes its layers a second time in the backward pass."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = Dropping(name)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, edge_index, use_reentrant=False)
        return out


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv-mean"])
@pytest.mark.parametrize("dropping", [False, True])
def test_layers_computed_again_in_the_backward_pass_are_right(
    name: str, dropping: bool, graph: tuple[Data, Shard]
) -> None:
    data, shard = graph
    plain, model = Checkpointed(name), single(Checkpointed(name), shard)
    if not dropping:
        plain.eval(), model.eval()
    for number in range(4):
        torch.manual_seed(number)
        expected = epoch(plain, data.x, data.edge_index)
        torch.manual_seed(number)
        same(epoch(model, shard.x, shard.adjacency), expected)


# --- all ranks decide alike -------------------------------------------------------------------------------------------


def _masked(x: Tensor, number: int, rows: Tensor) -> Tensor:
    """The same dropout on every number of ranks; as with torch's own, no rows come back as they are."""
    if x.numel() == 0:
        return x
    keep = torch.rand(37, 5, generator=torch.Generator().manual_seed(number)) < 0.5
    return x * keep[rows] * 2


def _check_empty_rank(rank: int, world_size: int, store: str, name: str, data: Data, changes: bool) -> list[int]:
    shard, backend = _bound(store, rank)
    plain, model = build(name, 5, 3), distribute(build(name, 5, 3), backend=backend, check=False)
    everyone = torch.arange(37)
    found = []
    for number in range(5):
        x, ours = data.x, shard.x
        if changes:
            x, ours = _masked(x, number, everyone), _masked(ours, number, shard.owned_id)
        expected = epoch(plain, x, data.edge_index)
        with Columns() as columns:
            same(epoch(model, ours, shard.adjacency, summed=True), [expected[0][shard.owned_id], *expected[1:]])
        found.append(len(columns.take()))
        expected_after = evaluated(plain, data.x, data.edge_index)[shard.owned_id]
        same([evaluated(model, shard.x, shard.adjacency)], [expected_after])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("changes", [False, True], ids=["fixed", "dropout"])
@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv-mean", "GINConv"])
def test_a_rank_without_nodes_decides_as_the_others_do(
    name: str, changes: bool, pool: RankPool, tmp_path: Path
) -> None:
    data, store = stored(tmp_path, "empty-part", 3)
    found = pool.run(_check_empty_rank, 3, store, name, data, changes)
    if not changes:
        assert found[0] in ([3 * chunks, *[2 * chunks] * 4] for chunks in (1, 2, 3))


def test_a_rank_without_edges_decides_as_the_others_do(pool: RankPool, tmp_path: Path) -> None:
    data, _ = random_graph("isolated")
    owner = (torch.arange(37) >= 37 * 2 // 3).long().numpy()  # the second rank has the nodes without edges
    write_store(data, owner, tmp_path / "store", num_parts=2, method="test", arguments={})
    for changes in (False, True):
        pool.run(_check_empty_rank, 2, str(tmp_path / "store"), "GCNConv", data, changes)


def test_gradients_of_fixed_rows_are_computed_where_that_is_asked_for(graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    savings = {True: Savings(first_hop=False), False: Savings(no_input_gradient=False)}
    plain = build("GINConv", 5, 3)
    models = {kind: single(build("GINConv", 5, 3), shard, saving) for kind, saving in savings.items()}
    for _ in range(3):
        expected = epoch(plain, data.x, data.edge_index)
        for kind, model in models.items():
            with Columns() as columns:
                same(epoch(model, shard.x, shard.adjacency), expected)
            assert columns.take() == ([5, 3, 3] if kind else [5, 3, 3, 5])


def test_inputs_come_again_as_objects_not_as_memory() -> None:
    """Freed memory may be given to others on some ranks alone."""
    x, edges = torch.ones(3), torch.zeros(2, 4)
    changing = _Changing((weakref.ref(x), None, None, weakref.ref(edges)), identity_of(x))
    assert changing.came_again((x, None, None, edges), identity_of(x))
    same_memory = x.view(3)
    assert identity_of(same_memory) == identity_of(x)
    assert not changing.came_again((same_memory, None, None, edges), identity_of(x))
    assert not changing.came_again((x, None, None, edges.view(2, 4)), identity_of(x))
