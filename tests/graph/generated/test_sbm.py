"""The generators: what they promise about edges, degrees and features, and that accuracy means something."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.utils import is_undirected

from pygdist.errors import InputError
from pygdist.graph import degree_corrected_sbm, power_law

MASKS = ("train_mask", "val_mask", "test_mask")


@pytest.mark.parametrize("num_nodes", [1, 2, 17, 500])
def test_sbm_is_simple_and_undirected(num_nodes: int) -> None:
    data = degree_corrected_sbm(num_nodes, num_classes=min(3, num_nodes), avg_degree=min(4.0, (num_nodes - 1) / 2))
    assert data.validate()
    assert data.edge_index.dtype == torch.int64
    assert data.num_edges == 2 * round(num_nodes * min(4.0, (num_nodes - 1) / 2) / 2)
    assert is_undirected(data.edge_index, num_nodes=num_nodes)
    assert not data.has_self_loops()
    assert data.is_coalesced() or data.edge_index.unique(dim=1).size(1) == data.num_edges


def test_sbm_repeats_itself_and_follows_its_seed() -> None:
    first, again, other = (degree_corrected_sbm(300, seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(first[key], again[key]) for key in first.keys())  # noqa: SIM118 - Data is no mapping
    assert not torch.equal(first.x, other.x)
    assert not torch.equal(first.edge_index, other.edge_index)


def test_sbm_has_hubs_and_the_stated_homophily() -> None:
    data = degree_corrected_sbm(5000, homophily=0.8)
    degree = torch.bincount(data.edge_index[1], minlength=5000)
    assert degree.max() > 10 * degree.float().mean()
    source, target = data.edge_index
    assert 0.77 < (data.y[source] == data.y[target]).float().mean() < 0.81


def test_sbm_classes_are_even() -> None:
    count = torch.bincount(degree_corrected_sbm(1003, num_classes=10).y)
    assert count.max() - count.min() <= 1


def test_sbm_split_covers_all_nodes_once() -> None:
    data = degree_corrected_sbm(101, split=(0.5, 0.25, 0.25))
    assert torch.equal(sum(data[mask].int() for mask in MASKS), torch.ones(101, dtype=torch.int32))
    assert abs(int(data.train_mask.sum()) - 50) <= 1


def test_sbm_split_may_leave_nodes_out() -> None:
    data = degree_corrected_sbm(100, split=(0.1, 0.1, 0.1))
    assert [int(data[mask].sum()) for mask in MASKS] == [10, 10, 10]


def test_sbm_labels_per_class() -> None:
    data = degree_corrected_sbm(600, num_classes=6, labels_per_class=5)
    assert torch.bincount(data.y[data.train_mask]).tolist() == [5] * 6
    assert int(data.val_mask.sum()) == int(data.test_mask.sum()) == 285
    assert not (data.train_mask & (data.val_mask | data.test_mask)).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_classes": 0}, "num_classes is 0"),
        ({"num_classes": 101}, "num_classes is 101"),
        ({"avg_degree": -1.0}, "avg_degree is -1"),
        ({"homophily": 1.5}, "homophily is 1.5"),
        ({"power_law": 2.0}, "power_law is 2"),
        ({"split": (0.8, 0.3, 0.0)}, "split is"),
        ({"avg_degree": 200.0}, "edges do not fit among 100 nodes"),
    ],
)
def test_sbm_refuses(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        degree_corrected_sbm(100, **arguments)  # type: ignore[arg-type]


def test_sbm_of_one_class_has_no_edges_outside_of_it() -> None:
    degree = torch.bincount(degree_corrected_sbm(200, num_classes=1, homophily=0.5).edge_index[0])
    assert degree.max() < 10 * degree.float().mean()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Matrices this small are slower on several threads, and much slower beside another busy process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_edges_help_on_sbm() -> None:
    data = degree_corrected_sbm(1500)
    assert _accuracy(data, use_edges=True) > _accuracy(data, use_edges=False) + 0.2


def _accuracy(data: Data, *, use_edges: bool) -> float:
    torch.manual_seed(0)
    sizes = (data.num_features, 32, int(data.y.max()) + 1)
    layers = [GCNConv(*size) if use_edges else nn.Linear(*size) for size in (sizes[:2], sizes[1:])]
    edges = (data.edge_index,) if use_edges else ()
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.03, weight_decay=5e-4)
    for _ in range(30):
        out = layers[1](layers[0](data.x, *edges).relu(), *edges)
        loss = functional.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float((out.argmax(1) == data.y)[data.test_mask].float().mean())


def test_power_law_is_simple_and_undirected() -> None:
    data = power_law(200, 2000, num_features=4, num_classes=3)
    assert data.num_edges == 2000
    assert is_undirected(data.edge_index, num_nodes=200)
    assert not data.has_self_loops()
    assert data.edge_index.unique(dim=1).size(1) == 2000
    assert [int(data[mask].sum()) for mask in MASKS] == [120, 40, 40]


def test_power_law_never_changes() -> None:
    """Timings are quoted on this graph; a change of one random number makes them incomparable."""
    data = power_law(1000, 20_000, num_features=8, num_classes=5)
    digest = hashlib.blake2b(digest_size=8)
    for name in ("edge_index", "x", "y", *MASKS):
        digest.update(np.ascontiguousarray(data[name].numpy()).data)
    assert digest.hexdigest() == "8f9fdcb9f5994292"


@pytest.mark.parametrize("num_edges", [3, -2, 9902])
def test_power_law_refuses(num_edges: int) -> None:
    with pytest.raises(InputError, match=f"num_edges is {num_edges}"):
        power_law(100, num_edges)
