"""Runs of a model on the small graph, whole and in parts, and how much their results differ."""

from __future__ import annotations

import contextlib
import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from pygdist.backends.base import Backend
from pygdist.comm import Communicator
from pygdist.graph import Shard
from pygdist.hops.arguments import copied, tensors_of
from pygdist.hops.draws import ConstantDraws, pass_on
from pygdist.hops.untouched import IrreversibleError, Snapshot
from pygdist.nn.aggregation import pads
from pygdist.nn.norms import GLOBAL_NORMS
from pygdist.routing.edges import reason_against
from pygdist.routing.miniature import Miniature, NotComparableError

Route: TypeAlias = Callable[[nn.Module, Backend], nn.Module]
"""Puts a model on a backend."""

_SEED = 12
_LONGEST = 64  # in-edges of a node
_FLOOR = 1e-9  # below it are remainders of numbers that cancel


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of all runs that are compared.

    Attributes:
        dtype: The type of all numbers.
        trains: Run in training mode too. A model that draws by NumPy there, say, can be compared in evaluation alone.
        constant_draws: Make random numbers that torch draws constants, the same on any number of ranks.
        traced: Note what each module puts out.
        without_norms: Norms over nodes pass their input on, and aggregations pad to one length.
        seed: Seed of the random generators.
    """

    dtype: torch.dtype = torch.float64
    trains: bool = True
    constant_draws: bool = False
    traced: bool = False
    without_norms: bool = False
    seed: int = _SEED


@dataclass
class Run:
    """Results of three passes: two in training, as the second may use what the first one kept, and an evaluation.

    Attributes:
        outputs: By pass, and position of a tensor in the output.
        gradients: By parameter: gradients of a loss over the training nodes.
        buffers: By name, afterwards.
        modules: What each module put out, by its name, in the order in which they ended; empty unless traced.
        numbers: By name: single numbers with a gradient, as of a loss, that training put out or left in a module.
        num_hops: Calls of ``propagate`` in each pass, by layers that are not distributed.
        other_edges: By path of a layer: a clause about edges that it gets and the graph does not have.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    modules: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    numbers: dict[str, Tensor] = field(default_factory=dict)
    num_hops: list[int] = field(default_factory=list)
    other_edges: dict[str, str] = field(default_factory=dict)

    def check_comparable(self, small: Miniature) -> None:
        """Refuse results of the whole graph that tell nothing of its parts.

        Raises:
            NotComparableError: If no output has a row per node or edge, or most numbers are not finite.
        """
        rows = [one for one in self.outputs.values() if _kind(one, small) is not None]
        if not rows:
            raise NotComparableError("its output has no tensor with a row for each node or edge")
        finite = sum(int(one.isfinite().sum()) for one in rows)
        if 2 * finite < sum(one.numel() for one in rows):
            raise NotComparableError("most numbers of its output are infinite or NaN there")


def run_whole(model: nn.Module, small: Miniature, setting: Setting) -> Run:
    """Run a copy of a model that is not distributed on the whole graph."""
    run = Run()

    def note(path: str, layer: MessagePassing, given: tuple[Any, ...]) -> None:
        run.num_hops[-1] += 1
        if reason := reason_against(layer, given, small.graph.edge_index, small.num_nodes):
            run.other_edges.setdefault(path, reason)

    with _outside_as_before(model), _draws(setting):
        copied_model = _prepared(model, setting)
        for path, module in copied_model.named_modules():
            if isinstance(module, MessagePassing):
                module.register_propagate_forward_pre_hook(partial(note, path))
        _pass_by(copied_model, small, None, None, run, setting)
    return run


def _draws(setting: Setting) -> contextlib.AbstractContextManager[object]:
    return ConstantDraws() if setting.constant_draws else contextlib.nullcontext()


@contextlib.contextmanager
def _outside_as_before(model: nn.Module) -> Iterator[None]:
    """Put back what copies of a model share with it: globals, classes, and what hooks close over."""
    try:
        snapshot = Snapshot(model)
    except IrreversibleError:
        yield
        return
    try:
        yield
    finally:
        snapshot.restore()


def run_parts(
    model: nn.Module,
    backend: Backend,
    small: Miniature,
    communicator: Communicator,
    route: Route,
    setting: Setting,
    whole: Run,
) -> list[tuple[Shard, Run]]:
    """Run copies of a model on this rank's parts of the graph; gradients are summed over all parts.

    Args:
        model: The model, not distributed.
        backend: A backend that is bound to nothing, and is so afterwards.
        small: The graph. A rank has the part of its own number; all parts if it is alone.
        communicator: The ranks; each makes the call.
        route: Puts a copy of the model on the backend.
        setting: Settings.
        whole: The results of the whole graph.
    """
    runs = []
    parts = range(communicator.rank, small.num_parts, communicator.world_size)
    for shard in small.shards(parts, setting.dtype, backend.abilities):
        backend.bind(shard, communicator)
        try:
            with _outside_as_before(model), _draws(setting):
                run, placed = Run(), route(_prepared(model, setting), backend)
                _pass_by(placed, small, shard, whole, run, setting, backend)
            runs.append((shard, run))
        finally:
            backend.unbind()
    names = list(runs[0][1].gradients)
    flat = [torch.cat([run.gradients[name].flatten() for name in names]) for _, run in runs] if names else []
    if flat:
        total = communicator.sum_over_ranks(torch.stack(flat).sum(0), label="gradients of the check")
        for _, run in runs:
            pieces = total.split([run.gradients[name].numel() for name in names])
            run.gradients = {name: one.view_as(run.gradients[name]) for name, one in zip(names, pieces, strict=True)}
    return runs


def _prepared(model: nn.Module, setting: Setting) -> nn.Module:
    """Return a copy to run."""
    model = copy.deepcopy(model).to(setting.dtype)
    model.zero_grad(set_to_none=True)
    for module in model.modules():
        if setting.without_norms and any(cls in GLOBAL_NORMS for cls in type(module).__mro__):
            module.forward = pass_on
        elif setting.without_norms and pads(type(module)):
            module.forward = partial(type(module).forward, module, max_num_elements=_LONGEST)
    return model


def _pass_by(
    model: nn.Module,
    small: Miniature,
    shard: Shard | None,
    whole: Run | None,
    run: Run,
    setting: Setting,
    backend: Backend | None = None,
) -> None:
    """Make the passes of a run on the whole graph, or on a part by a backend, and note their results."""
    given = small.whole(setting.dtype) if shard is None else small.part(shard, setting.dtype)
    torch.manual_seed(setting.seed)
    random.seed(setting.seed)
    np.random.seed(setting.seed)  # noqa: NPY002 (the global one is what a model may use)
    for number, training in enumerate((setting.trains, setting.trains, False)):
        run.num_hops.append(0)
        args, kwargs = copied(model.forward, *given)
        with _traced(model, run, number) if setting.traced else contextlib.nullcontext():
            out = model.train(training)(*args, **kwargs)
        if backend is not None:
            backend.communicator.compare_calls()  # before a backward pass, whose exchanges would wait
        # whole numbers may be edges, which are of another class on a rank
        numbers = [one for one in tensors_of(out) if one.is_floating_point() or one.is_complex()]
        outputs = {f"{number} {at}": one for at, one in enumerate(numbers)}
        run.outputs |= {name: one.detach().clone() for name, one in outputs.items()}
        if number == 1:
            run.numbers |= _numbers(model, outputs)
        if number < 2:  # first on all nodes, then on those of training, which some parts have not
            _learn(outputs, small, shard, run if whole is None else whole, everywhere=number == 0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            none = parameter.grad is None
            run.gradients[name] = torch.zeros_like(parameter) if none else parameter.grad.to_dense()  # type: ignore[union-attr]
    run.buffers |= {name: one for name, one in model.named_buffers() if one.is_floating_point()}


def _numbers(model: nn.Module, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return single numbers with a gradient, among the outputs and the attributes of modules."""
    named = {f"output {name.split()[1]}": one for name, one in outputs.items()}
    for path, module in model.named_modules():
        named |= {f"{path}.{name}".strip("."): one for name, one in vars(module).items() if isinstance(one, Tensor)}
    return {name: one.detach().clone() for name, one in named.items() if one.dim() == 0 and one.requires_grad}


def _learn(outputs: dict[str, Tensor], small: Miniature, shard: Shard | None, whole: Run, *, everywhere: bool) -> None:
    """Run the backward pass of a random weighted sum over training nodes (all, if ``everywhere``), and over edges.

    Outputs with other rows, and numbers such as a loss, have no part in the sum: nobody knows how ranks add them up.
    """
    terms = []
    for at, (name, one) in enumerate(outputs.items()):
        kind = _kind(whole.outputs[name], small) if name in whole.outputs else None
        if kind is None or not one.requires_grad or not one.is_floating_point():
            continue
        weight = torch.randn(whole.outputs[name].shape, generator=torch.Generator().manual_seed(at))
        dim, of_nodes = kind
        if of_nodes:
            weight.movedim(dim, 0)[~(small.graph.trains | everywhere)] = 0
        if shard is not None:
            weight = weight.index_select(dim, (shard.owned_id if of_nodes else shard.e_id).cpu())
        if weight.shape == one.shape:  # infinite numbers, which are compared as they are, add nothing
            terms.append(torch.where(one.isfinite(), one * weight.to(one), 0.0).sum().double())
    if terms:
        torch.stack(terms).sum().backward()


def _kind(x: Tensor, small: Miniature) -> tuple[int, bool] | None:
    """Return the dimension in which a result for the whole graph has a row per node (True) or edge (False)."""
    for num_rows, of_nodes in ((small.num_nodes, True), (small.graph.edge_index.size(1), False)):
        dim = rows_dim(x, num_rows)
        if dim is not None:
            return dim, of_nodes
    return None


@contextlib.contextmanager
def _traced(model: nn.Module, run: Run, number: int) -> Iterator[None]:
    """Note what each module puts out in pass ``number``."""
    calls: Counter[str] = Counter()
    noted: dict[tuple[str, int], Tensor] = {}

    def begin(*_: Any) -> None:  # what came before were rehearsals of a backend
        calls.clear()
        noted.clear()

    def note(name: str, out: Any) -> None:
        for one in (one for one in tensors_of(out) if one.is_floating_point()):
            noted[name, number * 1000 + calls[name]] = one.detach().clone()
            calls[name] += 1

    hooks, inside = [model.register_forward_pre_hook(begin)], set[nn.Module]()
    for name, module in model.named_modules():
        if module not in inside:  # the inside of a layer sees other rows and edges on a rank
            hooks.append(module.register_forward_hook(lambda _, __, out, name=name: note(name, out)))
        if isinstance(module, MessagePassing):
            inside.update(module.modules())
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    run.modules |= noted


# -- differences -----------------------------------------------------------------------------------------------------


def differences(part: Run, whole: Run, small: Miniature, shard: Shard) -> dict[str, float]:
    """Return how much each result of a part differs from that of the whole graph, relative to the largest number there.

    Keys are ``output`` and names of parameters and buffers; the gradients of all parameters count as one vector.
    """
    worst = 0.0
    for name, theirs in whole.outputs.items():
        worst = max(worst, _of_rows(part.outputs.get(name), theirs, small, shard))
    scale = max((float(one.abs().max()) for one in whole.gradients.values() if one.numel()), default=0.0)
    apart = {"output": worst}
    for name, one in whole.gradients.items():
        apart[f"gradient of '{name}'"] = difference(part.gradients.get(name), one, scale)
    for name, one in whole.buffers.items():
        apart[f"buffer '{name}'"] = difference(part.buffers.get(name), one)
    return apart


def numbers_apart(part: Run, whole: Run) -> list[float]:
    """Return how much each single number of a part differs from that of the whole graph."""
    return [difference(part.numbers.get(name), one) for name, one in whole.numbers.items()]


def first_difference(part: Run, whole: Run, small: Miniature, shard: Shard, tolerance: float) -> int:
    """Return the place, among what modules put out, of the first that differs; their number if none does."""
    for place, (name, theirs) in enumerate(whole.modules.items()):
        if _of_rows(part.modules.get(name), theirs, small, shard) > tolerance:
            return place
    return len(whole.modules)


def _of_rows(ours: Tensor | None, theirs: Tensor, small: Miniature, shard: Shard) -> float:
    """Compare the rows of a part's own nodes or edges; 0 if the tensors are of something else."""
    if ours is None:
        return float("inf")
    kind = _kind(theirs, small)
    if kind is not None:
        dim, of_nodes = kind
        rows = (shard.owned_id if of_nodes else shard.e_id).to(theirs.device)
        if ours.dim() != theirs.dim() or ours.size(dim) < rows.numel():
            return float("inf")
        return difference(ours.narrow(dim, 0, rows.numel()), theirs.index_select(dim, rows))  # replicas come last
    return difference(ours, theirs) if ours.dim() and ours.shape == theirs.shape else 0.0


def rows_dim(x: Tensor, num_rows: int) -> int | None:
    """Return the dimension in which a tensor has so many rows; ``None`` if it has not."""
    return next((dim for dim, size in enumerate(x.shape) if size == num_rows), None)


def difference(ours: Tensor | None, theirs: Tensor, scale: float = 0.0) -> float:
    """Return the largest difference, relative to the largest number of ``theirs``, or to ``scale`` if that is larger.

    Equal infinities, and two NaNs, count as equal.
    """
    if ours is None or ours.shape != theirs.shape:
        return float("inf")
    if not theirs.numel():
        return 0.0
    ours, theirs = (torch.view_as_real(one) if one.is_complex() else one.double() for one in (ours, theirs))
    apart = torch.where((ours == theirs) | (ours.isnan() & theirs.isnan()), 0.0, (ours - theirs).abs())
    absolute, largest = float(apart.max()), float(theirs.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return float("inf") if absolute != absolute else absolute / max(largest, scale, _FLOOR)
