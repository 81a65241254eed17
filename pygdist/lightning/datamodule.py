"""From a dataset to the part that a rank holds: load, check, split, partition once, map the rank's own part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch_geometric.data import Data
from typing_extensions import override

from pygdist.errors import InputError
from pygdist.graph import Shard, fingerprint, hold_out, load_graph, prepare, read_meta, store_key
from pygdist.nn.inputs import fill_in_sizes
from pygdist.partition import Partitioner, partition_graph, resolve_partitioner

__all__ = ["FullGraphLoader", "GraphDataModule"]

DEFAULT_CACHE = Path("~/.cache/pygdist")


class FullGraphLoader:
    """Yields the shard once per epoch: a full-graph epoch is one step.

    It is no ``DataLoader`` on purpose: Lightning would put a distributed sampler into one, and each rank would see
    another rank's data.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def __iter__(self) -> Iterator[Shard]:
        yield self.shard

    def __len__(self) -> int:
        return 1


class GraphDataModule(pl.LightningDataModule):
    """A graph, partitioned once and held in parts.

    ``prepare_data`` loads the graph on one process, checks and preprocesses it, partitions it and writes the on-disk
    store into a cache keyed by content and arguments. ``setup`` maps only the rank's own part.

    Args:
        dataset: A PyG ``Data``; the class path of a PyG dataset, or its name in ``torch_geometric.datasets``; an OGB
            name such as ``ogbn-arxiv``; a folder of ``.npy`` arrays; or the name of a generator such as ``sbm``.
        dataset_args: Arguments of the dataset class or generator, such as ``{root: data, name: Cora}``.
        partitioner: Who owns which node: a name (``chunk``, ``hash``, ``metis``), a class path, or an instance.
        partitioner_args: Arguments of the partitioner when it is given by name.
        num_parts: Number of parts; that of the trainer's ranks by default.
        symmetrize: Add the reverse of every edge.
        remove_duplicates: Merge parallel edges: weights are added, attributes averaged.
        remove_self_loops: Drop edges from a node to itself.
        split: Shares of the labelled nodes for training, validation and test, in place of the dataset's own masks; a
            dataset without masks is split 50/25/25 by default.
        split_seed: The split is drawn from it, of nodes and of edges.
        edge_split: Shares of the edges that are held out of the graph, for validation and for test, and predicted by
            :class:`~pygdist.lightning.LinkPredictor`; an edge and its reverse together. None by default.
        num_classes: Stated number of classes; labels beyond it are an error. By default the largest label plus one.
        store: A folder that ``pygdist partition`` wrote; nothing is loaded or partitioned then.
        cache_dir: Where stores are kept.

    Example:
        >>> data = GraphDataModule("Planetoid", {"root": "data", "name": "Cora"}, partitioner="chunk")
        >>> trainer.fit(NodeClassifier(model), datamodule=data)
    """

    def __init__(
        self,
        dataset: str | Data = "sbm",
        dataset_args: dict[str, Any] | None = None,
        partitioner: Partitioner | str = "chunk",
        partitioner_args: dict[str, Any] | None = None,
        num_parts: int | None = None,
        symmetrize: bool = False,
        remove_duplicates: bool = False,
        remove_self_loops: bool = False,
        split: tuple[float, float, float] | None = None,
        split_seed: int = 0,
        edge_split: tuple[float, float] | None = None,
        num_classes: int | None = None,
        store: str | Path | None = None,
        cache_dir: str | Path = DEFAULT_CACHE,
    ) -> None:
        super().__init__()
        self.dataset, self.dataset_args = dataset, dict(dataset_args or {})
        self.partitioner, self.partitioner_args = partitioner, dict(partitioner_args or {})
        self.num_parts = num_parts
        self.preprocessing: dict[str, Any] = {
            "symmetrize": symmetrize,
            "remove_duplicates": remove_duplicates,
            "remove_self_loops": remove_self_loops,
            "split": split,
            "split_seed": split_seed,
            "num_classes": num_classes,
        }
        self.edge_split = edge_split
        self.store = None if store is None else Path(store)
        self.cache_dir = Path(cache_dir).expanduser()
        self._folder: Path | None = self.store
        self._error: str | None = None
        self._shard: Shard | None = None
        self._moved: Shard | None = None

    @property
    def shard(self) -> Shard:
        """The rank's part, from :meth:`setup` on."""
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
        """What the store's ``meta.json`` says."""
        return read_meta(self.folder)

    def load(self) -> tuple[Data, list[str]]:
        """The whole graph, checked and preprocessed, and what was done to it; for one process."""
        data = load_graph(self.dataset, **self.dataset_args)
        return prepare(data, **self.preprocessing)

    @override
    def prepare_data(self) -> None:
        """Load, preprocess, partition and write the store, unless it is in the cache. Runs on one process a machine."""
        self._error = None
        if self.store is not None:
            return
        try:
            self._folder = self._prepare()
        except InputError as error:
            if self._alone:
                raise
            self._error = str(error)  # setup() raises it on every rank, so that none waits

    def _prepare(self) -> Path:
        num_parts = self._num_parts()
        partitioner = resolve_partitioner(self.partitioner, **self.partitioner_args)
        data, notes = self.load()
        arguments = {
            "method": f"{type(partitioner).__module__}.{type(partitioner).__qualname__}",
            "arguments": partitioner.arguments(),
            "num_parts": num_parts,
            "num_classes": self.preprocessing["num_classes"],
        }
        content = fingerprint(data)
        folder = self.cache_dir / store_key(content, arguments)
        if (folder / "meta.json").is_file():  # stores appear when they are complete
            return folder
        partition_graph(
            data,
            folder,
            num_parts=num_parts,
            partitioner=partitioner,
            notes=notes,
            num_classes=self.preprocessing["num_classes"],
            fingerprint=content,
        )
        return folder

    @override
    def setup(self, stage: str | None = None) -> None:
        """Map this rank's part; raises the same :class:`~pygdist.errors.InputError` on all ranks, or none."""
        communicator = getattr(self._strategy, "communicator", None)
        if communicator is not None:
            communicator.agree(self._error)
        elif self._error is not None:
            raise InputError(self._error)
        if self._strategy is not None:
            self._folder = Path(self._strategy.broadcast(str(self._folder)))
        rank = 0 if self._alone else self.trainer.global_rank  # type: ignore[union-attr]
        error = None
        try:
            # again for every stage: a notebook that looked at part 0 forks into ranks with other parts
            shard = Shard.load(self.folder, rank, num_parts=self._num_parts())
            if self.edge_split is not None:
                shard = hold_out(shard, self.edge_split, self.preprocessing["split_seed"])
            self._shard, self._moved = shard, None
        except InputError as problem:
            error = str(problem)
        if communicator is not None:
            communicator.agree(error)
        elif error is not None:
            raise InputError(error)
        self._fill_in_sizes()

    def _fill_in_sizes(self) -> None:
        """Before callbacks are set up: those that average weights copy the model then."""
        model = None if self._alone else getattr(self.trainer.lightning_module, "model", None)  # type: ignore[union-attr]
        if isinstance(model, nn.Module):
            fill_in_sizes(model, self.shard)

    def _num_parts(self) -> int:
        world_size = 1 if self._alone else self.trainer.world_size  # type: ignore[union-attr]
        if self.num_parts is None:
            return world_size
        if not self._alone and self.num_parts != world_size:
            raise InputError(f"num_parts={self.num_parts} but the trainer runs {world_size} ranks; each holds one part")
        return self.num_parts

    @property
    def _alone(self) -> bool:
        return self.trainer is None

    @property
    def _strategy(self) -> Any:
        return None if self.trainer is None else self.trainer.strategy

    @override
    def train_dataloader(self) -> FullGraphLoader:
        return FullGraphLoader(self.shard)

    @override
    def val_dataloader(self) -> FullGraphLoader | list[FullGraphLoader]:
        if (
            self.edge_split is None
            and not self.shard.counts["val_mask"]
            and self.trainer is not None
            and self.trainer.state.fn == "fit"
        ):
            rank_zero_info("the graph has no validation nodes (val_mask): training goes on without validation")
            return []
        return FullGraphLoader(self.shard)

    @override
    def test_dataloader(self) -> FullGraphLoader:
        return FullGraphLoader(self.shard)

    @override
    def predict_dataloader(self) -> FullGraphLoader:
        return FullGraphLoader(self.shard)

    @override
    def transfer_batch_to_device(self, batch: Shard, device: torch.device, dataloader_idx: int) -> Shard:
        # the graph is the same in every epoch: it moves once, and its features take the type of the model
        dtype = self._model_dtype()
        if self._moved is None or (self._moved.x.device, self._moved.x.dtype) != (device, dtype):
            with torch.inference_mode(False):  # training uses what an evaluation moved first
                self._moved = batch.to(device).astype(dtype)
        return self._moved

    def _model_dtype(self) -> torch.dtype:
        parameters = () if self.trainer is None else self.trainer.lightning_module.parameters()
        return next((p.dtype for p in parameters if p.is_floating_point()), self.shard.x.dtype)
