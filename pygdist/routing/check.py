"""The check before training: a model runs on a small graph, on all ranks and on one process, with equal results.

A layer is distributed by what it asks for in ``propagate``. What a model computes over nodes or edges elsewhere, a rank
computes over its own alone, and would train wrong numbers in silence. So a model is tried before its first pass:
forward and backward, in float64, without dropout, through the backend as it will run. All ranks refuse a difference.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from pygdist.backends.base import Backend
from pygdist.backends.passes.rehearsal import Call
from pygdist.backends.recomputing.inputs import kinds_of
from pygdist.comm import Communicator
from pygdist.errors import InputError, LostRankError
from pygdist.graph import Adjacency, Shard
from pygdist.hops.arguments import mapped
from pygdist.hops.layer import own_class
from pygdist.hops.untouched import IrreversibleError, untouched
from pygdist.routing.miniature import Miniature, NotComparableError, beside_another, renumbered
from pygdist.routing.runs import (
    Route,
    Run,
    Setting,
    difference,
    differences,
    first_difference,
    rows_dim,
    run_parts,
    run_whole,
    without_dropout,
)

_MOST_BYTES = 256 * 2**20  # of parameters, of which there are several copies meanwhile
#: Rounding stays below a thousandth of these; the wrong numbers that were seen are 2e-3 and more.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 5e-4}


class Ways(NamedTuple):
    """The functions that put a model on a backend, and take it off."""

    on: Route
    off: Callable[[nn.Module], nn.Module]


_PLAIN = (bool, int, float, str, type(None), type(lambda: None))
_PASSED: set[object] = set()  # in this process


def check(model: nn.Module, backend: Backend, args: tuple[Any, ...], kwargs: dict[str, Any], ways: Ways) -> bool:
    """Compare a distributed model with one process, before its first pass. Every rank that runs it makes the call.

    Args:
        model: The model, distributed on ``backend``; it is not changed.
        backend: The backend, bound to a part.
        args: Positional arguments of the pass.
        kwargs: Its keyword arguments.
        ways: The functions that put a model on a backend and take it off.

    Returns:
        False if the pass is one of a mini-batch, so that another one must be waited for.

    Raises:
        InputError: If a number differs, on all ranks; the message names the module, and what to do instead.
    """
    if backend.num_ranks == 1 and not backend.abilities.trains_parts:
        return True
    shard, communicator, num_parts = backend.shard, backend.communicator, backend.num_ranks
    if backend.abilities.trains_parts:  # a rank may have no part to run, so none is asked
        communicator, num_parts = Communicator(), 2
    if _is_of_batch(model, args, kwargs, shard):
        return False
    key, kinds = kinds_of(model, args, kwargs, shard, communicator, {})
    identity = (_structure(model), type(backend), _options(backend), backend.savings, num_parts, key)
    if bool(communicator.gather([float(identity in _PASSED)]).all()):
        return True
    try:
        with communicator.aside() as aside, _undisturbed(model), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _Check(Call(model, args, kwargs, kinds), backend, aside, num_parts, ways).run()
    except (NotComparableError, IrreversibleError) as error:
        if communicator.rank == 0:
            warnings.warn(
                f"{type(model).__name__} trains without having been compared with one process on a small graph: "
                f"{error}. Sums over nodes or edges outside of its PyG layers would be those of a rank alone",
                stacklevel=2,
            )
    _PASSED.add(identity)
    return True


class _Check:
    """One comparison; see :func:`check`."""

    def __init__(self, call: Call, backend: Backend, communicator: Communicator, num_parts: int, ways: Ways) -> None:
        self.call, self.backend, self.ways = call, backend, ways
        self.communicator, self.num_parts = communicator, num_parts

    def run(self) -> None:
        """Compare, and raise for a difference; every rank makes the call.

        Raises:
            NotComparableError: On all ranks, if the model cannot be compared.
            InputError: If a number differs.
        """
        small = Miniature.of(self.call, self.backend.shard, self.communicator, self.num_parts)
        plain, setting, whole = self._on_one_process(small)
        exact = self.backend.exact_case(max(1, *whole.num_hops))
        if exact is None:
            return
        apart = self._largest(small, exact, plain, setting, whole)
        tolerance = _TOLERANCE[setting.dtype]
        worst = self.communicator.gather(list(apart.values())).amax(0).tolist()
        wrong = [name for name, value in zip(apart, worst, strict=True) if not value <= tolerance]
        if wrong:
            module = self._first_module(small, exact, plain, setting) or f"its {wrong[0]}"
            raise InputError(self._message(module, max(worst), _cause(plain, small, setting)))

    def _on_one_process(self, small: Miniature) -> tuple[nn.Module, Setting, Run]:
        """Run the model on the whole graph; return a copy that is not distributed, the settings, and the results."""
        result = None
        try:
            size = sum(one.nbytes for one in self.call.model.parameters())
            if size > _MOST_BYTES:
                raise NotComparableError(f"its parameters take {size / 2**20:.0f} MiB, too much to copy")
            plain = _plain_copy(self.call.model, self.ways)
            # parts that train by themselves have statistics of their own
            alone = self.backend.abilities.trains_parts
            result = plain, *_comparable(plain, small, without_norms=alone)
            reason = ""
        except (NotComparableError, IrreversibleError) as error:
            reason = str(error)
        # ranks go on together, whatever a model does on one of them
        ranks = self.communicator.gather([float(result is not None), *_sums(self.call.model)])
        if not bool(ranks[:, 0].all()) or result is None:
            raise NotComparableError(reason or "it did not run on one of the ranks")
        if not torch.allclose(ranks, ranks[0], rtol=1e-9, equal_nan=True):
            raise InputError(
                f"the ranks' copies of {own_class(self.call.model).__name__} have other parameters; call "
                "torch.manual_seed() with one seed on all ranks before the model is made, or wrap the model in "
                "DistributedDataParallel"
            )
        return result

    def _largest(
        self, small: Miniature, exact: Backend, plain: nn.Module, setting: Setting, whole: Run
    ) -> dict[str, float]:
        """Return the largest differences on this rank, by result."""
        found: dict[str, float] = {}
        for shard, part in self._parts(small, exact, plain, setting):
            for name, value in differences(part, whole, small, shard).items():
                found[name] = max(value, found.get(name, 0.0))
        return found

    def _parts(self, small: Miniature, exact: Backend, plain: nn.Module, setting: Setting) -> list[tuple[Shard, Run]]:
        try:
            return run_parts(plain, exact, small, self.communicator, self.ways.on, setting)
        except (InputError, LostRankError):
            raise
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise InputError(
                f"{type(plain).__name__} runs on one process, but not on a part of a graph: {type(error).__name__}: "
                f"{error} ({last.filename}:{last.lineno}). {_ELSEWHERE}",
                of_one_rank=True,
            ) from error

    def _first_module(self, small: Miniature, exact: Backend, plain: nn.Module, setting: Setting) -> str:
        """Return the first module whose output differs on any rank; empty if that of none does."""
        setting = replace(setting, traced=True)
        whole = run_whole(plain, small, setting)
        tolerance = _TOLERANCE[setting.dtype]
        places = [
            first_difference(part, whole, small, shard, tolerance)
            for shard, part in self._parts(small, exact, plain, setting)
        ]
        place = int(self.communicator.gather([float(min(places))]).min())
        if place == len(whole.modules):
            return ""
        (path, _), modules = list(whole.modules)[place], dict(plain.named_modules())
        return f"'{path}' ({type(modules[path]).__name__})" if path else f"{type(plain).__name__}.forward"

    def _message(self, module: str, difference: float, cause: str) -> str:
        model, backend = own_class(self.call.model).__name__, self.backend.name or type(self.backend).__name__
        ranks = f"{self.num_parts} {'parts' if self.backend.abilities.trains_parts else 'ranks'}"
        return (
            f"{model} would train other numbers with backend '{backend}' on {ranks} than on one process: "
            f"tried on a small graph, {module} is the first to differ ({difference:.0e} of the largest number). {cause}"
        )


# -- causes ----------------------------------------------------------------------------------------------------------

_OVER_NODES = (
    "Something is computed over all nodes, of which a rank has its own: rows change if the graph gets a second "
    "component. PyG's norms (BatchNorm, GraphNorm, PairNorm) and readouts (MeanAggregation, SumAggregation) are "
    "computed over all ranks; use one of these"
)
_BY_NUMBER = (
    "Rows depend on the numbers of nodes or on the order of edges, which are others on a rank; pass such values to the "
    "model as features of nodes (x) or edges (edge_attr)"
)
_ELSEWHERE = (
    "A rank holds its own nodes with all their in-edges. What a layer must know of the source of an edge it passes to "
    "propagate, as in propagate(edge_index, x=x, deg=deg), and reads as deg_j in message; out-degrees, and edges that "
    "are turned or added, belong into the graph (torch_geometric.transforms) before it is partitioned"
)
_SWITCH = "distribute(..., check=False), or --model.check=false, trains nevertheless"


def _cause(plain: nn.Module, small: Miniature, setting: Setting) -> str:
    """Tell by two trials on one process of what kind a difference is, and what to do instead."""
    text = _ELSEWHERE
    with contextlib.suppress(Exception):  # a model that does not run on these graphs says nothing
        if _changes_renumbered(plain, small, setting):
            text = _BY_NUMBER
        elif _changes_beside_another(plain, small, setting):
            text = _OVER_NODES
    return f"{text} ({_SWITCH})"


def _changes_beside_another(plain: nn.Module, small: Miniature, setting: Setting) -> bool:
    """True if the rows of a component change with another one beside it, norms aside."""
    setting, num_nodes = replace(setting, without_norms=True), small.num_nodes
    alone, together = (run_whole(plain, one, setting).outputs for one in (small, beside_another(small)))
    dims = {name: rows_dim(rows, num_nodes) for name, rows in alone.items()}
    return any(
        difference(together[name].narrow(dim, 0, num_nodes), alone[name]) > _TOLERANCE[setting.dtype]
        for name, dim in dims.items()
        if dim is not None and together[name].size(dim) == 2 * num_nodes
    )


def _changes_renumbered(plain: nn.Module, small: Miniature, setting: Setting) -> bool:
    """True if rows change with the numbers of nodes or the order of edges."""
    moved, number = renumbered(small)
    before, after = (run_whole(plain, one, setting).outputs for one in (small, moved))
    dims = {name: rows_dim(rows, small.num_nodes) for name, rows in before.items()}
    return any(
        difference(after[name].index_select(dim, number.to(rows.device)), rows) > _TOLERANCE[setting.dtype]
        for (name, rows), dim in zip(before.items(), dims.values(), strict=True)
        if dim is not None
    )


# -- the model -------------------------------------------------------------------------------------------------------


def _plain_copy(model: nn.Module, ways: Ways) -> nn.Module:
    """Return a copy that is not distributed."""
    try:
        return ways.off(copy.deepcopy(model))
    except Exception as error:
        raise NotComparableError(f"it cannot be copied ({type(error).__name__}: {error})") from error


def _comparable(plain: nn.Module, small: Miniature, *, without_norms: bool) -> tuple[Setting, Run]:
    """Return settings in which the model gives the same numbers each time, and its results."""
    mistake: Exception | None = None
    for dtype in _TOLERANCE:
        for trains in (True, False):
            setting = Setting(dtype=dtype, trains=trains, without_norms=without_norms)
            try:
                run = run_whole(plain, small, setting)
                again = run_whole(plain, small, replace(setting, seed=setting.seed + 1))
            except Exception as error:
                mistake = error
                break  # in another type
            if all(difference(again.outputs[name], one) <= _TOLERANCE[dtype] for name, one in run.outputs.items()):
                return setting, run
        else:
            raise NotComparableError("it draws random numbers in evaluation too")
    assert mistake is not None
    raise NotComparableError(f"it does not run on another graph ({type(mistake).__name__}: {mistake})") from mistake


@contextlib.contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Let copies of a model run with gradients, in the types that they have, without dropout, and leave no trace."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(untouched(model))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in {"cpu", *(one.device.type for one in model.parameters())}:
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(without_dropout())
        yield


def _is_of_batch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shard: Shard) -> bool:
    """True if a pass gets the edges of another graph than the rank's part."""
    edges: list[Adjacency] = []

    def look(_: str, value: Any) -> Any:
        if isinstance(value, Adjacency):
            edges.append(value)
        return value

    mapped(model.forward, args, kwargs, look)
    return bool(edges) and not any(one.csr() is shard.adjacency.csr() for one in edges)


def _sums(model: nn.Module) -> tuple[float, ...]:
    """Return numbers that are equal for equal parameters."""
    values = [one.detach().double() for one in model.parameters() if one.is_floating_point()]
    return float(len(values)), *(float(sum(term(one).sum() for one in values)) for term in (torch.abs, torch.clone))


def _structure(model: nn.Module) -> tuple[object, ...]:
    """Return all that tells apart models that compute something else, values of tensors aside."""
    modules = []
    for name, module in model.named_modules():
        tensors = tuple((key, one.shape, one.dtype) for key, one in module.named_parameters(recurse=False))
        modules.append((name, own_class(module), _options(module), tensors))
    return tuple(modules)


def _options(one: object) -> str:
    """Return the plain attributes of an object, as text."""
    options = {name: value for name, value in vars(one).items() if isinstance(value, _PLAIN) and name != "training"}
    return repr({name: value for name, value in sorted(options.items()) if not name.startswith("_")})
