"""Drafts tokens after each step of the target model: the passes that every kind of drafter makes.
The KV of the draft model is in additional layers of the same blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm import ops
from nanovllm.attention.base import AttentionMetadata, ForwardContext, forward_context
from nanovllm.core.batch import Batch, ModelInputs
from nanovllm.core.device_copies import pick, upload
from nanovllm.core.schedule import ScheduledRequest, SchedulerOutput
from nanovllm.data.speculative_config import SpeculativeConfig
from nanovllm.features.speculation.scheduling import num_drafts_wanted
from nanovllm.features.speculation.verification import draw_draft

if TYPE_CHECKING:
    from nanovllm.assembly.model import LoadedModel
    from nanovllm.core.runner import ModelRunner
    from nanovllm.models.eagle import EagleModel
    from nanovllm.models.llama import LlamaForCausalLM


@dataclass
class DraftedRequest:
    """A request of a step, while the drafter works on it.

    Attributes:
        row: its row in `RequestRows`, which gets its drafts, too.
        start, end: the next pass computes its positions `start` to `end - 1`.
        next_position: the position of its next draft.
        num_missing: the number of drafts that are still to be made.
        last: the number of its last token in the newest pass.
        drafts: its drafts so far.
        distributions: for each draft that was drawn, the distribution from which it was drawn,
            `[vocab_size]` float32, of the target's vocabulary.
    """

    request_id: str
    row: int
    start: int
    end: int
    next_position: int
    num_missing: int
    last: int = 0
    drafts: list[int] = field(default_factory=list)
    distributions: list[Tensor] = field(default_factory=list)

    def add(self, draft: int) -> None:
        """Add a draft. The next pass computes one position."""
        self.drafts.append(draft)
        self.num_missing -= 1
        self.next_position += 1
        self.start = self.end
        self.end += 1


class Drafter:
    """Base class of drafters. The first pass computes the positions of the target's step, and
    yields the first draft. Each further pass computes one position, and yields the next draft.

    Attributes:
        runner: runs the target; known once it has caches.
        model: computes hidden states from tokens, and logits from hidden states.
        token_offset: the model computes a position from the token that is so many positions later.
            0 (a draft model): from the token itself; to draft, it also computes the position of the
            token that the step has sampled. 1 (a head, which also reads hidden states of this
            position): from the token after it.
    """

    model: LlamaForCausalLM | EagleModel
    token_offset: int
    runner: ModelRunner

    def __init__(self, target: LoadedModel, config: SpeculativeConfig) -> None:
        if target.model_config.kv_lora_rank:
            latent = (
                f"{target.model_config.architecture} has latent attention, and its blocks hold no "
                "keys of a draft"
            )
            raise ValueError(f"speculative_config: {latent}: use method 'ngram'")
        self.target = target
        self.config = config

    def cache_shapes(self, num_blocks: int) -> list[tuple[int, ...]]:
        """Return the shapes of the caches of this model's layers on this rank."""
        block_size = self.target.config.block_size
        return [
            attention.cache_shape(num_blocks, block_size, self.target.backend)
            for attention in self.model.attention_layers.values()
        ]

    # ---------------------------------------------------------------- around the target's step

    def follows(self, plan: SchedulerOutput) -> bool:
        """Return whether this model computes the step's tokens, too. It skips steps in which no
        request drafts. Later drafts may then be accepted less often; the output is the same."""
        return bool(num_drafts_wanted(plan)) or any(
            request.num_tokens > 1 for request in plan.requests
        )

    def prepare(self, plan: SchedulerOutput) -> None:
        """Prepare for a step, before the target model runs it."""

    def keep(self) -> None:
        """Copy what a replay must return into persistent buffers, at the end of a target step that
        a graph records."""

    def propose(
        self, plan: SchedulerOutput, batch: Batch, hidden: Tensor, emitted: dict[str, list[int]]
    ) -> list[DraftedRequest]:
        """Draft for the requests of a step that the target has just run.

        Args:
            hidden: the target's last hidden states, `[num_tokens, hidden_size]`.
            emitted: by request, its accepted drafts and one more token.

        Returns:
            The requests that have drafts: as many as the plan wants, or as there is room for.
        """
        if not self.follows(plan):
            return []
        wanted = num_drafts_wanted(plan)
        requests = [
            self._request(
                scheduled,
                row,
                new_tokens=emitted.get(scheduled.request_id, []),
                num_wanted=wanted.get(scheduled.request_id, 0),
            )
            for scheduled, row in zip(plan.requests, batch.rows.tolist(), strict=True)
        ]
        x, features = self._forward(requests, self._first_features(requests, batch, hidden))
        drafting = [request for request in requests if request.num_missing > 0]
        while drafting:
            self._choose(pick(x, [request.last for request in drafting]), drafting)
            drafting = [request for request in drafting if request.num_missing > 0]
            if drafting:
                if features is not None:
                    features = pick(features, [request.last for request in drafting])
                x, features = self._forward(drafting, features)
        return [request for request in requests if request.drafts]

    def _request(
        self, scheduled: ScheduledRequest, row: int, new_tokens: list[int], num_wanted: int
    ) -> DraftedRequest:
        """Return a request for the first pass, and write its newest token to its row. The next
        schedule contains the token again.

        Args:
            new_tokens: its accepted drafts and one more token; [] if it has not sampled.
        """
        start = scheduled.start
        end = start + scheduled.num_tokens
        if not new_tokens:
            return DraftedRequest(scheduled.request_id, row, start, end, end, num_missing=0)
        # The KV of rejected drafts does not count.
        end -= 1 + len(scheduled.extra_token_ids) - len(new_tokens)
        rows = self.runner.rows
        rows.token_ids[row, end] = new_tokens[-1]
        # Each draft needs a slot for the position before it, and a place in the row.
        num_slots = int(rows.num_blocks[row]) * self.runner.block_size
        num_places = self.runner.settings.max_request_tokens - 1
        num_drafts = max(0, min(num_wanted, num_slots - end, num_places - end))
        computes_newest = num_drafts > 0 and self.token_offset == 0
        return DraftedRequest(
            scheduled.request_id,
            row,
            start,
            end + computes_newest,
            next_position=end + 1,
            num_missing=num_drafts,
        )

    # ---------------------------------------------------------------- one pass

    def _forward(
        self, requests: list[DraftedRequest], features: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run the model on the positions that these requests miss; see `_run`."""
        inputs = self._pack(requests)
        caches = self.runner.kv_caches[len(self.runner.forward.kv_caches) :]  # after the target's
        with forward_context(ForwardContext(self.target.backend, caches, inputs.metadata)):
            return self._run(inputs.input_ids, inputs.positions, features)

    def _pack(self, requests: list[DraftedRequest]) -> ModelInputs:
        """Return the inputs of a pass, one request after another."""
        rows = self.runner.rows
        size = self.runner.block_size
        send = partial(upload, device=self.runner.device)
        request_rows = np.array([request.row for request in requests])
        starts = np.array([request.start for request in requests])
        ends = np.array([request.end for request in requests])
        lengths = ends - starts
        query_ends = lengths.cumsum()
        for request, end in zip(requests, query_ends.tolist(), strict=True):
            request.last = end - 1
        # For each token: its request's row, and its position there.
        token_rows = request_rows.repeat(lengths)
        positions = ranges(starts, lengths)
        token_ids = rows.token_ids[token_rows, positions + self.token_offset]
        blocks = rows.block_tables[token_rows, positions // size].astype(np.int64)
        max_seq_len = int(ends.max())
        num_blocks = -(-max_seq_len // size)
        return ModelInputs(
            input_ids=send(token_ids, dtype=torch.int64),
            positions=send(positions, dtype=torch.int64),
            metadata=AttentionMetadata(
                query_start_loc=send(np.concatenate([[0], query_ends]), dtype=torch.int32),
                seq_lens=send(ends, dtype=torch.int32),
                block_tables=send(rows.block_tables[request_rows, :num_blocks], dtype=torch.int32),
                slot_mapping=send(blocks * size + positions % size, dtype=torch.int64),
                max_query_len=int(lengths.max()),
                max_seq_len=max_seq_len,
            ),
        )

    def _choose(self, x: Tensor, requests: list[DraftedRequest]) -> None:
        """Choose the next draft of each request.

        Args:
            x: `[num_requests, hidden_size]`, the input of the model's output head.
        """
        logits = self.model.compute_logits(x)
        if self.config.draft_sample_method == "greedy":
            tokens = self._to_target(ops.argmax(logits)).tolist()
        else:
            scores = self._spread(logits.float())
            tokens = [
                self._draw(row, request) for row, request in zip(scores, requests, strict=True)
            ]
        for request, token in zip(requests, tokens, strict=True):
            self.runner.rows.token_ids[request.row, request.next_position] = token
            request.add(token)

    def _draw(self, logits: Tensor, request: DraftedRequest) -> int:
        """Draw a request's next draft from logits, `[vocab_size]`, and keep the distribution."""
        rows = self.runner.rows
        token, distribution = draw_draft(
            logits,
            rows.sampling[request.row].params,
            request.next_position - int(rows.num_prompt_tokens[request.row]),
        )
        request.distributions.append(distribution)
        return token

    # -------------------------------------------------------------- what kinds of drafter differ in

    def _first_features(
        self, requests: list[DraftedRequest], batch: Batch, hidden: Tensor
    ) -> Tensor | None:
        """Return what the first pass reads besides tokens, `[num_tokens, hidden_size]`; see
        `propose`."""
        return None

    def _run(
        self, ids: Tensor, positions: Tensor, features: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run the model.

        Args:
            ids, positions: `[num_tokens]` int64.
            features: `[num_tokens, hidden_size]`, what it reads besides; None for a draft model.

        Returns:
            The input of its output head, and the features of the next pass, both
            `[num_tokens, hidden_size]`.
        """
        raise NotImplementedError

    def _to_target(self, tokens: Tensor) -> Tensor:
        """Convert token ids, `[num_rows]`, to the target's vocabulary."""
        return tokens

    def _spread(self, logits: Tensor) -> Tensor:
        """Convert logits to the target's vocabulary, `[num_rows, vocab_size]`."""
        return logits


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenate the ranges that begin at `starts` and have `lengths` numbers each."""
    offsets: np.ndarray = starts - (lengths.cumsum() - lengths)
    numbers: np.ndarray = np.arange(lengths.sum()) + offsets.repeat(lengths)
    return numbers
