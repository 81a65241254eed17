"""Tables of edges name their ends in many ways, and in any order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pygdist.errors import InputError
from pygdist.graph.streams.columns import choose, ends_of, wanted_columns
from pygdist.graph.streams.edge_text import open_text
from pygdist.graph.streams.tables import ANY_ID
from pygdist.native import load


def read_text(path: Path, block_bytes: int = 1 << 24) -> Iterator[NDArray[np.int64]]:
    """Read the edges of a list of numbers in blocks."""
    table = open_text(path, wanted={}, block_bytes=block_bytes)
    assert table is not None
    yield from (rows.ends for rows in table.read(None, ANY_ID))


needs_native = pytest.mark.skipif(load() is None, reason="text is read by the native library")


@pytest.mark.parametrize(
    ("names", "places"),
    [
        ("source target", (0, 1)),
        ("target source", (1, 0)),
        ("EdgeId Source Target", (1, 2)),
        ("edge_id src_id dst_id", (1, 2)),
        ("FromNodeId ToNodeId", (0, 1)),
        ("id_1 id_2", (0, 1)),
        ("node2 node1", (1, 0)),
        ("weight u v", (1, 2)),
        ("'src' 'dst' time", (0, 1)),
        ("citing cited", (0, 1)),
        ("s t", (0, 1)),
        ("a b source target", (2, 3)),
        ("start end source target", (2, 3)),
        ("u v i j", None),
        ("u v a b", (0, 1)),
        ("timestamp start_node end_node", (1, 2)),
        ("x y", None),
        ("id name", None),
        ("source target source_id target_id", None),  # which?
        ("source weight", None),
        ("start_time end_time", None),
        ("id_1 id_2 start end", None),  # of a time?
        ("node1 node2 from to", None),
        ("from to 1 2", None),
        ("from to weight", (0, 1)),
    ],
)
def test_ends_are_found_by_their_names(names: str, places: tuple[int, int] | None) -> None:
    assert ends_of(names.split()) == places


@needs_native
@pytest.mark.parametrize(
    ("text", "edges"),
    [
        ("EdgeId,Source,Target\n0,3,4\n1,4,5\n", [[3, 4], [4, 5]]),
        ("target,source\n1,0\n2,0\n", [[0, 1], [0, 2]]),
        (",source,target\n0,7,8\n1,9,7\n", [[7, 8], [9, 7]]),
        ("# a comment\nid weight from to\n# another\n5 0.5 1 2\n6 0.25 2 3\n", [[1, 2], [2, 3]]),
        ("0 1\n1 2 # the last\n", [[0, 1], [1, 2]]),
    ],
)
@pytest.mark.parametrize("block_bytes", [64, 1 << 16])
def test_edges_are_read_from_the_columns_that_names_tell(
    text: str, edges: list[list[int]], block_bytes: int, tmp_path: Path
) -> None:
    path = tmp_path / "edges.csv"
    path.write_text(text)
    read = [edge for chunk in read_text(path, block_bytes=block_bytes) for edge in chunk.T.tolist()]
    assert read == edges


@needs_native
def test_names_that_tell_no_ends_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "edges.csv"
    path.write_text("paper,author\n0,1\n")
    with pytest.raises(InputError, match="'paper,author' seems to name columns: which are the sources"):
        list(read_text(path))


@needs_native
def test_a_line_of_too_few_columns_is_told_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "edges.csv"
    for line in ("1,x", "1,3", "1,2,3,4"):  # the second would be an edge
        path.write_text(f"id,source,target\n0,1,2\n{line}\n")
        with pytest.raises(InputError, match=f"line 3 is '{line}'"):
            list(read_text(path))


@pytest.mark.parametrize(
    ("columns", "wanted"),
    [
        (None, {}),
        ("source=a, target=b,weight=", {"source": ["a"], "target": ["b"], "weight": []}),
        ("attributes=x+y", {"attributes": ["x", "y"]}),
        ({"attributes": ["x,y", "z"], "weight": "w"}, {"attributes": ["x,y", "z"], "weight": ["w"]}),
        ({"source": 1, "target": 2}, {"source": ["1"], "target": ["2"]}),
    ],
)
def test_what_the_user_says_of_columns(columns: Any, wanted: dict[str, list[str]]) -> None:
    assert wanted_columns(columns) == wanted


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("weights=w", "'weights' is unknown, expected source=NAME"),
        ("w", "'w' has no value"),
        ("source=a", "name both source and target"),
        ("source=a,target=", "name both source and target"),
        ("weight=a,weight=b", "says one thing twice"),
        ({"weight": ["a", "b"]}, "weight is one column, not a, b"),
    ],
)
def test_what_the_user_cannot_say(columns: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        wanted_columns(columns)


@pytest.mark.parametrize(
    ("names", "columns", "weight", "attributes"),
    [
        ("source target weight", None, 2, ()),
        ("Weight u v", None, 0, ()),
        ("source target edge_weight time", "attributes=time", 2, (3,)),
        ("source target a b", "attributes=b+a", None, (3, 2)),
        ("source target src dst w", "attributes=src+dst", 4, (2, 3)),
        ("source target w weight", None, None, ()),  # which?
        ("source target w weight", "weight=w", 2, ()),
        ("source target weight", "weight=", None, ()),
        ("source target weight", "attributes=weight", None, (2,)),
        ("source target cost 1", "weight=3", 2, ()),
        ("source target cost 1", "weight=1", 3, ()),
    ],
)
def test_weights_and_attributes(
    names: str, columns: str | None, weight: int | None, attributes: tuple[int, ...]
) -> None:
    found = choose("e.csv", names.split(), wanted_columns(columns), named=True)
    assert found is not None
    assert (found.ends, found.weight, found.attributes) == ((1, 2) if weight == 0 else (0, 1), weight, attributes)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("weight=cost", "e.csv: has no column 'cost'; its columns are source, target, w, w"),
        ("weight=5", "has no column '5'"),
        ("weight=0", "has no column '0'"),
        ("weight=w", "2 columns are called 'w'; say which by its number, from 1"),
        ("source=1,target=2,weight=source", "column source is read twice"),
        ("attributes=3+3", "column w is read twice"),
    ],
)
def test_columns_that_are_not_there(columns: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        choose("e.csv", ["source", "target", "w", "w"], wanted_columns(columns), named=True)
