"""Sums over slices in chunks: every row travels once, whatever the chunks, and the sums are those of one process."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pygdist.backends.slicing.adjacency import SlicedEdges, sum_of_slices
from pygdist.backends.slicing.all_nodes import SliceLayout
from pygdist.backends.slicing.chunk_plan import ChunkPlan
from pygdist.comm import Communicator, Recorder
from pygdist.graph import Adjacency
from pygdist.kernels import CSR
from pygdist.kernels.chunked import spmm_into
from pygdist.memory.overflow import Overflow
from pygdist.native import load
from pygdist.testing import RankPool
from tests.backends.schedule import noted

COUNTS = (11, 0, 17)
CHUNKS = 4


def _edges(num_rows: int, num_edges: int = 120) -> tuple[Tensor, CSR]:
    """A dense matrix with the number of edges between rows, and the same as CSR; the last rows are read by nobody."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(0, num_rows, (num_edges,), generator=generator)
    source = torch.randint(0, num_rows - 3, (num_edges,), generator=generator)
    csr = CSR.from_coo(target, source, num_rows=num_rows, num_cols=num_rows)
    dense = torch.zeros(num_rows, num_rows, dtype=torch.float64)
    return dense.index_put((target, source), torch.ones(num_edges, dtype=torch.float64), accumulate=True), csr


@pytest.mark.parametrize("num_chunks", [1, 2, 5, 100])
def test_chunks_have_every_row_once(num_chunks: int) -> None:
    _, csr = _edges(sum(COUNTS))
    plan = ChunkPlan(csr, COUNTS, num_chunks)
    assert len(plan.chunks) == min(num_chunks, max(COUNTS))
    rows = [row for chunk in plan.chunks for span in chunk.spans for row in range(span.start, span.stop)]
    assert sorted(rows) == list(range(28))
    for chunk in plan.chunks:  # as many rows of each rank in one chunk as in any other
        assert all(count // len(plan.chunks) <= span.stop - span.start <= -(-count // len(plan.chunks))
                   for span, count in zip(chunk.spans, COUNTS, strict=True))  # fmt: skip
    if num_chunks == 1:
        return
    here: set[int] = set()
    for chunk, pieces in zip(plan.chunks, plan.queue(), strict=True):
        (piece,) = pieces
        for rank, fresh in enumerate(piece):
            assert isinstance(fresh, Tensor)
            assert all(plan.starts[rank] <= row < plan.starts[rank + 1] for row in fresh.tolist())
            assert not here & set(fresh.tolist())
            here |= set(fresh.tolist())
        for span in chunk.spans:
            assert set(csr.index[int(csr.indptr[span.start]) : int(csr.indptr[span.stop])].tolist()) <= here
    assert here == set(range(28))


@pytest.mark.parametrize(
    ("budget", "asked", "expected"), [(1 << 30, 3, 3), (1500, 1, 8), (1500, 9, 9), (1500, None, 8)]
)
def test_a_number_of_chunks_does_not_lift_the_limit_of_memory(budget: int, asked: int | None, expected: int) -> None:
    csr = _edges(sum(COUNTS))[1]
    sliced = SlicedEdges(
        edges=Adjacency.from_csr(CSR(csr.indptr, csr.index, 28)),
        layout=SliceLayout(communicator=Communicator(), counts=COUNTS, overflow=Overflow(torch.device("cpu"), budget)),
        label="test",
        num_chunks=asked,
        weights_of_all=lambda value, _: value,
        factors_of_all=lambda _: None,
    )
    assert len(sliced.plan(torch.zeros(28, 5), None).chunks) == expected


def _sum(
    rank: int, world_size: int, num_chunks: int, width: int, rounds: int, mean: bool, weighted: bool
) -> tuple[float, int, int]:
    dense, csr = _edges(sum(COUNTS))
    communicator = Communicator(dist.new_group(), check_order=True)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(28, width, generator=generator, dtype=torch.float64)
    value = torch.rand(csr.num_entries, generator=generator, dtype=torch.float64) if weighted else None
    adjacency = Adjacency.from_csr(CSR(csr.indptr, csr.index, 28))
    sliced = SlicedEdges(
        edges=adjacency,
        layout=SliceLayout(communicator=communicator, counts=COUNTS),
        label="test",
        num_chunks=num_chunks,
        weights_of_all=lambda value, _: value,
        factors_of_all=lambda _: None,
    )
    whole = x.clone().requires_grad_()
    rows = x.split(list(COUNTS))[rank].clone().requires_grad_()
    matrix = dense if value is None else torch.zeros_like(dense).index_put(
        (csr.row_index().long(), csr.index.long()), value, accumulate=True
    )  # fmt: skip
    if mean:
        matrix = matrix / dense.sum(1, keepdim=True).clamp(min=1)
    expected = torch.linalg.matrix_power(matrix, rounds) @ whole
    out = sum_of_slices(rows, sliced, value=value, mean=mean, rounds=rounds)
    factor = torch.randn(28, width, generator=generator, dtype=torch.float64)
    (expected * factor).sum().backward()
    communicator.meter.reset()
    (out * factor.split(list(COUNTS))[rank]).sum().backward()
    assert whole.grad is not None
    assert rows.grad is not None
    differences = [
        (out - expected.split(list(COUNTS))[rank]).abs(), (rows.grad - whole.grad.split(list(COUNTS))[rank]).abs()
    ]  # fmt: skip
    meter = communicator.meter.read()
    return max(float(one.max()) if one.numel() else 0.0 for one in differences), meter.sent_bytes, meter.calls


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_are_those_of_one_process(rounds: int, mean: bool, weighted: bool, pool: RankPool) -> None:
    sent = set()
    for num_chunks in (1, 4):
        ranks = pool.run(_sum, 3, num_chunks, 5, rounds, mean, weighted)
        assert max(difference for difference, _, _ in ranks) < 1e-10
        sent.add(tuple(num_bytes for _, num_bytes, _ in ranks))
        assert {calls for _, _, calls in ranks} == {2}  # one way there and one back
    assert len(sent) == 1  # no row travels twice


def _sum_in_blocks(rank: int, world_size: int, num_chunks: int) -> tuple[float, int]:
    """The largest difference, and how many blocks were summed."""
    blocks = 0

    def counted(*arguments: Any, **options: Any) -> None:
        nonlocal blocks
        blocks += arguments[1].index.dtype == torch.uint16
        spmm_into(*arguments, **options)

    with (
        mock.patch("pygdist.kernels.chunked.BLOCK", 16),
        mock.patch("pygdist.kernels.chunked._OFTEN", 1),
        mock.patch("pygdist.backends.slicing.sums.spmm_into", counted),
    ):
        difference, *_ = _sum(rank, world_size, num_chunks, 5, 2, False, False)
    return difference, blocks


@pytest.mark.parametrize("num_chunks", [1, 4])
def test_sums_whose_columns_come_in_blocks(num_chunks: int, pool: RankPool) -> None:
    if load() is None:
        pytest.skip("the native library was not built here")
    for difference, blocks in pool.run(_sum_in_blocks, 3, num_chunks):
        assert difference < 1e-10
        assert blocks >= 2 * 2 * 2  # two of 28 columns, in two rounds forward and two back


@pytest.mark.parametrize("width", [0, 1, 2])
def test_fewer_columns_than_ranks(width: int, pool: RankPool) -> None:
    assert max(found[0] for found in pool.run(_sum, 3, 3, width, 2, True, True)) < 1e-10


def _sliced(communicator: Communicator, overlap: bool, counts: tuple[int, ...] = COUNTS) -> SlicedEdges:
    _, csr = _edges(sum(counts))
    return SlicedEdges(
        edges=Adjacency.from_csr(CSR(csr.indptr, csr.index, 28)), num_chunks=CHUNKS,
        layout=SliceLayout(communicator=communicator, counts=counts, overlap=overlap),
        label="test",
        weights_of_all=lambda value, _: value, factors_of_all=lambda _: None,
    )  # fmt: skip


def _order(rank: int, world_size: int, overlap: bool) -> list[str]:
    communicator = Communicator(dist.new_group())
    with noted(communicator) as found:
        sum_of_slices(torch.randn(COUNTS[rank], 300), _sliced(communicator, overlap))
    return found


@pytest.mark.parametrize("overlap", [True, False])
def test_a_chunk_is_summed_between_the_sources_of_the_next_and_the_sums_of_the_last(
    overlap: bool, pool: RankPool
) -> None:
    for events in pool.run(_order, 3, overlap):
        sums = [number for number, said in enumerate(events) if said.startswith("computes")]
        assert len(sums) == 3 * CHUNKS  # of every rank's rows
        for chunk in range(CHUNKS):
            first, last = sums[3 * chunk], sums[3 * chunk + 2]
            assert events.index(f"has split {chunk}") < first
            neighbours = [f"split {chunk + 1}"] * (chunk < CHUNKS - 1) + [f"gather {chunk - 1}"] * (chunk > 0)
            for one in neighbours:
                under_way = events.index(f"begins {one}") < first and last < events.index(f"has {one}")
                assert under_way == overlap, one


def _travels(rank: int, world_size: int, overlap: bool) -> tuple[bool, bool]:
    """Tell if sources, and if sums of the chunk before, arrived after the sums of a chunk had begun."""
    communicator = Communicator(dist.new_group())
    communicator.recorder = recorder = Recorder()

    def late(*arguments: Any, **options: Any) -> None:
        time.sleep(0.02 * rank)  # the others are ahead of the last one
        spmm_into(*arguments, **options)

    with mock.patch("pygdist.backends.slicing.sums.spmm_into", late):
        sum_of_slices(torch.randn(COUNTS[rank], 300), _sliced(communicator, overlap))
    began = [span.start for span in recorder.spans if span.kind == "aggregate"][::3]
    ends = {
        f"{what} {chunk}": max(
            (span.end for span in recorder.spans if span.kind == "travel" and f", {what} {chunk}, from" in span.label),
            default=0,
        )
        for what in ("split", "gather")
        for chunk in range(CHUNKS)
    }
    sources = any(ends[f"split {chunk}"] > began[0] for chunk in range(CHUNKS))
    return sources, any(ends[f"gather {chunk - 1}"] > began[chunk] for chunk in range(1, CHUNKS))


@pytest.mark.parametrize("overlap", [True, False])
def test_rows_travel_while_others_are_summed(overlap: bool, pool: RankPool) -> None:
    sources, sums = zip(*pool.run(_travels, 3, overlap), strict=True)
    assert any(sources) == overlap
    assert any(sums) == overlap


def _again(rank: int, world_size: int, turn: int) -> tuple[bool, float]:
    """Tell if sums are the same after a pass that failed, and how many seconds they took."""
    communicator = Communicator(dist.new_group(), timeout_s=20)
    x, sliced, calls = torch.randn((11, 17)[rank], 300), _sliced(communicator, True, (11, 17)), iter(range(1000))
    expected = sum_of_slices(x, sliced)

    def failing(*arguments: Any, **options: Any) -> None:
        if next(calls) == turn:
            raise ValueError("no memory")
        spmm_into(*arguments, **options)

    with mock.patch("pygdist.backends.slicing.sums.spmm_into", failing), pytest.raises(ValueError, match="no memory"):
        sum_of_slices(x, sliced)
    start = time.monotonic()
    again = sum_of_slices(x, sliced)
    return torch.equal(again, expected), time.monotonic() - start


@pytest.mark.parametrize("turn", [0, 1, 4])
def test_a_pass_that_failed_leaves_nothing_that_the_next_waits_for(turn: int, pool: RankPool) -> None:
    for equal, seconds in pool.run(_again, 2, turn):
        assert equal
        assert seconds < 10
