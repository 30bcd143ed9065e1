"""The parts of `nanovllm bench kv`."""

from __future__ import annotations

from nanovllm.lab.bench.kv.first_token import first_token
from nanovllm.lab.bench.kv.latency import latency
from nanovllm.lab.bench.kv.router import router
from nanovllm.lab.bench.kv.tiers import tiers
from nanovllm.lab.bench.kv.transport import transport
from nanovllm.lab.bench.parts import Parts

TITLE = "What it costs and gains to move and keep KV"
PARTS: Parts = {
    "transport": ("from cache to cache", transport),
    "router": ("what the router adds", router),
    "latency": ("streams while prompts arrive", latency),
    "first-token": ("the first token, prefilled elsewhere", first_token),
    "tiers": ("prefixes in other places", tiers),
}
