"""`nanovllm bench kv`: the cost of moving KV between engines, and the gain of keeping KV beyond the
pool.

transport    bytes per second from one rank's cache into another's
router       what it adds to a request
latency      running streams while prompts arrive: in one engine, and with prefill in another one
first_token  the first token when prefill is in another engine
tiers        prefixes in host memory, on a disk and in pools, against computing them again
engines      the engines that all but the first two ask

Figures are ratios of things that took turns in one run.
"""
