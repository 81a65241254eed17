"""Whom a rank names after a failed exchange, from heartbeats, places and farewells; all ranks live in one process."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from pygdist.comm import Watchdog

WORLD_SIZE = 4
ALIVE = "every other rank is alive or left on its own account"
LATE = "rank 3 is late, at epoch 0, exchange 0 (before the first exchange)"


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
        ranks[rank].enter(0, "rows")
    found = ranks[0].diagnose()
    for watchdog in ranks:
        watchdog.close()
    assert found.startswith(said)
    assert found.count("rank ") == said.count("rank ")
