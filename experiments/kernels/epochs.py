"""Seconds per epoch and peak memory of full-graph training, ``pygdist fit`` against PyG and DGL; table, CSV, plot.

    python -m experiments.kernels.epochs --out figures
    python -m experiments.kernels.epochs --models GCN GraphSAGE GAT --dgl SITE --out figures
    python -m experiments.kernels.epochs --savings-table --out figures

Each contender trains in its own processes, one at a time, a few epochs per round. This script imports neither torch nor
pygdist, because the memory of a process counts as the peak of a process that it starts, until that one needs more.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.kernels import dgl_wheels
from experiments.machine import SOME_FAILED, provenance

HERE = Path(__file__).resolve().parent
OURS, PYG, DGL = "pygdist", "plain", "plain_dgl"  # what trains: ``pygdist fit``, or one of the scripts beside this one
MODELS = {
    "GCN": "torch_geometric.nn.models.GCN",
    "GraphSAGE": "torch_geometric.nn.models.GraphSAGE",
    "GIN": "torch_geometric.nn.models.GIN",
    "GAT": "plain.GAT",
}
DGL_MODELS = ("GCN", "GraphSAGE", "GAT")
HIDDEN, CLASSES, FEATURES = 128, 40, 128
COLUMNS = [
    "model", "contender", "nodes", "edges", "epochs", "median_s", "min_s", "spread", "ratio", "peak_gib", "imports_gib",
    "beyond_imports_gib", "loss_difference", "note",
]  # fmt: skip
_WARM_UP = 2  # epochs of each process: they allocate memory and compute degrees, transposes and kept results
_GIB = 2**30
_SWITCHES = (
    "from dataclasses import fields; from pygdist.backends import Savings; "
    "print(*(one.name for one in fields(Savings) if isinstance(one.default, bool)))"
)


@dataclass
class Contender:
    """One way to train one model, and the figures of its processes so far."""

    model: str
    name: str
    program: str  # OURS, PYG or DGL
    arguments: Sequence[str] = ()  # of the program
    seconds: list[float] = field(default_factory=list)  # of epochs after warm-up
    losses: list[float] = field(default_factory=list)  # from the first epoch on, of the first process
    peak: int = 0
    note: str = ""

    def epochs(self, options: argparse.Namespace) -> int:
        """Return the timed epochs of the next process: first one, then as many as the budget holds."""
        if not self.seconds:
            return 1
        return max(1, min(options.epochs, int(options.budget_s / statistics.median(self.seconds))))


@dataclass(frozen=True)
class Ended:
    """A process that has ended; ``peak`` is its largest resident memory in bytes."""

    code: int
    out: str
    err: str
    peak: int


def run(command: Sequence[str], folder: Path, options: argparse.Namespace) -> Ended:
    """Run Python with the threads and the memory that a contender may have."""
    paths = [str(HERE), str(HERE.parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    threads = str(options.threads)
    environment = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    limit = int(options.max_gib * _GIB)
    with (folder / "out").open("w+") as out, (folder / "err").open("w+") as err:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=out,
            stderr=err,
            env={**os.environ, **environment},
            # if memory runs out, the process itself fails, instead of another one being killed
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        return Ended(process.returncode, out.read(), err.read(), usage.ru_maxrss * 1024)


def must(ended: Ended) -> Ended:
    """Return the process if it ended well; end the script otherwise."""
    if ended.code:
        raise SystemExit(ended.err or f"exited with {ended.code}")
    return ended


def prepare(folder: Path, options: argparse.Namespace) -> None:
    """Write the graph as arrays, and as a store for pygdist. This adds to no contender's peak."""
    make = (
        "from pygdist.graph import load_graph, prepare, save_npy; from pygdist.partition import partition_graph; "
        f"data = load_graph('power-law', num_nodes={options.nodes}, num_edges={options.edges}, "
        f"num_features={FEATURES}, num_classes={CLASSES}); save_npy(data, {str(folder / 'graph')!r}); "
        f"partition_graph(prepare(data)[0], {str(folder / 'store')!r}, num_parts=1)"
    )
    must(run(["-c", make], folder, options))
    if options.dgl is not None:
        save = f"import plain, pathlib; plain.save_initial(pathlib.Path({str(folder / 'graph')!r}), {HIDDEN})"
        must(run(["-c", save], folder, options))


def imported(folder: Path, options: argparse.Namespace) -> dict[str, int]:
    """Return the peak memory of a process that only imports what each program imports."""
    imports = {OURS: "import pygdist.commands.train", PYG: "import plain"}
    if options.dgl is not None:
        imports[DGL] = f"import pathlib, plain_dgl; plain_dgl.load(pathlib.Path({str(options.dgl)!r}))"
    return {program: must(run(["-c", lines], folder, options)).peak for program, lines in imports.items()}


def compared(model: str, options: argparse.Namespace) -> list[Contender]:
    """Return pygdist, DGL if there is one, and PyG with each adjacency; for GCN also with its option to cache."""
    contenders = [Contender(model, OURS, OURS)]
    if options.dgl is not None and model in DGL_MODELS:
        if model != "GAT":  # whose first hop depends on parameters, so nothing of it is kept
            contenders.append(Contender(model, f"{OURS}, first hop anew", OURS, ["--model.savings.first_hop=false"]))
        site = f"--dgl={options.dgl}"
        contenders += [Contender(model, f"DGL {ids}", DGL, [site, f"--ids={ids}"]) for ids in ("int32", "int64")]
    for adjacency in options.adjacencies:
        if adjacency == "torch_sparse" and not importlib.util.find_spec("torch_sparse"):
            continue
        name = adjacency if adjacency == "accelerate" else f"PyG {adjacency}"
        contenders.append(Contender(model, name, PYG, [f"--adjacency={adjacency}"]))
        if model == "GCN":
            arguments = [f"--adjacency={adjacency}", "--cached"]
            contenders.append(Contender(model, f"{name}, cached", PYG, arguments))
    return contenders


def savings(model: str, switches: Sequence[str]) -> list[Contender]:
    """Return pygdist with all shortcuts on, with all off, with more and more on, and with all but one on."""

    def contender(name: str, on: Sequence[str]) -> Contender:
        flags = [f"--model.savings.{switch}={'true' if switch in on else 'false'}" for switch in switches]
        return Contender(model, name, OURS, flags)

    adding = [contender(f"+ {switch}", switches[: count + 1]) for count, switch in enumerate(switches[:-1])]
    leaving = [contender(f"all but {one}", [other for other in switches if other != one]) for one in switches]
    return [contender(OURS, switches), contender("all off", ()), *adding, *leaving]


def train(contender: Contender, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run one process of a contender and record its figures; return one row per epoch."""
    epochs = _WARM_UP + contender.epochs(options)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        ours = contender.program == OURS
        if ours:
            command = ["-m", "pygdist.cli", "fit", *_fit(contender.model, folder / "store", Path(scratch), epochs)]
        else:
            where = ["--model", contender.model, "--hidden", str(HIDDEN), "--epochs", str(epochs)]
            command = [str(HERE / f"{contender.program}.py"), str(folder / "graph"), *where]
        ended = run([*command, *contender.arguments], Path(scratch), options)
        if ended.code:
            contender.note = _reason(ended, options)
            return []
        losses, seconds = _logged_figures(Path(scratch)) if ours else _plain_figures(ended.out)
    contender.seconds += seconds[_WARM_UP:]
    contender.losses = contender.losses or losses
    contender.peak = max(contender.peak, ended.peak)
    return [
        {"model": contender.model, "contender": contender.name, "epoch": epoch, "epoch_s": one, "train_loss": loss,
         "peak_gib": ended.peak / _GIB}
        for epoch, (loss, one) in enumerate(zip(losses, seconds, strict=True))
    ]  # fmt: skip


def _fit(model: str, store: Path, folder: Path, epochs: int) -> list[str]:
    """Return options of ``pygdist fit``: the model and seed of plain.py, the optimiser of loop.py, training only."""
    sizes = {"in_channels": FEATURES, "hidden_channels": HIDDEN, "num_layers": 2, "out_channels": CLASSES}
    return [
        "--seed_everything=0",
        f"--data.store={store}",
        f"--model.model={MODELS[model]}",
        *(f"--model.model.{name}={value}" for name, value in sizes.items()),
        "--model.backend=single",
        "--model.lr=0.01",
        "--model.weight_decay=5e-4",
        f"--trainer.max_epochs={epochs}",
        f"--trainer.default_root_dir={folder}",
        "--trainer.accelerator=cpu",
        "--trainer.limit_val_batches=0",
        "--trainer.enable_checkpointing=false",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
    ]


def _plain_figures(out: str) -> tuple[list[float], list[float]]:
    figures = json.loads(out.splitlines()[-1])
    return figures["train_loss"], figures["epoch_s"]


def _logged_figures(folder: Path) -> tuple[list[float], list[float]]:
    """Return the losses and the seconds of each epoch from pygdist's log."""
    with next(folder.rglob("metrics.csv")).open(newline="") as file:
        lines = list(csv.DictReader(file))
    losses, seconds = ([float(line[name]) for line in lines if line[name]] for name in ("train_loss", "epoch_s"))
    return losses, seconds


def _reason(ended: Ended, options: argparse.Namespace) -> str:
    if "can't allocate memory" in ended.err or "MemoryError" in ended.err or "bad_alloc" in ended.err:
        return f"does not fit in {options.max_gib:g} GiB"
    lines = ended.err.strip().splitlines()
    return f"failed: {lines[-1] if lines else f'exit code {ended.code}'}"


def rows(contenders: Sequence[Contender], imports: dict[str, int], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row per contender of one model."""
    ours = contenders[0]
    measured = []
    for one in contenders:
        row: dict[str, Any] = {"model": one.model, "contender": one.name, "nodes": options.nodes}
        row |= {"edges": options.edges, "epochs": len(one.seconds), "note": one.note}
        if one.seconds and not one.note:
            median = statistics.median(one.seconds)
            row |= {"median_s": median, "min_s": min(one.seconds)}
            row["spread"] = (max(one.seconds) - min(one.seconds)) / median
            row["ratio"] = median / statistics.median(ours.seconds) if ours.seconds else None
            row |= {"peak_gib": one.peak / _GIB, "imports_gib": imports[one.program] / _GIB}
            row["beyond_imports_gib"] = row["peak_gib"] - row["imports_gib"]
            row["loss_difference"] = _loss_difference(one.losses, ours.losses)
            # initial parameters are equal; later losses drift apart by rounding, as Adam divides by small numbers
            if ours.losses and not row["loss_difference"] <= 1e-3:
                row["note"] = f"wrong: its losses differ from {OURS}'s"
        measured.append(row)
    return measured


def _loss_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference of the losses before and after the first step."""
    pairs = zip(losses[:2], reference[:2], strict=False)
    return max((abs(one - other) / max(abs(other), 1e-12) for one, other in pairs), default=float("nan"))


def table(measured: Sequence[dict[str, Any]], title: str) -> Table:
    """Return all rows as a table for the terminal."""
    out = Table("model", "contender", title=title)
    for name in ("epochs", "median s", "min s", "spread", "ratio", "peak GiB", "beyond imports"):
        out.add_column(name, justify="right")
    out.add_column("note")
    forms = {"median_s": ".3f", "min_s": ".3f", "spread": ".0%", "ratio": ".2f", "peak_gib": ".2f"}
    forms["beyond_imports_gib"] = ".2f"
    for row, following in zip(measured, [*measured[1:], None], strict=True):
        figures = ["" if row.get(name) is None else format(row[name], form) for name, form in forms.items()]
        last = following is None or following["model"] != row["model"]
        out.add_row(row["model"], row["contender"], str(row["epochs"]), *figures, row.get("note", ""), end_section=last)
    return out


def plot(measured: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot bars of seconds per epoch, on a log scale, and of peak memory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(row["model"] for row in measured))
    contenders = list(dict.fromkeys(row["contender"] for row in measured))
    width = 0.85 / len(contenders)
    figure, axes = plt.subplots(2, 1, figsize=(2 + 2.2 * len(models), 7), sharex=True)
    for axis, column, label in (
        (axes[0], "median_s", "seconds per epoch"),
        (axes[1], "beyond_imports_gib", "GiB beyond imports"),
    ):
        for place, model in enumerate(models):
            chosen = [row for row in measured if row["model"] == model and row.get(column) is not None]
            for number, row in enumerate(chosen):
                color = plt.get_cmap("tab20")(contenders.index(row["contender"]) % 20)
                left = place + (number - (len(chosen) - 1) / 2) * width
                axis.bar(left, row[column], width, label=row["contender"], color=color)
        axis.set_ylabel(label)
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_yscale("log")
    axes[1].set_xticks(range(len(models)), models)
    labels = {label: bar for bar, label in zip(*axes[0].get_legend_handles_labels(), strict=True)}
    axes[0].legend(labels.values(), labels.keys(), loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument("--models", nargs="+", choices=list(MODELS), help="default: all; GCN with --savings-table")
    cli.add_argument("--nodes", type=int, default=50_000, help="default: those of the reference graph")
    cli.add_argument("--edges", type=int, default=5_000_000, help="default: those of the reference graph")
    adjacencies = ["edges", "sparse", "torch_sparse"]
    cli.add_argument(
        "--adjacencies",
        nargs="*",
        choices=[*adjacencies, "accelerate"],
        default=adjacencies,
        help="adjacencies for plain PyG (default: all), or its edges with one line of pygdist's, accelerate",
    )
    cli.add_argument("--dgl", type=Path, metavar="SITE", help=f"{dgl_wheels.HELP}; not for GIN")
    cli.add_argument("--savings-table", action="store_true", help="compare pygdist's shortcuts instead of plain PyG")
    cli.add_argument("--threads", type=int, default=2)
    cli.add_argument("--rounds", type=int, default=3, help="number of processes per contender")
    cli.add_argument("--epochs", type=int, default=10, help="largest number of timed epochs of a process")
    cli.add_argument("--budget-s", type=float, default=30.0, help="seconds that the timed epochs of a process may take")
    cli.add_argument("--max-gib", type=float, default=16.0, help="GiB that a process may allocate")
    cli.add_argument("--out", type=Path, default=Path("figures"), help="folder for the CSV files and the plot")
    return cli


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, with the default models filled in."""
    made = parser()
    options = made.parse_args(argv)
    if options.savings_table and options.dgl is not None:
        made.error("--savings-table compares pygdist with itself; leave out --dgl")
    options.models = options.models or (["GCN"] if options.savings_table else list(MODELS))
    options.dgl = None if options.dgl is None else options.dgl.resolve()
    return options


def main() -> int:
    """Measure what the command line asks for, and compare each contender's losses with pygdist's."""
    options = parse()
    if why := dgl_wheels.problem(options.dgl):
        print(f"error: {why}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    name = "savings" if options.savings_table else "epochs"
    machine = provenance(options.threads) | dgl_wheels.facts(options.dgl)
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:5.0f} s] {text}", flush=True)

    measured: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="pygdist-epochs-") as temporary,
        (options.out / f"{name}.csv").open("w", newline="") as file,
        (options.out / f"{name}-all.csv").open("w", newline="") as all_epochs,
    ):
        folder = Path(temporary)
        say(f"graph: {options.nodes:,} nodes, {options.edges:,} edges, {FEATURES} features")
        prepare(folder, options)
        imports = imported(folder, options)
        switches = must(run(["-c", _SWITCHES], folder, options)).out.split() if options.savings_table else []
        writer = csv.DictWriter(file, fieldnames=[*COLUMNS, *machine])
        writer.writeheader()
        raw = csv.DictWriter(all_epochs, ["model", "contender", "round", "epoch", "epoch_s", "train_loss", "peak_gib"])
        raw.writeheader()
        for model in options.models:
            useful = [one for one in switches if model == "GAT" or one != "fused_attention"]
            contenders = savings(model, useful) if options.savings_table else compared(model, options)
            for turn in range(options.rounds):
                for one in [one for one in contenders if not one.note]:
                    epochs = train(one, folder, options)
                    raw.writerows({**row, "round": turn} for row in epochs)
                    all_epochs.flush()
                    figure = one.note or f"{statistics.median(one.seconds):.3f} s, peak {one.peak / _GIB:.2f} GiB"
                    say(f"{model}, round {turn + 1}, {one.name}: {figure}")
            done = rows(contenders, imports, options)
            writer.writerows({**row, **machine} for row in done)
            file.flush()
            measured += done
    title = f"Seconds per epoch: medians over interleaved processes. ratio: time over {OURS}'s"
    Console(width=None if sys.stdout.isatty() else 160).print(table(measured, title))
    plot(measured, options.out / f"{name}.png")
    return SOME_FAILED if any(row["note"].startswith("wrong") for row in measured) else 0


if __name__ == "__main__":
    raise SystemExit(main())
