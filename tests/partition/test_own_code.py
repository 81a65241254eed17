"""A partitioner of a notebook that changes under its name is another one, to caches and folders too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pygdist.errors import InputError
from pygdist.graph import prepare
from pygdist.partition import ChunkPartitioner, Partitioner, partition_graph
from pygdist.partition.own_code import own_code
from pygdist.partition.run import cached_store
from tests.lightning.runs import graph as small_graph

_CELL = """
import numpy as np
from pygdist.partition import Partitioner

WEIGHT = 1

def numbers(edges):
    return np.arange(edges.num_nodes, dtype=np.int32)

class Mine(Partitioner):
    step = 1
    def assign(self, edges, num_parts):
        order = [one for one in sorted([0])]
        return (numbers(edges) * WEIGHT // self.step) % num_parts
"""


def _mine(cell: str) -> Partitioner:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(cell, names)
    partitioner: Partitioner = names["Mine"]()
    return partitioner


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("% num_parts", "% num_parts * 1"),
        ("step = 1", "step = 2"),
        ("WEIGHT = 1", "WEIGHT = 2"),
        ("np.int32)", "np.int32)[::-1]"),
        ("one for one in", "2 * one for one in"),
    ],
    ids=["method", "attribute", "global", "function", "inner function"],
)
def test_a_change_of_the_code_is_seen(old: str, new: str) -> None:
    assert old in _CELL
    assert own_code(type(_mine(_CELL))) == own_code(type(_mine("# a comment\n" + _CELL)))
    assert own_code(type(_mine(_CELL))) != own_code(type(_mine(_CELL.replace(old, new))))


def test_classes_of_modules_are_known_by_their_name() -> None:
    assert own_code(ChunkPartitioner) == ""


def test_a_changed_class_is_partitioned_again(tmp_path: Path) -> None:
    data, notes = prepare(small_graph())
    first = cached_store(data, notes, tmp_path, num_parts=2, partitioner=_mine(_CELL))
    assert cached_store(data, notes, tmp_path, num_parts=2, partitioner=_mine(_CELL)) == first
    changed = _mine(_CELL.replace("step = 1", "step = 2"))
    assert cached_store(data, notes, tmp_path, num_parts=2, partitioner=changed) != first
    partition_graph(data, tmp_path / "parts", num_parts=2, partitioner=_mine(_CELL))
    with pytest.raises(InputError, match=r"holds another store \(code differ\)"):
        partition_graph(data, tmp_path / "parts", num_parts=2, partitioner=changed)
