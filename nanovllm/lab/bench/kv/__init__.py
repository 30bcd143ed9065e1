"""`nanovllm bench kv`: what it costs that KV is moved between engines, and what it gains that KV is kept beyond the pool.

transport    bytes a second from one rank's cache into another's
router       what it adds to a request
latency      running streams while prompts arrive: in one engine, and with prefill somewhere else
first_token  the first token when prefill is somewhere else
tiers        prefixes in host memory, on a disk and in pools, against computing them again
engines      the engines that all but the first two ask
command      the parts together

As everywhere in this benchmark, figures are ratios of things that took turns in one run.
"""
