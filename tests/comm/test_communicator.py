"""Exchanges between real ranks: values, gradients, bytes, order, and what is said when a rank is gone."""

from __future__ import annotations

import os
import socket
import time
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pygdist.comm import Communicator, ExchangePlan, Watchdog, transport
from pygdist.comm.process import watch
from pygdist.errors import InputError, LostRankError, UnequalRanksError
from pygdist.testing import RankError, RankPool

OWNED = (4, 0, 3)  # rows of each rank; one has none


def _plan(rank: int, world_size: int) -> ExchangePlan:
    """Rank r wants rows 0 and 2 of r + 1 (as far as they exist), and row 0 of r + 2."""
    wants = {(r, (r + step) % world_size): rows for r in range(world_size) for step, rows in ((1, [0, 2]), (2, [0]))}
    rows = {
        (receiver, owner): [row for row in wants.get((receiver, owner), []) if row < OWNED[owner]]
        for receiver in range(world_size)
        for owner in range(world_size)
        if receiver != owner
    }
    send = [rows.get((peer, rank), []) for peer in range(world_size)]
    recv = [rows.get((rank, peer), []) for peer in range(world_size)]
    return ExchangePlan(
        send_index=torch.tensor([row for part in send for row in part], dtype=torch.int64),
        send_counts=tuple(len(part) for part in send),
        recv_counts=tuple(len(part) for part in recv),
    )


def _rows(rank: int, dtype: torch.dtype = torch.float64, width: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-50, 50, (OWNED[rank], width), generator=generator).to(dtype)


def _expected(rank: int, world_size: int, dtype: torch.dtype) -> Tensor:
    plans = {peer: _plan(peer, world_size) for peer in range(world_size)}
    parts = [_rows(peer, dtype)[plans[peer].send_index_of(rank)] for peer in range(world_size) if peer != rank]
    return torch.cat(parts)


def _check_values(rank: int, world_size: int, name: str) -> None:
    communicator, dtype = Communicator(dist.new_group()), getattr(torch, name)
    plan = _plan(rank, world_size)
    halo = communicator.exchange_rows(_rows(rank, dtype), plan)
    assert halo.dtype == dtype
    assert torch.equal(halo, _expected(rank, world_size, dtype))
    traffic, row_bytes = communicator.meter.reset(), 5 * torch.empty(0, dtype=dtype).element_size()
    assert traffic.sent_bytes == plan.num_sent * row_bytes
    assert traffic.received_bytes == plan.num_received * row_bytes
    assert traffic.sent_messages == sum(count > 0 for count in plan.send_counts)
    assert traffic.calls == 1
    assert traffic.exchange_s > 0
    assert communicator.meter.read().calls == 0


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "int64", "bool"])
def test_rows_arrive_in_rank_order_and_every_byte_is_counted(pool: RankPool, dtype: str) -> None:
    pool.run(_check_values, 3, dtype)


def _check_gradients(rank: int, world_size: int) -> list[Tensor]:
    communicator = Communicator(dist.new_group())
    x = _rows(rank).requires_grad_()
    halo = communicator.exchange_rows(x, _plan(rank, world_size))
    scale = torch.arange(1, halo.size(0) + 1, dtype=torch.float64)[:, None] * 10.0**rank
    # the total is a loss over all ranks: rank r weighs the copies that it holds
    ((halo * scale).sum() + 0.5 * x.sum()).backward()
    assert x.grad is not None
    again = _rows(rank).requires_grad_()
    halo = communicator.exchange_rows(again, _plan(rank, world_size))
    ((halo * scale).sum() + 0.5 * again.sum()).backward()
    assert again.grad is not None
    assert torch.equal(x.grad, again.grad)
    return [x.grad, scale]


def test_gradients_of_all_copies_are_summed_at_the_owner(pool: RankPool) -> None:
    answers = pool.run(_check_gradients, 3)
    expected = [torch.full((rows, 5), 0.5, dtype=torch.float64) for rows in OWNED]
    for holder in range(3):
        position = 0
        for owner in range(3):
            for row in [] if owner == holder else _plan(owner, 3).send_index_of(holder).tolist():
                expected[owner][row] += answers[holder][1][position]
                position += 1
    for rank in range(3):
        assert torch.equal(answers[rank][0], expected[rank])
    assert not torch.equal(answers[0][0], torch.full((4, 5), 0.5, dtype=torch.float64)), "nothing came back"


def _check_sum(rank: int, world_size: int) -> None:
    communicator = Communicator(dist.new_group())
    x = torch.full((2,), rank + 1.0, dtype=torch.float64, requires_grad=True)
    total = communicator.sum_over_ranks(x)
    assert total.tolist() == [6.0, 6.0]
    (total * (rank + 1)).sum().backward()  # every rank's loss depends on every rank's x
    assert x.grad is not None
    assert x.grad.tolist() == [6.0, 6.0]
    assert communicator.gather([rank, 2.0]).tolist() == [[0, 2], [1, 2], [2, 2]]


def test_sums_over_ranks_and_their_gradients(pool: RankPool) -> None:
    pool.run(_check_sum, 3)


def _check_agree(rank: int, world_size: int) -> str:
    communicator = Communicator(dist.new_group())
    communicator.agree(None)
    with pytest.raises(InputError) as error:
        communicator.agree("part_1/x.npy: is damaged" if rank == 1 else None)
    return str(error.value)


def _leave(rank: int, world_size: int) -> tuple[float, float]:
    communicator = Communicator(dist.new_group())
    time.sleep(0.3 if rank == 1 else 0.0)
    came = time.time()
    communicator.barrier()
    return came, time.time()


def test_nobody_leaves_a_barrier_before_all_are_there(pool: RankPool) -> None:
    came, left = zip(*pool.run(_leave, 3), strict=True)
    assert max(came) <= min(left)


def test_an_error_of_one_rank_is_raised_on_all(pool: RankPool) -> None:
    first, second = pool.run(_check_agree, 2)
    assert first == f"part_1/x.npy: is damaged (found by rank 1 on {socket.gethostname()})"
    assert second == "part_1/x.npy: is damaged"


def _check_order(rank: int, world_size: int) -> str:
    communicator = Communicator(dist.new_group(), check_order=True)
    communicator.exchange_rows(_rows(rank), _plan(rank, world_size))
    other = partial(communicator.sum_over_ranks, torch.ones(3))
    usual = partial(communicator.exchange_rows, _rows(rank), _plan(rank, world_size))
    with pytest.raises(RuntimeError, match="the ranks disagree on the next exchange") as error:
        (other if rank == 2 else usual)()
    return str(error.value)


def test_ranks_that_make_different_calls_are_told_so_and_none_hangs(pool: RankPool) -> None:
    for said in pool.run(_check_order, 3):
        assert "rank 0 makes call 2: rows, forward, 5 float64" in said
        assert "rank 2 makes call 2: sum, forward, 3 float32" in said


def _compare_calls(rank: int, world_size: int) -> str:
    communicator = Communicator(dist.new_group())
    labels = ["a", "b"] if rank != 2 else ["b", "a"]
    communicator.sum_over_ranks(torch.ones(3), label="both")
    communicator.compare_calls()
    nothing = ExchangePlan(send_index=torch.empty(0, dtype=torch.int64), send_counts=(0,) * 3, recv_counts=(0,) * 3)
    for label in labels:
        communicator.exchange_rows(torch.ones(3, 1), nothing, label=label)
    with pytest.raises(RuntimeError, match="the ranks made different exchanges") as error:
        communicator.compare_calls()
    return str(error.value)


def test_calls_in_another_order_are_found_afterwards(pool: RankPool) -> None:
    for said in pool.run(_compare_calls, 3):
        assert "calls of rank 0: 4, rank 1: 4, rank 2: 4" in said


def _check_timeout(rank: int, world_size: int) -> str:
    group = dist.new_group()
    watchdog = Watchdog(dist.distributed_c10d._get_default_store(), rank, world_size, beat_s=0.2)
    dist.barrier()  # every heartbeat has begun
    communicator = Communicator(group, timeout_s=0.5, watchdog=watchdog)
    communicator.epoch = 7
    said = ""
    if rank == 0:
        with pytest.raises(LostRankError) as error:
            communicator.exchange_rows(_rows(0), _plan(0, world_size))
        said = str(error.value)
    dist.barrier()  # the other rank is alive all the time, it only never makes the call
    watchdog.close()
    return said


def test_a_late_rank_is_named_with_epoch_and_exchange(pool: RankPool) -> None:
    said = pool.run(_check_timeout, 3)[0]
    assert "rank 0, epoch 7, exchange 1 (rows, forward, 5 float64)" in said
    for rank in (1, 2):
        assert f"rank {rank} is late, at epoch 0, exchange 0 (before the first exchange)" in said


def _check_lost(rank: int, world_size: int, folder: Path) -> None:
    group, store = dist.new_group(), dist.distributed_c10d._get_default_store()
    watchdog = Watchdog(store, rank, world_size, beat_s=0.2)
    communicator = Communicator(group, timeout_s=60, watchdog=watchdog)
    communicator.sum_over_ranks(torch.ones(1))
    store.set(f"summed/{rank}", "")
    if rank == 2:
        store.wait(["summed/0", "summed/1"])
        os.kill(os.getpid(), 9)
    communicator.epoch = 3
    with pytest.raises(LostRankError) as error:
        communicator.exchange_rows(_rows(rank), _plan(rank, world_size))  # both want rows of rank 2
    watchdog.close("lost a neighbour")
    (folder / f"said-by-{rank}").write_text(str(error.value))  # the pool tells only of the rank that was killed


@pytest.mark.usefixtures("fork_server")
def test_a_killed_rank_is_named_by_the_survivors(tmp_path: Path) -> None:
    with RankPool(3) as own, pytest.raises(RankError, match=r"rank 2 of 3 failed:\nthe process ended \(exit code -9\)"):
        own.run(_check_lost, 3, tmp_path)
    for rank in (0, 1):
        said = (tmp_path / f"said-by-{rank}").read_text()
        assert said.startswith(f"rank {rank}, epoch 3, exchange 2 (rows, forward, 5 float64): the exchange "), said
        assert "; rank 2 is lost (last seen in epoch 0, exchange " in said
        assert f"rank {1 - rank} is" not in said  # the other survivor is only a consequence
        assert f"rank {1 - rank} left" not in said


def _check_watchdog_warning(rank: int, world_size: int) -> list[str]:
    import logging

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pygdist.comm.watchdog").addHandler(handler)
    store = dist.distributed_c10d._get_default_store()
    watchdog = Watchdog(store, rank, world_size, warn_after_s=0.1, beat_s=0.05)
    communicator = Communicator(dist.new_group(), watchdog=watchdog)
    communicator.epoch = 4
    if rank == 0:
        # rank 1 enters only after rank 0 has complained, so the complaint is certain
        communicator.sum_over_ranks(torch.ones(1), label="norm statistics")
    else:
        store.wait(["pygdist-watchdog/warned/0"])
        communicator.sum_over_ranks(torch.ones(1), label="norm statistics")
    watchdog.close()
    return records


def test_a_long_wait_names_who_is_behind(pool: RankPool) -> None:
    waited = pool.run(_check_watchdog_warning, 2)[0]
    assert len(waited) == 1
    assert "rank 0 has waited" in waited[0]
    assert "epoch 4, exchange 1 (norm statistics" in waited[0]
    assert "rank 1 is behind, at epoch 0, exchange 0 (before the first exchange)" in waited[0]


def test_one_process_exchanges_nothing() -> None:
    communicator, plan = (
        Communicator(),
        ExchangePlan(send_index=torch.empty(0, dtype=torch.int64), send_counts=(0,), recv_counts=(0,)),
    )
    x = torch.ones(3, 2, requires_grad=True)
    assert communicator.exchange_rows(x, plan).shape == (0, 2)
    assert communicator.sum_over_ranks(x) is x
    communicator.reduce_in_place(total := torch.full((2,), 3.0), "total")
    assert total.tolist() == [3.0, 3.0]
    assert communicator.meter.read().calls == 0
    with pytest.raises(InputError, match="wrong field"):
        communicator.agree("wrong field")


def test_a_plan_states_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="send_counts names 2 ranks and recv_counts 1"):
        ExchangePlan(send_index=torch.tensor([0]), send_counts=(0, 1), recv_counts=(0,))
    with pytest.raises(ValueError, match="sum to 2, send_index has 1"):
        ExchangePlan(send_index=torch.tensor([0]), send_counts=(0, 2), recv_counts=(0, 0))


def _check_closed(rank: int, world_size: int) -> str:
    communicator = Communicator(dist.new_group())
    communicator.barrier()
    communicator.close()
    with pytest.raises(InputError) as caught:
        communicator.barrier()
    return str(caught.value)


def test_a_closed_communicator_accuses_nobody(pool: RankPool) -> None:
    said = "the communicator is closed: its training, validation or test has ended"
    assert pool.run(_check_closed, 2) == [said] * 2


def _check_apart(rank: int, world_size: int, what: str) -> tuple[str, float]:
    communicator = Communicator(dist.new_group())
    # An exception has three beats to leave, or the rank is ended: enough on a busy machine too.
    watch().lost_after_s, watch().beat_s = 5.0, 1.0
    communicator.sum_over_ranks(torch.ones(2), label="alike")
    began, said = time.monotonic(), ""
    try:
        if rank == 0:
            communicator.exchange_rows(_rows(0), _plan(0, world_size))
        elif what == "another exchange":
            communicator.sum_over_ranks(torch.ones(2), label="mine")
        else:
            dist.barrier()
    except RuntimeError as error:
        said = str(error)
    took_s = time.monotonic() - began
    return said, took_s


@pytest.mark.parametrize(
    ("what", "where"),
    [
        ("another exchange", "rank 1 waits in epoch 0, exchange 2 (mine, forward, 2 float32) at test_communicator.py:"),
        ("a call of torch", "rank 1 waits in torch.distributed.barrier at test_communicator.py:"),
    ],
)
@pytest.mark.usefixtures("fork_server")
def test_ranks_that_wait_in_different_calls_are_told_so(what: str, where: str) -> None:
    with RankPool(3, timeout_s=60) as own:
        results = own.run(_check_apart, 3, what)
    for said, took_s in results:
        assert took_s < 45
        assert said
    assert "rank 0 waits in epoch 0, exchange 2 (rows, forward, 5 float64) at test_communicator.py:" in results[0][0]
    assert where in results[0][0]


def _check_sums(rank: int, world_size: int, widths: tuple[int, ...]) -> str:
    communicator = Communicator(dist.new_group())
    watch().lost_after_s, watch().beat_s = 5.0, 0.2
    with pytest.raises(UnequalRanksError) as error:
        communicator.sum_over_ranks(torch.ones(widths[rank]), label=f"norm of layer {2 - rank}")
    return str(error.value)


def _check_other_lengths(rank: int, world_size: int) -> tuple[str, list[float]]:
    communicator = Communicator(dist.new_group())
    many = communicator.gather([float(rank)] * 21)[1, 20:].tolist()
    with pytest.raises(UnequalRanksError) as error:
        communicator.gather([1.0] * (3, 12)[rank])
    return str(error.value), many


def test_other_numbers_of_numbers_are_refused(pool: RankPool) -> None:
    for said, many in pool.run(_check_other_lengths, 2):
        assert "the ranks made different exchanges" in said
        assert many == [1.0]


@pytest.mark.parametrize("widths", [(2, 2), (2, 32)], ids=["which gloo would add", "for which gloo would abort"])
@pytest.mark.usefixtures("fork_server")
def test_different_sums_do_not_meet(widths: tuple[int, ...]) -> None:
    with RankPool(2, timeout_s=60) as own:
        results = own.run(_check_sums, 2, widths)
    for said in results:
        assert said.startswith("the ranks make different calls: ")
        assert "rank 0 waits in epoch 0, exchange 1 (norm of layer 2" in said
        assert "rank 1 waits in epoch 0, exchange 1 (norm of layer 1" in said


def _in_groups(rank: int, world_size: int) -> None:
    communicator = Communicator(dist.new_group())
    part, alone = communicator.split(2), communicator.split(1)
    with pytest.raises(InputError, match="split: 3 ranks a group, expected a divisor of the 4 ranks"):
        communicator.split(3)
    alone.reduce_in_place(mine := torch.tensor([float(rank)]), "mine")
    assert mine.tolist() == [rank]
    with part.aside() as beside:
        assert f"rank {rank}, epoch 0" in str(beside.lost("rows", RuntimeError("gone"), peer=1 - part.rank))
    first = rank - rank % 2
    assert (part.rank, part.world_size, alone.world_size) == (rank % 2, 2, 1)
    assert part.gather([float(rank)])[:, 0].tolist() == [first, first + 1]
    assert communicator.gather([float(rank)])[:, 0].tolist() == list(range(world_size))
    communicator.epoch = 5
    assert part.epoch == 5
    assert f"rank {rank}, epoch 5" in str(part.lost("rows", RuntimeError("gone"), peer=1 - part.rank))
    assert f"with rank {first + 1 - rank % 2}" in str(part.lost("rows", RuntimeError("gone"), peer=1 - part.rank))
    communicator.close()
    assert part.is_closed


def test_groups_of_neighbours_exchange_and_are_named_by_all_ranks(pool: RankPool) -> None:
    pool.run(_in_groups, 4)


def _in_groups_again(rank: int, world_size: int) -> None:
    communicator = Communicator(dist.new_group(), timeout_s=20)
    for _ in range(2):
        part = communicator.split(2)
        assert part.gather([float(rank)])[:, 0].tolist() == [rank - rank % 2, rank - rank % 2 + 1]
        part.close()
        time.sleep(rank)  # the first to come must not find the addresses of the group before
    communicator.close()


def test_groups_of_neighbours_are_made_again(pool: RankPool) -> None:
    pool.run(_in_groups_again, 4)


def _with_default_device(rank: int, world_size: int) -> list[float]:
    communicator = Communicator(dist.new_group())
    with torch.device("meta"):
        found: list[float] = communicator.gather([float(rank)])[:, 0].tolist()
        assert communicator.gather_text(f"from {rank}") == ["from 0", "from 1"]
    communicator.close()
    return found


def test_numbers_and_texts_are_on_the_host_whatever_the_default_device(pool: RankPool) -> None:
    assert pool.run(_with_default_device, 2) == [[0, 1]] * 2


def _beside_nccl(rank: int, world_size: int) -> None:
    """No GPU is touched: ``torch.zeros`` alone would be on one."""
    with (
        mock.patch.object(transport, "_backend_of", return_value="nccl"),
        mock.patch.object(dist, "all_reduce", return_value=None),
        mock.patch.object(torch, "zeros", return_value=torch.ones(1)),
    ):
        communicator = Communicator(rows := dist.new_group(), device=torch.device("cuda", 0))
        assert communicator.is_nccl
        assert communicator.gather([float(rank)] * 12)[:, 11].tolist() == [0, 1]
        assert communicator.gather_text(f"from {rank}") == ["from 0", "from 1"]
        with communicator.aside() as other:
            assert other.gather([float(rank)])[:, 0].tolist() == [0, 1]
            assert other.host_group is communicator.host_group
    assert (numbers := communicator.host_group) is not rows
    with pytest.raises(InputError, match="another seed"):
        communicator.agree("another seed" if rank else None)
    communicator.close()
    assert not {numbers, rows} & set(dist.distributed_c10d._world.pg_map)


def test_numbers_and_texts_do_not_wait_for_the_gpu(pool: RankPool) -> None:
    pool.run(_beside_nccl, 2)


@pytest.mark.parametrize(
    ("config", "device", "expected"),
    [
        ("cpu:gloo,cuda:gloo", "cuda", False),
        ("cpu:gloo,cuda:nccl", "cuda", True),
        ("cpu:gloo,cuda:nccl", "cpu", False),
        ("cpu:gloo,cuda:nccl", None, True),
        ("cuda:nccl", "cuda", True),
        ("cpu:gloo", "cpu", False),
    ],
)
def test_a_group_of_two_backends_is_asked_for_that_of_the_rows(
    config: str, device: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
        monkeypatch.setattr(dist, "all_reduce", lambda x, group: None)
        monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.ones(1))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        rows_on = None if device is None else torch.device(device)
        assert Communicator(dist.group.WORLD, device=rows_on).is_nccl == expected
    finally:
        dist.destroy_process_group()
