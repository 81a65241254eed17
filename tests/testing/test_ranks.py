"""The rank pool: results in order, a child's error in the caller, no rank left behind, nothing shared."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pygdist.errors import RefusedError
from pygdist.testing import RankError, RankPool, run_ranks

pytestmark = pytest.mark.usefixtures("fork_server")


def _sum(rank: int, world_size: int, x: Tensor) -> tuple[int, Tensor]:
    x += rank  # in place: the other ranks and the caller must not see it
    total = x.clone()
    dist.all_reduce(total)
    return os.getpid(), total


def test_results_in_rank_order_from_processes_that_share_nothing(pool: RankPool) -> None:
    x = torch.zeros(2)
    for world_size in (1, 4, 2):
        answers = pool.run(_sum, world_size, x)
        assert len({pid for pid, _ in answers}) == world_size
        assert all(total.tolist() == [sum(range(world_size))] * 2 for _, total in answers)
    assert x.tolist() == [0, 0]
    with pytest.raises(ValueError, match="world_size must be between 1 and the pool's 5, got 6"):
        pool.run(_sum, 6, x)


def _fail(rank: int, world_size: int, how: str) -> None:
    if rank == 1 and how == "raise":
        raise KeyError("the reason")
    if rank == 1 and how == "exit":
        os._exit(7)
    if rank == 1 and how == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", r"rank 1 of 2 failed:(.|\n)*KeyError: 'the reason'"),
        ("exit", r"rank 1 of 2 failed:(.|\n)*exit code 7"),
        ("signal", r"rank 1 of 2 failed:(.|\n)*exit code -11(.|\n)*in _fail"),  # with its stacks
    ],
)
def test_a_child_s_error_reaches_the_caller_and_the_pool_goes_on(how: str, said: str) -> None:
    with RankPool(2) as pool:
        with pytest.raises(RankError, match=said):
            pool.run(_fail, 2, how)
        assert len(pool.run(_sum, 2, torch.zeros(1))) == 2


def _lock(rank: int, world_size: int) -> Any:
    return threading.Lock()


def test_a_result_that_cannot_be_sent_is_told_with_its_traceback() -> None:
    with pytest.raises(RankError, match=r"rank 0 of 2 failed:(.|\n)*TypeError: cannot pickle '_thread.lock' object"):
        run_ranks(_lock, 2)


def test_a_function_that_ranks_cannot_import_is_told_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("made_up_by_the_caller")
    exec("def work(rank, world_size): ...", module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(RankError, match=r"rank 0 of 2 failed:(.|\n)*No module named 'made_up_by_the_caller'"):
        run_ranks(module.work, 2)


def _hang(rank: int, world_size: int) -> None:
    dist.recv(torch.zeros(1), src=1 - rank)  # neither sends


def test_ranks_that_hang_are_named_and_ended() -> None:
    with RankPool(2) as pool:
        pool.run(_sum, 2, torch.zeros(1))
        pool.timeout_s = 1.0  # the processes are up; from here on a second is long
        with pytest.raises(RankError, match=r"no answer within 1 s from ranks \[0, 1\](.|\n)*rank 1:(.|\n)*in _hang"):
            pool.run(_hang, 2)


def test_what_the_machine_refuses_a_rank_is_told_in_one_line() -> None:
    with RankPool(2) as ranks, pytest.raises(RefusedError, match=r"^No space left on device; make room there"):
        ranks.run(_fill_the_disk, 2)


def _fill_the_disk(rank: int, world_size: int) -> None:
    if rank == 1:
        raise dist.DistStoreError("No space left on device")
    dist.barrier()


def test_run_ranks_is_a_pool_for_one_call() -> None:
    assert [total.tolist() for _, total in run_ranks(_sum, 2, torch.zeros(1))] == [[1.0], [1.0]]


def test_a_function_of_a_notebook_runs_where_cloudpickle_is_installed(pool: RankPool) -> None:
    pytest.importorskip("cloudpickle")
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec("FACTOR = 3\ndef work(rank, world_size, value):\n    return FACTOR * value + rank", cell)
    assert pool.run(cell["work"], 2, 10) == [30, 31]


def test_an_interrupted_call_leaves_no_answer_to_the_next() -> None:
    with RankPool(2) as pool:
        pool.run(_sum, 2, torch.zeros(1))
        timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            pool.run(_nap, 2)
        assert [total.tolist() for _, total in pool.run(_sum, 2, torch.zeros(1))] == [[1.0], [1.0]]


def _nap(rank: int, world_size: int) -> str:
    time.sleep(2.0)
    return "late"
