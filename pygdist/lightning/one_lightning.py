"""Lightning is in two packages of the same classes, ``lightning.pytorch`` and ``pytorch_lightning``; ours is the first.

A trainer of one package takes nothing of the other, and says so in words that name neither package. So whatever meets a
trainer of ``pytorch_lightning`` is refused here, and so are its callbacks.
"""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl

from pygdist.errors import InputError

_OTHER = "pytorch_lightning"


class OfLightning:
    """Base of what users hand to a trainer: refused, in one line, by code of ``pytorch_lightning`` that looks at it.

    The first thing that a trainer does with a module or a strategy is to ask ``isinstance`` of its own base class. If
    that is no base of ours, Python asks for ``__class__``.
    """

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # of the caller of isinstance
        if str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0] == _OTHER:
            raise InputError(_advice(f"a Trainer of {_OTHER} was given a {type(self).__name__}", "Trainer"))
        return type(self)


def check_callbacks(trainer: pl.Trainer) -> None:
    """Refuse callbacks of ``pytorch_lightning``, which Lightning would call in some places and pass over in others."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        bases = {base.__module__.partition(".")[0] for base in type(callback).__mro__}
        if _OTHER in bases and not isinstance(callback, pl.Callback):
            raise InputError(_advice(f"{type(callback).__name__} is a callback of {_OTHER}", "Callback"))


def _advice(problem: str, name: str) -> str:
    return (
        f"{problem}, but pygdist uses the package lightning; import from it: 'from lightning.pytorch import {name}' "
        f"('import lightning.pytorch as pl' in place of 'import {_OTHER} as pl')"
    )
