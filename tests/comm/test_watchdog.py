"""Whom a rank names after a failed exchange, from heartbeats, places and farewells; all ranks live in one process."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pygdist.comm import Communicator, Watchdog, groups
from pygdist.errors import LostRankError
from pygdist.testing import RankPool

WORLD_SIZE = 4
ALIVE = "rank 3 waits in epoch 0, exchange 1 (rows) at test_watchdog.py:"
LATE = "rank 3 is late, at epoch 0, exchange 0 (before the first exchange)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("farewells", "late", "said"),
    [
        ({}, False, ALIVE),
        ({}, True, LATE),
        ({1: "lost a neighbour", 2: "lost a neighbour"}, False, ALIVE),
        ({1: "lost a neighbour", 2: "finished"}, False, "rank 2 has finished"),
        ({2: "finished"}, True, f"rank 2 has finished; {LATE}"),
        ({1: "MemoryError: no memory\nfor x", 2: "finished"}, True, "rank 1 left: MemoryError: no memory"),
        ({1: "KeyError: 'x'", 2: "ValueError: y"}, False, "rank 1 left: KeyError: 'x'; rank 2 left: ValueError: y"),
        ({1: ""}, False, "rank 1 left: no reason given"),
        ({1: "KeyError: 'x'", 2: None}, True, "rank 2 is lost (last seen in epoch 0, exchange 0 (before the first"),
    ],
)
def test_the_cause_is_named_and_not_its_consequences(farewells: dict[int, str | None], late: bool, said: str) -> None:
    store = dist.HashStore()
    ranks = [Watchdog(store, rank, WORLD_SIZE, beat_s=0.1) for rank in range(WORLD_SIZE)]
    for rank, farewell in farewells.items():
        if farewell is None:  # killed: the heartbeat stops, and nothing is said
            ranks[rank]._stop.set()
            ranks[rank]._thread.join()
        else:
            ranks[rank].close(farewell)
    for rank in (0, 1, 2) if late else range(WORLD_SIZE):
        if farewells.get(rank, "alive") is not None:
            ranks[rank].enter(0, "rows")
    found = ranks[0].diagnose()
    for watchdog in ranks:
        watchdog.close()
    if said == ALIVE:  # nobody is to blame: all are told
        assert said in found
        assert found.count("rank ") == WORLD_SIZE - 1
    else:
        assert found.startswith(said)
        assert found.count("rank ") == said.count("rank ")


class Silence(list[str]):
    """Receives what a watchdog finds, and lets a test wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = threading.Event()

    def __call__(self, found: str) -> None:
        self.append(found)
        self.heard.set()


def test_silence_after_an_exchange_is_a_loss() -> None:
    store, found = dist.HashStore(), Silence()
    ranks = [Watchdog(store, rank, 3, beat_s=0.05) for rank in (1, 2)]
    ranks[0].enter(2, "rows")
    ranks[1].enter(2, "rows")
    ranks[0]._stop.set()
    ranks[0]._thread.join()
    ranks[0].process = ("another machine", 1)  # this process is busy
    ranks[0]._beat()  # the last one, in its place
    watching = Watchdog(store, 0, 3, beat_s=0.05, lost_after_s=0.5, on_lost=found)
    assert found.heard.wait(30)
    for watchdog in (watching, ranks[1]):
        watchdog.close()
    assert len(found) == 1
    assert found[0].startswith("rank 1 is lost (on another, silent for ")
    assert found[0].endswith("last seen in epoch 2, exchange 1 (rows))")


@pytest.mark.parametrize("far", [True, False])
def test_silence_before_the_first_exchange_counts_later_where_the_process_is_not_seen(far: bool) -> None:
    store, found = dist.HashStore(), Silence()
    loading, gone = (Watchdog(store, rank, 3, beat_s=0.05) for rank in (1, 2))
    if far:
        loading.process = ("another machine", 1)
        loading._beat()
    loading._stop.set()  # long work that lets no other thread of its process run
    loading._thread.join()
    gone.enter(2, "rows")
    gone.close()
    began = time.monotonic()
    watching = Watchdog(store, 0, 3, beat_s=0.05, lost_after_s=0.2, on_lost=found)
    assert found.heard.wait(30)
    assert time.monotonic() - began >= (0.6 if far else 0.2)
    assert found[0].startswith(f"rank 1 is lost ({'on another, ' * far}silent for ")
    watching.close()


def test_a_process_that_was_stopped_itself_accuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    store, found, clock = dist.HashStore(), Silence(), time.monotonic
    other = Watchdog(store, 1, 2, beat_s=0.05)
    watching = Watchdog(store, 0, 2, beat_s=0.05, lost_after_s=5.0, on_lost=found)
    for _ in range(4):
        jumped = clock() + 100.0 - time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda jumped=jumped: clock() + jumped)
        assert not found.heard.wait(0.3)
    for watchdog in (watching, other):
        watchdog.close()


class Exchange:
    """Stands for an event of a GPU."""

    def __init__(self) -> None:
        self.is_over = False

    def query(self) -> bool:
        return self.is_over


def test_an_exchange_on_a_gpu_goes_on_until_its_event() -> None:
    watchdog, events = Watchdog(dist.HashStore(), 0, 2, beat_s=60.0), [Exchange(), Exchange()]

    def shown() -> str:
        watchdog._beat()
        place = watchdog._report.place
        return f"{place.label}{', waits' * place.waiting}"

    for label, event in zip(("rows", "gradients"), events, strict=True):
        watchdog.enter(0, label)
        watchdog.leave(event)
    found = [shown()]
    for event in events:
        event.is_over = True
        found.append(shown())
    watchdog.close()
    assert found == ["rows, waits", "gradients, waits", "gradients"]


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True])
def test_a_rank_whose_gpu_waits_hears_of_one_that_left_for_an_error(busy: bool) -> None:
    """The host may compute meanwhile, or ask the GPU over and over."""
    store, found = dist.HashStore(), Silence()
    ranks = [Watchdog(store, rank, 2, beat_s=0.05, lost_after_s=1.0) for rank in range(2)]
    ranks[0].on_lost = found
    for watchdog in ranks:
        watchdog.enter(0, "rows")
        watchdog.leave(Exchange())
    ranks[1].close("KeyError: 'x'")
    end = time.monotonic() + 20
    while not found.heard.wait(0.0 if busy else 0.1) and time.monotonic() < end:
        pass
    ranks[0].close()
    assert "rank 1" in found[0]
    assert "KeyError: 'x'" in found[0]


@pytest.mark.slow
def test_a_gpu_that_waits_too_long_is_a_loss() -> None:
    store, found = dist.HashStore(), Silence()
    ranks = [Watchdog(store, rank, 2, beat_s=0.05, lost_after_s=60.0) for rank in range(2)]
    ranks[0].on_lost, ranks[0].limit_s = found, 0.5
    ranks[0].enter(3, "rows")
    ranks[0].leave(Exchange())
    assert found.heard.wait(20)
    for watchdog in ranks:
        watchdog.close()
    assert "epoch 3, exchange 1 (rows) has not ended on the GPU of rank 0" in found[0]
    assert "; rank 1 " in found[0]


def test_a_signal_on_one_rank_is_heard_of_on_all(caplog: pytest.LogCaptureFixture) -> None:
    store, found = dist.HashStore(), [Silence(), Silence()]
    ranks = [Watchdog(store, rank, 2, beat_s=0.05, on_lost=found[rank]) for rank in range(2)]
    ranks[1].signalled(signal.SIGTERM)
    assert found[0].heard.wait(30)
    assert found[0][0] == found[1][0] == f"SIGTERM reached rank 1 (process {os.getpid()})"
    assert ranks[0].signum == signal.SIGTERM
    assert not caplog.records  # rank 0's caller tells it, once
    for watchdog in ranks:
        watchdog.close()


def test_python_does_not_end_while_a_thread_breaks_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last reference to a group, dropped then, would abort the process; see also the campaign of kills."""
    inside, go_on = threading.Event(), threading.Event()

    def slow() -> bool:
        inside.set()
        return go_on.wait(30)

    monkeypatch.setattr(groups, "_break", slow)
    watching = Watchdog(dist.HashStore(), 0, 2, beat_s=0.05)
    breaking = threading.Thread(target=groups.break_groups)
    closing = threading.Thread(target=watching.close)
    breaking.start()
    assert inside.wait(30)
    closing.start()
    closing.join(timeout=0.5)
    assert closing.is_alive()
    go_on.set()
    closing.join(timeout=30)
    assert not closing.is_alive()
    assert not groups.break_groups(unless=lambda: True)


def _destroyed(rank: int, num_ranks: int) -> set[str]:
    group = dist.new_group()
    dist.destroy_process_group(group)
    return groups._backends_of(group)


def test_a_group_that_another_thread_destroys_has_no_backends(pool: RankPool) -> None:
    assert pool.run(_destroyed, 1) == [set()]


def test_nccl_is_aborted_in_all_groups_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()

    class Group:
        def __init__(self, name: str) -> None:
            self.name = name

        def abort(self) -> None:
            made.append(f"abort {self.name}")

        def _get_backend(self, device: torch.device) -> Group:
            return self

        def _group_start(self) -> None:
            made.append("start")

        def _group_end(self) -> None:
            made.append("end")

    backends = {"world": {"nccl"}, "host": {"gloo"}, "rows": {"gloo", "nccl"}}
    monkeypatch.setattr(groups, "_groups", lambda: [Group(name) for name in backends])
    monkeypatch.setattr(groups, "_backends_of", lambda group: backends[group.name])
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    groups.abort_nccl()
    assert made == ["start", "abort world", "abort rows", "end"]


def test_what_is_left_of_aborted_exchanges_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    communicator, watchdog = Communicator(), Watchdog(dist.HashStore(), 0, 2, beat_s=60.0)
    monkeypatch.setattr(communicator, "is_nccl", True)
    monkeypatch.setattr(communicator, "_watchdog", watchdog)
    monkeypatch.setattr(communicator, "_gpu", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    communicator.settle()
    watchdog.verdict = "rank 1 is lost"
    with pytest.raises(LostRankError, match="rank 1 is lost"):
        communicator.settle()
    watchdog.close()


def test_a_rank_that_never_reported_has_no_known_place() -> None:
    watching = Watchdog(dist.HashStore(), 0, 2, beat_s=0.05)
    assert watching.diagnose() == "rank 1 is lost (last seen in an unknown place (it has not reported yet))"
    watching.close()


def test_a_store_that_is_gone_is_a_loss() -> None:
    found = Silence()
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5), wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=5))
    watching = Watchdog(client, 1, 2, beat_s=0.05, lost_after_s=0.2, on_lost=found)
    del server
    assert found.heard.wait(60)
    watching.close()
    assert found == ["the rendezvous store does not answer: look at rank 0 (or the launcher), where it ran"]


def test_a_store_whose_folder_was_removed_is_not_waited_for(tmp_path: Path) -> None:
    """As that of a script's process group which it has destroyed, before it makes the next one."""
    folder = tmp_path / "meeting"
    folder.mkdir()
    watchdog = Watchdog(dist.FileStore(str(folder / "store"), 1), 0, 1, beat_s=60)
    watchdog.enter(0, "rows")
    shutil.rmtree(folder)
    start = time.monotonic()
    watchdog.close()
    assert time.monotonic() - start < 5
