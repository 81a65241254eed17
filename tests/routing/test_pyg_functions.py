"""PyG's functions on the edges that a model gets: one process's result for a rank's rows, or a refusal by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_geometric
import torch_geometric.nn.conv.gcn_conv as gcn
from torch import Tensor, nn
from torch_geometric import utils
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import coalesce, contains_self_loops, degree, is_undirected, one_hot, scatter, softmax
from torch_geometric.utils import degree as count_edges
from typing_extensions import override

from pygdist.backends import ReplicaBackend, resolve_backend
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard, write_store
from pygdist.native import load
from pygdist.routing import distribute, undistribute
from pygdist.testing import RankPool, random_graph

BACKENDS = ["comm", "cache", "hybrid", "tensor", "replica"]


class BySource(MessagePassing):
    """Divides each message by the in-degree of its source, as errors advise."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin = nn.Linear(width, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        deg = self.degrees(edge_index, x.size(0)).to(x).clamp(min=1).view(-1, 1)
        out: Tensor = self.propagate(edge_index, x=self.lin(x), deg=deg)
        return out

    def degrees(self, edge_index: Tensor, num_nodes: int) -> Tensor:
        return degree(edge_index[1], num_nodes)

    @override
    def message(self, x_j: Tensor, deg_j: Tensor) -> Tensor:
        return x_j.tanh() / deg_j


class ByAlias(BySource):
    """Another name."""

    @override
    def degrees(self, edge_index: Tensor, num_nodes: int) -> Tensor:
        _, target = edge_index
        return count_edges(target, num_nodes, torch.float64)


class Squared(BySource):
    """Writes into the degrees, as normalisations do."""

    @override
    def degrees(self, edge_index: Tensor, num_nodes: int) -> Tensor:
        return degree(edge_index[1], num_nodes, torch.float64).add_(1).pow_(2)


class ByPath(BySource):
    """The function of a module."""

    @override
    def degrees(self, edge_index: Tensor, num_nodes: int) -> Tensor:
        return torch_geometric.utils.degree(edge_index[1], num_nodes)


class ByShortPath(BySource):
    """The function of a module that was imported."""

    @override
    def degrees(self, edge_index: Tensor, num_nodes: int) -> Tensor:
        return utils.degree(edge_index[-1], num_nodes)


def _helper(edge_index: Tensor, num_nodes: int) -> Tensor:
    return _inner(edge_index.unbind()[1], num_nodes)


@torch.no_grad()
def _without_gradient(edge_index: Tensor, num_nodes: int) -> Tensor:
    return degree(edge_index[1], num_nodes)


def _inner(target: Tensor, num_nodes: int) -> Tensor:
    counts = [degree(one, num_nodes) for one in [target]]
    return counts[0]


class Decorated(BySource):
    """A decorated method that calls a decorated helper."""

    @override
    @torch.no_grad()
    def degrees(self, edge_index: Tensor, num_nodes: int) -> Tensor:
        return _without_gradient(edge_index, num_nodes)


def _again(edge_index: Tensor, num_nodes: int, times: int) -> Tensor:
    return _again(edge_index, num_nodes, times - 1) if times else degree(edge_index[1], num_nodes)


class Recursive(BySource):
    """A helper that calls itself."""

    @override
    def degrees(self, edge_index: Tensor, num_nodes: int) -> Tensor:
        return _again(edge_index, num_nodes, 2)


class ByHelper(BySource):
    """A function of the user's own that calls another."""

    @override
    def degrees(self, edge_index: Tensor, num_nodes: int) -> Tensor:
        return _helper(edge_index, num_nodes)


class Normalised(MessagePassing):
    """Sums with weights of GCN, which a helper or a module computes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin = nn.Linear(width, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, weight = self.norm(edge_index, x)
        out: Tensor = self.propagate(edge_index, x=self.lin(x).tanh(), weight=weight)
        return out

    def norm(self, edge_index: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        edges, weight = gcn.gcn_norm(edge_index, None, x.size(0), dtype=x.dtype)
        return edges, weight

    @override
    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return x_j * weight.view(-1, 1)


class OneHot(BySource):
    """As wide as the largest number asks for."""

    @override
    def degrees(self, edge_index: Tensor, num_nodes: int) -> Tensor:
        return one_hot(degree(edge_index[1], num_nodes).long()).size(1) + super().degrees(edge_index, num_nodes)


class ByLaplacian(Normalised):
    """Sums with the entries of the Laplacian."""

    @override
    def norm(self, edge_index: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        edges, weight = utils.get_laplacian(edge_index, None, "sym", x.dtype, x.size(0))
        return edges, weight


def _weights(edge_index: Any, x: Tensor) -> Any:
    return gcn_norm(edge_index, None, x.size(0), dtype=x.dtype)


class NormalisedByHelper(Normalised):
    """A helper normalises."""

    @override
    def norm(self, edge_index: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        edges, weight = _weights(edge_index, x)
        return edges, weight


class Merged(Normalised):
    """Merges edges that come twice, and weighs the others by a softmax."""

    @override
    def norm(self, edge_index: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        ones = torch.ones(edge_index.size(1), dtype=x.dtype)
        weight = softmax(ones, edge_index[1], num_nodes=x.size(0))
        total = scatter(weight, edge_index[1], dim_size=x.size(0))
        return edge_index, weight * total.clamp(max=1)[edge_index[1]]


class Two(nn.Module):
    """Two of a layer, so that the second reads what the first made of other ranks' rows."""

    def __init__(self, layer: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.last = layer(5), layer(4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x, edge_index), edge_index)
        return out


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "name": BySource,
    "alias": ByAlias,
    "in-place": Squared,
    "path": ByPath,
    "short-path": ByShortPath,
    "helper": ByHelper,
    "decorated": Decorated,
    "recursive": Recursive,
    "one-hot": OneHot,
    "laplacian": ByLaplacian,
    "norm-path": Normalised,
    "norm-helper": NormalisedByHelper,
    "softmax": Merged,
}


#: A part by itself knows neither of other parts' numbers nor of out-edges.
OF_ALL_RANKS = {"one-hot", "laplacian"}


def _outputs(rank: int, world_size: int, folder: str, backend_name: str) -> dict[str, tuple[Tensor, Tensor]]:
    """The second output of each model, and the ids of its rows."""
    communicator, outputs = Communicator(dist.new_group()), {}
    shard = Shard.load(f"{folder}/{'replicas' if backend_name == 'replica' else 'nodes'}", rank)
    for name, layer in LAYERS.items():
        if backend_name == "replica" and name in OF_ALL_RANKS:
            continue
        backend = ReplicaBackend(hops=2) if backend_name == "replica" else resolve_backend(backend_name)
        backend.bind(shard, communicator)
        torch.manual_seed(0)
        model = distribute(Two(layer).double(), backend=backend, check=False)
        for _ in range(2):
            out = model(shard.x, shard.adjacency)
        outputs[name] = shard.owned_id, out.detach()
    return outputs


needs_planner = pytest.mark.skipif(load() is None, reason="hybrid plans in the native library")


@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=needs_planner if name == "hybrid" else ()) for name in BACKENDS]
)
def test_degrees_and_weights_are_those_of_one_process_by_any_name(backend: str, parts: str, pool: RankPool) -> None:
    data, _ = random_graph("directed")
    for outputs in pool.run(_outputs, 2, parts, backend):
        for name, layer in LAYERS.items():
            if name not in outputs:
                assert backend == "replica"
                continue
            torch.manual_seed(0)
            expected = Two(layer).double()(data.x, data.edge_index)
            rows, out = outputs[name]
            assert torch.allclose(out, expected[rows], rtol=0, atol=1e-12), name


class Asks(nn.Module):
    """Asks something of all edges."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return x * bool(is_undirected(edge_index))


class AsksForLoops(Asks):
    """By a path."""

    @override
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return x * utils.contains_self_loops(edge_index)


class Multiplies(Asks):
    """Takes edges for a matrix."""

    @override
    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        out: Tensor = edge_index @ x
        return out


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (Asks, "is_undirected tells"),
        (AsksForLoops, "contains_self_loops tells"),
        (Multiplies, "edge_index @ x: the edges"),
    ],
)
def test_what_only_the_whole_graph_can_answer_is_refused(cls: type[Asks], said: str, tmp_path: Path) -> None:
    data, part = random_graph("directed")
    write_store(data, part[1], tmp_path / "parts", num_parts=1, method="test", arguments={})
    shard, backend = Shard.load(tmp_path / "parts", 0), resolve_backend("single")
    backend.bind(shard, Communicator())
    model = distribute(cls(), backend=backend)
    with pytest.raises(InputError, match=said):
        model(shard.x, shard.adjacency)
    assert type(undistribute(model)) is cls
    assert not contains_self_loops(torch.tensor([[0], [1]])), "PyG's own functions stay as they are"


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "coalesce": coalesce,
    "sort_edge_index": utils.sort_edge_index,
    "to_undirected": utils.to_undirected,
    "remove_self_loops": lambda edges: utils.remove_self_loops(edges)[0],
    "flip": lambda edges: edges.flip(0),
    "some": lambda edges: edges[:, edges[0] > 2],
    "twice": lambda edges: torch.cat([edges, edges], dim=1),
    "clone": lambda edges: edges.clone(),
    "sparse": lambda edges: utils.to_torch_csr_tensor(edges).to_dense(),
    "coo": lambda edges: utils.to_torch_coo_tensor(edges).to_dense(),
    "dense": utils.to_dense_adj,
    "subgraph": lambda edges: utils.subgraph([0, 1, 2, 3], edges)[0],
    "stacked": lambda edges: torch.stack([edges[1], edges[0]]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_to_functions_edges_are_the_tensor_that_the_user_passed(name: str, tmp_path: Path) -> None:
    data, part = random_graph("directed")
    write_store(data, part[1], tmp_path / "parts", num_parts=1, method="test", arguments={})
    edges = Shard.load(tmp_path / "parts", 0).adjacency
    result, expected = FUNCTIONS[name](edges), FUNCTIONS[name](edges.as_tensor())
    assert type(result) is Tensor
    assert torch.equal(result, expected)
