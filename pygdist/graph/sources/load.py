"""Sources of graphs: each gives the whole graph as one PyG ``Data``.

A source is a name or an object, so the same one works in a configuration file and in a notebook. Its graph is put into
one form here (edges in ``edge_index``, one column per mask) and checked in :mod:`pygdist.graph.sources.prepare`.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch_geometric.datasets
from torch import Tensor
from torch_geometric.data import Data, Dataset, HeteroData

from pygdist.errors import InputError, did_you_mean, needs
from pygdist.graph.check import MASKS, NOTES, with_tensors
from pygdist.graph.generated.graph import HETEROGENEOUS, HOMOGENEOUS, generate_data
from pygdist.graph.generated.power_law import power_law
from pygdist.graph.generated.sbm import degree_corrected_sbm
from pygdist.graph.sources.arguments import made_arguments
from pygdist.graph.sources.fields import edges_from_adjacency, masks_from_ids, pick_split
from pygdist.graph.sources.hetero import is_hetero_folder, load_hetero
from pygdist.graph.sources.homogeneous import as_homogeneous
from pygdist.graph.sources.npy import load_npy
from pygdist.registry import PlugIns, import_path

log = logging.getLogger(__name__)
GENERATORS: dict[str, Callable[..., Any]] = {
    "sbm": degree_corrected_sbm,
    "power-law": power_law,
    "reference": power_law,  # the graph of the default arguments is used for timings
    **{name: partial(generate_data, name) for name in HOMOGENEOUS},
}
PLUG_INS = PlugIns("dataset", "pygdist.data")
_OF_DATASETS = ("pandas", "scipy")  # packages of the extra


def register_generator(name: str, generator: Callable[..., Any]) -> None:
    """Make ``load_graph(name, **args)`` call ``generator(**args)``.

    Args:
        name: A short name without dots or slashes.
        generator: Returns a PyG ``Data``.

    Raises:
        ValueError: If the name has a dot or a slash, or already names a generator, an OGB dataset or a class of
            ``torch_geometric.datasets``.
    """
    if {".", "/", os.sep} & set(name):
        raise ValueError(f"the generator name '{name}' has a dot or a slash, as class paths and folders do")
    if name in GENERATORS or name in HETEROGENEOUS or name in torch_geometric.datasets.__all__ or name[:5] == "ogbn-":
        raise ValueError(f"the generator name '{name}' is taken by {GENERATORS.get(name) or 'a data set'}")
    GENERATORS[name] = generator


def load_graph(
    dataset: str | os.PathLike[str] | Data | HeteroData | Dataset | Callable[..., Any],
    *,
    split_index: int = 0,
    **args: Any,
) -> Data:
    """Load the whole graph of a source.

    Args:
        dataset: One of

            - the name of a generator: ``sbm``, ``power-law``, ``reference``, a name from :func:`register_generator`, or
              a random graph with the figures of a published graph (``reddit-like``, ``products-like``, ``papers-like``,
              ``mag-like``: :mod:`pygdist.graph.generated.published`);
            - a name that an installed package offers as an entry point of the group ``pygdist.data``, for a function or
              a class as below;
            - a folder of ``.npy`` arrays (:mod:`pygdist.graph.sources.npy`);
            - an OGB node dataset, such as ``ogbn-arxiv`` (extra ``ogb``);
            - a class in ``torch_geometric.datasets``, such as ``Planetoid``, or the dotted path of any class or
              function that returns a ``Data`` or a dataset of one graph;
            - a PyG ``Data``, a dataset of one graph, or any such callable.

            Fields may be NumPy arrays. A split may be given by ids: as ``train_idx``, ``val_idx`` (or ``valid_idx``)
            and ``test_idx``, or as a dictionary ``split_idx`` with the keys ``train``, ``valid`` (or ``val``) and
            ``test``. ``valid_mask`` is another name of ``val_mask``.

            A heterogeneous graph (``mag-like``, its folder, a ``HeteroData``) becomes one graph with ``edge_type``; see
            :func:`~pygdist.graph.as_homogeneous`. The function does not change objects that are passed.
        split_index: If masks have a column for each of several splits, the column to use.
        **args: Arguments of the generator, dataset class or callable, such as ``root`` and ``name``. A transform, and a
            parameter annotated with a class, may be given as in YAML: ``{"class_path": ..., "init_args": {...}}``.

    Returns:
        A graph with ``edge_index`` and the other fields of the source. If this function changed a field, the list
        ``pygdist_notes`` says so.

    Raises:
        InputError: If the source is unknown, missing or not a single graph, or an argument does not fit.

    Example:
        >>> load_graph("sbm", num_nodes=1000)
        >>> load_graph("reddit-like", scale=0.1)
        >>> load_graph("Planetoid", root="data", name="Cora")
    """
    if isinstance(dataset, Data | HeteroData | Dataset):
        name, graph = "dataset", dataset
        _no_arguments(args, "a Data object")
    elif isinstance(dataset, str | os.PathLike):
        name = os.fspath(dataset)
        graph = _by_name(name, args)
    elif callable(dataset):
        name = getattr(dataset, "__name__", type(dataset).__name__)
        graph = _call(dataset, args, name)
    else:
        raise InputError(f"dataset: expected a name, a folder, a Data or a callable, got {type(dataset).__name__}")
    data = copy.copy(_one_graph(graph, name))  # shallow: attributes are replaced below, tensors are shared
    notes = list(data.get(NOTES, []))
    edges_from_adjacency(data, f"dataset '{name}'", notes)
    data = with_tensors(data)
    masks_from_ids(data, int(data.num_nodes or 0), f"dataset '{name}'")
    _pick_splits(data, split_index, notes)
    if notes:
        data[NOTES] = notes
    return data


def dataset_names() -> list[str]:
    """Return the names of generators and of installed packages' datasets, which are not imported."""
    return sorted({*GENERATORS, *HETEROGENEOUS, *PLUG_INS})


def _by_name(name: str, args: Mapping[str, Any]) -> Any:
    if name in PLUG_INS:
        if not _is_built_in(name):
            if Path(name).is_dir():
                log.warning("dataset '%s' is that of an installed package; for the folder write ./%s", name, name)
            return _call(PLUG_INS.load(name), args, name)
        PLUG_INS.pass_over(name, "pygdist")
    if name in GENERATORS:
        return _call(GENERATORS[name], args, name)
    if name in HETEROGENEOUS:
        return _call(_of_types, {"name": name, **args}, name)
    if name.startswith("ogbn-"):
        return _load_ogb(name, args)
    if name in torch_geometric.datasets.__all__:  # before folders: PyG's own root is often called like the class
        return _call(getattr(torch_geometric.datasets, name), args, name)
    if Path(name).is_dir():
        if is_hetero_folder(name):
            return _call(_of_types, {"name": name, **args}, name)
        _no_arguments(args, f"folder {name}")
        return load_npy(name)
    if Path(name).is_file():
        raise InputError(
            f"dataset '{name}' is a file; partition it with pygdist partition --input={name}, and train on the store"
        )
    if "." in name and os.sep not in name:
        if name.partition(".")[0] in sys.stdlib_module_names:
            raise InputError(f"dataset '{name}': Python's own modules hold no dataset; use the path of one")
        return _call(import_path(name, "dataset"), args, name)
    plug_ins = f", nor in an installed package ({', '.join(PLUG_INS)})" if [*PLUG_INS] else ""
    raise InputError(
        f"dataset '{name}': neither a folder, nor a generator ({', '.join(GENERATORS)}){plug_ins}, nor a class in "
        "torch_geometric.datasets; check the spelling, or use a class path such as my_package.MyDataset"
        f"{did_you_mean(name, [*dataset_names(), *torch_geometric.datasets.__all__])}"
    )


def _is_built_in(name: str) -> bool:
    """Tell if a name means something without any plug-in; a folder comes after plug-ins, as it does after PyG's."""
    ours = name in GENERATORS or name in HETEROGENEOUS or name.startswith("ogbn-")
    return ours or name in torch_geometric.datasets.__all__


def _of_types(
    name: str,
    scale: float = 1.0,
    seed: int = 0,
    features: bool = True,
    wrong_labels: float = 0.0,
    reverse: bool = False,
) -> Data:
    graph = load_hetero(name, scale=scale, seed=seed, features=features, wrong_labels=wrong_labels)
    return as_homogeneous(graph, reverse=reverse, name=name)


def _call(factory: Callable[..., Any], args: Mapping[str, Any], name: str) -> Any:
    """Return ``factory(**args)``; arguments that do not fit and missing files become an ``InputError``."""
    if not callable(factory):
        raise InputError(f"dataset '{name}': a {type(factory).__name__}, expected a class or a function")
    made = made_arguments(factory, args, name)
    try:
        return factory(**made)
    except OSError as error:  # includes failed downloads
        raise InputError(f"dataset '{name}': could not be read or downloaded: {error}") from error
    except ImportError as error:
        if error.name in _OF_DATASETS:
            raise needs(f"dataset '{name}'", error.name, "datasets") from error
        raise InputError(f"dataset '{name}': {error}; install the package that it needs") from error
    except InputError:
        raise
    except MemoryError as error:
        raise InputError(f"dataset '{name}': not enough memory: {error} (with {dict(args)})") from error
    except (TypeError, ValueError, AssertionError, LookupError, ArithmeticError) as error:  # of refused arguments
        line = traceback.extract_tb(error.__traceback__)[-1].line
        raise InputError(f"dataset '{name}': {type(error).__name__}: {error or line} (with {dict(args)})") from error


def _no_arguments(args: Mapping[str, Any], source: str) -> None:
    if args:
        raise InputError(f"dataset: {source} takes no arguments, got {', '.join(sorted(args))}")


def _load_ogb(name: str, args: Mapping[str, Any]) -> Data:
    try:
        from ogb.nodeproppred import PygNodePropPredDataset
    except ModuleNotFoundError:
        raise needs(f"dataset '{name}'", "ogb", "ogb") from None
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import GlobalStorage

    # ogb 1.3.6 is older than torch's safe loading, and prints to standard output, which is for results
    safe = torch.serialization.safe_globals([DataEdgeAttr, DataTensorAttr, GlobalStorage])
    with safe, contextlib.redirect_stdout(sys.stderr):
        try:
            dataset = _call(PygNodePropPredDataset, {"name": name, **args}, name)
        except EOFError as error:  # ogb asks on standard input before it downloads more than 1 GB
            raise InputError(
                f"dataset '{name}': ogb asks for confirmation of a large download; run this once in a terminal"
            ) from error
        if dataset.is_hetero:
            raise InputError(
                f"dataset '{name}' is heterogeneous; use the class OGB_MAG of torch_geometric.datasets in its place"
            )
        data: Data = dataset[0]
        data["split_idx"] = dataset.get_idx_split()
    return data


def _one_graph(graph: Any, name: str) -> Data:
    if isinstance(graph, Dataset):
        if len(graph) != 1:
            raise InputError(f"dataset '{name}' holds {len(graph)} graphs; pass one graph, such as dataset[0]")
        graph = graph[0]
    if isinstance(graph, HeteroData):
        return as_homogeneous(graph, name=name)
    if not isinstance(graph, Data):
        raise InputError(f"dataset '{name}' returned a {type(graph).__name__}, expected a torch_geometric Data")
    return graph


def _pick_splits(data: Data, split_index: int, notes: list[str]) -> None:
    for name in MASKS:
        if isinstance(mask := data.get(name), Tensor):
            data[name] = pick_split(name, mask, split_index, notes)
