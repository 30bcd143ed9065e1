"""Drafts tokens after each step of the target model, with a separate draft model or with a head on
the target's hidden states. The KV of the draft model is in additional layers of the same blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm import ops
from nanovllm.attention.base import AttentionMetadata, ForwardContext, forward_context
from nanovllm.checkpoint.hub import resolve_model
from nanovllm.core.batch import Batch
from nanovllm.core.device_copies import upload
from nanovllm.core.schedule import SchedulerOutput
from nanovllm.data.parts import needed_for
from nanovllm.data.speculative_config import SpeculativeConfig
from nanovllm.features.speculation.scheduling import num_drafts_wanted
from nanovllm.features.speculation.verification import draw_draft
from nanovllm.models.config import ModelConfig
from nanovllm.models.eagle import AuxHiddenStates, load_draft_model, shipped_head
from nanovllm.models.loader import load_model

if TYPE_CHECKING:
    from nanovllm.assembly.model import LoadedModel
    from nanovllm.core.runner import ModelRunner
    from nanovllm.models.eagle import EagleModel
    from nanovllm.models.llama import LlamaForCausalLM


@dataclass(frozen=True)
class PackedTokens:
    """The tokens of one pass of the draft model, packed one request after another.

    Attributes:
        rows: `[num_requests]`, the requests' rows in `RequestRows`.
        lengths: `[num_requests]`, tokens of each request in this pass.
        seq_lens: `[num_requests]`, tokens of each request in the cache after this pass.
        ids, positions: `[num_tokens]`.
    """

    rows: np.ndarray
    lengths: np.ndarray
    seq_lens: np.ndarray
    ids: np.ndarray
    positions: np.ndarray


@dataclass(frozen=True)
class DraftTargets:
    """The requests that get another draft. Each field has one entry per request.

    Attributes:
        rows: rows in `RequestRows`.
        num_computed: tokens in the draft model's cache after the pass that yields the next draft.
        output_indices: index of the next draft in the request's output.
        num_drafts: drafts that are still missing, 1 or more.
    """

    request_ids: list[str]
    rows: np.ndarray
    num_computed: np.ndarray
    output_indices: np.ndarray
    num_drafts: np.ndarray

    def after_draft(self, unfinished: np.ndarray) -> DraftTargets:
        """Return the requests in `unfinished`, after one more draft."""
        return DraftTargets(
            request_ids=[self.request_ids[i] for i in unfinished],
            rows=self.rows[unfinished],
            num_computed=self.num_computed[unfinished] + 1,
            output_indices=self.output_indices[unfinished] + 1,
            num_drafts=self.num_drafts[unfinished] - 1,
        )


class Drafter:
    """Base class of drafters. The first pass computes the tokens of the target's step, and yields
    the first draft. Each further pass computes one draft, and yields the next.

    Attributes:
        runner: runs the target; known once it has caches.
        model: computes hidden states from tokens, and logits from hidden states.
        sees_new_token: the tokens of the first pass. True (a draft model): the tokens of the step,
            then the token that it has sampled. False (a head, which also reads the hidden state of
            the token before): the token after each token of the step.
    """

    model: LlamaForCausalLM | EagleModel
    sees_new_token: bool
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
        # Request id -> the distributions from which its drafts were drawn, `[num_drafts,
        # vocab_size]`; empty if drafts are not drawn.
        self.probabilities: dict[str, Tensor] = {}

    def cache_shapes(self, num_blocks: int) -> list[tuple[int, ...]]:
        """Return the shapes of the caches of this model's layers on this rank."""
        block_size = self.target.config.block_size
        return [
            attention.cache_shape(num_blocks, block_size, self.target.backend)
            for attention in self.model.attention_layers.values()
        ]

    # ---------------------------------------------------------------- one step

    def follows(self, schedule: SchedulerOutput) -> bool:
        """Return whether this model computes the step's tokens, too. It skips steps in which no
        request drafts. Later drafts may then be accepted less often; the output is the same."""
        return bool(num_drafts_wanted(schedule)) or any(
            request.num_tokens > 1 for request in schedule.requests
        )

    def prepare(self, schedule: SchedulerOutput) -> None:
        """Prepare for a step, before the target model runs it."""

    def keep(self) -> None:
        """Copy what a replay must return into persistent buffers, at the end of a target step that
        a graph records."""

    def propose(
        self, schedule: SchedulerOutput, batch: Batch, hidden: Tensor, emitted: dict[str, list[int]]
    ) -> dict[str, list[int]]:
        """Draft for the requests of a step that the target has just run.

        Args:
            hidden: the target's last hidden states, `[num_tokens, hidden_size]`.
            emitted: by request, its accepted drafts and one more token.

        Returns:
            By request, as many drafts as the plan wants for it.
        """
        if not self.follows(schedule):
            return {}
        requests = schedule.requests
        new = [emitted.get(request.request_id, []) for request in requests]
        starts = np.array([request.start for request in requests])
        num_rejected = [
            len(request.extra_token_ids) + 1 - len(tokens) if tokens else 0
            for request, tokens in zip(requests, new, strict=True)
        ]
        # The KV of rejected drafts does not count.
        num_kept = np.array([request.num_tokens for request in requests]) - num_rejected
        wanted = num_drafts_wanted(schedule)
        num_drafts = np.array(
            [
                wanted.get(request.request_id, 0) if tokens else 0
                for request, tokens in zip(requests, new, strict=True)
            ]
        )
        drafting = np.flatnonzero(num_drafts)
        self._append(new, batch.rows, starts + num_kept)
        lengths = num_kept + (num_drafts > 0) * self.sees_new_token
        tokens = self._first_tokens(batch.rows, starts, lengths)
        computed = _ranges(batch.num_scheduled.cumsum() - batch.num_scheduled, num_kept)
        features = self._features(hidden, upload(computed, torch.int64, hidden.device))
        out = self._forward(tokens, features, picked=lengths.cumsum()[drafting] - 1)
        known = self.runner.rows.num_known
        num_prompt_tokens = self.runner.rows.num_prompt_tokens
        num_output_tokens = [
            known[row] - num_prompt_tokens[row] + len(new[i])
            for i, row in zip(drafting, batch.rows[drafting], strict=True)
        ]
        targets = DraftTargets(
            request_ids=[requests[i].request_id for i in drafting],
            rows=batch.rows[drafting],
            num_computed=tokens.seq_lens[drafting],
            output_indices=np.array(num_output_tokens, dtype=np.int64),
            num_drafts=num_drafts[drafting],
        )
        return self._continue(targets, out)

    def _append(self, new: list[list[int]], rows: np.ndarray, ends: np.ndarray) -> None:
        """Write each request's last new token after its first `ends` tokens. The next schedule
        contains the token again."""
        token_ids = self.runner.rows.token_ids
        for tokens, row, end in zip(new, rows, ends, strict=True):
            if tokens and end < self.runner.settings.max_request_tokens:
                token_ids[row, end] = tokens[-1]

    def _first_tokens(
        self, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray
    ) -> PackedTokens:
        """Return the tokens of the first pass: `lengths` tokens per request, starting at the
        positions `starts`."""
        positions = _ranges(starts, lengths)
        last = self.runner.settings.max_request_tokens - 1
        columns = np.minimum(positions + (not self.sees_new_token), last)
        return PackedTokens(
            rows=rows,
            lengths=lengths,
            seq_lens=starts + lengths,
            ids=self.runner.rows.token_ids[rows.repeat(lengths), columns],
            positions=positions,
        )

    def _continue(
        self, targets: DraftTargets, out: tuple[Tensor, Tensor | None]
    ) -> dict[str, list[int]]:
        """Make the drafts of some requests, one pass per draft.

        Args:
            out: the result of `_forward` for these requests.
        """
        drafts: dict[str, list[int]] = {name: [] for name in targets.request_ids}
        found: dict[str, list[Tensor]] = {name: [] for name in targets.request_ids}
        while targets.request_ids:
            x, features = out
            tokens = self._choose(x, targets, found)
            for name, token in zip(targets.request_ids, tokens, strict=True):
                drafts[name].append(token)
            unfinished = np.flatnonzero(targets.num_drafts > 1)
            targets = targets.after_draft(unfinished)
            if targets.request_ids:
                picked = upload(unfinished, torch.int64, x.device)
                features = None if features is None else features.index_select(0, picked)
                each = np.arange(len(unfinished))
                packed = PackedTokens(
                    rows=targets.rows,
                    lengths=np.ones_like(each),
                    seq_lens=targets.num_computed,
                    ids=np.array(tokens)[unfinished],
                    positions=targets.num_computed - 1,
                )
                out = self._forward(packed, features, picked=each)
        self.probabilities = {name: torch.stack(parts) for name, parts in found.items() if parts}
        return drafts

    def _choose(
        self, x: Tensor, targets: DraftTargets, found: dict[str, list[Tensor]]
    ) -> list[int]:
        """Choose the next draft of each request. For drafts that are drawn, `found` gets the
        distribution over the target's vocabulary."""
        logits = self.model.compute_logits(x)
        if self.config.draft_sample_method == "greedy":
            greedy: list[int] = self._to_target(ops.argmax(logits)).tolist()
            return greedy
        tokens = []
        rows = self._spread(logits.float())
        for name, row, index in zip(targets.request_ids, rows, targets.output_indices, strict=True):
            token, distribution = draw_draft(row, self.runner.rows.params[name], int(index))
            found[name].append(distribution)
            tokens.append(token)
        return tokens

    def _forward(
        self, tokens: PackedTokens, features: Tensor | None, picked: np.ndarray
    ) -> tuple[Tensor, Tensor | None]:
        """Run the model on packed tokens; returns, for the tokens at the positions `picked`, the
        input of its output head and the features for the next draft."""
        runner = self.runner
        send = partial(upload, dtype=torch.int64, device=runner.device)
        metadata = self._metadata(tokens)
        caches = runner.kv_caches[len(runner.forward.kv_caches) :]  # after the target's
        with forward_context(ForwardContext(self.target.backend, caches, metadata)):
            out, features = self._run(send(tokens.ids), send(tokens.positions), features)
        chosen = send(picked)
        return out.index_select(0, chosen), (
            None if features is None else features.index_select(0, chosen)
        )

    def _metadata(self, tokens: PackedTokens) -> AttentionMetadata:
        """Return the attention metadata of packed tokens."""
        size = self.runner.block_size
        send = partial(upload, device=self.runner.device)
        tables = self.runner.rows.block_tables
        positions = tokens.positions
        blocks = tables[tokens.rows.repeat(tokens.lengths), positions // size].astype(np.int64)
        max_seq_len = int(tokens.seq_lens.max())
        width = -(-max_seq_len // size)
        return AttentionMetadata(
            query_start_loc=send(np.concatenate([[0], tokens.lengths.cumsum()]), dtype=torch.int32),
            seq_lens=send(tokens.seq_lens, dtype=torch.int32),
            block_tables=send(tables[tokens.rows, :width], dtype=torch.int32),
            slot_mapping=send(blocks * size + positions % size, dtype=torch.int64),
            max_query_len=int(tokens.lengths.max()),
            max_seq_len=max_seq_len,
        )

    # -------------------------------------------------------------- what kinds of drafter differ in

    def _features(self, hidden: Tensor, sources: Tensor) -> Tensor | None:
        """Return the model's additional input for the first pass. `sources` are the positions of
        its tokens in the step."""
        return None

    def _run(
        self, ids: Tensor, positions: Tensor, features: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError

    def _to_target(self, tokens: Tensor) -> Tensor:
        """Convert token ids to the target's vocabulary."""
        return tokens

    def _spread(self, logits: Tensor) -> Tensor:
        """Convert logits to the target's vocabulary."""
        return logits


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenate the ranges from `starts` with `lengths` numbers each."""
    offsets: np.ndarray = starts - (lengths.cumsum() - lengths)
    numbers: np.ndarray = np.arange(lengths.sum()) + offsets.repeat(lengths)
    return numbers


class DraftModel(Drafter):
    """Drafts with a separate model that has the target's vocabulary."""

    model: LlamaForCausalLM
    sees_new_token = True

    def __init__(self, target: LoadedModel, config: SpeculativeConfig) -> None:
        super().__init__(target, config)
        assert config.model is not None
        folder = resolve_model(config.model)
        vocab_size = target.model_config.vocab_size
        shape = ModelConfig.from_pretrained(folder)
        if shape.vocab_size != vocab_size:
            sizes = f"{config.model!r} has {shape.vocab_size} tokens, the model {vocab_size}"
            raise ValueError(f"speculative_config: {sizes}: a draft model needs the same tokenizer")
        if shape.kv_lora_rank:
            raise ValueError(
                f"speculative_config: {shape.architecture} (latent attention) cannot draft: choose "
                "a model without"
            )
        if shape.quantization or config.quantization:
            with needed_for("quantization"):
                from nanovllm.checkpoint.quantization import with_settings
            settings = replace(target.config, quantization=config.quantization or "auto")
            shape = replace(shape, quantization=with_settings(shape.quantization, settings))
        self.model = load_model(
            folder,
            shape,
            target.dtype,
            target.device,
            target.max_positions,
            transforms=target.layer_transforms,
        )
        target.prepare(self.model)

    def _run(
        self, ids: Tensor, positions: Tensor, features: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        out: Tensor = self.model(ids, positions)
        return out, None


class Eagle(Drafter):
    """Drafts with one layer on the target's hidden states (EAGLE: Li et al. 2024, arXiv 2401.15077;
    EAGLE-3: arXiv 2503.01840)."""

    model: EagleModel
    sees_new_token = False

    def __init__(self, target: LoadedModel, config: SpeculativeConfig) -> None:
        super().__init__(target, config)
        name = target.folder.name  # the course model's, too, where a server has found its folder
        file = shipped_head(name) if config.model is None else Path(config.model).expanduser()
        if file is None:
            raise ValueError(
                f'speculative_config: nanovllm includes no head for {name!r}: name one as "model"'
            )
        folder = file if file.is_file() else resolve_model(str(config.model))
        self.model = load_draft_model(
            folder,
            target.model,
            target.dtype,
            target.device,
            target.max_positions,
            transforms=target.layer_transforms,
        )
        kind = "eagle3" if self.model.aux_layers else "eagle"
        if config.method != kind:
            raise ValueError(
                f"speculative_config: the head in '{folder}' is for method {kind!r}, not "
                f"{config.method!r}"
            )
        target.prepare(self.model)
        # Runs the target's layers: all in one call, or in parts that keep hidden states.
        self.layers = target.model.model
        self.plain_calls = self.layers.layer_calls
        self.aux = AuxHiddenStates(self.layers, self.model.aux_layers)
        self.layers.layer_calls = self.aux.layer_calls  # as steps are recorded
        # Hidden states of a replayed step; none if no step is recorded.
        self._kept: list[Tensor] = []

    def keep(self) -> None:
        states = self.aux.states
        # The largest step is recorded first.
        self._kept = self._kept or [torch.zeros_like(state) for state in states]
        for kept, state in zip(self._kept, states, strict=True):
            kept[: len(state)].copy_(state)

    def propose(
        self, schedule: SchedulerOutput, batch: Batch, hidden: Tensor, emitted: dict[str, list[int]]
    ) -> dict[str, list[int]]:
        if self._kept and batch.metadata.max_query_len == 1:
            self.aux.states = self._kept
        return super().propose(schedule, batch, hidden, emitted)

    def prepare(self, schedule: SchedulerOutput) -> None:
        # A recorded step always keeps the hidden states.
        keeps = self.follows(schedule) or bool(self._kept)
        self.aux.states = []
        self.layers.layer_calls = self.aux.layer_calls if keeps else self.plain_calls

    def _features(self, hidden: Tensor, sources: Tensor) -> Tensor | None:
        states = self.aux.states or [hidden]
        return self.model.combine_hidden_states(
            torch.cat([state.index_select(0, sources) for state in states], dim=1)
        )

    def _run(
        self, ids: Tensor, positions: Tensor, features: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        out: tuple[Tensor, Tensor] = self.model(ids, positions, features)
        return out

    def _to_target(self, tokens: Tensor) -> Tensor:
        return self.model.draft_to_target[tokens]

    def _spread(self, logits: Tensor) -> Tensor:
        spread = logits.new_full((len(logits), self.target.model_config.vocab_size), float("-inf"))
        return spread.index_copy_(1, self.model.draft_to_target, logits)
