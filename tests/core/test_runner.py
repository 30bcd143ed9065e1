"""The runner's tensors against a slow builder, its copies, its prompt log-probabilities, its
memory, its refusals."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nanovllm.core.prompt_logprobs
import nanovllm.core.runner
from nanovllm import LLM, SamplingParams
from nanovllm.assembly import memory
from nanovllm.assembly.runner import create_runner, runner_settings
from nanovllm.assembly.scheduling import create_manager, create_scheduler
from nanovllm.attention.base import (
    AttentionMetadata,
    ForwardContext,
    forward_context,
    kv_cache_shape,
)
from nanovllm.attention.torch import TorchBackend
from nanovllm.core.batch import Batch, RequestRows
from nanovllm.core.block_pool import InvariantError
from nanovllm.core.forward import Forward
from nanovllm.core.request import Request
from nanovllm.core.rows_ahead import RowsAhead
from nanovllm.core.runner import ModelRunner, RunnerSettings
from nanovllm.core.schedule import (
    ModelRunnerOutput,
    SampledToken,
    ScheduledRequest,
    SchedulerOutput,
)
from nanovllm.core.scheduler import Scheduler
from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineRequest
from nanovllm.data.resolved_config import resolve
from nanovllm.features.cuda_graphs import memory as gpu_memory
from nanovllm.features.cuda_graphs.graphs import ladder
from nanovllm.models.config import ModelConfig
from nanovllm.models.loader import build_model
from nanovllm.ops.device import choose_device, choose_dtype
from tests.examples import examples
from tests.oracle import TINY, make_checkpoint
from tests.stand_ins import set_backend, set_constants, set_failure, set_gpu, set_memory

SHAPE = ModelConfig.from_dict(TINY | {"architectures": ["LlamaForCausalLM"]})
GREEDY = SamplingParams(temperature=0)


class BareRunner(ModelRunner):
    """A runner without weights: enough to build batches and to reckon with memory."""

    def __init__(self, config: EngineConfig, device: str = "cpu") -> None:
        forward = Forward(build_model(SHAPE), TorchBackend())
        super().__init__(forward, torch.device(device), torch.float32, config.block_size)
        self.config = config


def num_blocks_that_fit(runner: BareRunner) -> int:
    return memory.num_blocks_that_fit(runner, runner.config, SHAPE)


def bare_runner(max_tokens: int = 40, num_blocks: int = 10, **options: Any) -> BareRunner:
    config = EngineConfig(
        **({"max_num_seqs": 3, "block_size": 4, "max_num_batched_tokens": 16} | options)
    )
    runner = BareRunner(config)
    resolved = resolve(config, model_max_len=max_tokens, num_kv_blocks=num_blocks)
    runner.allocate(runner_settings(resolved), num_blocks)
    return runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


def real_runner(folder: pathlib.Path, num_blocks: int = 8, num_host_blocks: int = 0) -> ModelRunner:
    config = EngineConfig(max_num_seqs=3, block_size=4, max_num_batched_tokens=16, dtype="float32")
    runner = create_runner(config, ModelConfig.from_pretrained(folder), folder)
    resolved = resolve(config, model_max_len=256, num_kv_blocks=num_blocks)
    runner.allocate(runner_settings(resolved), num_blocks, num_host_blocks)
    return runner


# ---------------------------------------------------------------- batches


def check_batch(batch: Batch, plan: SchedulerOutput, scheduler: Scheduler) -> None:
    """Token by token from the scheduler's own books, which the runner has never seen."""
    size, first, metadata = scheduler.manager.block_size, 0, batch.metadata
    starts, seq_lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    assert starts[0] == 0 and len(starts) == len(plan.requests) + 1 == len(seq_lens) + 1
    for i, scheduled in enumerate(plan.requests):
        request = scheduler.queues.requests[scheduled.request_id]
        table = scheduler.manager.tables[scheduled.request_id]
        for n in range(scheduled.num_tokens):
            position, row = scheduled.start + n, first + n
            assert batch.input_ids[row] == request.token_ids[position]
            assert batch.positions[row] == position
            assert metadata.slot_mapping[row] == table[position // size] * size + position % size
        first += scheduled.num_tokens
        end = scheduled.start + scheduled.num_tokens
        assert starts[i + 1] == first and seq_lens[i] == end
        pages = -(-end // size)
        assert metadata.block_tables[i, :pages].tolist() == table[:pages]
    assert len(batch.input_ids) == len(batch.positions) == len(metadata.slot_mapping) == first
    assert metadata.max_query_len == max(r.num_tokens for r in plan.requests)
    assert metadata.max_seq_len == max(seq_lens)
    assert len(set(metadata.slot_mapping.tolist())) == first, "two tokens in one slot"
    assert [t.dtype for t in (batch.input_ids, batch.positions, metadata.slot_mapping)] == [
        torch.int64
    ] * 3
    for tensor in (metadata.query_start_loc, metadata.seq_lens, metadata.block_tables):
        assert tensor.dtype == torch.int32


@settings(max_examples=examples(150), suppress_health_check=list(HealthCheck))
@given(
    data=st.data(),
    prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=7),
    block_size=st.sampled_from([1, 3, 4, 16]),
    num_seqs=st.integers(1, 4),
    extra_budget=st.sampled_from([0, 2, 9]),
    mode=st.sampled_from(["recompute", "swap"]),
    caching=st.booleans(),
)
def test_batches_of_random_schedules(
    data, prompts, block_size, num_seqs, extra_budget, mode, caching
) -> None:
    """Rows change hands, requests are preempted, come back and are aborted: every tensor of every
    step is right."""
    num_blocks = -(-30 // block_size)
    config = EngineConfig(
        block_size=block_size,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs + extra_budget,
        preemption_mode=mode,
        enable_prefix_caching=caching,
    )
    resolved = resolve(
        config,
        model_max_len=30,
        num_kv_blocks=num_blocks,
        num_host_blocks=8 if mode == "swap" else 0,
    )
    runner = BareRunner(config)
    runner.allocate(runner_settings(resolved), num_blocks)
    addresses = None
    scheduler = create_scheduler(resolved, create_manager(resolved))
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=data.draw(st.integers(1, 9)), ignore_eos=True)
        scheduler.add_request(Request(EngineRequest(f"r{i}", prompt, params), i))
    while not (plan := scheduler.schedule()).empty:
        for request_id in plan.removed_ids:
            runner.rows.remove(request_id)
        batch = runner.prepare_inputs(plan)
        check_batch(batch, plan, scheduler)
        assert runner.rows.row_of.keys() == {
            request.request_id for request in scheduler.queues.running
        }
        assert len(set(runner.rows.row_of.values())) == len(runner.rows.row_of)
        now = [
            t.data_ptr() for t in (batch.input_ids, batch.positions, batch.metadata.block_tables)
        ]
        assert addresses in (None, now), "a buffer moved"
        addresses = now
        ends = {r.request_id: r.start + r.num_tokens for r in plan.requests}
        due = [
            r
            for r in plan.requests
            if ends[r.request_id] == scheduler.queues.requests[r.request_id].num_tokens
        ]
        caught_up = [
            r.request_id
            for r, row in zip(plan.requests, batch.rows, strict=True)
            if r.start + r.num_tokens == runner.rows.num_tokens[row]
        ]
        assert caught_up == [r.request_id for r in due], "runner and scheduler disagree who samples"
        scheduler.update_from_output(
            plan,
            ModelRunnerOutput(
                {r.request_id: [SampledToken(data.draw(st.integers(0, 3)))] for r in due}
            ),
        )
        if scheduler.queues.requests and data.draw(st.integers(0, 9)) == 0:
            scheduler.abort_request(data.draw(st.sampled_from(sorted(scheduler.queues.requests))))
    assert not scheduler.has_unfinished


def test_slots_beyond_32_bits() -> None:
    runner = bare_runner(block_size=16)
    batch = runner.prepare_inputs(
        SchedulerOutput([ScheduledRequest("A", 0, 2, [5, 6], [200_000_000], GREEDY, 2)])
    )
    assert batch.metadata.slot_mapping.tolist() == [3_200_000_000, 3_200_000_001]


def test_longest_request_and_full_budget() -> None:
    """Every buffer is filled to its last entry."""
    runner = bare_runner(max_tokens=16, num_blocks=12, max_num_batched_tokens=48)
    plan = SchedulerOutput(
        [
            ScheduledRequest(
                f"r{i}", 0, 16, list(range(16)), [4 * i + j for j in range(4)], GREEDY, 16
            )
            for i in range(3)
        ]
    )
    batch = runner.prepare_inputs(plan)
    assert batch.metadata.slot_mapping.tolist() == list(range(48))
    assert batch.metadata.block_tables.flatten().tolist() == list(range(12))


def test_wider_step_leaves_nothing_behind_that_is_read() -> None:
    """Columns of an earlier, wider step stay in the buffer; those that are read are this step's."""
    runner = bare_runner()
    long = ScheduledRequest("long", 0, 16, list(range(16)), [9, 8, 7, 6], GREEDY, 16)
    runner.prepare_inputs(SchedulerOutput([long]))
    runner.rows.remove("long")
    batch = runner.prepare_inputs(
        SchedulerOutput([ScheduledRequest("short", 0, 5, [1] * 5, [2, 3], GREEDY, 5)])
    )
    assert batch.metadata.block_tables[0, :2].tolist() == [2, 3]
    assert batch.metadata.slot_mapping.tolist() == [8, 9, 10, 11, 12]


class FakeEvent:
    """Stands for a CUDA event: looks at what the host buffers hold at the moment of waiting."""

    def __init__(self, runner: BareRunner) -> None:
        self.runner, self.calls = runner, []

    def synchronize(self) -> None:
        self.calls.append(("wait", self.runner.buffers.input_ids.array[:2].tolist()))

    def record(self) -> None:
        self.calls.append(("mark", self.runner.buffers.input_ids.array[:2].tolist()))


def test_host_buffers_wait_for_their_uploads() -> None:
    """On a GPU the copies are asynchronous: the next step may not write before they were made."""
    runner = bare_runner()
    runner.buffers.uploaded = event = FakeEvent(runner)  # type: ignore[assignment]
    runner.prepare_inputs(
        SchedulerOutput([ScheduledRequest("A", 0, 2, [5, 6, 7, 8], [0], GREEDY, 4)])
    )
    runner.prepare_inputs(SchedulerOutput([ScheduledRequest("A", 2, 2, [], [])]))
    assert event.calls == [("wait", [0, 0]), ("mark", [5, 6]), ("wait", [5, 6]), ("mark", [7, 8])]


# ---------------------------------------------------------------- the replica


def admission(request_id: str, tokens: list[int], blocks: list[int]) -> ScheduledRequest:
    return ScheduledRequest(request_id, 0, len(tokens), tokens, blocks, GREEDY, len(tokens))


def test_rows_are_reused_from_the_beginning() -> None:
    rows = RequestRows(1, 8, 2)
    rows.update(SchedulerOutput([admission("A", [1, 2, 3, 4, 5], [3, 4])]))
    rows.remove("A")
    [row] = rows.update(SchedulerOutput([admission("B", [9], [7])]))
    counts = (row, rows.num_tokens[0], rows.num_blocks[0], rows.num_prompt_tokens[0])
    assert counts == (0, 1, 1, 1), (
        "row, tokens, blocks and prompt tokens of B, which has A's row now"
    )
    assert (
        rows.token_ids[0, 0] == 9
        and rows.block_tables[0, 0] == 7
        and rows.sampling[0].request_id == "B"
    )


@dataclasses.dataclass
class PlainRow:
    """What a request's row must hold, in Python's lists."""

    num_prompt_tokens: int
    known: list[int]
    blocks: list[int]
    unknown: list[int] = dataclasses.field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.known + self.unknown


NAMES = st.sampled_from("ABCDE")
NEW_TOKENS = st.lists(st.integers(1, 99), max_size=3)


@settings(max_examples=examples(200), suppress_health_check=list(HealthCheck))
@given(st.data())
def test_rows_are_those_of_a_plain_replica(data: st.DataObject) -> None:
    """Requests come, go and come again, with chunks, pending and extra tokens; in many steps, the
    same requests sample as in the step before."""
    rows = RowsAhead(max_num_seqs=3, max_tokens=60, max_blocks=40, eos_token_ids=[7])
    plain: dict[str, PlainRow] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        plan = SchedulerOutput()
        if plain and data.draw(st.integers(0, 4)) == 0:
            name = data.draw(st.sampled_from(sorted(plain)))
            rows.remove(name)
            del plain[name]
        if len(plain) < 3 and data.draw(st.booleans()):
            name = data.draw(NAMES.filter(lambda name: name not in plain))
            prompt = data.draw(st.lists(st.integers(1, 99), min_size=1, max_size=5))
            plain[name] = PlainRow(len(prompt), prompt, [len(prompt)])
            count = data.draw(st.integers(1, len(prompt)))
            params = GREEDY.clone(stop_token_ids=[len(prompt)])
            plan.add(ScheduledRequest(name, 0, count, prompt, [len(prompt)], params, len(prompt)))
        for name in data.draw(
            st.permutations(sorted(plain.keys() - {s.request_id for s in plan.requests}))
        ):
            row = plain[name]
            new_tokens = data.draw(NEW_TOKENS)
            new_blocks = data.draw(st.lists(st.integers(0, 9), max_size=2))
            is_pending = data.draw(st.booleans())
            extra = data.draw(st.lists(st.integers(1, 99), max_size=2))
            row.known += new_tokens
            row.blocks += new_blocks
            row.unknown = [0] * is_pending + extra
            start = len(row.tokens) - len(extra) - 1
            plan.add(
                ScheduledRequest(
                    name,
                    start,
                    1 + len(extra),
                    new_tokens,
                    new_blocks,
                    last_is_pending=is_pending,
                    extra_token_ids=extra,
                )
            )
        if plan.empty:
            continue
        found = rows.update(plan)
        for scheduled, number in zip(plan.requests, found.tolist(), strict=True):
            row = plain[scheduled.request_id]
            assert number == rows.row_of[scheduled.request_id]
            assert rows.token_ids[number, : rows.num_tokens[number]].tolist() == row.tokens
            assert rows.num_known[number] == len(row.known)
            assert rows.block_tables[number, : rows.num_blocks[number]].tolist() == row.blocks
            assert rows.num_prompt_tokens[number] == row.num_prompt_tokens
        check_sampling_rows(rows, plan, found, plain)
    assert rows.row_of.keys() == plain.keys()


def check_sampling_rows(
    rows: RequestRows, plan: SchedulerOutput, found: np.ndarray, plain: dict[str, PlainRow]
) -> None:
    """Each due token has seen what comes before it, and no more."""
    due = [
        (scheduled.request_id, num_later)
        for scheduled, number in zip(plan.requests, found.tolist(), strict=True)
        if scheduled.start + scheduled.num_tokens == rows.num_tokens[number]
        for num_later in range(len(scheduled.extra_token_ids), -1, -1)
    ]
    due_ids = [name for name, _ in due]
    sampling_rows = rows.sampling_rows(list(due_ids))
    for row, (name, num_later) in zip(sampling_rows, due, strict=True):
        tokens = plain[name].tokens
        num_seen = len(tokens) - num_later
        assert row.request_id == name and list(row.token_ids) == tokens[:num_seen]
        assert row.num_output_tokens == num_seen - plain[name].num_prompt_tokens
        assert row.stop_ids == [plain[name].num_prompt_tokens, 7]
    for i in range(len(sampling_rows)):
        sampling_rows[i] = dataclasses.replace(sampling_rows[i], request_id="a feature's")
    again = rows.sampling_rows(due_ids)
    assert [row.request_id for row in again] == due_ids, "a feature's list"


def test_admitted_twice() -> None:
    rows = RequestRows(2, 8, 2)
    rows.update(SchedulerOutput([admission("A", [1], [0])]))
    with pytest.raises(InvariantError, match="A is admitted"):
        rows.update(SchedulerOutput([admission("A", [1], [0])]))


def test_lost_schedule() -> None:
    rows = RequestRows(2, 8, 2)
    rows.update(SchedulerOutput([admission(name, [1, 2], [0]) for name in "AB"]))
    plan = SchedulerOutput(
        [ScheduledRequest("A", 2, 1, [3], []), ScheduledRequest("B", 3, 1, [4], [])]
    )
    with pytest.raises(InvariantError, match=r"B is .* up to token 4, but only 3 are known"):
        rows.update(plan)


def test_removed_and_admitted_in_the_same_step(folder) -> None:
    """A name that ends and comes again, or a request that is thrown out and let in at once, starts
    afresh."""
    runner = real_runner(folder)
    prompt = [5, 6, 7, 8, 9]
    runner.execute_model(SchedulerOutput([admission("A", [50, 51, 52], [0])]))
    again = runner.execute_model(
        SchedulerOutput([admission("A", prompt, [2, 1])], removed_ids=["A"])
    )
    assert again.sampled["A"][0].token_id == int(full_logits(runner.model, prompt)[-1].argmax())
    assert runner.rows.row_of == {"A": 0}


def test_an_empty_schedule_changes_nothing(folder) -> None:
    runner = real_runner(folder)
    runner.execute_model(SchedulerOutput([admission("A", [1, 2], [0])]))
    caches = [cache.clone() for cache in runner.kv_caches]
    assert runner.execute_model(SchedulerOutput()) == ModelRunnerOutput()
    assert "A" in runner.rows.row_of
    assert all(map(torch.equal, caches, runner.kv_caches))


# ---------------------------------------------------------------- moving blocks


def test_swap_copies_come_first_and_out_before_in(folder) -> None:
    """Block 3 is rescued, filled with what comes back, and block 5 is rescued before the step
    writes to it."""
    runner = real_runner(folder, num_blocks=8, num_host_blocks=4)
    torch.manual_seed(0)
    for cache in runner.kv_caches + runner.host_caches:
        cache.copy_(torch.randn(cache.shape))
    device, host = (
        [cache.clone() for cache in caches] for caches in (runner.kv_caches, runner.host_caches)
    )
    runner.execute_model(
        SchedulerOutput(
            [admission("A", [4, 5, 6, 7], [5])],
            swap_out=[(3, 0), (5, 2)],
            swap_in=[(1, 3), (0, 6)],  # host block 0 was filled in this very step
        )
    )
    for layer, (old, old_host) in enumerate(zip(device, host, strict=True)):
        cache, host_cache = runner.kv_caches[layer], runner.host_caches[layer]
        assert torch.equal(host_cache[0], old[3]) and torch.equal(host_cache[2], old[5])
        assert torch.equal(cache[3], old_host[1]) and torch.equal(cache[6], old[3])
        assert not torch.equal(cache[5], old[5]), "the step wrote there"
        for untouched in (0, 1, 2, 4, 7):
            assert torch.equal(cache[untouched], old[untouched])
        for untouched in (1, 3):
            assert torch.equal(host_cache[untouched], old_host[untouched])


# ---------------------------------------------------------------- logits


@torch.inference_mode()
def full_logits(model, token_ids: list[int]) -> torch.Tensor:
    """`[num_tokens, vocab_size]` by one dense prefill in one block of its own."""
    config, n = model.config, len(token_ids)
    shape = kv_cache_shape(1, config.num_kv_heads, n, config.head_dim)
    metadata = AttentionMetadata(
        torch.tensor([0, n], dtype=torch.int32),
        torch.tensor([n], dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.arange(n),
        n,
        n,
    )
    caches = [torch.zeros(shape) for _ in range(config.num_layers)]
    with forward_context(ForwardContext(TorchBackend(), caches, metadata)):
        return model.compute_logits(model(torch.tensor(token_ids), torch.arange(n)))


@pytest.mark.parametrize("budget", [3, 16, 512])
@pytest.mark.parametrize(
    "preemption",
    [
        {},
        {"num_kv_blocks": 18},
        {"num_kv_blocks": 18, "preemption_mode": "swap", "swap_space": 0.001},
    ],
)
def test_prompt_logprobs(folder, monkeypatch, budget, preemption) -> None:
    """Of several requests beside each other, in chunks, in slices, and across preemptions."""
    set_constants(monkeypatch, nanovllm.core.prompt_logprobs, LOGPROB_ROWS=7)
    llm = LLM(
        str(folder),
        dtype="float32",
        max_num_seqs=3,
        max_num_batched_tokens=budget,
        block_size=4,
        check_invariants=True,
        max_model_len=64,
        **preemption,
    )
    prompts = [[(i * i + 7 * n) % 300 + 3 for i in range(n)] for n in (1, 2, 30, 8)]
    params = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, prompt_logprobs=k)
        for k in (2, 0, 3, 1)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    if preemption:
        assert llm.engine.core.stats.num_preemptions > 0
    for prompt, param, output in zip(prompts, params, outputs, strict=True):
        graded = output.prompt_logprobs
        assert graded is not None and graded[0] is None and len(graded) == len(prompt)
        reference = full_logits(llm.engine.core.runner.model, prompt).log_softmax(dim=1)
        for position in range(1, len(prompt)):
            entry, row = graded[position], reference[position - 1]
            assert entry is not None
            own = entry[prompt[position]]
            assert own.logprob == pytest.approx(float(row[prompt[position]]), abs=1e-3)
            assert own.rank == int((row > row[prompt[position]]).sum()) + 1
            best = row.topk(param.prompt_logprobs).indices.tolist()
            assert set(entry) == {prompt[position], *best}


def test_only_last_rows_become_logits(folder, monkeypatch) -> None:
    llm = LLM(str(folder), dtype="float32", max_num_seqs=3, max_num_batched_tokens=16)
    rows: list[int] = []
    head = llm.engine.core.runner.model.lm_head
    head.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.generate([[9] * 40, [8] * 5, [7]], params, use_tqdm=False)
    assert sum(rows) == 3 * 4 and max(rows) <= 3


# ---------------------------------------------------------------- memory


def test_bytes_per_block_are_the_bytes_that_are_held() -> None:
    runner = bare_runner(num_blocks=10)
    assert sum(cache.nbytes for cache in runner.kv_caches) == 10 * runner.bytes_per_block
    # K and V, layers, KV heads, channels, tokens, bytes.
    assert runner.bytes_per_block == 2 * 3 * 2 * 16 * 4 * 4


def test_number_of_blocks_as_told() -> None:
    size = BareRunner(EngineConfig()).bytes_per_block
    assert num_blocks_that_fit(BareRunner(EngineConfig(num_kv_blocks=7, kv_cache_memory="1"))) == 7
    assert num_blocks_that_fit(BareRunner(EngineConfig(kv_cache_memory=str(3 * size - 1)))) == 2
    # More than one request of 256 tokens can fill: the rest is room for the prefix cache.
    assert (
        num_blocks_that_fit(
            BareRunner(EngineConfig(max_num_seqs=1, kv_cache_memory=str(100 * size)))
        )
        == 100
    )


def test_number_of_blocks_by_default(monkeypatch) -> None:
    size = BareRunner(EngineConfig()).bytes_per_block

    def with_free(available: int, **options: Any) -> int:
        set_memory(monkeypatch, available)
        return num_blocks_that_fit(BareRunner(EngineConfig(**options)))

    assert with_free(4 * 10 * size) == 10, "a quarter of the free memory"
    few = with_free(2**50, max_num_seqs=2, max_model_len=33)
    assert few == 2 * 3, "no more blocks than two requests of 33 tokens fill"
    assert with_free(2**50, max_num_seqs=10**9) == 4 * 2**30 // size, "at most 4 GiB"
    with pytest.raises(ValueError, match=r"kv_cache_memory.*block_size"):
        with_free(4 * size - 4)


def set_profile(patch: pytest.MonkeyPatch, **profile: int) -> None:
    """What a GPU's memory is taken for, in place of a measurement."""
    found = gpu_memory.MemoryProfile(**profile)
    patch.setattr(gpu_memory, "profile_run", lambda *arguments: found)


def test_number_of_blocks_on_a_gpu(monkeypatch) -> None:
    size = BareRunner(EngineConfig()).bytes_per_block
    config = EngineConfig(gpu_memory_utilization=0.75)

    def with_use(in_use: int, config: EngineConfig = config) -> int:
        set_profile(
            monkeypatch,
            total=200 * size,
            in_use=in_use * size,
            weights=50 * size,
            activations=8 * size,
            graphs=2 * size,
        )
        return num_blocks_that_fit(BareRunner(config, "cuda"))

    assert with_use(60) == 150 - 60 - 8 - 2
    alone = dataclasses.replace(config, max_num_seqs=1)
    assert with_use(60, alone) == 256 // config.block_size, "no more than one request can fill"
    with pytest.raises(
        ValueError, match="into 0 bytes: raise kv_cache_memory or, on a GPU, gpu_mem"
    ):
        with_use(140)


@pytest.mark.parametrize("told", [{"num_kv_blocks": 7}, {"kv_cache_memory": "1GiB"}])
def test_no_profile_where_the_size_is_told(monkeypatch, told) -> None:
    runner = BareRunner(EngineConfig(**told), "cuda")
    measured = AssertionError("measured, though it was told")
    set_failure(monkeypatch, gpu_memory, "profile_run", measured)
    assert num_blocks_that_fit(runner) > 0


def test_where_the_memory_went(monkeypatch, caplog) -> None:
    runner, gib = BareRunner(EngineConfig(gpu_memory_utilization=0.5), "cuda"), 2**30
    set_profile(
        monkeypatch,
        total=100 * gib,
        in_use=20 * gib,
        weights=16 * gib,
        activations=5 * gib,
        graphs=1 * gib,
    )
    with caplog.at_level(logging.INFO):
        assert gpu_memory.free_memory(runner, runner.config, 256) == 24 * gib
    assert (
        "100.00 GiB, of which 50 % may be used: weights 16.00 GiB, activations 5.00 GiB, graphs"
        " 1.00 GiB, other 4.00 GiB; that leaves 24.00 GiB for the KV pool" in caplog.text
    )


def test_too_little_memory_for_the_largest_step_or_the_pool(monkeypatch) -> None:
    full = torch.OutOfMemoryError("CUDA out of memory")
    runner = BareRunner(EngineConfig(), "cuda")
    set_failure(monkeypatch, gpu_memory, "profile_run", full)
    with pytest.raises(
        ValueError, match="largest step: lower max_num_batched_tokens or max_num_seqs"
    ):
        num_blocks_that_fit(runner)

    def fail(*arguments: Any) -> Any:
        raise full

    runner.make_cache = fail
    with pytest.raises(
        ValueError, match="KV cache: lower num_kv_blocks, kv_cache_memory or gpu_memory"
    ):
        runner.allocate(RunnerSettings(1, 4, 1, 4, 1, 1), 10**9)


class FakeMemory:
    """Stands for torch's and CUDA's counters. Free memory falls by what each call of `graphs` is to
    take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: list[int]) -> None:
        self.free, self.allocated = list(free), [700, 750]
        answers = {
            "empty_cache": lambda: None,
            "synchronize": lambda device: None,
            "reset_peak_memory_stats": lambda device: None,
            "memory_allocated": lambda device: self.allocated.pop(0),
            "max_memory_allocated": lambda device: 1000,
            "mem_get_info": lambda device: (self.free.pop(0), 10_000),
        }
        set_gpu(monkeypatch, **answers)


class NoGraph:
    """Does not even run."""

    def capture(self, work: Any, pool: Any) -> Any:
        return work


@pytest.mark.parametrize(
    ("options", "tokens", "rows"),
    [
        ({"max_num_seqs": 3, "max_num_batched_tokens": 16}, 16, 3),  # 6, 5 and 5
        # No longer than allowed.
        ({"max_num_seqs": 3, "max_num_batched_tokens": 16, "max_model_len": 4}, 12, 3),
        ({"max_num_seqs": 1, "max_num_batched_tokens": 999}, 256, 1),
        ({"max_num_seqs": 2, "enable_chunked_prefill": False, "max_model_len": 100}, 200, 2),
    ],
)
def test_largest_step(folder, monkeypatch, options, tokens, rows) -> None:
    """The profile's step is as large as a step can be, is a step that a backend accepts, and is
    accounted for."""
    config = EngineConfig(dtype="float32", block_size=4, **options)
    model_config = ModelConfig.from_pretrained(folder)
    set_backend(monkeypatch, TorchBackend, NoGraph)
    runner = create_runner(config, model_config, folder)
    longest = memory.longest_request(config, model_config)
    shapes: list[int] = []
    for module in (runner.model, runner.model.lm_head):
        module.register_forward_pre_hook(lambda _, inputs: shapes.append(len(inputs[0])))
    # After the step; before the graphs; after the largest; after the next.
    FakeMemory(monkeypatch, [9000, 8990, 8490, 8480])
    profile = gpu_memory.profile_run(runner, config, longest)
    assert shapes[:2] == [tokens, rows]
    assert not any(cache.any() for cache in runner.kv_caches), "the step wrote into the cache"
    graphs = 500 + 10 * (len(ladder(rows)) - 1) if rows > 1 else 500
    assert profile == gpu_memory.MemoryProfile(
        total=10_000, in_use=1000, weights=700, activations=1000 - 750, graphs=graphs
    )
    eager = create_runner(replace(config, enforce_eager=True), model_config, folder)
    FakeMemory(monkeypatch, [9000])
    assert gpu_memory.profile_run(eager, config, longest).graphs == 0


def test_no_block_fits() -> None:
    runner = BareRunner(EngineConfig(kv_cache_memory="100"))
    with pytest.raises(ValueError, match=f"{runner.bytes_per_block} bytes fits into 100 bytes"):
        num_blocks_that_fit(runner)


# ---------------------------------------------------------------- device and dtype


def test_device(monkeypatch) -> None:
    set_gpu(monkeypatch, is_available=False, is_built=True)
    assert choose_device("auto").type == choose_device("cpu").type == "cpu"
    with pytest.raises(
        ValueError, match=r"torch \S+ sees no CUDA GPU: check that `nvidia-smi`.*use --device cpu"
    ):
        choose_device("cuda")
    set_gpu(monkeypatch, is_built=False)
    with pytest.raises(
        ValueError,
        match=r"torch \S+ sees no CUDA GPU: it is built without CUDA; .*use --device cpu",
    ):
        choose_device("cuda")
    set_gpu(monkeypatch, is_built=True, is_available=True)
    assert choose_device("auto").type == choose_device("cuda").type == "cuda"
    assert choose_device("cpu").type == "cpu"


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64"])
def test_dtype_as_told(name: str) -> None:
    assert choose_dtype(name, torch.device("cpu")) is getattr(torch, name)


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({}, torch.float32),
        ({"avx512_f": True, "avx512_bf16": False}, torch.float32),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
    ],
)
def test_dtype_of_a_cpu(monkeypatch, capabilities, expected) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert choose_dtype("auto", torch.device("cpu")) is expected
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert choose_dtype("auto", torch.device("cpu")) is torch.float32


def test_dtype_of_a_gpu_that_only_emulates_bfloat16(monkeypatch) -> None:
    emulates = {True: True, False: False}  # what torch answers for a T4
    set_gpu(
        monkeypatch,
        is_bf16_supported=lambda including_emulation=True: emulates[including_emulation],
    )
    assert choose_dtype("auto", torch.device("cuda")) is torch.float16
    emulates[False] = True
    assert choose_dtype("auto", torch.device("cuda")) is torch.bfloat16


@pytest.mark.parametrize("native", [False, True])
def test_bfloat16_on_an_old_gpu(monkeypatch, native) -> None:
    set_gpu(
        monkeypatch,
        is_bf16_supported=lambda including_emulation=True: native or including_emulation,
    )
    gpu = torch.device("cuda")
    assert (
        choose_dtype("half", gpu) is torch.float16 and choose_dtype("float", gpu) is torch.float32
    )
    if native:
        assert choose_dtype("bfloat16", gpu) is torch.bfloat16
    else:
        with pytest.raises(
            ValueError, match=r"cannot multiply bfloat16, which needs .* 8.0: use --dtype half"
        ):
            choose_dtype("bfloat16", gpu)
