"""Reports of a run: time and traffic of each epoch, and the predictions of all nodes."""

from __future__ import annotations

import contextlib
import csv
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from pygdist.comm import Traffic
from pygdist.errors import InputError
from pygdist.lightning.averaging import FOR_CHECKPOINT, FOR_VALIDATION, ModelAveragingStrategy
from pygdist.lightning.module import GraphModule
from pygdist.lightning.to_rank_zero import to_rank_zero
from pygdist.memory.limits import told
from pygdist.memory.machine import peak_rss_bytes
from pygdist.memory.mapped import new_array
from pygdist.memory.scratch import replacing
from pygdist.sampler.steps import FETCHING, NEXT_BATCH, SAMPLING

_STAGES = {"sampling_s": SAMPLING, "fetching_s": FETCHING, "batch_wait_s": NEXT_BATCH}
_RANK_COLUMNS = (
    "epoch_s", "compute_s", "exchange_s", "sent_bytes", "sent_messages", "peak_gib", "kept_mib", "sampling_bytes",
    *_STAGES,
)  # fmt: skip


class ExchangeMonitor(pl.Callback):
    """Logs the time, traffic and memory of each training epoch.

    Rank 0 logs these figures about all ranks once per epoch, in a separate row of the logger's table. On all ranks the
    figures are in ``trainer.callback_metrics``:

    =============================  ==================================================================
    ``epoch_s``                    wall seconds of the epoch's training steps, largest over ranks
    ``compute_s_{min,max}``        of these, seconds outside exchanges, over ranks
    ``exchange_s_{min,max}``       of these, seconds inside exchanges, over ranks
    ``sent_bytes_{min,max}``       payload bytes sent by a rank's backend
    ``sent_messages_{min,max}``    point-to-point messages sent by a rank's backend
    ``sent_bytes_total``           payload bytes sent by all ranks' backends
    ``gradient_bytes``             payload bytes that a rank sends to average the gradients once
    ``unused_model_bytes``         payload bytes that a rank sends for extra averages of models, which are validated or
                                   saved but not trained further (strategy ``model_averaging``)
    ``checkpoint_bytes``           payload bytes that all ranks send to rank 0 for checkpoints: the optimisers' state of
                                   each part (strategy ``model_averaging``; 0 if nothing is saved)
    ``kept_mib_{max,total}``       memory that holds the results of hops over fixed rows, in MiB
    ``peak_gib_{max,total}``       peak resident memory of a process so far, in GiB; on CUDA of the device's tensors
    ``expected_epoch_s``           the ``epoch_s`` that the plan of backend ``hybrid`` expects
    ``planning_s``                 seconds of planning on rank 0; part of the first ``epoch_s``
    ``sampling_bytes_total``       of ``sent_bytes_total``, the bytes for sampling; this figure and the three below
                                   exist only if mini-batches are sampled across ranks
    ``sampling_s_max``             seconds in which a rank's thread samples, while the main thread trains
    ``fetching_s_max``             seconds in which this thread fetches rows, or pushes the structure of batches
    ``batch_wait_s_max``           of ``exchange_s_max``, seconds in which training waits for the next batch
    =============================  ==================================================================

    DDP's gradient all-reduce, and waiting in the all-reduce for a slower rank, count as compute, since the all-reduce
    overlaps with the backward pass. Of the bytes that validations and checkpoints send, only those of
    ``unused_model_bytes`` and ``checkpoint_bytes`` are counted. A checkpoint that is saved after an epoch counts in the
    next epoch, so the last checkpoint of a run does not count.

    Args:
        ranks: A CSV file for the figures of each rank, with a line for each epoch and rank. Rank 0 adds lines after
            each epoch; a run that resumes keeps the lines before.
    """

    def __init__(self, ranks: str | Path | None = None) -> None:
        self.ranks = None if ranks is None else Path(ranks)
        self._start = 0.0
        self._figures: dict[str, float] = {}  # of the epoch that ends
        self._unused = 0  # bytes of averages that were made after the figures of the epoch before were logged
        self._logged = 0  # bytes of averages in the figures of the epoch before
        self._saved = 0  # the strategy's bytes for checkpoints that are logged already

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.ranks is not None and trainer.is_global_zero:
            self._begin_table(self.ranks, trainer.current_epoch)
        self._logged = self._saved = 0
        self._figures = {}
        self._begin(pl_module)  # a run that resumes within an epoch does not start one

    def _begin_table(self, path: Path, epoch: int) -> None:
        """Write the header; a run that resumes keeps the lines of the epochs before."""
        kept: list[list[str]] = []
        if epoch and path.is_file():
            with path.open(newline="") as file:
                rows = list(csv.reader(file))[1:]
            kept = [row for row in rows if len(row) == len(_RANK_COLUMNS) + 2 and int(row[0]) < epoch]
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([["epoch", "rank", *_RANK_COLUMNS], *kept])

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(pl_module)

    def _begin(self, pl_module: pl.LightningModule) -> None:
        if isinstance(pl_module, GraphModule):
            _synchronize(pl_module.device)
            self._unused = _unused_bytes(pl_module.communicator.meter.reset()) - self._logged
            self._logged = 0
            self._start = time.perf_counter()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if not isinstance(pl_module, GraphModule) or not trainer.is_last_batch:
            return
        _synchronize(pl_module.device)
        seconds = time.perf_counter() - self._start
        communicator = pl_module.communicator
        traffic = communicator.meter.read()
        times = seconds, seconds - traffic.exchange_s, traffic.exchange_s
        memory = _peak_gib(pl_module.device), pl_module.backend.kept_bytes / 2**20
        stages = (traffic.stage_s.get(name, 0.0) for name in _STAGES.values())
        sent = traffic.sent_bytes, traffic.sent_messages
        figures_here = (*times, *sent, *memory, traffic.bytes_of("sampling"), *stages)  # as _RANK_COLUMNS
        table = communicator.gather([float(value) for value in figures_here])
        if self.ranks is not None and trainer.is_global_zero:
            with self.ranks.open("a", newline="") as file:
                for rank, row in enumerate(table.tolist()):
                    csv.writer(file).writerow([trainer.current_epoch, rank, *(f"{value:.9g}" for value in row)])
        low, high, total = (
            dict(zip(_RANK_COLUMNS, row.tolist(), strict=True)) for row in (table.amin(0), table.amax(0), table.sum(0))
        )
        figures = {"epoch_s": high["epoch_s"], "sent_bytes_total": total["sent_bytes"]}
        for name in ("peak_gib", "kept_mib"):
            figures |= {f"{name}_max": high[name], f"{name}_total": total[name]}
        for name in ("compute_s", "exchange_s", "sent_bytes", "sent_messages"):
            figures |= {f"{name}_min": low[name], f"{name}_max": high[name]}
        if high["batch_wait_s"]:
            figures |= {"sampling_bytes_total": total["sampling_bytes"], **{f"{one}_max": high[one] for one in _STAGES}}
        if getattr(trainer.strategy, "sends_gradients", True):
            at_once = getattr(trainer.strategy, "sums_in_one_round", False)
            figures["gradient_bytes"] = _gradient_bytes(pl_module, communicator.world_size, at_once=at_once)
        planned = {name: getattr(pl_module.backend, name) for name in ("expected_epoch_s", "planning_s")}
        self._figures = figures | {name: value for name, value in planned.items() if value is not None}

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not isinstance(pl_module, GraphModule):
            return
        figures, self._figures = self._figures, {}
        if isinstance(trainer.strategy, ModelAveragingStrategy):
            self._logged = _unused_bytes(pl_module.communicator.meter.read())
            saved = trainer.strategy.checkpoint_bytes
            figures["unused_model_bytes"] = float(self._unused + self._logged)
            figures["checkpoint_bytes"] = float(saved - self._saved)
            self._saved = saved
        if figures:  # an epoch that was interrupted has none
            _log(trainer, figures)


class PredictionWriter(BasePredictionWriter):
    """Writes the predictions of all ranks to one ``.npy`` file, one row per node of the graph, ordered by global id.

    Other ranks send their rows to rank 0, part by part, so no shared file system is needed and no rank holds all rows.
    If only some nodes are predicted (``limit_predict_batches`` with several parts on a rank), no file is left and all
    ranks raise :class:`~pygdist.errors.InputError`.

    Row i belongs to node i. If nodes of the user's files were renumbered, the original id of node i is line i + 1 of
    ``ids.txt`` (names) or entry i of ``ids.npy`` (numbers) in the store; the log names the file.

    Args:
        path: The file to write; it appears when it is complete.
        output: Content of the file: ``label`` for predicted classes, int64 (for several labels per node rows of 0 and
            1, int8); ``logits`` for the model's output. For numbers to predict, and for links
            (:class:`~pygdist.lightning.LinkPredictor`), the content is always the model's output.
    """

    def __init__(self, path: str | Path = "predictions.npy", output: Literal["label", "logits"] = "label") -> None:
        super().__init__(write_interval="epoch")
        self.path, self.output = Path(path), output

    @override
    def write_on_epoch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, predictions: Sequence[Any], *_: Any
    ) -> None:
        assert isinstance(pl_module, GraphModule)
        file, error = None, None
        with contextlib.ExitStack() as stack:
            try:
                if pl_module.communicator.rank == 0:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    file = stack.enter_context(replacing(self.path))
            except OSError as problem:
                error = told(problem) or f"{self.path}: cannot be written ({problem})"
            pl_module.communicator.agree(error)
            self._collect(file, predictions, pl_module)
        if file is not None:
            _tell_ids(self.path, getattr(getattr(trainer, "datamodule", None), "folder", None))

    def _collect(self, path: Path | None, predictions: Sequence[Any], module: GraphModule) -> None:
        """Write the rows of all ranks to a file; all ranks make the call, and rank 0 alone has a path."""
        # the backend has no communicator after an evaluation of parts in turn
        communicator, rows, num_predicted, error = module.communicator, None, 0, None
        turns = int(communicator.gather([float(len(predictions))]).max())
        for n_id, out in self._in_turns(predictions, turns, module):
            counts, arriving = to_rank_zero([n_id, out], communicator, label="predictions")
            num_predicted += sum(counts)
            for ids, values in arriving:
                array = values.cpu().numpy()
                if rows is None and error is None:
                    assert path is not None, "rank 0 writes"
                    try:
                        rows = new_array(path, array.dtype, (module.shard.num_nodes, *array.shape[1:]))
                    except OSError as problem:  # all that is sent arrives nevertheless
                        error = told(problem) or str(problem)
                if rows is not None:
                    rows[ids.cpu().numpy()] = array
        communicator.agree(error)
        if num_predicted != module.shard.num_nodes:
            raise InputError(
                f"{self.path}: not written, as only {num_predicted} of {module.shard.num_nodes} nodes were predicted; "
                "leave out limit_predict_batches and fast_dev_run"
            )
        if rows is not None:
            rows.flush()

    def _in_turns(self, predictions: Sequence[Any], turns: int, module: GraphModule) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the node ids and rows of each part, and empty ones while other ranks have more parts."""
        none = tuple(rows[:0] for rows in predictions[0])
        for n_id, out in [*predictions, *[none] * (turns - len(predictions))]:
            out = module.labels_of(out) if self.output == "label" else out
            yield n_id.contiguous(), (out.float() if out.dtype == torch.bfloat16 else out).contiguous()


def _tell_ids(path: Path, store: Path | None) -> None:
    """Log where the ids of the rows of predictions are, if the nodes of the store had others than their numbers."""
    for ids, place in (("ids.txt", "the name in line i + 1"), ("ids.npy", "entry i")):
        if store is not None and (store / ids).is_file():
            rank_zero_info(f"{path}: the id of the node of row i is {place} of {store / ids}")


def _log(trainer: pl.Trainer, figures: dict[str, float]) -> None:
    """Hand figures of all ranks straight to the loggers, which write on rank 0, as Lightning's own monitors do.

    ``LightningModule.log`` took a sixth of a rank's time for them, on four ranks that share two cores and a graph like
    Reddit.
    """
    trainer.callback_metrics.update({name: torch.tensor(value, dtype=torch.float64) for name, value in figures.items()})
    row = {**figures, "epoch": trainer.current_epoch}
    for logger in trainer.loggers:
        logger.log_metrics(row, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


def _unused_bytes(traffic: Traffic) -> int:
    return traffic.summed_bytes[FOR_VALIDATION] + traffic.summed_bytes[FOR_CHECKPOINT]


def _gradient_bytes(module: torch.nn.Module, world_size: int, *, at_once: bool) -> float:
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", [])
    trained = [one for name, one in module.named_parameters() if one.requires_grad and name not in ignored]
    size = sum(one.numel() * one.element_size() for one in trained)
    return (world_size - 1) * size * (1 if at_once else 2 / world_size)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return peak_rss_bytes() / 2**30
