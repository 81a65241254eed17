"""What all mini-batches promise, whatever they are cut by."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from unittest import mock

import pytest
import torch
from jsonargparse import ArgumentParser
from torch_geometric.data import Data

from pygdist.errors import InputError
from pygdist.kernels import CSR
from pygdist.native import library
from pygdist.sampler import (
    ClusterBatches,
    MiniBatches,
    NeighborBatches,
    SaintEdgeBatches,
    SaintNodeBatches,
    SaintWalkBatches,
)
from tests.sampler.oracle import edges_of, lonely_graph, part_of, random_graph

pytestmark = pytest.mark.skipif(library.load() is None, reason="the native library was not built here")

ALL: dict[str, MiniBatches] = {
    "neighbors": NeighborBatches([4, 3], batch_size=16),
    "in-order": NeighborBatches([4, 3], batch_size=16, replace=True, shuffle=False),
    "clusters": ClusterBatches(9, clusters_per_batch=2, partitioner="hash"),
    "metis": ClusterBatches(5),
    "saint-node": SaintNodeBatches(20, num_steps=3, sample_coverage=5),
    "saint-edge": SaintEdgeBatches(20, num_steps=3, sample_coverage=5),
    "saint-walk": SaintWalkBatches(2, 20, num_steps=3, sample_coverage=5),
}
every = pytest.mark.parametrize("name", ALL)


def same(mine: Iterable[Data], theirs: Iterable[Data]) -> bool:
    for one, other in zip(mine, theirs, strict=True):
        one, other = one.to_dict(), other.to_dict()
        if one.keys() != other.keys() or not all(
            torch.equal(torch.as_tensor(one[k]), torch.as_tensor(other[k])) for k in one
        ):
            return False
    return True


@every
@pytest.mark.parametrize("permuted", [True, False], ids=["perm", "no-perm"])
def test_batches_are_pieces_of_the_part(name: str, permuted: bool) -> None:
    csr = random_graph(200, 3000, permuted=permuted)
    part, edges = part_of(csr), edges_of(csr)
    loader = ALL[name].loader(part, csr, seed=3)
    batches = list(loader)
    assert len(loader) == len(batches) > 1
    for batch in batches:
        assert torch.equal(batch.x, part.x[batch.n_id])
        assert torch.equal(batch.y, part.y[batch.n_id])
        edge = batch.edge_weight.long()
        assert torch.equal(batch.n_id[batch.edge_index], edges[:, edge])
        assert torch.equal(batch.edge_type, part.edge_type[edge])
        assert bool(part.train_mask[batch.n_id[batch.train_mask]].all())
        assert batch.num_nodes == batch.n_id.numel() == batch.n_id.unique().numel()
        batch.validate()


@pytest.mark.slow
@every
def test_the_same_with_any_workers_and_others_in_each_epoch(name: str) -> None:
    csr = random_graph(200, 3000)
    part = part_of(csr)
    loaders = [ALL[name].loader(part, csr, seed=3, num_workers=workers) for workers in (0, 1, 2)]
    state = torch.get_rng_state()
    epochs = []
    for epoch in (0, 1, 0):
        for loader in loaders:
            loader.set_epoch(epoch)
        batches = [list(loader) for loader in loaders]
        assert same(batches[0], batches[1])
        assert same(batches[0], batches[2])
        epochs.append(batches[0])
    assert same(epochs[0], epochs[2])
    assert not same(epochs[0], epochs[1])
    assert not same(epochs[0], ALL[name].loader(part, csr, seed=4))
    assert torch.equal(torch.get_rng_state(), state)


@every
def test_what_was_found_before_is_taken(name: str) -> None:
    csr = random_graph(200, 3000)
    part, batches = part_of(csr), ALL[name]
    found = batches.precompute(part, csr, seed=3)
    norms = {"node_norm", "edge_norm"} if name.startswith("saint") else set()
    assert set(found) == ({"cluster"} if name in ("clusters", "metis") else norms)
    wanted = list(batches.loader(part, csr, seed=3))
    known = part_of(csr).update(found)
    with mock.patch.object(type(batches), "precompute", side_effect=AssertionError("once is enough")):
        assert same(batches.loader(known, csr, seed=3), wanted)
    for field, value in found.items():
        assert not same(batches.loader(known.clone().update({field: value.flip(0)}), csr, seed=3), wanted), field
        with pytest.raises(InputError, match=f"{field} has 7 values for {len(value)}"):
            batches.loader(known.clone().update({field: value[:7]}), csr, seed=3)
    assert batches.precompute(part_of(csr, train_every=0), csr, seed=3) == {}


@pytest.mark.parametrize("name", ["neighbors", "in-order", "clusters", "metis"])
def test_every_training_node_counts_once_an_epoch(name: str) -> None:
    csr = random_graph(200, 3000)
    part = part_of(csr)
    loader = ALL[name].loader(part, csr, seed=3)
    for epoch in range(3):
        loader.set_epoch(epoch)
        counted = torch.cat([batch.n_id[batch.train_mask] for batch in loader])
        assert torch.equal(counted.sort().values, part.train_mask.nonzero().view(-1))
        assert all(bool(batch.train_mask.any()) for batch in loader)


@every
@pytest.mark.parametrize("num_nodes", [1, 6])
@pytest.mark.parametrize("workers", [0, 1])
def test_parts_without_edges(name: str, num_nodes: int, workers: int) -> None:
    csr = lonely_graph(num_nodes)
    part = part_of(csr)
    batches = list(ALL[name].loader(part, csr, seed=0, num_workers=workers))
    assert batches
    assert all(batch.edge_index.shape == (2, 0) and batch.edge_weight.shape == (0,) for batch in batches)
    assert any(bool(batch.train_mask.any()) for batch in batches)


@every
@pytest.mark.parametrize("csr", [random_graph(), lonely_graph(0)], ids=["untrained", "empty"])
def test_parts_without_training_nodes_have_no_batches(name: str, csr: CSR) -> None:
    loader = ALL[name].loader(part_of(csr, train_every=0), csr, seed=0, num_workers=2)
    loader.set_epoch(1)
    assert len(loader) == 0
    assert list(loader) == []


@every
def test_labels_and_edge_inputs_may_be_missing(name: str) -> None:
    csr = random_graph()
    part = Data(x=part_of(csr).x, train_mask=part_of(csr).train_mask)
    for batch in ALL[name].loader(part, csr, seed=0):
        assert "y" not in batch
        assert "edge_weight" not in batch


@every
def test_workers_may_be_spawned(name: str) -> None:
    csr = random_graph()
    loader = ALL[name].loader(part_of(csr), csr, seed=0)
    assert same(pickle.loads(pickle.dumps(loader)), loader)


@every
def test_parts_that_do_not_fit_are_refused(name: str) -> None:
    csr = random_graph()
    batches, part = ALL[name], part_of(csr)
    with pytest.raises(InputError, match=r"the part has 61 rows, the matrix of its in-edges is 60 by 60"):
        batches.loader(Data(x=torch.zeros(61, 1)), csr, seed=0)
    with pytest.raises(InputError, match="train_mask must be bool with a value for each of 60 rows"):
        batches.loader(Data(x=part.x, train_mask=part.train_mask[:9]), csr, seed=0)
    with pytest.raises(InputError, match="edge_type has 3 values for 700 edges"):
        batches.loader(Data(x=part.x, train_mask=part.train_mask, edge_type=torch.zeros(3)), csr, seed=0)
    with pytest.raises(InputError, match="seed is -1"):
        batches.loader(part, csr, seed=-1)
    with pytest.raises(InputError, match="num_workers is -1, expected at least 0"):
        batches.loader(part, csr, seed=0, num_workers=-1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # jsonargparse is about to rename instantiate_classes
def test_a_configuration_names_the_class_and_its_arguments() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--batches", type=MiniBatches)
    given = ["--batches=NeighborBatches", "--batches.fan_out=[5, -1]", "--batches.batch_size=7"]
    batches = parser.instantiate_classes(parser.parse_args(given)).batches
    assert isinstance(batches, NeighborBatches)
    assert (batches.fan_out, batches.batch_size) == ([5, -1], 7)
    found = parser.parse_args(["--batches=ClusterBatches", "--batches.num_clusters=3", "--batches.partitioner=spring"])
    assert parser.instantiate_classes(found).batches.partitioner.name == "spring"
