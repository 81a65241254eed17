"""Error texts name the backends that can do something by what these say of themselves."""

from __future__ import annotations

from pygdist.backends import Abilities, CommBackend, ReplicaBackend, backends
from pygdist.backends.base import names_of


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
