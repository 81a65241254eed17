"""One form for every field of a graph before training, with notes on every change.

Random splits or removed edges that nobody mentions make results on "the same" graph incomparable, so every change has a
note in plain words. Nothing else is changed than was asked for.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import warnings
from collections.abc import Collection, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data

from pygdist.errors import InputError
from pygdist.graph.check import (
    FEATURES,
    FIELDS,
    LEFT_OUT,
    MASKS,
    NODE_INPUTS,
    NOTES,
    are_numbers,
    as_field,
    check,
    is_multi_label,
    plain,
    rows_of,
    with_tensors,
)
from pygdist.graph.sources.edges import drop_duplicates, drop_self_loops, make_symmetric
from pygdist.graph.streams.tables import first_rounded

log = logging.getLogger(__name__)

DEFAULT_SPLIT = (0.5, 0.25, 0.25)


def prepare(
    data: Data,
    *,
    symmetrize: bool = False,
    remove_duplicates: bool = False,
    remove_self_loops: bool = False,
    float_features: bool = False,
    float_labels: bool = False,
    split: tuple[float, float, float] | None = None,
    split_seed: int = 0,
    num_classes: int | None = None,
    node_inputs: Collection[str] | None = (),
) -> tuple[Data, list[str]]:
    """Check a graph, put its fields into one form, and change its edges if requested.

    Self-loops are removed first, then reverse edges added, then duplicates merged.

    Args:
        data: A graph from :func:`pygdist.graph.load_graph`. It is not changed; tensors that are already in the right
            form are shared with the result.
        symmetrize: Add the reverse of every edge whose reverse is missing, with the same weight, attributes and type.
        remove_duplicates: Keep one edge of each (source, target, type): weights are summed, attributes averaged.
        remove_self_loops: Remove the edges from a node to itself.
        float_features: Convert integer features of nodes and edges to float32; by default they stay integers.
        float_labels: Labels are numbers to predict, even if all labels are whole. By default whole labels are classes.
        split: Shares of the labelled nodes for training, validation and test. By default the masks of the dataset are
            kept; for a dataset without masks, a random split of 50/25/25 is drawn.
        split_seed: Seed of the drawn split.
        num_classes: Number of classes; the largest label plus one by default.
        node_inputs: Names of further tensors of nodes to keep, such as ``pos``. Names that the graph lacks are ignored;
            ``None`` keeps all.

    Returns:
        The prepared graph, and a list of notes, one sentence for each change. Fields of the graph:

        - ``edge_index``: int64;
        - ``x``: float32 or float64; without ``float_features`` also integers or bool, as in the dataset;
        - ``y``: absent if the dataset has no labels. Classes are int64 of shape ``(N,)``, -1 = unlabelled; a matrix
          with a single 1 in each row (one-hot) becomes classes. Several labels per node are a float32 matrix of 0 and
          1. Numbers to predict are float32, float64 or int64, of shape ``(N, 1)``, ``(N, k)`` or with more dimensions.
          In a matrix of floats a row of NaN is unlabelled;
        - ``train_mask``, ``val_mask``, ``test_mask``: bool, true on labelled nodes only;
        - ``edge_weight`` (float), ``edge_attr`` (types as of ``x``) and ``edge_type`` (int64), if the dataset has them;
        - ``num_classes``: 0 for numbers to predict;
        - the tensors of ``node_inputs``, their names, and the names of the tensors of nodes that were left out.

    Raises:
        InputError: If :func:`check` refuses the graph; ``split`` is not three shares with a sum above 0, up to 1;
            ``split`` is given for a graph without labels; ``split_seed`` is out of range; a tensor of ``node_inputs``
            is not a dense row per node; float64 rounds an edge weight; or duplicates have different integer attributes.
    """
    data = with_tensors(data)
    check(data, num_classes=num_classes, float_labels=float_labels)
    notes: list[str] = list(data.get(NOTES, []))
    num_nodes = data["x"].size(0)
    fields = {name: value for name in FIELDS if isinstance(value := data.get(name), Tensor)}
    fields = {name: value.detach().cpu() for name, value in fields.items()}
    inputs = _inputs_of_nodes(data, num_nodes, node_inputs, notes)
    used = {*FIELDS, *inputs, "num_nodes", "num_classes", NOTES, NODE_INPUTS, LEFT_OUT}
    if unused := sorted(set(data.keys()) - used):
        notes.append(f"left out unused attributes: {', '.join(unused)}")
    left_out = [name for name in unused if isinstance(data[name], Tensor) and data.is_node_attr(name)]
    names = {name: value for name, value in ((NODE_INPUTS, [*inputs]), (LEFT_OUT, left_out)) if value}
    _unify(fields, float_features, notes)
    if remove_self_loops:
        drop_self_loops(fields, notes)
    if symmetrize:
        make_symmetric(fields, num_nodes, notes)
    if remove_duplicates:
        drop_duplicates(fields, num_nodes, notes)
    num_classes = prepare_nodes(
        fields,
        num_nodes,
        split=split,
        split_seed=split_seed,
        float_labels=float_labels,
        num_classes=num_classes,
        notes=notes,
    )
    return Data(**fields, **inputs, num_classes=num_classes, **names), notes


def _inputs_of_nodes(data: Data, num_nodes: int, names: Collection[str] | None, notes: list[str]) -> dict[str, Tensor]:
    """Return further tensors of nodes by name, in types of a store; with ``None`` all that there are."""
    inputs = {}
    for name in sorted(data.keys()) if names is None else names:  # PyG gives the keys in any order
        value = data.get(name)
        if name in FIELDS or not name.isidentifier() or not isinstance(value, Tensor) or not data.is_node_attr(name):
            continue
        if value.layout is not torch.strided or value.dtype.is_complex or value.size(0) != num_nodes:
            if names is not None:
                raise InputError(f"{name}: {value.dtype} of shape {tuple(value.shape)}, expected a dense row per node")
            continue
        value = as_field(name, value).detach().cpu()
        if value.dtype in (torch.float16, torch.bfloat16):
            notes.append(f"converted {name} from {value.dtype} to float32".replace("torch.", ""))
            value = value.float()
        inputs[name] = value
    return inputs


def tell(notes: Iterable[str]) -> None:
    """Show notes: as lines of the log where these are seen, as on the command line, else as warnings."""
    for note in notes:
        if log.isEnabledFor(logging.INFO):
            log.info("%s", note)
        else:
            warnings.warn(note, stacklevel=3)


def prepare_nodes(
    fields: dict[str, Tensor],
    num_nodes: int,
    *,
    split: tuple[float, float, float] | None,
    split_seed: int,
    float_labels: bool,
    num_classes: int | None,
    notes: list[str],
) -> int:
    """Put labels and masks into one form, and draw a split if needed, as :func:`prepare` describes.

    ``fields`` are ``y`` and masks, if they exist; changed in place. A note on each change is appended. Returns the
    number of classes; 0 if labels are numbers to predict.
    """
    if not 0 <= split_seed < 1 << 64:
        raise InputError(f"split_seed is {split_seed}, expected 0 to 2**64 - 1")
    counted = 0
    for name in MASKS:
        if name in fields:
            fields[name] = fields[name].to(torch.bool)
    if "y" in fields and num_classes is None and are_numbers(fields["y"], float_labels):
        fields["y"] = _unify_numbers(fields["y"], notes)
    elif "y" in fields:
        y = _unify_labels(fields["y"], notes)
        counted = fields["y"].size(1) if is_multi_label(fields["y"]) else count_classes(y)
        fields["y"] = y
    _set_masks(fields, num_nodes, split, split_seed, notes)
    return num_classes or counted


def count_classes(y: Tensor | None) -> int:
    """Return the number of classes of labels that :func:`prepare` returned; 0 without labels, or if they are numbers.

    A matrix of 0 and 1 counts as several labels per node.
    """
    if y is None or y.numel() == 0:
        return 0
    if y.dim() == 1:
        return int(y.max()) + 1
    return y.size(1) if is_multi_label(y) and not are_numbers(y) else 0


def labelled_nodes(y: Tensor) -> Tensor:
    """Return a mask of the nodes that have a label, ``(N,)`` bool, from labels that :func:`prepare` returned."""
    if y.dim() == 1:
        return y >= 0
    missing = (torch.isnan(block).flatten(1).any(dim=1) for _, block in rows_of(y))
    return torch.cat([y.new_empty(0, dtype=torch.bool), *(~one for one in missing)])


def fingerprint(data: Data) -> str:
    """Hash a prepared graph's content: names, types, shapes and bytes of the fields that pygdist uses.

    Returns:
        32 hexadecimal digits; equal on every machine of the same byte order.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in (*FIELDS, *data.get(NODE_INPUTS, ())):
        value = data.get(name)
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
            for _, block in rows_of(value):
                digest.update(np.ascontiguousarray(block.numpy()).data)
    return digest.hexdigest()


def _unify(fields: dict[str, Tensor], float_features: bool, notes: list[str]) -> None:
    """Give features and edges their one type and shape."""
    x = fields["x"]
    if x.layout is not torch.strided:
        notes.append(f"made sparse features dense: {x.size(0)} x {x.size(1)}")
        fields["x"] = x = x.to_dense()
    fields["edge_index"] = plain(fields["edge_index"]).to(torch.int64)
    for name in ("x", "edge_weight", "edge_attr"):
        if name not in fields or fields[name].dtype in (torch.float32, torch.float64):
            continue
        if float_features or name not in FEATURES or fields[name].is_floating_point():
            dtype = torch.float32 if name in FEATURES else _weight_type(fields[name])
            notes.append(f"converted {name} from {fields[name].dtype} to {dtype}".replace("torch.", ""))
            fields[name] = fields[name].to(dtype)
    if "edge_weight" in fields:
        fields["edge_weight"] = fields["edge_weight"].reshape(-1)
    if "edge_type" in fields:
        fields["edge_type"] = fields["edge_type"].reshape(-1).to(torch.int64)


def _weight_type(weight: Tensor) -> torch.dtype:
    """Return float32, or float64 for integers that float32 rounds."""
    if not weight.is_floating_point() and (edge := first_rounded(weight.numpy())) is not None:
        raise InputError(f"edge_weight: edge {edge} has weight {int(weight.reshape(-1)[edge])}, which float64 rounds")
    exact = weight.to(torch.float64)
    return torch.float32 if torch.equal(exact.to(torch.float32).to(torch.float64), exact) else torch.float64


def _unify_numbers(y: Tensor, notes: list[str]) -> Tensor:
    """Return numbers to predict with a row for each node: float32, float64, or int64."""
    supported = y.dtype in (torch.float32, torch.float64, torch.int64)
    dtype = y.dtype if supported else torch.float32 if y.is_floating_point() else torch.int64
    if not supported:
        notes.append(f"converted y from {y.dtype} to {dtype}".replace("torch.", ""))
    return (y.unsqueeze(1) if y.dim() == 1 else y).to(dtype)


def _unify_labels(y: Tensor, notes: list[str]) -> Tensor:
    if is_multi_label(y):
        if not _is_one_hot(y):
            return y.to(torch.float32)
        notes.append("y has a single 1 in each row (one-hot): took its column for the class of the node")
        return torch.where(torch.isnan(y).any(dim=1), -1, torch.nan_to_num(y).to(torch.float32).argmax(dim=1))
    y = y.reshape(-1)
    if y.dtype.is_floating_point:
        notes.append(f"converted y from {y.dtype} to int64 classes".replace("torch.", ""))
        y = torch.nan_to_num(y, nan=-1.0)
    return y.to(torch.int64)


def _is_one_hot(y: Tensor) -> bool:
    """Tell if a label matrix has one 1 in each row that has labels; such rows are classes, not several labels."""
    labelled = 0
    for _, block in rows_of(y):
        block = block[~torch.isnan(block).any(dim=1)]
        if bool((((block != 0) & (block != 1)).any(dim=1) | ((block == 1).sum(dim=1) != 1)).any()):
            return False
        labelled += len(block)
    return labelled > 0


def _set_masks(
    fields: dict[str, Tensor], num_nodes: int, split: tuple[float, float, float] | None, seed: int, notes: list[str]
) -> None:
    """Set three masks of labelled nodes: the dataset's own, or drawn ones."""
    present = [name for name in MASKS if name in fields]
    if "y" not in fields:
        if split is not None:
            raise InputError("split: the graph has no labels (y) to split; leave split out")
        notes.append("the graph has no labels: all masks are empty")
        labelled = torch.zeros(num_nodes, dtype=torch.bool)
    else:
        labelled = labelled_nodes(fields["y"])
        if split is not None or not present:
            masks, note = _draw_split(labelled.numpy(), split or DEFAULT_SPLIT, seed)
            notes.append(note + (", instead of the dataset's masks" if present else ""))
            fields.update(masks)
    for name in MASKS:
        if name not in fields:
            if present:
                notes.append(f"the dataset has no {name}: it is empty")
            fields[name] = torch.zeros(num_nodes, dtype=torch.bool)
        elif dropped := int((fields[name] & ~labelled).sum()):
            notes.append(f"removed {dropped} unlabelled nodes from {name}")
            fields[name] = fields[name] & labelled
    if overlap := int((torch.stack([fields[name] for name in MASKS]).sum(dim=0) > 1).sum()):
        notes.append(f"{overlap} nodes are in more than one of the masks")


def _draw_split(
    labelled: NDArray[np.bool_], split: tuple[float, float, float], seed: int
) -> tuple[dict[str, Tensor], str]:
    if len(split) != 3 or min(split) < 0 or not 0 < sum(split) <= 1 + 1e-9:
        raise InputError(f"split: {tuple(split)}, expected three shares (train, validation, test) summing to at most 1")
    order = np.random.default_rng(seed).permutation(np.flatnonzero(labelled))
    bounds = [round(len(order) * share) for share in np.cumsum([0.0, *split])]
    masks = {}
    for name, (start, end) in zip(MASKS, itertools.pairwise(bounds), strict=True):
        mask = np.zeros(len(labelled), dtype=bool)
        mask[order[start:end]] = True
        masks[name] = torch.from_numpy(mask)
    counts = "/".join(str(int(mask.sum())) for mask in masks.values())
    return masks, f"drew a random split of {len(order)} labelled nodes into {counts} (seed {seed})"
