"""Hundreds of odd and malformed inputs, drawn from seeds: each ends in one line that names the fault, or is right."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pygdist.errors import InputError
from pygdist.graph import Shard, load_graph, prepare, write_store
from tests.graph.odd_graphs import MASKS, Case, differences, heterogeneous, homogeneous

FIELDS = ("x", "y", "edge_index", "edge_weight", "edge_attr", "edge_type", *MASKS)


def _loaded(case: Case) -> tuple[dict[str, Any], Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data, _ = prepare(load_graph(case.data, **case.load), **case.prepare)
    fields = {name: value.numpy() if isinstance(value := data.get(name), Tensor) else None for name in FIELDS}
    return fields, data


def _stored(data: Any, folder: Path) -> dict[str, Any]:
    """Cut a graph into three parts, and put it together again."""
    num_nodes = data.x.size(0)
    owner = np.arange(num_nodes) * 7 % 3
    write_store(data, owner, folder, num_parts=3, method="test", arguments={})
    shards = [Shard.load(folder, part) for part in range(3)]
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
        named = any(name in text for name in case.fault)
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
            if not wrong and seed % 4 == 1:
                wrong = [f"in parts: {one}" for one in differences(_stored(data, folder / str(seed)), 0, case)]
            return wrong

        if problem := problem_of(case, run):
            problems.append(f"{make.__name__}({seed}) [{'; '.join(case.steps)}]: {problem}")
    assert not problems, f"{len(problems)} of {len(seeds)}:\n" + "\n".join(problems[:20])


@pytest.mark.parametrize("start", range(0, 300, 100))
def test_graphs_in_memory(start: int, tmp_path: Path) -> None:
    _check(homogeneous, range(start, start + 100), tmp_path)


def test_graphs_of_several_types(tmp_path: Path) -> None:
    _check(heterogeneous, range(100), tmp_path)
