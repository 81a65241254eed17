"""CATGNN's Table 2: SPRING's clusters before and after merging, by order of the edges and volume threshold.

    python -m experiments.catgnn.clusters --data DATA --out results

DATA holds ``Planetoid/`` and ``LINKXDataset/`` in the layout of PyG's dataset classes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.catgnn.graphs import GRAPHS, edges_of, show, write
from pygdist.graph import EdgeStream
from pygdist.partition import SpringPartitioner

PAPER = {"Cora": (372, 101), "CiteSeer": (904, 411)}
PARTS = 4
Edges = NDArray[np.int64]

ORDERS: dict[str, Callable[[Edges], Edges]] = {
    "as stored": lambda edges: edges,
    "one direction": lambda edges: edges[:, edges[0] < edges[1]],
    "shuffled": lambda edges: edges[:, np.random.default_rng(0).permutation(edges.shape[1])],
    "by target": lambda edges: edges[:, np.lexsort((edges[0], edges[1]))],
    "one direction, shuffled": lambda edges: ORDERS["shuffled"](ORDERS["one direction"](edges)),
}
SHARES = (0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument(
        "--data", type=Path, help="folder with Planetoid/ and LINKXDataset/ in the layout of PyG's dataset classes"
    )
    cli.add_argument("--graphs", nargs="+", choices=GRAPHS, default=list(GRAPHS))
    cli.add_argument(
        "--parts", type=int, default=PARTS, help="number of parts; SPRING merges clusters up to a part's size"
    )
    cli.add_argument("--out", type=Path, default=Path("results"))
    return cli


def main() -> None:
    """Run what the command line asks for."""
    options = parser().parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.graphs:
        stream = edges_of(name, options.data)
        edges = np.concatenate(list(stream.chunks()), axis=1)
        isolated = stream.num_nodes - len(np.unique(edges))
        for order, ordered in ORDERS.items():
            for share in sorted({*SHARES, 0.25 / options.parts}):
                partitioner = SpringPartitioner(volume=share)
                ordered_stream = EdgeStream(ordered(edges), num_nodes=stream.num_nodes)
                figures = partitioner.run(ordered_stream, options.parts).figures
                before, after = PAPER.get(name, (None, None))
                rows.append(
                    {
                        "graph": name, "isolated": isolated, "order": order, "volume_share": share,
                        "parts": options.parts, "clusters": figures["num_clusters"],
                        "merged": figures["num_merged_clusters"], "paper_clusters": before, "paper_merged": after,
                    }
                )  # fmt: skip
    write(rows, options.out / "clusters.csv")
    show(rows, "Clusters before and after merging")
    plot(rows, options.out / "clusters.png")


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot clusters over the threshold, one line per order; a dotted line shows the paper's number."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["graph"] for row in rows))
    figure, axes = plt.subplots(2, len(names), figsize=(1 + 3 * len(names), 5.5), squeeze=False, sharex=True)
    for column, name in enumerate(names):
        for axis, what, paper in zip(axes[:, column], ("clusters", "merged"), (0, 1), strict=True):
            for order in ORDERS:
                mine = [row for row in rows if (row["graph"], row["order"]) == (name, order)]
                axis.plot([row["volume_share"] for row in mine], [row[what] for row in mine], "o-", ms=3, label=order)
            if name in PAPER:
                axis.axhline(PAPER[name][paper], color="k", ls=":", label="paper")
            axis.set(title=f"{name}, {what}", xscale="log", yscale="log")
    for axis in axes[-1]:
        axis.set_xlabel("volume threshold / sum of degrees")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
