"""Seconds of each stage of an epoch (NeutronTP, Table 4), for node classification and link prediction.

    python -m experiments.neutrontp.stages --out figures

The harness's trainings with one more callback. It records when the model runs forward and backward, when pairs are
drawn, decoded and compared, and when parameters are updated. The communicator's recorder says when a rank aggregated,
packed, sent or waited. Each moment of an epoch thus belongs to one stage.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from typing_extensions import override

from experiments.catgnn.graphs import show, write
from experiments.cluster import why_unshaped
from experiments.harness import WARM_UP, Setting, train
from experiments.machine import SOME_FAILED
from pygdist.comm import Communicator, Recorder, Span
from pygdist.lightning import GraphModule, LinkPredictor

TASKS = ("nodes", "links")
CONTENDERS = ("comm", "tensor", "tensor, decoupled")
STAGES = (
    "negatives", "forward", "backward", "aggregate", "exchange", "rows", "decode", "loss", "averaging", "optimizer",
    "rest",
)  # fmt: skip
_MODEL = ("forward", "backward", "averaging")  # in these stages, spans count as aggregate or exchange
_GNN = ("forward", "backward", "aggregate", "exchange")
COLUMNS = (
    "task", "contender", "network", "epoch_s", "gnn_s", "gnn_share", *(f"{stage}_s" for stage in STAGES), "note",
)  # fmt: skip


def stages_of(marks: Sequence[tuple[int, str]], spans: Sequence[Span], end: int) -> dict[str, float]:
    """Return the seconds of each stage.

    Args:
        marks: Start of each stage in nanoseconds, and its name.
        spans: Spans of the recorder.
        end: End of the last stage in nanoseconds.
    """
    spent = dict.fromkeys(STAGES, 0)
    in_line = [span for span in spans if not span.aside]
    for (start, stage), (stop, _) in pairwise([*sorted(marks, key=lambda mark: mark[0]), (end, "")]):
        spent[stage] += stop - start
        for span in in_line:
            inside = min(stop, span.end) - max(start, span.start)
            if inside > 0:
                spent[stage] -= inside
                spent[_stage_of(span, stage)] += inside
    return {stage: nanoseconds / 1e9 for stage, nanoseconds in spent.items()}


def _stage_of(span: Span, stage: str) -> str:
    """Return the stage that a span within ``stage`` counts as."""
    if stage in _MODEL:
        return "aggregate" if span.kind == "aggregate" else "exchange"
    return "rows" if stage == "decode" else stage


class Stages(pl.Callback):
    """Records the seconds of each stage of each epoch on each rank; rank 0 writes them when training ends.

    A stage lasts until the next begins. The order is:

    - ``rest``, or ``negatives`` for links: choose edges, draw pairs, find the owners of their ends;
    - ``forward``: the model;
    - ``loss``, or ``decode`` and ``loss`` for links, and their backward passes in reverse order;
    - ``backward``: the model's backward pass, once the gradient of its output is known;
    - ``averaging``: from the last parameter's gradient to the end of DDP's averaging;
    - ``optimizer``.

    Args:
        path: A JSON file: by epoch, then rank, seconds of each stage.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._marks: list[tuple[int, str]] = []
        self._recording = False
        self._scored = self._pending = 0  # calls of the decoder, and gradients of scores still to come
        self._last_gradient = 0
        self._epochs: list[dict[str, float]] = []

    def _begin(self, stage: str) -> None:
        if self._recording:
            self._marks.append((time.monotonic_ns(), stage))

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, GraphModule)
        pl_module.model.register_forward_pre_hook(lambda *_: self._begin("forward"))
        pl_module.model.register_forward_hook(lambda _module, _args, out: self._after_model(out, pl_module))
        for parameter in pl_module.parameters():
            parameter.register_post_accumulate_grad_hook(self._after_gradient)
        (optimizer,) = trainer.optimizers
        optimizer.register_step_post_hook(lambda *_: self._begin("rest"))
        if isinstance(pl_module, LinkPredictor):
            communicator = pl_module.communicator
            communicator.exchange_rows = self._fetching(communicator)  # type: ignore[method-assign]
            pl_module._decoded = self._decoding(pl_module._decoded)  # type: ignore[method-assign]

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, GraphModule)
        pl_module.communicator.recorder = Recorder()
        self._marks, self._recording, self._scored, self._pending = [], True, 0, 0
        self._begin("negatives" if isinstance(pl_module, LinkPredictor) else "rest")

    def _after_model(self, out: Tensor, module: GraphModule) -> None:
        self._begin("negatives" if isinstance(module, LinkPredictor) else "loss")
        if out.requires_grad:
            out.register_hook(lambda _: self._begin("backward"))

    def _fetching(self, communicator: Communicator) -> Callable[..., Tensor]:
        """Wrap the exchange of rows: one for pairs starts the stage ``decode``."""
        inner = communicator.exchange_rows

        def exchange_rows(*args: Any, **kwargs: Any) -> Tensor:
            if self._recording and self._marks[-1][1] == "negatives":
                self._begin("decode")
            return inner(*args, **kwargs)

        return exchange_rows

    def _decoding(self, inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap the decoder, which is called for edges and then for negatives."""

        def decoded(*args: Any) -> Tensor:
            out = inner(*args)
            self._scored += 1
            if self._scored == 2:
                self._begin("loss")
            if out.requires_grad:
                self._pending += 1
                out.register_hook(self._after_score)
            return out

        return decoded

    def _after_score(self, _: Tensor) -> None:
        self._pending -= 1
        if self._pending == 0:
            self._begin("decode")

    def _after_gradient(self, _: Tensor) -> None:
        self._last_gradient = time.monotonic_ns()

    @override
    def on_before_zero_grad(self, *_: Any) -> None:
        self._begin("rest")

    @override
    def on_before_backward(self, *_: Any) -> None:
        self._begin("loss")

    @override
    def on_after_backward(self, *_: Any) -> None:
        if self._recording:
            self._marks.append((self._last_gradient, "averaging"))
        self._begin("rest")

    @override
    def on_before_optimizer_step(self, *_: Any) -> None:
        self._begin("optimizer")

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, GraphModule)
        communicator, self._recording = pl_module.communicator, False
        assert communicator.recorder is not None
        # the time after the optimiser belongs to the reports
        self._epochs.append(stages_of(self._marks[:-1], communicator.recorder.spans, self._marks[-1][0]))
        communicator.recorder = None

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, GraphModule)
        seconds = [epoch[stage] for epoch in self._epochs for stage in STAGES]
        table = pl_module.communicator.gather(seconds).reshape(-1, len(self._epochs), len(STAGES))
        if trainer.is_global_zero:
            epochs = [
                [dict(zip(STAGES, rank, strict=True)) for rank in ranks] for ranks in table.transpose(0, 1).tolist()
            ]
            self.path.write_text(json.dumps(epochs), encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    cli.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    cli.add_argument("--scale", type=float, default=0.02, help="scale of the graph like products")
    cli.add_argument("--hidden", type=int, default=64)
    cli.add_argument("--hosts", type=int, default=4)
    cli.add_argument("--network", default="1gbit", help="rate of the hosts' links")
    cli.add_argument("--epochs", type=int, default=8)
    cli.add_argument("--out", type=Path, default=Path("figures"))
    return cli


def setting_of(task: str, contender: str, path: Path, options: argparse.Namespace) -> Setting:
    """Return the setting of one training, with the callback."""
    columns = 47 if task == "nodes" else options.hidden
    arguments = {
        "in_channels": -1, "hidden_channels": options.hidden, "num_layers": 2, "out_channels": columns,
    }  # fmt: skip
    gcn = "torch_geometric.nn.models.GCN"
    coupled = contender != "tensor, decoupled"
    callback = {"class_path": "experiments.neutrontp.stages.Stages", "init_args": {"path": str(path)}}
    return Setting(
        name=f"{task}, {contender}",
        graph="products-like",
        graph_args={"scale": options.scale},
        model=gcn if coupled else "pygdist.nn.decoupled.decouple",
        model_args=arguments if coupled else {"model": {"class_path": gcn, "init_args": arguments}},
        backend="comm" if contender == "comm" else "tensor",
        ranks=options.hosts,
        network="unshaped" if why_unshaped() else options.network,
        epochs=options.epochs,
        timeline=False,
        fit={
            "task": task,
            "model": {"savings": {"first_hop": False}},
            "trainer": {"callbacks": [callback], "limit_val_batches": 0},
        },
    )


def figures_of(epochs: Sequence[Sequence[dict[str, float]]]) -> dict[str, float]:
    """Return the figures of the slowest rank in each stage, medians over epochs.

    Args:
        epochs: Seconds of each stage, by epoch, then rank.
    """
    counted = epochs[WARM_UP:]

    def slowest(stages: Sequence[str]) -> float:
        return statistics.median(max(sum(rank[one] for one in stages) for rank in ranks) for ranks in counted)

    shares = [
        statistics.fmean(sum(rank[one] for one in _GNN) / sum(rank.values()) for rank in ranks) for ranks in counted
    ]
    figures = {"epoch_s": slowest(STAGES), "gnn_s": slowest(_GNN), "gnn_share": statistics.median(shares)}
    figures |= {f"{stage}_s": slowest([stage]) for stage in STAGES}
    return {name: round(value, 6) for name, value in figures.items()}


def main() -> int:
    """Run what the command line asks for."""
    options = parser().parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for task in options.tasks:
            for contender in options.contenders:
                setting = setting_of(task, contender, work / "stages.json", options)
                run = train(setting, 0, work=work, traces=work)
                row = dict.fromkeys(COLUMNS, "") | {"task": task, "contender": contender, "note": run["note"]}
                row |= {"network": run["network"], "hosts": options.hosts, "hidden": options.hidden}
                row |= {"scale": options.scale, "epochs": options.epochs}
                if not run["note"]:
                    row |= figures_of(json.loads((work / "stages.json").read_text()))
                rows.append(row)
                print(f"{setting.name}: {row['note'] or row['epoch_s']}", flush=True)
                write(rows, options.out / "stages.csv", threads=1)
    show([{column: row[column] for column in COLUMNS} for row in rows], "Stages of an epoch")
    return SOME_FAILED if any(row["note"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
