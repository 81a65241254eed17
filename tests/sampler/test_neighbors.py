"""Batches of sampled neighbourhoods."""

from __future__ import annotations

import re

import pytest
import torch
from torch_geometric import typing as pyg_typing
from torch_geometric.nn import GraphSAGE

from pygdist.errors import InputError
from pygdist.native import library
from pygdist.sampler import NeighborBatches
from tests.sampler.oracle import edges_of, part_of, random_graph

WITH_PYG = pyg_typing.WITH_PYG_LIB or pyg_typing.WITH_TORCH_SPARSE

needs_library = pytest.mark.skipif(library.load() is None, reason="the native library was not built here")
libraries = pytest.mark.parametrize(
    "which",
    [
        pytest.param("native", marks=needs_library),
        pytest.param("pyg", marks=pytest.mark.skipif(not WITH_PYG, reason="neither pyg-lib nor torch_sparse is there")),
    ],
)


@libraries
@pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without a 'pyg-lib'")
def test_all_neighbours_give_the_output_of_the_whole_part(which: str) -> None:
    csr = random_graph(200, 2000)
    part, edges = part_of(csr), edges_of(csr)
    model = GraphSAGE(5, 8, num_layers=2, out_channels=3).eval()
    seen = 0
    with torch.no_grad():
        whole = model(part.x, edges)
        for batch in NeighborBatches([-1, -1], batch_size=7, library=which).loader(part, csr, seed=0):
            out = model(batch.x, batch.edge_index)[batch.train_mask]
            torch.testing.assert_close(out, whole[batch.n_id[: batch.batch_size]])
            assert torch.equal(batch.n_id[batch.edge_index], edges[:, batch.edge_weight.long()])
            seen += batch.batch_size
    assert seen == int(part.train_mask.sum())


@needs_library
def test_a_batch_says_what_each_hop_found() -> None:
    csr = random_graph(200, 2000)
    loader = NeighborBatches([3, 2], batch_size=50).loader(part_of(csr), csr, seed=0)
    assert [batch.batch_size for batch in loader] == [50, 1]
    for batch in loader:
        assert batch.num_sampled_nodes[0] == batch.batch_size
        assert sum(batch.num_sampled_nodes) == batch.num_nodes
        assert sum(batch.num_sampled_edges) == batch.num_edges
        assert batch.train_mask.nonzero().view(-1).tolist() == list(range(batch.batch_size))


@needs_library
def test_training_nodes_are_shuffled_or_not() -> None:
    csr = random_graph(200, 2000)
    part = part_of(csr)
    seeds = part.train_mask.nonzero().view(-1)

    def order(*, shuffle: bool) -> list[int]:
        loader = NeighborBatches([2], batch_size=9, shuffle=shuffle).loader(part, csr, seed=0)
        return torch.cat([batch.n_id[: batch.batch_size] for batch in loader]).tolist()

    assert order(shuffle=False) == seeds.tolist() == sorted(order(shuffle=True)) != order(shuffle=True)


def test_mistakes_are_named() -> None:
    with pytest.raises(InputError, match=r"fan_out is \[25, 0\], expected a number from 1 for each hop, or -1"):
        NeighborBatches([25, 0])
    with pytest.raises(InputError, match="batch_size is 0, expected at least 1"):
        NeighborBatches([25], batch_size=0)
    with pytest.raises(InputError, match="library is 'dgl', expected one of auto, native, pyg"):
        NeighborBatches([25], library="dgl")  # type: ignore[arg-type]


def test_without_a_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    csr = random_graph()
    for module in ("native.library", "sampler.neighbors"):
        monkeypatch.setattr(f"pygdist.{module}.load", lambda: None)
    for name in ("WITH_PYG_LIB", "WITH_TORCH_SPARSE"):
        monkeypatch.setattr(pyg_typing, name, False)
    for which in ("auto", "native"):
        with pytest.raises(InputError, match=r"apt install g\+\+\) and .*, or install pyg-lib or torch_sp"):
            NeighborBatches(library=which).loader(part_of(csr), csr, seed=0)  # type: ignore[arg-type]
    command = f"pip install torch_sparse torch_scatter -f https://data.pyg.org/whl/torch-{torch.__version__}.html"
    with pytest.raises(InputError, match=f"'pyg' needs pyg-lib or torch_sparse, neither is .*: {re.escape(command)}"):
        NeighborBatches(library="pyg").loader(part_of(csr), csr, seed=0)
