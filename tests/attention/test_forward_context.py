"""The forward context: one for each thread, and none inside another."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from nanovllm.attention.base import ForwardContext, forward_context, get_forward_context


def make() -> ForwardContext:
    backend: Any = object()
    return ForwardContext(backend, [], backend)


def test_two_threads_run_their_engines_at_the_same_time() -> None:
    both, found = threading.Barrier(2), dict[int, bool]()

    def run(number: int) -> None:
        mine = make()
        with forward_context(mine):
            both.wait(30)  # both passes run now
            found[number] = get_forward_context() is mine
            both.wait(30)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {0: True, 1: True}


def test_a_pass_inside_another_is_refused_and_leaves_the_outer_one() -> None:
    outer = make()
    with forward_context(outer):
        with pytest.raises(RuntimeError, match="cannot be nested"), forward_context(make()):
            pass
        assert get_forward_context() is outer
    with pytest.raises(RuntimeError, match="called outside"):
        get_forward_context()
