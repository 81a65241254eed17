"""Doubles of published graphs as folders of ``.npy`` arrays of any size: streamed to disk, never held in memory.

A homogeneous graph is a folder that :func:`pygdist.graph.load_npy` and ``pygdist partition --input`` read. A
heterogeneous graph is a folder for :func:`pygdist.graph.load_hetero`: ``nodes/TYPE`` with the arrays of the nodes, and
``edges/SOURCE__RELATION__TARGET`` with ``edge_index.npy``. Both have a ``graph.json`` with name, scale, seed, counts,
the arguments of the generators, and two measured figures of each relation:

- ``largest_in_degree``, over the 65,536 most frequent targets;
- ``parallel_share``: share of edges that repeat another edge, over a sample of about a million edges (all edges into
  some of the targets), or over all edges if there are fewer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pygdist.errors import InputError
from pygdist.graph.generated.edges import EdgeGenerator, node_ranks
from pygdist.graph.generated.graph import GraphGenerator
from pygdist.graph.generated.nodes import NodeGenerator
from pygdist.graph.streams.arrays import ArrayWriter, flush
from pygdist.graph.streams.edge_file import EdgeWriter
from pygdist.graph.streams.folder import write_once
from pygdist.graph.streams.progress import Progress, enter_stage, watched
from pygdist.graph.streams.sorting import distinct
from pygdist.graph.streams.stream import EdgeStream
from pygdist.memory.limits import refusal_of

FORMAT_VERSION = 1

_COUNTED_TARGETS = 1 << 16
_SAMPLED_EDGES = 1 << 20


def write_generated(
    name: str,
    folder: str | Path,
    *,
    scale: float = 1.0,
    seed: int = 0,
    features: bool = True,
    wrong_labels: float = 0.0,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write a random graph with the size, degrees and classes of a published graph, in bounded memory.

    The folder appears when it is complete. A finished folder that has the same arguments is left as it is.

    Args:
        name: ``reddit-like``, ``products-like``, ``papers-like`` or ``mag-like``.
        folder: The folder to write.
        scale: Factor on the published numbers of nodes and edges.
        seed: Seed.
        features: Write features.
        wrong_labels: Share of the nodes whose label is wrong, that is, of another class.
        overwrite: Replace a finished folder that has other arguments. Any other content of the folder is refused.
        progress: Shows the passes over edges and nodes.

    Returns:
        The folder.

    Raises:
        InputError: If an argument is out of range, the folder holds something else, the disk is full, or the folder
            cannot be written.

    Example:
        >>> write_generated("reddit-like", "reddit-0.1", scale=0.1)
        >>> load_graph("reddit-0.1")  # the same as load_graph("reddit-like", scale=0.1)
    """
    graph = GraphGenerator(name, scale=scale, seed=seed, features=features, wrong_labels=wrong_labels)
    wanted = {"format_version": FORMAT_VERSION, **graph.arguments}
    folder = Path(folder)

    def write(place: Path) -> dict[str, Any]:
        _check_room(graph, folder)
        return wanted | _write(graph, place, progress)

    write_once(
        folder,
        "graph.json",
        partial(_existing, folder, wanted),
        write,
        kind="a generated graph",
        overwrite=overwrite,
        level=logging.INFO,
    )
    return folder


def read_description(folder: str | Path) -> dict[str, Any]:
    """Read ``graph.json`` of a folder.

    Raises:
        InputError: If ``graph.json`` is missing, damaged or of another format.
    """
    path = Path(folder) / "graph.json"
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        version = description["format_version"]
        complete = description["nodes"] and description["edges"]
    except FileNotFoundError as error:
        raise InputError(f"{folder}: has no graph.json; write such a folder with: pygdist generate") from error
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        damaged = InputError(f"{path}: is damaged ({repr(error)[:200]}); generate the graph again")
        raise refusal_of(error) or damaged from error
    if version != FORMAT_VERSION or not complete:
        raise InputError(
            f"{path}: format version {repr(version)[:40]}, expected {FORMAT_VERSION}; generate the graph again"
        )
    assert isinstance(description, dict)
    return description


def _existing(folder: Path, wanted: Mapping[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """Return the description of a finished graph if it is the wanted one; ``None`` if it may be replaced."""
    try:
        description = read_description(folder)
    except InputError:
        if overwrite:
            return None
        raise
    differing = [f"{name} {description.get(name)}" for name, value in wanted.items() if description.get(name) != value]
    if differing and not overwrite:
        raise InputError(
            f"{folder}: holds another graph ({', '.join(differing)}); choose another folder, or overwrite it "
            "(--overwrite=true)"
        )
    return None if differing else description


def _check_room(graph: GraphGenerator, folder: Path) -> None:
    """Refuse a graph that is larger than the free space."""
    needed = sum(16 * edges.num_edges for edges in graph.edges.values())
    for nodes in graph.nodes.values():
        needed += sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in nodes.arrays.values())
    free = shutil.disk_usage(folder.parent).free
    if needed > free:
        raise InputError(
            f"{folder}: {graph.arguments['name']} at scale {graph.arguments['scale']:g} takes {needed / 1e9:,.1f} GB, "
            f"but only {free / 1e9:,.1f} GB are free; lower the scale, or leave out the features"
        )


def _write(graph: GraphGenerator, place: Path, progress: Progress | None) -> dict[str, Any]:
    """Write all arrays, and return the entries of ``graph.json`` that describe them."""
    hetero = graph.facts.is_heterogeneous
    edges, nodes = [], {}
    for relation in graph.facts.relations:
        inner = place / "edges" / "__".join(relation.key) if hetero else place
        inner.mkdir(parents=True, exist_ok=True)
        enter_stage(progress, f"edges ({relation.name})" if hetero else "edges")
        figures = _EdgeFigures(relation.num_edges, graph.facts.nodes[relation.target].num_nodes)
        _write_edges(graph.edges[relation.key], inner / "edge_index.npy", figures, progress)
        ends = {"source": relation.source, "relation": relation.name, "target": relation.target}
        edges.append({**ends, **graph.edge_arguments(relation), **figures.result()})
    for kind, facts in graph.facts.nodes.items():
        inner = place / "nodes" / kind if hetero else place
        inner.mkdir(parents=True, exist_ok=True)
        enter_stage(progress, f"nodes ({kind})" if hetero else "nodes")
        _write_nodes(graph.nodes[kind], inner, progress)
        nodes[kind] = {**vars(facts), "num_features": graph.nodes[kind].num_features}
    return {"original": graph.facts.original, "heterogeneous": hetero, "nodes": nodes, "edges": edges}


def _write_edges(edges: EdgeGenerator, path: Path, figures: _EdgeFigures, progress: Progress | None) -> None:
    with EdgeWriter(path, np.int64) as out:
        for chunk in EdgeStream(edges, num_nodes=edges.num_nodes, progress=progress).chunks():
            out.append(chunk)
            figures.add(chunk)
    flush(path)


def _write_nodes(nodes: NodeGenerator, place: Path, progress: Progress | None) -> None:
    with contextlib.ExitStack() as files, watched(progress, nodes.num_nodes if nodes.arrays else 0, "nodes") as advance:
        writers = {
            name: files.enter_context(ArrayWriter(place / f"{name}.npy", dtype, row=shape[1:]))
            for name, (dtype, shape) in nodes.arrays.items()
        }
        for start in nodes.starts:
            for name, block in (rows := nodes.read(start)).items():
                writers[name].append(block)
            advance(len(rows["y"]))
    for name in nodes.arrays:
        flush(place / f"{name}.npy")


class _EdgeFigures:
    """Figures of a stream of edges, measured in bounded memory."""

    def __init__(self, num_edges: int, num_targets: int) -> None:
        self._targets = num_targets
        self._step = max(1, -(-num_edges // _SAMPLED_EDGES))
        self._in_degrees = np.zeros(min(self._targets, _COUNTED_TARGETS), dtype=np.int64)  # by rank
        self._sample: list[NDArray[np.int64]] = []

    def add(self, chunk: NDArray[np.int64]) -> None:
        ranks = node_ranks(chunk[1], self._targets)
        count = len(self._in_degrees)
        self._in_degrees += np.bincount(ranks[ranks < count], minlength=count)
        source, target = chunk[:, chunk[1] % self._step == 0]  # ids are unrelated to degrees
        self._sample.append(source * self._targets + target)

    def result(self) -> dict[str, Any]:
        sample = np.concatenate([np.empty(0, dtype=np.int64), *self._sample])
        num_distinct = len(distinct(sample))
        return {
            "largest_in_degree": int(self._in_degrees.max()),
            "parallel_share": 1 - num_distinct / len(sample) if len(sample) else 0.0,
        }
