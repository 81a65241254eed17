"""A partitioner of a notebook that changes under its name is another one, to caches and folders too."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_geometric.data import Data

from pygdist.errors import InputError
from pygdist.graph import prepare, read_meta
from pygdist.partition import Partitioner, partition_graph
from pygdist.partition.base import resolve_partitioner
from pygdist.partition.run import cached_store
from tests.lightning.runs import graph as small_graph

_CELL = """
from functools import cached_property, lru_cache
import numpy as np
from pygdist.partition import Partitioner

WEIGHTS = {"all": 0}

class Helper:
    def shift(self):
        return 0

@lru_cache
def cached():
    return 0

def outer():
    shift = 0
    def inner(self):
        return shift
    return inner

class Mine(Partitioner):
    from_list = [0]
    from_array = np.array([0])
    from_closure = outer()
    @cached_property
    def from_property(self):
        return 0
    def assign(self, edges, num_parts):
        assert "number" in {"number", "of", "names"}
        shift = WEIGHTS["all"] + Helper().shift() + cached()
        shift += self.from_list[0] + self.from_array[0] + self.from_closure() + self.from_property
        return (np.arange(edges.num_nodes, dtype=np.int32) + np.int32(shift)) % num_parts
    def arguments(self):
        return {}
"""


def _mine(cell: str) -> Partitioner:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(cell, names)
    partitioner: Partitioner = names["Mine"]()
    return partitioner


def _store(data: Data, notes: list[str], cache: Path, partitioner: Partitioner) -> Path:
    return cached_store(data, notes, cache, num_parts=2, partitioner=partitioner)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("% num_parts", "// 2 % num_parts"),
        ("from_list = [0]", "from_list = [1]"),
        ("np.array([0])", "np.array([1])"),
        ('"all": 0', '"all": 1'),
        ("def shift(self):\n        return 0", "def shift(self):\n        return 1"),
        ("def cached():\n    return 0", "def cached():\n    return 1"),
        ("shift = 0\n    def inner", "shift = 1\n    def inner"),
        ("from_property(self):\n        return 0", "from_property(self):\n        return 1"),
    ],
    ids=["method", "list", "array", "global", "class", "cached function", "closure", "cached property"],
)
def test_a_changed_class_is_partitioned_again_and_another_one_is_not(old: str, new: str, tmp_path: Path) -> None:
    assert old in _CELL
    data, notes = prepare(small_graph())
    first = _store(data, notes, tmp_path, _mine(_CELL))
    changed = _store(data, notes, tmp_path, _mine(_CELL.replace(old, new)))
    assert _store(data, notes, tmp_path, _mine("# a comment\n" + _CELL)) == first
    assert read_meta(changed)["parts"] != read_meta(first)["parts"]
    assert sorted(tmp_path.iterdir()) == sorted([first, changed]), "nothing is left of the parts that were compared"


def test_a_folder_keeps_the_parts_of_a_class_and_refuses_those_of_a_changed_one(tmp_path: Path) -> None:
    data, _ = prepare(small_graph())
    place, changed = tmp_path / "parts", _mine(_CELL.replace("list = [0]", "list = [1]"))
    meta = partition_graph(data, place, num_parts=2, partitioner=_mine(_CELL))
    assert partition_graph(data, place, num_parts=2, partitioner=_mine(_CELL)) == meta
    with pytest.raises(InputError, match=r"holds another store \(parts differ\)"):
        partition_graph(data, place, num_parts=2, partitioner=changed)
    assert list(tmp_path.iterdir()) == [place]
    assert partition_graph(data, place, num_parts=2, partitioner=changed, overwrite=True)["parts"] != meta["parts"]


class _OfModule(Partitioner):
    runs = 0

    def assign(self, edges: Any, num_parts: int) -> Any:
        type(self).runs += 1
        return np.arange(edges.num_nodes, dtype=np.int32) % num_parts


def test_classes_of_modules_are_known_by_their_name_and_run_once(tmp_path: Path) -> None:
    data, notes = prepare(small_graph())
    first = _store(data, notes, tmp_path, _OfModule())
    assert _store(data, notes, tmp_path, _OfModule()) == first
    assert _OfModule.runs == 1


def test_classes_of_a_changed_module_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    data, notes = prepare(small_graph())
    places = []
    for shift in (0, 0, 1):
        module = tmp_path / "a_partitioner_of_mine.py"
        module.write_text(_CELL.replace("from_list = [0]", f"from_list = [{shift}]"))
        monkeypatch.delitem(sys.modules, module.stem, raising=False)
        importlib.invalidate_caches()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)  # as its time and size are those of before
        places.append(_store(data, notes, tmp_path / "cache", resolve_partitioner(f"{module.stem}.Mine")))
    assert places[0] == places[1]
    assert places[2] != places[0]
    assert read_meta(places[2])["parts"] != read_meta(places[0])["parts"]
