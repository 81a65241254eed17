"""States of optimisers: copied, by the places of parameters, and as bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.lightning.optimizer_states import average, by_number, by_parameter, copied, gathered, pack, unpack


def _stepped(kind: type[torch.optim.Optimizer], *, frozen: bool = False) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double()
    optimizer = kind([{"params": net[1].parameters()}, {"params": net[0].parameters()}])
    net[1].requires_grad_(not frozen)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.rand(4, 3, dtype=torch.float64)).sum().backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.Rprop])
def test_bytes_say_all_of_a_state(kind: type[torch.optim.Optimizer]) -> None:
    optimizer = _stepped(kind)
    own = by_number(optimizer, optimizer.state)
    assert set(own) == set(optimizer.state_dict()["state"])
    found = unpack(pack({"3": [own, {}], "7": []}))
    assert (set(found), found["7"], found["3"][1]) == ({"3", "7"}, [], {})
    for number, entry in own.items():
        assert entry.keys() == found["3"][0][number].keys()
        for name, value in entry.items():
            other = found["3"][0][number][name]
            assert type(other) is type(value)
            assert torch.equal(torch.as_tensor(other), torch.as_tensor(value))
            assert not isinstance(value, torch.Tensor) or (other.dtype, other.shape) == (value.dtype, value.shape)


def test_a_copy_is_one() -> None:
    optimizer = _stepped(torch.optim.Adam)
    kept, before = copied(optimizer), by_number(optimizer, optimizer.state)[0]["exp_avg"].clone()
    optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"].zero_()
    assert torch.equal(by_number(optimizer, kept)[0]["exp_avg"], before)
    optimizer.state = kept
    optimizer.step()  # torch takes it as its own, and makes what is missing
    optimizer.state = by_parameter(optimizer, {})
    optimizer.step()


def test_averages_are_weighted_and_skip_who_never_stepped() -> None:
    optimizer = _stepped(torch.optim.Adam)
    one, other, none = copied(optimizer), copied(optimizer), type(optimizer.state)(dict)
    for entry in other.values():
        entry["exp_avg"].zero_()
    wanted = by_number(optimizer, copied(optimizer))[1]["exp_avg"] * 0.25
    average(optimizer, {0: one, 1: other, 4: none}, {0: 0.1, 1: 0.3, 4: 0.6}, Communicator())
    for state in (one, other):
        torch.testing.assert_close(by_number(optimizer, state)[1]["exp_avg"], wanted)
    assert not none
    average(optimizer, {4: none}, {4: 1.0}, Communicator())
    assert not none


def test_states_of_other_parameters_are_refused() -> None:
    whole, half = _stepped(torch.optim.Adam), _stepped(torch.optim.Adam, frozen=True)
    state = by_parameter(whole, by_number(half, half.state))
    with pytest.raises(InputError, match="parts have states of different parameters"):
        average(whole, {0: copied(whole), 1: state}, {0: 0.5, 1: 0.5}, Communicator())


def test_one_rank_gathers_its_own() -> None:
    optimizer = _stepped(torch.optim.Adam)
    found = gathered([optimizer], {2: [copied(optimizer)], 0: [copied(optimizer)]}, Communicator())
    assert set(found) == {"0", "2"}
    assert set(found["2"][0]) == {0, 1, 2, 3}
