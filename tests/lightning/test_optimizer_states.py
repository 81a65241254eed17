"""States of optimisers: copied, by the places of parameters, and as bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


def _search() -> tuple[torch.optim.LBFGS, Callable[[], None]]:
    """An optimiser that keeps lists of tensors, two steps on; and what makes one more."""
    torch.manual_seed(0)
    net, x = nn.Linear(3, 1).double(), torch.rand(6, 3, dtype=torch.float64)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3, history_size=4)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value: Tensor = net(x).pow(4).mean()
        value.backward()
        return value

    def step() -> None:
        optimizer.step(loss)  # type: ignore[arg-type]

    step()
    step()
    return optimizer, step


def _assert_same(one: Any, other: Any) -> None:
    """Down to the types of what is nested, and of numbers."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for name, value in one.items():
            _assert_same(value, other[name])
    elif isinstance(one, (list, tuple)):
        for value, like in zip(one, other, strict=True):
            _assert_same(value, like)
    else:
        assert one == other


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


def test_bytes_say_all_of_lists_and_dictionaries() -> None:
    optimizer, _ = _search()
    own = by_number(optimizer, optimizer.state)
    assert len(own[0]["old_dirs"]) > 1
    assert None in own[0]["al"]
    whole = {"pairs": (1, [torch.ones(2), {"b": None, 3: torch.tensor(True)}]), "none": [], "large": float("inf")}
    _assert_same(unpack(pack({"0": [own], "1": [{2: whole}]})), {"0": [own], "1": [{2: whole}]})


def test_a_copy_of_lists_is_one() -> None:
    optimizer, step = _search()
    kept, wanted = copied(optimizer), unpack(pack({"0": [by_number(optimizer, optimizer.state)]}))["0"][0]
    step()
    _assert_same(by_number(optimizer, kept), wanted)


def test_an_optimiser_with_lists_goes_on_from_bytes() -> None:
    optimizer, step = _search()
    other, step_other = _search()
    step()
    other.state = by_parameter(other, unpack(pack({"0": [by_number(other, other.state)]}))["0"][0])
    step_other()
    for one, like in zip(optimizer.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        assert torch.equal(one, like)


def test_a_copy_is_one() -> None:
    optimizer = _stepped(torch.optim.Adam)
    kept, before = copied(optimizer), by_number(optimizer, optimizer.state)[0]["exp_avg"].clone()
    optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"].zero_()
    assert torch.equal(by_number(optimizer, kept)[0]["exp_avg"], before)
    optimizer.state = kept
    optimizer.step()  # torch takes it as its own, and makes what is missing
    optimizer.state = by_parameter(optimizer, {})
    optimizer.step()


PLACED: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "fused": lambda parameters: torch.optim.Adam(parameters, fused=True),
    "capturable": lambda parameters: torch.optim.Adam(parameters, capturable=True),
    "nadam": torch.optim.NAdam,
    "asgd": torch.optim.ASGD,
    "lbfgs": torch.optim.LBFGS,
}


@pytest.mark.parametrize("name", PLACED)
def test_a_state_is_put_where_torch_puts_it(name: str) -> None:
    """From the CPU and another number type to parameters elsewhere; the meta device stands for a GPU."""
    parameter = nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = PLACED[name]([parameter])
    if name == "lbfgs":
        source, _ = _search()
    else:
        source = PLACED[name.replace("capturable", "adam")]([nn.Parameter(torch.zeros(3, dtype=torch.float64))])
        source.param_groups[0]["params"][0].grad = torch.ones(3, dtype=torch.float64)
        source.step()
    saved = {0: by_number(source, source.state)[0]}

    def places(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: places(one) for key, one in value.items()}
        if isinstance(value, list):
            return [places(one) for one in value]
        return (value.device.type, value.dtype) if isinstance(value, Tensor) else value

    found = places(by_parameter(optimizer, saved)[parameter])
    optimizer.load_state_dict({"state": saved, "param_groups": optimizer.state_dict()["param_groups"]})
    assert found == places(optimizer.state[parameter])
    if "step" in found:
        assert found["step"][0] == ("meta" if name in ("fused", "capturable") else "cpu")


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


def test_averages_of_lists_are_refused() -> None:
    optimizer, _ = _search()
    with pytest.raises(InputError, match=r"optimizer_state=average: LBFGS keeps lists.*use local or reset"):
        average(optimizer, {0: copied(optimizer)}, {0: 1.0}, Communicator())


def test_one_rank_gathers_its_own() -> None:
    optimizer = _stepped(torch.optim.Adam)
    found, num_bytes = gathered([optimizer], {2: [copied(optimizer)], 0: [copied(optimizer)]}, Communicator())
    assert num_bytes == 0
    assert set(found) == {"0", "2"}
    assert set(found["2"][0]) == {0, 1, 2, 3}
