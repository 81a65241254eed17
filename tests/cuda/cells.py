"""Torch's fused recurrent cells, which it has for GPUs alone, by plain operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _gates(one: Tensor, other: Tensor, bias: Tensor | None, other_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return (one, other) if bias is None or other_bias is None else (one + bias, other + other_bias)


def _lstm(
    of_input: Tensor, of_hidden: Tensor, cell: Tensor, bias: Tensor | None = None, other: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    into, forget, new, out = sum(_gates(of_input, of_hidden, bias, other)).chunk(4, dim=1)  # type: ignore[union-attr]
    into, forget, new, out = into.sigmoid(), forget.sigmoid(), new.tanh(), out.sigmoid()
    state = forget * cell + into * new
    return out * state.tanh(), state, torch.cat([into, forget, new, out], dim=1)


def _lstm_backward(
    grad: Tensor | None, grad_state: Tensor | None, cell: Tensor, state: Tensor, kept: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    into, forget, new, out = kept.chunk(4, dim=1)
    grad = torch.zeros_like(state) if grad is None else grad
    through = grad * out * (1 - state.tanh() ** 2) + (0 if grad_state is None else grad_state)
    of_into, of_forget = through * new * into * (1 - into), through * cell * forget * (1 - forget)
    of_new, of_out = through * into * (1 - new**2), grad * state.tanh() * out * (1 - out)
    gates = torch.cat([of_into, of_forget, of_new, of_out], dim=1)
    return gates, through * forget, gates.sum(dim=0) if has_bias else None


def _gru(
    of_input: Tensor, of_hidden: Tensor, hidden: Tensor, bias: Tensor | None = None, other: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    mine, theirs = (one.chunk(3, dim=1) for one in _gates(of_input, of_hidden, bias, other))
    reset, keep = (mine[0] + theirs[0]).sigmoid(), (mine[1] + theirs[1]).sigmoid()
    new = (mine[2] + reset * theirs[2]).tanh()
    return new + keep * (hidden - new), torch.cat([reset, keep, new, hidden, theirs[2]], dim=1)


def _gru_backward(
    grad: Tensor, kept: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    reset, keep, new, hidden, linear = kept.chunk(5, dim=1)
    of_new = grad * (1 - keep) * (1 - new**2)
    of_keep, of_reset = grad * (hidden - new) * keep * (1 - keep), of_new * linear * reset * (1 - reset)
    of_input = torch.cat([of_reset, of_keep, of_new], dim=1)
    of_hidden = torch.cat([of_reset, of_keep, of_new * reset], dim=1)
    biases = (of_input.sum(dim=0), of_hidden.sum(dim=0)) if has_bias else (None, None)
    return of_input, of_hidden, grad * keep, *biases


CELLS: dict[Any, Any] = {
    aten._thnn_fused_lstm_cell: _lstm,
    aten._thnn_fused_lstm_cell_backward_impl: _lstm_backward,
    aten._thnn_fused_gru_cell: _gru,
    aten._thnn_fused_gru_cell_backward: _gru_backward,
}
"""By operator: the function that computes the same on the CPU."""
