"""Ranks agree that they run the same model in the same way: a small exchange for each pass, and for each layer.

Modes, frozen parameters and the kinds of inputs decide which exchanges a pass and its backward pass make. A script, or
a model that looks at its rows, may set them on one rank alone. The arguments of a layer are compared when it runs.
"""

from __future__ import annotations

import functools
import inspect
import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing

from pygdist.backends.base import Backend
from pygdist.comm import Communicator, PartCommunicator
from pygdist.comm.derivatives import TRANSFORMED, is_transformed
from pygdist.errors import InputError
from pygdist.graph import Adjacency
from pygdist.hops.arguments import edges_among, mapped, named_values
from pygdist.hops.layer import layer_name, own_class

_PLAIN = (bool, int, float, str, type(None))
_WHOLE = ("int", "uint", "bool")
_MOST_NAMES = 4


def move(backend: Backend, at: str, module: nn.Module) -> None:
    """Note where this rank is in the pass of a model. Exchanges of ranks at different places never meet.

    Args:
        backend: The backend.
        at: The place, such as ``"in propagate {next}"``; ``hops`` is the number of calls of ``propagate`` so far.
        module: The module that runs.
    """
    if not _runs_alone(backend):
        name = backend.kept.names.get(module) or layer_name(module)
        at = at.format(hops=backend.kept.hops, next=backend.kept.hops + 1)
        backend.move(f"{at} of the forward pass ({name})")


def agree_on_layer(
    layer: MessagePassing, backend: Backend, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Compare the arguments of a layer with those of other ranks.

    A model may change a tensor on one rank alone (``if (x < 0).any(): x = x.detach()``), and kinds of arguments decide
    which exchanges the layer makes.

    Returns:
        The arguments; tensors that get a gradient on any rank ask for one on all, so that all run the backward pass.

    Raises:
        InputError: On all ranks, if types, dtypes or widths differ.
    """
    if _runs_alone(backend):
        return args, kwargs
    move(backend, "in propagate {next}", layer)
    _, *values = named_values(forward, (layer, *args), kwargs)
    kinds = [f"{name}: {_kind(value)}" for name, value in values]
    tensors = [value for _, value in values if isinstance(value, Tensor) and not isinstance(value, EdgeIndex)]
    # a bit for each, without gradients too: results for such rows are not kept
    graded = sum(value.requires_grad << place for place, value in enumerate(tensors))
    ranks = backend.over_ranks([float(zlib.crc32(repr(kinds).encode())), float(graded)])
    if bool((ranks == ranks[0]).all()):
        return args, kwargs
    if bool((ranks[:, 0] != ranks[0, 0]).any()):
        _refuse(backend.communicator, layer_name(layer), _Fact("gives", tuple(kinds)))
        raise InputError(f"the ranks give {layer_name(layer)} other arguments")  # further than texts are told
    masks = [int(mask) for mask in ranks[:, 1].tolist()]
    wanted = functools.reduce(operator.or_, masks)

    def ask(name: str, value: Any) -> Any:
        nonlocal wanted
        if not isinstance(value, Tensor) or isinstance(value, EdgeIndex):
            return value
        wanted, asks = divmod(wanted, 2)
        return value.detach().requires_grad_() if asks and not value.requires_grad else value

    (_, *args_), kwargs = mapped(forward, (layer, *args), kwargs, ask)
    return tuple(args_), kwargs


def agree_on_pass(model: nn.Module, backend: Backend, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Compare the pass that this rank begins with those of the others. Every rank that runs it makes the call.

    Returns:
        The kinds of the inputs, equal on all ranks.

    Raises:
        InputError: On all ranks, if their passes differ; the message says how. Under a transformation of torch.
        UnequalRanksError: On all ranks, if they made different exchanges before.
    """
    if is_transformed():
        raise InputError(TRANSFORMED)
    move(backend, "at the start", model)
    inputs = _inputs(model, args, kwargs)
    if not _runs_alone(backend):
        mine = all(_is_of(one, backend.shard.adjacency) for one in edges_among(model.forward, args, kwargs))
        edges = _Fact(f"gets the edges of {'its' if mine else 'another'} graph", ())
        _compare(model, backend.communicator, [_mode(model), _frozen(model), inputs, edges])
        if not mine:
            raise InputError(
                f"{own_class(model).__name__} gets the edges of another graph than the one that its backend was bound "
                "to, of which alone the ranks know which rows to exchange; distribute a copy of the model on the other "
                "graph"
            )
    return inputs.names


def _is_of(edges: Adjacency, graph: Adjacency) -> bool:
    """True for the graph's edges, with whatever weights, and for a copy of them."""
    ours, theirs = graph.csr(), edges.csr()
    if theirs is ours:
        return True
    alike = theirs.num_cols == ours.num_cols and theirs.index.device == ours.index.device
    return alike and torch.equal(theirs.indptr, ours.indptr) and torch.equal(theirs.index, ours.index)


def agree_on_model(model: nn.Module, ranks: Communicator) -> None:
    """Compare modes and frozen parameters with those of the other ranks, which all make the call.

    For ranks that train parts by themselves: their passes make no exchange.

    Raises:
        InputError: On all ranks, if they differ.
    """
    _compare(model, ranks, [_mode(model), _frozen(model)])


def agree_on_parts(parts: Sequence[Mapping[str, Any]], ranks: Communicator) -> None:
    """Compare nodes, edges, classes and splits of the parts of this rank's store with those of the other ranks' stores.

    Machines that partition for themselves, or to which a store was copied, may have others. Of features and other
    floats only shapes and types are compared, since processors round differently.

    Args:
        parts: ``parts`` of the store's ``meta.json``.
        ranks: All ranks make the call.

    Raises:
        InputError: On all ranks, if they differ.
    """
    files = [sorted(part["files"].items()) for part in parts]
    contents = [
        [
            (name, one["dtype"], one["shape"], one["crc32"] if one["dtype"].startswith(_WHOLE) else "")
            for name, one in part
        ]
        for part in files
    ]
    if not ranks.are_alike([float(zlib.crc32(repr(contents).encode()))]):
        raise InputError(
            "the ranks have parts of different partitions, labels or splits; give all machines the same folder, or "
            "copy one folder to all, and fix the seeds of the split and of a partitioner that draws"
        )


def options_of_backend(backend: Backend) -> dict[str, object]:
    """Return class and arguments of a backend that ranks compare: numbers, flags and words, but no ``device``."""
    taken = inspect.signature(type(backend).__init__).parameters.keys() - {"device"}
    plain = {name: one for name, one in backend.arguments().items() if name in taken and isinstance(one, _PLAIN)}
    return {"backend": type(backend).__qualname__} | {f"{name} of the backend": one for name, one in plain.items()}


def options_of_model(model: nn.Module, *, buffers: bool = False) -> dict[str, object]:
    """Return what ranks compare of a model before it is trained.

    These are the classes of its modules, the options of those of torch and PyG, and shapes and dtypes of parameters.

    Args:
        model: The model.
        buffers: Also shapes and dtypes of ``buffers``. A rank may have some of its own, such as weights of its nodes.
    """
    options: dict[str, object] = {}
    for name, module in model.named_modules():
        cls, place = own_class(module), f"module '{name}'" if name else "the model"
        options[place] = cls.__name__
        if cls.__module__.partition(".")[0] in ("torch", "torch_geometric"):
            public = {key: one for key, one in vars(module).items() if not key.startswith("_") and key != "training"}
            options |= {f"{key} of {place}": one for key, one in public.items() if isinstance(one, _PLAIN)}
    tensors: list[tuple[str, str, Tensor]] = [("parameter", *one) for one in model.named_parameters()]
    tensors += [("buffer", *one) for one in model.named_buffers()] if buffers else []
    for kind, name, value in tensors:
        shape = "not known yet" if is_lazy(value) else tuple(value.shape)
        options[f"{kind} '{name}'"] = f"{str(value.dtype).removeprefix('torch.')} of shape {shape}"
    return options


def _compare(model: nn.Module, ranks: Communicator, facts: list[_Fact]) -> None:
    if ranks.are_alike([float(zlib.crc32(repr(fact).encode())) for fact in facts]):
        return
    for fact in facts:
        _refuse(ranks, own_class(model).__name__, fact)
    raise InputError(f"the ranks run {own_class(model).__name__} with other modules or inputs")


def _runs_alone(backend: Backend) -> bool:
    """True if no other rank runs the model at the same time, or parts run in turn, which repeat each exchange."""
    alone = backend.num_ranks == 1 or backend.abilities.trains_parts or backend.abilities.mini_batches
    return alone or isinstance(backend.communicator, PartCommunicator)


def _refuse(ranks: Communicator, name: str, fact: _Fact) -> None:
    """Raise if a fact differs between ranks, all of which tell theirs."""
    told = [text.split("; ") for text in ranks.gather_text("; ".join((fact.said, *fact.names)))]
    if all(one == told[0] for one in told):
        return
    alike = set(told[0][1:]).intersection(*told)
    texts = (f"rank {rank} {_clause(said, names, alike)}" for rank, (said, *names) in enumerate(told))
    raise InputError(f"{', '.join(texts)}: all ranks must run {name} in the same way")


class _Fact(NamedTuple):
    """Something that must be equal on all ranks: a clause about this rank, and the details."""

    said: str
    names: tuple[str, ...]


def _clause(said: str, names: list[str], alike: set[str]) -> str:
    """Say what sets a rank apart."""
    names = [name for name in names if name not in alike]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{said} {', '.join(names[:_MOST_NAMES])}{more}".strip()


def _mode(model: nn.Module) -> _Fact:
    """The mode of the model, and the modules in the other."""
    mode, gradients = model.training, torch.is_grad_enabled()
    others = tuple(name for name, module in model.named_modules() if module.training != mode)
    said = f"is in {'training' if mode else 'evaluation'}{'' if gradients or not mode else ' without gradients'}"
    return _Fact(f"{said}, but not" if others else said, others)


def _frozen(model: nn.Module) -> _Fact:
    """The parameters that get no gradient."""
    names = tuple(name for name, one in model.named_parameters() if not one.requires_grad)
    return _Fact("has frozen" if names else "has no frozen parameters", names)


def _inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Fact:
    """The kinds of the inputs, and the values of flags and texts; numbers, and numbers of rows, may differ."""
    values = named_values(model.forward, args, dict(sorted(kwargs.items())))
    return _Fact("gives", tuple(f"{name}: {_kind(value)}" for name, value in values))


def _kind(value: Any) -> str:
    if value is None or isinstance(value, (bool, str)):
        return repr(value)
    if not isinstance(value, Tensor) or isinstance(value, EdgeIndex):
        return type(value).__name__
    kind = "parameter" if isinstance(value, nn.Parameter) else "tensor"
    return f"{kind} of {value.dtype}, {value.dim()} dimensions"
