"""A real engine that drafts tokens, and its trace."""

from __future__ import annotations

import functools
import pathlib
import tempfile
from typing import Any

from nanovllm.assembly.engine import Engine
from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.trace.trace import Trace
from tests.oracle import make_checkpoint

# Three drafts whatever they cost: otherwise their number depends on how fast the machine is.
SPECULATION = (
    '{"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens":'
    ' 3, "num_speculative_tokens_per_batch_size": [[1, 256, 3]]}'
)


def drafting_engine(checkpoint: str, **options: Any) -> tuple[Engine, Trace, dict[str, list[int]]]:
    """Run eight requests greedily, a new one after every third step; one is aborted. A random model
    repeats nothing, but these answers are made of three tokens only, so that n-grams occur again,
    and some drafts are right.

    Returns:
        The engine, its trace, and the tokens that each request got.
    """
    settings: dict[str, Any] = {
        "num_kv_blocks": 40,
        "block_size": 4,
        "speculative_config": SPECULATION,
    }
    config = EngineConfig(
        checkpoint, dtype="float32", device="cpu", check_invariants=True, **(settings | options)
    )
    trace, outputs = Trace(), dict[str, list[int]]()
    core = Engine(config, trace)
    for number in range(8):
        prompt, request_id = ([5, 6, 7, 8 + number % 2] * 6)[: 17 + number], f"r{number}"
        outputs[request_id] = []
        params = SamplingParams(
            temperature=0, max_tokens=20 + number, logit_bias=dict.fromkeys((5, 6, 7), 100.0)
        )
        core.add_request(EngineRequest(request_id, prompt, params))
        while core.has_unfinished and (
            number == 7 or core.num_steps % 3 or not outputs[request_id]
        ):
            for output in core.step():
                outputs[output.request_id] += output.new_token_ids
            if number == 5 and core.num_steps % 3 == 1:
                core.abort_request("r4")
    return core, trace, outputs


@functools.cache
def drafting_trace(num_kv_blocks: int = 40) -> Trace:
    """The trace of such an engine. With 30 blocks, a request is preempted."""
    with tempfile.TemporaryDirectory() as folder:
        return drafting_engine(
            str(make_checkpoint(pathlib.Path(folder) / "tiny")), num_kv_blocks=num_kv_blocks
        )[1]
