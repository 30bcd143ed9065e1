"""A model in stages: who has which layers, what goes between them, micro-batches, and the same
tokens as from one rank."""

from __future__ import annotations

import json
import pathlib
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams
from nanovllm.assembly.scheduling import create_scheduler
from nanovllm.checkpoint.hub import resolve_model
from nanovllm.core.kv_cache_manager import KVCacheManager
from nanovllm.core.request import Request
from nanovllm.core.schedule import ModelRunnerOutput, SampledToken, SchedulerOutput
from nanovllm.core.scheduler import Scheduler
from nanovllm.data.checks import check_pipeline_parallel
from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineRequest
from nanovllm.data.resolved_config import resolve
from nanovllm.distributed.groups import Grid, get_pp_group
from nanovllm.distributed.pipeline_parallel import Elsewhere, keep_stage, layer_range
from nanovllm.distributed.stage_link import StageLink
from nanovllm.lab.course.ranks import run_ranks
from nanovllm.lab.viz import pool_states
from nanovllm.models.config import ModelConfig
from nanovllm.models.loader import build_model, load_model
from tests.examples import by_night
from tests.oracle import VARIANTS, greedy, greedy_choices, make_checkpoint, reference_tokens
from tests.stages import as_stage, staged  # noqa: F401
from tests.stand_ins import set_backend

PROMPTS = [[3 + (7 * i + j) % 300 for j in range(n)] for i, n in enumerate((5, 40, 18, 33, 2))]
PROMPTS.append(PROMPTS[1][:30] + [9] * 10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


# ---------------------------------------------------------------- who has which layers


@given(st.data())
def test_every_layer_is_on_one_stage(data: st.DataObject) -> None:
    num_layers = data.draw(st.integers(1, 200))
    stages = data.draw(st.integers(1, num_layers))
    ranges = [layer_range(num_layers, stages, stage) for stage in range(stages)]
    assert [layer for here in ranges for layer in here] == list(range(num_layers))
    sizes = [len(here) for here in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes), "the last stage has the output head besides"
    assert sizes[0] == min(sizes) or set(sizes[:-1]) == {max(sizes)}, "the first has the embedding"


@pytest.mark.parametrize(
    ("num_layers", "stages", "sizes"),
    [
        (30, 2, [15, 15]),
        (30, 3, [10, 10, 10]),
        (3, 2, [2, 1]),
        (30, 4, [7, 8, 8, 7]),
        (31, 4, [8, 8, 8, 7]),
    ],
)
def test_layers_are_divided_as_in_vllm(num_layers: int, stages: int, sizes: list[int]) -> None:
    assert [len(layer_range(num_layers, stages, stage)) for stage in range(stages)] == sizes


def test_more_stages_than_layers() -> None:
    check_pipeline_parallel(3, 3)
    with pytest.raises(
        ValueError, match=r"3 layers cannot be divided among 4 stages.*may be 1 to 3"
    ):
        check_pipeline_parallel(3, 4)
    with pytest.raises(ValueError, match="may be 1 to 3"):
        layer_range(3, 4, 0)


# ---------------------------------------------------------------- the model


@pytest.mark.parametrize("variant", ["llama", "llama-mha-tied", "gemma2"])
def test_a_stage_has_its_own_weights_and_no_others(variant: str, tmp_path: pathlib.Path) -> None:
    config = ModelConfig.from_pretrained(make_checkpoint(tmp_path, variant))
    whole = load_model(tmp_path, config, torch.float32)
    found: Counter[str] = Counter()
    tied_head = "lm_head.weight" if config.tie_word_embeddings else ""
    for stage in range(3):
        with as_stage(3, stage):
            model = load_model(tmp_path, config, torch.float32, transforms=[keep_stage])
        assert list(model.attention_layers) == [stage] and len(model.model.layer_calls) == 1
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(name)), name
            # A tied head is the only matrix of that name on its stage.
            found["model.embed_tokens.weight" if name == tied_head else name] += 1
        others = [i for i, layer in enumerate(model.model.layers) if isinstance(layer, Elsewhere)]
        assert others == [i for i in range(3) if i != stage]
        places = model.checkpoint_places()
        assert model.checkpoint_name(f"model.layers.{stage}.mlp.up_proj.weight") in places
        for other in others:
            assert model.checkpoint_name(f"model.layers.{other}.mlp.up_proj.weight") is None
        assert model.checkpoint_name(f"model.layers.{stage}.mlp.sideways_proj.weight") not in {
            None,
            *places,
        }
        if stage:
            assert ("model.embed_tokens.weight" in places) == (
                stage == 2 and config.tie_word_embeddings
            )
    twice = {"model.embed_tokens.weight"} if config.tie_word_embeddings else set()
    assert {name for name, count in found.items() if count > 1} == twice
    assert found.keys() == {name for name, _ in whole.named_parameters()}


# By day each architecture in two stages or in three.
ARCHITECTURES = [
    pytest.param(variant, stages, marks=[pytest.mark.nightly] if (number + stages) % 2 else [])
    for number, variant in enumerate(VARIANTS)
    for stages in (2, 3)
]


@pytest.mark.usefixtures("staged")
@pytest.mark.parametrize(("variant", "stages"), ARCHITECTURES)
def test_architectures(variant: str, stages: int, tmp_path: pathlib.Path) -> None:
    make_checkpoint(tmp_path, variant)
    draw = random.Random(variant)
    prompts = [[draw.randrange(3, 320) for _ in range(length)] for length in (1, 2, 15, 17, 40)]
    llm = LLM(
        str(tmp_path),
        dtype="float32",
        max_num_batched_tokens=32,
        max_num_seqs=8,
        check_invariants=True,
        num_kv_blocks=32,
        pipeline_parallel_size=stages,
    )
    ours = greedy(llm, prompts, 16)
    assert ours == greedy_choices(str(tmp_path), prompts, ours, 16)


# ---------------------------------------------------------------- the line


def _send_before_anybody_receives() -> list[Any]:
    link = StageLink(torch.float32)
    group = link.group
    if group.is_first:
        for step in range(2):
            link.send(torch.full((3, 4), float(step)))
    group.barrier()  # never reached if a send waited for its receiver
    received = torch.zeros(3, 4)
    sums = []
    for _ in range(2 * group.is_last):
        link.receive(received)
        sums.append(received.sum().item())
    link.flush()
    return [sums, group.calls["send"], group.bytes_sent["send"]]


def test_a_send_does_not_wait() -> None:
    first, last = run_ranks(_send_before_anybody_receives, Grid(pipeline=2))
    assert last[0] == [0.0, 12.0]
    assert first[1:] == [2, 2 * 3 * 4 * 4] and last[1:] == [0, 0]


def test_all_layers_are_on_the_only_stage(folder: pathlib.Path) -> None:
    model = build_model(ModelConfig.from_pretrained(folder), [keep_stage])
    assert list(model.attention_layers) == [0, 1, 2] and get_pp_group().world_size == 1


# ---------------------------------------------------------------- micro-batches


def make_scheduler(stages: int, num_blocks: int = 400, **options: Any) -> Scheduler:
    config = EngineConfig(
        pipeline_parallel_size=stages,
        **{"max_num_seqs": 16, "max_num_batched_tokens": 64, "block_size": 4} | options,
    )
    resolved = resolve(config, model_max_len=200, num_kv_blocks=num_blocks)
    return create_scheduler(resolved, KVCacheManager(num_blocks, 4))


def add(scheduler: Scheduler, count: int, prompt: int = 4, tokens: int = 8) -> None:
    for i in range(count):
        source = EngineRequest(
            f"{i}", [i + 5] * prompt, SamplingParams(max_tokens=tokens, ignore_eos=True)
        )
        scheduler.add_request(Request(source, i))


def drive(scheduler: Scheduler, stages: int) -> list[list[str]]:
    """The requests of each step, with `stages` steps under way. [] stands for a step that could not
    be launched."""
    steps, under_way = [], []
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        steps.append([r.request_id for r in plan.requests])
        under_way += [plan] if not plan.empty else []
        if len(under_way) == stages or plan.empty:
            first: SchedulerOutput = under_way.pop(0)
            sampled = {r.request_id: [SampledToken(7)] for r in first.requests if r.samples}
            scheduler.update_from_output(first, ModelRunnerOutput(sampled))
        scheduler.check_invariants()
    return steps


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_requests_are_divided_among_the_steps_under_way(stages: int) -> None:
    scheduler = make_scheduler(stages)
    add(scheduler, 12)
    steps = drive(scheduler, stages)
    size = 12 // stages
    assert [len(step) for step in steps if step] == [size] * (8 * stages)
    assert [] not in steps[: 8 * stages], "no step without its share"
    groups = steps[:stages]
    assert (
        steps[: 8 * stages] == groups * 8
        and len({name for group in groups for name in group}) == 12
    )


def test_one_rank_takes_all() -> None:
    scheduler = make_scheduler(1)
    add(scheduler, 12)
    assert {len(step) for step in drive(scheduler, 1)} == {12}


def test_a_group_that_shrinks_gets_some_of_the_others() -> None:
    scheduler = make_scheduler(2)
    add(scheduler, 12, tokens=30)
    plans = [scheduler.schedule(), scheduler.schedule()]
    for name in ("6", "7", "8", "9"):  # of the second step, which is left with 2
        scheduler.abort_request(name)
    sizes = []
    for _ in range(4):
        plan = plans.pop(0)
        sampled = {r.request_id: [SampledToken(7)] for r in plan.requests if r.samples}
        scheduler.update_from_output(plan, ModelRunnerOutput(sampled))
        plans.append(scheduler.schedule())
        sizes.append(plans[-1].num_samples)
    assert sizes == [4, 4, 4, 4]


def test_memory_that_lets_few_in_does_not_put_them_into_one_step() -> None:
    scheduler = make_scheduler(2, num_blocks=8, max_num_seqs=16)
    add(scheduler, 4, prompt=5, tokens=3)  # two blocks each
    for i in range(4, 16):
        scheduler.add_request(
            Request(EngineRequest(f"{i}", [i + 5] * 5, SamplingParams(max_tokens=3)), i)
        )
    sizes = [len(step) for step in drive(scheduler, 2)]
    assert sizes[:6] == [4, 0, 2, 2, 2, 2], (
        "the first step took all that had room; the next ones share them"
    )
    assert max(sizes[2:]) <= 2 and sizes.count(0) <= 3


def test_chunks_of_a_prompt_follow_one_another() -> None:
    scheduler = make_scheduler(2)
    add(scheduler, 1, prompt=150, tokens=1)
    plans = [scheduler.schedule() for _ in range(4)]
    assert [plan.num_tokens for plan in plans] == [64, 64, 22, 0], (
        "nothing waits for anything but a token"
    )


def test_penalties_do_not_empty_the_pipeline() -> None:
    scheduler = make_scheduler(2)
    for i in range(2):
        params = SamplingParams(max_tokens=4, repetition_penalty=1.2)
        scheduler.add_request(Request(EngineRequest(f"{i}", [4, 5], params), i))
    plans = [scheduler.schedule() for _ in range(2)]
    assert [len(plan.requests) for plan in plans] == [1, 1]
    scheduler.update_from_output(plans[0], ModelRunnerOutput({"0": [SampledToken(7)]}))
    assert [share.request_id for share in scheduler.schedule().requests] == ["0"], (
        "the pending token of request 1 holds up no other request"
    )


# ---------------------------------------------------------------- the whole engine


def options_of(llm: LLM) -> dict[str, Any]:
    stats = llm.engine.core.stats
    assert (
        stats.num_running == stats.num_waiting == stats.num_swapped == 0
        and stats.kv_cache_usage == 0
    )
    return {"preempted": stats.num_preemptions > 0, "found": stats.num_hit_tokens > 0}


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.5, "seed": 5, "top_p": 0.9, "top_k": 40},
    {"temperature": 0, "repetition_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 0, "logprobs": 3, "prompt_logprobs": 2},
    {"temperature": 0, "min_tokens": 9, "stop_token_ids": list(range(3, 200))},
    {"temperature": 1.0, "seed": 1, "stop": ["a", "e", "0"]},
    {"temperature": 1.0, "seed": 2, "n": 3, "logit_bias": {40: 5.0}},
    {
        "temperature": 1.0,
        "seed": 3,
        "bad_words": ["a", "bc"],
        "bad_words_token_ids": [[t, t + 1] for t in range(9, 300)],
    },
]


@pytest.mark.usefixtures("staged")
# At night also those of which another has more: plain greedy ones, drawn ones, an end by an id.
@pytest.mark.parametrize(
    "sampling", [*SAMPLING[2:4], *SAMPLING[5:], *by_night([*SAMPLING[:2], SAMPLING[4]])], ids=str
)
def test_stages_change_nothing(folder: pathlib.Path, sampling: dict[str, Any]) -> None:
    params, results, logprobs = SamplingParams(max_tokens=20, **sampling), [], []
    for stages in (1, 2, 3):
        llm = LLM(
            str(folder),
            dtype="float32",
            num_kv_blocks=64,
            max_num_seqs=4,
            max_num_batched_tokens=24,
            pipeline_parallel_size=stages,
            check_invariants=True,
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answers = [answer for output in outputs for answer in output.outputs]
        results.append([(a.token_ids, a.text, a.finish_reason, a.stop_reason) for a in answers])
        lists = [a.logprobs or [] for a in answers] + [
            output.prompt_logprobs or [] for output in outputs
        ]
        logprobs.append(
            [
                {token: entry.logprob for token, entry in (e or {}).items()}
                for row in lists
                for e in row
            ]
        )
        options_of(llm)
    assert results[0] == results[1] == results[2]
    for other in logprobs[1:]:  # batches differ, and with them the order of sums
        assert len(other) == len(logprobs[0]) and all(map(_close, other, logprobs[0]))


def _close(one: dict[int, float], other: dict[int, float]) -> bool:
    return one == pytest.approx(other, abs=1e-4)


@pytest.mark.usefixtures("staged")
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("stages", [2, 3])
def test_memory_that_runs_out(folder: pathlib.Path, stages: int, mode: Any) -> None:
    llm = LLM(
        str(folder),
        dtype="float32",
        num_kv_blocks=26,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        pipeline_parallel_size=stages,
        preemption_mode=mode,
        swap_space=0.01,
        check_invariants=True,
    )
    expected = [reference_tokens(str(folder), prompt, 24) for prompt in PROMPTS]
    assert greedy(llm, PROMPTS, 24) == expected
    assert options_of(llm) == {"preempted": True, "found": True}


class Again:
    """A graph on the CPU: does it all again."""

    num_replays = 0

    def capture(self, work: Callable[[], Any], pool: Any) -> Any:
        self.work = work
        work()
        return pool or object()

    def replay(self) -> None:
        Again.num_replays += 1
        self.work()


@pytest.mark.usefixtures("staged")
@pytest.mark.parametrize("stages", [2, 3])
def test_graphs_of_a_stage(
    folder: pathlib.Path, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded alone, on zeros, between two buffers that never move; padded and replayed with what
    comes over the line."""
    set_backend(monkeypatch, make_graph=Again)
    Again.num_replays = 0
    llm = LLM(
        str(folder),
        dtype="float32",
        num_kv_blocks=64,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        attention_backend="torch",
        pipeline_parallel_size=stages,
        check_invariants=True,
    )
    expected = [reference_tokens(str(folder), prompt, 12) for prompt in PROMPTS]
    assert greedy(llm, PROMPTS, 12) == expected
    assert Again.num_replays > 10 * stages


@pytest.mark.usefixtures("staged")
@pytest.mark.parametrize("options", [{}, {"preemption_mode": "swap", "swap_space": 0.01}], ids=str)
def test_aborts_while_several_steps_are_under_way(
    folder: pathlib.Path, options: dict[str, Any]
) -> None:
    llm = LLM(
        str(folder),
        dtype="float32",
        num_kv_blocks=26,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        pipeline_parallel_size=3,
        check_invariants=True,
        **options,
    )
    draw = random.Random(3)
    got: dict[str, list[int]] = {f"{i}": [] for i in range(24)}
    ended: set[str] = set()
    aborted: set[str] = set()
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for i in range(24):
        llm.engine.add_request(f"{i}", {"prompt_token_ids": PROMPTS[i % len(PROMPTS)]}, params)
    while llm.engine.has_unfinished:
        for output in llm.engine.step():
            got[output.request_id] += output.outputs[0].token_ids
            if output.finished:
                ended.add(output.request_id)
        if draw.random() < 0.2 and (name := str(draw.randrange(24))) not in ended:
            llm.engine.abort_request(name)
            aborted.add(name)
    assert aborted and ended and aborted | ended == got.keys()
    for name, tokens in got.items():
        expected = reference_tokens(str(folder), PROMPTS[int(name) % len(PROMPTS)], 24)
        assert tokens == (expected if name in ended else expected[: len(tokens)])
    options_of(llm)


@pytest.mark.usefixtures("staged")
def test_the_trace_of_several_steps_under_way(folder: pathlib.Path) -> None:
    """Steps overlap in time; who reads the records still knows at every step which blocks are
    whose."""
    llm = LLM(
        str(folder),
        dtype="float32",
        num_kv_blocks=26,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        pipeline_parallel_size=3,
        check_invariants=True,
        trace=True,
    )
    core, tables = llm.engine.core, []
    schedule = core.scheduler.schedule

    def watched() -> SchedulerOutput:
        plan = schedule()
        if not plan.empty:
            tables.append({name: list(table) for name, table in core.manager.tables.items()})
        return plan

    core.scheduler.schedule = watched  # type: ignore[method-assign]
    greedy(llm, PROMPTS, 24)
    assert llm.trace is not None
    records = [record for record in llm.trace if record.requests]
    states = [
        state
        for state, record in zip(pool_states(llm.trace), llm.trace, strict=True)
        if record.requests
    ]
    assert [state.tables for state in states] == tables
    assert [record.step for record in records] == list(range(len(records)))
    ends = [record.start + record.duration for record in records]
    assert all(record.duration > 0 for record in records) and ends == sorted(ends)
    starts = [record.start for record in records]
    assert starts == sorted(starts)
    assert sum(start < end for start, end in zip(starts[1:], ends, strict=False)) > len(records) / 2


@pytest.mark.usefixtures("staged")
def test_slices_of_a_track_do_not_overlap(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Although steps do: viewers of Chrome's events nest slices, and know no other way of
    overlapping."""
    llm = LLM(
        str(folder),
        dtype="float32",
        num_kv_blocks=64,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        pipeline_parallel_size=3,
        trace=True,
    )
    greedy(llm, PROMPTS, 4)
    assert llm.trace is not None
    llm.trace.to_perfetto(tmp_path / "events.json")
    until: dict[int, float] = {}
    for event in json.loads((tmp_path / "events.json").read_text())["traceEvents"]:
        if event["ph"] == "X":
            assert event["dur"] > 0 and event["ts"] >= until.get(event["tid"], 0.0) - 1e-6
            until[event["tid"]] = event["ts"] + event["dur"]
    assert len(until) == 1 + len(PROMPTS)


# ---------------------------------------------------------------- real processes


@pytest.mark.parametrize(
    ("variant", "stages", "tensor", "mode"),
    [
        # By day tests/executor/test_executors.py has two stages of Llama.
        pytest.param("llama", 2, 1, "recompute", marks=pytest.mark.nightly),
        pytest.param("llama", 3, 1, "swap", marks=pytest.mark.nightly),
        ("gemma2", 3, 1, "recompute"),
        ("llama-mha-tied", 2, 2, "swap"),
    ],
)
def test_the_same_tokens_as_transformers(
    variant: str, stages: int, tensor: int, mode: Any, tmp_path: pathlib.Path
) -> None:
    make_checkpoint(tmp_path, variant)
    llm = LLM(
        str(tmp_path),
        dtype="float32",
        device="cpu",
        num_kv_blocks=26,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        preemption_mode=mode,
        swap_space=0.01,
        check_invariants=True,
        pipeline_parallel_size=stages,
        tensor_parallel_size=tensor,
    )
    try:
        ours = greedy(llm, PROMPTS, 24)
        assert ours == greedy_choices(str(tmp_path), PROMPTS, ours, 24)
        assert options_of(llm) == {"preempted": True, "found": True}
    finally:
        llm.engine.core.close()


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_course_model(stages: int) -> None:
    llm = LLM(
        dtype="float32",
        device="cpu",
        max_model_len=256,
        num_kv_blocks=64,
        max_num_batched_tokens=48,
        max_num_seqs=8,
        pipeline_parallel_size=stages,
    )
    try:
        tokenizer, folder = llm.get_tokenizer(), str(resolve_model("smollm2-135m"))
        texts = ["The moon is", "Once upon a time, " * 12, "Question: what is a pipeline? Answer:"]
        prompts = [tokenizer.encode(text) for text in texts]
        ours = greedy(llm, prompts, 16)
        assert ours == greedy_choices(folder, prompts, ours, 16)
    finally:
        llm.engine.core.close()
