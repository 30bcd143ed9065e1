"""The animations of scheduling, attention and batches in figures/: small stories, played by the real scheduler."""

from __future__ import annotations

from typing import Any

from nanovllm.lab.viz.animation.animate import render
from nanovllm.lab.viz.animation.batch import batch_scene
from nanovllm.lab.viz.animation.schedule import scheduler_scene
from nanovllm.lab.viz.animation.split import split_scene
from nanovllm.lab.viz.animation.timeline import first_token_at, policies_scene, timeline_scene, worst_pause
from nanovllm.lab.viz.attention import attention_scene
from nanovllm.lab.viz.data import step_edges
from nanovllm.lab.viz.simulate import SimulatedRequest, simulate
from nanovllm.trace.trace import Trace


def scheduler_trace() -> Trace:
    """A long prompt fills the gap beside two decodes; then the pool runs dry, and its owner is swapped out and back."""
    requests = [
        SimulatedRequest(0, 6, 11, request_id="A"),
        SimulatedRequest(0, 7, 9, request_id="B"),
        SimulatedRequest(2, 26, 5, request_id="C"),
    ]
    options: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    return simulate(requests, num_kv_blocks=13, preemption_mode="swap", enable_prefix_caching=False, **options)


def scheduler() -> bytes:
    """Queues, budget, progress and pool: what the scheduler decides, share by share."""
    trace = scheduler_trace()
    return render(lambda: scheduler_scene(trace, [record.step for record in trace]))


def policies_traces() -> dict[str, Trace]:
    """Three requests decode, and one with a long prompt comes, under two policies. A step takes 8 ms for the weights and
    half a millisecond for each token."""
    requests = [
        SimulatedRequest(0, 12, 22, request_id="A"),
        SimulatedRequest(0, 10, 18, request_id="B"),
        SimulatedRequest(1, 16, 15, request_id="C"),
        SimulatedRequest(6, 160, 5, request_id="D"),
    ]
    budgets = {"prefill_first": 192, "chunked": 32}
    names = {"prefill first": "prefill_first", "chunked prefill": "chunked"}
    traces = {}
    for name, policy in names.items():
        options: dict[str, Any] = {
            "batching_policy": policy,
            "max_num_batched_tokens": budgets[policy],
            "max_num_seqs": 4,
        }
        traces[name] = simulate(requests, step_cost=8.0, token_cost=0.5, **options)
        traces[name].settings["time_unit"] = "ms"
    return traces


def policies() -> bytes:
    """What a long prompt does to those who decode, and what chunks are good for."""
    traces = policies_traces()
    first, chunked = traces.values()
    arrival = next(step.start for step in first if "D" in step.arrived)
    resumed = min(end for _, end in step_edges(first, "time") if end > first_token_at(first, "D"))
    begun, later = first_token_at(first, "D"), first_token_at(chunked, "D")
    end = max(step.start + step.duration for trace in traces.values() for step in trace)
    pauses = [worst_pause(trace, end)[0] for trace in traces.values()]
    captions = [
        (0.0, "A, B and C read their prompts and decode, one token a step. Watch what happens when D comes."),
        (arrival, "D comes, with a prompt of 160 tokens."),
        (
            (arrival + begun) / 2,
            "Above, D's prompt is one step, and A, B and C have to pause. Below, D gets what they leave over.",
        ),
        (
            resumed,
            f"Above, D has its first token after {begun - arrival:.0f} ms. A, B and C paused for {pauses[0]:.0f} ms.",
        ),
        (
            later,
            f"Below, D has its first token after {later - arrival:.0f} ms. Nobody paused for more than {pauses[1]:.0f} ms.",
        ),
        (end, f"Prefill first: D begins sooner. Chunked prefill: no pause is longer than {pauses[1]:.0f} ms."),
    ]
    return render(lambda: policies_scene(traces, captions))


def engine_trace() -> Trace:
    """Six requests: a long prompt, a prefix that is found again, a preemption, a caller who hangs up."""
    system = list(range(12))
    requests = [
        SimulatedRequest(0, 7, 20, request_id="A"),
        SimulatedRequest(0, 9, 9, request_id="B"),
        SimulatedRequest(3, [*system, *range(20, 40)], 14, request_id="C"),
        SimulatedRequest(9, [*system, 50, 51], 12, request_id="D"),
        SimulatedRequest(15, 20, 30, request_id="E", abort_step=26),
        SimulatedRequest(18, 9, 9, request_id="F"),
    ]
    return simulate(requests, num_kv_blocks=20, block_size=4, max_num_batched_tokens=16, max_num_seqs=4)


def engine() -> bytes:
    """The life of six requests: timeline, token budget and KV blocks, step by step."""
    trace = engine_trace()
    return render(lambda: timeline_scene(trace, [record.step for record in trace]))


def batch_trace() -> Trace:
    """Two requests decode, and a third has read half of its prompt. Others have come and gone: nobody's pages lie in a
    row."""
    requests = [
        SimulatedRequest(0, 5, 3, request_id="X"),
        SimulatedRequest(0, 9, 14, request_id="A"),
        SimulatedRequest(2, 6, 3, request_id="Y"),
        SimulatedRequest(4, 5, 8, request_id="B"),
        SimulatedRequest(7, 20, 6, request_id="C"),
    ]
    options: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 12, "max_num_seqs": 4}
    return simulate(requests, num_kv_blocks=18, enable_prefix_caching=False, **options)


def attention() -> bytes:
    """Which pages a decode reads, and which a piece of a prompt reads and writes."""
    trace = batch_trace()
    return render(lambda: attention_scene(trace, [record.step for record in trace]))


def split() -> bytes:
    """How the context of one decode is shared out among programs."""
    return render(split_scene)


def batch() -> bytes:
    """How a schedule becomes tensors."""
    trace = batch_trace()
    return render(lambda: batch_scene(trace, [record.step for record in trace]))


FIGURES = {
    "scheduler.gif": scheduler,
    "policies.gif": policies,
    "engine.gif": engine,
    "attention.gif": attention,
    "split.gif": split,
    "batch.gif": batch,
}
