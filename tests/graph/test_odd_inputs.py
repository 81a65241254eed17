"""Hundreds of odd and malformed inputs, drawn from seeds: each ends in one line that names the fault, or is right."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pygdist.errors import InputError
from pygdist.graph import GraphFiles, Shard, load_graph, prepare, read_meta, write_store
from pygdist.native import load
from pygdist.partition import partition_graph
from tests.graph.odd_files import File, arrays, binary, broken, damage, text
from tests.graph.odd_graphs import MASKS, Case, categories_differ, differences, heterogeneous, homogeneous

FIELDS = ("x", "y", "edge_index", "edge_weight", "edge_attr", "edge_type", *MASKS)


def _loaded(case: Case) -> tuple[dict[str, Any], Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data, _ = prepare(load_graph(case.data, **case.load), **case.prepare)
    fields = {name: value.numpy() if isinstance(value := data.get(name), Tensor) else None for name in FIELDS}
    return fields, data


def _stored(data: Any, folder: Path) -> dict[str, Any]:
    """Cut a graph into three parts, and put these together again."""
    num_nodes = data.x.size(0)
    owner = np.arange(num_nodes) * 7 % 3
    write_store(data, owner, folder, num_parts=3, method="test", arguments={})
    return _together(folder)


def _together(folder: Path) -> dict[str, Any]:
    """Put the parts of a store together."""
    shards = [Shard.load(folder, part) for part in range(read_meta(folder)["num_parts"])]
    fields: dict[str, Any] = dict.fromkeys(FIELDS)
    ends = [(one.n_id[one.adjacency[0].long()], one.owned_id[one.adjacency[1].long()]) for one in shards]
    edge_index = torch.cat([torch.stack(pair) for pair in ends], dim=1)
    for name, order in (
        *((name, torch.cat([one.owned_id for one in shards])) for name in ("x", "y", *MASKS)),
        *((name, torch.cat([one.e_id for one in shards])) for name in ("edge_weight", "edge_attr", "edge_type")),
    ):
        values = [getattr(one, name) for one in shards]
        if values[0] is not None:
            fields[name] = torch.cat(values)[order.argsort()].numpy()
    order = torch.cat([one.e_id for one in shards]).argsort()
    return {**fields, "edge_index": edge_index[:, order].numpy()}


def problem_of(case: Case, run: Callable[[], list[str]]) -> str:
    """Run a case; return what is wrong with the outcome, or nothing."""
    try:
        wrong = run()
    except InputError as error:
        text = str(error)
        if not case.fault:
            return f"refused: {text}"
        named = any(re.search(rf"(?<!\w){re.escape(name)}(?![a-z0-9])", text) for name in case.fault)
        return "" if named and "\n" not in text else f"does not name {case.fault} in one line: {text}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "; ".join(wrong) if not case.fault else f"accepted, with a fault in {case.fault}"


def _check(make: Callable[[int], Case], seeds: range, folder: Path) -> None:
    problems = []
    for seed in seeds:
        case = make(seed)

        def run(case: Case = case, seed: int = seed) -> list[str]:
            fields, data = _loaded(case)
            wrong = differences(fields, data.num_classes, case)
            if not wrong and seed % 6 == 1:
                wrong = [f"in parts: {one}" for one in differences(_stored(data, folder / str(seed)), 0, case)]
            return wrong

        if problem := problem_of(case, run):
            problems.append(f"{make.__name__}({seed}) [{'; '.join(case.steps)}]: {problem}")
    assert not problems, f"{len(problems)} of {len(seeds)}:\n" + "\n".join(problems[:20])


@pytest.mark.parametrize("start", range(0, 240, 80))
def test_graphs_in_memory(start: int, tmp_path: Path) -> None:
    _check(homogeneous, range(start, start + 80), tmp_path)


def test_graphs_of_several_types(tmp_path: Path) -> None:
    _check(heterogeneous, range(60), tmp_path)


# --- files ------------------------------------------------------------------------------------------------------------


def _problem_of_file(file: File, scratch: Path) -> str:
    """Read a file of edges; return what is wrong with the outcome, or nothing."""
    scratch.mkdir()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = GraphFiles(edges=file.path, num_nodes=file.num_nodes).open(scratch)
            found = np.concatenate(list(graph.edges.chunks()), axis=1)
    except InputError as error:
        text = str(error)
        if file.must == "right":
            return f"refused: {text}"
        named = file.path.name in text or (file.num_nodes is not None and "num_nodes" in text)
        return "" if named and "\n" not in text else f"is not one line that names the file: {text!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if file.must == "refused":
        return f"accepted, as {found.tolist()}"
    found = found if graph.ids is None else graph.ids[found]
    return "" if np.array_equal(found, file.edges) else f"is {found.tolist()}, not {file.edges.tolist()}"


@pytest.mark.skipif(load() is None, reason="text is read by the native library")
@pytest.mark.parametrize("make", [text, binary, broken])
def test_files_of_edges(make: Callable[[int, Path], File], tmp_path: Path) -> None:
    if make is binary:
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        pytest.importorskip("pandas", reason="pandas is not installed")
    problems, seeds = [], range({text: 100, binary: 60, broken: 20}[make])
    for seed in seeds:
        file = make(seed, tmp_path)
        if problem := _problem_of_file(file, tmp_path / f"scratch-{seed}"):
            problems.append(f"{make.__name__}({seed}) [{file.how}]: {problem}")
    assert not problems, f"{len(problems)} of {len(seeds)}:\n" + "\n".join(problems[:20])


def _opened(folder: Path, scratch: Path) -> dict[str, Any]:
    """Read a folder of arrays as a stream, in the types that a store gets."""
    scratch.mkdir()
    graph = GraphFiles(edges=folder).open(scratch)
    fields: dict[str, Any] = dict.fromkeys(FIELDS) | {
        name: np.asarray(value).astype(graph.dtypes[name]) for name, value in graph.fields.items()
    }
    chunks = [*graph.edges.chunks()] or [np.zeros((2, 0), dtype=np.int64)]
    return {**fields, "edge_index": np.concatenate(chunks, axis=1)}


@pytest.mark.parametrize("option", ["remove_self_loops", "remove_duplicates", "symmetrize"])
def test_changed_edges_of_folders(option: str, tmp_path: Path) -> None:
    problems = []
    for seed in range(1, 90, 3):
        folder = tmp_path / str(seed)
        case = arrays(seed, folder)
        # streams keep one edge of each source and target, whatever its type
        for name in ["edge_type"] if case.truth.values.pop("edge_type", None) is not None else []:
            (folder / f"{name}.npy").unlink()
        options = {option: True} | ({"remove_duplicates": True} if option == "symmetrize" else {})
        case.prepare = options
        if option != "remove_self_loops" and categories_differ(case):
            case.fault = ("edge_attr",)

        def run(case: Case = case, folder: Path = folder) -> list[str]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                files = GraphFiles(edges=folder, **{option: True})
                partition_graph(files, folder / "parts", num_parts=min(3, len(case.truth.x)), partitioner="hash")
            return differences(_together(folder / "parts"), 0, case)

        if problem := problem_of(case, run):
            problems.append(f"arrays({seed}) [{'; '.join(case.steps)}]: {problem}")
    assert not problems, f"{len(problems)}:\n" + "\n".join(problems[:20])


@pytest.mark.parametrize("streamed", [False, True])
def test_folders_of_arrays(streamed: bool, tmp_path: Path) -> None:
    problems = []
    for seed in range(60):
        folder = tmp_path / str(seed)
        case = arrays(seed, folder)
        case.data = folder

        def run(case: Case = case, folder: Path = folder) -> list[str]:
            scratch = folder.with_name(f"{folder.name}-scratch")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return differences(_opened(folder, scratch) if streamed else _loaded(case)[0], 0, case)

        if problem := problem_of(case, run):
            problems.append(f"arrays({seed}) [{'; '.join(case.steps)}]: {problem}")
    assert not problems, f"{len(problems)} of 60:\n" + "\n".join(problems[:20])


# --- stores -----------------------------------------------------------------------------------------------------------


def _content(store: Path) -> list[Any]:
    shards = [Shard.load(store, part, num_parts=2) for part in range(2)]
    return [[value for value in vars(one).values() if type(value) is Tensor] for one in shards]


def _problem_of_store(store: Path, expected: list[Any]) -> str:
    try:
        found = _content(store)
    except InputError as error:
        named = str(store) in str(error)
        return "" if named and "\n" not in str(error) else f"is not one line that names the store: {str(error)!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    same = all(
        len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
        for ours, theirs in zip(found, expected, strict=True)
    )
    return "" if same else "accepted, but differs"


def test_damaged_stores(tmp_path: Path) -> None:
    data, _ = prepare(load_graph(homogeneous(4).data))
    write_store(data, np.arange(data.x.size(0)) % 2, tmp_path / "store", num_parts=2, method="test", arguments={})
    expected, problems, seeds = _content(tmp_path / "store"), [], range(60)
    for seed in seeds:
        store = Path(shutil.copytree(tmp_path / "store", tmp_path / str(seed)))
        how = damage(seed, store)
        if problem := _problem_of_store(store, expected):
            problems.append(f"damage({seed}) [{how}]: {problem}")
    assert not problems, f"{len(problems)} of {len(seeds)}:\n" + "\n".join(problems[:20])
