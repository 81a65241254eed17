"""From a dataset to the part that a rank holds: load, check, split, partition once, map the rank's part."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from torch import nn
from torch_geometric.data import Data
from typing_extensions import override

from pygdist.backends import Abilities, Backend
from pygdist.backends.base import names_of
from pygdist.display import card
from pygdist.errors import InputError
from pygdist.graph import Shard, hold_out, load_graph, prepare, read_meta
from pygdist.graph.check import EDGE_FIELDS
from pygdist.graph.shard import converted, moved
from pygdist.graph.sources.prepare import tell
from pygdist.graph.surroundings import floats_unlike
from pygdist.lightning.checks import (
    RESERVE,
    check_graph_options,
    check_left_out,
    check_splits,
    expanded,
    left_unused,
    read_only_folder,
)
from pygdist.lightning.one_lightning import OfLightning
from pygdist.lightning.parts import FullGraphLoader, PartBatch, PartLoader, StepLoader, laid_out, stamped
from pygdist.lightning.precomputed import Precomputed
from pygdist.lightning.to_rank_zero import from_rank_zero
from pygdist.memory.limits import told
from pygdist.memory.machine import memory_bytes
from pygdist.memory.overflow import writable
from pygdist.nn.inputs import fill_in_sizes, names_of_node_inputs
from pygdist.partition import DeviceMemory, Partitioner, resolve_partitioner
from pygdist.partition.run import CACHE, cached_store, default_partitioner
from pygdist.routing.refusals import refuse_known_layers
from pygdist.sampler import BatchLoader, MiniBatches

_GRAIN = 1 << 26  # sizes of memory are rounded down to a multiple of so many bytes


class GraphDataModule(OfLightning, pl.LightningDataModule):
    """Partitions a graph once and gives each rank its part.

    On one process of each machine, ``prepare_data`` loads, checks, preprocesses and partitions the graph. It writes the
    parts to a cache; the same graph and arguments find the same parts again. ``setup`` maps the rank's own part only. A
    warning tells each change to the graph once, for example that a split was drawn; :meth:`summary` lists all changes.

    Args:
        dataset: The graph: a PyG ``Data``, a folder of ``.npy`` arrays, the name of a generator (``sbm``), of an OGB
            dataset (``ogbn-arxiv``), of a class in ``torch_geometric.datasets`` or of an installed package's dataset,
            or the path of a dataset class.
        dataset_args: Arguments of the dataset class or generator, such as ``{root: data, name: Cora}``.
        partitioner: Decides which rank owns which node, or edge: a name (``chunk``, ``hash``, ``metis``), a class path,
            or an instance. By default ``chunk``; with backend ``delayed`` ``libra``, with ``pushpull`` ``hash``.
        partitioner_args: Arguments of the partitioner, if the partitioner is given by name.
        num_parts: Number of parts; by default one for each rank. With a backend that trains each part alone
            (``replica``), there may be more parts than ranks, and the default is the number of parts in ``store``, if
            given. Parts are then dealt to the ranks in turn, and a rank holds one part at a time. ``auto`` takes the
            fewest parts that fit the ranks' memory.
        memory_gib: Memory of a rank, in GiB, for ``num_parts=auto``. By default the memory of the rank's GPU, or the
            rank's share of the machine's memory.
        reserve: Share of the rank's memory that is left to training, for ``num_parts=auto`` (T / M in CATGNN, Sec.
            3.2).
        symmetrize: Add the reverse of every edge that has none.
        remove_duplicates: Merge parallel edges: weights are added, attributes averaged.
        remove_self_loops: Drop edges from a node to itself.
        float_features: Convert integer features of nodes and edges to float32; by default they stay integers.
        float_labels: Float labels are numbers to predict, even if all labels are whole. By default whole labels are
            classes, except for :class:`~pygdist.lightning.NodeRegressor`.
        split: Shares of the labelled nodes for training, validation and test, in place of the dataset's own masks. A
            dataset without masks is split 50/25/25 by default.
        split_seed: Seed of ``split`` and of ``edge_split``.
        edge_split: Shares of the edges to hold out of the graph, for validation and for test.
            :class:`~pygdist.lightning.LinkPredictor` predicts the held-out edges. An edge and its reverse are held out
            together. By default no edge is held out.
        num_classes: Number of classes; larger labels are an error. By default the largest label plus one.
        batches: Sampler of mini-batches, such as :class:`~pygdist.sampler.NeighborBatches`. Backends ``pull`` and
            ``pushpull`` need a sampler; its batches cross parts. With backend ``replica`` a sampler is optional; its
            batches stay within a part. By default a step trains on a whole part.
        batch_seed: Seed of the mini-batches; with mini-batches also of the negative pairs of links.
        num_workers: Processes of each rank that draw mini-batches ahead, for batches within a part (``replica``); 0
            draws a batch when it is needed. Backends ``pull`` and ``pushpull`` refuse more than 0.
        store: A folder that ``pygdist partition`` wrote, in place of a dataset.
        cache_dir: Folder of the cached parts.

    Raises:
        InputError: If a number is out of range, or arguments contradict each other. Other mistakes are found by
            :meth:`prepare_data` and :meth:`setup`.

    Example:
        >>> data = GraphDataModule("Planetoid", {"root": "data", "name": "Cora"}, partitioner="chunk")
        >>> trainer.fit(NodeClassifier(model), datamodule=data)
    """

    def __init__(
        self,
        dataset: str | Data = "sbm",
        dataset_args: dict[str, Any] | None = None,
        partitioner: Partitioner | str | None = None,
        partitioner_args: dict[str, Any] | None = None,
        num_parts: int | Literal["auto"] | None = None,
        memory_gib: float | None = None,
        reserve: float = RESERVE,
        symmetrize: bool = False,
        remove_duplicates: bool = False,
        remove_self_loops: bool = False,
        float_features: bool = False,
        float_labels: bool = False,
        split: tuple[float, float, float] | None = None,
        split_seed: int = 0,
        edge_split: tuple[float, float] | None = None,
        num_classes: int | None = None,
        batches: MiniBatches | None = None,
        batch_seed: int = 0,
        num_workers: int = 0,
        store: str | Path | None = None,
        cache_dir: str | Path = CACHE,
    ) -> None:
        super().__init__()
        self.backend: Backend | None = None  # without a trainer, parts are made for this one
        self.model: nn.Module | None = None  # without a trainer, parts hold the inputs of this one
        self.dataset, self.dataset_args = dataset, dict(dataset_args or {})
        self.partitioner, self.partitioner_args = partitioner, dict(partitioner_args or {})
        self.num_parts, self.memory_gib, self.reserve = num_parts, memory_gib, reserve
        self.preprocessing: dict[str, Any] = {
            "symmetrize": symmetrize,
            "remove_duplicates": remove_duplicates,
            "remove_self_loops": remove_self_loops,
            "float_features": float_features,
            "float_labels": float_labels,
            "split": split,
            "split_seed": split_seed,
            "num_classes": num_classes,
        }
        check_graph_options(
            self.preprocessing, store=store, num_parts=num_parts, memory_gib=memory_gib, reserve=reserve,
            batches=batches, num_workers=num_workers, batch_seed=batch_seed, edge_split=edge_split,
        )  # fmt: skip
        self.edge_split = edge_split
        self.batches, self.batch_seed, self.num_workers = batches, batch_seed, num_workers
        self.store = None if store is None else Path(store)
        self.cache_dir = expanded(cache_dir)
        self._folder: Path | None = self.store
        self._meta: tuple[Path, Mapping[str, Any]] | None = None
        self._error: str | None = None
        self._told: set[str] = set()  # notes
        self._shard: Shard | None = None
        self._moved: tuple[object, Shard] | None = None  # to a device and a dtype
        self._parts: list[int] = []
        self._precomputed: Precomputed | None = None  # for mini-batches, if the rank has several parts
        self._sampled: StepLoader | None = None  # whose thread runs

    def __repr__(self) -> str:
        try:
            meta = self.meta if self._folder is not None else None
        except InputError as error:  # the store is gone, or damaged
            return f"GraphDataModule({error})"
        if meta is None:
            name = self.dataset if isinstance(self.dataset, str) else type(self.dataset).__name__
            return f"GraphDataModule({name}; not prepared yet)"
        return f"GraphDataModule({self.summary().splitlines()[0]}, {meta['num_parts']} parts by {meta['method']})"

    __str__ = __repr__  # Lightning's lists data loaders

    def _repr_html_(self) -> str:
        try:
            if self._folder is not None:
                return read_meta(self.folder)._repr_html_()
        except InputError as error:
            return card("GraphDataModule", {}, note=str(error))
        graph = self.dataset
        sizes = {} if isinstance(graph, str) else {"nodes": graph.num_nodes, "edges": graph.num_edges}
        figures = {
            "dataset": graph if isinstance(graph, str) else type(graph).__name__,
            **{name: value for name, value in {**self.dataset_args, **sizes}.items() if value is not None},
            "partitioner": self.partitioner or "that of the backend",
            "parts": self.num_parts or "one for each rank",
        }
        return card("GraphDataModule", figures, note="Not prepared yet: trainer.fit() or prepare_data() partitions it.")

    @property
    def shard(self) -> Shard:
        """The rank's part, from :meth:`setup` on; if the rank has several parts, the open part."""
        if self._shard is None:
            raise RuntimeError("GraphDataModule.shard exists after setup()")
        return self._shard

    @property
    def folder(self) -> Path:
        """The store on disk, from :meth:`prepare_data` on."""
        if self._folder is None:
            raise RuntimeError("GraphDataModule.folder exists after prepare_data()")
        return self._folder

    @property
    def meta(self) -> Mapping[str, Any]:
        """The content of ``meta.json`` of the store; read once in a run."""
        if self._meta is None or self._meta[0] != self.folder:
            self._meta = self.folder, read_meta(self.folder)
        return self._meta[1]

    def load(self) -> tuple[Data, list[str]]:
        """Return the whole graph, checked and preprocessed, and notes on the changes; one process makes the call."""
        data = load_graph(self.dataset, **self.dataset_args)
        float_labels = self.preprocessing["float_labels"] or getattr(self._module, "float_labels", False)
        names = [] if self._model is None else names_of_node_inputs(self._model)
        if names is None and (self._abilities.trains_parts or self._abilities.mini_batches):
            names = []  # batches and single parts have no further tensors of nodes
        return prepare(data, **{**self.preprocessing, "float_labels": float_labels}, node_inputs=names)

    @override
    def prepare_data(self) -> None:
        """Load and preprocess the graph, and write the parts unless the cache has them; once on each machine."""
        self._error = self._meta = None
        if self.trainer is not None and self.trainer.world_size == 1 and (reason := read_only_folder(self.trainer)):
            raise InputError(reason)
        if self.store is not None:
            self._tell(left_unused(vars(self)))
            return
        try:
            self._folder = self._prepare()
        except Exception as error:
            if (refused := told(error)) is None or self.trainer is None:
                raise
            self._error = refused  # setup() raises it on all ranks, so that none waits

    def _prepare(self) -> Path:
        num_parts, abilities = self._num_parts(), self._abilities
        partitioner = self.partitioner or default_partitioner(abilities.placement)
        partitioner = resolve_partitioner(partitioner, **self.partitioner_args)  # before the graph is read
        data, notes = self.load()
        self._tell(notes)
        return cached_store(
            data, notes, self.cache_dir, num_parts=num_parts, partitioner=partitioner,
            num_classes=self.preprocessing["num_classes"], placement=abilities.placement, num_hops=abilities.num_hops,
        )  # fmt: skip

    @rank_zero_only
    def _tell(self, notes: list[str]) -> None:
        """Show each note once, on one rank."""
        tell(note for note in notes if note not in self._told)
        self._told.update(notes)

    def summary(self) -> str:
        """Return lines on the graph, its parts and all changes to the graph; call :meth:`prepare_data` before.

        The first lines are "8,000 nodes, 160,000 edges, 32 features (float32), 8 classes" and "2 parts by chunk; ...".
        """
        meta = self.meta
        dtype = f" ({meta['dtypes']['x']})" if "x" in meta["dtypes"] else ""
        counts = ", ".join(f"{count:,} {name.removesuffix('_mask')}" for name, count in meta["counts"].items())
        graph = f"{meta['num_nodes']:,} nodes, {meta['num_edges']:,} edges, {meta['num_features']} features{dtype}"
        parts = f"{meta['num_parts']} parts by {meta['method']}; labelled nodes: {counts}"
        targets = "x".join(map(str, meta.get("targets", ())))
        learned = f"{targets} numbers to predict per node" if targets else f"{meta['num_classes']} classes"
        return "\n".join([f"{graph}, {learned}", parts, *meta["preprocessing"]])

    @override
    def setup(self, stage: str | None = None) -> None:
        """Map this rank's part; raises the same :class:`~pygdist.errors.InputError` on all ranks, or none."""
        self._agree(self._error)
        if self._strategy is not None:
            self._folder = Path(from_rank_zero(str(self._folder), self._strategy))
        self._meta = error = None
        try:
            self._open_store()
        except Exception as problem:
            if (error := told(problem)) is None:
                raise
        self._agree(error)
        self._fill_in_sizes()

    def _agree(self, error: str | None) -> None:
        """Raise an error on all ranks, if one of them has any."""
        communicator = getattr(self._strategy, "communicator", None)
        if communicator is not None:
            communicator.agree(error)
        elif error is not None:
            raise InputError(error)

    def _open_store(self) -> None:
        if self.store is not None and self._model is not None:
            self._tell(check_left_out(self._model, self.meta, self.store))
        several, world_size = self._abilities.trains_parts, self._world_size
        rank = 0 if self.trainer is None else self.trainer.global_rank
        if several and self.num_parts_in_all < world_size:
            raise InputError(
                f"{self.folder}: has {self.num_parts_in_all} parts, but the trainer runs {world_size} ranks, and each "
                "needs a part; partition into more parts, or use fewer devices"
            )
        self._parts = list(range(rank, self.num_parts_in_all, world_size)) if several else [rank]
        # a store that the user names may have any number of parts, if a rank may have several
        stated = None if several and self.store is not None and self.num_parts is None else self._num_parts()
        # again for every stage: a notebook that looked at part 0 forks into ranks with other parts
        shard: Shard
        for part in reversed(self._parts):
            shard = Shard.load(self.folder, part, num_parts=stated if isinstance(stated, int) else None, meta=self.meta)
        if self.batches is not None and not self._abilities.mini_batches:
            raise InputError(
                "batches: the model's backend does not train on mini-batches; use backend "
                f"{names_of(lambda abilities: abilities.mini_batches)}, or leave batches out"
            )
        check_splits(self._module, self.preprocessing["split"], self.edge_split)
        if self.edge_split is not None:
            if several:
                raise InputError(
                    "edge_split: the model's backend trains each part by itself, with degrees of all edges; use "
                    f"backend {names_of(lambda abilities: not abilities.trains_parts)}, or leave edge_split out"
                )
            shard = hold_out(shard, self.edge_split, self.preprocessing["split_seed"])
        self._shard, self._moved = shard, None
        self._forget_precomputed()  # a run that failed left it

    @override
    def teardown(self, stage: str) -> None:
        """Remove the files that the run wrote beside the store, and end the thread that makes batches."""
        self._forget_precomputed()
        sampled, self._sampled = self._sampled, None
        if sampled is not None:
            sampled.close()

    def _forget_precomputed(self) -> None:
        precomputed, self._precomputed = self._precomputed, None
        if precomputed is not None:
            precomputed.close()

    @property
    def parts(self) -> list[int]:
        """Numbers of this rank's parts, from :meth:`setup` on."""
        return self._parts

    @property
    def num_parts_in_all(self) -> int:
        """Number of parts of all ranks together."""
        return int(self.meta["num_parts"])

    @property
    def part_weights(self) -> list[int]:
        """Number of labelled training nodes of each part."""
        return [part["counts"]["train_mask"] for part in self.meta["parts"]]

    def open_part(self, part: int) -> Shard:
        """Return one of this rank's parts, on the device of the model; free the part that was open, if another."""
        shard = self._shard
        if shard is None or shard.rank != part:
            if hasattr(self._module, "let_go"):
                self._module.let_go()
            self._shard = shard = None
            self._moved = None
            # setup() has verified all of them
            shard = self._shard = Shard.load(self.folder, part, verify=False, meta=self.meta)
        return self.here(shard)

    def here(self, shard: Shard) -> Shard:
        """Return a part on the model's device and in the model's dtype; the part is moved once."""
        wanted = (shard.rank, device, dtype) = shard.rank, self._device(), self._model_dtype()
        if self._moved is None or self._moved[0] != wanted:
            with torch.inference_mode(False):  # training may use a part that an evaluation moved
                self._moved = wanted, shard.to(device).astype(dtype)
        return self._moved[1]

    def _device(self) -> torch.device:
        return torch.device("cpu") if self._strategy is None else self._strategy.root_device

    def _fill_in_sizes(self) -> None:
        """Fill in sizes of -1, before callbacks are set up: those that average weights then copy the model."""
        if self._module is not None and self._model is not None:
            refuse_known_layers(self._model)
            fill_in_sizes(self._model, self.shard)

    def _num_parts(self) -> int | DeviceMemory:
        world_size, one_each = self._world_size, self.trainer is not None and not self._abilities.trains_parts
        if self.num_parts is None:
            return world_size
        if one_each and self.num_parts != world_size:
            raise InputError(
                f"num_parts={self.num_parts}, but the trainer runs {world_size} ranks, and the model's backend holds "
                "one part on each; leave num_parts out, or use backend "
                f"{names_of(lambda abilities: abilities.trains_parts)}"
            )
        if self.num_parts == "auto":
            return DeviceMemory(devices=world_size, bytes=self._memory_bytes(world_size), reserve=self.reserve)
        return int(self.num_parts)

    def _memory_bytes(self, world_size: int) -> int:
        if self.memory_gib is not None:
            return int(self.memory_gib * 2**30)
        if (device := self._device()).type == "cuda":
            return int(torch.cuda.get_device_properties(device).total_memory)
        ranks_here = 1 if self.trainer is None else max(1, world_size // self.trainer.num_nodes)
        size = memory_bytes() // ranks_here
        return size // _GRAIN * _GRAIN or size  # machines of one kind differ by some pages, but must find the same

    @property
    def _abilities(self) -> Abilities:
        """The abilities of the model's backend; without a trainer those of ``backend``, or the default ones."""
        backend = getattr(self._module, "backend", self.backend)
        return backend.abilities if isinstance(backend, Backend) else Abilities()

    @property
    def _model(self) -> nn.Module | None:
        model = getattr(self._module, "model", self.model)
        return model if isinstance(model, nn.Module) else None

    @property
    def _module(self) -> Any:
        return None if self.trainer is None else self.trainer.lightning_module

    @property
    def _world_size(self) -> int:
        return 1 if self.trainer is None else self.trainer.world_size

    @property
    def _strategy(self) -> Any:
        return None if self.trainer is None else self.trainer.strategy

    @override
    def train_dataloader(self) -> FullGraphLoader | PartLoader | StepLoader:
        trainer, made, epoch = self.trainer, partial(_steps_made, self.trainer), partial(_epoch, self.trainer)
        dealt = {"parts": self.num_parts_in_all, "ranks": self._world_size}
        if not self._abilities.trains_parts and not self._abilities.mini_batches:
            return FullGraphLoader(self.shard, made=made, dealt=dealt)
        assert trainer is not None, "the abilities are those of its module's backend"
        if not self._abilities.trains_parts:
            if self.num_workers:
                raise InputError("num_workers: batches are sampled by all ranks together, in a thread; leave it out")
            if self._sampled is not None:  # that of an earlier epoch, if each has a new loader
                self._sampled.release()
            module = self._module
            steps = module.backend.steps(self.shard, self.batches, module.model, seed=self.batch_seed)
            self._sampled = StepLoader(self.shard.rank, self.open_part, steps, epoch=epoch, made=made, dealt=dealt)
            return self._sampled
        weights = self.part_weights
        if not sum(weights):
            raise InputError("the graph has no labelled nodes for stage 'train' (train_mask)")
        # if gradients are averaged in each step, all ranks must make it
        every_part = getattr(trainer.strategy, "sends_gradients", True)
        parts = [part for part in self._parts if weights[part] or every_part]
        cut = None if self.batches is None else self._cut
        loader = PartLoader(parts, self.open_part, cut=cut, epoch=epoch, made=made, dealt=dealt)
        loader.agree(self._module.communicator)
        return loader

    def _cut(self, part: int, shard: Shard) -> BatchLoader:
        """Return the mini-batches of a part, on the CPU."""
        assert self.batches is not None
        graph, csr = self._module.backend.part_graph(self.shard)  # not `shard`, which is on the model's device
        seed = self.batch_seed * self.num_parts_in_all + part
        if len(self._parts) > 1:  # the loader of a single part is made once
            if self._precomputed is None:
                self._precomputed = Precomputed(writable(self.folder))
            graph.update(self._precomputed.of(part, partial(self.batches.precompute, graph, csr, seed=seed)))
        return self.batches.loader(graph, csr, seed=seed, num_workers=self.num_workers)

    @override
    def test_dataloader(self) -> FullGraphLoader | PartLoader:
        return PartLoader(self._parts, self.open_part) if self._abilities.trains_parts else FullGraphLoader(self.shard)

    predict_dataloader = test_dataloader

    @override
    def val_dataloader(self) -> FullGraphLoader | PartLoader | list[FullGraphLoader]:
        if self.trainer is not None and self.trainer.state.fn == "fit":
            learns_edges = getattr(self._module, "learns_edges", None)
            by_edges = self.edge_split is not None if learns_edges is None else learns_edges
            count = self._num_validation_edges() if by_edges else self.shard.counts["val_mask"]
            if not count:
                missing = "edges held out (edge_split)" if by_edges else "validation nodes (val_mask)"
                rank_zero_info(f"the graph has no {missing}: training goes on without validation")
                return []
        return self.test_dataloader()

    def _num_validation_edges(self) -> int:
        """Return the number of edges held out for validation, on all ranks together."""
        count = 0 if self.shard.val_edges is None else self.shard.val_edges.size(1)
        return int(self._module.communicator.gather([float(count)]).sum())

    @override
    def transfer_batch_to_device(
        self, batch: Shard | PartBatch, device: torch.device, dataloader_idx: int
    ) -> Shard | PartBatch:
        if not isinstance(batch, PartBatch):
            return self.here(batch)
        if batch.sample is not None:  # open_part() has moved the part
            dtype, sample = self._model_dtype(), batch.sample
            sample = (laid_out(sample) if "edge_index" in sample else sample).apply(lambda value: moved(value, device))
            floats = floats_unlike(sample, ("x", "y", *EDGE_FIELDS, "edge_norm"), dtype)
            sample = sample.update({name: converted(value, dtype) for name, value in floats.items()})
            batch.sample = stamped(sample) if "layout" in sample else sample
        return batch

    def _model_dtype(self) -> torch.dtype:
        numbers = [self.shard.x] if self._module is None else [*self._module.parameters(), self.shard.x]
        return next((one.dtype for one in numbers if one.is_floating_point()), torch.get_default_dtype())


def _epoch(trainer: pl.Trainer | None) -> int:
    return 0 if trainer is None else trainer.current_epoch


def _steps_made(trainer: pl.Trainer | None) -> int:
    """Return the number of steps made in the current epoch, by this run and the one it resumes; 0 between epochs."""
    if trainer is None:
        return 0
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return 0 if progress.is_last_batch else int(progress.current.ready)
