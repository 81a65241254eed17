"""Items made one ahead: the same on all ranks wherever they stop, and errors where their item is taken."""

from __future__ import annotations

import threading

import pytest

from pygdist.sampler.one_ahead import OneAhead


def test_items_come_in_order_and_the_thread_ends() -> None:
    before = threading.active_count()
    items = OneAhead(lambda number: number * 2, range(3, 8))
    assert [items.take() for _ in range(5)] == [6, 8, 10, 12, 14]
    with pytest.raises(RuntimeError, match="all items are taken"):
        items.take()
    items.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("taken", [0, 1, 4])
@pytest.mark.parametrize("depth", [1, 3, 9])
def test_so_many_more_are_made_than_are_taken(taken: int, depth: int) -> None:
    made: list[int] = []
    items = OneAhead(made.append, range(5), depth)
    for _ in range(taken):
        items.take()
    items.close()
    assert made == list(range(min(taken + depth, 5)))


def test_an_error_is_raised_where_its_item_is_taken() -> None:
    items = OneAhead(lambda number: 1 // (2 - number), range(9))
    assert [items.take(), items.take()] == [0, 1]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            items.take()
    items.close()


def test_nothing_to_make() -> None:
    items = OneAhead(lambda number: number, range(0))
    with pytest.raises(RuntimeError, match="all items are taken"):
        items.take()
    items.close()
