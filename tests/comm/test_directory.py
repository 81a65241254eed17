"""Rows of nodes wherever they are: fetched once each, in the order asked for, and their gradients given back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pygdist.comm import Communicator, NodeDirectory
from pygdist.testing import RankPool

NODES, WIDTH = 23, 3


def _owner(world_size: int) -> torch.Tensor:
    """The last rank has none, if there are three or more."""
    generator = torch.Generator().manual_seed(world_size)
    return torch.randint(0, max(world_size - (world_size > 2), 1), (NODES,), generator=generator)


def _asked(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 + rank)
    return torch.randint(0, NODES, (0 if rank == 1 else 40,), generator=generator)


def _fetched(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    communicator = Communicator(dist.new_group(), check_order=True)
    features = torch.arange(NODES * WIDTH, dtype=torch.float64).view(NODES, WIDTH)
    own = (_owner(world_size) == rank).nonzero().squeeze(1)
    x = features[own].requires_grad_()
    plan, position = NodeDirectory(own, NODES, communicator).plan(_asked(rank))
    rows = torch.cat([x, communicator.exchange_rows(x, plan)])[position]
    assert torch.equal(rows, features[_asked(rank)])
    rows.sum().backward()
    assert x.grad is not None
    return own, x.grad, plan.num_received


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_rows_are_found_wherever_they_are(world_size: int, pool: RankPool) -> None:
    found = pool.run(_fetched, world_size)
    asked = torch.cat([_asked(rank) for rank in range(world_size)])
    times = torch.bincount(asked, minlength=NODES).double()
    for rank, (own, grad, received) in enumerate(found):
        assert torch.equal(grad, times[own][:, None].expand(-1, WIDTH))
        elsewhere = set(_asked(rank).tolist()) - set(own.tolist())
        assert received == len(elsewhere)  # each once


def _received(rank: int, world_size: int) -> torch.Tensor:
    """Each number that this rank's nodes are sent: the node, the sender, and the place among what it sent."""
    own = (_owner(world_size) == rank).nonzero().squeeze(1)
    directory = NodeDirectory(own, NODES, Communicator(dist.new_group(), check_order=True))
    ids = _asked(rank)
    values = torch.stack([torch.full_like(ids, rank), torch.arange(ids.numel())], dim=1)
    row, *rest = directory.send(ids, values).unbind(1)
    return torch.stack([own[row], *rest], dim=1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_numbers_come_to_the_owners_of_nodes(world_size: int, pool: RankPool) -> None:
    owner, asked = _owner(world_size), [_asked(rank) for rank in range(world_size)]
    assert all(ids.unique().numel() < ids.numel() or rank == 1 for rank, ids in enumerate(asked)), "some come twice"
    sent = [(node, rank, place) for rank, ids in enumerate(asked) for place, node in enumerate(ids.tolist())]
    for rank, came in enumerate(pool.run(_received, world_size)):
        assert sorted(map(tuple, came.tolist())) == sorted(one for one in sent if owner[one[0]] == rank)
    assert (world_size > 2) == (came.numel() == 0), "the last of three or more has no nodes"
