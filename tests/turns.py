"""Combinations of which every run takes some, by turns, and ``--exhaustive`` takes all."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import pytest


def by_turns(one_in: int, *axes: Collection[Any]) -> list[Any]:
    """Return all combinations of the axes' values; those out of turn are marked as exhaustive.

    The numbers of the values of a combination that has its turn add up to a multiple of ``one_in``. So each value is
    in a combination that runs.

    Args:
        one_in: One combination in so many has its turn; at most the length of the second longest axis.
        axes: Values; a tuple is several parameters.
    """
    assert 1 < one_in <= sorted(map(len, axes))[-2]
    found = []
    for numbered in itertools.product(*(tuple(enumerate(axis)) for axis in axes)):
        turn = sum(number for number, _ in numbered) % one_in == 0
        values = [one for _, value in numbered for one in (value if isinstance(value, tuple) else (value,))]
        name = "-".join(filter(None, map(_name, values)))
        found.append(pytest.param(*values, id=name, marks=() if turn else pytest.mark.exhaustive))
    return found


def _name(value: Any) -> str:
    if isinstance(value, dict):
        return "-".join(f"{name}={one}" for name, one in value.items())
    return str(value)
