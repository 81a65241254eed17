"""Aggregation in chunks: the same as whole for every switch, in their order, with no memory asked for anew."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
from torch import Tensor

from pygdist.backends import CommBackend, HybridBackend
from pygdist.backends.fetching.adjacency import SOURCE_GROUPS
from pygdist.backends.fetching.arrival import Arrival
from pygdist.backends.fetching.groups import SourceGroup, group_by_source
from pygdist.comm import Communicator, ExchangePlan, Recorder
from pygdist.errors import InputError
from pygdist.graph import Shard, write_store
from pygdist.graph.memo import Memo
from pygdist.kernels import CSR, edge_softmax, gat, sddmm, spmm
from pygdist.kernels.chunked import gat_part, merge_softmax, softmax_part, spmm_into, tie_counts
from pygdist.memory.overflow import Overflow
from pygdist.native import load
from pygdist.routing import distribute
from pygdist.testing import RankPool, assert_exact, random_graph

# by piece: sums, means, extrema and attention; whole: attention and messages with edge attributes, an LSTM
LAYERS = [
    "GCNConv", "SAGEConv-mean", "SAGEConv-max", "SAGEConv-min", "GINConv", "GraphConv", "ARMAConv", "GATConv",
    "GATConv-edges", "GATv2Conv", "GATv2Conv-edges", "TransformerConv", "GINEConv", "SAGEConv-lstm",
]  # fmt: skip
#: Each switch by itself, and both with --exhaustive.
SWITCHES = pytest.mark.parametrize(
    ("ring", "overlap"),
    [(True, True), (True, False), (False, True), pytest.param(False, False, marks=pytest.mark.exhaustive)],
)


@pytest.mark.slow
@SWITCHES
def test_every_switch_equals_one_process(ring: bool, overlap: bool, pool: RankPool) -> None:
    backend = CommBackend(ring=ring, overlap=overlap)
    assert_exact(backend, layers=LAYERS, world_sizes=[3], graphs=["power-law"], pool=pool)


@pytest.mark.slow
@pytest.mark.skipif(load() is None, reason="hybrid plans in the native library")
def test_replicas_beside_chunks(pool: RankPool) -> None:
    backend = HybridBackend(cache_ratio=0.4)
    assert_exact(backend, layers=LAYERS, world_sizes=[4], graphs=["power-law"], num_layers=2, pool=pool)


class InParts(CommBackend):
    """Takes what comes from a rank in parts, however little it is."""

    name = ""
    _parts = 3  # type: ignore[assignment]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{}, {"ring": False}, {"overlap": False}, {"halo_gib": 1000 / 2**30}])
def test_rows_of_a_rank_in_parts(arguments: dict[str, Any], pool: RankPool) -> None:
    assert_exact(InParts(**arguments), layers=LAYERS, world_sizes=[3], graphs=["power-law"], pool=pool)


SMALL = 400 / 2**30  # a few rows for each pair of ranks


def _cuts(rank: int, world_size: int, folder: str, arguments: dict[str, Any]) -> int:
    """How often the edges of a model whose hops are 5, 8 and 3 wide are cut into chunks."""
    shard, backend = Shard.load(folder, rank), CommBackend(**arguments)
    backend.bind(shard, Communicator(dist.new_group()))
    model = pyg.GIN(5, 8, num_layers=3, out_channels=4).double()
    model.convs[1].nn.lins[-1] = pyg.Linear(8, 3).double()
    model.convs[2].nn.lins[0] = pyg.Linear(3, 4).double()
    distribute(model, backend=backend, check=False)
    for _ in range(2):  # what was cut for a backend goes with it
        for _ in range(2):
            model(shard.x, shard.adjacency).sum().backward()
        found = len(shard.adjacency.slot(SOURCE_GROUPS, Memo).results)
        backend.unbind()
        assert not shard.adjacency.slot(SOURCE_GROUPS, Memo).results
        backend.bind(shard, Communicator(dist.new_group()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "times"),
    [
        ({}, 1),
        ({"ring": False}, 1),
        ({"overlap": False}, 1),
        ({"halo_gib": 1.0}, 1),
        ({"halo_gib": SMALL}, 2),  # the wider rows need smaller pieces, which do for the narrow ones
    ],
)
def test_edges_are_cut_into_chunks_once(arguments: dict[str, Any], times: int, tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph("power-law")
    write_store(data, parts[3], tmp_path / "parts", num_parts=3, method="x", arguments={}, notes=[])
    assert pool.run(_cuts, 3, str(tmp_path / "parts"), arguments) == [times] * 3


@pytest.mark.slow
@SWITCHES
def test_rows_that_arrive_piece_by_piece(ring: bool, overlap: bool, pool: RankPool) -> None:
    backend = CommBackend(ring=ring, overlap=overlap, halo_gib=SMALL)
    assert_exact(backend, layers=LAYERS, world_sizes=[3], graphs=["power-law"], pool=pool)


@pytest.mark.slow
@pytest.mark.skipif(load() is None, reason="hybrid plans in the native library")
def test_replicas_beside_pieces(pool: RankPool) -> None:
    backend = HybridBackend(cache_ratio=0.4, halo_gib=SMALL)
    assert_exact(backend, layers=LAYERS, world_sizes=[4], graphs=["empty-part"], num_layers=2, pool=pool)


@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GIN"])
def test_no_more_rows_are_here_than_there_is_memory_for(name: str, tmp_path: Path, pool: RankPool) -> None:
    store = _store(tmp_path / "parts", 3)
    whole, pieces = (
        pool.run(_check_epochs, 3, store, name, arguments) for arguments in ({}, {"halo_gib": 2000 / 2**30})
    )
    for rank in range(3):
        # rows and gradients, each sent and received
        assert pieces[rank][-1]["bytes"] <= 4 * 2000 < whole[rank][-1]["bytes"]
        assert pieces[rank][-1]["sent"] == whole[rank][-1]["sent"]
    with pytest.raises(InputError, match="halo_gib is 0, expected a finite number of GiB above 0"):
        CommBackend(halo_gib=0)


@pytest.mark.slow
def test_half_the_bytes_are_not_exact_and_say_so(pool: RankPool) -> None:
    backend = CommBackend(wire_dtype="bfloat16")
    assert not backend.abilities.exact
    assert backend.abilities.approximation == "rows and gradients travel as bfloat16"
    with pytest.raises(AssertionError, match="differences beyond"):
        assert_exact(backend, layers=["GCNConv"], world_sizes=[2], graphs=["power-law"], pool=pool)
    near = assert_exact(backend, layers=LAYERS, world_sizes=[3], graphs=["power-law"], pool=pool, tolerance=0.05)
    assert max(near.values()) > 1e-4
    with pytest.raises(InputError, match="wire_dtype is 'int8', expected bfloat16 or nothing"):
        CommBackend(wire_dtype="int8")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 3, 16, 33, 64, 100])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_are_added_to_what_is_there(width: int, dtype: torch.dtype, weighted: bool) -> None:
    csr, x, weight = _case(width, dtype)
    before = torch.randn(csr.num_rows, width, dtype=dtype)
    found = before.clone()
    spmm_into(found, csr, x, weight if weighted else None, onto=True)
    expected = before + spmm(csr, x, weight.squeeze(1) if weighted else None)
    torch.testing.assert_close(found, expected)
    spmm_into(found, csr, x, weight if weighted else None)
    torch.testing.assert_close(found, expected - before)


def _case(width: int, dtype: torch.dtype) -> tuple[CSR, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(width)
    row, col = (torch.randint(0, bound, (200,), generator=generator) for bound in (50, 40))
    sorted_csr = CSR.from_coo(row, col, num_rows=50, num_cols=40)  # some rows are empty
    csr = CSR(sorted_csr.indptr, sorted_csr.index, 40)
    return csr, torch.randn(40, width, dtype=dtype), torch.randn(200, 1, dtype=dtype)


def _pieces(csr: CSR) -> dict[int, tuple[SourceGroup, Tensor]]:
    """Columns 0 to 9 are here; 10 to 39 arrive from ranks 1 to 3, their order reversed."""
    plan = ExchangePlan(
        send_index=torch.empty(0, dtype=torch.int64), send_counts=(0, 0, 0, 0), recv_counts=(0, 12, 0, 18)
    )
    chunks = group_by_source(csr, 10, [Arrival(plan=plan, position=torch.arange(39, 9, -1))])
    columns = {0: torch.arange(10), 1: torch.arange(39, 27, -1), 3: torch.arange(27, 9, -1)}
    found = {0: chunks.local, **{message.rank: chunk for message, chunk in chunks.remote[0].items()}}
    assert found.keys() == columns.keys()
    return {rank: (chunk, columns[rank]) for rank, chunk in found.items()}


def test_chunks_hold_every_edge_once_in_its_order() -> None:
    csr, _, _ = _case(1, torch.float64)
    row, seen = csr.row_index(), []
    for chunk, columns in _pieces(csr).values():
        part, place = chunk.csr, chunk.perm.long()
        assert torch.equal(columns[part.index.long()], csr.index[place].long())
        assert torch.equal(part.row_index(), row[place])
        seen.append(place)
    assert torch.equal(torch.cat(seen).sort().values.long(), torch.arange(csr.num_entries))


@pytest.mark.parametrize("in_files", [False, True])
def test_chunks_of_pieces_take_no_more_memory_than_their_edges(in_files: bool, tmp_path: Path) -> None:
    """Rows of the hop are many, edges of a piece few: no pointer for each row is held."""
    overflow = Overflow(torch.device("cpu"), budget=1, folder=tmp_path, small=1) if in_files else None
    generator = torch.Generator().manual_seed(0)
    row, col = (torch.randint(0, bound, (4000,), generator=generator) for bound in (2000, 1000))
    csr = CSR.from_coo(row, col, num_rows=2000, num_cols=1000)
    csr = CSR(csr.indptr, csr.index, 1000)
    plan = ExchangePlan(send_index=torch.empty(0, dtype=torch.int64), send_counts=(0, 0, 0), recv_counts=(0, 450, 450))
    arrival = Arrival(plan=plan, position=torch.arange(999, 99, -1))
    pieces = [arrival.piece(first, 50) for first in range(0, 450, 50)]
    chunks = group_by_source(csr, 100, pieces, overflow=overflow)
    seen, row = [chunks.local.perm], csr.row_index()
    for piece, remote in zip(pieces, chunks.remote, strict=True):
        for message, chunk in remote.items():
            part, columns = chunk.csr, piece.positions_of(message.rank)
            assert torch.equal(columns[part.index.long()], csr.index[chunk.perm.long()].long())
            assert torch.equal(part.row_index(), row[chunk.perm.long()])
            assert torch.equal(chunk.filled.squeeze(1), torch.bincount(part.row_index(), minlength=2000) > 0)
            held = [one for one in vars(chunk).values() if isinstance(one, Tensor)]
            assert sum(one.nbytes for one in held) == 3 * 4 * part.num_entries
            assert all(one.is_shared() == in_files for one in held)
            seen.append(chunk.perm)
    assert torch.equal(torch.cat(seen).sort().values.long(), torch.arange(4000))


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_the_softmax_is_merged_piece_by_piece(scale: float) -> None:
    """Also where the exponentials of one piece are nothing beside those of another."""
    csr, x, _ = _case(8, torch.float64)
    source, target = scale * torch.randn(40, 2, dtype=torch.float64), torch.randn(50, 2, dtype=torch.float64)
    merged = None
    for chunk, columns in _pieces(csr).values():
        merged = gat_part(chunk.csr, x[columns], source[columns].contiguous(), target, 0.2, merged)
    assert merged is not None
    torch.testing.assert_close(merged[0], gat(csr, x.view(40, 2, 4), source, target).flatten(1))
    for found, expected in zip(merged, gat_part(csr, x, source, target, 0.2), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("scale", [1.0, 900.0])
def test_any_softmax_is_merged_piece_by_piece(scale: float) -> None:
    csr, x, _ = _case(8, torch.float64)
    values, keys = x.view(40, 2, 4), scale * torch.randn(40, 2, 4, dtype=torch.float64)
    queries = torch.randn(50, 2, 4, dtype=torch.float64)
    merged = None
    for chunk, columns in _pieces(csr).values():
        piece = softmax_part(chunk.csr, sddmm(chunk.csr, keys[columns], queries), values[columns])
        merged = piece if merged is None else merge_softmax(merged, piece)
    assert merged is not None
    expected = spmm(csr, values, edge_softmax(csr, sddmm(csr, keys, queries)))
    torch.testing.assert_close(merged[0] / merged[2].clamp(min=1).unsqueeze(-1), expected)
    assert bool((merged[2] == 0).eq(csr.indptr.diff().eq(0).unsqueeze(1)).all())


def test_ties_are_counted_over_all_pieces() -> None:
    csr, _, _ = _case(1, torch.float32)
    x = torch.randint(-1, 2, (40, 5)).float()  # many ties, and zeros
    out = spmm(csr, x, None, "max")
    lifted = x[csr.index.long()] == out.repeat_interleave(csr.indptr.diff(), dim=0)
    expected = torch.zeros_like(out).index_add_(0, csr.row_index().long(), lifted.float())
    parts = [(chunk.csr, x[columns].contiguous()) for chunk, columns in _pieces(csr).values()]
    found = sum(tie_counts(part, rows, None, out) for part, rows in parts)
    assert torch.equal(found, expected)


def _store(folder: Path, world_size: int) -> str:
    data, parts = random_graph("power-law", num_nodes=200, seed=1)
    write_store(data, parts[world_size], folder, num_parts=world_size, method="test", arguments={}, notes=[])
    return str(folder)


HIDDEN, CLASSES, HEADS = 8, 5, 2


def _model(name: str, num_features: int) -> torch.nn.Module:
    torch.manual_seed(0)
    if name == "Transformer":
        widths = [num_features, HIDDEN, HIDDEN]
        layers = [pyg.TransformerConv(width, HIDDEN // HEADS, heads=HEADS) for width in widths]
        return pyg.Sequential("x, e", [(layer, "x, e -> x") for layer in layers])
    arguments = {"GAT": {"heads": HEADS}, "GATv2": {"heads": HEADS, "v2": True}}.get(name, {})
    made: torch.nn.Module = getattr(pyg, name.removesuffix("v2"))(num_features, HIDDEN, 3, CLASSES, **arguments)
    return made


def _check_epochs(
    rank: int, world_size: int, store: str, name: str, arguments: dict[str, Any], late_s: float = 0.0
) -> list[dict[str, Any]]:
    """What each of four epochs held, did and sent on this rank; rank 0 begins late."""
    shard, backend = Shard.load(store, rank), CommBackend(**arguments)
    backend.bind(shard, Communicator(dist.new_group()))
    communicator, x = backend.communicator, shard.x.float()
    model = distribute(_model(name, x.size(1)), backend=backend, check=False)
    epochs = []
    for _ in range(4):
        communicator.recorder = Recorder()
        communicator.meter.reset()
        time.sleep(late_s if rank == 0 else 0.0)
        model(x, shard.adjacency).sum().backward()
        epochs.append(
            {
                "memory": [tensor.data_ptr() for tensor in communicator.buffers.tensors],
                "bytes": communicator.buffers.nbytes,
                "spans": communicator.recorder.spans,
                "sent": communicator.meter.total.sent_bytes,
                "halo": shard.num_halo,
            }
        )
    return epochs


@pytest.mark.parametrize("overlap", [True, False])
def test_no_memory_is_asked_for_anew(tmp_path: Path, overlap: bool, pool: RankPool) -> None:
    for epochs in pool.run(_check_epochs, 3, _store(tmp_path, 3), "GCN", {"overlap": overlap}):
        assert epochs[0]["memory"]
        assert epochs[1]["memory"] == epochs[2]["memory"] == epochs[3]["memory"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GCN", "GATv2", "Transformer"])
def test_own_rows_are_aggregated_while_others_travel_only_where_they_overlap(
    name: str, tmp_path: Path, pool: RankPool
) -> None:
    store = _store(tmp_path, 3)
    # the first hop of GCN is kept
    label = f"hop {2 if name == 'GCN' else 1} of {name}Conv, forward"
    for overlap in (True, False):
        for epochs in pool.run(_check_epochs, 3, store, name, {"overlap": overlap}, 0.3)[1:]:
            overlaps = []
            for spans in (epoch["spans"] for epoch in epochs[1:]):
                start = next(one.start for one in spans if (one.kind, one.label) == ("aggregate", "own rows"))
                late = max(one.end for one in spans if one.kind == "travel" and label in one.label)
                overlaps.append(start < late)
            assert any(overlaps) == overlap  # a rank that gets no processor for 0.3 s begins late too


@pytest.mark.slow
@pytest.mark.parametrize(("wire", "size"), [(None, 4), ("bfloat16", 2)])
@pytest.mark.parametrize(
    ("name", "widths"),
    [
        # what the first layer reads of its neighbours is fixed: its sums are kept, and nothing travels for it
        ("GCN", [HIDDEN, CLASSES]),
        ("GIN", [HIDDEN, CLASSES]),
        ("GraphSAGE", [HIDDEN, CLASSES]),
        ("GAT", [HEADS, HIDDEN, HEADS, HIDDEN, HEADS, HEADS * CLASSES]),  # scores, then rows
        ("GATv2", [HIDDEN, HIDDEN, HEADS * CLASSES]),
        ("Transformer", [2 * HIDDEN] * 3),  # keys and values
    ],
)
def test_bytes_of_an_epoch_are_what_halo_rows_and_widths_say(
    name: str, widths: list[int], wire: str | None, size: int, tmp_path: Path, pool: RankPool
) -> None:
    found = pool.run(_check_epochs, 3, _store(tmp_path, 3), name, {"wire_dtype": wire})
    halo = sum(epochs[0]["halo"] for epochs in found)
    there_and_back = 2
    assert sum(epochs[-1]["sent"] for epochs in found) == there_and_back * halo * size * sum(widths)


def _check_bfloat16(rank: int, world_size: int, store: str, name: str) -> float:
    """Attention in bfloat16, beside the same with one exchange for all rows."""
    shard = Shard.load(store, rank)
    found = []
    for backend in (CommBackend(), Whole()):
        backend.bind(shard, Communicator(dist.new_group()))
        model = distribute(_model(name, shard.x.size(1)).bfloat16(), backend=backend, check=False)
        out = model(shard.x.bfloat16(), shard.adjacency)
        out.float().square().sum().backward()
        found.append((out, next(model.parameters()).grad))
    return max(float((one - other).abs().max()) for one, other in zip(*found, strict=True))  # type: ignore[operator]


class Whole(CommBackend):
    """Fetches in a way of its own, so that hops are not taken in chunks."""

    def halo_rows(self, x: Tensor, *, label: str) -> Tensor:
        return super().halo_rows(x, label=label)


@pytest.mark.parametrize("name", ["GAT", "GATv2", "Transformer"])
def test_attention_in_half_precision_is_what_it_is_without_chunks(name: str, tmp_path: Path, pool: RankPool) -> None:
    assert max(pool.run(_check_bfloat16, 3, _store(tmp_path, 3), name)) < 1e-2


def _check_second_derivative(rank: int, world_size: int, store: str, name: str) -> None:
    shard, backend = Shard.load(store, rank), CommBackend()
    backend.bind(shard, Communicator(dist.new_group()))
    model = distribute(_model(name, shard.x.size(1)), backend=backend, check=False)
    x = shard.x.float().requires_grad_()
    (first,) = torch.autograd.grad(model(x, shard.adjacency).square().sum(), x, create_graph=True)
    with pytest.raises(InputError, match=r"pygdist computes first derivatives alone, .*create_graph=True"):
        first.sum().backward()


@pytest.mark.parametrize("name", ["GCN", "GAT", "Transformer"])
def test_second_derivatives_are_refused_not_wrong(name: str, tmp_path: Path, pool: RankPool) -> None:
    pool.run(_check_second_derivative, 2, _store(tmp_path, 2), name)


def _check_ids(rank: int, world_size: int, store: str) -> bool:
    """Ids are not rounded to the type in which rows travel."""
    shard, backend = Shard.load(store, rank), CommBackend(wire_dtype="bfloat16")
    backend.bind(shard, Communicator(dist.new_group()))
    ids = (1000 + shard.owned_id).unsqueeze(1)
    return torch.equal(backend.halo_rows(ids, label="ids").squeeze(1), 1000 + shard.n_id[shard.num_owned :])


def test_whole_numbers_are_not_rounded(tmp_path: Path, pool: RankPool) -> None:
    assert all(pool.run(_check_ids, 3, _store(tmp_path, 3)))
