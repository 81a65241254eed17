"""CATGNN's Figure 6: replication factor with full neighbour lists, by partitioner and number of parts.

    python -m experiments.catgnn.replication --data DATA --out results

DATA holds ``Planetoid/`` and ``LINKXDataset/`` in the layout of PyG's dataset classes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from rich.progress import track

from experiments.catgnn.graphs import GRAPHS, edges_of, show, write
from pygdist.partition import measure, resolve_partitioner

STREAMING = ("spring", "fennel", "ldg", "2ps-l", "hdrf", "libra", "powergraph", "dbh", "grid", "random", "hash")
OTHERS = ("metis", "chunk")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument(
        "--data", type=Path, help="folder with Planetoid/ and LINKXDataset/ in the layout of PyG's dataset classes"
    )
    cli.add_argument("--graphs", nargs="+", choices=GRAPHS, default=list(GRAPHS))
    cli.add_argument("--methods", nargs="+", default=[*STREAMING, *OTHERS])
    cli.add_argument("--parts", nargs="+", type=int, default=[4, 8, 16])
    cli.add_argument(
        "--spring-volume", type=float, help="volume at which SPRING closes a cluster, in volumes of a part"
    )
    cli.add_argument("--out", type=Path, default=Path("results"))
    return cli


def main() -> None:
    """Run what the command line asks for."""
    options = parser().parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.graphs:
        edges = edges_of(name, options.data)
        runs = [(parts, method) for parts in options.parts for method in options.methods]
        for parts, method in track(runs, description=name):
            arguments, label = {}, method
            if method == "spring" and options.spring_volume is not None:
                arguments = {"volume": options.spring_volume / parts}
                label = f"spring(volume={options.spring_volume:g}/P)"
            start = time.perf_counter()
            partition = resolve_partitioner(method, **arguments).run(edges, parts)
            seconds = time.perf_counter() - start
            metrics = measure(edges, partition.part, parts)
            rows.append(
                {
                    "graph": name, "nodes": edges.num_nodes, "edges": edges.num_edges, "parts": parts, "method": label,
                    "replication_factor_full": metrics.replication_factor,
                    "replication_factor": partition.figures.get("replication_factor"), "edge_cut": metrics.edge_cut,
                    **{f"{what}_balance": value for what, value in metrics.balance.items() if what != "train_nodes"},
                    "seconds": seconds,
                }
            )  # fmt: skip
    write(rows, options.out / "replication.csv")
    show(rows, "Replication factor with full neighbour lists")
    plot(rows, options.out / "replication.png")
    for line in behind(rows):
        print(line)


def behind(rows: list[dict[str, Any]]) -> list[str]:
    """List the graphs and numbers of parts for which a streaming method other than SPRING replicates least."""
    lines = []
    for name, parts in dict.fromkeys((row["graph"], row["parts"]) for row in rows):
        mine = [row for row in rows if (row["graph"], row["parts"]) == (name, parts) and row["method"] in STREAMING]
        best = min(mine, key=lambda row: row["replication_factor_full"], default={"method": "spring"})
        spring = [row["replication_factor_full"] for row in mine if row["method"] == "spring"]
        if spring and best["method"] != "spring":
            least = best["replication_factor_full"]
            lines.append(f"{name}, {parts} parts: {best['method']} {least:.3f}, spring {spring[0]:.3f}")
    return lines


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot bars: one group per number of parts, one panel per graph."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["graph"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    counts = sorted({row["parts"] for row in rows})
    figure, axes = plt.subplots(len(names), 1, figsize=(9, 2.2 * len(names)), squeeze=False)
    colours = plt.get_cmap("tab20").colors
    for axis, name in zip(axes[:, 0], names, strict=True):
        for number, method in enumerate(methods):
            mine = {
                row["parts"]: row["replication_factor_full"]
                for row in rows
                if (row["graph"], row["method"]) == (name, method)
            }
            places = [group + (number - len(methods) / 2) * 0.8 / len(methods) for group in range(len(counts))]
            heights = [mine.get(parts, 0) for parts in counts]
            axis.bar(places, heights, 0.8 / len(methods), color=colours[number % 20], label=method)
        axis.set_xticks(range(len(counts)), [f"p = {parts}" for parts in counts])
        axis.set(title=name, ylabel="replication factor", ylim=(1, None))
    axes[0][0].legend(fontsize=7, ncol=2, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
