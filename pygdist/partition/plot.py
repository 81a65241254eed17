"""Plots of a partition: the rows that parts send to each other in one hop, and the load of each part.

Each function takes the measures of a partition, or the contents of a store's ``meta.json``. matplotlib (extra ``plot``)
is imported when a plot is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pygdist.errors import needs
from pygdist.partition.metrics import PartitionMetrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_NUMBERS = 16  # parts up to which every cell shows its number


def plot_traffic(metrics: PartitionMetrics | Mapping[str, Any], *, ax: Axes | None = None) -> Axes:
    """Draw the rows that each part sends to each other part in one hop, as a heat map with numbers.

    Senders are rows, receivers are columns. ``metrics`` may be the contents of ``meta.json``. The plot is drawn on
    ``ax``, by default on the axes of a new figure. The function returns these axes.

    Example:
        >>> meta = partition_graph(data, "parts", num_parts=4, partitioner="hash")
        >>> plot_traffic(meta)
    """
    metrics = _metrics(metrics)
    ax = _axes(ax)
    rows, num_parts = metrics.rows, metrics.num_parts
    most = max(int(rows.max(initial=0)), 1)
    ax.imshow(rows, cmap="Blues", vmin=0, vmax=most)
    if num_parts <= _MOST_NUMBERS:
        for sender, receiver in np.ndindex(num_parts, num_parts):
            value = int(rows[sender, receiver])
            text = "–" if sender == receiver else f"{value:,}"
            # white on the dark half of the colours
            color = "white" if 2 * value > most else "black"
            ax.text(receiver, sender, text, ha="center", va="center", color=color)
        ax.set_xticks(range(num_parts))
        ax.set_yticks(range(num_parts))
    ax.set_xlabel("to part")
    ax.set_ylabel("from part")
    ax.set_title(f"rows sent per hop: {int(rows.sum()):,}")
    return ax


def plot_load(metrics: PartitionMetrics | Mapping[str, Any], *, ax: Axes | None = None) -> Axes:
    """Draw each part's nodes, edges and halo rows as shares of all nodes or edges; a dashed line is the equal share.

    Arguments and result are those of :func:`plot_traffic`.
    """
    metrics = _metrics(metrics)
    ax = _axes(ax)
    num_nodes, num_edges = max(int(metrics.num_nodes.sum()), 1), max(int(metrics.num_edges.sum()), 1)
    shares = {
        "nodes": metrics.num_nodes / num_nodes,
        "edges": metrics.num_edges / num_edges,
        "halo rows (of all nodes)": metrics.num_halo / num_nodes,
    }
    width, parts = 0.8 / len(shares), np.arange(metrics.num_parts)
    for position, (name, share) in enumerate(shares.items()):
        ax.bar(parts + (position - 1) * width, share, width, label=name)
    ax.axhline(1 / metrics.num_parts, color="grey", linestyle="--", linewidth=1)
    ax.set_xticks(parts)
    ax.set_xlabel("part")
    ax.set_ylabel("share")
    ax.yaxis.set_major_formatter("{x:.0%}")
    ax.set_title(f"load of each part; replication factor {metrics.replication_factor:.2f}")
    ax.margins(y=0.2)  # room for the legend
    ax.legend(ncols=len(shares), loc="upper center", fontsize="small")
    return ax


def _metrics(metrics: PartitionMetrics | Mapping[str, Any]) -> PartitionMetrics:
    return metrics if isinstance(metrics, PartitionMetrics) else PartitionMetrics.from_meta(metrics)


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError as error:
        raise needs("a plot", "matplotlib", "plot") from error
    return plt.subplots(layout="constrained")[1]
