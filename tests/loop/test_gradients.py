"""Gradients of a loop on several processes are those of one process, however passes are made."""

from __future__ import annotations

import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GCN

from pygdist import InputError, open_graph, undistribute
from pygdist.testing import RankPool
from tests.loop.graphs import masked_graph


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
    graph = open_graph(masked_graph, cache_dir=folder)
    torch.manual_seed(0)
    model = graph.distribute(_Gated().double())
    for mask in (graph.train_mask, graph.test_mask & (rank == 0)):  # two passes, the second without nodes on some ranks
        graph.mean_loss(F.cross_entropy, model(graph.x, graph.edge_index), graph.y, mask).backward()
    assert model.frozen.grad is None
    return [model.conv.convs[0].lin.weight.grad.clone(), graph.n_id]


def test_gradients_of_several_passes_add_up(pool: RankPool, tmp_path: Path) -> None:
    found = pool.run(_accumulated, 3, str(tmp_path))
    torch.manual_seed(0)
    data, model = masked_graph(), _Gated().double()
    first = torch.zeros(160, dtype=torch.bool).index_fill(0, found[0][1], True)
    for mask in (data.train_mask, data.test_mask & first):
        F.cross_entropy(model(data.x, data.edge_index)[mask], data.y[mask]).backward()
    for gradient, _ in found:
        torch.testing.assert_close(gradient, model.conv.convs[0].lin.weight.grad, rtol=0, atol=1e-12)


def _asked(rank: int, num_ranks: int, folder: str) -> list[bool]:
    graph = open_graph(masked_graph, cache_dir=folder)
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
    graph = open_graph(masked_graph, cache_dir=folder)
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
    data = masked_graph()
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
    graph = open_graph(masked_graph, cache_dir=folder)
    torch.manual_seed(0)
    model = graph.distribute(_Heads())

    def loss(out: Tensor) -> Tensor:
        return graph.mean_loss(F.cross_entropy, out, graph.y, graph.train_mask)

    found = _in_turn(model, graph.x, graph.edge_index, loss)  # type: ignore[arg-type]
    parameters = [one.detach().clone() for one in model.parameters()]
    beside = torch.ones(4, dtype=torch.float64, requires_grad=True)
    other = open_graph(masked_graph, cache_dir=folder)
    twin = other.distribute(GCN(12, 4, num_layers=1).double())
    with pytest.warns(UserWarning, match=r"a tensor of shape \(4,\) that is neither .* this process's share, 3 times"):
        other.mean_loss(F.cross_entropy, twin(other.x, other.edge_index) + beside, other.y)
    alive = weakref.ref(undistribute(twin).convs[0].lin.weight)
    del twin
    gc.collect()
    return [*found, parameters, graph.n_id, alive() is None]


def test_parameters_come_and_go_as_on_one_process(pool: RankPool, tmp_path: Path) -> None:
    data = masked_graph()
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


class _Checkpointed(nn.Module):
    """Its backward pass makes backward passes inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = GCN(12, 8, num_layers=2).double(), nn.Linear(8, 4).double()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        rows = checkpoint(self.conv, x, edge_index, use_reentrant=True)
        out: Tensor = self.head(rows.relu()) + checkpoint(self.head, rows, use_reentrant=True)
        return out


def _with_checkpoints(rank: int, num_ranks: int, folder: str) -> list[Tensor]:
    graph = open_graph(masked_graph, cache_dir=folder)
    torch.manual_seed(0)
    model, x = graph.distribute(_Checkpointed()), graph.x.clone().requires_grad_()
    for mask in (graph.train_mask, graph.val_mask):
        graph.mean_loss(F.cross_entropy, model(x, graph.edge_index), graph.y, mask).backward()
    return [one.grad for one in model.parameters() if one.grad is not None]


def test_passes_inside_of_passes(pool: RankPool, tmp_path: Path) -> None:
    data = masked_graph()
    torch.manual_seed(0)
    model, x = _Checkpointed(), data.x.clone().requires_grad_()
    for mask in (data.train_mask, data.val_mask):
        F.cross_entropy(model(x, data.edge_index)[mask], data.y[mask]).backward()
    for found in pool.run(_with_checkpoints, 3, str(tmp_path)):
        torch.testing.assert_close(found, [one.grad for one in model.parameters()], rtol=0, atol=1e-12)


def _with_prompt(rank: int, num_ranks: int, folder: str) -> list[str]:
    graph = open_graph(masked_graph, cache_dir=folder)
    model, prompt = graph.distribute(GCN(12, 4, num_layers=1).double()), torch.zeros(12).double().requires_grad_()
    of_nodes = torch.zeros_like(graph.x).requires_grad_()
    of_edges = torch.ones(graph.edge_index.size(1)).double().requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(graph.x + of_nodes, graph.edge_index, of_edges)
        assert not caught, caught[0].message
        for _ in range(2):
            model(graph.x + of_nodes + prompt, graph.edge_index)
    return [str(one.message) for one in caught]


def test_inputs_of_which_each_process_has_a_copy_are_warned_of_once(pool: RankPool, tmp_path: Path) -> None:
    for said in pool.run(_with_prompt, 2, str(tmp_path)):
        assert len(said) == 1
        assert "depends on a tensor of shape (12,) that is no parameter of a distributed model" in said[0]


def _at_other_rates(rank: int, num_ranks: int, folder: str, kind: str, change: int) -> tuple[int, str]:
    graph = open_graph(masked_graph, cache_dir=folder)
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


def _in_turns(rank: int, num_ranks: int, folder: str) -> tuple[int, str]:
    """Two models train in turn; one process has another learning rate for the first."""
    graph = open_graph(masked_graph, cache_dir=folder)
    models = [graph.distribute(GCN(12, 8, num_layers=2, out_channels=4).double()) for _ in range(2)]
    rates = 0.01 + 0.001 * (rank == num_ranks - 1), 0.01
    optimizers = [torch.optim.Adam(model.parameters(), lr=rate) for model, rate in zip(models, rates, strict=True)]
    for step in range(10):
        model, optimizer = models[step % 2], optimizers[step % 2]
        optimizer.zero_grad()
        loss = graph.mean_loss(F.cross_entropy, model(graph.x, graph.edge_index), graph.y, graph.train_mask)
        try:
            loss.backward()
        except InputError as error:
            return step, str(error)
        optimizer.step()
    return 10, ""


def test_models_that_train_in_turn_are_compared(pool: RankPool, tmp_path: Path) -> None:
    for step, said in pool.run(_in_turns, 3, str(tmp_path)):
        assert step == 1
        assert said.startswith("the parameters of rank 2 differ from those of rank 0 after the first backward pass")


def _without_mean_loss(rank: int, num_ranks: int, folder: str, divides: bool) -> tuple[int, str]:
    graph = open_graph(masked_graph, cache_dir=folder)
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
