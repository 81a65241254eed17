"""Calls of a model: ``model(x, edge_index)``, with further inputs of edges and nodes, or ``model(data)``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.data.storage import BaseStorage
from torch_geometric.nn import MessagePassing

from pygdist.errors import InputError
from pygdist.graph.check import EDGE_FIELDS, FEATURES, MASKS, NODE_INPUTS

_OF_OTHER_TYPES = (
    "same dtype", "same datatype", "scalar type", "not implemented for '", "should be the same", "can't be cast",
    "Integers to negative", "floating point", "bool tensor",
)  # fmt: skip


_INTEGERS = ("long", "int", "char", "byte", "short", "bool")  # in torch's words


_DATA = ("data", "graph", "batch")
_NO_INPUTS = frozenset({*EDGE_FIELDS, *MASKS, "x", "y", "edge_index", "batch", "ptr"})
_STORAGES = (Data, BaseStorage)


def takes_data(model: nn.Module) -> bool:
    """Return true for a model whose ``forward`` takes a graph as one object, as in PyG's tutorials: ``model(data)``.

    Such a ``forward`` has one parameter without a default, called ``data``, ``graph`` or ``batch``, or annotated as a
    ``Data``.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    needed = [one for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    return len(needed) == 1 and (needed[0].name in _DATA or needed[0].annotation in (Data, "Data"))


def arguments_of(model: nn.Module, graph: Any, edges: Tensor) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """Return the arguments of a model's call for ``graph`` (a ``Data`` or ``Shard``), with these edges."""
    inputs = {**edge_inputs(model, graph), **node_inputs(model, graph)}
    return ((Data(x=graph.x, edge_index=edges, **inputs),), {}) if takes_data(model) else ((graph.x, edges), inputs)


def edge_inputs(model: nn.Module, graph: Any) -> dict[str, Tensor]:
    """Return edge weights, attributes and types of ``graph`` (a ``Data`` or ``Shard``) that ``model.forward`` takes."""
    taken = EDGE_FIELDS if takes_data(model) else inspect.signature(model.forward).parameters
    unused = set()
    if type(model).__module__.startswith("torch_geometric."):
        # PyG's models have every parameter, even if their layers do not use it
        unused = {name for name in EDGE_FIELDS if getattr(model, f"supports_{name}", True) is False}
        layers = [layer for layer in model.modules() if isinstance(layer, MessagePassing)]
        if all(getattr(layer, "edge_dim", 0) is None for layer in layers):
            unused.add("edge_attr")
    values = {name: getattr(graph, name, None) for name in EDGE_FIELDS if name in taken and name not in unused}
    return {name: value for name, value in values.items() if value is not None}


def names_of_node_inputs(model: nn.Module) -> list[str] | None:
    """Return the names of tensors of nodes that ``model.forward`` may take by name; ``None`` for any (``model(data)``).

    For PyG's own models these are the parameters without a default: the others are options.
    """
    if takes_data(model):
        return None
    of_user = not type(model).__module__.startswith("torch_geometric.")
    parameters = list(inspect.signature(model.forward).parameters.values())[2:]
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    return [one.name for one in named if one.name not in _NO_INPUTS and (of_user or one.default is one.empty)]


def node_inputs(model: nn.Module, graph: Any) -> dict[str, Tensor]:
    """Return further tensors of nodes of ``graph`` (a ``Data`` or ``Shard``) that ``model.forward`` takes by name."""
    held = getattr(graph, NODE_INPUTS, None) or ()
    names = names_of_node_inputs(model)
    taken = [name for name in held if names is None or name in names]
    return {name: held[name] if isinstance(held, Mapping) else getattr(graph, name) for name in taken}


def outputs_of(model: nn.Module, graph: Any, edges: Tensor) -> Any:
    """Return the output of ``model`` for a graph, of any type.

    Args:
        model: Any module called as ``model(x, edge_index)``, with edge inputs that its ``forward`` takes; or as
            ``model(data)`` (:func:`takes_data`).
        graph: A ``Data`` or a ``Shard``.
        edges: The ``edge_index`` to pass to the model.

    Raises:
        InputError: If the model takes another number of features than the graph has.
    """
    width, (args, inputs) = graph.x.size(1), arguments_of(model, graph, edges)
    try:
        inspect.signature(model.forward).bind(*args, **inputs)
    except TypeError as error:
        call = ", ".join(["x", "edge_index", *(f"{name}=..." for name in inputs)])
        raise InputError(
            f"{type(model).__name__}.forward cannot be called as model({call}): {error}; wrap it in a module that can "
            "(the graph's further tensors of nodes are passed by name, those of edges in edge_attr)"
        ) from error
    try:
        return model(*args, **inputs)
    except AttributeError as error:
        if not takes_data(model) or getattr(error, "name", None) is None or not isinstance(error.obj, _STORAGES):
            raise
        raise InputError(
            f"{type(model).__name__}.forward reads '{error.name}' of the data, which holds x, the edges and their "
            "values, and further tensors with a row per node (unless the backend trains parts or batches), nothing else"
        ) from error
    except (RuntimeError, TypeError, InputError) as error:
        _explain_integers(error, {"x": graph.x, **edge_inputs(model, graph)})
        if "shapes cannot be multiplied" not in str(error) or f"x{width} and" not in str(error):
            raise
        raise InputError(
            f"the model does not accept the graph's {width} features per node ({error}); "
            f"set the model's in_channels to {width}, or to -1 to take it from the graph"
        ) from error


def call_encoder(model: nn.Module, graph: Any, edges: Tensor) -> Tensor:
    """Return the output of ``model`` for a graph: one row per node (per owned node of a shard).

    The arguments are those of :func:`outputs_of`.

    Raises:
        InputError: As :func:`outputs_of`, and if the output is not a matrix.
    """
    return checked_rows(
        outputs_of(model, graph, edges), "wrap the model in a module that returns one tensor with a row per node"
    )


def _explain_integers(error: Exception, inputs: Mapping[str, Tensor]) -> None:
    """Raise an ``InputError`` if a model failed at the type of integers of the graph.

    Plain PyG fails too, with an error of torch's that names neither the field nor the remedy.
    """
    integers = {name: value for name, value in inputs.items() if name in FEATURES and not value.is_floating_point()}
    told = str(error)
    if integers and any(one in told for one in _OF_OTHER_TYPES) and any(one in told.lower() for one in _INTEGERS):
        fields = " and ".join(f"{name} ({value.dtype})".replace("torch.", "") for name, value in integers.items())
        raise InputError(
            f"the model does not take {fields} of the graph as it is ({error}); convert it in the model, for example "
            f"{next(iter(integers))}.float(), or all such fields with float_features=True (--data.float_features=true)"
        ) from error


def checked_tensor(out: Any, remedy: str) -> Tensor:
    """Refuse an output that is not a tensor; ``remedy`` says what to do with several outputs."""
    if not isinstance(out, Tensor):
        raise InputError(f"the model returns a {type(out).__name__}, expected one tensor; {remedy}")
    return out


def checked_rows(out: Any, remedy: str) -> Tensor:
    """Refuse an output that is not a matrix; ``remedy`` says what to do with several outputs."""
    if checked_tensor(out, remedy).dim() != 2:
        raise InputError(f"the model returns a tensor of shape {tuple(out.shape)}, expected one row per node")
    tensor: Tensor = out
    return tensor


def checked_columns(out: Tensor, *, num_classes: int, multi_label: bool) -> Tensor:
    """Refuse an output without a column for every class."""
    if out.size(1) != num_classes if multi_label else out.size(1) < num_classes:
        raise InputError(
            f"the model returns {out.size(1)} values per node, but the graph has {num_classes} classes; set the "
            f"model's out_channels to {num_classes}"
        )
    return out


def fill_in_sizes(model: nn.Module, graph: Any) -> None:
    """Set the input size of layers with ``in_channels=-1`` from ``graph``, in place.

    Runs the model as plain PyG, in evaluation mode, on two nodes with features as wide as the graph's: nothing is
    exchanged, and running statistics of norms do not change.
    """
    lazy = next((p for p in model.parameters() if isinstance(p, nn.UninitializedParameter)), None)
    if lazy is None:
        return
    modes = {module: module.training for module in model.modules()}
    loops = torch.arange(2, device=lazy.device).repeat(2, 1)
    further = node_inputs(model, graph)
    inputs = {"x": graph.x, **edge_inputs(model, graph), **further}
    small = {  # 0 is the number of a type, and of a row of any embedding
        name: torch.ones((2, *value.shape[1:])).to(lazy)
        if value.is_floating_point()
        else value.new_zeros((2, *value.shape[1:]), device=lazy.device)
        for name, value in inputs.items()
    }
    try:
        with torch.no_grad():
            args, others = arguments_of(model, SimpleNamespace(**small, **{NODE_INPUTS: [*further]}), loops)
            model.eval()(*args, **others)
    except (RuntimeError, TypeError) as error:
        _explain_integers(error, inputs)
        raise
    finally:
        for module, training in modes.items():
            module.training = training
