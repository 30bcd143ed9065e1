"""The five named workloads, and workloads made from lengths on the command line.

Token ids are random, decoding is greedy and ends after exactly `max_tokens`, so that every engine
has the same work regardless of the tokens that its arithmetic yields. Lengths depend on the seed
alone; token ids depend on the seed and the repeat, so that a repeat never finds the prefixes of the
one before it in a cache."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Mode = Literal["latency", "throughput", "serve"]


@dataclass(frozen=True)
class BenchRequest:
    """One request.

    Attributes:
        arrival: when it is sent, in seconds after the start.
    """

    prompt_token_ids: list[int]
    max_tokens: int
    arrival: float = 0.0


@dataclass(frozen=True)
class Workload:
    """A recipe for requests.

    Attributes:
        mode: the `bench` command that runs it; "serve" sends requests over HTTP, the others run
            offline.
        input_len: shortest and longest prompt in tokens, without the shared prefix.
        output_len: fewest and most output tokens.
        prefix_len: tokens at the start that all prompts share.
        cache: "none": every prompt is computed whole; "cold": one of them computes the shared
            prefix; "hot": the same prompts were run just before, the prefix is cached.
        options: engine settings that belong to the workload.
        max_concurrency: requests in flight at once; None: all.
        request_rate: requests per second, at random intervals (a Poisson process).
        intruder_len: length of a prompt that arrives while the requests decode, see
            `client.run_workload`; 0: none.
    """

    name: str
    mode: Mode
    title: str
    num_prompts: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    prefix_len: int = 0
    cache: Literal["none", "cold", "hot"] = "none"
    options: dict[str, Any] = field(default_factory=dict)
    max_concurrency: int | None = None
    request_rate: float = math.inf
    intruder_len: int = 0

    @property
    def kind(self) -> str:
        """How it uses an engine: "offline" or "server"."""
        return "server" if self.mode == "serve" else "offline"

    @property
    def max_request_tokens(self) -> int:
        """The most tokens, prompt and output, that a request may have."""
        longest = self.prefix_len + self.input_len[1] + self.output_len[1]
        return max(longest, self.intruder_len + INTRUDER_OUTPUT_LEN if self.intruder_len else 0)

    def requests(self, vocab_size: int, seed: int = 0, repeat: int = 0) -> list[BenchRequest]:
        """The requests; the intruder is the last one. Equal arguments give equal requests, on any
        machine."""
        lengths = random.Random(f"lengths {seed}")
        tokens = random.Random(f"tokens {seed} {repeat}")

        def draw(count: int) -> list[int]:
            return [tokens.randrange(vocab_size) for _ in range(count)]

        prefix = draw(self.prefix_len)
        requests = []
        arrival = 0.0
        for _ in range(self.num_prompts):
            input_len = lengths.randint(*self.input_len)
            output_len = lengths.randint(*self.output_len)
            requests.append(BenchRequest(prefix + draw(input_len), output_len, arrival))
            if self.request_rate != math.inf:
                arrival += lengths.expovariate(self.request_rate)
        if self.intruder_len:
            requests.append(BenchRequest(draw(self.intruder_len), INTRUDER_OUTPUT_LEN))
        return requests


def shortened(requests: Sequence[BenchRequest]) -> list[BenchRequest]:
    """The same requests at once and with few tokens of output, to warm up."""
    return [
        replace(request, max_tokens=min(request.max_tokens, 8), arrival=0.0) for request in requests
    ]


INTRUDER_OUTPUT_LEN = 4
# A budget below max_num_seqs is refused by vLLM and by nanovllm.
SMALL_CHUNK = {"max_num_batched_tokens": 128, "max_num_seqs": 64}

_SHARED: dict[str, Any] = {
    "num_prompts": 16,
    "input_len": (16, 16),
    "output_len": (32, 32),
    "prefix_len": 512,
}
_UNCACHED = _SHARED | {"options": {"enable_prefix_caching": False}}
_STALL: dict[str, Any] = {
    "num_prompts": 4,
    "input_len": (32, 32),
    "output_len": (96, 96),
    "intruder_len": 1024,
}

_WORKLOADS = (
    Workload(
        "W1",
        "latency",
        "one stream, 32 + 128 tokens",
        num_prompts=1,
        input_len=(32, 32),
        output_len=(128, 128),
    ),
    Workload(
        "W2",
        "throughput",
        "32 requests, prompts 32-256, outputs 32-128",
        num_prompts=32,
        input_len=(32, 256),
        output_len=(32, 128),
    ),
    Workload(
        "W3 no cache",
        "throughput",
        "16 requests, 512 shared tokens + 16, 32 out; no prefix cache",
        **_UNCACHED,
    ),
    Workload("W3 cold", "throughput", "the same, prefix cache empty", cache="cold", **_SHARED),
    Workload("W3 hot", "throughput", "the same, prefix cached", cache="hot", **_SHARED),
    Workload(
        "W4",
        "serve",
        "8 streaming clients, 32 requests as in W2",
        num_prompts=32,
        input_len=(32, 256),
        output_len=(32, 128),
        max_concurrency=8,
    ),
    Workload("W5", "serve", "a 1024-token prompt arrives while 4 streams decode", **_STALL),
    Workload(
        "W5 chunk 128", "serve", "the same, 128 tokens per step", options=SMALL_CHUNK, **_STALL
    ),
)
#: The workloads of each name, which is the first word of theirs.
NAMED = {
    name: list(group)
    for name, group in itertools.groupby(_WORKLOADS, lambda workload: workload.name.split()[0])
}


def custom_workload(
    mode: Mode,
    input_len: int | None = None,
    output_len: int = 128,
    batch_size: int = 8,
    num_prompts: int = 100,
    request_rate: float = math.inf,
    max_concurrency: int | None = None,
) -> Workload:
    """A workload of equal requests, from the options of vLLM's benchmarks and with its defaults
    where it has any."""
    count = batch_size if mode == "latency" else num_prompts
    if input_len is None:
        input_len = 32 if mode == "latency" else 256
    title = f"{count} requests, {input_len} + {output_len} tokens"
    if max_concurrency is not None:
        title += f", {max_concurrency} at once"
    if request_rate != math.inf:
        title += f", {request_rate:g} per second"
    return Workload(
        "custom",
        mode,
        title,
        num_prompts=count,
        input_len=(input_len, input_len),
        output_len=(output_len, output_len),
        max_concurrency=max_concurrency,
        request_rate=request_rate,
    )
