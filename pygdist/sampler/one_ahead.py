"""A thread that makes the next items while the caller uses the last one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

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
        >>> with contextlib.closing(OneAhead(make, range(10))) as items:
        ...     for item in items:
        ...         use(item)
    """

    def __init__(self, make: Callable[[int], T], numbers: range, depth: int = 1) -> None:
        self._wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._made: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        self._left = iter(numbers)
        self._thread = threading.Thread(
            target=_serve, args=(make, self._wanted, self._made), name="pygdist-batches", daemon=True
        )
        self._thread.start()
        self._count = len(numbers)
        for _ in range(depth):
            self._ask()

    def __iter__(self) -> Iterator[T]:
        for _ in range(self._count):
            yield self.take()

    def take(self) -> T:
        """Wait for the next item, and have the one after it made."""
        item, error = self._made.get()
        if error is not None:
            raise error
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
