"""Things that autograd does with a model: a loop on several processes gives one process's numbers, or says why not."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GCN

from pygdist import InputError, open_graph, undistribute
from pygdist.testing import RankPool
from tests.loop.graphs import masked_graph


@dataclass(frozen=True)
class _Loop:
    x: Tensor
    edge_index: Tensor
    distribute: Callable[[Any], Any]
    loss: Callable[[Tensor], Tensor]
    num_ranks: int = 1
    rank: int = 0

    def model(self, num_features: int = 12, num_classes: int = 4) -> Any:
        torch.manual_seed(0)
        return self.distribute(GCN(num_features, 8, num_layers=2, out_channels=num_classes).double())


def _alone() -> _Loop:
    data = masked_graph()
    mask, y = data.train_mask, data.y
    return _Loop(data.x, data.edge_index, lambda model: model, lambda out: F.cross_entropy(out[mask], y[mask]))


def _shared(folder: str) -> _Loop:
    graph = open_graph(masked_graph, cache_dir=folder)

    def loss(out: Tensor) -> Tensor:
        return graph.mean_loss(F.cross_entropy, out, graph.y, graph.train_mask)

    return _Loop(graph.x, graph.edge_index, graph.distribute, loss, graph.num_ranks, graph.rank)


def _gradients(*models: nn.Module) -> list[Tensor]:
    return [one.grad.to_dense().clone() for model in models for one in model.parameters() if one.grad is not None]


def _raise(_: Tensor) -> None:
    raise RuntimeError("out of memory")


def _passed_on(loop: _Loop) -> list[Tensor]:
    encoder, head = loop.model(12, 8), loop.model(8)
    z = encoder(loop.x, loop.edge_index)
    cut = z.detach().requires_grad_()
    loop.loss(head(cut, loop.edge_index)).backward()
    z.backward(cut.grad * loop.num_ranks)  # as the warning says
    return _gradients(encoder, head)


def _checkpoint_at_once(loop: _Loop) -> list[Tensor]:
    model = loop.model()
    loop.loss(checkpoint(model, loop.x, loop.edge_index, use_reentrant=False)).backward()
    return _gradients(model)


def _computed_parameters(loop: _Loop) -> list[Tensor]:
    model = loop.model()
    doubled = {name: 2 * one for name, one in model.named_parameters()}
    loop.loss(functional_call(model, doubled, (loop.x, loop.edge_index))).backward()
    return _gradients(model)


def _new_parameters(loop: _Loop) -> list[Tensor]:
    """A step on copies of the parameters before each step, as in meta-learning; the copies are let go."""
    model, found, copies = loop.model(), list[Tensor](), list[weakref.ref[Tensor]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        fast = {name: one.detach().clone().requires_grad_() for name, one in model.named_parameters()}
        loop.loss(functional_call(model, fast, (loop.x, loop.edge_index))).backward()
        found += [one.grad for one in fast.values() if one.grad is not None]
        copies += map(weakref.ref, fast.values())
        optimizer.zero_grad()
        loop.loss(model(loop.x, loop.edge_index)).backward()
        optimizer.step()
    del fast
    gc.collect()
    assert sum(one() is not None for one in copies) <= len(copies) // 4  # those of the last step alone
    return [*found, *_gradients(model)]


class _WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv = nn.Embedding(2, 12, sparse=True).double(), GCN(12, 4, num_layers=1).double()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x + self.table((x[:, 0] > 0).long()), edge_index)
        return out


def _sparse_gradient(loop: _Loop) -> list[Tensor]:
    torch.manual_seed(0)
    model = loop.distribute(_WithTable())
    loop.loss(model(loop.x, loop.edge_index)).backward()
    return _gradients(model)


def _hook_that_fails(loop: _Loop, drop: Callable[[Any], None], at: str) -> list[Tensor]:
    """Two passes fail between two that do not, at a parameter or at the rows below it; the loop may drop gradients."""
    model = loop.model()
    loop.loss(model(loop.x, loop.edge_index)).backward()
    out = model(loop.x, loop.edge_index)
    fails = model.get_parameter(at).register_hook(_raise)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            loop.loss(out).backward(retain_graph=True)
    fails.remove()
    drop(model)
    loop.loss(out).backward()  # again on the same graph
    loop.loss(model(loop.x, loop.edge_index)).backward()
    return _gradients(model)


class _Tied(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.conv, self.head = GCN(12, 8, num_layers=1).double(), head

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.head(self.conv(x, edge_index).relu())
        return out


def _shared_head(loop: _Loop) -> list[Tensor]:
    """Two models share a head; a pass through both fails between two that do not."""
    torch.manual_seed(0)
    head = nn.Linear(8, 4).double()
    models = [loop.distribute(_Tied(head)) for _ in range(2)]
    fails = [False]

    def forward() -> Tensor:
        outs = [model(loop.x, loop.edge_index) for model in models]
        if fails[0]:
            outs[0].register_hook(_raise)
        total: Tensor = loop.loss(outs[0]) + loop.loss(outs[1])
        return total

    for fails[0] in (False, True, False):
        with pytest.raises(RuntimeError, match="out of memory") if fails[0] else contextlib.nullcontext():
            forward().backward()
    return _gradients(*models)


def _losses_before_passes(loop: _Loop) -> list[Tensor]:
    """A model gets another head for each loss; then each has its pass."""
    torch.manual_seed(0)
    heads = [nn.Linear(8, 4).double() for _ in range(3)]
    model, losses = loop.distribute(_Tied(heads[0])), []
    for model.head in heads:
        losses.append(loop.loss(model(loop.x, loop.edge_index)))
    for loss in losses:
        loss.backward()
    return _gradients(model.conv, *heads)


class _Rare(nn.Module):
    """Its bias is for rows that only one process has."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8).double())
        self.rare = float(masked_graph().x[:, 0].max())

    def forward(self, rows: Tensor, x: Tensor) -> Tensor:
        chosen = x[:, :1] >= self.rare
        return rows + chosen * self.bias if chosen.any() else rows * 1


class _WithRare(_Tied):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 4).double())
        self.block = _Rare()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        rows = checkpoint(self.block, self.conv(x, edge_index), x, use_reentrant=True)
        out: Tensor = self.head(rows.relu())
        return out


def _pass_inside_on_one_process(loop: _Loop) -> list[Tensor]:
    torch.manual_seed(0)
    model = loop.distribute(_WithRare())
    noise = torch.zeros_like(loop.x).requires_grad_()
    for _ in range(3):
        loop.loss(model(loop.x + noise, loop.edge_index)).backward()
    return _gradients(model)


def _reached_by_one_process(loop: _Loop) -> list[Tensor]:
    """One process alone reaches a second model."""
    model, second = loop.model(), loop.distribute(nn.Linear(12, 4).double())
    for _ in range(2):
        out, more = model(loop.x, loop.edge_index), second(loop.x)
        loop.loss(out + 0 * more if loop.rank == 0 else out).backward()
    return _gradients(model)


def _half_precision(loop: _Loop) -> list[Tensor]:
    """Sums of many passes are rounded as often as on one process; the average over processes is not rounded."""
    model = loop.distribute(nn.Linear(1, 1, bias=False).bfloat16())
    for _ in range(256):
        model(torch.ones(1, 1).bfloat16()).sum().backward()
    return _gradients(model)


_DROPS: dict[str, Callable[[Any], None]] = {
    "keeps all": lambda model: None,
    "to none": lambda model: model.zero_grad(),
    "to zero": lambda model: model.zero_grad(set_to_none=False),
    "some to none": lambda model: model.convs[1].zero_grad(),
}
EQUAL = {
    "passed on": _passed_on,
    "checkpoint at once": _checkpoint_at_once,
    "computed parameters": _computed_parameters,
    "new parameters": _new_parameters,
    "sparse gradient": _sparse_gradient,
    **{
        f"{at} fails, {how}": partial(_hook_that_fails, drop=drop, at=at)
        for at in ("convs.1.bias", "convs.1.lin.weight", "convs.0.lin.weight")
        for how, drop in _DROPS.items()
    },
    "shared head": _shared_head,
    "losses before passes": _losses_before_passes,
    "pass inside on one process": _pass_inside_on_one_process,
    "reached by one process": _reached_by_one_process,
    "half precision": _half_precision,
}


def _run(rank: int, num_ranks: int, folder: str, name: str) -> list[Tensor]:
    return EQUAL[name](_shared(folder))


@pytest.mark.parametrize("name", EQUAL)
def test_gradients_are_those_of_one_process(name: str, pool: RankPool, tmp_path: Path) -> None:
    expected = EQUAL[name](_alone())
    for found in pool.run(_run, 3, str(tmp_path), name):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def _left_alone(rank: int, num_ranks: int, folder: str) -> list[int]:
    """Count hooks and parameters of models that are undistributed or dropped, after a pass of another one."""
    loop = _shared(folder)
    first, second = loop.model(), loop.model()
    undistribute(first)
    loop.loss(second(loop.x, loop.edge_index)).backward()
    weight = first.convs[0].lin.weight
    hooks = len(weight._backward_hooks or ()) + len(weight._post_accumulate_grad_hooks or ())
    left = [weakref.ref(one) for model in (first, second) for one in model.parameters()]
    del first, second, weight
    gc.collect()
    return [hooks, sum(one() is not None for one in left)]


def test_models_are_left_alone_and_let_go(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_left_alone, 3, str(tmp_path)) == [[0, 0]] * 3


def _cut_by_detach(loop: _Loop) -> None:
    encoder, head = loop.model(12, 8), loop.model(8)
    z = encoder(loop.x, loop.edge_index)
    cut = z.detach().requires_grad_()
    loop.loss(head(cut, loop.edge_index)).backward()
    z.backward(cut.grad)


def _reentrant_head(loop: _Loop) -> None:
    encoder, head = loop.model(12, 8), loop.model(8)
    z = encoder(loop.x, loop.edge_index)
    loop.loss(checkpoint(head, z, loop.edge_index, use_reentrant=True)).backward()


def _reentrant_model(loop: _Loop) -> None:
    x = loop.x.clone().requires_grad_()
    loop.loss(checkpoint(loop.model(), x, loop.edge_index, use_reentrant=True)).backward()


def _gradients_with_graph(loop: _Loop) -> None:
    loop.loss(loop.model()(loop.x, loop.edge_index)).backward(create_graph=True)


def _asked_for(loop: _Loop) -> None:
    model = loop.model()
    torch.autograd.grad(loop.loss(model(loop.x, loop.edge_index)), list(model.parameters()))


def _hooked(loop: _Loop) -> None:
    model = loop.model()
    model.convs[0].lin.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    model(loop.x, loop.edge_index)


def _transformed(loop: _Loop, by: str) -> None:
    model = loop.model()
    parameters = dict(model.named_parameters())

    def forward(given: dict[str, Tensor]) -> Tensor:
        return loop.loss(functional_call(model, given, (loop.x, loop.edge_index)))

    if by == "grad":
        torch.func.grad(forward)(parameters)
    elif by == "jvp":
        torch.func.jvp(forward, (parameters,), (parameters,))
    elif by == "vmap":
        torch.func.vmap(lambda x: model(x, loop.edge_index))(torch.stack([loop.x, loop.x]))
    elif by == "dual":
        with forward_ad.dual_level():
            model(forward_ad.make_dual(loop.x, loop.x), loop.edge_index)
    else:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            model(mode.from_tensor(loop.x), loop.edge_index)


SAID = {
    "cut by detach": (_cut_by_detach, "as in z.backward(rows.grad), multiply these by graph.num_ranks"),
    "reentrant head": (_reentrant_head, "use checkpoint(..., use_reentrant=False), or checkpoint inside of the model"),
    "reentrant model": (
        _reentrant_model,
        "use checkpoint(..., use_reentrant=False), or checkpoint inside of the model",
    ),
    "gradients with graph": (_gradients_with_graph, "pygdist computes first derivatives alone"),
    "asked for": (_asked_for, "torch.autograd.grad returns this process's share of the gradients of parameters"),
    "hooked": (_hooked, "a hook on a parameter of a distributed model sees this process's share"),
}


def _refused(rank: int, num_ranks: int, folder: str, by: str) -> str:
    with pytest.raises(InputError) as error:
        _transformed(_shared(folder), by)
    return str(error.value)


def _told(rank: int, num_ranks: int, folder: str, name: str) -> list[str]:
    loop = _shared(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "Using backward")  # torch's, of a graph of gradients
        try:
            SAID[name][0](loop)
        except InputError as error:
            return [str(error)]
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("by", ["grad", "jvp", "vmap", "dual", "fake"])
def test_transformations_of_torch_are_refused(by: str, num_ranks: int, pool: RankPool, tmp_path: Path) -> None:
    for said in pool.run(_refused, num_ranks, str(tmp_path), by):
        assert "torch.func, forward-mode derivatives, tracing and fake tensors are refused" in said


@pytest.mark.parametrize("name", SAID)
def test_gradients_that_would_be_others_are_told(name: str, pool: RankPool, tmp_path: Path) -> None:
    for said in pool.run(_told, 3, str(tmp_path), name):
        assert len(said) == 1
        assert SAID[name][1] in said[0]


def _ordinary(loop: _Loop) -> None:
    """Train with noise on inputs, accumulated gradients, clipping, an average of weights, and evaluation between."""
    model = loop.model()
    average = AveragedModel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    noise = torch.zeros_like(loop.x).requires_grad_()
    for step in range(6):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for _ in range(2):
            loop.loss(model(loop.x + noise, loop.edge_index)).backward()
            noise.data.add_(noise.grad.sign(), alpha=0.01)
            torch.autograd.grad(loop.loss(model(loop.x + noise, loop.edge_index)), noise)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(model)
        with torch.no_grad():
            loop.loss(average(loop.x, loop.edge_index))


def _warned(rank: int, num_ranks: int, folder: str) -> None:
    loop = _shared(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _ordinary(loop)


def test_ordinary_loops_are_not_warned(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_warned, 3, str(tmp_path))
