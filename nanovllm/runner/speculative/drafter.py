"""Drafts tokens with a second, smaller model after each step of the first one: a model of its own,
or a head on the first one's hidden states. Its keys and values are further layers in the same
blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm import ops
from nanovllm.attention.base import (
    AttentionMetadata,
    ForwardContext,
    forward_context,
    kv_cache_shape,
)
from nanovllm.checkpoint.hub import resolve_model
from nanovllm.data.parts import load
from nanovllm.data.schedule import SchedulerOutput
from nanovllm.data.speculative_config import SpeculativeConfig
from nanovllm.distributed.groups import get_tp_group
from nanovllm.layers.tensor_parallel import num_kv_heads_of_rank
from nanovllm.models.config import ModelConfig
from nanovllm.models.eagle import load_draft_model, shipped_head
from nanovllm.models.loader import load_model
from nanovllm.runner.batch import Batch
from nanovllm.runner.device_copies import upload
from nanovllm.runner.speculative.verification import draw_draft

if TYPE_CHECKING:
    from nanovllm.models.eagle import EagleModel
    from nanovllm.models.llama import LlamaForCausalLM
    from nanovllm.runner.runner import ModelRunner


@dataclass(frozen=True)
class PackedTokens:
    """The tokens of one pass of the draft model, those of each request after those of the one
    before.

    Attributes:
        rows: `[num_requests]`, the requests' rows in `RequestRows`.
        lengths: `[num_requests]`, tokens of each request in this pass.
        seq_lens: `[num_requests]`, tokens of each request that are in the cache after this pass.
        ids, positions: `[num_tokens]`.
    """

    rows: np.ndarray
    lengths: np.ndarray
    seq_lens: np.ndarray
    ids: np.ndarray
    positions: np.ndarray


@dataclass(frozen=True)
class DraftTargets:
    """The requests that get a draft next, with an entry per request in each field.

    Attributes:
        rows: their rows in `RequestRows`.
        num_computed: tokens of each that the draft model has in its cache, with the pass that gives
            the next draft.
        output_indices: of the next draft in the request's output.
        num_drafts: drafts that are still to be made, 1 or more.
    """

    request_ids: list[str]
    rows: np.ndarray
    num_computed: np.ndarray
    output_indices: np.ndarray
    num_drafts: np.ndarray

    def after_draft(self, unfinished: np.ndarray) -> DraftTargets:
        """Return these of the requests, one draft further."""
        return DraftTargets(
            request_ids=[self.request_ids[i] for i in unfinished],
            rows=self.rows[unfinished],
            num_computed=self.num_computed[unfinished] + 1,
            output_indices=self.output_indices[unfinished] + 1,
            num_drafts=self.num_drafts[unfinished] - 1,
        )


class Drafter:
    """What both kinds of drafter share: a first pass over the tokens that the step has computed,
    then a token for each further draft.

    Attributes:
        model: makes hidden states of tokens, and logits of these.
        num_layers, num_kv_heads, head_dim: the shape of its part of the KV cache.
        sees_new_token: the first pass has the token that the step has sampled behind those that the
            step has computed (a model of its own); otherwise each token is replaced by the next one
            (a head, which reads the hidden state of the token before).
    """

    model: LlamaForCausalLM | EagleModel
    num_layers: int
    num_kv_heads: int
    head_dim: int
    sees_new_token: bool

    def __init__(self, runner: ModelRunner, config: SpeculativeConfig) -> None:
        if runner.model_config.kv_lora_rank:
            latent = (
                f"{runner.model_config.architecture} has latent attention, and its blocks hold no "
                "keys of a draft"
            )
            raise ValueError(f"speculative_config: {latent}: use method 'ngram'")
        self.runner = runner
        self.config = config
        # Request id -> the distributions from which its drafts were drawn, `[num_drafts,
        # vocab_size]`; empty if drafts are not drawn.
        self.probabilities: dict[str, Tensor] = {}

    def cache_shapes(self, num_blocks: int) -> list[tuple[int, ...]]:
        """Of this model's layers, on this rank."""
        heads = num_kv_heads_of_rank(self.num_kv_heads, get_tp_group().world_size)
        width = self.head_dim + self.runner.backend.scale_bytes
        return [
            kv_cache_shape(num_blocks, heads, self.runner.config.block_size, width)
        ] * self.num_layers

    # ---------------------------------------------------------------- one step

    def follows(self, schedule: SchedulerOutput) -> bool:
        """Whether this model computes the step's tokens, too. Where no draft pays, it does not:
        later drafts may be worse for that, and no token is."""
        return any(r.num_drafts or r.num_tokens > 1 for r in schedule.requests)

    def prepare(self, schedule: SchedulerOutput) -> None:
        """Called before the first model runs a step."""

    def keep(self) -> None:
        """Called at the end of a first model's step that a graph records: what a replay shall leave
        goes into buffers."""

    def propose(
        self, schedule: SchedulerOutput, batch: Batch, hidden: Tensor, emitted: dict[str, list[int]]
    ) -> dict[str, list[int]]:
        """Draft for the requests of a step that has just been run.

        Args:
            hidden: the first model's last hidden states, `[num_tokens, hidden_size]`.
            emitted: the tokens that each request has got: its accepted drafts, and one more.

        Returns:
            By request, as many drafts as its share asks for (`num_drafts`).
        """
        if not self.follows(schedule):
            return {}
        requests = schedule.requests
        new = [emitted.get(request.request_id, []) for request in requests]
        starts = np.array([request.start for request in requests])
        num_rejected = [
            len(request.draft_token_ids) + 1 - len(tokens) if tokens else 0
            for request, tokens in zip(requests, new, strict=True)
        ]
        # Rejected drafts were computed in vain.
        num_kept = np.array([request.num_tokens for request in requests]) - num_rejected
        num_drafts = np.array(
            [
                request.num_drafts if tokens else 0
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
        """Write each request's last new token behind its first `ends` tokens; the next step brings
        it, too."""
        token_ids = self.runner.rows.token_ids
        for tokens, row, end in zip(new, rows, ends, strict=True):
            if tokens and end < self.runner.config.max_request_tokens:
                token_ids[row, end] = tokens[-1]

    def _first_tokens(
        self, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray
    ) -> PackedTokens:
        """The tokens of the first pass: `lengths` of each request, from the positions `starts`
        on."""
        positions = _ranges(starts, lengths)
        last = self.runner.config.max_request_tokens - 1
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
        """Make the drafts of some requests, one token of each after another.

        Args:
            out: the result of `_forward` for them.
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
        """The next draft of each request; if it is drawn, `found` gets its distribution over the
        first model's vocabulary."""
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
        """Run the model over packed tokens; returns what its head takes, and what the next draft
        needs, of the tokens at the places `picked`."""
        runner = self.runner
        send = partial(upload, dtype=torch.int64, device=runner.device)
        metadata = self._metadata(tokens)
        caches = runner.kv_caches[len(runner.layers) :]  # behind those of the first model
        with forward_context(ForwardContext(runner.backend, caches, metadata)):
            out, features = self._run(send(tokens.ids), send(tokens.positions), features)
        chosen = send(picked)
        return out.index_select(0, chosen), (
            None if features is None else features.index_select(0, chosen)
        )

    def _metadata(self, tokens: PackedTokens) -> AttentionMetadata:
        """Where attention finds and writes the keys and values of packed tokens."""
        size = self.runner.config.block_size
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
        """What the model reads beside the tokens of the first pass, which are `sources` of the
        step's."""
        return None

    def _run(
        self, ids: Tensor, positions: Tensor, features: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError

    def _to_target(self, tokens: Tensor) -> Tensor:
        """Ids in the first model's vocabulary."""
        return tokens

    def _spread(self, logits: Tensor) -> Tensor:
        """Logits over the first model's vocabulary."""
        return logits


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """All numbers of the ranges that begin at `starts`, one range after the other."""
    offsets: np.ndarray = starts - (lengths.cumsum() - lengths)
    numbers: np.ndarray = np.arange(lengths.sum()) + offsets.repeat(lengths)
    return numbers


class DraftModel(Drafter):
    """A model of its own with the same vocabulary."""

    model: LlamaForCausalLM
    sees_new_token = True

    def __init__(self, runner: ModelRunner, config: SpeculativeConfig) -> None:
        super().__init__(runner, config)
        assert config.model is not None
        folder = resolve_model(config.model)
        target = runner.model_config
        shape = ModelConfig.from_pretrained(folder)
        if shape.vocab_size != target.vocab_size:
            sizes = f"{config.model!r} has {shape.vocab_size} tokens, the model {target.vocab_size}"
            raise ValueError(f"speculative_config: {sizes}: a draft model needs the same tokenizer")
        if shape.kv_lora_rank:
            raise ValueError(
                f"speculative_config: {shape.architecture} (latent attention) cannot draft: choose "
                "a model without"
            )
        if shape.quantization or config.quantization:
            with_settings = load("nanovllm.checkpoint.quantization:with_settings", "quantization")
            settings = replace(runner.config, quantization=config.quantization or "auto")
            shape = replace(shape, quantization=with_settings(shape.quantization, settings))
        self.num_layers = shape.num_layers
        self.num_kv_heads = shape.num_kv_heads
        self.head_dim = shape.head_dim
        longest = runner.config.max_model_len or target.max_position_embeddings
        self.model = load_model(folder, shape, runner.dtype, runner.device, longest)
        runner.prepare_model(self.model)

    def _run(
        self, ids: Tensor, positions: Tensor, features: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        out: Tensor = self.model(ids, positions)
        return out, None


class Eagle(Drafter):
    """A layer that continues the first model's hidden states (EAGLE: Li et al. 2024, arXiv
    2401.15077; EAGLE-3: arXiv 2503.01840)."""

    model: EagleModel
    sees_new_token = False
    num_layers = 1

    def __init__(self, runner: ModelRunner, config: SpeculativeConfig) -> None:
        super().__init__(runner, config)
        name = runner.folder.name  # the course model's, too, where a server has found its folder
        file = shipped_head(name) if config.model is None else Path(config.model).expanduser()
        if file is None:
            raise ValueError(
                f'speculative_config: nanovllm includes no head for {name!r}: name one as "model"'
            )
        longest = runner.config.max_model_len or runner.model_config.max_position_embeddings
        folder = file if file.is_file() else resolve_model(str(config.model))
        self.model = load_draft_model(folder, runner.model, runner.dtype, runner.device, longest)
        kind = "eagle3" if self.model.aux_layers else "eagle"
        if config.method != kind:
            raise ValueError(
                f"speculative_config: the head in '{folder}' is for method {kind!r}, not "
                f"{config.method!r}"
            )
        runner.prepare_model(self.model)
        # What runs the first model's layers: all in one call, or in parts, between which hidden
        # states are kept.
        self.target = runner.model.model
        whole = self.target.fused
        self.target.collect_hidden_states(self.model.aux_layers)
        self.ways = {False: ((), whole), True: (self.model.aux_layers, self.target.fused)}
        self._kept: list[Tensor] = []  # hidden states of a step that a graph has replayed
        self.num_kv_heads = self.model.num_kv_heads
        self.head_dim = self.model.head_dim

    def keep(self) -> None:
        states = self.target.aux_hidden_states
        most = self.runner.config.max_decodes
        self._kept = self._kept or [state.new_zeros(most, state.shape[1]) for state in states]
        for kept, state in zip(self._kept, states, strict=True):
            kept[: len(state)].copy_(state)

    def propose(
        self, schedule: SchedulerOutput, batch: Batch, hidden: Tensor, emitted: dict[str, list[int]]
    ) -> dict[str, list[int]]:
        if self.runner.graphs is not None and batch.metadata.max_query_len == 1:
            self.target.aux_hidden_states = self._kept
        return super().propose(schedule, batch, hidden, emitted)

    def prepare(self, schedule: SchedulerOutput) -> None:
        # A recorded step always keeps them.
        keeps = self.follows(schedule) or self.runner.graphs is not None
        self.target.aux_hidden_state_layers, self.target.fused = self.ways[keeps]

    def _features(self, hidden: Tensor, sources: Tensor) -> Tensor | None:
        states = self.target.aux_hidden_states or [hidden]
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
        spread = logits.new_full((len(logits), self.runner.model_config.vocab_size), float("-inf"))
        return spread.index_copy_(1, self.model.draft_to_target, logits)
