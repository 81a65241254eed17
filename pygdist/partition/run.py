"""Partitions a graph and writes its store in one call, with measures of the result."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch_geometric.data import Data

from pygdist.errors import InputError
from pygdist.graph import (
    EdgeStream,
    GraphFiles,
    Progress,
    StoreMeta,
    WholeGraph,
    build_store,
    check_part,
    store_key,
    write_graph,
)
from pygdist.graph import fingerprint as content_of
from pygdist.graph.sources.prepare import tell
from pygdist.graph.store.nodes import Placement
from pygdist.graph.store.part_files import PLACEMENTS, placement_of
from pygdist.graph.streams.progress import enter_stage
from pygdist.memory.mapped import new_array
from pygdist.memory.scratch import ScratchFolder
from pygdist.partition.base import Assignment, Partitioner, resolve_partitioner
from pygdist.partition.metrics import PartitionMetrics, measure
from pygdist.partition.sizing import DeviceMemory, GraphBytes, surroundings
from pygdist.partition.vertex_cut import EdgePartitioner, edge_partitioner_names

log = logging.getLogger(__name__)

CACHE = Path("~/.cache/pygdist")
"""Folder of the stores that are made when they are first asked for."""

_GIB = 2**30
_EDGE_PARTS = "edge_part.tmp"
_MAIN = ("__main__", "__mp_main__")  # modules of a notebook or script


def cached_store(
    data: Data,
    notes: Sequence[str],
    cache: Path,
    *,
    num_parts: int | DeviceMemory,
    partitioner: Partitioner | str | None = None,
    arguments: Mapping[str, Any] | None = None,
    num_classes: int | None = None,
    placement: str = "nodes",
    num_hops: int = 1,
) -> Path:
    """Return the folder of a graph's store in a cache, keyed by content and arguments; write a missing store.

    A partitioner whose class is defined in a notebook or script runs each time, and the key also depends on the
    resulting parts, as the code of the class may have changed. For a class in the user's own module the key depends on
    a checksum of the module's file.

    Args:
        data: A graph as :func:`pygdist.graph.prepare` returns it.
        notes: The notes that ``prepare`` returns.
        cache: Folder of the stores.
        num_parts: Number of parts; see :func:`partition_graph`.
        partitioner: A name, a class path, or an instance; by default the placement's.
        arguments: Arguments of the partitioner, if it is given by name.
        num_classes: Number of classes; by default that of ``data``.
        placement: Placement; see :func:`partition_graph`.
        num_hops: Number of hops in the halo of a part.

    Raises:
        InputError: As :func:`partition_graph`.
    """
    chosen = resolve_partitioner(partitioner or default_partitioner(placement), **(arguments or {}))
    targets = WholeGraph.from_data(data, num_classes=num_classes).targets
    key = {
        "method": f"{type(chosen).__module__}.{type(chosen).__qualname__}",
        "arguments": chosen.arguments(),
        **_code(chosen),
        "num_parts": vars(num_parts) if isinstance(num_parts, DeviceMemory) else num_parts,
        "num_classes": num_classes,
        "placement": [placement, num_hops],
        # a matrix of 0 and 1 has the same bytes as several labels per node and as numbers to predict
        **({} if targets is None else {"targets": targets}),
    }
    write = partial(
        partition_graph, data, num_parts=num_parts, partitioner=chosen, notes=notes, num_classes=num_classes,
        fingerprint=(content := content_of(data)), num_hops=num_hops, placement=placement,
    )  # fmt: skip
    if _is_of_main(chosen):
        return _kept(write, cache, content, key)
    folder = cache / store_key(content, key)
    if (folder / "meta.json").is_file():  # stores appear when they are complete
        log.info("the parts are there already: %s", folder)
    else:
        write(folder)
    return folder


def _kept(write: Callable[[Path], StoreMeta], cache: Path, content: str, key: Mapping[str, Any]) -> Path:
    """Write a store into a cache and return its folder, whose name follows from its parts."""
    cache.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(ScratchFolder(cache)) as scratch:
        meta = write(written := scratch.path / "store")
        folder = cache / store_key(content, {**key, "parts": meta["parts"]})
        try:
            written.rename(folder)
        except OSError:
            if not (folder / "meta.json").is_file():  # it is not there already
                raise
    return folder


def partition_graph(
    source: Data | GraphFiles | WholeGraph,
    folder: str | Path,
    *,
    num_parts: int | DeviceMemory,
    partitioner: str | Partitioner | None = None,
    notes: Sequence[str] = (),
    num_classes: int | None = None,
    fingerprint: str | None = None,
    num_hops: int = 1,
    placement: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    **args: Any,
) -> StoreMeta:
    """Partition a graph and write its store; a finished store of the same graph and arguments is left as it is.

    A partitioner whose class is defined in a notebook or script always runs, as its code may have changed. A finished
    store is then left only if it has the same parts.

    Args:
        source: The graph: a ``Data`` as :func:`pygdist.graph.prepare` returns it; a graph in files, which are read as
            streams; or a stream with the fields of its nodes and edges. Preprocessing of files is reported in warnings,
            one for each note.
        folder: Folder of the store, which appears only when the store is complete.
        num_parts: Number of parts, one for each rank; or the memory of the devices, for the fewest parts that fit.
        partitioner: A name, a class path, or an instance; by default ``libra`` for placement *edges*, ``hash`` for
            *columns*, and ``chunk`` for others.
        notes: Notes on the preprocessing of a ``Data``, for ``meta.json``.
        num_classes: Number of classes; by default that of ``source``.
        fingerprint: Fingerprint of the graph; by default it is computed (:func:`pygdist.graph.fingerprint`).
        num_hops: Number of hops in the halo of a part.
        placement: The data in a part. *nodes*: owned nodes with their in-edges, and the ids of halo rows, which ranks
            fetch. *replicas*: also the features and edges of halo rows, so that a part can train by itself (CATGNN,
            Sec. 4.2). *edges*: the edges that an :class:`EdgePartitioner` assigns to the part, and a row for each node
            of these edges (DistGNN, Sec. 5.1). *columns*: as *nodes*, but with some columns of the features of all
            nodes (P3, Sec. 3.1). By default *nodes* for one hop, *replicas* for more.
        overwrite: Replace a finished store that differs.
        progress: Shows every pass over the edges.
        **args: Arguments of the partitioner.

    Returns:
        The contents of ``meta.json``, with ``seconds`` and ``edges_per_second`` of the assignment; a notebook shows
        them as a table with a plot.

    Raises:
        InputError: If the partitioner is unknown or cannot divide the graph, ``num_parts`` or ``num_hops`` does not fit
            ``placement``, the graph cannot be read, or the folder cannot be written. If the folder holds another store
            and ``overwrite`` is false, or something that is no store.

    Example:
        >>> data, notes = prepare(load_graph("sbm"))
        >>> meta = partition_graph(data, "parts", num_parts=4, partitioner="hash", notes=notes)
        >>> PartitionMetrics.from_meta(meta).summary()
    """
    content = placement_of(num_hops, placement)
    chosen = resolve_partitioner(partitioner or default_partitioner(content.name), **args)
    job = _Job(chosen, num_parts, num_hops, content, progress)
    job.check()
    graph: GraphFiles | WholeGraph
    if isinstance(source, Data):
        graph = WholeGraph.from_data(source, num_classes=num_classes, notes=notes, progress=progress)
        fingerprint = fingerprint or content_of(source)
    else:
        graph = source if num_classes is None else dataclasses.replace(source, num_classes=num_classes)
    wanted = job.identity() | {"fingerprint": fingerprint or graph.fingerprint()}
    if isinstance(graph, WholeGraph):
        wanted["num_classes"] = graph.num_classes
    build = partial(_build, job, graph, folder)
    if _is_of_main(chosen) and not overwrite and (Path(folder) / "meta.json").is_file():
        with contextlib.closing(ScratchFolder(Path(folder).absolute().parent)) as scratch:
            wanted["parts"] = build_store(scratch.path / "store", wanted, build)["parts"]
    return build_store(folder, wanted, build, overwrite=overwrite)


def default_partitioner(placement: str) -> str:
    """Return the name of the default partitioner of a placement."""
    content = PLACEMENTS[placement]
    return "libra" if content.splits_nodes else "hash" if content.splits_features else "chunk"


def _is_of_main(partitioner: Partitioner) -> bool:
    """Tell if a partitioner's class, or one that it derives from, is of a notebook or script, and changes with it."""
    return any(kind.__module__ in _MAIN for kind in type(partitioner).__mro__)


def _code(partitioner: Partitioner) -> dict[str, str]:
    """Return a checksum of the modules, other than pygdist's and the script, that define a partitioner."""
    modules = {kind.__module__ for kind in type(partitioner).__mro__ if issubclass(kind, Partitioner)}
    own = sorted(name for name in modules - {*_MAIN} if name.partition(".")[0] != "pygdist")
    files = [Path(file) for name in own if (file := getattr(sys.modules.get(name), "__file__", None))]
    crc = functools.reduce(lambda crc, file: zlib.crc32(file.read_bytes(), crc), filter(Path.is_file, files), 0)
    return {"code": f"{crc:08x}"} if own else {}


def _build(job: _Job, graph: GraphFiles | WholeGraph, folder: str | Path, place: Path) -> dict[str, Any]:
    entries = job.run(graph, place)
    log.info("wrote %d parts to %s", entries.get("num_parts", job.num_parts), folder)
    return entries


@dataclass(frozen=True)
class _Job:
    """The arguments of a partition, and the steps that write it."""

    partitioner: Partitioner
    num_parts: int | DeviceMemory
    num_hops: int
    placement: Placement
    progress: Progress | None

    def check(self) -> None:
        """Refuse a placement that the partitioner, or parts of the devices' size, cannot have."""
        if not isinstance(self.num_parts, DeviceMemory) and self.num_parts < 1:
            raise InputError(f"num_parts is {self.num_parts}, expected at least 1 part")
        if self.placement.splits_features and isinstance(self.num_parts, DeviceMemory):
            raise InputError(f"placement '{self.placement.name}' needs a number of parts, not the memory of devices")
        if not self.placement.splits_nodes:
            return
        if not isinstance(self.partitioner, EdgePartitioner):
            name = self.partitioner.name or type(self.partitioner).__name__
            raise InputError(
                f"placement '{self.placement.name}' needs a method that assigns edges to parts, and '{name}' assigns "
                f"nodes; use {', '.join(edge_partitioner_names())}"
            )
        if isinstance(self.num_parts, DeviceMemory):
            raise InputError(f"placement '{self.placement.name}' needs a number of parts, not the memory of devices")

    def identity(self) -> dict[str, Any]:
        """Return the entries of ``meta.json`` that distinguish this partition of a graph from others."""
        kind, size = type(self.partitioner), self.num_parts
        return {
            "num_hops": self.num_hops,
            "placement": self.placement.name,
            "method": self.partitioner.name or f"{kind.__module__}.{kind.__qualname__}",
            "arguments": self.partitioner.arguments(),
            **_code(self.partitioner),
            **({"device_memory": vars(size)} if isinstance(size, DeviceMemory) else {"num_parts": int(size)}),
        }

    def run(self, graph: GraphFiles | WholeGraph, folder: Path) -> dict[str, Any]:
        """Read, assign and write; return all other entries of ``meta.json``."""
        if isinstance(graph, WholeGraph):
            return self._partition(graph, folder)
        scratch = folder / "scratch"
        scratch.mkdir()
        start = time.perf_counter()
        opened = graph.open(scratch, progress=self.progress)
        tell(opened.notes)
        seconds = time.perf_counter() - start
        figures = self._partition(opened, folder)
        tell(figures["preprocessing"][len(opened.notes) :])
        shutil.rmtree(scratch)
        return figures | {"seconds_reading": seconds}

    def _partition(self, graph: WholeGraph, folder: Path) -> dict[str, Any]:
        if isinstance(self.num_parts, DeviceMemory):
            num_parts, assignment, seconds = self._fit(graph, self.num_parts, folder)
        else:
            num_parts = int(self.num_parts)  # a numpy integer is no int to JSON
            assignment, seconds = self._assign(graph.edges, num_parts, folder)
        start = time.perf_counter()
        written = write_graph(
            graph, assignment.part, folder, num_parts, num_hops=self.num_hops, placement=self.placement.name,
            edge_part=assignment.edge_part,
        )  # fmt: skip
        (folder / _EDGE_PARTS).unlink(missing_ok=True)
        metrics = PartitionMetrics.from_meta(written)
        itemsize = np.dtype(written["dtypes"].get("x", np.float32)).itemsize
        return {
            **metrics.totals(),
            "bytes_per_layer": metrics.volume(written["num_features"], itemsize=itemsize),
            **written,
            **assignment.figures,
            "seconds": seconds,
            "edges_per_second": graph.edges.num_edges / max(seconds, 1e-9),
            "seconds_writing": time.perf_counter() - start,
        }

    def _assign(self, edges: EdgeStream, num_parts: int, folder: Path) -> tuple[Assignment, float]:
        """Run the partitioner and check its result; also return the seconds that it took.

        The parts of edges are on disk, in ``folder``, where the placement needs them.
        """
        name = self.partitioner.name or type(self.partitioner).__name__
        enter_stage(edges.progress, name)
        start = time.perf_counter()
        if self.placement.splits_nodes:
            assert isinstance(self.partitioner, EdgePartitioner)
            dtype = np.uint16 if num_parts < 1 << 16 else np.int32
            edge_part = new_array(folder / _EDGE_PARTS, dtype, (edges.num_edges,))
            assignment = self.partitioner.run(edges, num_parts, edge_part)
            assignment = dataclasses.replace(assignment, edge_part=edge_part)
        else:
            assignment = self.partitioner.run(edges, num_parts)
        seconds = time.perf_counter() - start
        items = f"{edges.num_edges} edges" if self.placement.splits_nodes else f"{edges.num_nodes} nodes"
        part = check_part(assignment.part, edges.num_nodes, num_parts, of=f"partitioner '{name}'")
        log.info("%s assigned %s to %d parts in %.2f s", name, items, num_parts, seconds)
        return dataclasses.replace(assignment, part=part), seconds

    def _fit(self, graph: WholeGraph, memory: DeviceMemory, folder: Path) -> tuple[int, Assignment, float]:
        """Return the fewest parts that fit the devices, their assignment, and the seconds that it took."""
        edges, size = graph.edges, GraphBytes.of(graph)
        fitting: dict[int, tuple[Assignment, float]] = {}

        def largest_of(num_parts: int) -> int:
            assignment, seconds = self._assign(edges, num_parts, folder)
            largest = self._largest_part(edges, size, assignment.part, num_parts)
            sizes = largest / _GIB, memory.budget / _GIB
            log.info("%d parts: the largest takes %.3g GiB, there is room for %.3g", num_parts, *sizes)
            if largest <= memory.budget:
                fitting.clear()  # a later one that fits has fewer parts
                fitting[num_parts] = assignment, seconds
            return largest

        num_parts = memory.search(size.whole(edges.num_nodes, edges.num_edges), edges.num_nodes, largest_of)
        return num_parts, *fitting[num_parts]

    def _largest_part(self, edges: EdgeStream, size: GraphBytes, part: NDArray[np.int32], num_parts: int) -> int:
        enter_stage(edges.progress, "measuring")
        if self.num_hops > 1:
            rows, num_edges = surroundings(edges, part, num_parts, self.num_hops)
            return size.largest_around(np.bincount(part, minlength=num_parts), rows, num_edges)
        return size.largest(measure(edges, part, num_parts), with_rim=self.placement.has_surroundings)
