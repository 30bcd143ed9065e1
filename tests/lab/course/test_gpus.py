"""Runs on simulated GPUs: what lectures get of them."""

from __future__ import annotations

import pytest

from nanovllm.executor.virtual_clock import RankStep
from nanovllm.lab.course.gpus import run_on_gpus
from nanovllm.lab.viz import rank_totals


def test_a_run_returns_what_the_ranks_did() -> None:
    run = run_on_gpus(
        "llama-3.1-8b", [40, 3], max_tokens=4, sleep={"scale": 0.5}, pipeline_parallel_size=2
    )
    assert list(run.timelines) == ["rank 0", "rank 1"]
    for steps in run.timelines.values():
        tokens: dict[str, int] = {}
        for step in steps:
            assert isinstance(step, RankStep)
            for name, count in step.tokens.items():
                tokens[name] = tokens.get(name, 0) + count
        assert sorted(tokens.values()) == [3 + 3, 40 + 3]  # the last token is not computed
    steps = run.trace.steps
    on_gpus = steps[-1].start + steps[-1].duration - steps[0].start
    assert 1000 * on_gpus == pytest.approx(rank_totals(run.timelines)["rank 1"].duration, abs=0.01)
    assert run.seconds >= 0.5 * on_gpus
    assert run.trace.settings.num_blocks > 20_000  # of an H100, although this machine has no GPU


def test_engines_that_share_experts_say_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    run = run_on_gpus(
        "qwen3-30b-a3b", [5, 5], max_tokens=2, data_parallel_size=2, enable_expert_parallel=True
    )
    assert list(run.timelines) == ["rank 0", "rank 1"]
    assert "INFO" not in capfd.readouterr().err


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit on H100"):
        run_on_gpus("llama-3.1-70b", [5])
