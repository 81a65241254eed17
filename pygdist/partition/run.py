"""From a prepared graph to a store on disk, in one call: assign the nodes, cut, write, and say what it took."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_geometric.data import Data

from pygdist.graph import EdgeStream, write_store
from pygdist.partition.base import Partitioner, resolve_partitioner

__all__ = ["partition_graph"]

log = logging.getLogger(__name__)


def partition_graph(
    data: Data,
    folder: str | Path,
    *,
    num_parts: int,
    partitioner: str | Partitioner = "chunk",
    notes: Sequence[str] = (),
    num_classes: int | None = None,
    fingerprint: str | None = None,
    overwrite: bool = False,
    **args: Any,
) -> dict[str, Any]:
    """Partition a graph and write its store; a finished store of the same is left alone.

    Args:
        data: The graph as :func:`pygdist.graph.prepare` returns it.
        folder: Where the store goes; it appears when it is complete.
        num_parts: Number of parts, one for each rank.
        partitioner: A name, a class path, or an instance.
        notes: What preprocessing did, for ``meta.json``.
        num_classes: Number of classes; by default that of ``data``.
        fingerprint: :func:`pygdist.graph.fingerprint` of ``data`` where it is known already.
        overwrite: Replace a finished store that differs.
        **args: Arguments of the partitioner.

    Returns:
        What ``meta.json`` says; with ``seconds`` and ``edges_per_second`` of the assignment.

    Raises:
        InputError: If the partitioner is not known or cannot cut the graph so, or the folder cannot be written.

    Example:
        >>> data, notes = prepare(load_graph("sbm"))
        >>> meta = partition_graph(data, "parts", num_parts=4, partitioner="hash", notes=notes)
        >>> PartitionMetrics.from_meta(meta).summary()
    """
    chosen = resolve_partitioner(partitioner, **args)
    method = chosen.name or f"{type(chosen).__module__}.{type(chosen).__qualname__}"
    edges = EdgeStream.from_data(data)
    start = time.perf_counter()
    found = chosen.run(edges, num_parts)
    seconds = time.perf_counter() - start
    log.info("%s assigned %d nodes to %d parts in %.2f s", method, edges.num_nodes, num_parts, seconds)
    return write_store(
        data,
        found.part,
        folder,
        num_parts=num_parts,
        method=method,
        arguments=chosen.arguments(),
        notes=notes,
        num_classes=num_classes,
        fingerprint=fingerprint,
        figures=found.figures | {"seconds": seconds, "edges_per_second": edges.num_edges / max(seconds, 1e-9)},
        overwrite=overwrite,
    )
