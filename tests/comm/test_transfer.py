"""Exchanges under way: what arrives is what was sent, in whatever order ranks are ready, and nothing waits for ever."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from pygdist.comm import Communicator, Message, Recorder, Transfer, message_rows
from pygdist.testing import RankPool


def _rows(source: int, target: int, number: int) -> torch.Tensor:
    """Of different lengths, some none."""
    return torch.full(((source + 2 * target) % 4, 3), float(100 * number + 10 * source + target))


def _part(rows: torch.Tensor, message: Message, parts: int) -> torch.Tensor:
    return rows[message_rows(len(rows), message.number, parts)]


def _check_transfers(rank: int, world_size: int, ring: bool, back: bool, parts: int) -> None:
    communicator = Communicator(dist.new_group(), check_order=True)
    for number in range(3):
        incoming = [torch.empty_like(_rows(peer, rank, number)) for peer in range(world_size)]
        transfer = Transfer(communicator, incoming, f"exchange {number}", ring=ring, back=back, messages=parts)
        others = [Message(peer, part) for peer in range(world_size) if peer != rank for part in range(parts)]
        assert sorted(transfer.targets) == sorted(transfer.sources) == others
        for message in transfer.targets:
            time.sleep(0.01 * rank)  # ranks are ready at different times
            transfer.give(message, _part(_rows(rank, message.rank, number), message, parts))
        for message in transfer.sources[: number + 1]:  # the rest is taken by finish()
            assert torch.equal(transfer.take(message), _part(_rows(message.rank, rank, number), message, parts))
        transfer.finish()
        for message in transfer.sources:
            assert torch.equal(incoming[message.rank], _rows(message.rank, rank, number))
    sent = sum(_rows(rank, peer, 0).nbytes for peer in range(world_size) if peer != rank)
    assert communicator.meter.total.sent_bytes == 3 * sent
    assert communicator.meter.total.calls == 3


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("ring", [False, True])
def test_all_that_is_given_arrives(ring: bool, back: bool, parts: int, pool: RankPool) -> None:
    pool.run(_check_transfers, 4, ring, back, parts)


def test_parts_are_all_rows_once() -> None:
    for num_rows in range(12):
        for parts in (1, 2, 3, 5):
            found = [row for part in range(parts) for row in range(num_rows)[message_rows(num_rows, part, parts)]]
            assert found == list(range(num_rows))


def _check_order(rank: int, world_size: int) -> list[list[int]]:
    transfer = Transfer(Communicator(dist.new_group()), [torch.empty(0)] * world_size, "nothing")
    for target in transfer.targets:
        transfer.give(target, torch.empty(0))
    transfer.finish()
    return [[message.rank for message in order] for order in (transfer.targets, transfer.sources)]


def test_the_ring(pool: RankPool) -> None:
    """In every step each rank is sent to by one other, the one that it takes rows from (NeutronStar, Sec. 4.3)."""
    orders = pool.run(_check_order, 4)
    for step in range(3):
        targets = {rank: orders[rank][0][step] for rank in range(4)}
        assert sorted(targets.values()) == [0, 1, 2, 3]
        assert all(orders[target][1][step] == rank for rank, target in targets.items())


def _check_overlap(rank: int, world_size: int) -> float:
    """Rows that arrived while this rank did something else are not waited for."""
    communicator = Communicator(dist.new_group())
    communicator.recorder = Recorder()
    rows = [torch.ones(1_000_000) for _ in range(world_size)]
    transfer = Transfer(communicator, [torch.empty_like(one) for one in rows], "rows")
    for target in transfer.targets:
        transfer.give(target, rows[target.rank])
    time.sleep(1.0)
    start = time.perf_counter()
    transfer.finish()
    assert {span.kind for span in communicator.recorder.spans} <= {"wait", "travel", "send"}
    return time.perf_counter() - start


def test_rows_travel_meanwhile(pool: RankPool) -> None:
    assert max(pool.run(_check_overlap, 2)) < 0.5


def _check_failure(rank: int, world_size: int) -> str:
    """Something that is no error of the transport: it reaches the caller, and the next exchange is not its victim."""
    communicator = Communicator(dist.new_group())
    rows = [torch.ones(10) for _ in range(world_size)]
    transfer = Transfer(communicator, [torch.empty(10) for _ in rows], "rows")
    for target in transfer.targets:
        transfer._post_step = _broken  # type: ignore[method-assign]
        transfer.give(target, rows[target.rank])
    with pytest.raises(KeyError, match="broken") as error:
        transfer.take(transfer.sources[0])
    communicator.courier.submit(lambda: None)
    return str(error.value)


def _broken(target: Message, source: Message) -> None:
    raise KeyError("broken")


def test_any_failure_on_the_other_thread_reaches_the_caller(pool: RankPool) -> None:
    assert pool.run(_check_failure, 2) == ["'broken'"] * 2
    assert pool.run(_check_order, 2)  # processes are alive
