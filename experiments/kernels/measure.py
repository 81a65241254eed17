"""pygdist's aggregation and attention against torch, PyG, torch_sparse and DGL, interleaved; table, CSV, plots.

    python -m experiments.kernels.measure --out figures
    python -m experiments.kernels.measure --graph reference --operations sum --features 128 --rounds 9
    python -m experiments.kernels.measure --graph grid --operations sum mean max --dgl SITE

Every round runs each contender once and copies one large array to another, so disturbances hit all alike. Figures are
medians over rounds; the README explains the columns.
"""

from __future__ import annotations

import argparse
import copy
import csv
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

from experiments.kernels import dgl_wheels
from experiments.kernels.contenders import OURS, Product, unweighted, weighted
from experiments.machine import SOME_FAILED, cache_bytes, provenance
from pygdist.backends import SingleBackend
from pygdist.comm import Communicator
from pygdist.graph import Shard, power_law
from pygdist.partition import partition_graph
from pygdist.routing import distribute

HEADS, CHANNELS = 4, 32
PRODUCTS = ("sum", "mean", "max")
# the layer, and how many arrays of edges x heads x channels PyG holds at once in forward and backward
ATTENTION: dict[str, tuple[Callable[..., nn.Module], int]] = {
    "GATConv": (GATConv, 5),
    "GATv2Conv": (GATv2Conv, 7),
    "TransformerConv": (TransformerConv, 7),
}
COLUMNS = [
    "graph", "nodes", "edges", "degree", "features", "dtype", "operation", "weighted", "pass", "contender", "rounds",
    "median_s", "min_s", "spread", "ratio", "gather_gbs", "copy_gbs", "share_of_copy", "note",
]  # fmt: skip
_FEWEST_ROUNDS = 3  # even if they exceed the budget
_GIB = 2**30

Result = tuple[Tensor, ...]


@dataclass
class Setting:
    """One block of rows: one operation on one graph, at one width, forward or forward and backward."""

    graph: str
    nodes: int
    edges: int
    features: int
    operation: str
    backward: bool
    contenders: dict[str, Callable[[], Result]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)  # contenders that do not run, and why
    compared: Tensor | None = None  # a mask of the nodes whose results are compared; None for all

    @property
    def gathered_values(self) -> int | None:
        """Number of values read from neighbours' rows; ``None`` for attention, which reads more than rows."""
        passes = 2 if self.backward else 1
        return self.edges * self.features * passes if self.operation in PRODUCTS else None

    def add(self, name: str, run: Callable[[], Result], needs_bytes: int, options: argparse.Namespace) -> None:
        """Add a contender, unless it would need more memory than allowed."""
        if needs_bytes > options.max_gib * _GIB:
            self.notes[name] = f"not run: needs about {needs_bytes / _GIB:.0f} GiB"
        else:
            self.contenders[name] = run


def step(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor | None, parameters: Sequence[Tensor]) -> Result:
    """Return the output and, with ``grad``, the gradients of ``x`` and, as one vector, of the parameters."""
    if grad is None:
        with torch.no_grad():
            return (function(x),)
    out = function(x)
    grad_x, *rest = torch.autograd.grad(out, [x, *parameters], grad)
    return (out, grad_x, torch.cat([one.flatten() for one in rest])) if rest else (out, grad_x)


def product_settings(name: str, edge_index: Tensor, nodes: int, options: argparse.Namespace) -> Iterator[Setting]:
    """Yield sum, mean and maximum, at each width, forward and forward with backward."""
    operations = [name for name in options.operations if name in PRODUCTS]
    if not operations:
        return
    dtype = getattr(torch, options.dtype)
    if options.dgl is None:
        functions = weighted(edge_index, nodes, dtype)
    else:
        functions = unweighted(edge_index, nodes, options.dgl)
    edges = edge_index.size(1)
    has_edges = edge_index[1].bincount(minlength=nodes) > 0
    for operation in operations:
        for features in options.features:
            for backward in (False, True):
                x = torch.randn(nodes, features, dtype=dtype).requires_grad_(backward)
                grad = torch.randn(nodes, features, dtype=dtype) if backward else None
                setting = Setting(name, nodes, edges, features, operation, backward)
                if operation == "max" and options.dgl is not None:
                    # without in-edges DGL returns -inf, and gives the gradient to the first node
                    setting.compared = has_edges
                    grad = grad if grad is None else grad * has_edges.unsqueeze(-1)
                for contender, function in functions.items():
                    # PyG holds the rows per edge and their products; for the gradient of a maximum also more arrays
                    arrays = 0 if contender != "PyG edge list" else 7 if backward and operation == "max" else 2

                    def run(
                        function: Any = function, x: Tensor = x, grad: Tensor | None = grad, operation: str = operation
                    ) -> Result:
                        return step(lambda rows: function(rows, operation), x, grad, ())

                    if _offers(function, x, operation):
                        setting.add(contender, run, arrays * edges * features * dtype.itemsize, options)
                yield setting


def _offers(function: Product, x: Tensor, operation: str) -> bool:
    """Tell if a contender has this reduction, by trying one column."""
    one = x.detach()[:, :1].contiguous().requires_grad_(x.requires_grad)
    return function(one, operation) is not None


def attention_settings(name: str, edge_index: Tensor, nodes: int, options: argparse.Namespace) -> Iterator[Setting]:
    """Yield attention layers, forward and backward: distributed by pygdist, and PyG's own."""
    layers = [layer for layer in options.operations if layer in ATTENTION]
    if not layers:
        return
    dtype, width = getattr(torch, options.dtype), HEADS * CHANNELS
    shard = whole(edge_index, nodes)
    for operation in layers:
        make, arrays = ATTENTION[operation]
        torch.manual_seed(0)
        layer = make(width, CHANNELS, heads=HEADS).to(dtype)
        routed = copy.deepcopy(layer)
        backend = SingleBackend()
        backend.bind(shard, Communicator())
        distribute(routed, backend=backend)
        x = torch.randn(nodes, width, dtype=dtype).requires_grad_()
        grad = torch.randn(nodes, width, dtype=dtype)
        setting = Setting(name, nodes, edge_index.size(1), width, operation, True)
        for contender, module, edges in ((OURS, routed, shard.adjacency), ("PyG", layer, edge_index)):

            def run(module: nn.Module = module, edges: Tensor = edges, x: Tensor = x, grad: Tensor = grad) -> Result:
                return step(lambda rows: module(rows, edges), x, grad, list(module.parameters()))

            needs = arrays * edge_index.size(1) * width * dtype.itemsize
            setting.add(contender, run, 0 if contender == OURS else needs, options)
        yield setting
        backend.unbind()


def whole(edge_index: Tensor, nodes: int) -> Shard:
    """Return the graph as the shard of a single process."""
    data = Data(x=torch.zeros(nodes, 1), edge_index=edge_index)
    with tempfile.TemporaryDirectory() as folder:
        partition_graph(data, f"{folder}/parts", num_parts=1)
        return Shard.load(f"{folder}/parts", 0)


def copier() -> tuple[Callable[[], Tensor], int]:
    """Return a copy between arrays much larger than the last cache, and the bytes it reads and writes."""
    count = max(256 * 2**20, 8 * cache_bytes(3)) // 4
    source, target = torch.ones(count), torch.empty(count)
    return lambda: target.copy_(source), 2 * 4 * count


def check(setting: Setting) -> None:
    """Run every contender once, which also warms it up; drop one whose result differs from pygdist's."""
    # equal products tie in float32, and PyG and torch share the gradient of a tied maximum differently
    tolerance = 1e-2 if setting.operation == "max" else 1e-3
    ours = _to_compare(setting, OURS)
    for name in [name for name in setting.contenders if name != OURS]:
        worst = max(_difference(*pair) for pair in zip(_to_compare(setting, name), ours, strict=True))
        if not worst <= tolerance:
            setting.notes[name] = f"wrong: differs from {OURS} by {worst:.1e}"
            del setting.contenders[name]


def _to_compare(setting: Setting, name: str) -> Result:
    """Run a contender; return its output at the nodes to compare, and its gradients."""
    out, *gradients = setting.contenders[name]()
    return (out if setting.compared is None else out[setting.compared], *gradients)


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one.detach() - other.detach()).norm() / other.detach().norm().clamp(min=1e-30))


def interleave(runs: dict[str, Callable[[], Any]], rounds: int, budget_s: float) -> dict[str, list[float]]:
    """Return the seconds of each contender's second call in each round, as in training each step follows its like.

    A contender that has spent the budget skips the remaining rounds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name in random.sample(list(runs), len(runs)):
            if turn >= _FEWEST_ROUNDS and sum(seconds[name]) > budget_s:
                continue
            runs[name]()  # a virtual machine may have given memory back to its host during the others' turns
            start = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def rows(setting: Setting, options: argparse.Namespace, copying: tuple[Callable[[], Tensor], int]) -> Iterator[dict]:
    """Measure one setting; yield one row per contender, in their order."""
    head = {
        "graph": setting.graph,
        "nodes": setting.nodes,
        "edges": setting.edges,
        "degree": round(setting.edges / setting.nodes, 1),
        "features": setting.features,
        "dtype": options.dtype,
        "operation": setting.operation,
        "weighted": "" if setting.operation in ATTENTION else "yes" if options.dgl is None else "no",
        "pass": "forward+backward" if setting.backward else "forward",
    }
    copy_array, copied = copying
    if OURS in setting.contenders:
        check(setting)
    seconds = interleave({"copy": copy_array, **setting.contenders}, options.rounds, options.budget_s)
    copy_rate = copied / statistics.median(seconds.pop("copy")) / 1e9
    ours = statistics.median(seconds[OURS]) if OURS in seconds else None
    for name, times in seconds.items():
        row = {**head, "contender": name, "rounds": len(times), "median_s": statistics.median(times)}
        row |= {"min_s": min(times), "spread": (max(times) - min(times)) / row["median_s"], "copy_gbs": copy_rate}
        row["ratio"] = None if ours is None else row["median_s"] / ours
        if setting.gathered_values is not None:
            itemsize = getattr(torch, options.dtype).itemsize
            row["gather_gbs"] = setting.gathered_values * itemsize / row["median_s"] / 1e9
            row["share_of_copy"] = row["gather_gbs"] / copy_rate
        yield row
    for name, note in setting.notes.items():
        yield {**head, "contender": name, "rounds": 0, "note": note}


def graphs(options: argparse.Namespace) -> Iterator[tuple[str, Tensor, int]]:
    """Yield name, edges and number of nodes of each graph; each is made when its turn comes."""
    sizes = []
    if options.graph in ("grid", "all"):
        pairs = zip(options.degrees, options.nodes, strict=True)
        sizes += [(f"degree {degree}", nodes, nodes * degree // 2 * 2) for degree, nodes in pairs]
    if options.graph in ("reference", "all"):
        sizes.append(("reference", 50_000, 5_000_000))
    if options.graph in ("large", "all"):
        sizes.append(("large", 400_000, 10_000_000))
    for name, nodes, edges in sizes:
        yield name, power_law(nodes, edges, num_features=1, num_classes=2).edge_index, nodes


def told(measured: list[dict[str, Any]], seconds: float) -> str:
    """Return one line about one setting."""
    first = measured[0]
    parts = []
    for row in measured:
        if row.get("note"):
            parts.append(f"{row['contender']} {row['note']}")
        elif row["contender"] == OURS:
            rate = f" ({row['gather_gbs']:.1f} GB/s, {row['share_of_copy']:.0%} of copy)" if "gather_gbs" in row else ""
            parts.append(f"{OURS} {row['median_s']:.4f} s{rate}")
        else:
            parts.append(f"{row['contender']} x{row['ratio']:.2f}" if row["ratio"] else row["contender"])
    where = f"{first['graph']}, {first['operation']} {first['pass']}, {first['features']} features"
    return f"[{seconds:5.0f} s] {where}: {'; '.join(parts)}"


def table(measured: list[dict[str, Any]]) -> Table:
    """Return all rows as a table for the terminal."""
    out = Table(
        title="Medians over interleaved rounds. ratio: time over pygdist's. gather: edges x features x bytes per value "
        "/ time, for each of the passes.\ncopy: bytes read and written by a large copy / time; share: gather / copy."
    )
    for name in ("graph", "operation", "pass", "features", "contender"):
        out.add_column(name)
    for name in ("rounds", "median s", "min s", "spread", "ratio", "gather GB/s", "copy GB/s", "share"):
        out.add_column(name, justify="right")
    out.add_column("note")
    for row in measured:
        figures = [
            _format(row, name, form)
            for name, form in (
                ("median_s", ".4f"), ("min_s", ".4f"), ("spread", ".0%"), ("ratio", ".2f"), ("gather_gbs", ".1f"),
                ("copy_gbs", ".1f"), ("share_of_copy", ".0%"),
            )
        ]  # fmt: skip
        out.add_row(
            row["graph"], row["operation"], row["pass"], str(row["features"]), row["contender"], str(row["rounds"]),
            *figures, row.get("note", ""), end_section=row is _last_of_block(row, measured),
        )  # fmt: skip
    return out


def _format(row: dict[str, Any], name: str, form: str) -> str:
    return "" if row.get(name) is None else format(row[name], form)


def _last_of_block(row: dict[str, Any], measured: list[dict[str, Any]]) -> dict[str, Any]:
    block = ("graph", "operation", "pass", "features")
    return [other for other in measured if all(other[name] == row[name] for name in block)][-1]


def plot(measured: list[dict[str, Any]], folder: Path) -> None:
    """Plot ``ratio.png``, time over pygdist's by width, and ``gather.png``, gather rates of the sum and the copy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = [row for row in measured if row["operation"] in PRODUCTS and row.get("median_s")]
    if not timed:
        return
    names = list(dict.fromkeys(row["graph"] for row in timed))
    contenders = list(dict.fromkeys(row["contender"] for row in timed))
    kinds = list(dict.fromkeys((row["operation"], row["pass"]) for row in timed))
    size = (1.5 + 3.2 * len(names), 1 + 2.6 * len(kinds))
    figure, axes = plt.subplots(len(kinds), len(names), figsize=size, squeeze=False, sharey=True)
    for line, kind in zip(axes, kinds, strict=True):
        for axis, name in zip(line, names, strict=True):
            chosen = [row for row in timed if row["graph"] == name and (row["operation"], row["pass"]) == kind]
            _lines(axis, chosen, contenders, "ratio")
            axis.set(title=f"{name}, {kind[0]}, {kind[1]}", yscale="log")
        line[0].set_ylabel("time / pygdist's")
    _finish(figure, axes, folder / "ratio.png")

    timed = [row for row in timed if row["pass"] == "forward" and row["operation"] == timed[0]["operation"]]
    figure, axes = plt.subplots(1, len(names), figsize=(1.5 + 3.2 * len(names), 3.8), squeeze=False, sharey=True)
    for axis, name in zip(axes[0], names, strict=True):
        chosen = [row for row in timed if row["graph"] == name]
        _lines(axis, chosen, contenders, "gather_gbs")
        ours = [row for row in chosen if row["contender"] == OURS]
        widths, rates = [row["features"] for row in ours], [row["copy_gbs"] for row in ours]
        axis.plot(widths, rates, "k--", label="copy (read + written)")
        axis.set(title=f"{name}, {timed[0]['operation']}, forward")
    axes[0][0].set(ylabel="GB/s", ylim=(0, None))
    _finish(figure, axes, folder / "gather.png")


def _lines(axis: Any, measured: list[dict[str, Any]], contenders: list[str], column: str) -> None:
    for number, contender in enumerate(contenders):
        points = [(row["features"], row[column]) for row in measured if row["contender"] == contender]
        if points:
            axis.plot(*zip(*points, strict=True), "o-", color=f"C{number}", label=contender)
    widths = sorted({row["features"] for row in measured})
    axis.set_xscale("log")
    axis.set_xticks(widths, [str(width) for width in widths])
    axis.minorticks_off()
    axis.grid(alpha=0.3)


def _finish(figure: Any, axes: Any, path: Path) -> None:
    for axis in axes[-1]:
        axis.set_xlabel("features")
    labels = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.tight_layout()
    figure.legend(labels.values(), labels.keys(), loc="upper left", bbox_to_anchor=(1, 0.98), frameon=False)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument("--graph", choices=["grid", "reference", "large", "all"], default="all")
    cli.add_argument("--degrees", nargs="+", type=int, default=[10, 50, 500], help="average degrees of the grid")
    cli.add_argument(
        "--nodes",
        nargs="+",
        type=int,
        default=[400_000, 100_000, 10_000],
        help="nodes of the grid, one number per degree",
    )
    cli.add_argument("--features", nargs="+", type=int, default=[32, 64, 128, 256, 602])
    cli.add_argument("--operations", nargs="+", choices=[*PRODUCTS, *ATTENTION], default=[*PRODUCTS, *ATTENTION])
    cli.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    cli.add_argument("--dgl", type=Path, metavar="SITE", help=f"{dgl_wheels.HELP}; products then have no weights")
    cli.add_argument("--threads", type=int, default=2)
    cli.add_argument("--rounds", type=int, default=7)
    cli.add_argument(
        "--budget-s", type=float, default=10.0, help="seconds per contender and setting; at least 3 rounds run"
    )
    cli.add_argument("--max-gib", type=float, default=8.0, help="leave out contenders that need more GiB")
    cli.add_argument("--out", type=Path, default=Path("figures"), help="folder for measure.csv and the plots")
    return cli


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, checked."""
    made = parser()
    options = made.parse_args(argv)
    if len(options.degrees) != len(options.nodes):
        made.error("--nodes: give one number for each of --degrees")
    return options


def main() -> int:
    """Measure what the command line asks for, and compare each contender's result with pygdist's."""
    options = parse()
    if why := dgl_wheels.problem(options.dgl):
        print(f"error: {why}", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore", message="Sparse")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    random.seed(0)
    machine = provenance(options.threads) | dgl_wheels.facts(options.dgl)
    print(", ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    measured: list[dict[str, Any]] = []
    copying = copier()
    start = time.perf_counter()
    with (options.out / "measure.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*COLUMNS, *machine])
        writer.writeheader()
        for name, edge_index, nodes in graphs(options):
            print(f"[{time.perf_counter() - start:5.0f} s] {name}: {nodes} nodes, {edge_index.size(1)} edges")
            for settings in (product_settings, attention_settings):
                for setting in settings(name, edge_index, nodes, options):
                    block = []
                    for row in rows(setting, options, copying):
                        block.append(row)
                        writer.writerow({**row, **machine})
                        file.flush()
                    measured += block
                    print(told(block, time.perf_counter() - start), flush=True)
    Console(width=None if Console().is_terminal else 200).print(table(measured))
    plot(measured, options.out)
    return SOME_FAILED if any(row.get("note", "").startswith("wrong") for row in measured) else 0


if __name__ == "__main__":
    raise SystemExit(main())
