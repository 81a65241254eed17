"""Values in collections are changed wherever they are, and collections stay what they were."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pygdist.graph import Adjacency
from pygdist.nn.nested import each_value

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Frozen:
    rows: Tensor
    name: str = "kept"


@dataclass
class Open:
    inner: Any
    made: Any = field(init=False, default=None)


def doubled(value: Any) -> Any:
    return each_value(value, Tensor, lambda one: 2 * one)


def test_every_collection_keeps_its_type() -> None:
    one = torch.ones(2)
    before = {
        "list": [one, [one, "text"]], "tuple": (one, None), "named": Pair(one, 3), "ordered": OrderedDict(a=one),
        "default": defaultdict(list, b=one), "frozen": Frozen(one), "open": Open([Frozen(one)]),
    }  # fmt: skip
    before["open"].made = one  # type: ignore[attr-defined]
    after = doubled(before)
    assert {name: type(value) for name, value in after.items()} == {name: type(value) for name, value in before.items()}
    changed = [
        after["list"][0], after["list"][1][0], after["tuple"][0], after["named"].left, after["ordered"]["a"],
        after["default"]["b"], after["frozen"].rows, after["open"].inner[0].rows, after["open"].made,
    ]  # fmt: skip
    assert [value.tolist() for value in changed] == [[2.0, 2.0]] * len(changed)
    assert (after["list"][1][1], after["tuple"][1], after["named"].right, after["frozen"].name) == (
        "text",
        None,
        3,
        "kept",
    )
    assert after["default"]["new"] == [], "the factory is kept"
    assert before["frozen"].rows is one, "what was passed has not changed"  # type: ignore[attr-defined]
    assert torch.equal(one, torch.ones(2))


def test_results_of_torch_stay_what_they_are() -> None:
    found = torch.max(torch.tensor([[1.0, 3.0]]), dim=1)
    assert type(doubled(found)) is type(found)
    assert doubled(found).values.item() == 6


def test_subtypes_may_stay_as_they_are() -> None:
    edges, _ = Adjacency.from_unsorted(torch.tensor([[0], [1]]), num_src=2, num_dst=2)
    seen: list[Tensor] = []
    out = each_value([edges, torch.ones(1)], Tensor, lambda one: seen.append(one), but=(Adjacency,))
    assert out[0] is edges
    assert len(seen) == 1
