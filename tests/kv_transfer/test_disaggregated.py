"""Prefill here, decode there: whoever computes what, no token changes; and keys and values have
really moved."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import random
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.assembly.engine import Engine
from nanovllm.data.trace_settings import TraceSettings
from nanovllm.lab.viz.data import pool_states
from nanovllm.trace.format import TraceDecoder, TraceEncoder
from nanovllm.trace.trace import StepRecord, Trace
from tests.kv_engines import Fleet, ask, decode_first, make_engine
from tests.oracle import greedy, make_checkpoint, reference_tokens
from tests.pairwise import covering_sets, in_turn, possible_pairs

OUTPUT_LEN = 14
WAYS = ("prefill first", "pull", "push")
BLOCK_SIZE = 8
HAS_NIXL = importlib.util.find_spec("nixl_cu12") is not None

# By feature, what the consumer and the producer are asked for in particular; "pool" is a KV pool in
# tokens.
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "consumer without prefix cache": ({"enable_prefix_caching": False}, {}),
    "producer without prefix cache": ({}, {"enable_prefix_caching": False}),
    "chunks of 7": ({"long_prefill_token_threshold": 7}, {"long_prefill_token_threshold": 7}),
    "budget of 12": (
        {"max_num_batched_tokens": 12, "max_num_seqs": 8},
        {"max_num_batched_tokens": 12, "max_num_seqs": 8},
    ),
    "whole prompts": ({"enable_chunked_prefill": False}, {"enable_chunked_prefill": False}),
    "prefill_first policy": (
        {"batching_policy": "prefill_first"},
        {"batching_policy": "prefill_first"},
    ),
    "static": ({"batching_policy": "static"}, {"batching_policy": "static"}),
    "recompute": ({"pool": 128}, {}),
    "swap": ({"pool": 128, "preemption_mode": "swap", "swap_space": 0.01}, {}),
    "small producer": ({}, {"pool": 128}),
    "blocks of 1": ({"block_size": 1}, {"block_size": 1}),
    "blocks of 64": ({"block_size": 64}, {"block_size": 64}),
    "one at a time": ({"max_num_seqs": 1}, {"max_num_seqs": 1}),
    "async scheduling": ({"async_scheduling": True}, {"async_scheduling": True}),
    "priority": ({"scheduling_policy": "priority"}, {"scheduling_policy": "priority"}),
    "both roles": ({"role": "kv_both"}, {"role": "kv_both"}),
}
PREEMPTING = ("recompute", "swap")
IMPOSSIBLE = [
    {"whole prompts", "budget of 12"},
    {"blocks of 64", "recompute"},
    {"blocks of 64", "swap"},
]


def prompts() -> list[list[int]]:
    """Lengths around those of a block, a shared beginning of 37 tokens, two equal prompts."""
    draw = random.Random(7)
    shared = [draw.randrange(3, 320) for _ in range(37)]
    alone = [[draw.randrange(3, 320) for _ in range(length)] for length in (1, 7, 8, 9, 70)]
    together = [shared + [draw.randrange(3, 320) for _ in range(length)] for length in (1, 12, 27)]
    return [*alone, *together, together[1]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> list[list[int]]:
    return [reference_tokens(checkpoint, prompt, OUTPUT_LEN) for prompt in prompts()]


def engine(checkpoint: str, options: dict[str, Any], role: str, extra: dict[str, Any]) -> Any:
    """One with these features; however short a prompt is, its KV is fetched."""
    options = dict(options)
    size, pool = options.get("block_size", BLOCK_SIZE), options.pop("pool", 2048)
    settings = {"kv_connector_extra_config": {"min_remote_tokens": 1}} | extra
    role = options.pop("role", role)
    return make_engine(checkpoint, role, settings, num_kv_blocks=pool // size, **options)


def make_fleet(checkpoint: str, *features: str, **extra: Any) -> Fleet:
    """A producer and a consumer with these features."""
    consumer: dict[str, Any] = {}
    producer: dict[str, Any] = {}
    for feature in features:
        consumer |= FEATURES[feature][0]
        producer |= FEATURES[feature][1]
    return Fleet(
        [
            engine(checkpoint, producer, "kv_producer", extra),
            engine(checkpoint, consumer, "kv_consumer", extra),
        ]
    )


def send(fleet: Fleet, way: str, request_id: str, prompt: list[int], **options: Any) -> None:
    """Ask the consumer; prefill first: once the producer has answered."""
    producer, consumer = fleet.engines
    if way != "prefill first":
        return ask(consumer, request_id, prompt, params=decode_first(producer, way), **options)
    ask(producer, f"{request_id} there", prompt, 1, {"do_remote_decode": True})
    fleet.complete(f"{request_id} there")
    answer = fleet.finished(f"{request_id} there")
    assert answer is not None and answer.kv_transfer_params is not None
    ask(consumer, request_id, prompt, params=answer.kv_transfer_params, **options)


def run(
    fleet: Fleet, way: str, batch: list[list[int]], count: int = OUTPUT_LEN, name: str = "r"
) -> list[list[int]]:
    """Tokens by prompt; all are under way together."""
    for i, prompt in enumerate(batch):
        send(fleet, way, f"{name}{i}", prompt, max_tokens=count)
    tokens = [fleet.complete(f"{name}{i}") for i in range(len(batch))]
    fleet.settle()
    return tokens


@pytest.fixture
def fleets() -> Iterator[list[Fleet]]:
    """Those in it are closed at the end."""
    made: list[Fleet] = []
    yield made
    for fleet in made:
        fleet.close()


@pytest.mark.parametrize(("feature", "way"), in_turn(FEATURES, WAYS))
def test_alone(
    feature: str, way: str, checkpoint: str, expected: list[list[int]], fleets: list[Fleet]
) -> None:
    fleets.append(fleet := make_fleet(checkpoint, feature))
    producer, consumer = fleet.engines
    assert run(fleet, way, prompts()) == expected
    stats = consumer.stats
    # All of each prompt that the consumer's own cache had not; the last token of each is computed.
    assert stats.num_external_hit_tokens == stats.num_external_queried_tokens - len(prompts())
    cached = [fleet.finished(f"r{i}").num_cached_tokens for i in range(len(prompts()))]
    fetched = [len(prompt) - 1 for prompt in prompts()]
    if feature in PREEMPTING:
        # A request that loses its blocks before its first step finds fewer of them when it returns.
        assert all(here <= there for here, there in zip(cached, fetched, strict=True))
    else:
        assert cached == fetched
    first = run(fleet, way, prompts(), name="again")  # meets what is in both caches
    assert first == expected
    used = {
        "consumer without prefix cache": consumer.stats.num_hit_tokens == 0,
        "producer without prefix cache": producer.stats.num_hit_tokens == 0,
    } | dict.fromkeys(PREEMPTING, consumer.stats.num_preemptions > 0)
    assert used.get(feature, consumer.stats.num_hit_tokens > 0)


def fit(one: str, other: str) -> bool:
    shared = any(FEATURES[one][side].keys() & FEATURES[other][side].keys() for side in (0, 1))
    return {one, other} not in IMPOSSIBLE and not shared


SETS, PAIRS = covering_sets(list(FEATURES), fit), possible_pairs(list(FEATURES), fit)
IN_TURN = itertools.cycle(WAYS)


@pytest.mark.parametrize(
    ("features", "way"),
    [(features, next(IN_TURN)) for features in SETS]
    + [pytest.param(pair, next(IN_TURN), marks=pytest.mark.nightly) for pair in PAIRS],
    ids=lambda value: value if isinstance(value, str) else " + ".join(value),
)
def test_together(
    features: tuple[str, ...],
    way: str,
    checkpoint: str,
    expected: list[list[int]],
    fleets: list[Fleet],
) -> None:
    """Every pair occurs in one of the sets; nightly, each is also tested alone."""
    fleets.append(fleet := make_fleet(checkpoint, *features))
    assert run(fleet, way, prompts()) == expected
    assert fleet.engines[1].stats.num_external_hit_tokens > 0
    connections = psutil.Process().net_connections("inet")
    assert {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN} == {"127.0.0.1"}


@pytest.mark.parametrize("way", WAYS)
def test_each_has_another_part(
    way: str, checkpoint: str, expected: list[list[int]], fleets: list[Fleet]
) -> None:
    """The consumer has two blocks of the prompt in its cache, the producer three others of it: only
    the rest is computed, only what is missing is moved."""
    fleets.append(fleet := make_fleet(checkpoint))
    producer, consumer = fleet.engines
    prompt = prompts()[6]
    ask(consumer, "short", prompt[:17], 1)
    ask(producer, "longer", prompt[:41], 1)
    fleet.complete("short")
    fleet.complete("longer")
    assert run(fleet, way, [prompt]) == [expected[6]]
    assert producer.stats.num_hit_tokens == 40
    assert consumer.stats.num_external_hit_tokens == len(prompt) - 1 - 16
    assert fleet.finished("r0").num_cached_tokens == len(prompt) - 1


def test_what_the_cache_has_is_not_fetched(
    checkpoint: str, expected: list[list[int]], fleets: list[Fleet]
) -> None:
    """As it is set by default: a rest of one block is computed, and the producer need not hold
    anything for it."""
    fleets.append(fleet := make_fleet(checkpoint, kv_connector_extra_config={}))
    for way in WAYS:
        assert run(fleet, way, prompts(), name=way) == expected
        hits = fleet.engines[1].stats.num_external_hit_tokens
        assert run(fleet, way, prompts(), name=f"{way} again") == expected
        assert fleet.engines[1].stats.num_external_hit_tokens == hits, (
            "something came that was there"
        )
        fleet.engines[1].reset_prefix_cache()


@pytest.mark.parametrize("way", WAYS)
def test_what_is_sampled_does_not_change(way: str, checkpoint: str, fleets: list[Fleet]) -> None:
    """Seeds and log-probabilities, as one engine alone has them."""
    alone = make_engine(checkpoint)
    fleets.extend(
        [Fleet([alone]), fleet := make_fleet(checkpoint, "consumer without prefix cache")]
    )
    prompt = prompts()[6]
    for i in range(3):
        sampling = {"temperature": 0.9, "seed": i, "logprobs": 2}
        ask(alone, f"r{i}", prompt, **sampling)
        fleets[0].complete(f"r{i}")
        send(fleet, way, f"r{i}", prompt, **sampling)
    for i in range(3):
        assert fleet.complete(f"r{i}") == fleets[0].tokens(f"r{i}")
        here, there = (
            [o.logprobs[0] for o in f.outputs[f"r{i}"] if o.logprobs] for f in (fleets[0], fleet)
        )
        assert [entry.token_ids for entry in here] == [entry.token_ids for entry in there]
        for one, other in zip(here, there, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert fleet.engines[1].stats.num_external_hit_tokens == 3 * (len(prompt) - 1)
    fleet.settle()


@pytest.mark.parametrize("way", WAYS)
def test_prompt_logprobs_take_nothing(
    way: str, checkpoint: str, expected: list[list[int]], fleets: list[Fleet]
) -> None:
    fleets.append(fleet := make_fleet(checkpoint))
    send(fleet, way, "r", prompts()[6], prompt_logprobs=1)
    assert fleet.complete("r") == expected[6]
    entries = [entry for output in fleet.outputs["r"] for entry in output.prompt_logprobs or ()]
    assert len(entries) == len(prompts()[6]) - 1
    assert fleet.engines[1].stats.num_external_queried_tokens == 0
    fleet.settle()


def test_three_sequences_share_what_one_prompt_has_left(
    checkpoint: str, expected: list[list[int]], fleets: list[Fleet]
) -> None:
    """Prefill first, n = 3: all three read the same blocks, which are held until the last of them
    has."""
    fleets.append(fleet := make_fleet(checkpoint, kv_load_failure_policy="fail"))
    producer, consumer = fleet.engines
    ask(producer, "there", prompts()[4], 1, {"do_remote_decode": True})
    fleet.complete("there")
    params = fleet.finished("there").kv_transfer_params
    for i in range(3):
        ask(consumer, f"r{i}", prompts()[4], params=params)
    assert [fleet.complete(f"r{i}") for i in range(3)] == [expected[4]] * 3
    assert consumer.stats.num_external_hit_tokens == 3 * 69
    fleet.settle()


@pytest.mark.parametrize("variant", ["mixtral", "deepseek-v2", "gemma2", "qwen2-window"])
def test_other_models(variant: str, tmp_path: Any, fleets: list[Fleet]) -> None:
    """Experts, a latent cache, windows."""
    checkpoint = str(make_checkpoint(tmp_path, variant))
    fleets.append(fleet := make_fleet(checkpoint))
    batch = [prompts()[4], prompts()[6]]
    expected = [reference_tokens(checkpoint, prompt, OUTPUT_LEN) for prompt in batch]
    for way in WAYS:
        assert run(fleet, way, batch, name=way) == expected
        fleet.engines[1].reset_prefix_cache()
    assert fleet.engines[1].stats.num_external_hit_tokens == 3 * (69 + 48)


def test_16_bits(checkpoint: str, fleets: list[Fleet]) -> None:
    """What moves are bytes: in bfloat16, tokens are those of one engine with the same type."""
    fleets.extend([Fleet([make_engine(checkpoint, dtype="bfloat16")]), fleet := Fleet([])])
    fleet.engines = [
        make_engine(checkpoint, role, dtype="bfloat16") for role in ("kv_producer", "kv_consumer")
    ]
    prompt = prompts()[4]
    ask(fleets[0].engines[0], "r", prompt)
    expected = fleets[0].complete("r")
    for way in WAYS:
        assert run(fleet, way, [prompt], name=way) == [expected]
        fleet.engines[1].reset_prefix_cache()
    assert fleet.engines[1].stats.num_external_hit_tokens == 3 * 69


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_8_bits(kind: str, way: str, checkpoint: str, fleets: list[Fleet]) -> None:
    """Blocks of a quantized cache, scales and all, are the bytes that the consumer would have
    written itself."""
    alone = LLM(
        checkpoint, dtype="float32", kv_cache_dtype=kind, block_size=BLOCK_SIZE, num_kv_blocks=256
    )
    expected = greedy(alone, prompts(), OUTPUT_LEN)
    fleets.append(fleet := Fleet([]))
    for role, options in (("kv_producer", {}), ("kv_consumer", {"pool": 256})):
        fleet.engines.append(engine(checkpoint, {"kv_cache_dtype": kind} | options, role, {}))
    assert run(fleet, way, prompts()) == expected
    stats = fleet.engines[1].stats
    assert stats.num_external_hit_tokens == stats.num_external_queried_tokens - len(prompts())


def test_several_of_each(checkpoint: str, expected: list[list[int]], fleets: list[Fleet]) -> None:
    """Two producers, two consumers, and one that is both; everybody with everybody."""
    roles = ("kv_producer", "kv_producer", "kv_consumer", "kv_consumer", "kv_both")
    fleets.append(
        fleet := Fleet(
            [engine(checkpoint, {"enable_prefix_caching": False}, role, {}) for role in roles]
        )
    )
    pairs = [(p, c) for p in (0, 1, 4) for c in (2, 3, 4) if p != c]
    for i, (p, c) in enumerate(pairs):
        params = decode_first(fleet.engines[p], WAYS[1 + i % 2])
        ask(fleet.engines[c], f"r{i}", prompts()[i], params=params)
    assert [fleet.complete(f"r{i}") for i in range(len(pairs))] == expected[: len(pairs)]
    fetched = sum(len(prompts()[i]) - 1 for i in range(len(pairs)))
    assert sum(e.stats.num_external_hit_tokens for e in fleet.engines) == fetched
    fleet.settle()


@pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed: pip install 'nanovllm[nixl]'")
@pytest.mark.parametrize("way", WAYS)
def test_nixl(way: str, checkpoint: str, expected: list[list[int]], fleets: list[Fleet]) -> None:
    fleets.append(fleet := make_fleet(checkpoint, kv_connector="nixl"))
    assert run(fleet, way, prompts()) == expected
    assert fleet.engines[1].stats.num_external_hit_tokens > 0


# What is parallel on the producer, and on the consumer.
PARALLEL = [
    ({}, {"tensor_parallel_size": 2}, "push"),
    ({"tensor_parallel_size": 2}, {}, "prefill first"),
    ({"tensor_parallel_size": 2}, {"tensor_parallel_size": 2}, "pull"),
    ({"pipeline_parallel_size": 2}, {}, "push"),
    ({}, {"pipeline_parallel_size": 2}, "prefill first"),
]


@pytest.mark.parametrize(("there", "here", "way"), PARALLEL)
def test_ranks(
    there: Any, here: Any, way: str, checkpoint: str, expected: list[list[int]], fleets: list[Fleet]
) -> None:
    """Each rank gets its part from those that have it."""
    fleets.append(fleet := Fleet([]))
    fleet.engines = [engine(checkpoint, there, "kv_producer", {})]
    fleet.engines.append(engine(checkpoint, here, "kv_consumer", {}))
    batch = prompts()[3:7]
    assert run(fleet, way, batch) == expected[3:7]
    stats = fleet.engines[1].stats
    assert stats.num_external_hit_tokens == stats.num_external_queried_tokens - 4 > 0


def test_offline(checkpoint: str) -> None:
    """Without a server: the producer's answer says where the KV is, and a thread gives it away when
    nobody steps any more."""
    options = {"dtype": "float32", "num_kv_blocks": 64, "block_size": 8, "max_model_len": 120}
    producer, consumer = (
        LLM(checkpoint, kv_role=role, **options) for role in ("producer", "consumer")
    )
    prompt = [5 + i * 7 % 300 for i in range(43)]
    first = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    asked = {"prompt_token_ids": prompt, "kv_transfer_params": {"do_remote_decode": True}}
    (held,) = producer.generate(asked, first, use_tqdm=False)
    assert held.kv_transfer_params is not None
    given = {"prompt_token_ids": prompt, "kv_transfer_params": held.kv_transfer_params}
    (output,) = consumer.generate(given, first.clone(max_tokens=14), use_tqdm=False)
    assert output.num_cached_tokens == len(prompt) - 1
    assert output.outputs[0].token_ids == reference_tokens(checkpoint, prompt, 14)
    # The lease has ended; what is said of it now is worth nothing, and the prompt is computed.
    consumer.reset_prefix_cache()
    (output,) = consumer.generate(given, first.clone(max_tokens=14), use_tqdm=False)
    assert output.num_cached_tokens == 0 and output.outputs[0].token_ids == reference_tokens(
        checkpoint, prompt, 14
    )
    for llm in (producer, consumer):
        llm.engine.core.close()


# ----------------------------------------------------------------------- what those see who look on


class Onlooker:
    """Watches an engine as a page does, and notes what its memory was whenever a record began."""

    def __init__(self, core: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.core, self.truths = core, []
        self.trace = Trace(settings=core.trace_settings)
        encoder, decoder = TraceEncoder(TraceSettings()), TraceDecoder(TraceSettings())
        core.watch(lambda record: self.trace.record(decoder.decode(encoder.encode(record))))
        begin = core.recorder.begin

        def noted(*arguments: Any) -> StepRecord:
            record, pool = begin(*arguments), core.manager.pool
            self.truths.append((core.manager.tables | core.manager.held, list(pool.ref_counts)))
            self.truths[-1] = copy.deepcopy(self.truths[-1])
            return record

        # The snapshot with which it begins.
        self.truths.append(({}, [0] * core.manager.pool.num_blocks))
        monkeypatch.setattr(core.recorder, "begin", noted)

    def check_now(self) -> None:
        """What transfers hold at this moment is what was shown last."""
        held = self.trace.steps[-1].held
        assert {key: list(table) for key, table in held.items()} == self.core.recorder._held()

    def check(self) -> set[str]:
        """Every record leads to the memory that the engine had; returns why requests have ended."""
        for (tables, ref_counts), state in zip(self.truths, pool_states(self.trace), strict=True):
            assert state.tables | state.held == tables
            assert state.ref_counts == ref_counts
        return {reason for record in self.trace for reason in record.finished.values()}


@pytest.mark.parametrize("way", WAYS)
def test_the_picture_shows_what_transfers_hold(
    way: str, checkpoint: str, fleets: list[Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that are being received, and blocks that outlive their request until a peer has read
    them."""
    fleets.append(fleet := make_fleet(checkpoint, "small producer", "recompute"))
    onlookers = [Onlooker(core, monkeypatch) for core in fleet.engines]
    step = fleet.step

    def watched_step() -> None:
        step()
        for onlooker in onlookers:
            onlooker.check_now()

    monkeypatch.setattr(fleet, "step", watched_step)
    for round_number in range(2):  # the second time, some of it is in the caches
        for i, prompt in enumerate(prompts()):
            # 3 is aborted while it runs.
            send(fleet, way, f"{round_number} {i}", prompt, max_tokens=40 if i == 3 else 5)
        fleet.engines[1].abort_request(f"{round_number} 3")
        for i in range(len(prompts())):
            if i != 3:
                fleet.complete(f"{round_number} {i}")
        fleet.settle()
    reasons = [onlooker.check() for onlooker in onlookers]
    assert "abort" in reasons[1] and any(record.held for record in onlookers[0].trace)
    assert any(record.held for record in onlookers[1].trace)
