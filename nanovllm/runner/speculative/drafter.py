"""Drafts tokens with a second, smaller model after each step of the first one: a model of its own,
or a head on the first one's hidden states. Its keys and values are further layers in the same
blocks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    from nanovllm.runner.runner import ModelRunner


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

    model: Any
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
        # Of the drafts to verify, if they are drawn: `[num_drafts, vocab_size]`.
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
        rows = self.runner.rows
        size = self.runner.config.max_request_tokens
        requests = schedule.requests
        new = [emitted.get(r.request_id, []) for r in requests]
        # Rejected drafts were computed in vain.
        rejected = [
            len(r.draft_token_ids) + 1 - len(tokens) if tokens else 0
            for r, tokens in zip(requests, new, strict=True)
        ]
        starts = np.array([r.start for r in requests])
        counts = np.array([r.num_tokens for r in requests], dtype=np.int64) - np.array(
            rejected, dtype=np.int64
        )
        for row, end, tokens in zip(batch.rows, starts + counts, new, strict=True):
            if tokens and end < size:
                rows.token_ids[row, end] = tokens[-1]  # the next step brings it, too
        wanted = np.array(
            [r.num_drafts if tokens else 0 for r, tokens in zip(requests, new, strict=True)]
        )
        lengths = counts + (wanted > 0) * self.sees_new_token
        positions = _ranges(starts, lengths)
        ids = rows.token_ids[
            batch.rows.repeat(lengths), np.minimum(positions + (not self.sees_new_token), size - 1)
        ]
        sources = _ranges(batch.num_scheduled.cumsum() - batch.num_scheduled, counts)
        features = self._features(hidden, upload(sources, torch.int64, hidden.device))
        asking = np.flatnonzero(wanted)
        ends = starts + lengths
        out = self._forward(
            batch.rows, lengths, ends, ids, positions, features, lengths.cumsum()[asking] - 1
        )
        outputs = np.array([rows.num_known[i] - rows.num_prompt_tokens[i] for i in batch.rows]) + [
            len(t) for t in new
        ]
        names = [requests[i].request_id for i in asking]
        return self._continue(
            names, batch.rows[asking], ends[asking], outputs[asking], wanted[asking], out
        )

    def _continue(
        self,
        names: list[str],
        rows: np.ndarray,
        ends: np.ndarray,
        indices: np.ndarray,
        wanted: np.ndarray,
        out: tuple[Tensor, Tensor | None],
    ) -> dict[str, list[int]]:
        """Make the drafts of some requests, one token of each after another.

        Args:
            ends: how many tokens of each request this model has computed.
            indices: of the first draft in the request's output.
            wanted: how many drafts, 1 or more.
            out: what `_forward` returned for them.
        """
        drafts: dict[str, list[int]] = {name: [] for name in names}
        found: dict[str, list[Tensor]] = {name: [] for name in names}
        going_on = np.arange(len(names))
        for step in range(wanted.max(initial=0)):
            x, features = out
            tokens = self._choose(x, [names[i] for i in going_on], indices[going_on] + step, found)
            for i, token in zip(going_on, tokens, strict=True):
                drafts[names[i]].append(token)
            stay = np.flatnonzero(wanted[going_on] > step + 1)
            going_on = going_on[stay]
            if len(stay):
                picked = upload(stay, torch.int64, x.device)
                features = None if features is None else features.index_select(0, picked)
                positions = ends[going_on] + step
                each = np.arange(len(stay))
                ids = np.array(tokens)[stay]
                out = self._forward(
                    rows[going_on], each * 0 + 1, positions + 1, ids, positions, features, each
                )
        self.probabilities = {name: torch.stack(parts) for name, parts in found.items() if parts}
        return drafts

    def _choose(
        self, x: Tensor, names: list[str], indices: np.ndarray, found: dict[str, list[Tensor]]
    ) -> list[int]:
        """The next draft of each request; if it is drawn, `found` gets its distribution over the
        first model's vocabulary."""
        logits = self.model.compute_logits(x)
        if self.config.draft_sample_method == "greedy":
            return self._to_target(ops.argmax(logits)).tolist()
        tokens = []
        for name, row, index in zip(names, self._spread(logits.float()), indices, strict=True):
            token, distribution = draw_draft(row, self.runner.rows.params[name], int(index))
            found[name].append(distribution)
            tokens.append(token)
        return tokens

    def _forward(
        self,
        rows: np.ndarray,
        lengths: np.ndarray,
        seq_lens: np.ndarray,
        ids: np.ndarray,
        positions: np.ndarray,
        features: Tensor | None,
        wanted: np.ndarray,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the model over packed tokens; returns what its head takes, and what the next draft
        needs, of the tokens number `wanted`."""
        runner = self.runner
        size = self.runner.config.block_size
        send = partial(upload, device=self.runner.device)
        tables = runner.rows.block_tables
        blocks = tables[rows.repeat(lengths), positions // size].astype(np.int64)
        width = -(-int(seq_lens.max()) // size)
        metadata = AttentionMetadata(
            send(np.concatenate([[0], lengths.cumsum()]), torch.int32),
            send(seq_lens, torch.int32),
            send(tables[rows, :width], torch.int32),
            send(blocks * size + positions % size, torch.int64),
            int(lengths.max()),
            int(seq_lens.max()),
        )
        caches = runner.kv_caches[len(runner.layers) :]  # behind those of the first model
        with forward_context(ForwardContext(runner.backend, caches, metadata)):
            out, features = self._run(
                send(ids, torch.int64), send(positions, torch.int64), features
            )
        picked = send(wanted, torch.int64)
        return out.index_select(0, picked), (
            None if features is None else features.index_select(0, picked)
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
    return np.arange(lengths.sum()) + (starts - (lengths.cumsum() - lengths)).repeat(lengths)


class DraftModel(Drafter):
    """A model of its own with the same vocabulary."""

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
        return self.model(ids, positions), None


class Eagle(Drafter):
    """A layer that continues the first model's hidden states (EAGLE: Li et al. 2024, arXiv
    2401.15077; EAGLE-3: arXiv 2503.01840)."""

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
        keeps = (
            self.follows(schedule) or self.runner.graphs is not None
        )  # a recorded step always keeps them
        self.target.aux_hidden_state_layers, self.target.fused = self.ways[keeps]

    def _features(self, hidden: Tensor, sources: Tensor) -> Tensor | None:
        states: Any = self.target.aux_hidden_states or [hidden]
        return self.model.combine_hidden_states(
            torch.cat([state.index_select(0, sources) for state in states], dim=1)
        )

    def _run(
        self, ids: Tensor, positions: Tensor, features: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return self.model(ids, positions, features)

    def _to_target(self, tokens: Tensor) -> Tensor:
        return self.model.draft_to_target[tokens]

    def _spread(self, logits: Tensor) -> Tensor:
        spread = logits.new_full((len(logits), self.runner.model_config.vocab_size), float("-inf"))
        return spread.index_copy_(1, self.model.draft_to_target, logits)
