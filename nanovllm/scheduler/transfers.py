"""What happens to requests and blocks when KV transfers end.

KV that arrives from elsewhere raises `num_computed_tokens`, like a prefix-cache hit. While it is in
flight, the request has blocks and computes nothing (`Scheduler.receiving`); when it has arrived,
the request runs as if it had computed these tokens itself. If a peer wants the KV of a request that
ends, the scheduler holds the request's blocks until the peer has read them.

Built by notebooks/31_pd_disaggregation.ipynb: edit it there.
"""

from __future__ import annotations

from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.data.request import EngineOutput, Request, RequestStatus
from nanovllm.scheduler.scheduler import Scheduler


def take_over(scheduler: Scheduler, request: Request, invalid_block_ids: set[int]) -> None:
    """Let a request run behind the KV that has arrived.

    Its first `num_computed_tokens` were computed here; the `num_external_tokens` after them have
    arrived, but only up to the first invalid block of its table (`manager.tables`). The last of its
    `num_tokens` is never taken over: its logits are needed. `num_computed_tokens` rises to what is
    there, and never falls. The blocks that have become full are cached
    (`manager.cache_blocks(request, num_computed_tokens
    before)`), `scheduler.num_external_hit_tokens` counts the tokens that were taken over, and the
    request runs (`scheduler.move`)."""
    table = scheduler.manager.tables[request.request_id]
    size = scheduler.manager.block_size
    num_valid = next(
        (i for i, block_id in enumerate(table) if block_id in invalid_block_ids), len(table)
    )
    before = request.num_computed_tokens
    there = min(num_valid * size, before + request.num_external_tokens, request.num_tokens - 1)
    request.num_computed_tokens = max(before, there)
    scheduler.num_external_hit_tokens += request.num_computed_tokens - before
    scheduler.manager.cache_blocks(request, before)
    scheduler.move(request, RequestStatus.RUNNING)


def update_from_transfers(scheduler: Scheduler, ended: KVConnectorOutput) -> list[EngineOutput]:
    """Act on transfers that have ended: free held blocks, and let requests run whose KV has
    arrived.

    Returns:
        The outputs of requests that fail because their KV did not arrive.
    """
    for name in ended.finished_sending | ended.finished_recving:
        if name in scheduler.manager.held:
            scheduler.manager.let_go(name)
        elif name in ended.finished_recving:
            take_over(scheduler, scheduler.requests[name], ended.invalid_block_ids.get(name, set()))
    failed = []
    for request_id in ended.reasons.keys() & scheduler.requests.keys():
        scheduler.finish(scheduler.requests[request_id], "error")
        error = f"the KV from another engine or store did not arrive: {ended.reasons[request_id]}"
        failed.append(EngineOutput(request_id, finish_reason="error", error=error))
    return failed
