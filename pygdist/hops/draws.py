"""Random numbers that no rank draws apart: for as long as models are compared, they are constants.

A rank draws for its own rows, so its noise is not the noise that one process draws for these rows. With equal numbers
for all rows, the code that uses them can be compared nevertheless.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


@contextlib.contextmanager
def without_randomness() -> Iterator[None]:
    """Switch off dropout, and make other random numbers that torch draws constants, the same on any number of ranks.

    Dropout inside of ``nn.LSTM`` and the like keeps all entries and scales them. Uniform numbers lie at 60 % of their
    range, normal ones half a deviation above their mean, and what may be true is true. So ``dropout_edge`` of PyG keeps
    all edges for a rate of at most 0.6, and none for more.

    Draws with a ``torch.Generator`` of their own stay as they are, and so do those of NumPy, of ``random``, and of
    distributions that are not named in ``pygdist/hops/draws.py``.
    """
    with without_dropout(), ConstantDraws():
        yield


@contextlib.contextmanager
def without_dropout() -> Iterator[None]:
    """Switch off ``torch.dropout`` and the dropouts of ``torch.nn.functional``, which dropout modules call, too."""
    places: list[tuple[Any, str]] = [(torch, "dropout"), *((functional, kind) for kind in _DROPOUTS)]
    usual = [getattr(*place) for place in places]
    for module, name in places:
        setattr(module, name, pass_on)
    try:
        yield
    finally:
        for (module, name), function in zip(places, usual, strict=True):
            setattr(module, name, function)


def pass_on(*args: Any, **named: Any) -> Tensor:
    """Return the rows that a dropout or a norm gets: its first argument, ``input`` of functions, ``x`` of norms."""
    rows: Tensor = args[0] if args else named["input" if "input" in named else "x"]
    return rows


class ConstantDraws(TorchDispatchMode):
    """Makes random numbers that torch draws constants (:func:`without_randomness` says which); dropout stays on.

    A number is drawn, then its constant is written over it: shape, type and device are those of what was drawn.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        drawn = func(*args, **named)
        constant = _CONSTANTS.get(getattr(func, "overloadpacket", func).__name__)
        if constant is not None and named.get("generator") is None:
            arguments = {one.name: one.default_value for one in func._schema.arguments}
            arguments |= dict(zip(arguments, args, strict=False)) | named
            drawn.copy_(torch.as_tensor(constant(arguments, drawn)))
        return drawn


def _uniform(arguments: dict[str, Any], _: Tensor) -> Any:
    low, high = arguments.get("from", 0.0), arguments.get("to", 1.0)
    return low + 0.6 * (high - low)  # not the middle, which is 0 for weights


def _normal(arguments: dict[str, Any], _: Tensor) -> Any:
    return arguments.get("mean", 0.0) + arguments.get("std", 1.0) / 2


def _possible(arguments: dict[str, Any], _: Tensor) -> Any:
    chance = arguments["p"] if "p" in arguments else arguments["self"]
    return torch.as_tensor(chance) > 0


def _whole_number(arguments: dict[str, Any], drawn: Tensor) -> Any:
    low = arguments.get("low", arguments.get("from")) or 0
    high = arguments.get("high", arguments.get("to"))
    return low if high is None else (int(low) + int(high)) // 2


def _in_order(_: dict[str, Any], drawn: Tensor) -> Any:
    return torch.arange(drawn.numel(), device=drawn.device)


#: By operator of ATen: returns a number or a tensor, from the arguments by name and from what was drawn.
_CONSTANTS: dict[str, Callable[[dict[str, Any], Tensor], Any]] = {
    **dict.fromkeys(("rand", "rand_like", "uniform_"), _uniform),
    **dict.fromkeys(("randn", "randn_like", "normal", "normal_"), _normal),
    **dict.fromkeys(("bernoulli", "bernoulli_"), _possible),
    **dict.fromkeys(("randint", "randint_like", "random_"), _whole_number),
    "randperm": _in_order,
    "exponential_": lambda arguments, _: 1 / arguments["lambd"],
    "log_normal_": lambda arguments, _: math.exp(arguments["mean"]),
}
