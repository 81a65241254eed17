"""A timeline of some epochs, as a Chrome trace and a picture: when each rank computed, packed, sent and waited."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from pygdist.comm import Communicator, Recorder, Span
from pygdist.errors import InputError, needs
from pygdist.lightning.module import GraphModule
from pygdist.lightning.to_rank_zero import to_rank_zero

_COLOURS = {  # in the order of drawing: later kinds may cover earlier ones
    "travel": "0.6", "compute": "C0", "aggregate": "C9", "pack": "C1", "send": "C2", "wait": "C3", "unpack": "C5",
    "reduce": "C4",
}  # fmt: skip
_PINGS = 9


class Timeline(pl.Callback):
    """Records what every rank does in some training epochs, and writes a Chrome trace and a picture of it.

    Kinds of work on a rank:

    - *pack*: copy the rows to send into one buffer;
    - *send*: hand the rows to the transport;
    - *wait*: wait until rows of other ranks have arrived, or own rows are sent;
    - *reduce*: sum tensors over all ranks;
    - *unpack*: add rows that have arrived, such as gradients, to the rank's own rows;
    - *aggregate*: aggregate rows that have arrived;
    - *compute*: the rest of an epoch, including DDP's averaging of gradients.

    A thin line below shows what happens at the same time without the rank's work: rows *travel*, and in ring order
    another thread *sends* rows. Validations are not recorded, except for the extra average of models before a
    validation (strategy ``model_averaging``). Times are those of each machine's monotonic clock, aligned with rank 0's
    clock when training starts. On CUDA, times are those of the host, which runs ahead of the device.

    Args:
        path: File of the trace, for Perfetto (https://ui.perfetto.dev) or ``chrome://tracing``. Rank 0 writes the trace
            when training ends, and beside it the picture as ``.png`` (needs matplotlib, extra ``plot``).
        first_epoch: The first epoch to record, from 0. Epoch 0 does work that later epochs do not.
        epochs: Number of epochs to record.

    Raises:
        MisconfigurationException: If ``first_epoch`` is below 0, or ``epochs`` below 1.

    Example:
        >>> trainer = pl.Trainer(devices=4, strategy="graph_ddp", callbacks=[Timeline("timeline.json")])
    """

    def __init__(self, path: str | Path = "timeline.json", first_epoch: int = 2, epochs: int = 3) -> None:
        if first_epoch < 0 or epochs < 1:
            raise MisconfigurationException(
                f"Timeline: first_epoch is {first_epoch} and epochs {epochs}; expected at least 0 and 1"
            )
        self.path, self.first_epoch, self.epochs = Path(path), first_epoch, epochs
        self._offset = self._start = 0
        self._spans: list[Span] = []
        self._validates = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(pl_module, GraphModule):
            self._spans = []
            self._offset = clock_offset(pl_module.communicator)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(pl_module, GraphModule) and self._wants(trainer):
            pl_module.communicator.recorder = Recorder()
            self._start = time.monotonic_ns()

    def _wants(self, trainer: pl.Trainer) -> bool:
        return self.first_epoch <= trainer.current_epoch < self.first_epoch + self.epochs

    def _recorded(self, module: GraphModule) -> list[Span]:
        recorder, module.communicator.recorder = module.communicator.recorder, None
        return [] if recorder is None else recorder.spans

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if isinstance(pl_module, GraphModule) and trainer.is_last_batch and pl_module.communicator.recorder:
            spans, epoch = self._recorded(pl_module), f"epoch {trainer.current_epoch}"
            self._spans += with_compute(spans, self._start, time.monotonic_ns(), epoch)

    # a strategy may average models between the next two hooks

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not isinstance(pl_module, GraphModule) or trainer.sanity_checking or not self._wants(trainer):
            return
        self._validates = pl_module.communicator.recorder is None  # otherwise an epoch is being recorded
        if self._validates:
            pl_module.communicator.recorder = Recorder()

    @override
    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(pl_module, GraphModule) and self._validates:
            self._spans += self._recorded(pl_module)
            self._validates = False

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not isinstance(pl_module, GraphModule):
            return
        offset = self._offset
        moved = [dataclasses.replace(one, start=one.start + offset, end=one.end + offset) for one in self._spans]
        by_rank = _collected(moved, pl_module.communicator)
        if pl_module.communicator.rank == 0 and not any(by_rank):
            rank_zero_warn(
                f"Timeline: {self.path} is not written, since epochs {self.first_epoch} to "
                f"{self.first_epoch + self.epochs - 1} were not trained here"
            )
        if any(by_rank):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(chrome_trace(by_rank)), encoding="utf-8")
            try:
                draw(by_rank, self.path.with_suffix(".png"))
            except InputError as error:  # the trace is there
                rank_zero_warn(str(error))


def clock_offset(communicator: Communicator) -> int:
    """Return the nanoseconds to add to this rank's monotonic clock to get rank 0's; all ranks make the call.

    Each rank in turn asks rank 0 for the time, several times. The fastest answer counts, and rank 0 is taken to have
    read its clock halfway between question and answer.
    """
    offset = 0
    for rank in range(1, communicator.world_size):
        fastest = None
        for _ in range(_PINGS):
            asked = torch.zeros(1, dtype=torch.int64, device=communicator.device)
            if communicator.rank == rank:
                start = time.monotonic_ns()
                communicator.send_to(0, [asked], label="clock")
                communicator.receive_from(0, [asked], label="clock")
                end = time.monotonic_ns()
                if fastest is None or end - start < fastest:
                    fastest, offset = end - start, int(asked) - (start + end) // 2
            elif communicator.rank == 0:
                communicator.receive_from(rank, [asked], label="clock")
                communicator.send_to(rank, [torch.full_like(asked, time.monotonic_ns())], label="clock")
    return offset


def with_compute(spans: Sequence[Span], start: int, end: int, label: str) -> list[Span]:
    """Return the spans of an epoch, with the gaps between them as ``compute``."""
    filled, at = [], start
    for span in sorted(spans, key=lambda one: one.start):
        if not span.aside:
            if span.start > at:
                filled.append(Span("compute", label, at, span.start))
            at = max(at, span.end)
        filled.append(span)
    if end > at:
        filled.append(Span("compute", label, at, end))
    return filled


def chrome_trace(by_rank: Sequence[Sequence[Span]]) -> dict[str, Any]:
    """Return the spans of each rank in Chrome's trace event format, in microseconds since the first one began."""
    first = min(span.start for spans in by_rank for span in spans)
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(by_rank):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        events += [
            {
                "ph": "X", "name": span.kind, "cat": span.kind, "pid": rank,
                "tid": int(span.aside), "ts": (span.start - first) / 1e3,
                "dur": (span.end - span.start) / 1e3, "tdur": span.busy / 1e3, "args": {"of": span.label},
            }
            for span in spans
        ]  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def draw(by_rank: Sequence[Sequence[Span]], path: Path) -> None:
    """Draw a line for each rank with a colour for each kind, and a thin line below it for what goes on meanwhile."""
    try:
        from matplotlib.figure import Figure  # pyplot would choose a window system
        from matplotlib.patches import Patch
    except ModuleNotFoundError as error:
        raise needs("the picture of a timeline", "matplotlib", "plot") from error

    first = min(span.start for spans in by_rank for span in spans)
    figure = Figure(figsize=(10, 1.2 + 0.5 * len(by_rank)))
    axis = figure.subplots()
    for rank, spans in enumerate(by_rank):
        for kind, colour in _COLOURS.items():
            for aside, place in ((False, (rank - 0.4, 0.64)), (True, (rank + 0.28, 0.12))):
                drawn = [one for one in spans if (one.kind, one.aside) == (kind, aside)]
                bars = [((one.start - first) / 1e6, (one.end - one.start) / 1e6) for one in drawn]
                axis.broken_barh(bars, place, facecolors=colour)
    kinds = {one.kind for spans in by_rank for one in spans}
    handles = [Patch(color=colour, label=kind) for kind, colour in _COLOURS.items() if kind in kinds]
    axis.legend(handles=handles, ncol=len(handles), fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1))
    axis.set(xlabel="ms", ylabel="rank", yticks=range(len(by_rank)))
    axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def _collected(spans: Sequence[Span], communicator: Communicator) -> list[list[Span]]:
    """Return the spans of all ranks on rank 0, and nothing on the others; all ranks make the call."""
    text = json.dumps([dataclasses.astuple(one) for one in spans]).encode()
    raw = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    _, arriving = to_rank_zero([raw], communicator, label="timeline")
    return [[Span(*one) for one in json.loads(bytes(text.cpu().numpy()))] for (text,) in arriving]
