"""The training loop of ``plain.py`` and ``plain_dgl.py``, which use nothing of pygdist."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

LEARNING_RATE, WEIGHT_DECAY = 0.01, 5e-4


def train(model: nn.Module, data: Any, edges: Any, epochs: int) -> dict[str, list[float]]:
    """Train ``model(data.x, edges)`` in an ordinary loop; return the loss and the seconds of each epoch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    losses, seconds = [], []
    for _ in range(epochs):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data.x, edges)[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - start)
    return {"train_loss": losses, "epoch_s": seconds}
