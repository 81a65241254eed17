"""A thread that makes the next items while the caller uses the last one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class OneAhead(Generic[T]):
    """Makes items in a thread of its own: a few at first, then one for each that is taken.

    So all ranks make the same items if all take as many, even if they stop before the last: items may be made in
    exchanges. An error in the thread is raised where its item is taken.

    Args:
        make: Makes an item by its number.
        numbers: The numbers of the items.
        depth: Items that are made ahead.

    Example:
        >>> items = OneAhead(make, range(10))
        >>> for _ in range(10):
        ...     use(items.take())
        >>> items.close()
    """

    def __init__(self, make: Callable[[int], T], numbers: range, depth: int = 1) -> None:
        self._wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._made: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        self._left = iter(numbers)
        self._thread = threading.Thread(
            target=_serve, args=(make, self._wanted, self._made), name="pygdist-batches", daemon=True
        )
        self._thread.start()
        self._left_to_take, self._error = len(numbers), cast("BaseException | None", None)
        for _ in range(depth):
            self._ask()

    def take(self) -> T:
        """Wait for the next item, and have the one after those that are being made begun.

        Raises:
            RuntimeError: After the last item.
        """
        if self._error is not None:
            raise self._error
        if not self._left_to_take:
            raise RuntimeError("all items are taken")
        self._left_to_take -= 1
        item, self._error = self._made.get()
        if self._error is not None:
            raise self._error
        self._ask()
        return item  # type: ignore[return-value]

    def close(self, timeout_s: float | None = None) -> None:
        """End the thread when it has made what it began; wait for it."""
        self._wanted.put(None)
        self._thread.join(timeout_s)

    def _ask(self) -> None:
        number = next(self._left, None)
        if number is not None:
            self._wanted.put(number)


def _serve(
    make: Callable[[int], T],
    wanted: queue.SimpleQueue[int | None],
    made: queue.SimpleQueue[tuple[T | None, BaseException | None]],
) -> None:
    while (number := wanted.get()) is not None:
        try:
            item = make(number)
        except BaseException as error:  # told to whoever takes it
            made.put((None, error))
            return
        made.put((item, None))
        del item
