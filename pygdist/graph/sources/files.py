"""Graphs in files that may be larger than memory: neither edges nor features are held in memory."""

from __future__ import annotations

import hashlib
import json
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from pygdist.errors import InputError
from pygdist.graph.check import EDGE_FIELDS, FEATURES, MASKS, check_fields
from pygdist.graph.sources.edge_input import EdgeOptions, ReadEdges, read_edges
from pygdist.graph.sources.fields import pick_split
from pygdist.graph.sources.npy import array_paths, read_array, read_mask, read_tensor
from pygdist.graph.sources.prepare import prepare_nodes
from pygdist.graph.sources.whole import WholeGraph
from pygdist.graph.streams.arrays import forget_pages
from pygdist.graph.streams.columns import wanted_columns
from pygdist.graph.streams.edge_file import EdgeFile, EdgeWriter
from pygdist.graph.streams.edge_tables import edge_paths
from pygdist.graph.streams.numbering import distinct_ids, id_range, renumbered
from pygdist.graph.streams.progress import Progress, enter_stage
from pygdist.graph.streams.stream import EdgeStream
from pygdist.graph.streams.tables import LARGEST_EXACT

_LEAST_BYTES_PER_NODE = 16
_BLOCK_ROWS = 1 << 20
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16  # of a file that tell it from others


@dataclass(frozen=True, kw_only=True)
class GraphFiles(EdgeOptions):
    """A graph in files.

    Edges are read in chunks; text and Parquet are first converted to binary scratch files. Features are memory-mapped
    and copied to the parts in blocks. Memory holds a few numbers for each node. If ids are names, memory also holds the
    names while the edges are read.

    Args:
        edges: The edges: ``.npy`` of shape ``(2, E)`` or ``(E, 2)``; text (``.txt``, ``.csv``, ``.tsv``, KONECT's
            ``out.*``, MatrixMarket's ``.mtx``; also with ``.gz``, ``.zst``, ``.bz2``, ``.xz``;
            :mod:`pygdist.graph.streams.edge_text`); ``.parquet``; a folder of text files or of Parquet files, or a
            pattern such as ``data/*.csv``, read in the order of the file names; or a folder of ``.npy`` arrays, which
            also holds features, labels and masks (:mod:`pygdist.graph.sources.npy`).
        columns: Columns of text or Parquet: ``source=NAME,target=NAME,weight=NAME,attributes=NAME+NAME``, or a mapping
            of the same keys. Columns without names are numbered from 1. By default columns of sources, targets and
            weights are found by their usual names, such as ``src``; ``weight=`` leaves weights out. Attributes stay
            integers if all attributes are integers.
        string_ids: True if ids are names. By default ids are names if most ids in the first lines are not numbers.
            Nodes are numbered in the order in which their names first occur, and the names are stored.
        names: Text file with one line per node, the name of the node. Line i + 1 belongs to row i of features and
            labels.
        first_id: Id of the first node, 0 or 1. By default 1 in MatrixMarket and KONECT files, 0 in all others.
        features: ``.npy`` of shape ``(N, F)``: row i belongs to id ``i + first_id``, or to line i + 1 of ``names``.
        labels: ``.npy`` of shape ``(N,)``, ``(N, C)``, or of more dimensions, in the order of ``features``.
        num_nodes: Number of nodes. By default the number of rows of features, labels or masks, the number of lines of
            ``names``, or the size in the header of an ``.mtx`` file; if there is none of these, the largest id plus
            one, less ``first_id``.
        relabel: Renumber the nodes that have edges, from 0, and store the original ids. By default nodes are renumbered
            if only the edges tell the number of nodes, and fewer than half of the ids up to the largest occur.
        symmetrize: Add the reverse of every edge that has none, and keep one edge of each (source, target).
        remove_duplicates: Keep one edge of each source and target: weights are summed, attributes averaged. Integer
            attributes of such edges must be equal.
        remove_self_loops: Remove edges from a node to itself.
        float_features: Convert integer features of nodes and edges to float32; by default they stay integers.
        float_labels: Labels are numbers to predict, even if all labels are whole. By default whole labels are classes.
        split: Shares of the labelled nodes for training, validation and test, instead of the masks in the folder. With
            neither ``split`` nor masks, a random split of 50/25/25 is drawn.
        split_seed: Seed of the drawn split.
        split_index: If masks have a column for each of several splits, the column to use.
        num_classes: Number of classes; the largest label plus one by default.

    Raises:
        InputError: If arguments contradict each other; ``num_nodes`` is below 1; ``first_id`` is neither 0 nor 1; or
            ``columns`` cannot be read. Missing files are found by :attr:`paths`, :meth:`fingerprint` and :meth:`open`.

    Example:
        >>> files = GraphFiles(edges="web-Google.txt.gz", features="x.npy", labels="y.npy")
        >>> partition_graph(files, "parts", num_parts=8, partitioner="spring")
    """

    edges: str | Path
    features: str | Path | None = None
    labels: str | Path | None = None
    num_nodes: int | None = None
    relabel: bool | None = None
    float_features: bool = False
    float_labels: bool = False
    split: tuple[float, float, float] | None = None
    split_seed: int = 0
    split_index: int = 0
    num_classes: int | None = None

    def __post_init__(self) -> None:
        if self.num_nodes is not None and not 1 <= self.num_nodes < 1 << 63:
            raise InputError(f"num_nodes is {self.num_nodes}, expected 1 to 2**63 - 1")
        if self.relabel and (self.num_nodes is not None or self.features is not None or self.labels is not None):
            raise InputError("relabel: renumbers the nodes; leave it out, or num_nodes, features and labels")
        if self.first_id not in (None, 0, 1):
            raise InputError(f"first_id is {self.first_id}, expected 0 or 1")
        if self.names is not None and self.first_id is not None:
            raise InputError("first_id: is for ids that are numbers, but names are given; leave one of these out")
        if self.names is not None and self.string_ids is False:
            raise InputError("names: are given, but string_ids is false; leave one of these out")
        wanted_columns(self.columns)

    @property
    def paths(self) -> dict[str, Path]:
        """The files by field (``edge_index``, ``x``, ``y``, ...); ``InputError`` if one is missing.

        If several files hold the edges, ``edge_index`` is the folder or the pattern.
        """
        edges = Path(self.edges)
        paths = array_paths(edges) if self._has_arrays() else {"edge_index": edges}
        arguments = {"x": self.features, "y": self.labels, "names": self.names}
        paths |= {name: Path(path) for name, path in arguments.items() if path is not None}
        for name, path in paths.items():
            if not path.is_file() and name != "edge_index":
                raise InputError(f"{path}: there is no such file")
        return paths

    def fingerprint(self) -> str:
        """Hash the files' names, sizes, modification times and some of their blocks, and all options.

        Returns:
            32 hexadecimal digits.
        """
        paths, files = self.paths, {}
        edges = edge_paths(paths.pop("edge_index"))
        named = {f"edge_index {number}" if number else "edge_index": path for number, path in enumerate(edges)}
        for name, path in (named | paths).items():
            stat = path.stat()
            files[name] = [path.name, stat.st_size, stat.st_mtime_ns, _some_of(path, stat.st_size)]
        left_out = ("edges", "features", "labels", "names")
        options = {name: value for name, value in vars(self).items() if name not in left_out}
        return hashlib.blake2b(json.dumps([files, options], default=str).encode(), digest_size=16).hexdigest()

    def open(self, scratch: Path, *, progress: Progress | None = None) -> WholeGraph:
        """Check the files, draw a split, and return the graph with a stream of its edges.

        Args:
            scratch: A folder for temporary files. It must exist as long as the graph is used.
            progress: Shows the passes over the files.

        Raises:
            InputError: If a file cannot be read or does not fit the others; the message names it.
        """
        notes: list[str] = []
        paths = self.paths
        if self.num_nodes is not None:
            _fits(self.num_nodes, "num_nodes", "lower num_nodes")
        if self.relabel and paths.keys() - {"edge_index"}:
            raise InputError(
                f"{self.edges}: relabel renumbers the nodes, so the folder must hold edge_index alone; leave relabel "
                f"out, or remove {', '.join(sorted(paths.keys() - {'edge_index'}))}"
            )
        num_nodes, fields = self._arrays(paths, notes)
        values = {name: fields[name] for name in EDGE_FIELDS if name in fields}
        edges = read_edges(
            edge_paths(paths["edge_index"]), self, num_nodes=num_nodes, values=values, scratch=scratch, notes=notes,
            progress=progress,
        )  # fmt: skip
        if self.symmetrize:
            notes.append("added the reverse of every edge, and kept one edge of each source and target")
        if edges.names is not None:
            notes.append(f"ids are names: {edges.num_nodes} nodes, in the order of ids.txt")
        file, num_nodes, ids = self._numbered(edges, scratch, progress, notes)
        fields |= edges.values
        if file.num_edges == 0:
            notes.append(f"{self.edges}: holds no edges")
        _fits(num_nodes, str(paths["edge_index"]), "renumber them (relabel)")
        self._check(fields, num_nodes, file.num_edges, {**dict.fromkeys(edges.values, paths["edge_index"]), **paths})
        nodes = {name: torch.from_numpy(value) for name, value in fields.items() if name in ("y", *MASKS)}
        num_classes = prepare_nodes(
            nodes,
            num_nodes,
            split=self.split,
            split_seed=self.split_seed,
            float_labels=self.float_labels,
            num_classes=self.num_classes,
            notes=notes,
        )
        graph = WholeGraph(
            edges=self._stream(file, num_nodes, progress),
            fields=fields | {name: value.numpy() for name, value in nodes.items()},
            num_classes=num_classes,
            notes=notes,
            ids=ids,
            names=edges.names,
            merge=self.symmetrize or self.remove_duplicates,
            mirrored=self.symmetrize,
            float_features=self.float_features,
        )
        for name, dtype in graph.dtypes.items():
            if name in (*FEATURES, "edge_weight") and dtype != fields[name].dtype:
                if name == "edge_weight":
                    _check_exact(fields[name], dtype, paths.get(name, paths["edge_index"]))
                notes.append(f"converted {name} from {fields[name].dtype} to {dtype}")
        return graph

    def _has_arrays(self) -> bool:
        """Tell if the edges are in a folder of ``.npy`` arrays."""
        folder = Path(self.edges)
        if not folder.is_dir():
            return False
        inside = [path.name for path in folder.iterdir()]
        return "graph.json" in inside or any(name.endswith(".npy") for name in inside) or not inside

    def _arrays(self, paths: Mapping[str, Path], notes: list[str]) -> tuple[int | None, dict[str, NDArray[Any]]]:
        """Map all arrays but the edges; also return the number of nodes if they determine it."""
        fields = {name: read_array(path, writable=False) for name, path in paths.items() if name in ("x", *EDGE_FIELDS)}
        for name, value in fields.items():
            if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8 or not value.dtype.isnative:
                raise InputError(
                    f"{paths[name]}: an array of {value.dtype}, expected numbers in this machine's byte order, such as "
                    "float32"
                )
            if name == "edge_type" and value.dtype.kind == "u" and value.dtype.itemsize > 1:
                raise InputError(f"{paths[name]}: an array of {value.dtype}, expected signed integers, such as int64")
            if name == "x" and (value.ndim != 2 or value.shape[1] == 0):
                raise InputError(f"{paths[name]}: shape {value.shape}, expected (number of nodes, number of features)")
            if name in ("edge_weight", "edge_type") and value.ndim == 2 and value.shape[1] == 1:
                fields[name] = value.reshape(-1)
        if "edge_type" in fields and (self.symmetrize or self.remove_duplicates or self.remove_self_loops):
            raise InputError(
                f"{paths['edge_type']}: holds types of edges, so edges cannot be added or removed; change the files, "
                "or load the graph with --dataset"
            )
        if "y" in paths:
            fields["y"] = read_tensor(paths["y"]).numpy()
        lengths = [len(fields[name]) for name in ("x", "y") if name in fields]
        num_nodes = next(iter(lengths), None) if self.num_nodes is None else self.num_nodes
        masks = [name for name in MASKS if name in paths]
        for name in sorted(masks, key=lambda name: not paths[name].stem.endswith("_mask")):  # ids do not give a length
            if num_nodes is None and not paths[name].stem.endswith("_mask"):
                raise InputError(f"{paths[name]}: holds ids, which do not tell the number of nodes; set num_nodes")
            mask = read_mask(paths[name], num_nodes or 0, first_id=self.first_id or 0)
            num_nodes = len(mask) if num_nodes is None else num_nodes
            fields[name] = pick_split(name, mask, self.split_index, notes).numpy()
        for name in ("x", "y", *MASKS):
            if name in fields and len(fields[name]) != num_nodes:
                raise InputError(f"{paths[name]}: {len(fields[name])} rows, expected one for each of {num_nodes} nodes")
        return num_nodes, fields

    def _stream(self, file: EdgeFile, num_nodes: int | None, progress: Progress | None) -> EdgeStream:
        num_nodes = 1 << 63 if num_nodes is None else num_nodes
        return EdgeStream(file, num_nodes=num_nodes, name=str(self.paths["edge_index"]), progress=progress)

    def _numbered(
        self, edges: ReadEdges, scratch: Path, progress: Progress | None, notes: list[str]
    ) -> tuple[EdgeFile, int, NDArray[np.int64] | None]:
        """Renumber the nodes if needed; return the edges, the number of nodes, and their original ids or ``None``."""
        file, num_nodes, least = edges.file, edges.num_nodes, edges.least
        if edges.names is not None and self.relabel is not None:
            raise InputError(f"{self.edges}: ids are names, which are numbered in any case; leave relabel out")
        if num_nodes is None or self.relabel:
            enter_stage(progress, "finding ids")
            stream = self._stream(file, None, progress)
            smallest, largest = id_range(stream)
            if largest < 0:
                raise InputError(f"{self.edges}: holds no edges; set num_nodes for a graph without edges")
            if self.relabel is not False:
                ids = distinct_ids(stream, largest)
                if self.relabel or 2 * len(ids) <= largest:
                    notes.append(
                        f"renumbered {len(ids)} nodes from 0, in the order of their ids, which go up to "
                        f"{largest + edges.first}"
                    )
                    return self._renumbered(file, ids, scratch, progress), len(ids), ids + edges.first
            num_nodes = max(largest, edges.largest) + 1
            if file.path.parent != scratch:  # else the ids were looked at before, and least says what they tell
                least = smallest
        if least == 1 and self.first_id is None:
            notes.append("the smallest id is 1, so node 0 has no edges; if ids start at 1, set first_id=1")
        return file, num_nodes, None

    def _renumbered(
        self,
        file: EdgeFile,
        ids: NDArray[np.int64],
        scratch: Path,
        progress: Progress | None,
    ) -> EdgeFile:
        """Write the edges in new numbers, positions in ``ids``."""
        enter_stage(progress, "renumbering nodes")
        place = scratch / "numbered.npy"
        with EdgeWriter(place, np.int32 if len(ids) <= np.iinfo(np.int32).max else np.int64) as out:
            for chunk in self._stream(file, None, progress).chunks():
                out.append(renumbered(chunk, ids))
        if file.path.parent == scratch:
            file.path.unlink()
        return EdgeFile(place)

    def _check(
        self, fields: Mapping[str, NDArray[Any]], num_nodes: int, num_edges: int, paths: Mapping[str, Path]
    ) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # it is only read
            tensors = {name: torch.from_numpy(value) for name, value in fields.items()}
        try:
            check_fields(
                tensors, num_nodes, num_edges, num_classes=self.num_classes, float_labels=self.float_labels,
                after_block=lambda name: forget_pages(fields[name]),
            )  # fmt: skip
        except InputError as error:
            name, _, problem = str(error).partition(":")
            raise InputError(f"{paths.get(name, name)}:{problem}") from error


def _some_of(path: Path, size: int) -> int:
    """Return the checksum of blocks at equal distances in a file, the last one among them."""
    value, starts = 0, {max(size - _SAMPLE_BYTES, 0) * part // _SAMPLES for part in range(_SAMPLES + 1)}
    with path.open("rb") as file:
        for start in sorted(starts):
            file.seek(start)
            value = zlib.crc32(file.read(_SAMPLE_BYTES), value)
    return value


def _check_exact(weight: NDArray[Any], dtype: np.dtype[Any], path: Path) -> None:
    """Refuse weights that are integers which the type of a store rounds."""
    for start in range(0, len(weight) if weight.dtype.kind in "iu" else 0, _BLOCK_ROWS):
        block = weight[start : start + _BLOCK_ROWS]
        exact = block.astype(np.float64)
        wrong = np.flatnonzero((exact.astype(dtype) != exact) | (np.abs(exact) >= LARGEST_EXACT))
        if len(wrong):
            raise InputError(
                f"{path}: edge {start + wrong[0]} has weight {block[wrong[0]]}, which {dtype} rounds; save the weights "
                "as float64"
            )
        forget_pages(weight)


def _fits(num_nodes: int, where: str, advice: str) -> None:
    """Refuse a number of nodes for which memory cannot even hold the owners; one stray id can cause it."""
    available = psutil.virtual_memory().total
    if num_nodes * _LEAST_BYTES_PER_NODE > available:
        raise InputError(
            f"{where}: {num_nodes} nodes need more than this machine's {available / 2**30:.0f} GiB of memory; {advice}"
        )
