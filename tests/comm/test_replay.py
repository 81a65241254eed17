"""Parts that run one after another get what ranks get that run at the same time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pygdist.comm import Communicator, ExchangePlan, PartCommunicator, run_parts
from pygdist.errors import InputError
from pygdist.testing import RankPool

OWNED = (4, 0, 3, 1, 5)  # rows of each part; one has none


def _plan(part: int, num_parts: int) -> ExchangePlan:
    """Part r wants every row of r + 1, and the first row of r + 2, as far as they exist."""
    wants = {
        (r, (r + step) % num_parts): list(range(min(count, OWNED[(r + step) % num_parts])))
        for r in range(num_parts)
        for step, count in ((2, 1), (1, 9))
        if step % num_parts
    }
    send = [wants.get((peer, part), []) for peer in range(num_parts)]
    return ExchangePlan(
        send_index=torch.tensor([row for rows in send for row in rows], dtype=torch.int64),
        send_counts=tuple(len(rows) for rows in send),
        recv_counts=tuple(len(wants.get((part, peer), [])) for peer in range(num_parts)),
    )


def _asked(communicator: Communicator) -> list[Tensor]:
    """Each question depends on the answer before."""
    part, num_parts = communicator.rank, communicator.world_size
    plan = _plan(part, num_parts)
    x = torch.arange(OWNED[part] * 3, dtype=torch.float64).view(-1, 3) + 100 * part
    halo = communicator.exchange_rows(x, plan)
    total = communicator.sum_over_ranks(halo.sum(0) + part)
    numbers = communicator.gather([float(part), float(total[0])])
    communicator.agree(None)
    further = communicator.exchange_rows((x + total).float(), plan)
    flat = communicator.exchange_rows(x[:, 0] * numbers[:, 1].sum(), plan)
    return [halo, total, numbers, further, flat]


def _by_ranks(rank: int, world_size: int) -> list[Tensor]:
    return [value.clone() for value in _asked(Communicator(dist.new_group()))]


def _by_parts(rank: int, world_size: int, folder: str, num_parts: int) -> tuple[int, dict[int, list[Tensor]]]:
    answers: dict[int, list[Tensor]] = {}

    def run(communicator: PartCommunicator) -> None:
        answers[communicator.rank] = [value.clone() for value in _asked(communicator)]

    communicator = Communicator(dist.new_group(), check_order=True)
    passes = run_parts(range(rank, num_parts, world_size), num_parts, run, communicator, _empty(folder, rank))
    return passes, answers


def _empty(folder: str, rank: int) -> Path:
    place = Path(folder) / str(rank)
    place.mkdir(parents=True)
    return place


@pytest.mark.parametrize("num_parts", [1, 5, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 3, 4))])
def test_parts_in_turn_get_what_ranks_get(num_parts: int, pool: RankPool, tmp_path: Path) -> None:
    wanted = pool.run(_by_ranks, num_parts)
    for world_size in range(1, min(num_parts, 3) + 1):
        found: dict[int, list[Tensor]] = {}
        for passes, answers in pool.run(_by_parts, world_size, str(tmp_path / str(world_size)), num_parts):
            assert passes == 6 + 1, "one more than there are questions"
            found |= answers
        assert sorted(found) == list(range(num_parts))
        for part, values in found.items():
            for value, expected in zip(values, wanted[part], strict=True):
                assert (value.dtype, value.shape) == (expected.dtype, expected.shape)
                torch.testing.assert_close(value, expected, rtol=1e-14, atol=0)


def _alone(*parts: int, num_parts: int, folder: Path, run: Any) -> int:
    return run_parts(parts, num_parts, run, Communicator(), folder)


def test_nothing_asked_is_one_pass(tmp_path: Path) -> None:
    ran = []
    assert _alone(0, 1, 2, num_parts=3, folder=tmp_path, run=lambda communicator: ran.append(communicator.rank)) == 1
    assert ran == [0, 1, 2]
    assert list(tmp_path.iterdir()) == []


def test_passes_are_made_one_part_after_the_other(tmp_path: Path) -> None:
    ran = []

    def run(communicator: PartCommunicator) -> None:
        ran.append(communicator.rank)
        communicator.gather([1.0])

    assert _alone(0, 1, 2, num_parts=3, folder=tmp_path, run=run) == 2
    assert ran == [0, 1, 2, 0, 1, 2]


def test_answers_that_are_changed_stay_what_they_were(tmp_path: Path) -> None:
    found = []

    def run(communicator: PartCommunicator) -> None:
        plan = _plan(communicator.rank, 3)
        rows = torch.full((OWNED[communicator.rank], 2), float(communicator.rank + 1))
        communicator.exchange_rows(rows, plan).mul_(0)  # in place, as a layer may
        rows.zero_()
        found.append(communicator.exchange_rows(rows + 1, plan).sum())

    _alone(0, 1, 2, num_parts=3, folder=tmp_path, run=run)
    assert [float(value) for value in found] == [2.0 * sum(_plan(part, 3).recv_counts) for part in range(3)]


def test_a_part_that_asks_for_a_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="plan of an exchange: parts that run one after another exchange rows and sums"
    ):
        _alone(
            0, 1, num_parts=2, folder=tmp_path,
            run=lambda communicator: communicator.all_to_all([torch.zeros(1)] * 2, label="plan of an exchange"),
        )  # fmt: skip


def test_parts_agree_on_a_mistake(tmp_path: Path) -> None:
    said = []

    def run(communicator: PartCommunicator) -> None:
        try:
            communicator.agree("no such layer" if communicator.rank == 1 else None)
        except InputError as error:
            said.append(str(error))

    _alone(0, 1, num_parts=2, folder=tmp_path, run=run)
    assert said == ["no such layer"] * 2, "the first does not know it by itself"


def _unlike(communicator: PartCommunicator) -> None:
    communicator.gather([0.0])
    if communicator.rank == 1:
        communicator.gather([0.0])


def test_parts_of_a_rank_that_do_not_ask_alike_are_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="1 of 3 parts wait for an exchange and the others have ended"):
        _alone(0, 1, 2, num_parts=3, folder=tmp_path, run=_unlike)


def _unlike_on_ranks(rank: int, world_size: int, folder: str) -> str:
    with pytest.raises(RuntimeError) as error:
        run_parts([rank], world_size, _unlike, Communicator(dist.new_group()), _empty(folder, rank))
    return str(error.value)


def test_ranks_whose_parts_do_not_ask_alike_all_stop(pool: RankPool, tmp_path: Path) -> None:
    for said in pool.run(_unlike_on_ranks, 3, str(tmp_path)):
        assert "1 of 3 parts wait for an exchange and the others have ended" in said
