"""Several engines, rule by rule and without processes: which engine gets a request, and when waves
of steps begin and end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm.data.outputs import EngineStats
from nanovllm.data.request import EngineOutput, EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.distributed import groups
from nanovllm.distributed.groups import GroupCoordinator
from nanovllm.engine.group import DataParallelCore
from nanovllm.engine.process import Command, Report
from nanovllm.features.data_parallel.lock_step import any_unfinished
from nanovllm.features.data_parallel.router import EngineRouter
from nanovllm.features.data_parallel.waves import Waves

# ---------------------------------------------------------------- the router


def request(*numbers: int) -> EngineRequest:
    """A prompt of blocks of two tokens, each with the same number, and one token more."""
    return EngineRequest(
        "x", [number for number in numbers for _ in range(2)] + [0], SamplingParams(max_tokens=1)
    )


def test_equal_engines_take_turns() -> None:
    router = EngineRouter(3, 2, capacity=9)
    assert [router.choose(request(i), [0, 0, 0]) for i in range(4)] == [0, 1, 2, 0]
    assert router.choose(request(5), [0, 4, 0]) == 2, (
        "the turn is engine 1's, which is busier: the next one after it"
    )


def test_the_least_busy_engine_gets_an_unknown_prompt() -> None:
    assert EngineRouter(3, 2, capacity=9).choose(request(1), [3, 1, 2]) == 1


def test_the_engine_with_the_longest_prefix_gets_the_prompt() -> None:
    router = EngineRouter(3, 2, capacity=9)
    assert router.choose(request(1), [0, 1, 1]) == 0
    assert router.choose(request(1, 2, 3), [9, 0, 1]) == 1, (
        "engine 0 has a block of it, and is 9 busier: too much"
    )
    assert router.choose(request(1, 2, 4), [0, 8, 0]) == 1, (
        "two blocks, and 8 busier, which is not too much"
    )
    assert router.choose(request(1, 5), [4, 4, 0]) == 0, (
        "engines 0 and 1 have one block of it: the turn is engine 2's"
    )
    assert router.choose(request(6, 1), [4, 4, 0]) == 2, (
        "a block is the same only behind the same prefix"
    )


def test_without_capacity_only_loads_count() -> None:
    router = EngineRouter(2, 2, capacity=0)
    assert router.choose(request(1, 2), [0, 1]) == 0
    assert router.choose(request(1, 2), [1, 0]) == 1, "the engines cache no prefixes"
    assert not any(router._sent)


# ---------------------------------------------------------------- in a step


class Ring(GroupCoordinator):
    """This rank and others, of which so many have requests."""

    def __init__(self, others: int) -> None:
        super().__init__("dp", [0, 1, 2], 0)
        self.others = others

    def all_reduce(self, x: Tensor) -> Tensor:
        """Count the call, and add the others' numbers."""
        self.calls["all_reduce"] += 1
        return x + self.others


@pytest.mark.parametrize("unfinished", [True, False])
@pytest.mark.parametrize("others", [0, 1, 2])
def test_engines_learn_whether_any_of_them_has_requests(
    monkeypatch: pytest.MonkeyPatch, unfinished: bool, others: int
) -> None:
    group = Ring(others)
    monkeypatch.setitem(groups.own_groups, "dp", group)
    ask = any_unfinished(unfinished, torch.device("cpu"))
    assert group.calls["all_reduce"] == 1, (
        "every rank joins in the step itself, before anyone waits for the result"
    )
    assert ask() is (unfinished or others > 0), (
        f"{unfinished=} here, and {others} other engines have requests"
    )


class Alone(GroupCoordinator):
    """A group of one, which is not to be asked."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Refuse."""
        raise AssertionError(
            "a group of one has no other rank to ask: no all-reduce, no copy to the host"
        )


def test_a_single_engine_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(groups.own_groups, "dp", Alone("dp"))
    for unfinished in (True, False):
        assert any_unfinished(unfinished, torch.device("cpu"))() is unfinished


# ---------------------------------------------------------------- in the coordinator


class Engine(SimpleNamespace):
    """An engine without a process: remembers the orders that it gets."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank=rank, name=f"data rank {rank}", orders=[])

    def send(self, command: Command) -> None:
        """Remember a command."""
        self.orders.append((command.order, command.wave))


def coordinator(waves: Waves | None = None, **rank_of: int) -> Any:
    """A coordinator of two engines, and which of them has which request."""
    core: Any = DataParallelCore.__new__(DataParallelCore)
    core.ranks, core.waves = [Engine(0), Engine(1)], waves
    core.rank_of = {name: core.ranks[rank] for name, rank in rank_of.items()}
    return core


def test_outputs_are_passed_on_until_their_request_ends() -> None:
    core = coordinator(a=0, b=1)
    outputs = [EngineOutput("b", [5]), EngineOutput("a", [6]), EngineOutput("gone", [7])]
    news = core.take_report(core.ranks[1], Report(outputs))
    assert [output.request_id for output in news] == ["b"], (
        "a is another engine's, and `gone` was aborted"
    )
    assert news[0].engine == 1, "the engine that computed it"
    assert set(core.rank_of) == {"a", "b"}
    core.take_report(core.ranks[1], Report([EngineOutput("b", [8], finish_reason="stop")]))
    assert set(core.rank_of) == {"a"}, "b has ended"


def test_a_refused_request_ends_with_an_error() -> None:
    core = coordinator(a=0)
    (output,) = core.take_report(core.ranks[0], Report(refused={"a": "its id is in use"}))
    assert (output.finish_reason, output.error) == ("error", "its id is in use")
    assert not core.rank_of, "a has ended"


def in_first_wave(**rank_of: int) -> Any:
    core = coordinator(Waves(), **rank_of)
    core.waves.start(0)
    return core


def test_the_first_report_of_an_ended_wave_starts_the_next_one() -> None:
    core = in_first_wave(a=0)
    core.take_report(core.ranks[0], Report())
    assert core.waves.running and not core.ranks[0].orders, "wave 0 still runs"
    core.take_report(core.ranks[1], Report(stats=EngineStats(num_waves=1)))
    assert core.waves.ended == 1, "engine 1 has reported the end of wave 0"
    assert [engine.orders for engine in core.ranks] == [[("start_wave", 1)]] * 2, (
        "a has not ended: it needs a new wave"
    )
    core.take_report(core.ranks[0], Report(stats=EngineStats(num_waves=1)))
    assert core.waves.running and len(core.ranks[0].orders) == 1, (
        "engine 0 reports the same end: wave 1 goes on"
    )


def test_without_requests_no_wave_begins() -> None:
    core = in_first_wave(a=0)
    done = [EngineOutput("a", [1], finish_reason="stop")]
    core.take_report(core.ranks[0], Report(done, stats=EngineStats(num_waves=1)))
    assert core.waves.ended == 1 and not core.waves.running
    assert not core.ranks[0].orders, "the last request ended with the same report"
