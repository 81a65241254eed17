"""A mistake in the input ends a script in one line and with exit code 2, as it ends pygdist's commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

from pygdist import signals
from pygdist.comm import Communicator
from pygdist.errors import InputError, is_first_rank

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def tell_in_one_line(communicator: Communicator | None) -> Hook:
    """Let an :class:`~pygdist.InputError` that nobody catches end this process in one line, without a traceback.

    Args:
        communicator: Is closed before the end; ``None`` if there is none yet.

    Returns:
        The ``sys.excepthook`` of before. It still gets all other errors; at a prompt it gets every error, and the
        prompt goes on.
    """
    before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, InputError) or hasattr(sys, "ps1"):
            before(kind, error, trace)
            return
        first = is_first_rank() if communicator is None else communicator.rank == 0
        if first or error.of_one_rank:
            sys.stderr.write(f"pygdist: error: {error}\n")
        if communicator is not None:
            communicator.close(failed=error.of_one_rank)
        signals.exit_now(2)

    sys.excepthook = tell
    return before
