"""Which drafts are kept: those that the model samples itself; or, if they were drawn, as many as rejection sampling accepts.

Built by notebooks/42_speculative_decoding.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

from typing import Any

from nanovllm.data.schedule import ModelRunnerOutput, SampledToken, SchedulerOutput


def keep_accepted(schedule: SchedulerOutput, sampled: dict[Any, SampledToken]) -> ModelRunnerOutput:
    """Keep, of the tokens that were sampled after a request's drafts, those that the model would have sampled one by one: up to the first
    that is not the draft at its place, and this one.

    Args:
        sampled: by request id the token after its known ones, and by (request id, n) the one after n drafts. A request that samples nothing
            is missing.

    Returns: the first token of each request in `sampled`; the others, if there are any, in `sampled_after`.
    """
    output = ModelRunnerOutput()
    for scheduled in schedule.requests:
        name = scheduled.request_id
        if name not in sampled:
            continue
        tokens = [sampled[name]]
        for place, draft in enumerate(scheduled.draft_token_ids, start=1):
            if tokens[-1].token_id != draft:
                break
            tokens.append(sampled[name, place])
        output.sampled[name] = tokens[0]
        if tokens[1:]:
            output.sampled_after[name] = tokens[1:]
    return output
