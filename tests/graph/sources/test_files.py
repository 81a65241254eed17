"""Graphs in files: every format is the same stream, the same store as from memory, and mistakes are told by place."""

from __future__ import annotations

import bz2
import gzip
import itertools
import lzma
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import csv, parquet
from torch_geometric.data import Data

from pygdist.errors import InputError
from pygdist.graph import (
    EdgeFile,
    EdgeGenerator,
    EdgeStream,
    EdgeWriter,
    GraphFiles,
    WholeGraph,
    open_part,
    prepare,
    read_meta,
    save_npy,
    write_graph,
)
from pygdist.native import load
from pygdist.partition import partition_graph
from tests.graph.store.test_meta import random_graph
from tests.graph.streams.test_columns import read_text

needs_native = pytest.mark.skipif(load() is None, reason="reading text needs the native library")

EDGES = np.array([[0, 3, 3, 1, 4, 0, 3], [1, 2, 2, 0, 4, 3, 0]])


def whole(files: GraphFiles, scratch: Path) -> WholeGraph:
    scratch.mkdir(exist_ok=True)
    return files.open(scratch)


def edges_of(graph: WholeGraph) -> np.ndarray:
    return np.concatenate([np.empty((2, 0), dtype=np.int64), *graph.edges.chunks()], axis=1)


# --- formats ----------------------------------------------------------------------------------------------------------


def _text(separator: str, end: str = "\n") -> bytes:
    return "".join(f"{u}{separator}{v}{end}" for u, v in EDGES.T).encode()


def _from_one(end: str) -> bytes:
    return "".join(f"{u} {v}{end}" for u, v in EDGES.T + 1).encode()


_MATRIX = b"%%%%MatrixMarket matrix coordinate %s\n%% a comment\n5 5 7\n"


def _in_folder(path: Path, suffix: str, write: Callable[[Path, bytes], object]) -> None:
    """Write the edges to two files, the second in a folder of its own, beside files that Spark leaves."""
    (path / "sub").mkdir(parents=True)
    write(path / f"part-0.{suffix}", _text(",")[:12])
    write(path / "sub" / f"part-1.{suffix}", _text(",")[12:])
    (path / "_SUCCESS").touch()
    (path / f".part-0.{suffix}.crc").touch()


def _npy(path: Path, array: np.ndarray) -> None:
    np.save(path, array)


FORMATS: dict[str, Any] = {
    "rows.npy": lambda path: _npy(path, EDGES),
    "pairs.npy": lambda path: _npy(path, np.ascontiguousarray(EDGES.T)),
    "narrow.npy": lambda path: _npy(path, EDGES.astype(np.uint8)),
    "fortran.npy": lambda path: _npy(path, np.asfortranarray(EDGES)),
    "fortran-pairs.npy": lambda path: _npy(path, EDGES.T),
    "big-endian.npy": lambda path: _npy(path, EDGES.astype(">i4")),
    "blanks.txt": lambda path: path.write_bytes(_text(" ")),
    "tabs.tsv": lambda path: path.write_bytes(b"# FromNodeId\tToNodeId\n" + _text("\t")),
    "commas.csv": lambda path: path.write_bytes(b"id_1,id_2\n" + _text(",")),
    "wide.csv": lambda path: path.write_bytes(b'"from", "to", "time"\n' + _text(" , ", ",2004-05-06\n")),
    "windows.txt": lambda path: path.write_bytes(b"\xef\xbb\xbf# a comment\r\n\r\n" + _text(" ", "\r\n") + b"  # 7 8"),
    "notes.txt": lambda path: path.write_bytes(_text(" ", " # a note\n") + b"\t# another\n"),
    "LOUD.TXT.GZ": lambda path: path.write_bytes(gzip.compress(_text("  "))),
    "notes-beside.txt": lambda path: path.write_bytes(_text(" ", "# a note\n")),
    "LOUD.TXT": lambda path: path.write_bytes(_text(" ")),
    "compressed.txt.gz": lambda path: path.write_bytes(gzip.compress(_text("\t"))),
    "semicolons.csv": lambda path: path.write_bytes(b"source;target\n" + _text(";")),
    "quoted.csv": lambda path: path.write_text("".join(f'"{u}","{v}"\n' for u, v in EDGES.T)),
    "other-columns.tsv": lambda path: path.write_bytes(
        b"name\tdst\tsrc\n" + b"".join(b"a b\t%d\t%d\n" % (v, u) for u, v in EDGES.T)
    ),
    "text-beside.csv": lambda path: path.write_bytes(_text(",", ',"one, two"\n')),
    "names-in-a-comment.txt": lambda path: path.write_bytes(
        b"# dst src\n" + b"".join(b"%d %d\n" % (v, u) for u, v in EDGES.T)
    ),
    "percent.txt": lambda path: path.write_bytes(b"% asymmetric\n" + _text(" ").replace(b"\n", b"\n% 9 9\n", 1)),
    "slashes.txt": lambda path: path.write_bytes(b"// a comment\n" + _text(" ").replace(b"\n", b"\n //\n", 1)),
    "compressed.csv.zst": lambda path: path.write_bytes(pyarrow.compress(_text(","), "zstd", asbytes=True)),
    "compressed.csv.lz4": lambda path: path.write_bytes(pyarrow.compress(_text(","), "lz4", asbytes=True)),
    "compressed.txt.bz2": lambda path: path.write_bytes(bz2.compress(_text(" "))),
    "compressed.txt.xz": lambda path: path.write_bytes(lzma.compress(_text(" "))),
    "out.konect": lambda path: path.write_bytes(b"% asym unweighted\n% 7 5 5\n" + _from_one(" \n")),
    "pattern.mtx": lambda path: path.write_bytes(_MATRIX % b"pattern general" + _from_one("\n")),
    "real.mtx.gz": lambda path: path.write_bytes(
        gzip.compress(_MATRIX % b"real general" + _from_one("   1.5e-3\n").replace(b"\n", b"\n  "))
    ),
    "a-folder": lambda path: _in_folder(path, "csv", lambda one, edges: one.write_bytes(b"src,dst\n" + edges)),
    "tables": lambda path: _in_folder(
        path,
        "parquet",
        lambda one, edges: parquet.write_table(csv.read_csv(pyarrow.py_buffer(b"src,dst\n" + edges)), one),
    ),
    "a-pattern-*.txt": lambda path: [
        path.with_name(f"a-pattern-{number}.txt").write_bytes(_text(" ")[4 * cut : 4 * end])
        for number, (cut, end) in enumerate(itertools.pairwise((0, 3, 7)))
    ],
    "table.parquet": lambda path: parquet.write_table(
        pyarrow.table({"weight": [0.5] * EDGES.shape[1], "dst": EDGES[1], "src": EDGES[0].astype(np.int32)}), path
    ),
    "first-two.parquet": lambda path: parquet.write_table(pyarrow.table({"a": EDGES[0], "b": EDGES[1]}), path),
}


@needs_native
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_the_same_stream(name: str, tmp_path: Path) -> None:
    FORMATS[name](tmp_path / name)
    graph = whole(GraphFiles(edges=tmp_path / name), tmp_path / "scratch")
    np.testing.assert_array_equal(edges_of(graph), EDGES)
    assert (graph.edges.num_nodes, graph.edges.num_edges, graph.ids) == (5, 7, None)


@needs_native
@given(
    edges=st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 9)), min_size=1, max_size=40),
    block_bytes=st.integers(40, 200),
)
@settings(max_examples=40)
def test_text_does_not_depend_on_blocks(
    edges: list[tuple[int, int]], block_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("text") / "edges.txt"
    path.write_text("# comment\n" + "".join(f"{u} {v}\n" for u, v in edges))
    found = [chunk.copy() for chunk in read_text(path, block_bytes=block_bytes)]
    np.testing.assert_array_equal(np.concatenate(found, axis=1), np.array(edges).T)


def test_a_stray_id_is_told(tmp_path: Path) -> None:
    np.save(tmp_path / "edges.npy", np.array([[0, 1, 1 << 50], [1, 0, 0]]))
    with pytest.raises(InputError, match=r"edges.npy: \d+ nodes need more .* renumber them"):
        whole(GraphFiles(edges=tmp_path / "edges.npy", relabel=False), tmp_path / "scratch")


def test_a_file_that_is_half_written_is_none(tmp_path: Path) -> None:
    writer = EdgeWriter(tmp_path / "edges.npy", np.int32)
    writer.append(EDGES)
    writer.__exit__(KeyboardInterrupt, None, None)
    with pytest.raises(InputError, match=r"edges.npy: not a readable .npy array"):
        EdgeFile(tmp_path / "edges.npy")


def test_what_was_written_to_a_map_stays(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((5, 2), np.float32))
    x = np.load(tmp_path / "x.npy", mmap_mode="c")
    x += 7
    graph = WholeGraph(edges=EdgeStream(EDGES, num_nodes=5), fields={"x": x}, num_classes=0)
    partition_graph(graph, tmp_path / "store", num_parts=1, partitioner="hash")
    np.testing.assert_array_equal(open_part(tmp_path / "store", 0)["x"], np.full((5, 2), 7))


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_writer_makes_what_numpy_reads(count: int, tmp_path: Path) -> None:
    with EdgeWriter(tmp_path / "edges.npy", np.int32) as writer:
        for start in range(0, count, 2):
            writer.append(EDGES[:, start : min(start + 2, count)])
    np.testing.assert_array_equal(np.load(tmp_path / "edges.npy"), EDGES[:, :count])
    np.testing.assert_array_equal(EdgeFile(tmp_path / "edges.npy").read(0, count), EDGES[:, :count])


# --- mistakes ---------------------------------------------------------------------------------------------------------

WRONG_TEXT = {
    "words": (b"0 1\n1 2\nfoo bar\n", r"line 3 is 'foo bar', expected two ids \(whole numbers\) in 2 columns"),
    "one id": (b"0 1\n7\n", "line 2 is '7'"),
    "a fraction": (b"0 1\n1.5 2\n", "line 2 is '1.5 2'"),
    "another column": (b"0 1\n# fine\n1 2 3\n", "line 3 is '1 2 3'"),
    "an empty column": (b"0,1\n2,,3\n", "line 2 is '2,,3'"),
    "nothing after a comma": (b"0,1\n2,\n", "line 2 is '2,'"),
    "a long number": (b"0 1\n1 99999999999999999999\n", "line 2 is '1 99999999999999999999'"),
    "negative": (b"0 1\n\n3 -4\n", "line 3 has id -4, ids start at 0"),
    "two headers": (b"a,b\nc,d\n0,1\n", "line 2 is 'c,d', expected two ids"),
    "no edges": (b"# nothing\n", "holds no edges; set num_nodes"),
    "bytes": (bytes(range(128, 160)) * 10 + b"\n1 2\n", "line 1 is"),
    "a fraction first": (b"1.5 2\n0 1\n", "line 1 is '1.5 2'"),
    "a long number first": (b"99999999999999999999 2\n0 1\n", "line 1 is '99999999999999999999 2'"),
    "another separator": (b"0:1\n1:2\n", "line 1 is '0:1', expected two ids"),
    "ends of old": (b"0 1\r1 2\r2 3\r", "line 1 is"),
    "ends of old, three columns": (b"0 1 5\r1 2 6\r2 3 7\r", "line 1 is"),
    "signs": (b"+1 2\n", "line 1 is"),
}


@needs_native
@pytest.mark.parametrize("case", WRONG_TEXT)
def test_text_is_refused_by_line(case: str, tmp_path: Path) -> None:
    text, message = WRONG_TEXT[case]
    (tmp_path / "edges.txt").write_bytes(text)
    with pytest.raises(InputError, match=rf"edges.txt: {message}"):
        whole(GraphFiles(edges=tmp_path / "edges.txt"), tmp_path / "scratch")


@needs_native
def test_the_number_of_a_line_counts_all_blocks(tmp_path: Path) -> None:
    (tmp_path / "edges.txt").write_text("0 1\n" * 1000 + "x\n")
    with pytest.raises(InputError, match="line 1001 is 'x'"):
        list(read_text(tmp_path / "edges.txt", block_bytes=64))
    with pytest.raises(InputError, match="a line is longer than 3 bytes"):
        list(read_text(tmp_path / "edges.txt", block_bytes=3))


@needs_native
@pytest.mark.parametrize("name", ["pairs.npy", "blanks.txt", "table.parquet"])
def test_an_id_beyond_the_nodes(name: str, tmp_path: Path) -> None:
    FORMATS[name](tmp_path / name)
    with pytest.raises(InputError, match=rf"{name}: .*\b4\b.* 0 to 3"):
        edges_of(whole(GraphFiles(edges=tmp_path / name, num_nodes=4), tmp_path / "scratch"))


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


WRONG_FILES: dict[str, tuple[Any, str]] = {
    "flat.npy": (lambda path: _npy(path, np.arange(6)), r"array of shape \(6,\), expected edges"),
    "floats.npy": (lambda path: _npy(path, EDGES.astype(float)), "array of float64, expected edges as integers"),
    "negative.npy": (lambda path: _npy(path, EDGES - 1), "edge 0 joins nodes -1 and 0, but nodes start at 0"),
    "text.npy": (lambda path: _write(path, b"0 1\n"), "not a readable .npy array"),
    "short.npy": (lambda path: (_npy(path, EDGES), os.truncate(path, 150)), "is truncated, it has 150 bytes"),
    "short.txt.gz": (lambda path: _write(path, gzip.compress(_text(" "))[:-9]), "could not be read"),
    "plain.txt.gz": (lambda path: _write(path, _text(" ")), "could not be read"),
    "text.parquet": (lambda path: _write(path, b"0 1\n"), "could not be read as Parquet"),
    "one.parquet": (lambda path: parquet.write_table(pyarrow.table({"a": [1]}), path), "1 columns, expected two"),
    "words.parquet": (
        lambda path: parquet.write_table(pyarrow.table({"a": ["x"], "b": [1]}), path),
        "column a holds string",
    ),
    "twice.parquet": (
        lambda path: parquet.write_table(pyarrow.Table.from_arrays([[1], [2]], names=["a", "a"]), path),
        "several columns have the same name",
    ),
    "unsigned.npy": (
        lambda path: _npy(path, EDGES.astype(np.uint64) + np.uint64(1 << 63)),
        "holds id 92233720368547758.., expected ids below",
    ),
    "unsigned.parquet": (
        lambda path: parquet.write_table(pyarrow.table({"a": np.array([1 << 63], np.uint64), "b": [1]}), path),
        r"row 0 holds ids \(9223372036854775808, 1\)",
    ),
    "gaps.parquet": (
        lambda path: parquet.write_table(pyarrow.table({"a": [1, None], "b": [1, 2]}), path),
        "row 1 has an empty id",
    ),
    "negative.parquet": (
        lambda path: parquet.write_table(pyarrow.table({"a": [1, -2], "b": [1, 2]}), path),
        r"row 1 holds ids \(-2, 2\)",
    ),
    "edges.bin": (lambda path: _write(path, b""), "unknown type of file"),
    "absent.txt": (lambda path: None, "there is no such file"),
}


@needs_native
@pytest.mark.parametrize("name", WRONG_FILES)
def test_files_are_refused_by_name(name: str, tmp_path: Path) -> None:
    write, message = WRONG_FILES[name]
    write(tmp_path / name)
    with pytest.raises(InputError, match=rf"{name}: .*{message}"):
        whole(GraphFiles(edges=tmp_path / name), tmp_path / "scratch")


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({"x": np.zeros((4, 2))}, {}, r"edges.npy: edge 4 joins nodes 4 and 4, but the graph has nodes 0 to 3"),
        ({"x": np.zeros((6, 2)), "y": np.zeros(5, int)}, {}, r"y.npy: 5 rows, expected one for each of 6 nodes"),
        ({"x": np.zeros((6, 2))}, {"num_nodes": 7}, r"x.npy: 6 rows, expected one for each of 7 nodes"),
        ({"x": np.zeros(6)}, {}, r"x.npy: shape \(6,\), expected \(number of nodes, number of features\)"),
        ({"x": np.full((6, 2), np.nan)}, {}, r"x.npy: 6 of 6 nodes hold NaN"),
        ({"x": np.zeros((6, 2), complex)}, {}, r"x.npy: an array of complex128"),
        ({"x": np.zeros((6, 2), np.longdouble)}, {}, r"x.npy: an array of float128"),
        ({"y": np.array(3)}, {}, r"y.npy: a single number"),
        ({}, {"num_nodes": 1 << 50}, r"num_nodes: \d+ nodes need more than this machine's"),
        (
            {},
            {"num_nodes": 4, "symmetrize": True},
            r"edges.npy: edge 4 joins nodes 4 and 4, but the graph has nodes 0 to 3",
        ),
        ({"y": np.full(6, -3)}, {}, r"y.npy: node 0 has label -3"),
        ({"y": np.arange(6)}, {"num_classes": 3}, r"y.npy: 3 labels out of range"),
        ({"x": np.zeros((6, 2))}, {"relabel": True}, "relabel: renumbers the nodes"),
        ({}, {"num_nodes": 0}, "num_nodes is 0"),
    ],
)
def test_arrays_that_do_not_fit(
    arrays: dict[str, np.ndarray], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    np.save(tmp_path / "edges.npy", EDGES)
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    given = {"features": "x", "labels": "y"}
    paths = {option: tmp_path / f"{name}.npy" for option, name in given.items() if name in arrays}
    with pytest.raises(InputError, match=message):
        edges_of(whole(GraphFiles(edges=tmp_path / "edges.npy", **paths, **options), tmp_path / "scratch"))


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(
    ids=st.lists(st.integers(0, (1 << 62) - 1), min_size=1, max_size=12, unique=True),
    ends=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), min_size=1, max_size=30),
)
@settings(max_examples=60)
def test_ids_map_back(ids: list[int], ends: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("ids")
    edges = np.array(ids)[np.array(ends).T % len(ids)]
    np.save(folder / "edges.npy", edges)
    meta = partition_graph(
        GraphFiles(edges=folder / "edges.npy", relabel=True), folder / "store", num_parts=1, partitioner="hash"
    )
    assert meta["num_nodes"] == len(np.unique(edges))
    arrays, kept = open_part(folder / "store", 0), np.load(folder / "store" / "ids.npy")
    targets = np.repeat(np.arange(meta["num_nodes"]), np.diff(arrays["indptr"]))
    found = np.stack([kept[arrays["n_id"][arrays["src"]]], kept[arrays["n_id"][targets]]])
    order = np.argsort(arrays["e_id"])
    np.testing.assert_array_equal(found[:, order], edges)


def test_ids_of_a_split_start_where_those_of_edges_do(tmp_path: Path) -> None:
    np.save(tmp_path / "edge_index.npy", np.array([[1, 2, 3], [2, 3, 4]]))
    np.save(tmp_path / "y.npy", np.zeros(4, dtype=np.int64))
    np.save(tmp_path / "train_idx.npy", np.array([1, 2]))
    np.save(tmp_path / "valid_idx.npy", np.array([4]))
    graph = whole(GraphFiles(edges=tmp_path, first_id=1), tmp_path / "scratch")
    assert graph.fields["train_mask"].tolist() == [True, True, False, False]
    assert graph.fields["val_mask"].tolist() == [False, False, False, True]
    np.save(tmp_path / "valid_idx.npy", np.array([0]))
    with pytest.raises(InputError, match="entry 0 is node 0, but the graph has nodes 1 to 4"):
        whole(GraphFiles(edges=tmp_path, first_id=1), tmp_path / "scratch")


def test_splits_of_a_mask_are_told_and_files_of_one_stage_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "edge_index.npy", np.array([[0, 1], [1, 2]]))
    np.save(tmp_path / "y.npy", np.zeros(3, dtype=np.int64))
    np.save(tmp_path / "valid_mask.npy", np.array([[True, False], [False, True], [False, False]]))
    graph = whole(GraphFiles(edges=tmp_path), tmp_path / "scratch")
    assert graph.fields["val_mask"].tolist() == [True, False, False]
    assert "took split 0 of the 2 in val_mask (split_index)" in graph.notes
    np.save(tmp_path / "val_idx.npy", np.array([1]))
    with pytest.raises(InputError, match=r"valid_mask.npy and val_idx.npy are of one stage; keep one of them"):
        whole(GraphFiles(edges=tmp_path), tmp_path / "scratch")


@pytest.mark.parametrize(
    "options", [{}, {"symmetrize": True}, {"remove_self_loops": True}, {"first_id": 1}, {"remove_duplicates": True}]
)
@pytest.mark.parametrize("count", [1, 3])
def test_values_of_other_edges_are_refused(count: int, options: dict[str, Any], tmp_path: Path) -> None:
    np.save(tmp_path / "edge_index.npy", np.array([[1, 2], [2, 1]]))
    np.save(tmp_path / "edge_weight.npy", np.ones(count, dtype=np.float32))
    said = rf"edge_weight.npy: shape \({count},\), expected one entry for each of 2 edges"
    with pytest.raises(InputError, match=said):
        whole(GraphFiles(edges=tmp_path, **options), tmp_path / "scratch")


def test_nodes_whose_self_loops_are_removed_stay(tmp_path: Path) -> None:
    np.save(tmp_path / "e.npy", np.array([[0, 5, 1], [1, 5, 2]]))
    graph = whole(GraphFiles(edges=tmp_path / "e.npy", remove_self_loops=True, relabel=False), tmp_path / "scratch")
    assert (graph.edges.num_nodes, graph.edges.num_edges) == (6, 2)


def test_names_do_not_start_at_a_number(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="first_id: is for ids that are numbers, but names are given"):
        GraphFiles(edges=tmp_path / "e.csv", names=tmp_path / "names", first_id=1)


def test_files_that_differ_in_content_alone_are_other_files(tmp_path: Path) -> None:
    seen = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "e.npy", np.full((2, 100_000), ord(name)))
        os.utime(tmp_path / name / "e.npy", (1, 1))
        seen.add(GraphFiles(edges=tmp_path / name / "e.npy").fingerprint())
    assert len(seen) == 2


def test_ids_tell_graphs_apart(tmp_path: Path) -> None:
    def graph(**of_nodes: Any) -> str:
        edges = EdgeStream(np.array([[0, 1], [1, 0]]), num_nodes=2)
        return WholeGraph(edges=edges, fields={}, num_classes=0, **of_nodes).fingerprint()

    (tmp_path / "one").write_text("a\nb\n")
    (tmp_path / "two").write_text("a\nc\n")
    seen = {graph(), *(graph(ids=np.array(ids)) for ids in ([1, 2], [1, 3]))}
    assert len(seen | {graph(names=tmp_path / name) for name in ("one", "two")}) == 5


@needs_native
@pytest.mark.parametrize("suffix", ["bz2", "xz"])
def test_every_compressed_stream_of_a_file_is_read(suffix: str, tmp_path: Path) -> None:
    pack, path = {"bz2": bz2, "xz": lzma}[suffix].compress, tmp_path / f"e.txt.{suffix}"
    first, second = pack(b"0 1\n1 2\n"), pack(b"2 3\n3 4\n")
    path.write_bytes(first + second + b"\0" * 4)
    assert edges_of(whole(GraphFiles(edges=path), tmp_path / "scratch")).tolist() == [[0, 1, 2, 3], [1, 2, 3, 4]]
    for damaged in (first + b"\x01" + second[1:], first + second[:-9], first + b"more"):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=f"e.txt.{suffix}: could not be read"):
            whole(GraphFiles(edges=path), tmp_path / "scratch")


@needs_native
@pytest.mark.parametrize(
    ("name", "content", "options"),
    [
        ("e.npy", None, {"first_id": 1, "relabel": True}),
        ("e.npy", None, {"first_id": 1}),
        ("out.konect", b"% asym\n3 7\n7 40\n", {}),
        ("m.mtx", b"%%MatrixMarket matrix coordinate pattern general\n50 50 2\n3 7\n7 40\n", {"relabel": True}),
    ],
)
def test_ids_that_start_at_1_map_back(
    name: str, content: bytes | None, options: dict[str, Any], tmp_path: Path
) -> None:
    if content is None:
        np.save(tmp_path / name, np.array([[3, 7], [7, 40]]))
    else:
        (tmp_path / name).write_bytes(content)
    graph = whole(GraphFiles(edges=tmp_path / name, **options), tmp_path / "scratch")
    assert graph.ids is not None
    assert graph.ids.tolist() == [3, 7, 40]
    assert any("which go up to 40" in note for note in graph.notes)


@pytest.mark.parametrize(
    ("largest", "relabel", "num_nodes"), [(9, None, 10), (10, None, 5), (10, False, 11), (9, True, 5)]
)
def test_numbers_with_gaps_are_kept_as_long_as_half_occur(
    largest: int, relabel: bool | None, num_nodes: int, tmp_path: Path
) -> None:
    np.save(tmp_path / "edges.npy", np.array([[0, 1, 2, 3], [1, 2, 3, largest]]))
    graph = whole(GraphFiles(edges=tmp_path / "edges.npy", relabel=relabel), tmp_path / "scratch")
    assert graph.edges.num_nodes == num_nodes
    assert (graph.ids is None) == (num_nodes != 5)


# --- the same store as from memory ------------------------------------------------------------------------------------


def _same_parts(one: Path, other: Path, num_parts: int) -> None:
    for part in range(num_parts):
        arrays, others = open_part(one, part), open_part(other, part)
        assert arrays.keys() == others.keys()
        for name, array in arrays.items():
            assert array.dtype == others[name].dtype, name
            np.testing.assert_array_equal(array, others[name], err_msg=name)


@pytest.mark.parametrize("multi_label", [False, True])
def test_a_folder_gives_the_parts_that_memory_gives(multi_label: bool, tmp_path: Path) -> None:
    data, notes = prepare(random_graph(60, 300, multi_label=multi_label))
    save_npy(data, tmp_path / "graph")
    partition_graph(data, tmp_path / "memory", num_parts=3, partitioner="hash", notes=notes)
    partition_graph(GraphFiles(edges=tmp_path / "graph"), tmp_path / "files", num_parts=3, partitioner="hash")
    _same_parts(tmp_path / "memory", tmp_path / "files", 3)
    meta, other = read_meta(tmp_path / "files"), read_meta(tmp_path / "memory")
    for name in ("counts", "dtypes", "edge_cut", "multi_label", "num_classes", "num_edges", "num_features", "parts"):
        assert meta[name] == other[name], name
    assert not list((tmp_path / "files").glob("scratch")) + list((tmp_path / "files").glob("*.tmp"))


def test_features_labels_and_a_drawn_split(tmp_path: Path) -> None:
    data = random_graph(60, 300)
    plain = Data(x=data.x, y=data.y, edge_index=data.edge_index)
    np.save(tmp_path / "edges.npy", data.edge_index.numpy())
    np.save(tmp_path / "x.npy", data.x.numpy().astype(np.float16))  # type: ignore[union-attr]
    np.save(tmp_path / "y.npy", data.y.numpy().astype(np.float64))  # type: ignore[union-attr]
    plain.x = plain.x.half()  # type: ignore[union-attr]
    prepared, _ = prepare(plain, split_seed=3)
    files = GraphFiles(
        edges=tmp_path / "edges.npy", features=tmp_path / "x.npy", labels=tmp_path / "y.npy", split_seed=3
    )
    partition_graph(prepared, tmp_path / "memory", num_parts=2, partitioner="hash")
    partition_graph(files, tmp_path / "files", num_parts=2, partitioner="hash")
    _same_parts(tmp_path / "memory", tmp_path / "files", 2)


@pytest.mark.slow
@given(
    ends=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=40),
    num_parts=st.integers(1, 4),
    symmetrize=st.booleans(),
    remove_self_loops=st.booleans(),
)
@settings(max_examples=60)
def test_edges_change_as_in_memory(
    ends: list[tuple[int, int]],
    num_parts: int,
    symmetrize: bool,
    remove_self_loops: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("change")
    np.save(folder / "edges.npy", np.array(ends).T)
    options = {"symmetrize": symmetrize, "remove_self_loops": remove_self_loops, "remove_duplicates": True}
    data = Data(edge_index=torch.tensor(ends).T, x=torch.zeros(7, 1))
    prepared, _ = prepare(data, **options)  # type: ignore[arg-type]
    files = GraphFiles(edges=folder / "edges.npy", num_nodes=7, **options)  # type: ignore[arg-type]
    partition_graph(prepared, folder / "memory", num_parts=num_parts, partitioner="hash")
    meta = partition_graph(files, folder / "files", num_parts=num_parts, partitioner="hash")
    assert meta["num_edges"] == prepared.num_edges
    for part in range(num_parts):
        arrays, others = open_part(folder / "files", part), open_part(folder / "memory", part)
        np.testing.assert_array_equal(arrays["n_id"], others["n_id"])
        np.testing.assert_array_equal(arrays["indptr"], others["indptr"])
        for first, last in zip(arrays["indptr"], arrays["indptr"][1:], strict=False):
            assert set(arrays["src"][first:last]) == set(others["src"][first:last])
        np.testing.assert_array_equal(arrays["send_index"], others["send_index"])


def test_masks_of_several_splits(tmp_path: Path) -> None:
    data, _ = prepare(random_graph(30, 90))
    save_npy(data, tmp_path / "graph")
    for name in ("train_mask", "val_mask", "test_mask"):
        mask = getattr(data, name).numpy()
        np.save(tmp_path / "graph" / f"{name}.npy", np.stack([~mask, mask], axis=1))
    graph = whole(GraphFiles(edges=tmp_path / "graph", split_index=1), tmp_path / "scratch")
    np.testing.assert_array_equal(graph.fields["train_mask"], data.train_mask.numpy())
    with pytest.raises(InputError, match="split_index is 2, but train_mask holds splits 0 to 1"):
        whole(GraphFiles(edges=tmp_path / "graph", split_index=2), tmp_path / "scratch")


def test_reverse_edges_do_not_depend_on_the_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EdgeStream.__init__.__kwdefaults__, "chunk_edges", 3)
    np.save(tmp_path / "edges.npy", EDGES)
    found = edges_of(whole(GraphFiles(edges=tmp_path / "edges.npy", symmetrize=True), tmp_path / "scratch"))
    np.testing.assert_array_equal(found[:, ::2], EDGES)
    np.testing.assert_array_equal(found[:, 1::2], EDGES[::-1])


def test_a_stream_of_ones_own(tmp_path: Path) -> None:
    generator = EdgeGenerator(500, 4000, num_communities=5)
    graph = WholeGraph(edges=EdgeStream(generator, num_nodes=500), fields={}, num_classes=0)
    meta = partition_graph(graph, tmp_path / "store", num_parts=3, partitioner="hash")
    assert (meta["num_nodes"], meta["num_edges"]) == (500, 4000)
    assert partition_graph(graph, tmp_path / "store", num_parts=3, partitioner="hash") == meta
    other = WholeGraph(edges=EdgeStream(EdgeGenerator(500, 4000), num_nodes=500), fields={}, num_classes=0)
    with pytest.raises(InputError, match="fingerprint differ"):
        partition_graph(other, tmp_path / "store", num_parts=3, partitioner="hash")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="peak memory is read from /proc")
def test_features_are_not_loaded(tmp_path: Path) -> None:
    features = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (100_000, 1000))  # 400 MB, of zeros
    del features
    np.save(tmp_path / "edges.npy", np.random.default_rng(0).integers(0, 100_000, (2, 100_000)))
    peaks = []
    for options in ({}, {"features": str(tmp_path / "x.npy")}):
        code = "import sys; from pygdist.graph import GraphFiles; from pygdist.partition import partition_graph\n"
        code += f"files = GraphFiles(edges={str(tmp_path / 'edges.npy')!r}, num_nodes=100_000, **{options!r})\n"
        code += f"place = {str(tmp_path / f'store{len(peaks)}')!r}\n"
        code += "print(partition_graph(files, place, num_parts=4, partitioner='hash')['peak_rss_bytes'])"
        paths = os.pathsep.join(path for path in sys.path if path)
        # glibc gives freed blocks back at once; by default some of them lie on, more on a busy machine
        env = {**os.environ, "PYTHONPATH": paths, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
        outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
        assert outcome.returncode == 0, outcome.stderr
        peaks.append(int(outcome.stdout))
    assert peaks[1] - peaks[0] < 150 * 2**20  # blocks of 16 MiB, and their temporaries


@pytest.mark.slow
@given(chunk_edges=st.integers(1, 70), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_parts_do_not_depend_on_chunks(chunk_edges: int, seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("chunks")
    rng = np.random.default_rng(seed)
    edge_index, part = rng.integers(0, 20, (2, 60)), rng.integers(0, 3, 20).astype(np.int32)
    found = []
    for name, size in (("one", 60), ("many", chunk_edges)):
        (folder / name).mkdir()
        graph = WholeGraph(edges=EdgeStream(edge_index, num_nodes=20, chunk_edges=size), fields={}, num_classes=0)
        found.append(write_graph(graph, part, folder / name, 3))
    assert found[0] == found[1]  # checksums of all files included


# --- interruption -----------------------------------------------------------------------------------------------------

SLOWLY = """
import sys, time
from pygdist.cli import main
from pygdist.graph.store import part_files

def slow(*args):
    print("writing", flush=True)
    time.sleep(60)

part_files._write_plans = slow
sys.exit(main(["partition", "--input", sys.argv[1], "--out", sys.argv[2], "--parts=2", "--method=hash"]))
"""


def _stopped_while_writing(folder: Path, how: signal.Signals) -> tuple[int, str]:
    """The exit code, and what was said on standard error."""
    np.save(folder / "edges.npy", EDGES)
    arguments = [sys.executable, "-c", SLOWLY, str(folder / "edges.npy"), str(folder / "store")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    reset = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # not everybody leaves Ctrl-C as it is
    with subprocess.Popen(arguments, env=env, preexec_fn=reset, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.send_signal(how)
        return process.wait(), process.communicate()[1]


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    code, _ = _stopped_while_writing(tmp_path, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert not (tmp_path / "store").exists()
    left = [path for path in tmp_path.iterdir() if path.name != "edges.npy"]
    assert left, "the killed process could not clean up"
    with pytest.raises(InputError, match="there is no such folder"):
        read_meta(tmp_path / "store")
    partition_graph(GraphFiles(edges=tmp_path / "edges.npy"), tmp_path / "store", num_parts=2, partitioner="hash")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["edges.npy", "store"]


@pytest.mark.slow
def test_an_interrupted_run_cleans_up(tmp_path: Path) -> None:
    code, said = _stopped_while_writing(tmp_path, signal.SIGINT)
    assert code == 130
    assert re.fullmatch(r"pygdist: error: SIGINT reached process \d+", said.splitlines()[-1])
    assert "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["edges.npy"]


def test_a_replacement_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "edges.npy", EDGES)
    files = GraphFiles(edges=tmp_path / "edges.npy")
    first = partition_graph(files, tmp_path / "store", num_parts=2, partitioner="hash")
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if target == tmp_path / "store" and not self.name.endswith("-old"):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(KeyboardInterrupt):
        partition_graph(files, tmp_path / "store", num_parts=3, partitioner="hash", overwrite=True)
    assert read_meta(tmp_path / "store") == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["edges.npy", "store"]


def test_what_was_being_replaced_comes_back(tmp_path: Path) -> None:
    np.save(tmp_path / "edges.npy", EDGES)
    files = GraphFiles(edges=tmp_path / "edges.npy")
    first = partition_graph(files, tmp_path / "store[1]", num_parts=2, partitioner="hash")
    (tmp_path / "store[1]").rename(tmp_path / ".store[1].tmp-0-old")  # killed between two renames
    (tmp_path / ".store[1].tmp-0").mkdir()
    (tmp_path / ".store1.tmp-0").mkdir()  # somebody else's
    assert partition_graph(files, tmp_path / "store[1]", num_parts=2, partitioner="hash") == first
    assert sorted(path.name for path in tmp_path.iterdir()) == [".store1.tmp-0", "edges.npy", "store[1]"]


def test_a_finished_store_of_the_same_files_is_left_alone(tmp_path: Path) -> None:
    np.save(tmp_path / "edges.npy", EDGES)
    files = GraphFiles(edges=tmp_path / "edges.npy")
    first = partition_graph(files, tmp_path / "store", num_parts=2, partitioner="hash")
    assert partition_graph(files, tmp_path / "store", num_parts=2, partitioner="hash") == first
    time.sleep(0.01)
    np.save(tmp_path / "edges.npy", EDGES[::-1])
    with pytest.raises(InputError, match=r"holds another store \(fingerprint differ"):
        partition_graph(files, tmp_path / "store", num_parts=2, partitioner="hash")
    again = partition_graph(files, tmp_path / "store", num_parts=2, partitioner="hash", overwrite=True)
    assert again["fingerprint"] != first["fingerprint"]
