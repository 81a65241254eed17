"""Whatever a run changes is put back: in a model, in what it can reach, and in random generators."""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.data import Data

from pygdist.graph import Adjacency
from pygdist.hops.untouched import IrreversibleError, untouched

TOTAL = 0


class Count:
    """A user's own object."""

    def __init__(self) -> None:
        self.value = 0
        self.by_name = collections.Counter({"a": 1})


class Slotted:
    """A user's own object without a dictionary."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class Model(nn.Module):
    """Holds one of everything."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.register_buffer("steps", torch.zeros(()))
        self.temperature = 1.0
        self.plain = torch.zeros(2)
        self.history: list[Any] = [[1]]
        self.latest: collections.deque[int] = collections.deque(maxlen=3)
        self.counts, self.names, self.array = {"a": {"b": 1}}, {"a"}, np.zeros(3)
        self.count, self.slotted = Count(), Slotted()
        self.args, self.record = argparse.Namespace(tau=1.0), types.SimpleNamespace(tau=[1.0])
        self.data = Data(x=torch.zeros(2), rounds=0)
        self.order = collections.OrderedDict(a=1, b=2)
        self.objects = np.array(["a", np.zeros(3)], dtype=object)
        self.expanded = torch.zeros(1).expand(4)
        self.by_tensor = {torch.zeros(2): 1, torch.ones(2): 2}
        self.torch, self.numpy, self.python = torch.Generator(), np.random.default_rng(0), random.Random(0)
        self.steps: Tensor


def _global(model: Model) -> None:
    global TOTAL
    TOTAL += 1


def _new_class_attribute(model: Model) -> None:
    Model.found = True  # type: ignore[attr-defined]


def _run_class(model: Model) -> None:
    Model.runs += 1


CHANGES: dict[str, Callable[[Model], Any]] = {
    "attribute": lambda model: setattr(model, "temperature", 0.5),
    "new attribute": lambda model: setattr(model, "kept", torch.ones(1)),
    "deleted attribute": lambda model: delattr(model, "temperature"),
    "mode": lambda model: model.eval(),
    "list": lambda model: model.history.append(1),
    "list in a list": lambda model: model.history[0].append(1),
    "deque": lambda model: model.latest.append(1),
    "dict in a dict": lambda model: model.counts["a"].update(b=2),
    "dict": lambda model: model.counts.update(c={}),
    "order of a dict": lambda model: model.order.move_to_end("a"),
    "array of objects": lambda model: model.objects.__setitem__(0, None),
    "rows that lie over each other": lambda model: model.expanded[0].add_(1),
    "another tensor, with a gradient": lambda model: model.plain.mul_(model.lin.weight[0]),
    "tensor, as a key": lambda model: model.by_tensor.clear(),
    "set": lambda model: model.names.add("b"),
    "array": lambda model: model.array.__setitem__(0, 1),
    "object": lambda model: setattr(model.count, "value", 1),
    "counter in an object": lambda model: model.count.by_name.update("a"),
    "namespace": lambda model: setattr(model.args, "tau", 0.5),
    "list in a namespace": lambda model: model.record.tau.append(0.5),
    "graph": lambda model: setattr(model.data, "rounds", 1),
    "tensor of a graph": lambda model: model.data.x.add_(1),
    "slots": lambda model: setattr(model.slotted, "value", 1),
    "buffer": lambda model: model.steps.add_(1),
    "buffer, replaced": lambda model: setattr(model, "steps", torch.ones(())),
    "tensor": lambda model: model.plain.add_(1),
    "memory of a tensor": lambda model: setattr(model.plain, "data", torch.ones(2)),
    "parameter": lambda model: model.lin.weight.data.zero_(),
    "parameter, written": lambda model: torch.no_grad()(model.lin.weight.zero_)(),
    "gradient": lambda model: model.lin(torch.ones(2)).sum().backward(),
    "needs no gradient": lambda model: model.lin.weight.requires_grad_(False),
    "hook": lambda model: model.lin.register_forward_hook(print),
    "class": _run_class,
    "new attribute of a class": _new_class_attribute,
    "torch": lambda model: torch.rand(1),
    "numpy": lambda model: np.random.rand(),  # noqa: NPY002
    "python": lambda model: random.random(),
    "generator of torch": lambda model: torch.rand(1, generator=model.torch),
    "generator of numpy": lambda model: model.numpy.random(),
    "generator of python": lambda model: model.python.random(),
}


def _state(one: Any) -> Any:
    """All that may change, as plain values."""
    if isinstance(one, nn.Module):
        hooks = len(one._forward_hooks)
        return [*type(one).__dict__], hooks, {name: _state(value) for name, value in vars(one).items()}
    if isinstance(one, Tensor):
        grad = one.grad if one.is_leaf else None
        return one.tolist(), one.requires_grad, None if grad is None else grad.tolist()
    if isinstance(one, dict):
        return [(name, _state(value)) for name, value in one.items()]
    if isinstance(one, (list, collections.deque)):
        return [_state(value) for value in one]
    if isinstance(one, (Count, argparse.Namespace, types.SimpleNamespace)):
        return _state(vars(one))
    if isinstance(one, Data):
        return _state(one.to_dict())
    if isinstance(one, Slotted):
        return one.value
    if isinstance(one, torch.Generator):
        return one.get_state().tolist()
    if isinstance(one, np.random.Generator):
        return str(one.bit_generator.state)
    if isinstance(one, random.Random):
        return one.getstate()
    return repr(one.tolist()) if isinstance(one, np.ndarray) else repr(one)


def _all(model: Model) -> Any:
    return _state(model), Model.runs, torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()  # noqa: NPY002


@pytest.mark.parametrize("change", CHANGES)
def test_it_is_as_before(change: str) -> None:
    model = Model()
    before = _all(model)
    with untouched(model):
        CHANGES[change](model)
        assert _all(model) != before
    assert _all(model) == before


def test_an_error_changes_nothing_of_that() -> None:
    model = Model()
    with pytest.raises(ZeroDivisionError), untouched(model):
        model.temperature = 1 / 0 if model.history.append(2) is None else 0.0
    assert model.history == [[1]]


def test_what_fails_keeps_nothing_else_from_being_put_back() -> None:
    class Stubborn:
        __slots__ = ("value",)

        def __setattr__(self, name: str, value: Any) -> None:
            if hasattr(self, "value"):
                raise TypeError("once is enough")
            object.__setattr__(self, name, value)

    model, drawn = Model(), random.getstate()
    model.stubborn, model.last = Stubborn(), [0]  # type: ignore[assignment]
    model.stubborn.value = 1
    with pytest.raises(TypeError, match="once is enough"), untouched(model):  # noqa: PT012
        object.__setattr__(model.stubborn, "value", 2)
        model.history.append(1)
        model.last.append(1)  # type: ignore[operator]
        random.random()
    assert (model.history, model.last, random.getstate()) == ([[1]], [0], drawn)


def test_a_counter_is_left_alone() -> None:
    model = Model()
    with untouched(model) as snapshot:
        pass
    assert model.count.by_name == {"a": 1}
    assert snapshot.changed == []


def test_tensors_keep_their_memory() -> None:
    model = Model()
    address = model.lin.weight.data_ptr()
    with untouched(model):
        model.lin.weight.data = torch.zeros(2, 2)
    assert model.lin.weight.data_ptr() == address


@pytest.mark.parametrize("kind", ["closure", "partial", "method", "global", "default"])
def test_variables_of_hooks(kind: str) -> None:
    count, seen, mine = 0, [], Count()

    def closure(*_: Any) -> None:
        nonlocal count
        count += 1
        seen.append(count)

    def in_partial(values: list[int], *_: Any) -> None:
        values.append(1)

    def in_global(*_: Any) -> None:
        _global(model)

    def in_default(*_: Any, values: list[int] = seen) -> None:
        values.append(1)

    class Counter:
        def add(self, *_: Any) -> None:
            mine.value += 1

    hooks: dict[str, Any] = {"closure": closure, "partial": functools.partial(in_partial, seen), "global": in_global}
    hooks |= {"method": Counter().add, "default": in_default}
    model = Model()
    model.lin.register_forward_hook(hooks[kind])
    total = TOTAL
    with untouched(model) as snapshot:
        model.lin(torch.ones(2))
        assert (count, len(seen), mine.value, TOTAL - total) != (0, 0, 0, 0)
    assert (count, len(seen), mine.value, TOTAL - total) == (0, 0, 0, 0)
    assert snapshot.changed


def test_nothing_changed() -> None:
    model = Model()
    model.register_buffer("scale", torch.ones(3))
    with untouched(model) as snapshot:
        model.lin(torch.rand(2))
        model.scale.clamp_(0, 10)  # written, with the same values
    assert snapshot.changed == []


def test_edges_that_a_model_holds() -> None:
    model, edges = Model(), torch.tensor([[1, 2], [0, 1]])
    model.history = [Adjacency(edges, num_src=3, num_dst=2), EdgeIndex(edges.clone(), sparse_size=(3, 3))]
    with untouched(model) as snapshot:
        model.history.pop()
        edges[0, 0] = 2
    assert len(model.history) == 2
    assert edges[0, 0] == 1
    assert snapshot.changed


@pytest.mark.parametrize("iterator", [itertools.count(), iter([1]), (one for one in range(3))])
def test_iterators_are_refused_before_anything_runs(iterator: Any) -> None:
    model = Model()
    model.count.value = iterator
    with pytest.raises(IrreversibleError, match=r"Count\.value is an iterator"), untouched(model):
        pytest.fail("it ran")


def test_memory_that_many_tensors_share_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, copies, clone = Model(), [], torch.UntypedStorage.clone
    model.history = list(torch.zeros(50, 4))
    monkeypatch.setattr(torch.UntypedStorage, "clone", lambda one: copies.append(one.nbytes()) or clone(one))
    with untouched(model):
        model.history[3].add_(1)
    assert float(model.history[3].sum()) == 0
    assert copies.count(50 * 4 * 4) == 1
