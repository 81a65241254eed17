"""The trial of ``tensor`` judges layers by what they may become, not by the numbers that they hold when it runs."""

from __future__ import annotations

import copy
import gc
import logging
import random
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import (
    APPNP,
    FAConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    LGConv,
    MessagePassing,
    ResGatedGraphConv,
    SimpleConv,
)
from torch_geometric.utils import add_self_loops
from typing_extensions import override

from pygdist.backends import TensorBackend
from pygdist.backends.slicing import columns as trials
from pygdist.backends.slicing.columns import acts_on_columns, columns_of_hops
from pygdist.backends.slicing.trial_inputs import sizes_of
from pygdist.errors import InputError
from pygdist.routing import distribute, undistribute

MIXES = "mixes columns .*, so ranks cannot share them out; use backend cache, comm.* hybrid"
DRAWS = r"draws random numbers in its hops while it trains \(propagate\(x\)\), and each rank would draw others"
NO_TRIAL = mock.patch.object(trials, "plain_copy", side_effect=AssertionError("another trial"))


class Hop(MessagePassing):
    """One hop; subclasses say what its messages are."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        for name, value in options.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x)
        return out


def _mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


# -- parameters --------------------------------------------------------------------------------------------------------


class Gated(Hop):
    """Mixes columns by as much as a parameter says, none to begin with."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(1))

    def message(self, x_j: Tensor) -> Tensor:
        return x_j + self.alpha * _mean(x_j)


class Scaled(Hop):
    """Parameters of which a logarithm and a root are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.row = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, 1))

    def message(self, x_j: Tensor) -> Tensor:
        return x_j * self.scale.log() * self.row.sqrt()


def test_parameters_are_not_what_they_happen_to_be() -> None:
    with pytest.raises(InputError, match=MIXES):
        columns_of_hops(Gated())
    columns_of_hops(Scaled())


def test_a_trial_leaves_the_layer_and_the_random_numbers_as_they_are() -> None:
    layer, expected = Gated(), torch.random.get_rng_state()
    with pytest.raises(InputError, match=MIXES):
        columns_of_hops(layer)
    assert layer.alpha.item() == 0
    assert layer.training
    assert torch.equal(torch.random.get_rng_state(), expected)


def test_nodes_and_edges_differ_in_number() -> None:
    assert sizes_of(Hop(**{f"size_{number}": number for number in range(6, 18)})) == (18, 19)


# -- which layers are alike --------------------------------------------------------------------------------------------


class ByModes(Hop):
    modes: tuple[str, ...]

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.softmax(-1) if "mixed" in self.modes else x_j


class ByCallable(Hop):
    act: Callable[[Tensor], Tensor]

    def message(self, x_j: Tensor) -> Tensor:
        return self.act(x_j)


class ByBuffer(Hop):
    gate: Tensor

    def __init__(self, gate: float) -> None:
        super().__init__()
        self.register_buffer("gate", torch.tensor(gate))

    def message(self, x_j: Tensor) -> Tensor:
        return x_j + self.gate * _mean(x_j)


class Activation(nn.Module):
    """A child that does not say what it was made with."""

    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.mixed = mixed

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1) if self.mixed else x.sigmoid()


class ByPrivate(Hop):
    _mixed: bool

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.softmax(-1) if self._mixed else x_j


def _hooked(mixed: bool) -> MessagePassing:
    layer = SimpleConv()
    layer.register_message_forward_hook(lambda _, __, out: out.softmax(-1) if mixed else None)
    return layer


@pytest.mark.parametrize("first", [False, True], ids=["qualifying-first", "mixing-first"])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda mixed: ByModes(modes=("mixed",) if mixed else ("plain",)), id="tuple"),
        pytest.param(lambda mixed: ByModes(modes=["mixed"] if mixed else ["plain"]), id="list"),
        pytest.param(lambda mixed: ByCallable(act=lambda x: x.softmax(-1) if mixed else x), id="callable"),
        pytest.param(lambda mixed: ByCallable(act=Activation(mixed)), id="child"),
        pytest.param(lambda mixed: ByBuffer(1.0 if mixed else 0.0), id="buffer"),
        pytest.param(lambda mixed: ByPrivate(_mixed=mixed), id="private"),
        pytest.param(_hooked, id="hook"),
        pytest.param(
            lambda mixed: ResGatedGraphConv(5, 4, act=(lambda z: z.softmax(-1)) if mixed else torch.sigmoid), id="PyG"
        ),
    ],
)
def test_layers_made_otherwise_are_tried_by_themselves(make: Callable[[bool], MessagePassing], first: bool) -> None:
    for mixed in (first, not first):
        if mixed:
            with pytest.raises(InputError, match=MIXES):
                columns_of_hops(make(mixed))
        else:
            columns_of_hops(make(mixed))


@pytest.mark.parametrize(
    "make", [lambda: GCNConv(5, 4), lambda: GATConv(5, 4, heads=2), lambda: ByModes(modes=("plain", ("a", 1)))]
)
def test_layers_made_alike_are_tried_once(make: Callable[[], MessagePassing]) -> None:
    expected = columns_of_hops(make())
    with NO_TRIAL:
        assert columns_of_hops(make()) == expected


class Counting(Hop):
    """Attributes change as it trains, one of them not plain."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.seen = 0, object()

    def message(self, x_j: Tensor) -> Tensor:
        return x_j * (1 + self.step)


def test_a_distributed_layer_is_not_tried_again() -> None:
    layer = distribute(Counting(), backend=TensorBackend(), check=False)
    acts_on_columns(layer)
    with NO_TRIAL:
        for _ in range(3):
            layer.step, layer.seen = layer.step + 1, object()
            columns_of_hops(layer)
            acts_on_columns(layer)
    assert Counting not in trials._HOPS.of_class


def test_a_copy_of_a_distributed_layer_is_tried_like_the_layer() -> None:
    for layer in (ByCallable(act=torch.relu), GCNConv(5, 4)):
        expected = columns_of_hops(layer)
        again = copy.deepcopy(distribute(layer, backend=TensorBackend(), check=False))
        assert columns_of_hops(again) == expected


def test_a_layer_is_tried_again_when_it_is_distributed_again() -> None:
    layer = distribute(ByModes(modes=("plain",)), backend=TensorBackend(), check=False)
    undistribute(layer)
    layer.modes = ("mixed",)
    with pytest.raises(InputError, match=MIXES):
        distribute(layer, backend=TensorBackend(), check=False)


def test_nothing_is_kept_of_classes_that_are_gone() -> None:
    def try_one() -> None:
        class Local(Hop):
            pass

        columns_of_hops(Local())

    gc.collect()
    before = len(trials._HOPS.of_class)
    try_one()
    gc.collect()
    assert len(trials._HOPS.of_class) == before


# -- each hop ----------------------------------------------------------------------------------------------------------


class TwoHops(Hop):
    """Two hops with the same arguments; the second is what ``second`` says."""

    second: str

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.mode = ""
        x = self.propagate(edge_index, x=x)
        self.mode = self.second
        out: Tensor = self.propagate(edge_index, x=x)
        return out

    def message(self, x_j: Tensor) -> Tensor:
        if self.mode == "mixed":
            return x_j.softmax(-1)
        return torch.cat([x_j, 2 * x_j], dim=-1) if self.mode == "twice" else x_j


def test_each_hop_is_tried() -> None:
    columns_of_hops(TwoHops(second=""))
    with pytest.raises(InputError, match=MIXES):
        columns_of_hops(TwoHops(second="mixed"))
    said = r"makes hops with the same arguments that are not alike \(propagate\(x\)\); use backend cache, comm.* hybrid"
    with pytest.raises(InputError, match=said):
        columns_of_hops(TwoHops(second="twice"))


class Pairs(Hop):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if x_j.size(-1) % 2 == 0 else x_j


def test_columns_that_mix_with_their_neighbour_only_are_found() -> None:
    layer = Pairs(in_channels=8)
    with pytest.raises(InputError, match=MIXES):
        columns_of_hops(layer)


class InTraining(Hop):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j.softmax(-1) if self.training else x_j


def test_hops_are_tried_as_in_training_too() -> None:
    with pytest.raises(InputError, match=MIXES):
        columns_of_hops(InTraining())


class Centred(Hop):
    only_in_training: bool

    def message(self, x_j: Tensor) -> Tensor:
        return x_j - x_j.mean(0) if self.training or not self.only_in_training else x_j


class Whole(Hop):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
        self.most = max(dim_size, getattr(self, "most", 0))
        if dim_size < self.most:
            raise ValueError("too few")
        return super().aggregate(inputs, index, dim_size=dim_size)


class Added(Hop):
    """Its own rows are added after the sum, of an argument that is read at sources too."""

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.tanh()

    def update(self, inputs: Tensor, x: Tensor) -> Tensor:
        return inputs + x


def test_hops_that_look_beyond_a_destination_are_known() -> None:
    def found(layer: MessagePassing) -> str:
        (why,) = {one.needs_all_edges for one in columns_of_hops(layer).values()}
        return why

    for layer in (Centred(only_in_training=False), Centred(only_in_training=True)):
        assert found(layer).startswith("gave some destinations other rows")
    assert found(Whole()) == "could not be tried on some of the edges (ValueError: too few)"
    assert found(Scaled()) == found(Added()) == ""


class Relations(Hop):
    """A number for each relation, which is an argument of the hop."""

    relations: int
    loops: bool

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.strength = nn.Parameter(torch.ones(self.relations, 1))

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        if self.loops:
            edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
            edge_type = torch.cat([edge_type, edge_type.new_zeros(x.size(0))])
        out: Tensor = self.propagate(edge_index, x=x, edge_type=edge_type, strength=self.strength)
        return out

    def message(self, x_j: Tensor, edge_type: Tensor, strength: Tensor) -> Tensor:
        return strength[edge_type] * x_j


@pytest.mark.parametrize(("relations", "loops"), [(2, False), (6, False), (17, False), (23, True)])
def test_what_has_as_many_rows_as_a_trial_has_nodes_or_edges_is_not_taken_for_them(relations: int, loops: bool) -> None:
    (columns,) = columns_of_hops(Relations(relations=relations, loops=loops)).values()
    assert columns.kinds == {"x": "columns", "edge_type": "edges", "strength": "same"}
    assert not columns.needs_all_edges


# -- what cannot be tried ----------------------------------------------------------------------------------------------


class Moody(Hop):
    def message(self, x_j: Tensor) -> Tensor:
        if self.broken:
            raise RuntimeError("not now")
        return x_j


def test_what_could_not_be_tried_is_tried_again() -> None:
    Moody.broken = True
    layer = Moody()
    with pytest.raises(InputError, match=r"could not be tried on a few nodes \(\w+: not now \("):
        columns_of_hops(layer)
    Moody.broken = False
    columns_of_hops(layer)


def _raises(layer: MessagePassing, x_j: Tensor, edge_weight: Tensor | None) -> Tensor:
    raise RuntimeError("a bug")


def test_errors_of_trials_of_pygs_layers_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    Moody.broken = True
    trials._HOPS.of_class.clear()  # another test may have tried such a layer
    layers = Moody(), SimpleConv("mean", combine_root="sum")
    with caplog.at_level(logging.DEBUG, trials.log.name), mock.patch.object(SimpleConv, "message", _raises):
        for layer in layers:
            with pytest.raises(InputError, match="could not be tried on a few nodes"):
                columns_of_hops(layer)
    said = {record.getMessage() for record in caplog.records}
    assert all(text.startswith("trial of SimpleConv failed with x, edge_index") for text in said), said
    assert "RuntimeError: a bug" in caplog.text


class Renamed(Hop):
    def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:
        raise RuntimeError("with all that it takes")

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x, edge_weight=edge_weight)
        return out


def test_the_reason_is_that_of_the_trial_with_all_arguments() -> None:
    with pytest.raises(InputError, match=r"could not be tried on a few nodes \(\w+: with all that it takes \("):
        columns_of_hops(Renamed())


def test_a_layer_that_cannot_be_copied_is_refused() -> None:
    with pytest.raises(InputError, match="could not be tried on a few nodes"):
        columns_of_hops(ByCallable(act=torch.relu, lock=(one for one in ())))


@pytest.mark.parametrize("make", [lambda: GCNConv(-1, 4), lambda: GATConv(-1, 4)])
def test_a_layer_whose_parameters_have_no_shape_yet_is_told_so(make: Callable[[], MessagePassing]) -> None:
    with pytest.raises(InputError, match=r"G.*Conv.*parameters without a shape yet; call the model once"):
        distribute(make(), backend=TensorBackend())


def test_a_layer_that_cached_another_graph_can_be_tried() -> None:
    layer = GCNConv(5, 4, cached=True, improved=True)
    layer(torch.rand(40, 5), torch.randint(0, 40, (2, 90)))
    assert layer._cached_edge_index is not None
    columns_of_hops(layer)
    assert layer._cached_edge_index is not None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("make", [lambda: GATConv(5, 4, bias=False), lambda: ByBuffer(0.0)], ids=["GATConv", "buffer"])
def test_a_layer_on_a_gpu_is_tried_on_the_host(make: Callable[[], MessagePassing]) -> None:
    state = torch.cuda.get_rng_state()
    columns_of_hops(make().cuda())
    assert torch.equal(torch.cuda.get_rng_state(), state)


# -- random numbers ----------------------------------------------------------------------------------------------------


class EdgeDropout(Hop):
    """Drops whole messages."""

    dropout: float

    def message(self, x_j: Tensor) -> Tensor:
        mask = functional.dropout(x_j.new_ones(x_j.size(0), 1), self.dropout, self.training)
        return mask * x_j


class RowDropout(Hop):
    """Drops rows before the hop, where each rank has its own."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = x * functional.dropout(x.new_ones(x.size(0), 1), 0.5, self.training)
        out: Tensor = self.propagate(edge_index, x=x)
        return out


def test_a_layer_may_not_draw_random_numbers_in_its_hops() -> None:
    columns_of_hops(EdgeDropout(dropout=0.0))
    with pytest.raises(InputError, match=DRAWS):
        columns_of_hops(EdgeDropout(dropout=0.5))


@pytest.mark.parametrize(
    "layer",
    [
        RowDropout(),
        APPNP(K=2, alpha=0.1, dropout=0.5),
        GATConv(5, 4, heads=2, dropout=0.5),
        GATv2Conv(5, 4, dropout=0.5),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_random_numbers_outside_hops_are_fine(layer: MessagePassing) -> None:
    columns_of_hops(layer)


class Restless(Hop):
    """Gives other messages each time, for a reason of its own."""

    def __init__(self, factor: Callable[[Any], Any]) -> None:
        super().__init__(factor=factor, calls=0)
        self.register_buffer("count", torch.zeros(1))

    @override
    def message(self, x_j: Tensor) -> Tensor:
        return x_j * self.factor(self)


def _count(layer: Any) -> int:
    layer.calls += 1
    return int(layer.calls)


@pytest.mark.parametrize(
    ("factor", "reason"),
    [
        pytest.param(_count, "as each run changes Restless", id="attribute"),
        pytest.param(lambda layer: layer.count.add_(1), "as each run changes Restless", id="buffer"),
        pytest.param(lambda _: random.random(), "as each run changes Python's random generator", id="python"),
        pytest.param(
            lambda _: np.random.rand(),  # noqa: NPY002
            "as each run changes NumPy's random generator",
            id="numpy",
        ),
        pytest.param(
            lambda _: time.perf_counter_ns() % 1_000_003,
            "for a reason outside of the layer, such as a clock",
            id="clock",
        ),
    ],
)
def test_why_a_hop_gives_other_numbers_is_found_out(factor: Callable[[Any], Any], reason: str) -> None:
    with pytest.raises(InputError) as caught:
        columns_of_hops(Restless(factor))
    assert f"gives other numbers when a hop runs again (propagate(x)), {reason}; " in str(caught.value)


def test_attention_drawn_in_messages_is_refused() -> None:
    columns_of_hops(FAConv(6))
    with pytest.raises(InputError, match="draws random numbers in its hops while it trains"):
        columns_of_hops(FAConv(6, dropout=0.5))


def test_a_layer_on_slices_may_not_draw_random_numbers_while_it_trains() -> None:
    for layer in (LGConv(), APPNP(K=2, alpha=0.1)):
        assert acts_on_columns(layer.train())
        assert acts_on_columns(layer.eval())
    for layer in (RowDropout(), APPNP(K=2, alpha=0.1, dropout=0.5)):
        assert not acts_on_columns(layer.train())
        assert acts_on_columns(layer.eval())
    assert not acts_on_columns(InTraining().train())
    assert acts_on_columns(InTraining().eval())
    assert not acts_on_columns(ByModes(modes=("mixed",)).eval())
