"""Rows to columns and back: who gets what, the bytes, and the gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pygdist.comm import Communicator
from pygdist.comm.slices import columns_of, gather_columns, share_rows, split_and_share, split_columns
from pygdist.memory.overflow import Overflow
from pygdist.testing import RankPool

COUNTS = (4, 0, 3)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("width", [0, 1, 3, 7, 64])
def test_columns_are_dealt_evenly(width: int, world_size: int) -> None:
    parts = [columns_of(width, rank, world_size) for rank in range(world_size)]
    assert [column for part in parts for column in range(width)[part]] == list(range(width))
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 1


def _check(rank: int, world_size: int, width: int, piecewise: bool) -> None:
    communicator = Communicator(dist.new_group(), check_order=True)
    overflow = Overflow(torch.device("cpu"), budget=320) if piecewise else None
    generator = torch.Generator().manual_seed(width)
    whole = torch.rand(sum(COUNTS), 2, width, generator=generator, dtype=torch.float64)
    own = whole.split(list(COUNTS))[rank].clone().requires_grad_()
    mine = columns_of(width, rank, world_size)

    communicator.meter.reset()
    sliced = split_columns(own, COUNTS, communicator, label="test")
    assert torch.equal(sliced, whole[..., mine])
    held = mine.stop - mine.start
    assert communicator.meter.read().sent_bytes == 8 * 2 * COUNTS[rank] * (width - held)

    communicator.meter.reset()
    back = gather_columns(sliced, COUNTS, width, communicator, label="test")
    assert torch.equal(back, own)
    assert communicator.meter.read().sent_bytes == 8 * 2 * (sum(COUNTS) - COUNTS[rank]) * held
    assert communicator.meter.read().calls == 1

    # a rank's loss weighs what it sees of everybody's rows; each row's gradient is the sum over ranks
    weight = torch.rand(whole.shape, generator=generator, dtype=torch.float64)
    (split_columns(own, COUNTS, communicator, label="test") * weight[..., mine]).sum().backward()
    assert own.grad is not None
    assert torch.equal(own.grad, weight.split(list(COUNTS))[rank])
    own.grad = None
    leaf = sliced.detach().requires_grad_()
    (gather_columns(leaf, COUNTS, width, communicator, label="test") * 2).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.full_like(sliced, 2))

    communicator.meter.reset()
    everyone = share_rows(own, COUNTS, communicator, label="test", overflow=overflow)
    assert torch.equal(everyone, whole)
    assert communicator.meter.read().calls == 1  # however many pieces it came in
    (everyone * weight * (rank + 1)).sum().backward()
    factor = sum(one + 1 for one in range(world_size))
    assert torch.allclose(own.grad, weight.split(list(COUNTS))[rank] * factor, rtol=0, atol=1e-12)


def _check_both(rank: int, world_size: int, width: int) -> None:
    communicator = Communicator(dist.new_group(), check_order=True)
    generator = torch.Generator().manual_seed(width)
    shared_counts = (1, 5, 0)
    whole = torch.rand(sum(COUNTS), 2, width, generator=generator, dtype=torch.float64)
    every = torch.rand(sum(shared_counts), 3, generator=generator)  # the narrower dtype
    x = whole.split(list(COUNTS))[rank].clone().requires_grad_()
    shared = every.split(list(shared_counts))[rank].clone().requires_grad_()
    mine = columns_of(width, rank, world_size)
    held = mine.stop - mine.start

    sliced, found = split_and_share(x, shared, COUNTS, shared_counts, communicator, label="test")
    assert torch.equal(sliced, whole[..., mine])
    assert torch.equal(found, every)
    there = 8 * 2 * COUNTS[rank] * (width - held) + 4 * 2 * 3 * shared_counts[rank]
    assert communicator.meter.read().sent_bytes == there

    weights = torch.rand(whole.shape, generator=generator, dtype=torch.float64)
    ((sliced * weights[..., mine]).sum() + (found * every * (rank + 1)).sum()).backward()
    assert x.grad is not None
    assert shared.grad is not None
    assert torch.equal(x.grad, weights.split(list(COUNTS))[rank])
    assert torch.allclose(shared.grad, every.split(list(shared_counts))[rank] * 6)  # 1 + 2 + 3
    back = 8 * 2 * (sum(COUNTS) - COUNTS[rank]) * held + 4 * 3 * (sum(shared_counts) - shared_counts[rank])
    assert communicator.meter.read().sent_bytes == there + back
    assert communicator.meter.read().calls == 2


@pytest.mark.parametrize("width", [1, 2, 7])
def test_rows_travel_with_what_everybody_needs(width: int, pool: RankPool) -> None:
    pool.run(_check_both, 3, width)


@pytest.mark.parametrize("piecewise", [False, True])
@pytest.mark.parametrize("width", [1, 2, 7])
def test_rows_become_columns_and_columns_rows(width: int, piecewise: bool, pool: RankPool) -> None:
    pool.run(_check, 3, width, piecewise)


def test_one_process_keeps_what_it_has() -> None:
    x = torch.rand(4, 3)
    communicator = Communicator()
    assert split_columns(x, (4,), communicator, label="test") is x
    assert gather_columns(x, (4,), 3, communicator, label="test") is x
    assert share_rows(x, (4,), communicator, label="test") is x
    assert split_and_share(x, x, (4,), (4,), communicator, label="test") == (x, x)
