"""Edges as people have them in text and Parquet: weights, attributes, names as ids, ids from 1, files that are cut."""

from __future__ import annotations

import builtins
import bz2
import gzip
import importlib.util
import lzma
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from torch_geometric.data import Data

from pygdist.errors import InputError
from pygdist.graph import GraphFiles, WholeGraph, load_graph, open_part, prepare, read_meta
from pygdist.graph.store import part_files
from pygdist.graph.streams import arrays as array_files
from pygdist.graph.streams.edge_text import open_text
from pygdist.graph.streams.tables import ANY_ID, Names
from pygdist.native import load
from pygdist.partition import partition_graph

needs_native = pytest.mark.skipif(load() is None, reason="lists of numbers are read by the native library")


def opened(path: Path, content: bytes | None = None, **options: Any) -> WholeGraph:
    if content is not None:
        path.write_bytes(content)
    scratch = path.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    return GraphFiles(edges=path, **options).open(scratch)


def edges_of(graph: WholeGraph) -> list[list[int]]:
    return np.concatenate([np.empty((2, 0), int), *graph.edges.chunks()], axis=1).T.tolist()


def values_of(graph: WholeGraph) -> dict[str, list[Any]]:
    return {name: graph.fields[name].tolist() for name in ("edge_weight", "edge_attr") if name in graph.fields}


# --- values -----------------------------------------------------------------------------------------------------------

VALUES: dict[str, tuple[bytes, str | None, dict[str, Any]]] = {
    "a column called weight": (b"source,target,weight\n0,1,0.5\n1,2,2\n", None, {"edge_weight": [0.5, 2.0]}),
    "a column the user names": (
        b"cost,dst,src\n0.5,1,0\n2,2,1\n",
        "weight=cost",
        {"edge_weight": [0.5, 2.0]},
    ),
    "no weights": (b"source,target,weight\n0,1,0.5\n1,2,2\n", "weight=", {}),
    "attributes in the order they are named": (
        b"u v a b\n0 1 1 2\n1 2 3 4\n",
        "attributes=b+a",
        {"edge_attr": [[2.0, 1.0], [4.0, 3.0]]},
    ),
    "weights and attributes": (
        b"u;v;w;a\n0;1;1,5;2\n1;2;1e1;-4\n",
        "attributes=a",
        {"edge_weight": [1.5, 10.0], "edge_attr": [[2.0], [-4.0]]},
    ),
    "a column without a name": (b"0\t1\t0.5\n 1  2\t 2 # two\n", "weight=3", {"edge_weight": [0.5, 2.0]}),
    "names in a comment": (b"# source target weight\n0 1 0.5\n1 2 2\n", None, {"edge_weight": [0.5, 2.0]}),
    "KONECT": (b"% asym positive\n% 2 3 3\n1 2 0.5 12345\n2 3 2 12346\n", None, {"edge_weight": [0.5, 2.0]}),
    "columns not named": (b"0 1 0.5\n1 2 2\n", None, {}),
}


@needs_native
@pytest.mark.parametrize("case", VALUES)
def test_values_of_text(case: str, tmp_path: Path) -> None:
    content, columns, values = VALUES[case]
    graph = opened(tmp_path / "edges.txt", content, columns=columns)
    assert edges_of(graph) == [[0, 1], [1, 2]]
    assert values_of(graph) == values


def test_values_of_parquet(tmp_path: Path) -> None:
    table = pyarrow.table(
        {
            "time": [5, 6],
            "dst": pyarrow.array([1, 2], pyarrow.uint32()),
            "w": pyarrow.array([0.5, 2.0], pyarrow.float32()),
            "sure": [True, False],
            "price": pyarrow.array([1, 2], pyarrow.decimal128(5, 2)),
            "src": [0, 1],
        }
    )
    parquet.write_table(table, tmp_path / "edges.parquet")
    graph = opened(tmp_path / "edges.parquet", columns={"attributes": ["price", "time", "sure"]})
    assert edges_of(graph) == [[0, 1], [1, 2]]
    assert values_of(graph) == {"edge_weight": [0.5, 2.0], "edge_attr": [[1.0, 5.0, 1.0], [2.0, 6.0, 0.0]]}
    assert graph.fields["edge_weight"].dtype == np.float32


INTEGERS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "categories": ({"cat": [2**60 + 1, 3]}, "attributes=cat", [[2**60 + 1], [3]]),
    "two columns": ({"cat": [2**60 + 1, 3], "day": [-1, 0]}, "attributes=day+cat", [[-1, 2**60 + 1], [0, 3]]),
    "beside weights": ({"w": [0.5, 2.0], "cat": [2**60 + 1, 3]}, "attributes=cat", [[2**60 + 1], [3]]),
    "beside fractions": ({"cat": [7, 3], "cost": [0.5, 2.0]}, "attributes=cat+cost", [[7.0, 0.5], [3.0, 2.0]]),
    "rounded beside fractions": ({"cat": [3, 2**53 + 1], "cost": [0.5, 2]}, "attributes=cat+cost", "column cat"),
    "rounded weights": ({"w": [3, 2**60 + 1]}, "", f"has {2**60 + 1} in column w, which float64 rounds"),
    "beyond int64": ({"cat": np.array([3, 2**63 + 1], np.uint64)}, "attributes=cat", f"has {2**63 + 1} in column cat"),
    "large weights": ({"w": [3, 2**60]}, "", None),
}


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("case", INTEGERS)
def test_integers_stay_as_they_are(case: str, suffix: str, tmp_path: Path) -> None:
    values, columns, expected = INTEGERS[case]
    table = {"src": [0, 1], "dst": [1, 2], **values}
    path = tmp_path / f"e{suffix}"
    if suffix == ".csv":
        rows = zip(*table.values(), strict=True)
        path.write_bytes(
            "\n".join(",".join([*map(str, row), "\xff"]) for row in [table, *rows]).encode("latin") + b"\n"
        )
    else:
        parquet.write_table(pyarrow.table(table), path)
    options: dict[str, Any] = {"columns": columns} if columns else {}
    if isinstance(expected, str):
        with pytest.raises(InputError, match=rf"e{suffix}: .*{expected}"):
            opened(path, **options)
        return
    found = opened(path, **options).fields
    if expected is None:
        assert found["edge_weight"].tolist() == [3.0, 2.0**60]
    else:
        assert found["edge_attr"].tolist() == expected
        assert found["edge_attr"].dtype == np.asarray(expected).dtype


def test_integers_before_fractions(tmp_path: Path) -> None:
    (tmp_path / "edges").mkdir()
    for name, value in (("a", "7"), ("b", "0.5"), ("c", "9")):
        (tmp_path / "edges" / f"{name}.csv").write_text(f"u,v,a\n0,1,{value}\n")
    graph = opened(tmp_path / "edges", columns="attributes=a", symmetrize=True)
    assert values_of(graph) == {"edge_attr": [[7.0], [7.0], [0.5], [0.5], [9.0], [9.0]]}
    for name in "ac":
        (tmp_path / "edges" / f"{name}.csv").write_text(f"u,v,a\n0,1,{2**53 + 1}\n")
        with pytest.raises(InputError, match=f"{2**53 + 1} stands among fractions, and float64 rounds it"):
            opened(tmp_path / "edges", columns="attributes=a")
        (tmp_path / "edges" / f"{name}.csv").write_text("u,v,a\n0,1,1\n")


@needs_native
def test_columns_that_are_not_read_are_told(tmp_path: Path) -> None:
    graph = opened(tmp_path / "edges.csv", b"source,target,cost,time\n0,1,5,6\n")
    assert any("not read: cost, time (read with columns weight=NAME" in note for note in graph.notes)
    graph = opened(tmp_path / "edges.txt", b"0 1 5\n")
    assert any("not read: 3 (read" in note for note in graph.notes)
    graph = opened(tmp_path / "edges.txt", b"s t w\n0 1 5\n")
    assert any("edge weights are from column w (none with columns weight=)" in note for note in graph.notes)


WRONG_VALUES: dict[str, tuple[bytes, dict[str, Any], str]] = {
    "no number": (b"u,v,w\n0,1,1\n1,2,x\n", {}, "line 3 has 'x' in column w, expected a number"),
    "nothing": (b"u,v,w\n\n0,1,\n", {}, "line 3 has nothing in column w"),
    "infinite": (b"u,v,w\n0,1,1e999\n", {}, "1 of 1 edges hold NaN or infinite"),
    "a cell too few": (b"u,v,w\n0,1,1\n1,2\n", {}, r"line 3 is '1,2', expected two ids .whole numbers. in 3 columns"),
    "no such column": (b"u,v,w\n0,1,1\n", {"columns": "weight=cost"}, "no column 'cost'; its columns are u, v, w"),
    "an id that is none": (b"u,v,w\n0,1,1\n1,b,2\n", {}, "line 3 is '1,b,2', expected two ids"),
    "an empty id": (b"u,v,w\n0,,1\n", {}, "line 2 has an empty id"),
    "an id beyond": (b"u,v,w\n0,1,1\n1,7,1\n", {"num_nodes": 5}, r"line 3 holds ids \(1, 7\), expected ids 0 to 4"),
    "a carriage return": (b"u,v,w\n0,1,1\r1,2,1\r\n", {}, "line 2 is"),
    "a quote that does not end": (b'u,v,w\n0,1,1\n1,"2,1\n2,3,1\n', {}, "line 3 is"),
    "a cell of two lines": (b'u,v,w,label\n0,1,1,a\n1,2,1,"b\n2,3,1,c"\n', {}, "line 3 is '1,2,1,\"b'"),
    "no text": (b"u,v\n\xff\xfe,a\nb,c\n", {"string_ids": True}, "line 2 is not text in UTF-8"),
}


@pytest.mark.parametrize("case", WRONG_VALUES)
def test_wrong_cells_are_told_by_line(case: str, tmp_path: Path) -> None:
    content, options, message = WRONG_VALUES[case]
    with pytest.raises(InputError, match=message) as caught:
        opened(tmp_path / "edges.csv", content, **options)
    assert "edges.csv" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_line_of_a_wrong_cell_counts_all_blocks(tmp_path: Path) -> None:
    path = tmp_path / "edges.csv"
    path.write_text("# a comment\nu,v,w\n" + "0,1,2\n\n" * 20 + "0,1,x\n")
    table = open_text(path, wanted={}, block_bytes=32)
    assert table is not None
    with pytest.raises(InputError, match="line 43 has 'x'"):
        list(table.read(None, ANY_ID))


@pytest.mark.parametrize(
    "options",
    [
        {"remove_duplicates": True},
        {"symmetrize": True, "remove_duplicates": True},
        {"symmetrize": True, "remove_duplicates": True, "remove_self_loops": True},
        {"remove_self_loops": True},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("placement", ["nodes", "replicas"])
def test_values_change_with_edges_as_in_memory(options: dict[str, bool], placement: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    edges = random.integers(0, 9, (2, 90))  # many duplicates and reverses
    weight, attr = random.integers(1, 50, 90) / 4, random.integers(1, 50, (90, 2)).astype(float)
    rows = zip(edges.T.tolist(), weight.tolist(), attr.tolist(), strict=True)
    (tmp_path / "e.csv").write_text("v,u,w,a,b\n" + "".join(f"{v},{u},{w},{a},{b}\n" for (u, v), w, (a, b) in rows))
    tensors = {"edge_weight": torch.from_numpy(weight), "edge_attr": torch.from_numpy(attr)}
    data, notes = prepare(Data(edge_index=torch.from_numpy(edges), x=torch.zeros(9, 1), **tensors), **options)
    files = GraphFiles(edges=tmp_path / "e.csv", columns="attributes=a+b", num_nodes=9, **options)
    found = []
    for name, source in (("memory", data), ("files", files)):
        partition_graph(source, tmp_path / name, num_parts=3, partitioner="hash", placement=placement)
        found.append(sorted(_rows_of_store(tmp_path / name)))
    told = [note for note in read_meta(tmp_path / "files")["preprocessing"] if "duplicate edges" in note]
    assert len(told) == ("remove_duplicates" in options)
    if told and "symmetrize" not in options:
        assert told == [note for note in notes if "duplicate edges" in note]
        assert "weights were summed; their attributes were averaged" in told[0]
    assert len(found[0]) > 30
    np.testing.assert_allclose(found[0], found[1], rtol=1e-12)


def _rows_of_store(store: Path) -> list[tuple[float, ...]]:
    """Source, target and values of each edge, and in-degrees of the target where they are stored."""
    rows = []
    for part in range(3):
        arrays = open_part(store, part)
        target = np.repeat(np.arange(len(arrays["indptr"]) - 1), np.diff(arrays["indptr"]))
        columns = [arrays["n_id"][arrays["src"]], arrays["n_id"][target], arrays["edge_weight"], *arrays["edge_attr"].T]
        if "in_degree" in arrays:
            columns += [*arrays["in_degree"][target].T[:-1]]  # the last loop's weight depends on the order of edges
        rows += [(part, *map(float, row)) for row in zip(*columns, strict=True)]
    return rows


def test_values_of_a_folder_change_with_edges(tmp_path: Path) -> None:
    (tmp_path / "graph").mkdir()
    np.save(tmp_path / "graph" / "edge_index.npy", np.array([[0, 1, 1, 2], [1, 2, 2, 2]]))
    np.save(tmp_path / "graph" / "edge_weight.npy", np.array([1.0, 2.0, 4.0, 8.0]))
    files = GraphFiles(edges=tmp_path / "graph", remove_duplicates=True, remove_self_loops=True)
    partition_graph(files, tmp_path / "store", num_parts=1, partitioner="hash")
    assert open_part(tmp_path / "store", 0)["edge_weight"].tolist() == [1.0, 6.0]
    assert np.load(tmp_path / "graph" / "edge_weight.npy").tolist() == [1.0, 2.0, 4.0, 8.0]


def test_merging_leaves_the_callers_weights(tmp_path: Path) -> None:
    weight = np.array([1.0, 2.0])
    stream = opened(tmp_path / "e.csv", b"u,v\n0,1\n0,1\n").edges
    graph = WholeGraph(edges=stream, fields={"edge_weight": weight}, num_classes=0, merge=True)
    partition_graph(graph, tmp_path / "store", num_parts=1, partitioner="hash")
    assert open_part(tmp_path / "store", 0)["edge_weight"].tolist() == [3.0]
    assert weight.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_merging_copies_mapped_values_in_blocks(
    dtype: type[np.generic], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = np.arange(1 << 21)
    np.save(tmp_path / "weight.npy", weight)
    mapped = np.load(tmp_path / "weight.npy", mmap_mode="r")
    monkeypatch.setattr(array_files, "_BLOCK_BYTES", 1 << 16)
    tracemalloc.start()
    try:
        own = part_files._changeable("edge_weight", mapped, np.dtype(dtype), tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < weight.nbytes / 4
    assert own.dtype == dtype
    np.testing.assert_array_equal(own, weight)
    own[0] = 7
    assert mapped[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["weight.npy"]


# --- names ------------------------------------------------------------------------------------------------------------

NAMES = {
    "a header": (b"follower,followee\nann,bob\nbob, cy\nann,7\n", {}),
    "blanks": (b"# people\nsource target\nann bob\nbob   cy\nann 7\n", {}),
    "columns by number": (b"ann\tbob\nbob\tcy\nann\t7\n", {"columns": "source=1,target=2"}),
    "an edge that looks like names": (b"ann bob\nbob cy\nann 7\n", {"columns": "source=1,target=2"}),
    "bars": (b"Person1Id|Person2Id\nann|bob\nbob|cy\nann|7\n", {}),
    "tabs": (b"source\ttarget\ttitle\nann\tbob\ta, b\nbob\tcy\tc\nann\t7\td, e\n", {}),
    "quotes": (b'source;target\n"ann";bob\nbob;"cy"\nann;"7"\n', {}),
}


@pytest.mark.parametrize("case", NAMES)
def test_names_are_numbered_and_kept(case: str, tmp_path: Path) -> None:
    content, options = NAMES[case]
    (tmp_path / "e.csv").write_bytes(content)
    meta = partition_graph(
        GraphFiles(edges=tmp_path / "e.csv", **options), tmp_path / "store", num_parts=2, partitioner="hash"
    )
    names = (tmp_path / "store" / "ids.txt").read_text().split()
    assert names == ["ann", "bob", "cy", "7"]
    found = set()
    for part in range(2):
        arrays = open_part(tmp_path / "store", part)
        targets = np.repeat(np.arange(len(arrays["indptr"]) - 1), np.diff(arrays["indptr"]))
        ends = arrays["n_id"][arrays["src"]], arrays["n_id"][targets]
        found |= {(names[u], names[v]) for u, v in zip(*ends, strict=True)}
    assert found == {("ann", "bob"), ("bob", "cy"), ("ann", "7")}
    assert meta["num_nodes"] == 4
    assert "ids are names: 4 nodes, in the order of ids.txt" in meta["preprocessing"]
    assert read_meta(tmp_path / "store")["files"]["ids"]["bytes"] == len("ann\nbob\ncy\n7\n")


def test_names_with_commas_between_tabs(tmp_path: Path) -> None:
    graph = opened(tmp_path / "e.tsv", b"Doe, J\tRoe, R\nRoe, R\tPoe, E\n", columns="source=1,target=2")
    assert edges_of(graph) == [[0, 1], [1, 2]]
    assert graph.names is not None
    assert graph.names.read_text() == "Doe, J\nRoe, R\nPoe, E\n"


def test_numbers_of_names_do_not_depend_on_blocks(tmp_path: Path) -> None:
    path = tmp_path / "e.txt"
    random = np.random.default_rng(0)
    path.write_text("source target\n" + "".join(f"n{u} n{v}\n" for u, v in random.integers(0, 30, (100, 2))))
    found = []
    for block_bytes in (32, 1 << 20):
        table, names = open_text(path, wanted={}, block_bytes=block_bytes), Names()
        assert table is not None
        found.append((np.concatenate([rows.ends for rows in table.read(names, ANY_ID)], axis=1).tolist(), list(names)))
    assert found[0] == found[1]
    assert found[0][1][:2] == path.read_text().split()[2:4]


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        ({"src": ["a"], "dst": [1]}, {}, "column src holds string and column dst holds int64, .* set string_ids"),
        ({"src": ["a"], "dst": ["b"]}, {"string_ids": False}, "column src holds string, expected whole numbers"),
        ({"src": [1.5], "dst": [1]}, {}, "column src holds double, expected ids"),
        ({"src": ["a"], "dst": ["b\nc"]}, {}, "row 0 has an id that is empty, or holds the end of a line"),
        ({"src": ["a", "b"], "dst": ["b", None]}, {}, "row 1 has an empty id"),
        ({"src": [0], "dst": [1], "w": ["x"]}, {}, "column w holds string, expected numbers; leave it out"),
        ({"src": [0, 1], "dst": [1, 0], "w": [1.0, None]}, {}, "row 1 has nothing in column w"),
        ({"src": [0], "dst": [1]}, {"columns": "weight=w"}, "has no column 'w'; its columns are src, dst"),
        ({"a.src": [0], "x": [1]}, {}, "columns a.src, x: which are the sources"),
        ({"src": pyarrow.array([], pyarrow.int64()), "dst": pyarrow.array([], pyarrow.int64())}, {}, "holds no edges"),
    ],
)
def test_tables_that_are_refused(table: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table(table), tmp_path / "e.parquet")
    with pytest.raises(InputError, match=rf"e.parquet: {message}"):
        opened(tmp_path / "e.parquet", **options)


def test_names_of_parquet(tmp_path: Path) -> None:
    strings = pyarrow.array(["b", "a"]).dictionary_encode()
    parquet.write_table(pyarrow.table({"from": ["a", "b"], "to": strings}), tmp_path / "e.parquet")
    graph = opened(tmp_path / "e.parquet")
    assert edges_of(graph) == [[0, 1], [1, 0]]
    assert graph.names is not None
    assert graph.names.read_text() == "a\nb\n"


def test_the_first_line_is_told_if_it_may_name_columns(tmp_path: Path) -> None:
    graph = opened(tmp_path / "e.csv", b"paper,author\np1,a1\n", columns="source=1,target=2")
    assert any("the first line, 'paper,author', is an edge" in note for note in graph.notes)
    graph = opened(tmp_path / "e.csv", b"paper,author,year\np1,a1,1999\n", columns="source=1,target=2")
    assert edges_of(graph) == [[0, 1]]
    assert any("the first line, 'paper,author,year', names columns" in note for note in graph.notes)
    graph = opened(tmp_path / "e.csv", b"ann,bob\nann,7\nann,cy\n", columns="source=1,target=2")
    assert edges_of(graph) == [[0, 1], [0, 2], [0, 3]]


def test_a_first_line_between_names_is_told(tmp_path: Path) -> None:
    graph = opened(tmp_path / "e.txt", b"A B\nC D\nE F\n")
    assert any("the first line, 'A B', names columns" in note for note in graph.notes)
    graph = opened(tmp_path / "e.txt", b"source target\nC D\n", columns="source=source,target=target")
    assert any("the first line, 'source target', names columns" in note for note in graph.notes)
    graph = opened(tmp_path / "e.txt", b"# source target\nA B\nB D\n", columns="source=1,target=2")
    assert any("the first line, 'A B', is an edge" in note for note in graph.notes)
    assert edges_of(graph) == [[0, 1], [1, 2]]


@needs_native
@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"0,1\n5,6\n6,7\n", "a header"),
        (b"0,1,2\n5,6,7\n", "a header"),
        (b'"0","1"\n5,6\n6,7\n', "a header"),
        (b"0,2\n5,6\n6,7\n", "a count"),
        (b"9 3\n5 6\n# c\n6 7\n7 8\n", "a count"),
        (b"9 9 2\n5 6 1\n6 7 1\n", "a count"),
        (b"0,3\n5,6\n6,7\n", None),
        (b"0 1\n5 6\n6 7\n", None),
        (b"u,v\n0,1\n5,6\n", None),
    ],
)
def test_a_first_line_of_numbers_may_be_no_edge(content: bytes, what: str | None, tmp_path: Path) -> None:
    notes = [note for note in opened(tmp_path / "e.csv", content).notes if "was read as an edge" in note]
    assert len(notes) == (what is not None)
    assert all(f"but may be {what}" in note for note in notes)


def test_comments_among_names(tmp_path: Path) -> None:
    content = b"# two tags\n#ai,#ml\n#nlp,#ml\n# c, d\n%x,#nlp\n#\n# the end"
    graph = opened(tmp_path / "e.csv", b"source,target\n" + content)
    assert edges_of(graph) == [[0, 1], [2, 1], [3, 2]]
    assert not any("whole" in note for note in graph.notes)
    graph = opened(tmp_path / "e.csv", b"#nlp,#ml\na,b\n", columns="source=1,target=2")
    assert any("'#nlp,#ml' is a comment, no edge" in note for note in graph.notes)


def test_numbers_as_names(tmp_path: Path) -> None:
    graph = opened(tmp_path / "out.e", b"% asym weighted\n1 2\n2 1\n", string_ids=True)
    assert (edges_of(graph), graph.edges.num_nodes) == ([[0, 1], [1, 0]], 2)
    with pytest.raises(InputError, match="nodes of a matrix have numbers, not names"):
        opened(tmp_path / "e.mtx", b"%%MatrixMarket matrix", string_ids=True)
    graph = opened(tmp_path / "e.txt", b"007 7\n7 8\n", string_ids=True)
    assert (edges_of(graph), graph.edges.num_nodes) == ([[0, 1], [1, 2]], 3)


def test_features_of_nodes_with_names(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(3.0).reshape(3, 1))
    (tmp_path / "names.txt").write_text("cy\nann\nbob\n")
    content, features = b"source,target\nann,bob\n", tmp_path / "x.npy"
    graph = opened(tmp_path / "e.csv", content, features=features, names=tmp_path / "names.txt")
    assert (edges_of(graph), graph.edges.num_nodes) == ([[1, 2]], 3)
    with pytest.raises(InputError, match="ids are names, so nothing says which row of features"):
        opened(tmp_path / "e.csv", content, features=features)
    with pytest.raises(InputError, match="line 3 holds id 'eve', which is none of the 3 known names"):
        opened(tmp_path / "e.csv", content + b"eve,ann\n", features=features, names=tmp_path / "names.txt")
    for text, message in (
        ("cy\nann\n", "2 names, expected one for each of 3 nodes"),
        ("cy\nann\ncy\n", "line 3 is 'cy', as line 1"),
        ("cy\n\ncy\n", "line 2 is empty"),
        ("", "is empty, expected the name of a node in each line"),
    ):
        (tmp_path / "names.txt").write_text(text)
        with pytest.raises(InputError, match=rf"names.txt: {message}"):
            opened(tmp_path / "e.csv", content, features=features, names=tmp_path / "names.txt")


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"u,v\na,b\n", {"relabel": True}, "ids are names, which are numbered in any case"),
        (b"u,v\na,b\n", {"first_id": 1}, "first_id is for ids that are numbers"),
        (b"u,v\na,b\n", {"string_ids": False}, "line 2 is 'a,b', expected two ids"),
        (b"u,v\na, \n", {}, "line 2 has an id that is empty"),
        (b"u,v\n1,2\n3,b\n4,5\n", {}, "line 3 is '3,b', .* set string_ids if ids are names"),
        ("0 1\n1 2\n".encode("utf-16"), {}, "holds zero bytes, as text in UTF-16 does; convert it to UTF-8"),
        (b"0 1\n1 \0 2\n", {}, "holds zero bytes"),
        (b"10.0.0.1 10.0.0.2\n", {}, r"first line '10.0.0.1 10.0.0.2' seems to name columns"),
        (b"a b\nb c\n", {"string_ids": True}, "first line 'a b' seems to name columns: .* source=1,target=2"),
    ],
)
def test_names_that_cannot_be(content: bytes, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        opened(tmp_path / "e.csv", content, **options)


# --- ids from 1, matrices, edges without direction --------------------------------------------------------------------


@needs_native
def test_ids_from_1_are_told_and_moved(tmp_path: Path) -> None:
    graph = opened(tmp_path / "e.txt", b"1 2\n2 3\n")
    assert graph.edges.num_nodes == 4
    assert "the smallest id is 1, so node 0 has no edges; if ids start at 1, set first_id=1" in graph.notes
    np.save(tmp_path / "e.npy", np.array([[1, 2], [2, 3]]))
    assert graph.notes == opened(tmp_path / "e.npy").notes
    for path in (tmp_path / "e.txt", tmp_path / "e.npy"):
        graph = opened(path, first_id=1)
        assert (edges_of(graph), graph.edges.num_nodes) == ([[0, 1], [1, 2]], 3)
        assert not any("smallest" in note for note in graph.notes)
        assert edges_of(opened(path, first_id=1, num_nodes=3)) == [[0, 1], [1, 2]]
        with pytest.raises(InputError, match=r"\b3\b"):
            edges_of(opened(path, first_id=1, num_nodes=2))
    for content, options in ((b"1 2\n2 3\n", {}), (b"1 2 5\n2 3 5\n", {"columns": "weight=3"})):
        with pytest.raises(InputError, match="expected ids 0 to 2; if ids start at 1, set first_id=1"):
            opened(tmp_path / "e.txt", content, num_nodes=3, **options)
    assert not any("smallest" in note for note in opened(tmp_path / "e.txt", first_id=0).notes)
    with pytest.raises(InputError, match=r"e.txt: holds id 0, but ids start at 1"):
        opened(tmp_path / "e.txt", b"0 1\n", first_id=1)


MATRIX = "%%MatrixMarket matrix coordinate {} {}\n3 3 {}\n"


@needs_native
@pytest.mark.parametrize(
    ("field", "symmetry", "entries", "edges", "weights"),
    [
        ("pattern", "general", "1 2\n3 3\n", [[0, 1], [2, 2]], None),
        ("pattern", "symmetric", "1 2\n3 3\n", [[0, 1], [1, 0], [2, 2]], None),
        ("integer", "general", "1 2 5\n3 3 -6\n", [[0, 1], [2, 2]], [5.0, -6.0]),
        ("real", "symmetric", "2 1 .5\n3 3 6\n", [[1, 0], [0, 1], [2, 2]], [0.5, 0.5, 6.0]),
        ("real", "skew-symmetric", "2 1 .5\n3 1 6e0\n", [[1, 0], [0, 1], [2, 0], [0, 2]], [0.5, -0.5, 6.0, -6.0]),
    ],
)
def test_matrices(
    field: str, symmetry: str, entries: str, edges: list[list[int]], weights: list[float] | None, tmp_path: Path
) -> None:
    graph = opened(tmp_path / "m.mtx", (MATRIX.format(field, symmetry, 2) + entries).encode())
    assert (edges_of(graph), graph.edges.num_nodes) == (edges, 3)
    assert values_of(graph) == ({} if weights is None else {"edge_weight": weights})
    assert any("node 0 is id 1" in note for note in graph.notes)
    if weights is not None and len(weights) != 2:  # the same as attributes
        graph = opened(tmp_path / "m.mtx", columns="weight=,attributes=3")
        assert values_of(graph) == {"edge_attr": [[weight] for weight in weights]}
    (tmp_path / "m.mtx").rename(tmp_path / "m.txt")
    assert edges_of(opened(tmp_path / "m.txt")) == edges


@needs_native
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1 2\n", "line 1 is not the header of MatrixMarket"),
        ("", "line 1 is not the header|holds no edges"),
        ("%%MatrixMarket matrix array real general\n3 3\n", "a matrix array real"),
        (MATRIX.format("complex", "general", 1), "a matrix coordinate complex"),
        (MATRIX.format("real", "hermitian", 1), "the matrix is hermitian"),
        ("%%MatrixMarket matrix coordinate real general\n3 4 1\n1 1 1\n", "the matrix is 3 x 4, expected a square"),
        ("%%MatrixMarket matrix coordinate real general\n% nothing\n", "has no size"),
        (MATRIX.format("pattern", "general", 3) + "1 1\n2 2\n", "holds 2 edges, but its first lines say 3"),
        (MATRIX.format("real", "general", 1) + "1 1 1\n2 2 2\n", "holds 2 edges, but its first lines say 1"),
        (MATRIX.format("pattern", "general", 1) + "4 1\n", "line 3 has id 4"),
        (MATRIX.format("real", "general", 1) + "0 1 1\n", r"line 3 holds ids \(0, 1\), expected ids 1 to 3"),
    ],
)
def test_matrices_that_are_refused(content: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        opened(tmp_path / "m.mtx", content.encode())


@needs_native
def test_konect_says_if_edges_have_a_direction(tmp_path: Path) -> None:
    graph = opened(tmp_path / "out.friends", b"% sym unweighted\n1 2\n2 2\n")
    assert edges_of(graph) == [[0, 1], [1, 0], [1, 1]]
    assert any("no direction, so the reverse of every edge was added" in note for note in graph.notes)
    with pytest.raises(InputError, match=r"out.both: is bipartite"):
        opened(tmp_path / "out.both", b"% bip unweighted\n1 2\n")


# --- several files ----------------------------------------------------------------------------------------------------


@needs_native
def test_several_files_have_the_same_columns(tmp_path: Path) -> None:
    folder = tmp_path / "edges"
    folder.mkdir()
    (folder / "b.csv").write_text("source,target\n2,3\n")
    (folder / "a.csv").write_text("source,target\n0,1\n")
    (folder / "c.csv").write_text("")
    first = GraphFiles(edges=folder).fingerprint()
    assert edges_of(opened(folder)) == [[0, 1], [2, 3]]
    (folder / "d.csv").write_text("4,5\n")  # as `split` leaves it
    with pytest.raises(InputError, match=r"d.csv: its columns are 1, 2, but those of .*a.csv are source, target"):
        opened(folder)
    assert GraphFiles(edges=folder).fingerprint() != first
    (folder / "d.csv").write_text("source,target,w\n4,5,6\n")
    with pytest.raises(InputError, match=r"d.csv: its columns are source, target, w"):
        opened(folder)
    (folder / "d.csv").write_text("source,target\nann,bob\n")
    with pytest.raises(InputError, match=r"d.csv: line 2 is 'ann,bob', expected two ids"):
        opened(folder)
    (folder / "d.csv").rename(folder / "README.md")
    with pytest.raises(InputError, match=r"README.md: unknown type of file"):
        opened(folder)
    assert edges_of(opened(folder / "*.csv")) == [[0, 1], [2, 3]]
    with pytest.raises(InputError, match=r"\*.tsv: no file matches"):
        opened(folder / "*.tsv")


@needs_native
def test_folders_in_a_folder(tmp_path: Path) -> None:
    for name in ("day=2/part-0", "day=1/part-0", "day=1/_temporary/part-1", ".hidden/part-0"):
        (tmp_path / "edges" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "edges" / name).write_text(f"0 {name[4]}\n")
    assert edges_of(opened(tmp_path / "edges", relabel=False)) == [[0, 1], [0, 2]]
    (tmp_path / "empty").mkdir()
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", np.zeros((2, 1), int))
    with pytest.raises(InputError, match=r"has no edge_index\.npy"):
        opened(tmp_path / "empty")
    with pytest.raises(InputError, match=r"a\.npy: one of several files"):
        opened(tmp_path / "*.npy")


def test_a_file_of_edges_is_no_dataset(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("0,1\n")
    with pytest.raises(InputError, match=r"e.csv' is a file; partition it with pygdist partition --input="):
        load_graph(tmp_path / "e.csv")


def test_parquet_files_of_other_types_are_refused(tmp_path: Path) -> None:
    (tmp_path / "edges").mkdir()
    for number, kind in enumerate((pyarrow.float32(), pyarrow.float64())):
        table = pyarrow.table({"src": [0], "dst": [1], "w": pyarrow.array([0.1], kind)})
        parquet.write_table(table, tmp_path / "edges" / f"{number}.parquet")
    with pytest.raises(InputError, match=r"1.parquet: column w holds double, but in .*0.parquet it holds float"):
        opened(tmp_path / "edges")


# --- files that are cut -----------------------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("values", [b"", b" 0.5"], ids=["native", "pyarrow"])
def test_a_cut_line_is_refused(values: bytes, tmp_path: Path) -> None:
    columns = "weight=3" if values else None
    lines = b"0 1%b\n10 11%b\n12 13%b" % (values, values, values)
    with pytest.raises(
        InputError, match=r"e.txt: the last line, '12 13.*', has no end .* its last cell may be cut; .* end the line"
    ):
        opened(tmp_path / "e.txt", lines, columns=columns, relabel=False)
    graph = opened(tmp_path / "e.txt", lines + b"\n", columns=columns, relabel=False)
    assert not any("whole" in note for note in graph.notes)
    graph = opened(tmp_path / "e.txt", lines + b"\n# the end", columns=columns, relabel=False)
    assert not any("whole" in note for note in graph.notes)
    with pytest.raises(InputError, match=r"line 3 is '12', .* this last line has no end .newline.: is the file whole"):
        opened(tmp_path / "e.txt", lines[: -3 - len(values)], columns=columns)


@needs_native
@pytest.mark.parametrize(
    "comment", [b"# Directed graph\n# Nodes: 9 Edges: 5\n", b"% asym unweighted\n% 5 9 9\n"], ids=["SNAP", "KONECT"]
)
def test_fewer_edges_than_a_file_says_are_told(comment: bytes, tmp_path: Path) -> None:
    graph = opened(tmp_path / "e.txt", comment + b"1 2\n2 3\n3 4\n")
    assert any("holds 3 edges, but its first lines say 5: is the file whole?" in note for note in graph.notes)
    graph = opened(tmp_path / "e.txt", comment + b"1 2\n" * 5)
    assert not any("whole" in note for note in graph.notes)


@needs_native
@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2", ".xz", ".lz4"])
def test_compressed_files_that_are_cut(suffix: str, tmp_path: Path) -> None:
    text = b"\n".join(b"%d %d" % (number, number + 1) for number in range(1000))  # the last line has no end
    pack: dict[str, Callable[[bytes], bytes]] = {
        ".gz": gzip.compress,
        ".bz2": bz2.compress,
        ".xz": lzma.compress,
        ".zst": lambda text: _packed(text, "zstd"),
        ".lz4": lambda text: _packed(text, "lz4"),
    }
    packed = pack[suffix](text)
    assert edges_of(opened(tmp_path / f"e.txt{suffix}", packed))[-1] == [999, 1000]
    for cut in (5, len(packed) // 2, len(packed) - 2):
        with pytest.raises(InputError, match=rf"e.txt{suffix}: could not be read"):
            opened(tmp_path / f"e.txt{suffix}", packed[:cut])


def _packed(text: bytes, codec: str) -> bytes:
    out = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(out, codec) as stream:
        stream.write(text)
    return bytes(out.getvalue())


# --- without pyarrow --------------------------------------------------------------------------------------------------


@needs_native
def test_what_needs_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find, load_module = importlib.util.find_spec, builtins.__import__

    def absent(name: str, *args: Any) -> Any:
        return None if name == "pyarrow" else find(name, *args)

    def no_import(name: str, *args: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "pyarrow":
            raise ModuleNotFoundError(name)
        return load_module(name, *args, **more)

    monkeypatch.setattr(importlib.util, "find_spec", absent)
    monkeypatch.setattr(builtins, "__import__", no_import)
    for name, content, reason in (
        ("e.csv", b"u,v,w\n0,1,1\n", "weights and attributes"),
        ("e.csv", b"u,v\na,b\n", "names as ids"),
        ("e.csv", b"0;1\n", "the separator ;"),
        ("e.csv", b"id,u,v\n0,1,2\n", "columns other than the first two"),
        ("e.txt.zst", b"", "reading .zst"),
        ("e.parquet", b"", "reading Parquet"),
    ):
        with pytest.raises(InputError, match=rf"{name}: {reason}: needs pyarrow: pip install 'pygdist.parquet.'"):
            opened(tmp_path / name, content)
    for name, content in (
        ("e.csv", b"u,v,w\n0,1,1\n"),
        ("e.txt.gz", gzip.compress(b"% c\n0 1\n")),
        ("m.mtx", MATRIX.format("pattern", "general", 1).encode() + b"1 2\n"),
    ):
        assert edges_of(opened(tmp_path / name, content, columns="weight=")) == [[0, 1]]
    with pytest.raises(InputError, match="line 2 is '0,1', expected two ids"):
        opened(tmp_path / "e.csv", b"u,v,w\n0,1\n", columns="weight=")
