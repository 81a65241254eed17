"""The contract: every exact backend equals plain PyG on one process; and the suite notices those that do not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.nn import MessagePassing
from typing_extensions import override

from pygdist.backends import Backend, CommBackend, HybridBackend, backends
from pygdist.testing import GRAPHS, LAYERS, RankPool, assert_exact

#: Backends that need arguments.
MADE: dict[str, Backend] = {"hybrid": HybridBackend(cache_ratio=0.5)}
#: All kinds of graphs for `comm`; those that are built on the same fetching see one, and others in tests of their own.
KINDS = {"cache": ("empty-part",), "hybrid": ("directed",)}
EXACT = [name for name in backends if backends[name].exact]
SOME = ["GCNConv", "GATConv", "SAGEConv-max", "GINConv", "BatchNorm", "GraphConv"]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("backend", EXACT)
def test_every_layer_equals_one_process(backend: str, world_size: int, pool: RankPool) -> None:
    if backend == "single" and world_size > 1:
        pytest.skip("single runs on one process by definition")
    graphs = KINDS.get(backend, GRAPHS)
    found = assert_exact(MADE.get(backend, backend), world_sizes=[world_size], graphs=graphs, pool=pool)
    assert set(found) == set(LAYERS)


def test_at_least_twenty_layer_classes_are_in_the_suite() -> None:
    classes = {case.layer for case in LAYERS.values() if issubclass(case.layer, MessagePassing)}
    assert len(classes) >= 20


@given(num_nodes=st.integers(4, 70), seed=st.integers(0, 2**16), layer=st.sampled_from(SOME))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shape_equals_one_process(num_nodes: int, seed: int, layer: str, pool: RankPool) -> None:
    kinds = ["directed", "power-law", "isolated", "empty-part", "no-train-part"]
    assert_exact(
        "comm", layers=[layer], world_sizes=[3], graphs=[kinds[seed % 5]], num_nodes=num_nodes, seed=seed, pool=pool
    )


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
