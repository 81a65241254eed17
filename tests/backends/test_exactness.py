"""The contract: every backend, in its limit, equals plain PyG on one process; the suite notices those that do not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing, conv
from typing_extensions import override

from pygdist.backends import Backend, CommBackend, HybridBackend, ReplicaBackend, Savings, backends
from pygdist.errors import InputError
from pygdist.hops.hop import Hop
from pygdist.native import load
from pygdist.routing import distribute
from pygdist.routing.refusals import REFUSED_LAYERS
from pygdist.testing import LAYERS, RankPool, assert_exact, supported_layers
from pygdist.testing.graphs import GRAPHS

DEEP: dict[str, Backend | str] = {
    "comm": "comm",
    "cache": "cache",
    "hybrid": "hybrid",
    **{f"hybrid-{ratio}": HybridBackend(cache_ratio=ratio) for ratio in (0.0, 0.3, 0.7, 1.0)},
    "tensor": "tensor",
    "delayed": "delayed",
    "replica": ReplicaBackend(hops=9),  # no less than any model here makes
}
#: By backend, how far the graph is placed around a part.
NUM_HOPS = {"replica": 9}
#: What a part by itself never computes as the whole graph would: norms over nodes (one of them inside ``GENConv``),
#: padding to the largest degree, weights that the model normalises.
OF_A_PART = {
    *("BatchNorm", "BatchNorm1d", "DiffGroupNorm", "GraphNorm", "GraphSizeNorm", "HeteroBatchNorm", "InstanceNorm"),
    *("InstanceNorm1d-channels", "LayerNorm-graph", "MeanSubtractionNorm", "PairNorm", "PairNorm-rows", "GENConv"),
    *("SAGEConv-lstm", "SAGEConv-patches", "PDNConv"),
}
#: Where every layer is run without --exhaustive too, beside tests of two layers; elsewhere some are. ``hybrid``
#: computes as ``cache`` does, and fetches as ``comm`` does, whose layers the test above runs.
EVERY_LAYER = {("cache", 2), ("replica", 1), ("delayed", 2)}
#: One process has no empty part. On 2 and 4 ranks (--exhaustive) all graphs.
ON_RANKS = {1: ("directed", "power-law", "isolated"), 3: ("isolated", "empty-part", "no-train-part")}
SOME = ["GCNConv", "GATConv", "SAGEConv-max", "GINConv", "BatchNorm", "GraphConv"]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3, *(pytest.param(size, marks=pytest.mark.exhaustive) for size in (2, 4))])
@pytest.mark.parametrize("backend", ["single", "comm"])
def test_every_layer_equals_one_process_on_every_graph(backend: str, world_size: int, pool: RankPool) -> None:
    if backend == "single" and world_size > 1:
        pytest.skip("single runs on one process by definition")
    graphs = ON_RANKS.get(world_size, GRAPHS)
    assert set(assert_exact(backend, world_sizes=[world_size], graphs=graphs, pool=pool)) == set(LAYERS)


@cache
def _layers_of(backend: str) -> list[str]:
    """The layers that a backend does not refuse."""
    if backend in ("tensor", "replica", "delayed"):
        return [name for name in supported_layers(backend) if backend != "replica" or name not in OF_A_PART]
    return list(LAYERS)


def _deep() -> list[object]:
    """Every backend, depth and world size; without --exhaustive each backend and depth with one number of ranks."""
    found = []
    for number, backend in enumerate(DEEP):
        for num_layers in (1, 2, 3):
            for world_size in (1, 2, 3, 4):
                turn = 2 + (number + num_layers) % 3 == world_size  # on one rank nothing is remote
                name = f"{backend}-{num_layers}-deep-{world_size}-ranks"
                found.append(
                    pytest.param(backend, num_layers, world_size, id=name, marks=() if turn else pytest.mark.exhaustive)
                )
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "num_layers", "world_size"), _deep())
def test_every_layer_equals_one_process_at_any_depth(
    backend: str, num_layers: int, world_size: int, pool: RankPool, request: pytest.FixtureRequest
) -> None:
    if backend.startswith("hybrid") and load() is None:
        pytest.skip("hybrid plans in the native library")
    graphs = ("directed", "empty-part", "power-law")
    layers = _layers_of(backend)
    if (backend, num_layers) not in EVERY_LAYER and not request.config.getoption("--exhaustive"):
        layers = [name for name in SOME if name in layers]
    found = assert_exact(
        DEEP[backend], layers=layers, world_sizes=[world_size], graphs=graphs[num_layers - 1 : num_layers],
        num_layers=num_layers, num_hops=NUM_HOPS.get(backend), pool=pool,
    )  # fmt: skip
    assert set(found) == set(layers)


def test_every_backend_is_in_the_suite() -> None:
    """An approximate one in its limit case; those of batches in ``tests/lightning``."""
    assert {"single", "pull", "pushpull", *DEEP} >= set(backends)


def test_every_layer_class_of_pyg_is_in_the_suite_or_refused_by_name() -> None:
    beyond = {
        "MessagePassing",
        "MeshCNNConv",  # takes four neighbours of each edge of a mesh
        "SplineConv",  # needs pyg-lib
    }
    suite = {case.layer for case in LAYERS.values()}
    for name in set(conv.__all__) - beyond:
        cls = getattr(conv, name)
        refused = {one.__name__ for one in cls.__mro__} & REFUSED_LAYERS.keys()
        assert (cls in suite) != bool(refused), name


def test_at_least_twenty_layer_classes_are_in_the_suite() -> None:
    classes = {case.layer for case in LAYERS.values() if issubclass(case.layer, MessagePassing)}
    assert len(classes) >= 20


@pytest.mark.slow
@given(
    backend=st.sampled_from(["comm", "cache", "hybrid-0.3", "tensor", "delayed"]),
    num_layers=st.integers(1, 3),
    num_nodes=st.integers(4, 70),
    seed=st.integers(0, 2**16),
    layer=st.sampled_from(SOME),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shape_equals_one_process(
    backend: str, num_layers: int, num_nodes: int, seed: int, layer: str, pool: RankPool
) -> None:
    if backend.startswith("hybrid") and load() is None:
        backend = "cache"
    kinds = ["directed", "power-law", "isolated", "empty-part", "no-train-part"]
    assert_exact(
        DEEP[backend], layers=[layer], world_sizes=[3], graphs=[kinds[seed % 5]], num_layers=num_layers,
        num_nodes=num_nodes, seed=seed, pool=pool,
    )  # fmt: skip


class Deaf(CommBackend):
    """Halo rows are zeros: nobody answers."""

    name = ""

    @override
    def halo_rows(self, x: Tensor, *, label: str) -> Tensor:
        return super().halo_rows(x, label=label) * 0


class DeafInEvaluation(CommBackend):
    """Nobody answers unless the model trains."""

    name = ""

    @override
    def halo_rows(self, x: Tensor, *, label: str) -> Tensor:
        return super().halo_rows(x, label=label) * float(torch.is_grad_enabled())


class OneWay(CommBackend):
    """Halo rows arrive but no gradient goes back."""

    name = ""

    @override
    def halo_rows(self, x: Tensor, *, label: str) -> Tensor:
        return super().halo_rows(x, label=label).detach()


class LocalDegrees(CommBackend):
    """Normalises with the degrees that a rank sees by itself: those of halo rows are unknown, taken as one."""

    name = ""

    @override
    def source_rows(self, x: Tensor) -> Tensor:
        super().source_rows(x)
        return torch.cat([x, x.new_ones(self.shard.num_halo)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "layer", "quantity"),
    [
        pytest.param(Deaf, "GINConv", "output", id="no-halo-rows"),
        pytest.param(DeafInEvaluation, "GINConv", "output afterwards", id="no-halo-rows-in-evaluation"),
        pytest.param(OneWay, "SAGEConv-mean", "gradients", id="no-halo-gradients"),
        pytest.param(LocalDegrees, "GCNConv", "output", id="local-degrees"),
    ],
)
def test_the_suite_notices_a_backend_that_is_not_exact(
    broken: type[CommBackend], layer: str, quantity: str, pool: RankPool
) -> None:
    with pytest.raises(AssertionError, match=rf"{layer} on 2 ranks, graph directed: {quantity}.* of rank \d differs"):
        assert_exact(broken(), layers=[layer], world_sizes=[2], graphs=["directed"], pool=pool)


def test_what_the_suite_has_no_graph_for_is_told() -> None:
    with pytest.raises(InputError, match="world_sizes: 6 ranks, expected 1 to 5"):
        assert_exact("comm", world_sizes=[2, 6])


def test_layers_of_a_backend_that_runs_a_model() -> None:
    backend = CommBackend()
    distribute(nn.Linear(2, 2), backend=backend, savings=Savings(first_hop=False))
    assert supported_layers(backend) == supported_layers("comm")
    assert backend.savings == Savings(first_hop=False)


class Idle(CommBackend):
    """A rank that owns nothing leaves out its part of the backward pass: zeros, which change no mean."""

    name = ""

    @override
    def propagate(self, hop: Hop) -> Tensor:
        if self.shard.num_owned == 0:
            hop = replace(hop, arguments={**hop.arguments, "x": hop.arguments["x"].detach().requires_grad_()})
        return super().propagate(hop)


def test_the_suite_notices_a_rank_without_the_gradients_that_others_wait_for(pool: RankPool) -> None:
    said = r"GCNConv on 2 ranks, graph empty-part: gradients of layers\.0\.bias of rank 1 differs by inf"
    with pytest.raises(AssertionError, match=rf"1 differences beyond 1e-10:\n{said}"):
        assert_exact(Idle(), layers=["GCNConv"], world_sizes=[2], graphs=["empty-part"], pool=pool)
