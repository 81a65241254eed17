"""Stores that were forged, with every checksum right: refused when they are opened, in one line that names the file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments.reliability.malformed.case import Case, write_template
from experiments.reliability.malformed.stores import array_cases, forge, meta_cases
from pygdist.cli import main
from pygdist.errors import InputError
from pygdist.graph import Shard, open_part, read_meta, write_store
from pygdist.graph.store.structure import check_meta, check_values
from tests.graph.store.test_meta import random_graph


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of each placement in one part, and one of each in three parts."""
    folder = tmp_path_factory.mktemp("forged")
    write_template(folder)
    for name, hops in (("three", 1), ("three-replicas", 2)):
        part, data = np.arange(40) % 3, random_graph(40, 120)
        options: dict[str, Any] = {"num_parts": 3, "method": "given", "arguments": {}, "num_hops": hops}
        write_store(data, part, folder / name, **options)
    options |= {"num_hops": 1, "placement": "edges", "edge_part": np.arange(120) % 3}
    write_store(data, part, folder / "three-edges", **options)
    return folder


@pytest.fixture
def folder(template: Path, tmp_path: Path) -> Path:
    shutil.copytree(template, tmp_path / "run")
    return tmp_path / "run"


def _refused(case: Case, folder: Path) -> str:
    case.prepare(folder)
    place = folder / ("replicas" if "replicas" in " ".join(case.arguments) else "store")
    with pytest.raises(InputError) as error:
        Shard.load(place, 0)
    text = str(error.value)
    assert text.startswith(str(place))
    assert "\n" not in text
    assert len(text) < 700 + len(str(place))
    return text


META = list(meta_cases())
ARRAYS = [case for case in array_cases() if "array" in case.kind or "replicas" in case.kind]


@pytest.mark.parametrize("cases", [META[i::8] for i in range(8)], ids=[f"{i}-of-8" for i in range(8)])
def test_meta(cases: list[Case], template: Path, tmp_path: Path) -> None:
    for number, case in enumerate(cases):
        shutil.copytree(template / "store", tmp_path / str(number) / "store")
        assert "meta.json" in _refused(case, tmp_path / str(number)), case.name


@pytest.mark.parametrize("case", ARRAYS, ids=[f"{case.kind}: {case.name}" for case in ARRAYS])
def test_arrays(case: Case, folder: Path) -> None:
    assert any(word in _refused(case, folder) for word in case.words)


@pytest.mark.parametrize("store", ["three", "three-replicas", "three-edges"])
def test_parts_of_sound_stores_are_opened(store: str, template: Path) -> None:
    assert [len(open_part(template / store, part)["y"]) for part in range(3)] == [14, 13, 13]


def test_plans_of_parts_fit_each_other(folder: Path) -> None:
    place = folder / "three"
    counts, index = (np.load(place / "part_0" / f"{name}.npy") for name in ("send_counts", "send_index"))
    forge(place, "send_counts", counts - np.array([0, 1, 0]))
    forge(place, "send_index", index[1:])
    with pytest.raises(InputError, match=r"part_0/send_counts.npy: differs from recv_counts of the parts"):
        open_part(place, 0)


def test_rows_of_a_hop_have_sources_within_the_next(folder: Path) -> None:
    place = folder / "three-replicas"
    src, n_id = (np.load(place / "part_0" / f"{name}.npy") for name in ("src", "n_id"))
    src[0] = len(n_id) - 1  # two hops away from an owned row
    forge(place, "src", src)
    with pytest.raises(InputError, match=r"part_0/src.npy: holds \d+ at a row below 14"):
        open_part(place, 0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("has_in", "differs from up_counts of the parts"),
        ("send_has_in", "differs from up_counts of the parts"),
        ("has_out", "differs from down_counts of the parts"),
        ("send_has_out", "differs from down_counts of the parts"),
    ],
)
def test_marks_of_leaves_fit_those_of_other_parts(name: str, said: str, folder: Path) -> None:
    place = folder / "three-edges"
    marks = np.load(place / "part_0" / f"{name}.npy")
    forge(place, name, np.concatenate([~marks[:1], marks[1:]]))
    with pytest.raises(InputError, match=f"part_0/{name}.npy: {said}"):
        open_part(place, 0)
    forge(place, name, marks[1:])
    with pytest.raises(InputError, match=f"part_0/{name}.npy: has shape"):
        open_part(place, 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda part: part.pop("num_split"), "'parts.0..num_split' is missing"),
        (lambda part: part["files"].pop("has_in"), "'has_in' is missing"),
        (lambda part: part["up_counts"].pop(), "up_counts: expected one number for each part"),
    ],
)
def test_entries_of_split_nodes_are_checked(change: Any, said: str, folder: Path) -> None:
    meta = read_meta(folder / "three-edges")
    change(meta["parts"][0])
    with pytest.raises(InputError, match=said):
        check_meta(meta, folder / "three-edges" / "meta.json")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([], "files is a list, expected the size and checksum of the nodes' ids"),
        ({"../ids": {"bytes": 1, "crc32": ""}}, "files is keys and values, expected the size"),
        ({"ids": {"bytes": 1}}, "'files.ids.crc32' is missing"),
        ({"ids": {"bytes": 1, "crc32": "", "dtype": "int64", "shape": [7]}}, "files.ids.shape is a list, expected"),
    ],
)
def test_the_entry_of_ids_is_checked(files: Any, said: str, folder: Path) -> None:
    with pytest.raises(InputError, match=said):
        check_meta(read_meta(folder / "three") | {"files": files}, folder / "three" / "meta.json")


def test_a_part_that_is_opened_again_is_not_read(folder: Path) -> None:
    src = np.load(folder / "store" / "part_0" / "src.npy")
    src[0] = -1
    forge(folder / "store", "src", src)
    assert open_part(folder / "store", 0, verify=False, meta=read_meta(folder / "store"))["src"][0] == -1


def test_the_command_reads_every_part(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(folder / "three-replicas")]) == 0
    assert "40 nodes, 120 edges in 3 parts, all files" in capsys.readouterr().out
    indptr = np.load(folder / "three" / "part_2" / "indptr.npy")
    indptr[3] = 10**9
    forge(folder / "three", "indptr", indptr, part=2)
    assert main(["check", str(folder / "three")]) == 2
    assert "part_2/indptr.npy: descends at row 4" in capsys.readouterr().err


@pytest.mark.parametrize("names", [False, True])
def test_the_command_reads_the_ids(names: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edges, parts = tmp_path / "edges.csv", tmp_path / "parts"
    edges.write_text("source,target\n" + "".join(f"{'n' * names}{5 * i},{'n' * names}{5 * i + 5}\n" for i in range(9)))
    features = tmp_path / "x.npy"
    np.save(features, np.zeros((10, 2), dtype=np.float32))
    (tmp_path / "names").write_text("".join(f"n{5 * i}\n" for i in range(10)))
    numbered = [f"--features={features}", f"--names={tmp_path / 'names'}"] if names else ["--relabel=true"]
    assert main(["partition", f"--input={edges}", *numbered, "--parts=1", f"--out={parts}"]) == 0
    assert main(["check", str(parts)]) == 0
    ids = parts / ("ids.txt" if names else "ids.npy")
    content = ids.read_bytes()
    ids.write_bytes(content[:-2] + b"77")
    assert main(["check", str(parts)]) == 2
    assert f"{ids}: is damaged, its checksum differs" in capsys.readouterr().err
    ids.unlink()
    assert main(["check", str(parts)]) == 2
    assert f"{ids}: is missing" in capsys.readouterr().err


def test_more_hops_than_any_model_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"num_hops is 10000000000000, expected 1 to 1000"):
        write_store(
            random_graph(9, 9), np.zeros(9, dtype=int), tmp_path, num_parts=1, method="a", arguments={}, num_hops=10**13
        )


@pytest.mark.parametrize(
    ("store", "name", "value", "said"),
    [
        ("three", "x", np.inf, "1 of 13 nodes hold NaN or infinite values, the first is node 3"),
        ("three-replicas", "x", np.nan, "nodes hold NaN or infinite values, the first is node 3"),
        ("three-edges", "edge_weight", -np.inf, "edges hold NaN or infinite values, the first is edge 3"),
    ],
)
def test_values_that_are_not_finite_are_found_by_check(
    store: str, name: str, value: float, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(folder / store)]) == 0
    array = np.load(folder / store / "part_1" / f"{name}.npy")
    array[(3, *[0] * (array.ndim - 1))] = value
    forge(folder / store, name, array, part=1)
    assert main(["check", str(folder / store)]) == 2
    error = capsys.readouterr().err
    assert f"{store}/part_1/{name}.npy: " in error
    assert said in error


def test_label_matrices_and_values_beyond_float32_are_found_by_check(tmp_path: Path) -> None:
    data = random_graph(40, 120)
    data.y, data.num_classes = (torch.arange(80) % 2).float().reshape(40, 2), 2
    data.x = data.x.double()
    options: dict[str, Any] = {"num_parts": 1, "method": "given", "arguments": {}}
    write_store(data, np.zeros(40, dtype=np.int64), tmp_path / "store", **options)
    folder = tmp_path / "store" / "part_0"
    meta = read_meta(tmp_path / "store")
    check_values(meta, 0, folder)
    wrong = (("x", 1e39, "values above 3.4e38"), ("y", np.nan, "NaN in some"), ("y", np.inf, "0 to 1"))
    for name, value, said in wrong:
        array = np.load(folder / f"{name}.npy")
        changed = array.copy()
        changed[2, 0] = value
        np.save(folder / f"{name}.npy", changed)
        with pytest.raises(InputError, match=rf"{name}.npy: .*{said}"):
            check_values(meta, 0, folder)
        np.save(folder / f"{name}.npy", array)
    with pytest.raises(InputError, match=r"x.npy: holds .* which overflows in products"):
        check_values(meta, 0, folder, largest=1e-9)
