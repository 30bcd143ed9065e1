"""Several engines of one process that share KV: stepped by turns, so that a test says what happens when."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from nanovllm import SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.engine import EngineCore
from nanovllm.request import EngineOutput, EngineRequest

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 120,
    "num_kv_blocks": 64,
    "block_size": 8,
    "check_invariants": True,
}


def make_engine(checkpoint: str, role: str = "kv_both", extra: dict[str, Any] | None = None, **options: Any) -> EngineCore:
    """An engine with a connector; `extra` goes into its kv_transfer_config."""
    transfer = {"kv_connector": "local", "kv_role": role} | (extra or {})
    return EngineCore(EngineConfig(model=checkpoint, **(OPTIONS | {"kv_transfer_config": transfer} | options)))


class Fleet:
    """Engines, stepped by turns; everything that they have said."""

    def __init__(self, engines: Sequence[EngineCore]) -> None:
        self.engines = list(engines)
        self.outputs: dict[str, list[EngineOutput]] = {}

    def step(self) -> None:
        """One step of each that has something to do."""
        for engine in self.engines:
            for output in engine.step():
                self.outputs.setdefault(output.request_id, []).append(output)

    def run_until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Steps until something holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            self.step()
            assert time.monotonic() < deadline, "it never came to that"

    def finished(self, request_id: str) -> EngineOutput | None:
        """A request's last output, if it has ended."""
        outputs = self.outputs.get(request_id, [])
        return outputs[-1] if outputs and outputs[-1].finish_reason else None

    def tokens(self, request_id: str) -> list[int]:
        """All that was sampled for a request."""
        return [token for output in self.outputs.get(request_id, []) for token in output.new_token_ids]

    def complete(self, request_id: str) -> list[int]:
        """Steps until the request has ended; its tokens."""
        self.run_until(lambda: self.finished(request_id) is not None)
        return self.tokens(request_id)

    def settle(self) -> None:
        """Steps until no engine holds a block of anybody."""
        self.run_until(lambda: all(engine.manager.pool.usage == 0 and not engine.has_work for engine in self.engines))

    def close(self) -> None:
        """End all."""
        for engine in self.engines:
            engine.close()


def ask(
    engine: EngineCore, request_id: str, prompt: list[int], max_tokens: int = 14, params: Any = None, **options: Any
) -> None:
    """Queue a greedy request."""
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)
    engine.add_request(EngineRequest(request_id, prompt, sampling, kv_transfer_params=params))


def address(engine: EngineCore) -> list[Any]:
    """Where consumers can ask it."""
    (information,) = engine.limits.kv_transfer
    return [information["kv_host"], information["kv_port"]]


def decode_first(producer: EngineCore, direction: str) -> dict[str, Any]:
    """What a router tells a consumer that shall ask a producer."""
    return {"do_remote_prefill": True, "prefill_addresses": [address(producer)], "kv_direction": direction}
