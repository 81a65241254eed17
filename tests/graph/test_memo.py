"""Results that are kept while their inputs stay the same."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch

from pygdist.graph import Adjacency
from pygdist.graph.adjacency import Slot
from pygdist.graph.memo import Memo


@pytest.fixture
def made() -> itertools.count[int]:
    return itertools.count()


def test_a_result_is_made_again_when_an_input_changes(made: itertools.count[int]) -> None:
    memo, x, y = Memo[int](), torch.ones(3), torch.ones(3)

    def get(*inputs: object) -> int:
        return memo.get("sum", inputs, lambda: next(made))

    assert [get(x, None), get(x, None), get(x[:], None)] == [0, 0, 0]  # a view of all of it is the same tensor
    assert [get(y, None), get(y, None), get(x, None)] == [1, 1, 2]  # other memory, and one result for each slot
    x.add_(1)
    assert [get(x, None), get(x, None), get(x[1:], None)] == [3, 3, 4]
    assert [memo.get("other", (x,), lambda: next(made)), memo.last("sum"), memo.last("none")] == [5, 4, None]


def test_edges_and_other_objects_are_told_apart_by_identity(made: itertools.count[int]) -> None:
    memo, edges = Memo[int](), torch.tensor([[0, 1], [0, 1]])
    one, other = (Adjacency(edges, num_src=2, num_dst=2) for _ in range(2))
    results = [memo.get("", (edge_index, "mean"), lambda: next(made)) for edge_index in (one, one, other, other)]
    assert results == [0, 0, 1, 1]


def test_a_result_that_is_changed_is_made_again(made: itertools.count[int]) -> None:
    memo, x = Memo[torch.Tensor](), torch.ones(2)
    memo.get("", (x,), lambda: x * next(made)).add_(1)
    assert not memo.knows("", (x,))
    assert torch.equal(memo.get("", (x,), lambda: x * next(made)), x)


def test_inputs_are_kept_alive() -> None:
    memo, pieces, x = Memo[str](), {1, 2}, torch.ones(3)
    memory, held = x.data_ptr(), weakref.ref(pieces)
    memo.put("", (pieces, x), "")
    del pieces
    x.data = torch.zeros(3)
    assert held() is not None
    assert not memo.knows("", (held(), x))
    assert all(torch.empty(3).data_ptr() != memory for _ in range(100))
    memo.clear()
    assert held() is None


@pytest.mark.parametrize("tensor", [torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2), False)])
def test_nothing_is_kept_of_tensors_that_may_change_unseen(tensor: torch.Tensor) -> None:
    memo = Memo[torch.Tensor]()
    result = memo.get("", (tensor,), lambda: tensor * 2)
    assert result.requires_grad == tensor.requires_grad
    assert not memo.results
    assert not memo.knows("", (tensor,))
    assert memo.put("", (tensor,), result) is result
    assert memo.last("") is None


def test_what_a_result_was_made_of_may_need_a_gradient_later() -> None:
    memo, x = Memo[torch.Tensor](), torch.ones(2)
    memo.get("", (x,), lambda: x * 2)
    assert memo.knows("", (x,))
    x.requires_grad_()
    assert not memo.knows("", (x,))
    assert memo.get("", (x,), lambda: x * 2).requires_grad


def test_training_uses_what_an_evaluation_began() -> None:
    memo, weight = Memo[torch.Tensor](), torch.ones(2, requires_grad=True)
    x, edges = torch.ones(2), Adjacency(torch.tensor([[0], [0]]), num_src=1, num_dst=1)
    slot = Slot[torch.Tensor]("twice")
    with torch.inference_mode():
        results = memo.get("", (x,), lambda: x * 2), edges.slot(slot, lambda: x * 2)
    (memo.get("", (x,), lambda: x * 3) * edges.slot(slot, lambda: x * 3) * weight).sum().backward()
    assert torch.equal(results[0] * results[1], weight.grad)


def test_the_oldest_slot_goes_first() -> None:
    memo = Memo[int](2)
    for slot in (1, 2, 1, 3):
        memo.put(slot, (), 10 * slot)
    assert memo.results == [20, 30]
    memo.clear(but={3, 4})
    assert memo.results == [30]


def test_slots_of_edges_are_shared_by_copies_with_other_weights() -> None:
    edges = Adjacency(torch.tensor([[0], [0]]), num_src=1, num_dst=1)
    one, other = Slot[dict[str, int]]("counts"), Slot[dict[str, int]]("counts")
    assert edges.slot(one) is None
    edges.with_value(torch.ones(1)).slot(one, dict)["edges"] = 1
    assert edges.slot(one) == {"edges": 1}
    assert edges.slot(other, dict) == {}
