"""Error texts name the backends that can do something by what these say of themselves."""

from __future__ import annotations

import pytest

from pygdist import InputError
from pygdist.backends import Abilities, CommBackend, ReplicaBackend, backends, resolve_backend
from pygdist.backends.base import names_of
from pygdist.testing import assert_exact


def test_names_are_those_of_the_backends_that_can() -> None:
    assert names_of(lambda abilities: abilities.mini_batches) == "pull, pushpull or replica"
    assert names_of(lambda abilities: abilities.placement == "columns") == "pushpull"
    every = names_of(lambda abilities: True).replace(" or ", ", ").split(", ")
    assert every == [name for name in backends if name != "single"]
    assert " or " in names_of(lambda abilities: abilities.exact)


def test_an_instance_may_have_abilities_of_its_own() -> None:
    assert CommBackend.abilities.exact
    assert not CommBackend(wire_dtype="bfloat16").abilities.exact
    assert CommBackend().abilities == Abilities()
    assert [ReplicaBackend(hops=hops).abilities.num_hops for hops in (0, 1, 3)] == [1, 1, 3]


class _WithoutBase(CommBackend):
    def __init__(self) -> None:
        self.mine = 1


def test_a_backend_that_does_not_make_its_base_is_refused() -> None:
    with pytest.raises(InputError, match=r"_WithoutBase: __init__ does not call super\(\).__init__\(\)"):
        resolve_backend(_WithoutBase())


def test_unknown_layers_and_graphs_are_refused_before_processes_start() -> None:
    with pytest.raises(InputError, match=r"unknown layer 'GCNconv'; did you mean 'GCNConv'\?; known are"):
        assert_exact("comm", layers=["GCNconv"])
    with pytest.raises(InputError, match="unknown graph 'direct'; did you mean 'directed'"):
        assert_exact("comm", graphs=["direct"])
