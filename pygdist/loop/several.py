"""A graph that several processes share, for training loops of one's own: each holds a part, all see one graph."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data

from pygdist.backends import Backend, resolve_backend
from pygdist.backends.base import names_of
from pygdist.comm import Communicator, NodeDirectory
from pygdist.comm.alike import require_alike
from pygdist.comm.launched import check_alone, is_first_of_machine, join, new_group, number_on_machine, own_device
from pygdist.errors import InputError
from pygdist.graph import Shard, load_graph, prepare, read_meta
from pygdist.graph.check import EDGE_FIELDS, MASKS
from pygdist.graph.sources.prepare import tell
from pygdist.loop.gradients import AveragedGradients
from pygdist.loop.inputs import WholeInputs
from pygdist.loop.mistakes import tell_in_one_line
from pygdist.memory.limits import told
from pygdist.nn.inputs import fill_in_sizes
from pygdist.nn.loss import labelled_rows
from pygdist.partition import Partitioner
from pygdist.partition.run import CACHE, cached_store
from pygdist.routing.agreement import agree_on_parts, options_of_backend, options_of_model
from pygdist.routing.distribute import distribute, with_hooks
from pygdist.routing.refusals import refuse_known_layers

_WHOLE_GRAPH = " (for sizes of the whole graph: graph.num_nodes, graph.num_classes; graph.data has this process's part)"
_NO_CLASS = -100  # torch's ignore_index
_OF_CLASSES = (functional.cross_entropy, functional.nll_loss)


def open_graph(
    data: Data | str | Path | Callable[[], Data],
    *,
    backend: Backend | str = "comm",
    partitioner: Partitioner | str | None = None,
    device: torch.device | str | None = None,
    float_labels: bool = False,
    cache_dir: str | Path = CACHE,
) -> OpenGraph:
    """Return this process's part of a graph, with methods with which a training loop uses the other processes.

    Under ``torchrun`` every process calls this function with the same arguments. The first process of each machine
    partitions the graph once, into one part for each process, and keeps the parts in ``cache_dir``. Without
    ``torchrun`` the same script runs on one process, which has the whole graph. A dataset without masks gets a random
    split of 50/25/25 (seed 0).

    Args:
        data: The graph: a PyG ``Data``; a function that returns a ``Data`` and is called only by processes that
            partition; a folder that ``pygdist partition`` wrote; or a dataset by name or class path, as for
            :class:`~pygdist.GraphDataModule`.
        backend: Brings the rows of other processes. A backend that trains on the whole graph: ``comm``, ``cache``,
            ``hybrid``, ``tensor`` or ``delayed``.
        partitioner: Decides which process owns which node. The default depends on the backend: ``libra`` for
            ``delayed``, ``chunk`` for others.
        device: Device of the part. By default the GPU of this process (``LOCAL_RANK``), if the machine has as many
            GPUs as processes, else the CPU. Rows of processes that share a GPU travel through the host.
        float_labels: Float labels are numbers to predict, even if all labels are whole. By default whole labels are
            classes.
        cache_dir: Folder of the partitioned graphs.

    Raises:
        InputError: On all processes: if the graph cannot be read or partitioned, the backend trains on parts alone or
            on mini-batches, or processes have different arguments.

    Example:
        >>> graph = pygdist.open_graph(data)
        >>> model = graph.distribute(GCN(graph.num_features, 64, num_layers=2, out_channels=graph.num_classes))
        >>> loss = graph.mean_loss(F.cross_entropy, model(graph.x, graph.edge_index), graph.y, graph.train_mask)
    """
    try:
        runs = resolve_backend(backend)
        if runs.abilities.trains_parts or runs.abilities.mini_batches:
            whole = names_of(lambda one: not (one.trains_parts or one.mini_batches))
            raise InputError(f"open_graph: backend '{runs.name}' does not train on the whole graph; use {whole}")
        check_alone()
        joined = join()
        place = own_device() if device is None else torch.device(device)
        communicator = _communicator(place)
        require_alike({**options_of_backend(runs), "float_labels": float_labels}, communicator)
        folder = _shared_folder(
            lambda: _folder(data, runs, partitioner, Path(cache_dir).expanduser(), communicator, float_labels),
            communicator,
        )
        shard, meta = _opened(folder, communicator, place)
        agree_on_parts(meta["parts"], communicator)
        runs.bind(shard, communicator)
        return OpenGraph(shard, runs, communicator, joined=joined, left_out=meta.get("left_out", ()))
    except InputError:
        tell_in_one_line(None)
        raise


class OpenGraph:
    """A graph that several processes share; made by :func:`open_graph`.

    Attributes:
        x: Features of this process's nodes, ``(n, num_features)``.
        edge_index: Edges into these nodes, for the model.
        y: Labels of these nodes, or ``None``: classes ``(n,)``, where -1 is unlabelled; 0/1 labels ``(n, C)``; or
            numbers to predict ``(n, k)``, also for ``k = 1``.
        train_mask, val_mask, test_mask: The nodes of each stage, ``(n,)`` bool, or ``None``.
        edge_weight, edge_attr, edge_type: Values of the edges, or ``None``.
        pos, ...: Further tensors of nodes, under their names in the data, with a row for each of this process's nodes.
        n_id: The nodes' numbers in the graph, ``(n,)``.
        num_nodes: Number of nodes of the whole graph.
        num_features, num_classes: Number of features of a node, and of classes, in the whole graph.
        rank, num_ranks: The number of this process, from 0, and the number of processes.
        meter: Counts the bytes that this process sends, and the seconds that it waits, since ``meter.reset()``.
        device: The device of the part.
    """

    def __init__(
        self, shard: Shard, backend: Backend, communicator: Communicator, *, joined: bool, left_out: Sequence[str] = ()
    ) -> None:
        self._shard, self._backend, self._communicator, self._joined = shard, backend, communicator, joined
        self._directory: NodeDirectory | None = None
        self._gradients, num_rows = AveragedGradients(communicator), (len(shard.owned_id), shard.adjacency.size(1))
        self._inputs = WholeInputs(self._gradients, communicator.world_size, num_rows)
        self._left_out = left_out  # tensors of nodes that the graph has, and the parts have not
        self.x, self.edge_index, self.y = shard.x, shard.adjacency, shard.y
        self.train_mask, self.val_mask, self.test_mask = shard.train_mask, shard.val_mask, shard.test_mask
        self.edge_weight, self.edge_attr, self.edge_type = shard.edge_weight, shard.edge_attr, shard.edge_type
        self.n_id, self.num_nodes, self.num_classes = shard.owned_id, shard.num_nodes, shard.num_classes
        self.num_features, self.device = shard.x.size(1), shard.x.device
        self.rank, self.num_ranks, self.meter = communicator.rank, communicator.world_size, communicator.meter
        self._hook = tell_in_one_line(communicator)

    @property
    def data(self) -> Data:
        """This process's part as PyG's ``Data``, with all of its tensors, for a model called as ``model(data)``."""
        named = {name: getattr(self, name) for name in ("x", "edge_index", "y", *MASKS, *EDGE_FIELDS)}
        held = {name: value for name, value in named.items() if value is not None}
        return Data(**held, **self._shard.node_inputs)

    def __getattr__(self, name: str) -> Tensor:
        further = vars(self)["_shard"].node_inputs if "_shard" in vars(self) else {}
        if name in further:
            return cast(Tensor, further[name])
        if name in vars(self).get("_left_out", ()):
            raise AttributeError(
                f"the parts lack {name}, which the graph has; write them again with pygdist partition "
                f"--node_inputs=[{', '.join([*further, name])}]"
            )
        has = f"; further tensors of its nodes: {', '.join(further)}" if further else ""
        raise AttributeError(f"the graph has no {name}{has}")

    def __repr__(self) -> str:
        edges = self.edge_index.size(1)
        return f"OpenGraph({self.rank} of {self.num_ranks}: {len(self.x)} of {self.num_nodes} nodes, {edges} edges)"

    def _repr_html_(self) -> str:
        title = f"Part of rank {self.rank}, of a graph that {self.num_ranks} processes share"
        return self._shard.shown(title, backend=self._backend.name or type(self._backend).__name__)

    def distribute(self, model: nn.Module) -> nn.Module:
        """Let a model run on the whole graph, in place; every process calls this method.

        The model is moved to :attr:`device`, and takes the parameters and buffers of the first process. Sizes of -1 are
        filled in. Gradients are averaged over the processes at the end of each backward pass, and norms take their
        statistics over all nodes. ``state_dict`` has the keys of the plain model.

        Returns:
            ``model`` itself. Call it as ``model(graph.x, graph.edge_index)``; it returns the rows of this process's
            nodes.

        Raises:
            InputError: On all processes, for the reasons of :func:`~pygdist.distribute`, or if the processes' models
                differ.
        """
        refuse_known_layers(model)
        fill_in_sizes(model, self._shard)
        require_alike(options_of_model(model, buffers=True), self._communicator, _WHOLE_GRAPH)
        model.to(self.device)
        if self.num_ranks > 1:
            self._share(model)
        distribute(model, backend=self._backend)
        self._backend.look_at(model, None)
        if self.num_ranks > 1:
            before_forward = model.register_forward_pre_hook(self._inputs, with_kwargs=True)
            with_hooks(model, before_forward, self._gradients.add(model))
        return model

    def _share(self, model: nn.Module) -> None:
        """Bring the parameters and buffers of rank 0."""
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                one = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                flat = one.detach().to(torch.float64 if one.is_floating_point() else torch.int64).reshape(-1).clone()
                flat = flat if self.rank == 0 else torch.zeros_like(flat)
                self._communicator.reduce_in_place(flat, "parameters")
                one.copy_(flat.view_as(one))

    def mean_loss(
        self, loss: Callable[..., Tensor], output: Tensor, target: Tensor | None, mask: Tensor | None = None
    ) -> Tensor:
        """Return the mean loss over all labelled nodes of the graph, the same number on every process.

        After the backward pass, each parameter has the gradient of this mean. A penalty on parameters is added as on
        one process: ``graph.mean_loss(...) + penalty``. Every process calls this method, also without labelled nodes.

        Args:
            loss: A loss of torch that takes ``reduction``, as a function or a module; or a function that returns the
                loss of each node. Class weights (``weight``) count as in torch's mean.
            output: Output of the model, a row for each node, ``(n, ...)``; or a row for each labelled item of another
                kind, such as a pair of nodes. An output ``(n,)`` fits labels ``(n, 1)``.
            target: The labels, ``(n, ...)``; nodes with class -1 or a NaN do not count.
            mask: The nodes that count, ``(n,)`` bool; all by default.

        Raises:
            InputError: If the graph has no labels, no labelled node counts on any process, ``loss`` has
                ``reduction="sum"``, or ``loss`` does not return a value for each node.
        """
        if target is None:
            raise InputError("mean_loss: the graph has no labels (data.y)")
        self._gradients.begin_loss()
        self._communicator.move("in graph.mean_loss")
        every = torch.ones(len(target), dtype=torch.bool, device=target.device) if mask is None else mask
        rows = labelled_rows(target, every)
        labels, outputs = target.index_select(0, rows), output.index_select(0, rows)
        if labels.shape[1:] == (1,) and outputs.dim() == 1:
            labels = labels.squeeze(1)  # torch would broadcast them to (n, n)
        values = _by_node(loss)(outputs, labels)
        wrong = values.shape not in (rows.shape, labels.shape, outputs.shape)
        self._inputs.look_at_loss(values)
        local, share = values.sum(), 0.0 if wrong else _share(loss, values, labels)
        sums = self._communicator.gather([float(local.detach()), share, float(wrong)]).sum(dim=0)
        if sums[2]:  # on some rank, so all raise
            raise InputError(
                f"mean_loss: the loss returns a tensor of shape {tuple(values.shape)} for {len(rows)} nodes, expected "
                "a value for each; take a loss of torch, or return the values before they are averaged"
            )
        if not sums[1]:
            raise InputError("mean_loss: no node with a label counts on any process; look at mask and labels")
        mine = local * (self.num_ranks / float(sums[1]))  # gradients are averaged over the processes
        mean = (mine - mine.detach()) + float(sums[0] / sums[1])  # 0 and the mean: the same bits on all ranks
        if mean.requires_grad and self.num_ranks > 1:
            mean.register_hook(self._gradients.begin_mean)
        return mean

    def mean(self, values: Tensor, mask: Tensor | None = None) -> float:
        """Return the mean of ``values`` over all nodes of the graph, for example an accuracy; every process calls it.

        Args:
            values: A number or bool for each of this process's nodes, ``(n,)``.
            mask: The nodes that count, ``(n,)`` bool; all by default.

        Returns:
            The mean, the same on every process.

        Raises:
            InputError: On all processes, if no node counts.
        """
        self._communicator.move("in graph.mean")
        chosen = values if mask is None else values[mask]
        sums = self._communicator.gather([float(chosen.sum(dtype=torch.float64)), float(chosen.numel())]).sum(dim=0)
        if not sums[1]:
            raise InputError("mean: the mask has no node on any process")
        return float(sums[0] / sums[1])

    def rows(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Return the rows of any nodes of the graph, such as both ends of pairs; every process calls this method.

        The result is differentiable. Processes may ask for different nodes, or for none.

        Args:
            rows: A row for each of this process's nodes, ``(n, ...)``, such as the model's output.
            ids: Numbers of nodes in the graph, int64 of any shape.

        Returns:
            The rows, ``(*ids.shape, ...)``.

        Raises:
            InputError: On all processes, if ``ids`` is not int64, an id is not a node of the graph, or ``rows`` does
                not have one row for each of this process's nodes.

        Example:
            >>> z = model(graph.x, graph.edge_index)
            >>> scores = (graph.rows(z, pairs[0]) * graph.rows(z, pairs[1])).sum(dim=1)
            >>> loss = graph.mean_loss(F.binary_cross_entropy_with_logits, scores, labels)
        """
        self._communicator.move("in graph.rows")
        self._communicator.agree(self._wrong_rows(rows, ids))
        wanted = ids.reshape(-1)
        if self.num_ranks == 1:
            chosen = rows.index_select(0, wanted)
        else:
            if self._directory is None:
                self._directory = NodeDirectory(self.n_id, self.num_nodes, self._communicator)
            plan, position = self._directory.plan(wanted.to(self._directory.device))
            fetched = self._communicator.exchange_rows(rows, plan, label="rows of any nodes")
            chosen = torch.cat([rows, fetched]).index_select(0, position)
        return chosen.reshape((*ids.shape, *rows.shape[1:]))

    def _wrong_number(self, rows: Tensor, call: str) -> str | None:
        if rows.shape[:1] != self.n_id.shape:
            return f"{call}: rows of shape {tuple(rows.shape)}, but this process has {len(self.n_id)} nodes"
        return None

    def _wrong_rows(self, rows: Tensor, ids: Tensor) -> str | None:
        if wrong := self._wrong_number(rows, "rows"):
            return wrong
        if ids.dtype != torch.int64:
            return f"rows: ids of {ids.dtype}, expected int64"
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_nodes:
            return f"rows: ids from {int(ids.min())} to {int(ids.max())}, but the graph has {self.num_nodes} nodes"
        return None

    def gather(self, rows: Tensor) -> Tensor | None:
        """Return the rows of all nodes in the order of the graph, on the first process's CPU; ``None`` on the others.

        Every process calls this method.

        Args:
            rows: A row for each of this process's nodes, ``(n, ...)``, such as the model's output.

        Raises:
            InputError: On all processes, if ``rows`` does not have one row for each of this process's nodes.
        """
        self._communicator.move("in graph.gather")
        self._communicator.agree(self._wrong_number(rows, "gather"))
        here, ids = rows.detach().cpu(), self.n_id.cpu()
        if self.num_ranks > 1:
            ranks = self._communicator.on_host()
            nothing = range(self.num_ranks - 1)
            here_and_there = ranks.all_to_all([here, *(here[:0] for _ in nothing)], label="rows of all nodes")
            of_all = ranks.all_to_all([ids, *(ids[:0] for _ in nothing)], label="numbers of all nodes")
            here, ids = torch.cat(here_and_there), torch.cat(of_all)
        return torch.empty_like(here).index_copy_(0, ids, here) if self.rank == 0 else None

    def close(self) -> None:
        """Leave the other processes; every process calls this method. The end of a script calls it, too."""
        sys.excepthook = self._hook
        self._communicator.close()
        if self._joined and dist.is_initialized():
            dist.destroy_process_group()
            self._joined = False

    def __enter__(self) -> OpenGraph:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.close()


def _share(loss: Callable[..., Tensor], values: Tensor, labels: Tensor) -> float:
    """Return what torch divides the sum of these values by: their number, or the weights of their classes."""
    if labels.is_floating_point():
        return float(values.numel())
    counted = labels != _option(loss, "ignore_index", _NO_CLASS)
    weight = _option(loss, "weight", None)
    by_weight = isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) or getattr(loss, "func", loss) in _OF_CLASSES
    if weight is not None and by_weight:
        return float(weight.index_select(0, labels[counted]).sum())
    return float(values.numel() if bool(counted.all()) else counted.sum())


def _option(loss: Callable[..., Tensor], name: str, default: Any) -> Any:
    """Return an option of a loss: an attribute of a module, or an argument of a ``partial``."""
    return getattr(loss, "keywords", {}).get(name, getattr(loss, name, default))


def _by_node(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a loss that is not averaged over nodes."""
    reduction = _option(loss, "reduction", None)
    if reduction not in (None, "mean", "none"):
        raise InputError(
            f"mean_loss returns a mean over nodes, but the loss has reduction={reduction!r}; leave the reduction out, "
            "or return the value of each node, such as its sum over classes"
        )
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        by_node: Any = copy.copy(loss)
        by_node.reduction = "none"
        return by_node  # type: ignore[no-any-return]
    try:
        takes = "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):
        takes = False
    return (lambda output, target: loss(output, target, reduction="none")) if takes else loss


def _communicator(device: torch.device) -> Communicator:
    """Return a communicator of all processes that have joined each other."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    several = dist.is_initialized() and dist.get_world_size() > 1
    communicator = Communicator(new_group(device) if several else None, device=device)
    communicator.unit = "backward pass"
    communicator.meet(device)
    return communicator


def _shared_folder(find: Callable[[], Path], communicator: Communicator) -> str:
    """Return the folder that the first process of this machine finds; all raise if one of these processes does."""
    folder, error = "", None
    try:
        folder = str(find()) if is_first_of_machine() else ""
    except Exception as problem:
        error = told(problem)
        if error is None:
            raise
    communicator.agree(error)
    return communicator.gather_text(folder)[communicator.rank - number_on_machine()]


def _opened(folder: str, communicator: Communicator, device: torch.device) -> tuple[Shard, Mapping[str, Any]]:
    """Open this process's part; all processes raise if one of them cannot."""
    try:
        meta = read_meta(folder)
        shard = Shard.load(folder, communicator.rank, num_parts=communicator.world_size, meta=meta)
        opened, error = (shard.to(device), meta), None
    except Exception as problem:
        opened, error = None, told(problem)
        if error is None:
            raise
    communicator.agree(error)
    assert opened is not None
    return opened


def _folder(
    data: Data | str | Path | Callable[[], Data],
    backend: Backend,
    partitioner: Partitioner | str | None,
    cache: Path,
    communicator: Communicator,
    float_labels: bool,
) -> Path:
    """Return the folder of the partitioned graph; partition it if it is not there."""
    if isinstance(data, (str, Path)) and (Path(data) / "meta.json").is_file():
        return Path(data).resolve()
    graph, notes = prepare(load_graph(data), float_labels=float_labels, node_inputs=None)
    if communicator.rank == 0:
        tell(notes)
    return cached_store(
        graph, notes, cache, num_parts=communicator.world_size, partitioner=partitioner,
        placement=backend.abilities.placement, num_hops=backend.abilities.num_hops,
    ).resolve()  # fmt: skip
