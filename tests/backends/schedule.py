"""Helper: in which order a rank's main thread exchanges rows and computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from unittest import mock

from torch import Tensor
from typing_extensions import override

from pygdist.comm import Communicator, Recorder, Transfer


class _Order(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    @override
    def span(self, kind: str, label: str = "", *, aside: bool = False) -> contextlib.AbstractContextManager[None]:
        if kind == "aggregate":
            self.found.append(f"computes {label}")
        return super().span(kind, label, aside=aside)


@contextlib.contextmanager
def noted(communicator: Communicator) -> Iterator[list[str]]:
    """What happens inside, in order: exchanges by chunk that the main thread begins and has finished, and computations.

    An exchange is called by the last part of its label, and by the tensor if a hop reads several: ``begins split 1``
    or ``has value, split 1``.
    """
    communicator.recorder = order = _Order()

    class Noted(Transfer):
        def __init__(self, communicator: Communicator, incoming: Sequence[Tensor], label: str, **options: bool) -> None:
            super().__init__(communicator, incoming, label, **options)
            order.found.append(f"begins {_name(label)}")

        @override
        def finish(self) -> None:
            super().finish()
            order.found.append(f"has {_name(self._label)}")

    with mock.patch("pygdist.backends.slicing.pipeline.Transfer", Noted):
        yield order.found
    communicator.recorder = None


def _name(label: str) -> str:
    """Without the hop, and what rows are like."""
    *_, tensor, _, what = f", , {label}".split(", ")
    return what if tensor in ("forward", "backward", "result") else f"{tensor}, {what}"
