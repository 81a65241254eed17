"""``pushpull`` trains as one process would on the batches of all ranks, and no feature travels."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch_geometric import nn
from torch_geometric.data import Data

from pygdist import GraphDataModule, InputError, NodeClassifier
from pygdist.backends import PushPullBackend
from pygdist.backends.sampling.copies import GroupSizes, column_bytes, group_sizes, topology_bytes
from pygdist.lightning import LinkPredictor
from pygdist.nn.inputs import edge_inputs, outputs_of
from pygdist.sampler import EdgeBatches, NeighborBatches
from pygdist.testing import RankPool
from tests.backends.pushpull_runs import drawn, model, narrow, on_ranks, trained
from tests.kernels.oracle import needs_library
from tests.lightning import runs
from tests.lightning.test_pull import EPOCHS, FAN_OUT, SEED, assert_close, on_one_process
from tests.turns import by_turns

pytestmark = needs_library


NAMES = [
    "GCN",
    "GraphSAGE",
    "max",
    "GIN",
    "eps",
    "graph-conv",
    "weighted",
    "jk",
    "SG",
    "two-hops",
    "GAT",
    "averaged",
    "ptags",
    "ptags-squares",
    "ptags-one",
    "ptags-weights",
]


#: Numbers of ranks, and of columns, which may be fewer. One rank comes last: what has its turn there has another.
SIZES = [(2, 7), (3, 2), (4, 12), (1, 12)]


@pytest.mark.parametrize(("name", "world_size", "width"), by_turns(3, NAMES, SIZES))
def test_exact(name: str, world_size: int, width: int, pool: RankPool, tmp_path: Path) -> None:
    """With fewer columns than ranks too."""
    data = narrow(width)
    results = pool.run(on_ranks, world_size, str(tmp_path), name, data, "hash")
    expected, losses = on_one_process(lambda: model(name, width), data, [owned for _, _, owned, _ in results])
    for found, history, *_ in results:
        assert_close(found, expected)
        assert [epoch["train_loss"] for epoch in history] == pytest.approx(losses, rel=1e-10)


def _grouped(rank: int, world_size: int, folder: str, name: str, options: dict[str, Any], pipeline: Any) -> Any:
    backend = PushPullBackend(pipeline=pipeline, **options)
    return on_ranks(rank, world_size, folder, name, narrow(7), "hash", backend, limit_val_batches=0)


GROUPS = [
    {"feature_parts": 2},
    {"feature_parts": 1},
    {"topology_parts": 1},
    {"topology_parts": 2, "feature_parts": 2},
    {"topology_parts": 1, "feature_parts": 1},
    {"cache_gib": 1.0},
]


@pytest.mark.parametrize(("name", "pipeline"), by_turns(2, ["GCN", "weighted", "GAT", "two-hops"], [1, 3]))
def test_cached_copies_change_nothing(name: str, pipeline: int, pool: RankPool, tmp_path: Path) -> None:
    """Losses and parameters, whatever is held twice; with all features here, no batch is pushed and no sum pulled."""
    (expected, history, *_), *_ = pool.run(_grouped, 4, str(tmp_path), name, {}, pipeline)
    for options in GROUPS:
        for found, other, _, sent in pool.run(_grouped, 4, str(tmp_path), name, options, pipeline):
            assert_close(found, expected)
            losses = [epoch["train_loss"] for epoch in other]
            assert losses == pytest.approx([epoch["train_loss"] for epoch in history], rel=1e-10)
            labels = {label.removesuffix(", lengths") for label in sent}
            if options.get("feature_parts") == 1 or "cache_gib" in options:
                assert not {label for label in labels if label.startswith(("push", "pull"))}
            if options.get("topology_parts") == 1 or "cache_gib" in options:
                assert not {label for label in labels if label.startswith("sampling")}
                assert "push, weights" not in labels


def _sharded(
    rank: int, world_size: int, folder: str, name: str, width: int, backend: dict[str, Any], options: dict[str, Any]
) -> Any:
    arguments = {"first_weights": "sharded", **backend}
    data = narrow(width, one_sided="one_sided" in options)
    options = {key: value for key, value in options.items() if key != "one_sided"}
    partitioner = "chunk" if "one_sided" in options else "hash"
    return on_ranks(rank, world_size, folder, name, data, partitioner, PushPullBackend(**arguments), **options)


@pytest.mark.parametrize(
    ("name", "world_size", "width"), by_turns(3, ["GCN", "GraphSAGE", "eps", "GAT", "ptags"], SIZES)
)
def test_exact_where_each_rank_trains_its_columns(
    name: str, world_size: int, width: int, pool: RankPool, tmp_path: Path
) -> None:
    data = narrow(width)
    results = pool.run(_sharded, world_size, str(tmp_path), name, width, {}, {})
    expected, losses = on_one_process(lambda: model(name, width), data, [owned for _, _, owned, _ in results])
    for found, history, *_ in results:
        assert_close(found, expected)
        assert [epoch["train_loss"] for epoch in history] == pytest.approx(losses, rel=1e-10)


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ({}, {"gradient_clip_val": 0.05}),
        ({}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        ({"pipeline": 3}, {"gradient_clip_val": 0.05}),
        ({"topology_parts": 1}, {"one_sided": True}),
    ],
    ids=["norm", "value", "pipeline", "one-sided"],
)
def test_columns_that_a_rank_trains_are_as_if_gathered(
    backend: dict[str, Any], options: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    """With clipping, whose norm is over all ranks, and a pipeline; no gradient of the weights is in DDP."""
    ways = {}
    for way in ("gathered", "sharded"):
        arguments = {**backend, "first_weights": way}
        ways[way] = pool.run(_sharded, 3, str(tmp_path), "GraphSAGE", 7, arguments, options)
    for (found, history, *_), (expected, other, *_) in zip(ways["sharded"], ways["gathered"], strict=True):
        assert_close(found, expected)
        assert [one["train_loss"] for one in history] == pytest.approx([one["train_loss"] for one in other], rel=1e-10)


class _Lbfgs(NodeClassifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


def _refused_sharded(rank: int, world_size: int, folder: str, name: str) -> str:
    torch.manual_seed(0)
    data = GraphDataModule(narrow(7), batches=NeighborBatches(FAN_OUT, batch_size=13), cache_dir=Path(folder) / "cache")
    backend = PushPullBackend(first_weights="sharded", feature_parts=1 if name == "groups" else None)
    net = nn.Sequential("x, edge_index", [(nn.SGConv(7, 4, K=2, bias=False), "x, edge_index -> x")])
    module = (_Lbfgs if name == "optimizer" else NodeClassifier)(
        net if name == "alone" else model("GCN", 7), backend=backend
    )
    callbacks: list[pl.Callback] = [EMAWeightAveraging()] if name == "average" else []
    trainer = runs.trainer(rank, world_size, folder, max_epochs=1, callbacks=callbacks)
    with pytest.raises(InputError) as refused:
        trainer.fit(module, datamodule=data)
    return str(refused.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("optimizer", "optimizer LBFGS is not known to update each element independently"),
        ("average", "EMAWeightAveraging would average columns"),
        ("alone", "trains nothing but the weights of its first layer"),
        ("groups", "no two of 2 ranks may hold the same columns"),
    ],
)
def test_what_does_not_go_with_sharded_weights_is_refused(name: str, says: str, pool: RankPool, tmp_path: Path) -> None:
    for text in pool.run(_refused_sharded, 2, str(tmp_path), name):
        assert says in text


def _resumed(rank: int, world_size: int, folder: str, ckpt: str | None, way: dict[str, Any] | str) -> Any:
    saves = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, every_n_epochs=1)
    backend = way if isinstance(way, str) else PushPullBackend(**way)
    options = {"max_epochs": 3, "callbacks": [saves], "enable_checkpointing": True}
    return trained(rank, world_size, folder, model("GraphSAGE", 7), backend, ckpt_path=ckpt, **options)[0]


@pytest.mark.parametrize(
    "way", [{}, {"first_weights": "sharded"}, {"pipeline": 3}], ids=["gathered", "sharded", "pipe"]
)
def test_checkpoint_goes_on_bit_for_bit(way: dict[str, Any], pool: RankPool, tmp_path: Path) -> None:
    """From the end of the first epoch."""
    whole = pool.run(_resumed, 2, str(tmp_path / "a"), None, way)
    again = pool.run(_resumed, 2, str(tmp_path / "b"), str(tmp_path / "a" / "epoch=0.ckpt"), way)
    for found, expected in zip(again, whole, strict=True):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_checkpoint_goes_on_with_other_ranks(pool: RankPool, tmp_path: Path) -> None:
    """Saved by 2 ranks, it goes on with 3 as ``pull`` does, which is one process on the same batches."""
    pool.run(_resumed, 2, str(tmp_path / "two"), None, {"first_weights": "sharded"})
    ways: tuple[dict[str, Any] | str, ...] = ("pull", {}, {"first_weights": "sharded"})
    ckpt = str(tmp_path / "two" / "epoch=0.ckpt")
    expected, *others = [
        pool.run(_resumed, 3, str(tmp_path / str(number)), ckpt, way)[0] for number, way in enumerate(ways)
    ]
    for one in others:
        assert_close(one, expected)


class _SeesWeights(pl.Callback):
    """Notes the first weight where callbacks see the end of an epoch."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen.append(module.model.convs[0].lin_l.weight.detach().clone())


def _within_an_epoch(rank: int, world_size: int, folder: str, way: str) -> Any:
    """Validate and save within an epoch, and stop there."""
    sees, history, backend = _SeesWeights(), runs.History(), PushPullBackend(first_weights=way)  # type: ignore[arg-type]
    saves = ModelCheckpoint(f"{folder}/{way}", filename="{step}", save_top_k=-1, every_n_train_steps=2)
    state, _ = trained(
        rank, world_size, folder, model("GraphSAGE", 7), backend, max_epochs=3, max_steps=8, val_check_interval=2,
        enable_checkpointing=True, callbacks=[saves, sees, history],
    )  # fmt: skip
    return state, sees.seen, [one["val_loss"] for one in history.epochs if "val_loss" in one]


def test_sharded_weights_are_whole_wherever_an_epoch_is_cut(pool: RankPool, tmp_path: Path) -> None:
    plain = pool.run(_within_an_epoch, 3, str(tmp_path), "gathered")
    own = pool.run(_within_an_epoch, 3, str(tmp_path), "sharded")
    for (found, seen, losses), (expected, others, other_losses) in zip(own, plain, strict=True):
        assert_close(found, expected)
        assert losses == pytest.approx(other_losses, rel=1e-9)
        for one, other in zip(seen, others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    names = sorted(path.name for path in (tmp_path / "gathered").glob("*.ckpt"))
    assert len(names) >= 3
    for name in names:
        saved = [torch.load(tmp_path / way / name, weights_only=True)["state_dict"] for way in ("sharded", "gathered")]
        assert_close(*saved)


def test_gradients_of_sharded_weights_do_not_travel(pool: RankPool, tmp_path: Path) -> None:
    """Outside of DDP, which leaves them out, columns travel where an epoch ends, and the starting weights."""
    results = pool.run(_sharded, 3, str(tmp_path), "GraphSAGE", 7, {}, {"limit_val_batches": 0})
    pushed = {"push, sizes", "push, structure", "push, gradients", "pull, sums", "first weights"}
    for _, _, _, sent in results:
        others = {label for label in sent if label.startswith(("push", "pull", "first", "gradients"))}
        assert others == pushed


class _Frozen(torch.nn.Module):
    """Trains one weight of its first layer, or its bias alone."""

    def __init__(self, trains: str) -> None:
        super().__init__()
        self.first, self.second = nn.SAGEConv(7, 8), nn.SAGEConv(8, 4)
        for name, one in self.first.named_parameters():
            one.requires_grad_(name == trains)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, edge_index).relu(), edge_index)
        return out


def _partly_frozen(rank: int, world_size: int, folder: str, trains: str, pipeline: Any) -> Any:
    torch.manual_seed(7)
    return trained(rank, world_size, folder, _Frozen(trains), PushPullBackend(pipeline=pipeline))


@pytest.mark.parametrize("trains", ["lin_r.weight", "lin_l.bias", "none"])
def test_first_layers_that_are_partly_frozen(trains: str, pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(_partly_frozen, 2, str(tmp_path), trains, 1)

    def make() -> torch.nn.Module:
        torch.manual_seed(7)
        return _Frozen(trains)

    expected, _ = on_one_process(make, narrow(7), [owned for _, owned in results])
    for found, _ in results:
        assert_close(found, expected)
    for found, _ in pool.run(_partly_frozen, 2, str(tmp_path), trains, 3):
        frozen = [name for name in expected if name.startswith("first") and name != f"first.{trains}"]
        assert all(torch.equal(found[name], expected[name]) for name in frozen)


def _of_links(rank: int, world_size: int, folder: str, backend: Any) -> Any:
    batches, split = EdgeBatches([4, 3], batch_size=150, negatives=2), {"edge_split": (0.1, 0.1)}
    net = model("GraphSAGE", 7)
    return trained(rank, world_size, folder, net, backend, batches=batches, module=LinkPredictor, data=split)[0]


@pytest.mark.parametrize("options", [{}, {"topology_parts": 1}])
def test_links_are_learned_as_by_pull(options: dict[str, Any], pool: RankPool, tmp_path: Path) -> None:
    expected = pool.run(_of_links, 3, str(tmp_path), "pull")[0]
    for found in pool.run(_of_links, 3, str(tmp_path), PushPullBackend(**options)):
        assert_close(found, expected)


def _three_hops(rank: int, world_size: int, folder: str, backend: Any) -> Any:
    batches = NeighborBatches([3, 2, 2], batch_size=13)
    return trained(rank, world_size, folder, model("SG2", 7), backend, batches=batches)[0]


@pytest.mark.parametrize("options", [{}, {"topology_parts": 1}])
def test_a_layer_of_two_hops_before_another(options: dict[str, Any], pool: RankPool, tmp_path: Path) -> None:
    expected = pool.run(_three_hops, 3, str(tmp_path), "pull")[0]
    for found in pool.run(_three_hops, 3, str(tmp_path), PushPullBackend(**options)):
        assert_close(found, expected)


class _SeesBatches(pl.Callback):
    """Notes the nodes and edges of a rank's batches."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        sample = batch.sample
        self.seen.append((sample.n_id.clone(), sample.edge_index.clone()))


def _sampled(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    sees, backend = _SeesBatches(), PushPullBackend(**options)
    on_ranks(rank, world_size, folder, "GCN", narrow(7), "hash", backend, sees=[sees], limit_val_batches=0)
    return sees.seen


def test_sampled_batches_are_the_same_whoever_holds_the_graph(pool: RankPool, tmp_path: Path) -> None:
    hashed = pool.run(_sampled, 4, str(tmp_path), {})
    for size in (2, 1):
        for found, expected in zip(pool.run(_sampled, 4, str(tmp_path), {"topology_parts": size}), hashed, strict=True):
            assert len(found) == len(expected) > 3
            for one, other in zip(found, expected, strict=True):
                assert all(map(torch.equal, one, other))


def test_copies_fit_the_memory_whichever_size_is_given() -> None:
    shard = mock.Mock(num_nodes=100_000, num_edges=1_000_000, **{"x.size.return_value": 64, "columns.itemsize": 4})
    most = column_bytes(shard, 1, 4)
    for given in ({"features": 1, "topology": None}, {"features": None, "topology": 1}):
        sizes = group_sizes(shard, 4, cache_gib=most / 2**30, edge_bytes=0, **given)
        assert column_bytes(shard, sizes.features, 4) + topology_bytes(shard, sizes.topology, 4, 0) <= most
    assert GroupSizes(1, 1) == group_sizes(shard, 4, None, None, cache_gib=2 * most / 2**30, edge_bytes=0)


def _refused_sizes(rank: int, world_size: int, folder: str) -> str:
    with pytest.raises(InputError) as refused:
        _grouped(rank, world_size, folder, "GCN", {"feature_parts": 3}, 1)
    return str(refused.value)


def test_groups_of_unequal_sizes_are_refused(pool: RankPool, tmp_path: Path) -> None:
    for text in pool.run(_refused_sizes, 4, str(tmp_path)):
        assert "feature_parts is 3, expected a divisor of the number of ranks, which is 4" in text


@pytest.mark.parametrize("name", ["GCN", "weighted"])
def test_exact_where_a_rank_has_no_training_node(name: str, pool: RankPool, tmp_path: Path) -> None:
    data = narrow(7, one_sided=True)
    results = pool.run(on_ranks, 3, str(tmp_path), name, data, "chunk")
    expected, _ = on_one_process(lambda: model(name, 7), data, [owned for _, _, owned, _ in results])
    assert min(int(data.train_mask[owned].sum()) for _, _, owned, _ in results) == 0
    for found, *_ in results:
        assert_close(found, expected)


def _weighed_classes(rank: int, world_size: int, folder: str, backend: str) -> dict[str, Tensor]:
    net = model("GCN", 7)
    data = GraphDataModule(
        narrow(7, one_sided=True), partitioner="chunk", batches=NeighborBatches(FAN_OUT, batch_size=13),
        batch_seed=SEED, cache_dir=Path(folder) / "cache",
    )  # fmt: skip
    trainer = runs.trainer(rank, world_size, folder, max_epochs=2)
    trainer.fit(NodeClassifier(net, backend=backend, class_weights=[1.0, 2.0, 1.0, 3.0]), datamodule=data)
    return {key: value.clone() for key, value in net.state_dict().items()}


def test_classes_with_weights_where_a_rank_is_idle(pool: RankPool, tmp_path: Path) -> None:
    states = {name: pool.run(_weighed_classes, 3, str(tmp_path), name) for name in ("pull", "pushpull")}
    for state in (*states["pull"], *states["pushpull"]):
        assert_close(state, states["pull"][0])


def _one_by_one(rank: int, world_size: int, folder: str) -> list[dict[str, float]]:
    """A batch of one node without neighbours, and ranks that own one node each."""
    edges = torch.tensor([[1, 2], [2, 1]])
    x = torch.arange(3.0, dtype=torch.float64).view(3, 1)
    masks = dict.fromkeys(("train_mask", "val_mask", "test_mask"), torch.ones(3, dtype=torch.bool))
    data = Data(x=x, edge_index=edges, y=torch.tensor([0, 1, 0]), **masks)
    data_module = GraphDataModule(data, batches=NeighborBatches([2], batch_size=1), cache_dir=Path(folder) / "cache")
    torch.manual_seed(1)
    net = nn.Sequential("x, edge_index", [(nn.SAGEConv(1, 2), "x, edge_index -> x")])
    trainer = runs.trainer(rank, world_size, folder, max_epochs=2)
    module = NodeClassifier(net, backend="pushpull")
    trainer.fit(module, datamodule=data_module)
    return [dict(trainer.test(module, datamodule=data_module, verbose=False)[0])]


def test_rows_and_columns_of_one(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(_one_by_one, 3, str(tmp_path))
    assert all(one[0]["test_loss"] == pytest.approx(results[0][0]["test_loss"]) for one in results)


def test_bytes_are_counted_to_the_byte_and_no_feature_travels(pool: RankPool, tmp_path: Path) -> None:
    """Per label, in the epochs of a run: structure 4 (E + 2 R) + 64, sums and gradients D H b, to each other rank."""
    data, world_size = narrow(7), 3
    results = pool.run(_without_validation, world_size, str(tmp_path), "GraphSAGE", data, "hash")
    sizes = _sampled_sizes(data, [owned for _, _, owned, _ in results], epochs=EPOCHS)
    for rank, (_, _, _, sent) in enumerate(results):
        mine, others = sizes[rank], [size for other, size in enumerate(sizes) if other != rank]
        peers = world_size - 1
        assert sent["push, sizes"] == peers * 64 * len(mine)
        assert sent["push, structure"] == peers * sum(4 * (edges + 2 * rows) for rows, edges in mine)
        assert sent["push, gradients"] == peers * sum(rows * 8 * 8 for rows, _ in mine)
        assert sent["pull, sums"] == sum(rows * 8 * 8 for other in others for rows, _ in other)
        others_sent = {"sampling, nodes", "sampling, edges", "owners", "gather text", "gather numbers"}
        pushed = {"push, sizes", "push, structure", "push, gradients", "pull, sums"}
        assert {label.removesuffix(", lengths") for label in sent} <= others_sent | pushed


def test_bytes_with_the_whole_topology_are_those_of_rows(pool: RankPool, tmp_path: Path) -> None:
    """Structure is 4 R + 64 bytes to each other rank of a group."""
    data = narrow(7)
    results = pool.run(_grouped, 4, str(tmp_path), "GraphSAGE", {"topology_parts": 1, "feature_parts": 2}, 1)
    sizes = _sampled_sizes(data, [owned for _, _, owned, _ in results], epochs=EPOCHS)
    for rank, (_, _, _, sent) in enumerate(results):
        mine, other = sizes[rank], sizes[rank ^ 1]
        assert sent["push, sizes"] == 64 * len(mine)
        assert sent["push, structure"] == sum(4 * rows for rows, _ in mine)
        assert sent["push, gradients"] == sum(rows * 8 * 8 for rows, _ in mine)
        assert sent["pull, sums"] == sum(rows * 8 * 8 for rows, _ in other)


def test_bytes_of_scores_are_counted_to_the_byte(pool: RankPool, tmp_path: Path) -> None:
    """Attention sends scores of U nodes and R rows for each head twice each way, to and from each other rank."""
    data, world_size = narrow(7), 3
    results = pool.run(_without_validation, world_size, str(tmp_path), "averaged", data, "hash")
    sizes = _sampled_sizes(data, [owned for _, _, owned, _ in results], epochs=EPOCHS, with_nodes=True)
    for rank, (_, _, _, sent) in enumerate(results):
        own, others = sizes[rank], [size for other, size in enumerate(sizes) if other != rank]
        mine = sum((nodes + rows) * 3 * 8 for rows, nodes in own)
        for label in ("scores", "gradients of scores"):
            assert sent[f"push, {label}"] == (world_size - 1) * mine
            assert sent[f"pull, {label}"] == sum((nodes + rows) * 3 * 8 for other in others for rows, nodes in other)


def _without_validation(*args: Any) -> Any:
    return on_ranks(*args, limit_val_batches=0)


def _sampled_sizes(
    data: Data, owned: list[Tensor], *, epochs: int, with_nodes: bool = False
) -> list[list[tuple[int, int]]]:
    """For each rank and step, the rows with in-edges and the edges of its batch, as one process samples it.

    With ``with_nodes`` all its nodes stand in place of the edges.
    """
    sizes: list[list[tuple[int, int]]] = [[] for _ in owned]
    for epoch in range(epochs):
        for batches in drawn(data, owned, epoch):
            for of_rank, (_, batch) in zip(sizes, batches, strict=True):  # every rank has a batch in every step
                second = batch.node.numel() if with_nodes else sum(batch.num_edges)
                of_rank.append((sum(batch.num_nodes[:-1]), second))
    return sizes


def _evaluated(rank: int, world_size: int, folder: str, name: str) -> tuple[Tensor, Tensor]:
    data = narrow(7)
    module_data = GraphDataModule(
        data, partitioner="hash", batches=NeighborBatches(FAN_OUT, batch_size=13), cache_dir=Path(folder) / "cache"
    )
    trainer = runs.trainer(rank, world_size, folder, max_epochs=1, limit_train_batches=2)
    module = NodeClassifier(model(name, 7), backend="pushpull")
    trainer.fit(module, datamodule=module_data)
    trainer.save_checkpoint(f"{folder}/{name}.ckpt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pygdist.backends.sampling.whole._ROWS", 11)
        (ids, out), *_ = trainer.predict(module, datamodule=module_data)
    return ids, out


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("GCN", 1),
        *((name, 3) for name in ("GCN", "weighted", "max", "eps", "SG", "two-hops", "GAT", "ptags-squares")),
    ],
)
def test_evaluation_is_that_of_the_whole_graph(name: str, world_size: int, pool: RankPool, tmp_path: Path) -> None:
    """The checkpoint loads into the plain model; 11 rows of the first layer are computed at a time."""
    results = pool.run(_evaluated, world_size, str(tmp_path), name)
    data, plain = narrow(7), model(name, 7).double().eval()
    checkpoint = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
    plain.load_state_dict({key.removeprefix("model."): one for key, one in checkpoint["state_dict"].items()})
    with torch.no_grad():
        expected = outputs_of(plain, data, data.edge_index)
    for ids, out in results:
        torch.testing.assert_close(out, expected[ids], rtol=1e-10, atol=1e-10)
    assert sorted(torch.cat([ids for ids, _ in results]).tolist()) == list(range(160))


# -- the pipeline ------------------------------------------------------------------------------------------------------


def _replayed(name: str, data: Data, owned: list[Tensor]) -> tuple[dict[str, Tensor], list[float]]:
    """Train plain PyG with delays: the first layer's gradients are applied two steps after it was read."""
    net = model(name, data.num_features).double()
    parameters = dict(net.named_parameters())
    late = {key for key, one in parameters.items() if key in FIRST[name]}
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4)
    losses = []
    for epoch in range(EPOCHS):
        batches = drawn(data, owned, epoch)
        num_batches = len(batches)
        read: list[dict[str, Tensor]] = []  # by step: the first layer's parameters
        found: list[dict[str, Tensor]] = []  # by batch: their gradients
        summed = 0.0
        for step in range(num_batches + 2):
            if step < num_batches:
                read.append({key: parameters[key].detach().clone().requires_grad_() for key in late})
            optimizer.zero_grad()
            if 1 <= step <= num_batches:
                total, count = torch.zeros(()), 0
                number = step - 1
                for chosen, batch in batches[number]:
                    sample = Data(x=data.x[batch.node], edge_weight=data.edge_weight[batch.edge],
                                  edge_attr=data.edge_attr[batch.edge])  # fmt: skip
                    edges = torch.stack([batch.source, batch.target])
                    inputs = edge_inputs(net, sample)
                    out = functional_call(net, {**parameters, **read[number]}, (sample.x, edges), inputs)
                    total = total + cross_entropy(out[: chosen.numel()], data.y[chosen], reduction="sum")
                    count += chosen.numel()
                grads = torch.autograd.grad(total / count, [*read[number].values()], retain_graph=True)
                found.append(dict(zip(read[number], grads, strict=True)))
                others = [key for key in parameters if key not in late]
                grads = torch.autograd.grad(total / count, [parameters[key] for key in others])
                for key, grad in zip(others, grads, strict=True):
                    parameters[key].grad = grad
                summed += float(total.detach())
            if step >= 2:
                for key, grad in found[step - 2].items():
                    parameters[key].grad = grad
            optimizer.step()
        losses.append(summed / int(data.train_mask.sum()))
    return net.state_dict(), losses


FIRST = {
    "GCN": {"convs.0.lin.weight"},
    "GraphSAGE": {"convs.0.lin_l.weight", "convs.0.lin_r.weight"},
    "eps": {"convs.0.nn.lins.0.weight", "convs.0.eps"},
    "weighted": {"first.lin.weight"},
    "GAT": {f"module_0.{one}" for one in ("lin.weight", "res.weight", "att_src", "att_dst")},
}


def _pipelined(rank: int, world_size: int, folder: str, name: str, data: Data, partitioner: str) -> Any:
    return on_ranks(rank, world_size, folder, name, data, partitioner, backend=PushPullBackend(pipeline=3))


@pytest.mark.parametrize(("name", "world_size", "width"), by_turns(3, FIRST, SIZES))
def test_pipeline_is_training_with_a_delay_of_two_steps(
    name: str, world_size: int, width: int, pool: RankPool, tmp_path: Path
) -> None:
    """Through the ends of two epochs, with Adam and weight decay."""
    data = narrow(width)
    results = pool.run(_pipelined, world_size, str(tmp_path), name, data, "hash")
    expected, losses = _replayed(name, data, [owned for _, _, owned, _ in results])
    for found, history, *_ in results:
        assert_close(found, expected)
        assert [epoch["train_loss"] for epoch in history] == pytest.approx(losses, rel=1e-10)


def test_pipeline_where_a_rank_has_no_training_node(pool: RankPool, tmp_path: Path) -> None:
    data = narrow(7, one_sided=True)
    results = pool.run(_pipelined, 3, str(tmp_path), "GCN", data, "chunk")
    expected, _ = _replayed("GCN", data, [owned for _, _, owned, _ in results])
    for found, *_ in results:
        assert_close(found, expected)


def _cut_pipeline(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> tuple[int, dict[str, Tensor]]:
    net = model("GCN", 7)
    data = GraphDataModule(narrow(7), batches=NeighborBatches(FAN_OUT, batch_size=13), cache_dir=Path(folder) / "cache")
    trainer = runs.trainer(rank, world_size, folder, **{"max_epochs": 2, **options})
    trainer.fit(NodeClassifier(net, backend=PushPullBackend(pipeline=3)), datamodule=data)
    return trainer.global_step, {key: value.clone() for key, value in net.state_dict().items()}


class _StopsEarly(pl.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = batch_idx == 2


@pytest.mark.parametrize(
    ("options", "steps"),
    [({"limit_train_batches": 4}, 8), ({"fast_dev_run": True}, 1), ({"callbacks": [_StopsEarly()]}, 3)],
    ids=["limit", "fast-dev-run", "callback"],
)
def test_a_pipeline_that_is_cut_drops_what_is_on_its_way(
    options: dict[str, Any], steps: int, pool: RankPool, tmp_path: Path
) -> None:
    (first, state), (second, other) = pool.run(_cut_pipeline, 2, str(tmp_path), options)
    assert first == second == steps
    assert all(torch.equal(state[name], value) for name, value in other.items())


def _refused_options(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> str:
    with pytest.raises(InputError) as refused:
        _cut_pipeline(rank, world_size, folder, {"enable_checkpointing": "callbacks" in options, **options})
    return str(refused.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_steps": 5}, "max_steps=5"),
        ({"val_check_interval": 2}, "val_check_interval=2"),
        ({"callbacks": [ModelCheckpoint(every_n_train_steps=2)]}, "every_n_train_steps=2"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
    ],
)
def test_options_within_an_epoch_are_refused(
    options: dict[str, Any], says: str, pool: RankPool, tmp_path: Path
) -> None:
    for text in pool.run(_refused_options, 2, str(tmp_path), options):
        assert says in text


def test_a_pipeline_of_two_is_refused() -> None:
    with pytest.raises(InputError, match="pipeline is 2, expected 1 or 3"):
        PushPullBackend(pipeline=2)  # type: ignore[arg-type]
