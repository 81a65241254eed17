"""The identity of a tensor: of any layout and dtype, equal for the same values in the same memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pygdist.graph.identity import identity_of, place_of

DTYPES = [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "matrix": lambda: torch.ones(100, 70),
    "transposed": lambda: torch.ones(100, 70).t(),
    "one of a row": lambda: torch.ones(1, 2)[:, 1],
    "every other": lambda: torch.ones(9)[::2],
    "expanded": lambda: torch.ones(2, 1).expand(2, 50),
    "of no dimension": lambda: torch.ones(()),
    "without rows": lambda: torch.ones(0, 3),
    "of many dimensions": lambda: torch.ones((3,) * 7),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout: str, dtype: torch.dtype) -> None:
    tensor = LAYOUTS[layout]().to(dtype)
    assert identity_of(tensor) == identity_of(tensor.detach())
    assert identity_of(tensor.clone()) != identity_of(tensor) or not tensor.numel()


@pytest.mark.parametrize("layout", ["matrix", "transposed", "one of a row", "of many dimensions"])
def test_writes_that_torch_does_not_count_change_it(layout: str) -> None:
    tensor = LAYOUTS[layout]()
    before, place = identity_of(tensor), place_of(tensor)
    tensor.numpy()[...] += 1
    assert identity_of(tensor) != before
    assert place_of(tensor) == place
    tensor.numpy()[...] -= 1
    assert identity_of(tensor) == before
