"""``open_graph``: a loop of the caller's own on several processes repeats that of one process with plain PyG."""

from __future__ import annotations

import copy
import gc
import io
import os
import subprocess
import sys
import warnings
import weakref
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch_geometric.data import Data
from torch_geometric.nn import APPNP, GAT, GCN, GCNConv, GraphSAGE, HeteroConv

from pygdist import InputError, open_graph, undistribute
from pygdist.backends import HybridBackend
from pygdist.graph import prepare, write_store
from pygdist.testing import RankPool
from tests.lightning.runs import graph as small_graph
from tests.lightning.test_node_inputs import OfData, Points
from tests.lightning.test_node_inputs import graph as graph_with_places

MODELS: dict[str, Any] = {
    "GCN, batch norm": lambda: GCN(12, 8, num_layers=2, out_channels=4, norm="batch_norm", bias=False),
    "GAT": lambda: GAT(12, 8, num_layers=2, out_channels=4, heads=2),
    "GraphSAGE, max": lambda: GraphSAGE(12, 8, num_layers=3, out_channels=4, aggr="max"),
}


def _graph() -> Data:
    data = small_graph()
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(160, generator=generator)
    masks = {name: torch.zeros(160, dtype=torch.bool) for name in ("train_mask", "val_mask", "test_mask")}
    for name, chosen in zip(masks, order.split((80, 40, 40)), strict=True):
        masks[name][chosen] = True
    return data.update(masks)


def _alone(name: str, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(7)
    data, model = _graph(), MODELS[name]().double()
    optimizer, found = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(steps):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        right = (out.argmax(dim=1) == data.y)[data.test_mask]
        found += [float(loss), float(right.double().mean())]
    return found, model.state_dict()


def trained(
    rank: int, num_ranks: int, folder: str, name: str, backend: str, steps: int, device: str | None = None
) -> tuple[list[float], dict[str, Tensor], Tensor | None]:
    torch.manual_seed(7 + rank)  # the first process decides
    graph = open_graph(_graph, backend=backend, cache_dir=folder, device=device)
    model = graph.distribute(MODELS[name]().double())
    optimizer, found = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(steps):
        optimizer.zero_grad()
        out = model(graph.x, graph.edge_index)
        loss = graph.mean_loss(F.cross_entropy, out, graph.y, graph.train_mask)
        loss.backward()
        optimizer.step()
        found += [float(loss), graph.mean(out.argmax(dim=1) == graph.y, graph.test_mask)]
    undistribute(model)
    assert device is None or graph.device == next(model.parameters()).device == torch.device(device)
    return found, {key: value.cpu() for key, value in model.state_dict().items()}, graph.gather(graph.y)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("backend", ["comm", "tensor", "cache"])
@pytest.mark.parametrize("name", MODELS)
def test_a_loop_repeats_that_of_one_process(
    name: str, backend: str, num_ranks: int, pool: RankPool, tmp_path: Path
) -> None:
    compare(name, pool.run(trained, num_ranks, str(tmp_path), name, backend, 4))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("backend", ["comm", "tensor", "cache"])
@pytest.mark.parametrize("name", MODELS)
def test_a_loop_on_a_gpu_repeats_that_of_one_process_on_the_host(
    name: str, backend: str, num_ranks: int, pool: RankPool, tmp_path: Path
) -> None:
    compare(name, pool.run(trained, num_ranks, str(tmp_path), name, backend, 4, "cuda:0"))


def compare(name: str, by_rank: list[tuple[list[float], dict[str, Tensor], Tensor | None]]) -> None:
    expected, weights = _alone(name, 4)
    for rank, (found, state, y) in enumerate(by_rank):
        assert found == pytest.approx(expected, rel=1e-9)
        assert list(state) == list(weights)
        for key, value in weights.items():
            torch.testing.assert_close(state[key], value, rtol=0, atol=1e-9)
        assert (y is None) == (rank > 0)
        assert y is None or torch.equal(y.cpu(), _graph().y)


def _with_further_tensors(rank: int, num_ranks: int, folder: str, of_data: bool) -> tuple[list[float], Tensor | None]:
    graph = open_graph(graph_with_places(), cache_dir=folder)
    model = graph.distribute((OfData() if of_data else Points()).double())
    optimizer, found = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(2):
        optimizer.zero_grad()
        out = model(graph.data) if of_data else model(graph.x, graph.edge_index, graph.pos, kind=graph.kind)
        loss = graph.mean_loss(F.cross_entropy, out, graph.y)
        loss.backward()
        optimizer.step()
        found.append(float(loss))
    with pytest.raises(AttributeError, match="the graph has no poss; further tensors of its nodes: kind, pos"):
        graph.poss  # noqa: B018
    return found, graph.gather(graph.pos)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("of_data", [False, True])
def test_further_tensors_of_nodes_by_name(of_data: bool, num_ranks: int, pool: RankPool, tmp_path: Path) -> None:
    data, model, expected = graph_with_places(), Points().double(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.x, data.edge_index, data.pos, kind=data.kind), data.y, ignore_index=-1)
        loss.backward()
        optimizer.step()
        expected.append(float(loss))
    for rank, (found, places) in enumerate(pool.run(_with_further_tensors, num_ranks, str(tmp_path), of_data)):
        assert found == pytest.approx(expected, rel=1e-9)
        assert places is None if rank else torch.equal(places, data.pos)


class _Gated(nn.Module):
    """Some of its parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.unused = GCN(12, 8, num_layers=1), nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index) * self.frozen
        return out


def _accumulated(rank: int, num_ranks: int, folder: str) -> list[Tensor]:
    graph = open_graph(_graph, cache_dir=folder)
    torch.manual_seed(0)
    model = graph.distribute(_Gated().double())
    for mask in (graph.train_mask, graph.test_mask & (rank == 0)):  # two passes, the second without nodes on some ranks
        graph.mean_loss(F.cross_entropy, model(graph.x, graph.edge_index), graph.y, mask).backward()
    assert model.frozen.grad is None
    return [model.conv.convs[0].lin.weight.grad.clone(), graph.n_id]


def test_gradients_of_several_passes_add_up(pool: RankPool, tmp_path: Path) -> None:
    found = pool.run(_accumulated, 3, str(tmp_path))
    torch.manual_seed(0)
    data, model = _graph(), _Gated().double()
    first = torch.zeros(160, dtype=torch.bool).index_fill(0, found[0][1], True)
    for mask in (data.train_mask, data.test_mask & first):
        F.cross_entropy(model(data.x, data.edge_index)[mask], data.y[mask]).backward()
    for gradient, _ in found:
        torch.testing.assert_close(gradient, model.conv.convs[0].lin.weight.grad, rtol=0, atol=1e-12)


def _asked(rank: int, num_ranks: int, folder: str) -> list[bool]:
    graph = open_graph(_graph, cache_dir=folder)
    model = graph.distribute(GCN(12, 4, num_layers=1).double())
    weight = model.convs[0].lin.weight
    graph.mean_loss(F.cross_entropy, model(graph.x, graph.edge_index), graph.y).backward()
    before = weight.grad.clone()
    loss = graph.mean_loss(F.cross_entropy, model(graph.x, graph.edge_index), graph.y)
    (mine,) = torch.autograd.grad(loss, weight)
    graph._communicator.reduce_in_place(mine, "test")
    return [torch.equal(weight.grad, before), torch.allclose(mine / num_ranks, before, rtol=0, atol=1e-12)]


def _penalised(model: nn.Module, loss: Tensor) -> Tensor:
    return loss + 0.1 * sum(one.square().sum() for one in model.parameters())


def _with_penalty(rank: int, num_ranks: int, folder: str) -> list[Tensor]:
    graph = open_graph(_graph, cache_dir=folder)
    torch.manual_seed(0)
    encoder = graph.distribute(GCN(12, 8, num_layers=1).double())
    decoder = graph.distribute(GCN(8, 4, num_layers=1).double())
    noise = torch.zeros_like(graph.x).requires_grad_()
    z = encoder(graph.x + noise, graph.edge_index)
    loss = graph.mean_loss(F.cross_entropy, decoder(z.relu(), graph.edge_index), graph.y, graph.train_mask)
    _penalised(decoder, _penalised(encoder, loss)).backward()
    gradients = [one.grad for model in (encoder, decoder) for one in model.parameters()]
    return [loss.detach(), graph.n_id, noise.grad, *gradients]


def test_penalties_count_once_and_inputs_get_the_gradient_of_the_mean(pool: RankPool, tmp_path: Path) -> None:
    data = _graph()
    torch.manual_seed(0)
    encoder, decoder = GCN(12, 8, num_layers=1).double(), GCN(8, 4, num_layers=1).double()
    noise = torch.zeros_like(data.x).requires_grad_()
    out = decoder(encoder(data.x + noise, data.edge_index).relu(), data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    _penalised(decoder, _penalised(encoder, loss)).backward()
    expected = [one.grad for model in (encoder, decoder) for one in model.parameters()]
    for mean, n_id, of_noise, *gradients in pool.run(_with_penalty, 3, str(tmp_path)):
        torch.testing.assert_close([mean, of_noise], [loss.detach(), noise.grad[n_id]], rtol=0, atol=1e-12)
        torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-12)


def test_gradients_that_are_asked_for_average_to_those_of_the_mean(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_asked, 3, str(tmp_path)) == [[True, True]] * 3


def _pairs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(160, (2, 90), generator=generator), torch.rand(90, generator=generator).round().double()


def _links(rank: int, num_ranks: int, folder: str, whole: bool) -> list[Any]:
    graph = open_graph(_graph, cache_dir=folder)
    torch.manual_seed(7)
    model = graph.distribute(GCN(12, 8, num_layers=2).double())
    pairs, labels = _pairs()
    share = slice(None) if whole else slice(0 if rank else 30, 30 if rank == 1 else 0 if rank else None)
    z, mine = model(graph.x, graph.edge_index), pairs[:, share]
    source, target = graph.rows(z, mine)
    loss = graph.mean_loss(F.binary_cross_entropy_with_logits, (source * target).sum(dim=1), labels[share])
    loss.backward()
    wrong = []
    for rows, ids in ((z, mine + 160 * (rank == 1)), (z[1:], mine), (z, mine.int())):
        try:
            graph.rows(rows, ids)
        except InputError as error:
            wrong.append(str(error))
    return [loss.detach(), [one.grad for one in model.parameters()], wrong]


@pytest.mark.parametrize("whole", [True, False])
def test_pairs_of_nodes_are_scored_as_on_one_process(whole: bool, pool: RankPool, tmp_path: Path) -> None:
    data, (pairs, labels) = _graph(), _pairs()
    torch.manual_seed(7)
    model = GCN(12, 8, num_layers=2).double()
    z = model(data.x, data.edge_index)
    loss = F.binary_cross_entropy_with_logits((z[pairs[0]] * z[pairs[1]]).sum(dim=1), labels)
    loss.backward()
    for mean, gradients, wrong in pool.run(_links, 3, str(tmp_path), whole):
        torch.testing.assert_close(mean, loss.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(gradients, [one.grad for one in model.parameters()], rtol=0, atol=1e-12)
        ids, rows, kind = wrong
        assert "but the graph has 160 nodes" in ids
        assert "rows, but this process has" in rows
        assert "ids of torch.int32, expected int64" in kind


def _copied(rank: int, num_ranks: int, folder: str) -> list[Any]:
    graph = open_graph(_graph, cache_dir=folder)
    model = graph.distribute(GCN(12, 4, num_layers=2).double())
    averaged = AveragedModel(model)
    out = model(graph.x, graph.edge_index)
    with torch.no_grad():
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        copies = [one(graph.x, graph.edge_index) for one in (copy.deepcopy(model), averaged, loaded)]
    graph.mean_loss(F.cross_entropy, out, graph.y).backward()  # after the copies
    averaged.update_parameters(model)
    said = ""
    try:
        graph.distribute(nn.Sequential(nn.LazyLinear(4), HeteroConv({("a", "to", "a"): GCNConv(-1, 4)})))
    except InputError as error:
        said = str(error)
    return [torch.allclose(one, out, rtol=0, atol=1e-12) for one in copies] + [said]


def test_copies_of_a_model_and_layers_that_are_refused(pool: RankPool, tmp_path: Path) -> None:
    for *equal, said in pool.run(_copied, 2, str(tmp_path)):
        assert equal == [True] * 3
        assert "no backend can run '1' (HeteroConv): it works on heterogeneous graphs" in said


def _compiled(rank: int, num_ranks: int, folder: str) -> float:
    graph = open_graph(_graph, cache_dir=folder)
    torch.manual_seed(7)
    model = graph.distribute(torch.compile(GCN(12, 4, num_layers=2).double(), backend="eager"))
    loss = graph.mean_loss(F.cross_entropy, model(graph.x, graph.edge_index), graph.y, graph.train_mask)
    loss.backward()
    return float(loss)


def test_a_model_that_was_compiled_before(pool: RankPool, tmp_path: Path) -> None:
    data = _graph()
    torch.manual_seed(7)
    out = GCN(12, 4, num_layers=2).double()(data.x, data.edge_index)[data.train_mask]
    expected = float(F.cross_entropy(out, data.y[data.train_mask]))
    assert pool.run(_compiled, 2, str(tmp_path)) == pytest.approx([expected] * 2, rel=1e-12)


class _Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.noise = GCN(12, 8, num_layers=1).double(), False
        self.heads = nn.ModuleList([nn.Linear(8, 4).double() for _ in range(2)])
        self.late = nn.Parameter(torch.ones(4).double(), requires_grad=False)

    def forward(self, x: Tensor, edge_index: Tensor, head: int) -> Tensor:
        if self.noise:
            x += 1.0  # in place
        out: Tensor = self.heads[head](self.conv(x, edge_index).relu()) * self.late
        return out


def _in_turn(model: _Heads, x: Tensor, edges: Tensor, loss: Any) -> tuple[list[Tensor | None], Tensor]:
    """Train two heads in turn, unfreeze a parameter, let a pass fail, and give the model an input that it changes."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    noise = torch.zeros_like(x).requires_grad_()
    for step in range(6):
        optimizer.zero_grad()
        if step == 2:
            model.late.requires_grad_()
        model.noise = step == 4
        if step == 3:
            failing = model(x, edges, 0)
            failing.register_hook(_fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                loss(failing).backward()
            optimizer.zero_grad()
        loss(model(x + noise, edges, 0 if step < 3 else 1)).backward()
        optimizer.step()
    return [None if one.grad is None else one.grad.clone() for one in model.parameters()], noise.grad  # type: ignore[return-value]


def _fail(_: Tensor) -> None:
    raise RuntimeError("out of memory")


def _of_heads(rank: int, num_ranks: int, folder: str) -> list[Any]:
    graph = open_graph(_graph, cache_dir=folder)
    torch.manual_seed(0)
    model = graph.distribute(_Heads())

    def loss(out: Tensor) -> Tensor:
        return graph.mean_loss(F.cross_entropy, out, graph.y, graph.train_mask)

    found = _in_turn(model, graph.x, graph.edge_index, loss)  # type: ignore[arg-type]
    parameters = [one.detach().clone() for one in model.parameters()]
    beside = torch.ones(4, dtype=torch.float64, requires_grad=True)
    other = open_graph(_graph, cache_dir=folder)
    twin = other.distribute(GCN(12, 4, num_layers=1).double())
    with pytest.warns(UserWarning, match=r"a tensor of shape \(4,\) that is neither .* this process's share, 3 times"):
        other.mean_loss(F.cross_entropy, twin(other.x, other.edge_index) + beside, other.y)
    alive = weakref.ref(undistribute(twin).convs[0].lin.weight)
    del twin
    gc.collect()
    return [*found, parameters, graph.n_id, alive() is None]


def test_parameters_come_and_go_as_on_one_process(pool: RankPool, tmp_path: Path) -> None:
    data = _graph()
    torch.manual_seed(0)
    model = _Heads()
    gradients, noise = _in_turn(
        model, data.x, data.edge_index, lambda out: F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    )
    assert [one is None for one in gradients].count(True) == 2  # those of the first head
    for found, of_noise, parameters, n_id, is_gone in pool.run(_of_heads, 3, str(tmp_path)):
        torch.testing.assert_close(of_noise, noise[n_id], rtol=0, atol=1e-9)
        for ours, plain in zip(found, gradients, strict=True):
            assert (ours is None) == (plain is None)
            assert ours is None or torch.allclose(ours, plain, rtol=0, atol=1e-9)
        torch.testing.assert_close(parameters, [one.detach() for one in model.parameters()], rtol=0, atol=1e-9)
        assert is_gone


def _losses(rank: int, num_ranks: int, folder: str) -> list[float]:
    graph, weight = open_graph(_graph, cache_dir=folder), torch.tensor([0.5, 2.0, 1.0, 0.0]).double()
    out = F.one_hot(graph.n_id % 4, 4).double() * graph.n_id.unsqueeze(1) / 100
    weighted, smooth = nn.CrossEntropyLoss(weight=weight), nn.CrossEntropyLoss(label_smoothing=0.1)
    return [
        float(graph.mean_loss(one, out, target, mask))
        for one, target, mask in (
            (weighted, graph.y, graph.train_mask),
            (smooth, graph.y, None),
            (partial(F.cross_entropy, weight=weight), graph.y, graph.train_mask),
            (nn.CrossEntropyLoss(ignore_index=2), graph.y, graph.train_mask),
            (lambda output, y: F.mse_loss(output[:, 0], y, reduction="none"), 1 - out[:, 0], None),
            (F.mse_loss, out.detach() * 2 + 1, graph.val_mask),
            (lambda output, y: (output.argmax(dim=1) - y).abs().double(), graph.y, graph.val_mask),
        )
    ]


def test_losses_are_torchs_means(pool: RankPool, tmp_path: Path) -> None:
    data, weight = _graph(), torch.tensor([0.5, 2.0, 1.0, 0.0]).double()
    every = torch.arange(160)
    out, train, val = F.one_hot(every % 4, 4).double() * every.unsqueeze(1) / 100, data.train_mask, data.val_mask
    expected = [
        F.cross_entropy(out[train], data.y[train], weight=weight),
        F.cross_entropy(out, data.y, label_smoothing=0.1),
        F.cross_entropy(out[train], data.y[train], weight=weight),
        F.cross_entropy(out[train], data.y[train], ignore_index=2),
        F.mse_loss(out[:, 0], 1 - out[:, 0]),
        F.mse_loss(out[val], out[val] * 2 + 1),
        (out[val].argmax(dim=1) - data.y[val]).abs().double().mean(),
    ]
    for found in pool.run(_losses, 3, str(tmp_path)):
        assert found == pytest.approx([float(one) for one in expected], rel=1e-12)


def _prices(whole: bool = False) -> Data:
    data = _graph()
    data.y = data.x[:, 0] * 3 + 1
    return data.update({"y": torch.arange(160) % 5 - 1.0}) if whole else data


def _numbers(rank: int, num_ranks: int, folder: str) -> list[float]:
    graph = open_graph(_prices, cache_dir=folder)
    steps = open_graph(partial(_prices, whole=True), float_labels=True, cache_dir=folder)
    return [
        float(graph.mean_loss(F.mse_loss, graph.x[:, 1], graph.y, graph.train_mask)),
        float(graph.mean_loss(F.l1_loss, graph.x[:, 1:2], graph.y, graph.train_mask)),
        float(steps.mean_loss(F.mse_loss, steps.x[:, 1], steps.y, steps.train_mask)),
    ]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_numbers_are_predicted(pool: RankPool, tmp_path: Path, num_ranks: int) -> None:
    data, steps = _prices(), _prices(whole=True)
    out, train = data.x[data.train_mask, 1], data.train_mask
    expected = [F.mse_loss(out, data.y[train]), F.l1_loss(out, data.y[train]), F.mse_loss(out, steps.y[train].double())]
    for found in pool.run(_numbers, num_ranks, str(tmp_path)):
        assert found == pytest.approx([float(one) for one in expected], rel=1e-12)


def _of_other_partitions(rank: int, num_ranks: int, folder: str) -> str:
    try:
        graph = open_graph(f"{folder}/{rank}")
    except InputError as error:
        return str(error)
    model = graph.distribute(GCN(12, 4, num_layers=1).double())
    return f"trains: {float(graph.mean_loss(F.cross_entropy, model(graph.x, graph.edge_index), graph.y))}"


@pytest.mark.parametrize("differs", ["partition", "labels", "split"])
def test_parts_of_different_partitions_are_refused(differs: str, pool: RankPool, tmp_path: Path) -> None:
    owner = torch.arange(160) % 2
    for rank in range(2):
        data, notes = prepare(_graph())
        if differs == "labels":
            data.y = data.y.roll(rank)
        elif differs == "split":
            data.train_mask = data.train_mask.roll(rank)
        else:
            owner = 1 - owner  # rank 0 and rank 1 both own the even nodes
        folder = tmp_path / str(rank)
        write_store(data, owner.numpy(), folder, num_parts=2, method="mine", arguments={}, notes=notes)
    for said in pool.run(_of_other_partitions, 2, str(tmp_path)):
        assert "the ranks have parts of different partitions, labels or splits" in said


def _of_two_machines(rank: int, num_ranks: int, folder: str) -> tuple[str, float]:
    with mock.patch.dict(os.environ, LOCAL_RANK=str(rank % 2)):
        graph = open_graph(_graph, cache_dir=f"{folder}/machine-{rank // 2}")
    return str(graph._shard.folder), graph.mean(torch.ones(len(graph.x)))


def test_each_machine_partitions_into_a_folder_of_its_own(pool: RankPool, tmp_path: Path) -> None:
    opened = pool.run(_of_two_machines, 4, str(tmp_path))
    for rank, (folder, mean) in enumerate(opened):
        assert folder.startswith(f"{tmp_path}/machine-{rank // 2}/")
        assert mean == 1.0


def _refused(rank: int, num_ranks: int, folder: str) -> list[str]:
    said = []
    graph = open_graph(_graph, cache_dir=folder)
    nobody = torch.zeros_like(graph.train_mask)
    for call in (
        lambda: open_graph(Data(x=torch.ones(3, 2)), cache_dir=folder),
        lambda: open_graph(_graph, backend="replica"),
        lambda: graph.mean_loss(F.cross_entropy, graph.x[:, :4], None),
        lambda: graph.mean_loss(F.cross_entropy, graph.x[:, :4], graph.y, nobody),
        lambda: graph.mean_loss(lambda output, y: output[: len(y) - (rank == 1), 0], graph.x[:, :4], graph.y),
        lambda: graph.mean(graph.y, nobody),
        lambda: open_graph(f"{folder}/nothing"),
        lambda: graph.mean_loss(F.mse_loss, graph.x[:, :1], graph.x[:, 1]),  # torch takes each with each
        lambda: open_graph(_graph, backend=HybridBackend(cache_ratio=rank / 2), cache_dir=folder),
        lambda: graph.distribute(GCN(12, 8 + rank, num_layers=2, out_channels=4).double()),
    ):
        try:
            call()
        except InputError as error:
            said.append(str(error))
    return said


def test_mistakes_are_refused_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    for said in pool.run(_refused, 3, str(tmp_path)):
        assert len(said) == 10
        assert "edge_index" in said[0]
        assert "backend 'replica' does not train on the whole graph; use" in said[1]
        assert "no labels" in said[2]
        assert "no node with a label counts on any process" in said[3]
        assert "expected a value for each" in said[4]
        assert "no node on any process" in said[5]
        assert "nothing" in said[6]
        assert "cache_ratio of the backend is 0.0 on rank 0, but 0.5 on rank 1" in said[8]
        assert "hidden_channels of the model is 8 on rank 0, but 9 on rank 1" in said[9]


def _at_other_rates(rank: int, num_ranks: int, folder: str, kind: str, change: int) -> tuple[int, str]:
    graph = open_graph(_graph, cache_dir=folder)
    model = graph.distribute(GCN(12, 8, num_layers=2, out_channels=4).double())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(10):
        if step == change and rank == num_ranks - 1:
            optimizer.param_groups[0]["lr"] = 0.0101 if kind == "rate" else torch.nan
        if step == change and kind == "infinite":
            with torch.no_grad():
                next(model.parameters())[1] = torch.inf  # not in the sum of every other one
        if step == change and kind == "diverged":
            optimizer.param_groups[0]["lr"] = torch.nan
        optimizer.zero_grad()
        loss = graph.mean_loss(F.cross_entropy, model(graph.x, graph.edge_index), graph.y, graph.train_mask)
        try:
            loss.backward()
        except InputError as error:
            return step, str(error)
        optimizer.step()
    return 10, ""


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    ("kind", "change", "passes"),
    [
        ("rate", 0, "the first backward pass"),
        ("rate", 4, "7 backward passes"),
        ("nan", 0, "the first backward pass"),
        ("diverged", 0, ""),
        ("infinite", 1, ""),
        ("rate", 99, ""),
    ],
)
def test_parameters_that_drift_apart_are_refused(
    kind: str, change: int, passes: str, num_ranks: int, pool: RankPool, tmp_path: Path
) -> None:
    for step, said in pool.run(_at_other_rates, num_ranks, str(tmp_path), kind, change):
        if passes:
            last = num_ranks - 1
            assert said.startswith(f"the parameters of rank {last} differ from those of rank 0 after {passes}: all")
        else:
            assert (step, said) == (10, "")


def _without_mean_loss(rank: int, num_ranks: int, folder: str, divides: bool) -> tuple[int, str]:
    graph = open_graph(_graph, cache_dir=folder)
    model = graph.distribute(GCN(12, 8, num_layers=2, out_channels=4).double())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            out = model(graph.x, graph.edge_index)
            here = F.cross_entropy(out[graph.train_mask], graph.y[graph.train_mask])
            loss = graph.mean_loss(F.cross_entropy, out, graph.y, graph.train_mask) if divides else here
            loss.backward()
    said = [str(one.message) for one in caught if "mean_loss" in str(one.message)]
    return len(said), " ".join(said)


@pytest.mark.parametrize("divides", [False, True])
def test_a_loss_of_one_processs_nodes_is_warned_of_once(divides: bool, pool: RankPool, tmp_path: Path) -> None:
    for number, said in pool.run(_without_mean_loss, 2, str(tmp_path), divides):
        assert number == (not divides)
        assert said.startswith("backward() without graph.mean_loss()") == (not divides)


def _mean_on_rank_0(rank: int, num_ranks: int, folder: str) -> str:
    graph = open_graph(_graph, cache_dir=folder)
    model = graph.distribute(GCN(12, 8, num_layers=2, out_channels=4).double())
    try:
        for _ in range(2):
            model(graph.x, graph.edge_index)
            if rank == 0:
                graph.mean(graph.y)
    except InputError as error:
        return str(error)
    return ""


def test_a_call_of_one_rank_alone_is_named(pool: RankPool, tmp_path: Path) -> None:
    for said in pool.run(_mean_on_rank_0, 2, str(tmp_path)):
        assert "rank 0: in graph.mean" in said
        assert "none under 'if rank == 0'" in said


def _with_own_buffer(rank: int, num_ranks: int, folder: str) -> str:
    graph = open_graph(_graph, cache_dir=folder)
    model = GCN(12, 8, num_layers=2, out_channels=4).double()
    model.register_buffer("mine", torch.ones(3 + rank))
    try:
        graph.distribute(model)
    except InputError as error:
        return str(error)
    return ""


def test_buffers_of_other_shapes_are_refused_as_rank_0_gives_its_own(pool: RankPool, tmp_path: Path) -> None:
    for said in pool.run(_with_own_buffer, 2, str(tmp_path)):
        assert "buffer 'mine' is float32 of shape (3,) on rank 0, but float32 of shape (4,) on rank 1" in said


def _of_other_options(rank: int, num_ranks: int, folder: str) -> str:
    graph = open_graph(_graph, cache_dir=folder)
    try:
        graph.distribute(nn.Sequential(nn.Linear(12, 4), nn.ModuleList([APPNP(2, 0.1 * (1 + rank))])))
    except InputError as error:
        return str(error)
    return ""


def test_options_of_layers_are_compared(pool: RankPool, tmp_path: Path) -> None:
    for said in pool.run(_of_other_options, 2, str(tmp_path)):
        assert "alpha of module '1.0' is 0.1 on rank 0, but 0.2 on rank 1" in said


SCRIPT = """
import sys
import torch
import torch.nn.functional as F
from torch_geometric.nn import GCN

import pygdist

torch.manual_seed(0)
graph = pygdist.open_graph("sbm", cache_dir=sys.argv[1])
model = graph.distribute(GCN(graph.num_features, 16, num_layers=2, out_channels=graph.num_classes))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(3):
    optimizer.zero_grad()
    out = model(graph.x, graph.edge_index)
    loss = graph.mean_loss(F.cross_entropy, out, graph.y, graph.train_mask)
    loss.backward()
    optimizer.step()
if len(sys.argv) > 2 and graph.rank == 1:
    exec(sys.argv[2])
if graph.rank == 0:
    print(graph.num_ranks, float(loss))
    torch.save(model.state_dict(), sys.argv[1] + "/model.pt")
"""


def _script(tmp_path: Path, num_ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"] if num_ranks > 1 else []
    return subprocess.run(
        [sys.executable, *start, str(path), str(tmp_path), *words], env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_script_under_torchrun_and_alone(tmp_path: Path, warm_python: None) -> None:
    losses = []
    for num_ranks in (3, 1):
        done = _script(tmp_path, num_ranks)
        assert done.returncode == 0, done.stderr
        ranks, loss = done.stdout.split()
        assert int(ranks) == num_ranks
        losses.append(float(loss))
        assert set(torch.load(tmp_path / "model.pt")) == set(GCN(-1, 16, num_layers=2, out_channels=2).state_dict())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
def test_a_rank_that_fails_ends_all(tmp_path: Path, warm_python: None) -> None:
    done = _script(tmp_path, 3, "raise ValueError('of the user')")
    assert done.returncode != 0
    assert "ValueError: of the user" in done.stderr


MISTAKES = {
    "pygdist.open_graph('sbm').mean_loss(len, None, None)": "mean_loss: the graph has no labels (data.y)",
    "pygdist.open_graph('nowhere')": "dataset 'nowhere': neither a folder",
    "pygdist.open_graph('sbm', backend='replica')": "open_graph: backend 'replica' does not train on the whole",
}


@pytest.mark.slow
@pytest.mark.parametrize(("line", "words"), MISTAKES.items(), ids=["loss", "data", "backend"])
def test_a_mistake_is_told_in_one_line(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(f"import pygdist\n{line}\n")
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if "nowhere" in line else []
    told = subprocess.run([sys.executable, *start, str(path)], capture_output=True, text=True, timeout=120, check=False)
    said = [one for one in told.stderr.splitlines() if one.startswith("pygdist: error: ")]
    assert len(said) == 1, told.stderr
    assert said[0].startswith(f"pygdist: error: {words}")
    assert told.returncode == (1 if start else 2)  # torchrun's own
    assert 'wrong.py", line' not in told.stderr, "a traceback of the script"


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_tasks_of_a_launcher_that_know_nothing_of_each_other_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv(name, "1")
    assert open_graph(_graph, cache_dir=tmp_path).num_ranks == 1
    monkeypatch.setenv(name, "2")
    with pytest.raises(InputError, match=rf"2 processes were started \({name}\), but not by torchrun: WORLD_SIZE"):
        open_graph(_graph, cache_dir=tmp_path)


@pytest.mark.parametrize("rank", ["x", "2"])
def test_ranks_of_a_launcher_that_cannot_be_are_refused(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="the environment variable RANK is"):
        open_graph(_graph)


def test_tensors_that_the_parts_lack_are_named(tmp_path: Path) -> None:
    whole, store = _graph(), tmp_path / "parts"
    whole.pos = torch.rand(160, 3)
    data, notes = prepare(whole, node_inputs=[])
    write_store(data, torch.zeros(160).long().numpy(), store, num_parts=1, method="mine", arguments={}, notes=notes)
    graph = open_graph(store)
    with pytest.raises(AttributeError, match=r"the parts lack pos, .* pygdist partition --node_inputs=\[pos\]"):
        _ = graph.pos


def test_variables_of_a_launcher_that_lack_some_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not dist.is_initialized()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match=r"WORLD_SIZE is set, but not RANK.*: start the script by torchrun"):
        open_graph(_graph)
