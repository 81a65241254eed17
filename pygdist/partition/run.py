"""From a graph to a store on disk, in one call: assign the nodes, cut, write, and say what it took."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch_geometric.data import Data

from pygdist.graph import EdgeStream, GraphFiles, Progress, WholeGraph, build_store, check_part, write_graph
from pygdist.graph import fingerprint as content_of
from pygdist.graph.store.nodes import Placement
from pygdist.graph.store.part_files import placement_of
from pygdist.graph.streams.progress import enter_stage
from pygdist.partition.base import Assignment, Partitioner, resolve_partitioner
from pygdist.partition.metrics import PartitionMetrics, measure
from pygdist.partition.sizing import DeviceMemory, GraphBytes, surroundings

__all__ = ["partition_graph"]

log = logging.getLogger(__name__)

_GIB = 2**30


def partition_graph(
    source: Data | GraphFiles | WholeGraph,
    folder: str | Path,
    *,
    num_parts: int | DeviceMemory,
    partitioner: str | Partitioner = "chunk",
    notes: Sequence[str] = (),
    num_classes: int | None = None,
    fingerprint: str | None = None,
    num_hops: int = 1,
    placement: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    **args: Any,
) -> dict[str, Any]:
    """Partition a graph and write its store; a finished store of the same is left alone.

    Args:
        source: The graph, as :func:`pygdist.graph.prepare` returns it; in files, which are read as streams; or any
            stream with what goes with it.
        folder: Where the store goes; it appears when it is complete.
        num_parts: Number of parts, one for each rank; or the memory of the devices, for as few parts as fit it.
        partitioner: A name, a class path, or an instance.
        notes: What preprocessing did, for ``meta.json``, of a ``Data``.
        num_classes: Number of classes; by default that of ``source``.
        fingerprint: What tells this graph from others, where it is known already; :func:`pygdist.graph.fingerprint` of
            a ``Data``.
        num_hops: How far the halo of a part reaches.
        placement: *nodes*: a part knows which rows its halo is, and fetches them. *replicas*: it has their features and
            edges too, and can train on its own (CATGNN, Sec. 4.2). By default nodes for one hop and replicas for more.
        overwrite: Replace a finished store that differs.
        progress: Shows every pass over the edges.
        **args: Arguments of the partitioner.

    Returns:
        What ``meta.json`` says; with ``seconds`` and ``edges_per_second`` of the assignment.

    Raises:
        InputError: If the partitioner is not known or cannot cut the graph so, ``num_hops`` does not fit ``placement``,
            the graph cannot be read, or the folder cannot be written.

    Example:
        >>> data, notes = prepare(load_graph("sbm"))
        >>> meta = partition_graph(data, "parts", num_parts=4, partitioner="hash", notes=notes)
        >>> PartitionMetrics.from_meta(meta).summary()
    """
    chosen = resolve_partitioner(partitioner, **args)
    job = _Job(chosen, num_parts, num_hops, placement_of(num_hops, placement))
    wanted = {
        "num_hops": num_hops,
        "placement": job.placement.name,
        "method": chosen.name or f"{type(chosen).__module__}.{type(chosen).__qualname__}",
        "arguments": chosen.arguments(),
        **(
            {"device_memory": vars(num_parts)} if isinstance(num_parts, DeviceMemory) else {"num_parts": int(num_parts)}
        ),
    }
    if isinstance(source, GraphFiles):
        files = source if num_classes is None else dataclasses.replace(source, num_classes=num_classes)
        wanted["fingerprint"] = fingerprint or files.fingerprint()

        def build(place: Path) -> dict[str, Any]:
            return _read_and_partition(files, place, job, progress)
    else:
        if isinstance(source, Data):
            graph = WholeGraph.from_data(source, num_classes=num_classes, notes=notes, progress=progress)
            content = fingerprint or content_of(source)
        else:
            graph = source if num_classes is None else dataclasses.replace(source, num_classes=num_classes)
            content = fingerprint or graph.fingerprint()
        wanted |= {"fingerprint": content, "num_classes": graph.num_classes}

        def build(place: Path) -> dict[str, Any]:
            return _partition(graph, place, job)

    return build_store(folder, wanted, build, overwrite=overwrite)


@dataclass(frozen=True)
class _Job:
    """What is to be done with a graph."""

    partitioner: Partitioner
    num_parts: int | DeviceMemory
    num_hops: int
    placement: Placement


def _read_and_partition(files: GraphFiles, place: Path, job: _Job, progress: Progress | None) -> dict[str, Any]:
    scratch = place / "scratch"
    scratch.mkdir()
    start = time.perf_counter()
    graph = files.open(scratch, progress=progress)
    seconds = time.perf_counter() - start
    figures = _partition(graph, place, job)
    shutil.rmtree(scratch)
    return figures | {"seconds_reading": seconds}


def _partition(graph: WholeGraph, place: Path, job: _Job) -> dict[str, Any]:
    """Assign and write; all entries of ``meta.json`` that follow."""
    if isinstance(job.num_parts, DeviceMemory):
        num_parts, found, seconds = _fit(graph, job, job.num_parts)
    else:
        num_parts = int(job.num_parts)  # a numpy integer is no int to JSON
        found, seconds = _assign(graph.edges, job.partitioner, num_parts)
    start = time.perf_counter()
    written = write_graph(graph, found.part, place, num_parts, num_hops=job.num_hops, placement=job.placement.name)
    metrics = PartitionMetrics.from_meta(written)
    itemsize = np.dtype(written["dtypes"].get("x", np.float32)).itemsize
    return {
        **metrics.totals(),
        "bytes_per_layer": metrics.volume(written["num_features"], itemsize=itemsize),
        **written,
        **found.figures,
        "seconds": seconds,
        "edges_per_second": graph.edges.num_edges / max(seconds, 1e-9),
        "seconds_writing": time.perf_counter() - start,
    }


def _assign(edges: EdgeStream, partitioner: Partitioner, num_parts: int) -> tuple[Assignment, float]:
    """The owners, checked, and the seconds it took."""
    name = partitioner.name or type(partitioner).__name__
    enter_stage(edges.progress, name)
    start = time.perf_counter()
    found = partitioner.run(edges, num_parts)
    seconds = time.perf_counter() - start
    log.info("%s assigned %d nodes to %d parts in %.2f s", name, edges.num_nodes, num_parts, seconds)
    return Assignment(part=check_part(found.part, edges.num_nodes, num_parts), figures=found.figures), seconds


def _fit(graph: WholeGraph, job: _Job, memory: DeviceMemory) -> tuple[int, Assignment, float]:
    """As few parts as fit the devices, their owners, and the seconds that these took."""
    edges, size = graph.edges, GraphBytes.of(graph)
    with_rim = job.placement.has_surroundings
    fitting: dict[int, tuple[Assignment, float]] = {}

    def largest_of(num_parts: int) -> int:
        found = _assign(edges, job.partitioner, num_parts)
        enter_stage(edges.progress, "measuring")
        part = found[0].part
        if job.num_hops > 1:
            rows, num_edges = surroundings(edges, part, num_parts, job.num_hops)
            largest = size.largest_around(np.bincount(part, minlength=num_parts), rows, num_edges)
        else:
            largest = size.largest(measure(edges, part, num_parts), with_rim=with_rim)
        if largest <= memory.budget:
            fitting.clear()  # a later one that fits has fewer parts
            fitting[num_parts] = found
        sizes = largest / _GIB, memory.budget / _GIB
        log.info("%d parts: the largest takes %.3g GiB, there is room for %.3g", num_parts, *sizes)
        return largest

    num_parts = memory.search(size.whole(edges.num_nodes, edges.num_edges), edges.num_nodes, largest_of)
    return num_parts, *fitting[num_parts]
