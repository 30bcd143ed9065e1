"""CacheBlend in the engine: what is blended at ratio 1 is exact, with every feature on; what is
approximate is never found."""

from __future__ import annotations

import random
from typing import Any

import pytest

from nanovllm.assembly.engine import Engine
from nanovllm.data.request import EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from tests.kv_engines import Fleet, ask, make_engine, worker_connector
from tests.oracle import make_checkpoint, reference_tokens

SEPARATOR = 2  # "</s>" of the tiny tokenizer


def tokens(count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 259) for _ in range(count)]


SYSTEM, DOCUMENTS = tokens(6, 0), [tokens(20, 1), tokens(17, 2), tokens(24, 3)]
ORDERS = [(0, 1), (1, 0), (2, 1, 0), (0, 1), (1, 2), (0, 2, 1), (2, 0)]


def prompt(order: tuple[int, ...], question: int) -> list[int]:
    parts = [SYSTEM, *(DOCUMENTS[i] for i in order), tokens(5, question)]
    return [token for part in parts for token in [*part, SEPARATOR]][:-1]


PROMPTS = [prompt(order, 10 + i) for i, order in enumerate(ORDERS)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> list[list[int]]:
    return [reference_tokens(checkpoint, p, 14) for p in PROMPTS]


def engine(
    checkpoint: str, ratio: float = 1.0, extra: dict[str, Any] | None = None, **options: Any
) -> Engine:
    settings = {"blend_special_str": "</s>", "blend_recompute_ratio": ratio, "blend_min_tokens": 8}
    transfer = {"kv_connector": "blend", "kv_connector_extra_config": settings | (extra or {})}
    return make_engine(checkpoint, extra=transfer, **options)


def num_blended(core: Engine) -> int:
    return core.stats.num_external_hit_tokens


@pytest.mark.parametrize("ratio", [1.0, 0.3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 13, "max_num_seqs": 3},
        {"enable_prefix_caching": False},
        {"num_kv_blocks": 16},
        {"num_kv_blocks": 18, "swap_space": 1},
        {"async_scheduling": True},
        {"tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_all_requests_end_and_at_ratio_1_they_are_exact(
    options, ratio, checkpoint, expected
) -> None:
    fleet = Fleet([engine(checkpoint, ratio, **options)])
    try:
        ask(fleet.engines[0], "first", PROMPTS[0])
        assert fleet.complete("first") == expected[0]  # nothing is kept yet
        for i, token_ids in enumerate(PROMPTS):
            ask(fleet.engines[0], str(i), token_ids)
        answers = [fleet.complete(str(i)) for i in range(len(PROMPTS))]
        assert num_blended(fleet.engines[0]) > 100
        assert (answers == expected) == (ratio == 1)
        fleet.settle()
    finally:
        fleet.close()


def test_what_is_approximate_is_found_by_nobody(checkpoint: str, expected: list[list[int]]) -> None:
    fleet = Fleet([engine(checkpoint, 0.0)])
    core = fleet.engines[0]
    ask(core, "a", PROMPTS[0])
    fleet.complete("a")
    ask(core, "b", PROMPTS[1])
    blended = fleet.complete("b")
    assert num_blended(core) > 30 and blended != expected[1]
    # no part is kept any more: all that could help is the prefix cache
    core.peers.connector.forget_requests()
    ask(core, "c", PROMPTS[1])
    ask(core, "d", PROMPTS[1] + blended)
    assert fleet.complete("c") == expected[1]
    assert fleet.complete("d") == reference_tokens(checkpoint, PROMPTS[1] + blended, 14)
    fleet.close()


def test_salts_keep_parts_apart(checkpoint: str) -> None:
    fleet = Fleet([engine(checkpoint)])
    core = fleet.engines[0]
    for i, salt in enumerate(["one", "two", "one"]):
        params = SamplingParams(temperature=0, max_tokens=2)
        core.add_request(EngineRequest(str(i), PROMPTS[i], params, cache_salt=salt))
        fleet.complete(str(i))
        assert (num_blended(core) > 0) == (i == 2)
    fleet.close()


def test_parts_that_were_not_used_for_longest_give_way(checkpoint: str) -> None:
    """Room for 45 tokens: 3 layers of 2 KV heads of 16 numbers, keys and values, in 4 bytes."""
    fleet = Fleet(
        [engine(checkpoint, extra={"blend_gib": 45 * 768 / 2**30}, enable_prefix_caching=False)]
    )
    core = fleet.engines[0]
    for i, (order, gain) in enumerate([((0, 1), 0), ((2, 1), 45), ((1, 0), 24), ((2,), 0)]):
        before = num_blended(core)
        ask(core, str(i), prompt(order, i), max_tokens=2)
        fleet.complete(str(i))
        assert (num_blended(core) > before) == (gain > 0)
        kept = core.peers.connector._kept  # type: ignore[union-attr]
        assert sum(kept.values()) <= 45 and kept.keys() == worker_connector(core).chunks.keys()  # type: ignore[attr-defined]
    fleet.close()


@pytest.mark.parametrize("steps", range(6))
def test_abort_at_any_moment(steps: int, checkpoint: str, expected: list[list[int]]) -> None:
    fleet = Fleet([engine(checkpoint)])
    core = fleet.engines[0]
    ask(core, "first", PROMPTS[0])
    fleet.complete("first")
    for i in (1, 2, 4):
        ask(core, str(i), PROMPTS[i])
    for _ in range(steps):
        fleet.step()
    core.abort_request("2")
    core.abort_request("1")
    assert fleet.complete("4") == expected[4]
    fleet.settle()
    fleet.close()


@pytest.mark.parametrize(
    ("extra", "options", "message"),
    [
        (
            {"recompute_ratio": 0.5},
            {},
            "'recompute_ratio' is unknown here; there are blend_special_str",
        ),
        ({"blend_recompute_ratio": 1.5}, {}, "blend_recompute_ratio must be from 0 to 1"),
        ({"blend_check_layer": 3}, {}, "one of the model's 3 layers"),
        ({"blend_special_str": ""}, {}, "must not be empty"),
        ({}, {"pipeline_parallel_size": 2}, "pipeline_parallel_size 1"),
    ],
)
def test_settings_that_make_no_sense(extra, options, message: str, checkpoint: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(checkpoint, extra=extra, **options)
