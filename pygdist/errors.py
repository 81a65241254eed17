"""The two errors that pygdist raises on purpose: a mistake in the input, and a rank that is gone.

They live at the bottom of the package so that every room can raise them; the command line turns each into
one line on standard error (:mod:`pygdist.cli`).
"""

from __future__ import annotations

__all__ = ["InputError", "LostRankError"]


class InputError(ValueError):
    """Something the user gave cannot be used: the message names the file, field, option or layer, and what to do.

    The command line prints the message alone and exits with status 2. Raise it on all ranks or on none, so that
    no rank waits for one that has left (:meth:`pygdist.comm.Communicator.agree`); rank 0 then prints it for all.

    Args:
        message: One line.
        of_one_rank: It depends on what this rank alone holds, and the ranks did not agree on it: this rank prints it
            whatever its number. The message should name the rank.
    """

    def __init__(self, message: str, *, of_one_rank: bool = False) -> None:
        super().__init__(message)
        self.of_one_rank = of_one_rank


class LostRankError(RuntimeError):
    """Another rank died, left or did not answer in time. The message names the rank, the epoch and the exchange."""
