"""Ranks that wait for each other for ever are told from ranks that are slow; a thread tells what it waits in."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from pygdist.comm.connections import Connections
from pygdist.comm.places import Place, Report, Thread, deadlock, machine
from pygdist.testing import RankPool

WAITS = Report(beats=9, place=Place(exchange=7, label="rows", waiting=True), idle_s=20.0, made=((6, 1), (7, 2)))
EARLIER = replace(WAITS, place=Place(exchange=6, label="rows", waiting=True), made=((5, 9), (6, 1)))
COMPUTES = replace(WAITS, place=Place(exchange=7, label="rows"), idle_s=0.0)
BARRIER = replace(COMPUTES, call="torch.distributed.barrier", line="train.py:3", idle_s=20.0)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        pytest.param(WAITS, None, id="one exchange, which may be slow"),
        pytest.param(EARLIER, None, id="the exchange before, which may be slow"),
        pytest.param(COMPUTES, None, id="no call of others"),
        pytest.param(replace(WAITS, made=((6, 1), (7, 3)), idle_s=4.0), "rank 1 waits in epoch 0, exch", id="another"),
        pytest.param(replace(WAITS, made=((6, 1), (7, 3)), idle_s=1.0), None, id="another, for a moment"),
        pytest.param(BARRIER, None, id="the call after, as an exchange ends on one rank earlier than on another"),
        pytest.param(replace(COMPUTES, left="finished"), None, id="left after the exchange"),
        pytest.param(
            replace(COMPUTES, left="finished", place=Place(exchange=6)), "rank 1 has left its work", id="left before it"
        ),
        pytest.param(replace(COMPUTES, left="KeyError: 'x'"), "rank 1 has left its work (KeyError: 'x')", id="left"),
        pytest.param(replace(COMPUTES, run=1, place=Place(stage="test")), "has left run 0", id="a later run"),
        pytest.param(Report(), None, id="no report"),
        pytest.param(replace(BARRIER, still_s=14.0), "rank 1 waits in torch.distributed.barrier", id="no byte moves"),
        pytest.param(replace(BARRIER, still_s=2.0), None, id="bytes moved lately"),
    ],
)
def test_what_proves_that_ranks_wait_for_ever(other: Report, said: str | None) -> None:
    found = deadlock(0, {0: replace(WAITS, still_s=other.still_s and 20.0), 1: other}, soon_s=3.0, patience_s=13.0)
    assert (found is None) is (said is None), found
    assert said is None or (found is not None and said in found and "rank 0 waits in epoch 0, exchange 7" in found)


def test_a_report_travels_as_text_and_garbage_is_none() -> None:
    assert Report.decoded(BARRIER.encoded().encode()) == BARRIER
    for garbage in (
        b"",
        b"7|3|x",
        b"[]",
        b"{}",
        b'{"place": 3}',
        b"\xff",
        WAITS.encoded().replace("20.0", '"x"').encode(),
    ):
        assert Report.decoded(garbage) == Report()


def test_a_lost_rank_is_told_with_its_host() -> None:
    seen = f"last seen in {WAITS.place})"
    assert replace(WAITS, process=("node7 pid:[4026531836]", 5)).lost(1) == f"rank 1 is lost (on node7, {seen}"
    assert replace(WAITS, process=(machine(), 5)).lost(1, "silent, ") == f"rank 1 is lost (silent, {seen}"
    assert WAITS.lost(1) == f"rank 1 is lost ({seen}"  # it has not told its host


def test_a_thread_that_computes_does_not_wait() -> None:
    done = threading.Event()

    def compute() -> None:
        while not done.is_set():
            sum(range(1000))

    worker, sleeper = threading.Thread(target=compute), threading.Thread(target=done.wait)
    for one in (worker, sleeper):
        one.start()
    busy, idle = Thread(worker.ident or 0), Thread(sleeper.ident or 0)
    try:
        for _ in range(4):
            time.sleep(0.1)
            (_, line, busy_s), (*_, idle_s) = busy.look(Place()), idle.look(Place())
        assert "test_places.py:" in line
        assert busy_s < 0.15 < idle_s
    finally:
        done.set()


def test_bytes_between_ranks_are_seen(pool: RankPool) -> None:
    for at_rest_s, afterwards_s in pool.run(_check_traffic, 2):
        assert at_rest_s > 0.3 > afterwards_s


def _check_traffic(rank: int, world_size: int) -> tuple[float, float]:
    still_s = Connections(dist.distributed_c10d._get_default_store()).still_s
    group, deadline = dist.new_group(), time.monotonic() + 30
    while (at_rest_s := still_s() or 0.0) < 0.3 and time.monotonic() < deadline:
        time.sleep(0.1)
    dist.all_reduce(torch.ones(1000), group=group)
    return at_rest_s, still_s() or 0.0


def test_looks_do_not_crash_a_rank_whose_threads_come_and_go(pool: RankPool) -> None:
    assert min(pool.run(_look_all_the_time, 2)) > 1000


def _look_all_the_time(rank: int, world_size: int) -> int:
    """Exchange, so that gloo's threads drop tensors of Python; return how often a thread has looked meanwhile."""
    group, thread, looks = dist.new_group(), Thread(threading.get_ident()), [0]
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            thread.look(Place())
            looks[0] += 1
            time.sleep(0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(1600):
            dist.all_to_all_single(torch.empty(2, 8), torch.ones(2, 8), group=group)
    finally:
        done.set()
        watcher.join()
    return looks[0]
