"""Experts on several ranks, rule by rule and without processes: replicas, moves, and the results
that come back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanovllm.distributed.expert_parallel import DispatchHandle, ExpertDispatcher, ExpertPlacement
from nanovllm.distributed.groups import GroupCoordinator
from nanovllm.distributed.load_balance import count_replicas, plan_moves


@pytest.mark.parametrize(
    ("loads", "num_slots", "num_ranks", "expected", "why"),
    [
        ([5, 5, 5, 5], 4, 2, [1, 1, 1, 1], "each expert has one replica, and no slot remains"),
        ([10, 90, 20, 30], 6, 3, [1, 3, 1, 1], "90 per replica is the most, then 45"),
        (
            [10, 90, 20, 50],
            6,
            3,
            [1, 2, 1, 2],
            "after 90, the 50 of one replica is more than the 45 of each of two",
        ),
        ([10, 90, 20, 30], 8, 2, [2, 2, 2, 2], "no expert has more replicas than there are ranks"),
        ([1, 100, 2], 6, 3, [1, 3, 2], "an expert that is on every rank gets no more"),
        ([0, 0, 0], 4, 2, [2, 1, 1], "without tokens the first expert is as busy as any"),
    ],
)
def test_a_slot_goes_to_the_expert_with_the_busiest_replicas(
    loads: list[int], num_slots: int, num_ranks: int, expected: list[int], why: str
) -> None:
    assert count_replicas(loads, num_slots, num_ranks) == expected, why


def placement(*slots: tuple[int, ...]) -> ExpertPlacement:
    return ExpertPlacement(1 + max(map(max, slots)), slots)


def test_experts_that_stay_are_not_moved() -> None:
    old = placement((0, 1), (2, 3))
    assert plan_moves(old, old) == []
    assert plan_moves(old, placement((0, 1), (2, 1))) == [(0, 1, 1, 1)], (
        "one move: source rank and slot, target rank and slot"
    )


def test_slots_can_be_exchanged() -> None:
    moves = plan_moves(placement((0, 1), (2, 3)), placement((3, 1), (2, 0)))
    assert moves == [(1, 1, 0, 0), (0, 0, 1, 1)], (
        "the sources are the slots of the old placement, by target rank and slot"
    )


def test_ranks_with_the_same_expert_take_turns_to_send() -> None:
    old, new = placement((0, 1), (0, 2), (3, 1), (4, 2)), placement((0, 1), (0, 2), (3, 0), (4, 0))
    moves = plan_moves(old, new)
    assert [move[2:] for move in moves] == [(2, 1), (3, 1)], "target rank and slot"
    assert [move[:2] for move in moves] == [(0, 0), (1, 0)], (
        "ranks 0 and 1 hold expert 0 and send it once each"
    )


def test_a_rank_that_has_sent_another_expert_is_busier() -> None:
    old, new = placement((0, 1), (1, 2), (2, 0)), placement((0, 1), (1, 0), (2, 1))
    assert plan_moves(old, new) == [(0, 0, 1, 1), (1, 0, 2, 1)], (
        "rank 0 sends expert 0, so rank 1 sends expert 1, which both hold"
    )


class Post(GroupCoordinator):
    """The first of several ranks, whose all-to-all returns what the others have sent back."""

    def __init__(self, size: int, back: Tensor) -> None:
        super().__init__("ep", list(range(size)), 0)
        self.back, self.sent = back, list[tuple[Tensor, list[int], list[int]]]()

    def all_to_all(self, x: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        """Remember the call."""
        self.sent.append((x, send_counts, receive_counts))
        return self.back


def combine(
    tokens: list[int], sent: list[int], num_tokens: int, back: Tensor
) -> tuple[Tensor, Post]:
    post = Post(len(sent), back)
    dispatcher = ExpertDispatcher(ExpertPlacement.initial(len(sent), len(sent)), post)
    y, received = torch.zeros(5, back.shape[1], dtype=back.dtype), [5] + [0] * (len(sent) - 1)
    out = dispatcher.combine(
        y, DispatchHandle(torch.tensor(tokens, dtype=torch.int64), sent, received, num_tokens)
    )
    assert len(post.sent) == 1, "one all-to-all"
    assert post.sent[0][0] is y and post.sent[0][1:] == (received, sent), (
        "what was received goes back, as much as was sent"
    )
    return out, post


def test_results_are_added_at_their_tokens() -> None:
    back = torch.tensor([[1.0, 2.0], [3.0, 4.0], [10.0, 20.0], [30.0, 40.0]])
    out, _ = combine([0, 2, 2, 0], [2, 2], 4, back)
    assert out.tolist() == [[31, 42], [0, 0], [13, 24], [0, 0]], (
        "rows 0 and 1 are rank 0's, for tokens 0 and 2"
    )


def test_results_are_added_in_float32() -> None:
    out, _ = combine(
        [0, 0, 0], [1, 1, 1], 1, torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    )
    assert out.dtype == torch.bfloat16, "the dtype of the results"
    assert out.item() == 258, "in bfloat16, 256 + 1 is 256"


def test_a_rank_without_tokens_takes_part() -> None:
    out, _ = combine([], [0, 0], 0, torch.zeros(0, 3))
    assert out.shape == (0, 3)
