"""Losses keep their precision under autocast, and parameters among the outputs are no rows of nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pygdist.lightning.module import Mean
from pygdist.lightning.regressor import R2Score
from pygdist.nn.loss import summed_loss


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_not_rounded_by_autocast(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    out, weight = torch.randn(60_000, 4, generator=generator), 1 + torch.rand(60_000, generator=generator) / 100
    y, every = torch.randint(0, 4, (60_000,), generator=generator), torch.ones(60_000, dtype=torch.bool)
    with torch.autocast("cpu", dtype):
        total, count = summed_loss(out, y, every, weight)
    losses = functional.cross_entropy(out.double(), y, reduction="none")
    assert count == 60_000
    assert float(total) == pytest.approx(float((losses * weight.double()).sum()), rel=1e-6)


def test_sums_of_half_precision_do_not_overflow() -> None:
    out, y, every = torch.zeros(70_000, 1), torch.ones(70_000, 1), torch.ones(70_000, dtype=torch.bool)
    total, _ = summed_loss(out, y, every, losses=lambda out, y: (y - out).squeeze(1).half())
    assert float(total) == 70_000


def test_a_parameter_with_as_many_rows_as_nodes_is_passed_whole() -> None:
    prototypes, y = nn.Parameter(torch.ones(40, 3)), torch.zeros(40, dtype=torch.int64)

    def losses(out: Any, y: Tensor) -> Tensor:
        logits, all_of_them = out
        assert all_of_them is prototypes
        return functional.cross_entropy(logits, y, reduction="none")

    _, count = summed_loss((torch.zeros(40, 2), prototypes), y, torch.arange(40) < 7, losses=losses)
    assert count == 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_means_stay_in_double_precision(dtype: torch.dtype) -> None:
    metric = nn.ModuleList([Mean()]).to(dtype)[0]
    for step in range(2_000):
        metric.update(torch.tensor(1.0 + step % 2))
    assert float(metric.compute()) == 1.5
    metric.reset()
    assert metric.mean_value.dtype == metric.weight.dtype == torch.float64
    score = nn.ModuleList([R2Score(2)]).to(dtype)[0]  # before any node: ranks gather states of one type
    assert score.moments.dtype == score.errors.dtype == score.dtype == torch.float64
    assert score.num_nodes.dtype == torch.int64
