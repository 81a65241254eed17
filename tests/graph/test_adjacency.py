"""The adjacency: an ordinary edge_index to layers, a sparse product where PyG fuses."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GraphConv
from torch_geometric.utils import add_self_loops, remove_self_loops, spmm

from pygdist.graph.adjacency import _TRANSPOSED, Adjacency

EDGES = torch.tensor([[4, 0, 1, 3, 3, 2], [0, 0, 1, 1, 2, 2]])  # five sources, three destinations, two self-loops
WEIGHT = torch.tensor([1.0, 2.0, 3.0, -1.0, 0.5, 4.0], dtype=torch.float64)


def _adjacency(value: Tensor | None = None) -> Adjacency:
    return Adjacency(EDGES, num_src=5, num_dst=3, value=value)


def _dense(value: Tensor) -> Tensor:
    return torch.zeros(3, 5, dtype=torch.float64).index_put((EDGES[1], EDGES[0]), value, accumulate=True)


def test_the_product_sums_in_edges_whatever_pyg_says_of_transposing() -> None:
    x = torch.arange(10, dtype=torch.float64).view(5, 2)
    ones = torch.ones_like(WEIGHT)
    assert torch.equal(spmm(_adjacency(), x), _dense(ones) @ x)
    assert torch.equal(_adjacency().matmul(x, transpose=True), _dense(ones) @ x)
    assert torch.equal(_adjacency(WEIGHT).matmul(x), _dense(WEIGHT) @ x)
    assert torch.equal(_adjacency(ones).matmul(x, input_value=WEIGHT), _dense(WEIGHT) @ x)
    assert _adjacency().csr().index.dtype == torch.int32
    with pytest.raises(ValueError, match="only be multiplied with dense rows"):
        _adjacency().matmul(_adjacency())


def test_gradients_reach_rows_and_weights_and_the_transpose_is_built_once() -> None:
    x = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    weight = WEIGHT.clone().requires_grad_()
    adjacency = _adjacency()
    assert adjacency.slot(_TRANSPOSED) is None
    adjacency.with_value(weight).matmul(x).square().sum().backward()
    kept = adjacency.slot(_TRANSPOSED)
    assert kept is not None
    adjacency.with_value(2 * WEIGHT).with_value(weight).matmul(x).sum().backward()
    assert adjacency.slot(_TRANSPOSED) is kept
    twin, own = x.detach().clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    (_dense(own) @ twin).square().sum().backward()
    (_dense(own) @ twin).sum().backward()
    assert x.grad is not None
    assert twin.grad is not None
    assert weight.grad is not None
    assert own.grad is not None
    assert torch.allclose(x.grad, twin.grad, rtol=0, atol=1e-12)
    assert torch.allclose(weight.grad, own.grad, rtol=0, atol=1e-12)


def test_pyg_s_own_functions_and_layers_take_it() -> None:
    adjacency = _adjacency()
    assert isinstance(adjacency, Tensor)
    assert adjacency.shape == (2, 6)
    without, _ = remove_self_loops(adjacency)
    assert without.tolist() == [[4, 3, 3], [0, 1, 2]]
    loops, _ = add_self_loops(without, num_nodes=3)
    assert loops.size(1) == 6
    layer = GraphConv(2, 4).double()
    x = torch.rand(5, 2, dtype=torch.float64)
    assert torch.allclose(
        layer((x, x[:3]), adjacency, WEIGHT), layer((x, x[:3]), EDGES, WEIGHT, size=(5, 3)), rtol=0, atol=1e-12
    )


def test_sorting_keeps_the_order_of_messages() -> None:
    shuffled = torch.tensor([5, 1, 3, 0, 4, 2])
    adjacency, perm = Adjacency.from_unsorted(EDGES[:, shuffled], WEIGHT[shuffled], num_src=5, num_dst=3)
    assert adjacency.as_tensor()[1].tolist() == [0, 0, 1, 1, 2, 2]
    assert adjacency.as_tensor()[0].tolist() == EDGES[0][shuffled][perm].tolist()
    assert adjacency.value is not None
    assert torch.equal(adjacency.value, WEIGHT[shuffled][perm])


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))], ids=["deepcopy", "pickle"])
def test_copies(copier) -> None:  # type: ignore[no-untyped-def]
    twin = copier(_adjacency(WEIGHT))
    assert isinstance(twin, Adjacency)
    assert (twin.num_src, twin.num_dst) == (5, 3)
    assert torch.equal(twin.as_tensor(), EDGES)
    assert torch.equal(twin.value, WEIGHT)


def test_mistakes_are_told() -> None:
    with pytest.raises(ValueError, match="must be sorted by destination"):
        Adjacency(EDGES.flip(1), num_src=5, num_dst=3)
    with pytest.raises(ValueError, match="one weight for each of 6 edges, got 5"):
        _adjacency(WEIGHT[:5])


def test_no_edges() -> None:
    empty = Adjacency(EDGES[:, :0], num_src=2, num_dst=0)
    assert empty.matmul(torch.ones(2, 3)).shape == (0, 3)
