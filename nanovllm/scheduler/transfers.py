"""Updates requests and blocks when KV transfers end.

KV from another engine or a store raises `num_computed_tokens`, like a prefix-cache hit. While it is
in flight, the request has blocks but computes nothing (`Scheduler.receiving`). When it has arrived,
the request runs as if it had computed these tokens itself. If a peer needs the KV of a finished
request, the scheduler holds the request's blocks until the peer has read them.

Built by notebooks/31_pd_disaggregation.ipynb: edit it there.
"""

from __future__ import annotations

from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.data.request import EngineOutput, Request, RequestStatus
from nanovllm.scheduler.scheduler import Scheduler


def take_over(scheduler: Scheduler, request: Request, invalid_block_ids: set[int]) -> None:
    """Run a request with the KV that has arrived. `num_computed_tokens` rises, but never falls, to

        min(num_valid_tokens, num_computed_tokens + num_external_tokens, num_tokens - 1)

    `num_valid_tokens` is the size of the blocks in its table (`manager.tables`) before the first
    one in `invalid_block_ids`. The last token is always computed here, to get its logits.

    Add the increase to `scheduler.num_external_hit_tokens`, cache the full blocks
    (`manager.cache_blocks(request, num_computed_tokens before)`), and move the request to RUNNING
    (`scheduler.move`)."""
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
    """Handle transfers that have ended: free held blocks, and run requests whose KV has arrived.

    Returns:
        The outputs of requests that fail because their KV did not arrive.
    """
    for name in sorted(ended.finished_sending | ended.finished_recving):
        if name in scheduler.manager.held:
            scheduler.manager.let_go(name)
        elif name in ended.finished_recving:
            take_over(scheduler, scheduler.requests[name], ended.invalid_block_ids.get(name, set()))
    failed = []
    for request_id in sorted(ended.reasons.keys() & scheduler.requests.keys()):
        scheduler.finish(scheduler.requests[request_id], "error")
        error = f"the KV from another engine or store did not arrive: {ended.reasons[request_id]}"
        failed.append(EngineOutput(request_id, finish_reason="error", error=error))
    return failed
