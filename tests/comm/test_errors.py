"""Which ranks tell of a mistake: the first one of what all found, and the finder of what only it could find."""

from __future__ import annotations

import pickle

import pytest

from pygdist import cli
from pygdist.comm import Communicator
from pygdist.errors import InputError


@pytest.mark.parametrize(
    ("rank", "of_one_rank", "speaks"), [(0, False, True), (1, False, False), (0, True, True), (1, True, True)]
)
def test_a_rank_tells_what_no_other_could(
    rank: int, of_one_rank: bool, speaks: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(command: str, arguments: list[str]) -> int:
        raise InputError("rank 1: 3 rows", of_one_rank=of_one_rank)

    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(cli, "_load", lambda command: fail)
    assert cli.main(["fit"]) == 2
    assert capsys.readouterr().err == ("pygdist: error: rank 1: 3 rows\n" if speaks else "")


def test_what_ranks_agreed_on_is_of_no_single_rank() -> None:
    with pytest.raises(InputError) as error:
        Communicator().agree("damaged")
    assert not error.value.of_one_rank


def test_the_mark_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(InputError("rank 1: 3 rows", of_one_rank=True)))
    assert error.of_one_rank
    assert str(error) == "rank 1: 3 rows"
