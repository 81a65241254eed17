"""The errors that pygdist raises on purpose: a mistake in the input, a refusal of the machine, and a lost rank.

The command line prints each as one line on standard error (:mod:`pygdist.cli`).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable


class InputError(ValueError):
    """A mistake in the user's input. The message names the file, field, option or layer, and says what to do.

    The command line prints only the message and exits with status 2. Without ``of_one_rank``, raise the error on all
    ranks or on none, so that no rank waits for one that has left (:meth:`pygdist.comm.Communicator.agree`). Rank 0 then
    prints the message.

    Args:
        message: One line.
        of_one_rank: True if the mistake is in data that only this rank holds, and the other ranks do not know of the
            mistake. This rank then prints the message, whatever its number; the message should name the rank.
    """

    def __init__(self, message: str, *, of_one_rank: bool = False) -> None:
        super().__init__(message)
        self.of_one_rank = of_one_rank


class RefusedError(InputError):
    """The machine refuses what a command needs: room on a disk, a file, memory (:mod:`pygdist.memory.limits`).

    Only one rank has this error, and this rank prints the message. The other ranks lose that rank and end with the same
    exit code.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, of_one_rank=True)


class UnequalRanksError(InputError, RuntimeError):
    """The ranks make different calls, so results would be wrong or ranks would wait for ever. All ranks raise it."""


class LostRankError(RuntimeError):
    """Another rank died, left, or did not answer in time. The message names that rank, and what this one waited in."""


class SignalError(SystemExit):
    """A signal ends the run. The message names the signal and the process or rank that it reached.

    The exit code is that of a process that died of the signal: 143 for SIGTERM, 130 for SIGINT.

    Args:
        message: One line.
        signum: The signal's number.
    """

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(128 + signum)
        self.message, self.signum = message, signum

    def __str__(self) -> str:
        return self.message


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return text such as "; did you mean 'fit'?" for an error message, empty if no word is similar."""
    similar = difflib.get_close_matches(word, list(words), n=1)
    return f"; did you mean '{similar[0]}'?" if similar else ""


def is_first_rank() -> bool:
    """Tell if this process is the first rank by any launcher's variables; it reports what all ranks find."""
    numbers = (os.environ.get(name, "0") for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
    return not any(number.isdecimal() and int(number) for number in numbers)


def needs(what: str, package: str, extra: str) -> InputError:
    """Return the error for an optional package that is not installed, with the command that installs it."""
    return InputError(f"{what} needs {package}: pip install 'pygdist[{extra}]'")


def pyg_wheels(*packages: str) -> str:
    """Return the command that installs PyG's compiled packages, such as ``pyg_lib``, for the installed torch."""
    import torch

    return f"pip install {' '.join(packages)} -f https://data.pyg.org/whl/torch-{torch.__version__}.html"
