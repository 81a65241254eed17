"""The check before training: a model runs on a small graph, on all ranks and on one process, with equal results.

A layer is distributed by its calls of ``propagate``. Outside of these, a rank computes over its own nodes and edges
alone, and numbers would be wrong in silence. So a model is tried before its first pass: forward and backward, in
float64, without dropout, through the backend as it will run. All ranks refuse a difference.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pygdist.backends.base import Backend, names_of
from pygdist.backends.passes.kinds import Lengths, kinds_of
from pygdist.backends.passes.rehearsal import Call
from pygdist.comm import Communicator
from pygdist.errors import InputError, LostRankError, RefusedError, UnequalRanksError
from pygdist.graph import Adjacency, Shard
from pygdist.graph.check import EDGE_FIELDS
from pygdist.hops.arguments import edges_among, tensors_of
from pygdist.hops.draws import without_dropout
from pygdist.hops.layer import own_class
from pygdist.hops.untouched import IrreversibleError, untouched
from pygdist.hops.user_code import in_one_line, place_of
from pygdist.memory.limits import refusal_of
from pygdist.nn.norms import GLOBAL_NORMS
from pygdist.routing.causes import (
    BY_NUMBER,
    BY_ROWS,
    ELSEWHERE,
    OF_GRADIENTS,
    OTHER_CALLS_OF_PARTS,
    OVER_NODES,
    OVER_NODES_OF_PARTS,
    OWN_TEST,
    cause_of,
    reads_missing_rows,
)
from pygdist.routing.decisions import Finding, decision_by_rows, is_raised_by_user
from pygdist.routing.miniature import Miniature, NotComparableError
from pygdist.routing.runs import (
    Route,
    Run,
    Setting,
    difference,
    differences,
    first_difference,
    numbers_apart,
    run_parts,
    run_whole,
)
from pygdist.routing.values_of_edges import refuse_values_of_edges

_MOST_NAMES = 4
_MOST_BYTES = 64 * 2**20  # of a model's tensors, of which there are about ten copies meanwhile
#: Rounding stays below a thousandth of these; wrong numbers that were seen are 2e-3 and more.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 5e-4}
_OTHER_DRAWS = "draws other random numbers each time (of random, NumPy, or a rare distribution of torch)"
_PLAIN = (bool, int, float, str, type(None))
_SWITCH = "distribute(..., check=False), or --model.check=false, trains nevertheless"


@dataclass
class _Known:
    """Results of earlier comparisons of a model.

    Attributes:
        passed: The forms in which it was compared.
        failure: Type and place of the exception with which it ended on one process.
        note: A warning that is to be told once a pass has ended.
    """

    passed: set[object] = field(default_factory=set)
    failure: tuple[object, str] | None = None
    note: str = ""


_KNOWN: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


class Ways(NamedTuple):
    """The functions that put a model on a backend, and take it off."""

    on: Route
    off: Callable[[nn.Module], nn.Module]


def check(model: nn.Module, backend: Backend, args: tuple[Any, ...], kwargs: dict[str, Any], ways: Ways) -> bool:
    """Compare a distributed model with one process, before its first pass. Every rank that runs it makes the call.

    Args:
        model: The model, distributed on ``backend``; it is not changed.
        backend: The backend, bound to a part.
        args: Positional arguments of the pass.
        kwargs: Its keyword arguments.
        ways: The functions that put a model on a backend and take it off.

    Returns:
        False if the next pass must be checked instead: this one is of a mini-batch, or makes parameters.

    Raises:
        InputError: If a number differs, on all ranks; the message names the module, and what to do instead.
    """
    shard, communicator, num_parts = backend.shard, backend.communicator, backend.num_ranks
    if _is_of_batch(model, args, kwargs, shard) or any(is_lazy(one) for one in model.parameters()):
        return False
    refuse_values_of_edges(model, shard, _SWITCH)
    if backend.num_ranks == 1 and not backend.abilities.trains_parts:
        return True
    if backend.abilities.trains_parts:  # each rank compares alone, as a rank without parts makes no call
        communicator, num_parts = Communicator(), 2
    key, kinds = kinds_of(model, args, kwargs, Lengths.of(shard), communicator, {})
    identity = (_structure(model), type(backend), repr(backend.arguments()), num_parts, key)
    known = _KNOWN.setdefault(model, _Known())
    if bool(communicator.gather([float(identity in known.passed)]).all()):
        return True
    try:
        with communicator.aside() as aside, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            note = _Check(Call(model, args, kwargs, kinds), backend, aside, num_parts, ways).run()
    except NotComparableError as error:
        if (cause := error.__cause__) is not None and _is_of_the_graph(args, kwargs, shard):
            known.failure = type(cause), place_of(cause)
        note = (
            f"{own_class(model).__name__} trains without having been compared with one process on a small graph: "
            f"{error}. Sums over nodes or edges outside of its PyG layers would cover one rank's rows only"
        )
    known.passed.add(identity)
    if note and communicator.rank == 0:
        known.note = note
    return True


def _is_of_the_graph(args: tuple[Any, ...], kwargs: dict[str, Any], shard: Shard) -> bool:
    fields = [getattr(shard, name) for name in ("x", *EDGE_FIELDS)]
    tensors = tensors_of((args, kwargs))
    return all(isinstance(one, Adjacency) or any(one is field for field in fields) for one in tensors)


def tell_note(model: nn.Module) -> None:
    """Warn of what the check could not compare. Called after a pass: a model that fails needs no warning."""
    known = _KNOWN.get(model)
    if known is not None and known.note:
        note, known.note = known.note, ""
        warnings.warn(note, stacklevel=2)


def fails_alone(model: nn.Module, error: BaseException) -> bool:
    """True if a model failed in the same line, with the same type of exception, on one process too.

    Only models that get nothing but the graph count: others may fail for the values that stand for their arguments.
    """
    known = _KNOWN.get(model)
    return known is not None and known.failure == (type(error), place_of(error))


class _Check:
    """One comparison; see :func:`check`."""

    def __init__(self, call: Call, backend: Backend, communicator: Communicator, num_parts: int, ways: Ways) -> None:
        self.call, self.backend, self.ways = call, backend, ways
        self.communicator, self.num_parts = communicator, num_parts

    def run(self) -> str:
        """Compare, and raise for a difference; every rank makes the call.

        Returns:
            A warning about numbers of the loss; empty if there is nothing to say.

        Raises:
            NotComparableError: On all ranks, if the model cannot be compared.
            InputError: If a number differs.
        """
        with contextlib.ExitStack() as stack:
            with self._agreed():  # a model may be another on one rank
                stack.enter_context(untouched(self.call.model, most_bytes=_MOST_BYTES))
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.enable_grad())
                for device in {"cpu", *(one.device.type for one in self.call.model.parameters())}:
                    stack.enter_context(torch.autocast(device, enabled=False))
                stack.enter_context(without_dropout())
            return self._compare()

    def _compare(self) -> str:
        small = Miniature.of(self.call, self.backend.shard, self.communicator, self.num_parts)
        with self._agreed():
            plain = _plain_copy(self.call.model, self.ways)
            setting, whole, alone = _comparable(plain, small, of_parts=self.backend.abilities.trains_parts)
        self._check_parameters()
        for path, reason in whole.other_edges.items():
            layer = own_class(plain.get_submodule(path)).__name__
            at = f"{type(plain).__name__}: '{path}' ({layer})" if path else layer
            raise InputError(f"{at} gives its hop {reason}", of_one_rank=self.backend.abilities.trains_parts)
        tolerance = _TOLERANCE[setting.dtype]
        num_nodes = self.backend.shard.num_nodes
        note = self._check_decisions(decision_by_rows(plain, small, setting, tolerance, num_nodes=num_nodes))
        exact = self.backend.exact_case(max(1, *whole.num_hops))
        if exact is None:
            return ""
        apart: dict[str, float] = {}
        runs = self._parts(small, exact, plain, setting, whole)
        for shard, part in runs:
            for name, value in differences(part, whole, small, shard).items():
                apart[name] = max(value, apart.get(name, 0.0))
        worst = self.communicator.gather(list(apart.values())).amax(0).tolist()
        wrong = [name for name, value in zip(apart, worst, strict=True) if not value <= tolerance]
        if self.backend.abilities.trains_parts:
            self._check_calls(plain, whole, [part for _, part in runs], differs=bool(wrong))
        of_rank = [name.removeprefix("buffer ").strip("'") for name in wrong if name.startswith("buffer ")]
        if wrong and len(of_rank) < len(wrong):
            place = self._first_module(small, exact, plain, setting) or f"the {wrong[0]}"
            of_gradients = all(name.startswith("gradient of ") for name in wrong)
            cause = OF_GRADIENTS if of_gradients else cause_of(plain, small, setting, tolerance)
            raise self._refused(place, max(worst), cause)
        apart_numbers = [numbers_apart(part, whole) for _, part in runs]
        return ". ".join(filter(None, [self._note_on_numbers(whole, apart_numbers, tolerance, of_rank), note, alone]))

    def _check_decisions(self, found: Finding) -> str:
        """Refuse a model that decides by rows, on all ranks; return a note on what could not be tried."""
        model, alone = own_class(self.call.model).__name__, self.backend.abilities.trains_parts
        if bool(self.communicator.gather([float(bool(found.place or found.position))]).any()):
            text = f"{model} cuts rows by their numbers ({found.position}). {BY_NUMBER}" if found.position else ""
            decide = f"Use backend {names_of(lambda abilities: abilities.exact)}, and decide" if alone else "Decide"
            text = text or BY_ROWS.format(model, found.place or "a line that another rank names", decide)
            raise InputError(f"{text} ({_SWITCH})", of_one_rank=alone)
        return f"{model} was compared with one process on a small graph, but {found.note}" if found.note else ""

    def _check_calls(self, plain: nn.Module, whole: Run, parts: list[Run], *, differs: bool) -> None:
        """Refuse a model that calls other modules on a part, if results differ too, or the modules are norms.

        Ranks that run one model together compare their calls in exchanges.
        """
        calls = set[tuple[str, int]]().union(*(whole.modules.keys() ^ part.modules.keys() for part in parts))
        modules = dict(plain.named_modules())
        others = {path: type(modules[path]) for path, _ in sorted(calls)}
        of_norms = any(cls in GLOBAL_NORMS for one in others.values() for cls in one.__mro__)  # with other statistics
        if not others or not (differs or of_norms):
            return
        names = ", ".join(f"'{path}' ({cls.__name__})" for path, cls in list(others.items())[:_MOST_NAMES])
        exact = names_of(lambda abilities: abilities.exact)
        cause = OTHER_CALLS_OF_PARTS.format(own_class(self.call.model).__name__, names, exact)
        raise InputError(f"{cause} ({_SWITCH})", of_one_rank=True)

    def _note_on_numbers(self, whole: Run, apart: list[list[float]], tolerance: float, buffers: list[str]) -> str:
        """Return a warning about numbers, such as terms of a loss, that are others on each rank; refuse outputs.

        ``buffers`` that differ too change nothing that the model puts out.
        """
        worst = self.communicator.gather([max(one) for one in zip(*apart, strict=True)]).amax(0).tolist()
        wrong = {name: value for name, value in zip(whole.numbers, worst, strict=True) if not value <= tolerance}
        if not wrong and not buffers:
            return ""
        names = ", ".join(map(repr, [*wrong, *buffers]))
        outputs = [value for name, value in wrong.items() if name.startswith("output ")]
        if outputs:
            raise self._refused(names, max(outputs), OVER_NODES)
        return (
            f"{own_class(self.call.model).__name__} computes {names} over the rows of each "
            f"{'part' if self.backend.abilities.trains_parts else 'rank'} alone. As a term of the loss, or in a later "
            "pass, that would train other numbers than one process: compute it by MeanAggregation() or "
            "SumAggregation() as a module of the model, which pygdist computes over all ranks"
        )

    @contextlib.contextmanager
    def _agreed(self) -> Iterator[None]:
        """Let all ranks go on, or none: what fails on one fails on all."""
        reason = ""
        cause: BaseException | None = None
        try:
            yield
        except (NotComparableError, IrreversibleError) as error:
            reason, cause = str(error), error.__cause__
        if not bool(self.communicator.gather([float(not reason)]).all()):
            raise NotComparableError(reason or "another rank cannot run it on a small graph") from cause

    def _check_parameters(self) -> None:
        """Refuse a model that is another on each rank."""
        values = [one.detach() for one in self.call.model.parameters() if one.is_floating_point()]
        norms = [float(torch.linalg.vector_norm(one, dtype=torch.float64)) for one in values]
        sums = [float(one.sum(dtype=torch.float64)) for one in values]
        ranks = self.communicator.gather([float(len(values)), sum(norms), sum(sums)])
        if not torch.allclose(ranks, ranks[0], rtol=1e-9, equal_nan=True):
            raise InputError(
                f"the ranks' copies of {own_class(self.call.model).__name__} have other parameters; call "
                "torch.manual_seed() with one seed on all ranks before the model is made, or wrap the model in "
                "DistributedDataParallel"
            )

    def _parts(
        self, small: Miniature, exact: Backend, plain: nn.Module, setting: Setting, whole: Run
    ) -> list[tuple[Shard, Run]]:
        try:
            return run_parts(plain, exact, small, self.communicator, self.ways.on, setting, whole)
        except (LostRankError, RefusedError):
            raise
        except UnequalRanksError as error:
            raise UnequalRanksError(f"on a small graph, on which {type(plain).__name__} is tried, {error}") from error
        except InputError as error:
            raise InputError(f"{error} ({_SWITCH})", of_one_rank=error.of_one_rank) from error
        except Exception as error:  # whatever a model, or a backend, says of what it gets on a rank
            if (refused := refusal_of(error)) is not None:
                raise refused from error
            if isinstance(error, OSError):  # of the machine, and no matter of parts
                raise
            cause = f". {ELSEWHERE}" if reads_missing_rows(error) else ""
            if is_raised_by_user(error):
                cause = f". {OWN_TEST}"
            if self._suspect:
                cause = f". {self._suspect}"
            raise InputError(
                f"{type(plain).__name__} ran on a small graph on one process, and failed on a part of it: "
                f"{in_one_line(error)}{cause} ({_SWITCH})",
                of_one_rank=True,
            ) from error

    def _first_module(self, small: Miniature, exact: Backend, plain: nn.Module, setting: Setting) -> str:
        """Return the first module whose output differs on any rank; empty if that of none does."""
        setting = replace(setting, traced=True)
        whole = run_whole(plain, small, setting)
        tolerance = _TOLERANCE[setting.dtype]
        places = [
            first_difference(part, whole, small, shard, tolerance)
            for shard, part in self._parts(small, exact, plain, setting, whole)
        ]
        place = int(self.communicator.gather([float(min(places))]).min())
        if place == len(whole.modules):
            return ""
        (path, _), modules = list(whole.modules)[place], dict(plain.named_modules())
        return f"'{path}' ({type(modules[path]).__name__})" if path else f"{type(plain).__name__}.forward"

    @property
    def _suspect(self) -> str:
        """Advice where the backend is not one of pygdist's, and may be what is wrong; else empty."""
        cls = type(self.backend)
        if cls.__module__.partition(".")[0] == "pygdist":
            return ""
        return (
            f"The backend {cls.__module__}.{cls.__qualname__} may be wrong, or the model: test the backend by itself "
            "with pygdist.testing.assert_exact"
        )

    def _refused(self, place: str, worst: float, cause: str) -> InputError:
        model, backend = own_class(self.call.model).__name__, self.backend.name or type(self.backend).__name__
        alone = self.backend.abilities.trains_parts
        if alone and cause == OVER_NODES:
            cause = OVER_NODES_OF_PARTS.format(names_of(lambda abilities: abilities.exact))
        cause = self._suspect or cause
        by = (
            "their shapes differ, or numbers are NaN"
            if worst == float("inf")
            else f"by {worst:.0e} of the largest number"
        )
        return InputError(
            f"{model} would train other numbers with backend '{backend}' on {self.num_parts} "
            f"{'parts' if alone else 'ranks'} than on one process: on a small graph, the first difference is in "
            f"{place} ({by}). {cause} ({_SWITCH})",
            of_one_rank=alone,
        )


def _plain_copy(model: nn.Module, ways: Ways) -> nn.Module:
    """Return a copy that is not distributed."""
    try:
        return ways.off(copy.deepcopy(model))
    except Exception as error:  # of any object that the model holds
        raise NotComparableError(f"it cannot be copied: {in_one_line(error)}") from error


def _comparable(plain: nn.Module, small: Miniature, *, of_parts: bool) -> tuple[Setting, Run, str]:
    """Return settings in which the model gives the same numbers each time, its results, and a note on what is left out.

    Parts that train by themselves (``of_parts``) have norms with statistics of their own, and no rank compares calls.
    """
    mistake: Exception | None = None
    note = reason = ""
    for trains in (True, False):
        draws = False
        for dtype, constant in itertools.product(_TOLERANCE, (False, True)):
            if constant and not draws:
                continue
            setting = Setting(
                dtype=dtype, trains=trains, constant_draws=constant, without_norms=of_parts, traced=of_parts
            )
            try:
                run = run_whole(plain, small, setting)
                again = run_whole(plain, small, replace(setting, seed=setting.seed + 1))
            except Exception as error:  # whatever a model says in a type, or of a graph, that it does not take
                mistake = mistake or error
                continue
            if run.other_edges:  # refused, whatever comes out
                return setting, run, note
            if all(difference(again.outputs[name], one) <= _TOLERANCE[dtype] for name, one in run.outputs.items()):
                run.check_comparable(small)
                return setting, run, note
            draws = True
        mistake = None if draws else mistake
        reason = f"ends with {in_one_line(mistake)}" if mistake else _OTHER_DRAWS
        model = own_class(plain).__name__
        note = f"{model} was compared with one process on a small graph in evaluation alone: training {reason}"
    raise NotComparableError(f"there it {reason}") from mistake


def _is_of_batch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shard: Shard) -> bool:
    """True if a pass gets the edges of another graph than the rank's part."""
    edges = edges_among(model.forward, args, kwargs)
    return bool(edges) and not any(one.csr() is shard.adjacency.csr() for one in edges)


def _structure(model: nn.Module) -> tuple[object, ...]:
    """Return what may have changed since a model was compared, values of tensors aside."""
    modules = []
    for name, module in model.named_modules():
        tensors = tuple((key, one.shape, one.dtype, one.device) for key, one in module.named_parameters(recurse=False))
        modules.append((name, id(module), own_class(module), _options(module), tensors))
    return tuple(modules)


def _options(module: nn.Module) -> str:
    """Return the attributes of a module as text; objects by their address."""
    options = {name: value for name, value in vars(module).items() if not name.startswith("_pygdist")}
    options.pop("training", None)  # a module of torch.compile keeps it elsewhere
    return repr({name: value if isinstance(value, _PLAIN) else id(value) for name, value in options.items()})
