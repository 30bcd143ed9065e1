"""The two kinds of models that draft: a smaller model, and a head on the target's hidden states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm.checkpoint.hub import resolve_model
from nanovllm.core.batch import Batch
from nanovllm.core.device_copies import upload
from nanovllm.core.schedule import SchedulerOutput
from nanovllm.data.parts import needed_for
from nanovllm.data.speculative_config import SpeculativeConfig
from nanovllm.features.speculation.drafter import DraftedRequest, Drafter, ranges
from nanovllm.models.config import ModelConfig
from nanovllm.models.eagle import AuxHiddenStates, load_draft_model, shipped_head
from nanovllm.models.loader import load_model

if TYPE_CHECKING:
    from nanovllm.assembly.model import LoadedModel
    from nanovllm.models.eagle import EagleModel
    from nanovllm.models.llama import LlamaForCausalLM


class DraftModel(Drafter):
    """Drafts with a separate model that has the target's vocabulary."""

    model: LlamaForCausalLM
    token_offset = 0

    def __init__(self, target: LoadedModel, config: SpeculativeConfig) -> None:
        super().__init__(target, config)
        assert config.model is not None
        folder = resolve_model(config.model)
        self.model = load_model(
            folder,
            self._shape(folder),
            target.dtype,
            target.device,
            target.max_positions,
            transforms=target.layer_transforms,
        )
        target.prepare(self.model)

    def _shape(self, folder: Path) -> ModelConfig:
        """Return the draft model's shape.

        Raises:
            ValueError: it cannot draft for this target.
        """
        shape = ModelConfig.from_pretrained(folder)
        vocab_size = self.target.model_config.vocab_size
        if shape.vocab_size != vocab_size:
            sizes = f"{self.config.model!r} has {shape.vocab_size} tokens, the model {vocab_size}"
            raise ValueError(f"speculative_config: {sizes}: a draft model needs the same tokenizer")
        if shape.kv_lora_rank:
            raise ValueError(
                f"speculative_config: {shape.architecture} (latent attention) cannot draft: choose "
                "a model without"
            )
        if not (shape.quantization or self.config.quantization):
            return shape
        with needed_for("quantization"):
            from nanovllm.checkpoint.quantization import with_settings
        settings = replace(self.target.config, quantization=self.config.quantization or "auto")
        return replace(shape, quantization=with_settings(shape.quantization, settings))

    def _run(
        self, ids: Tensor, positions: Tensor, features: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        out: Tensor = self.model(ids, positions)
        return out, None


class Eagle(Drafter):
    """Drafts with one layer on the target's hidden states (EAGLE: Li et al. 2024, arXiv 2401.15077;
    EAGLE-3: arXiv 2503.01840)."""

    model: EagleModel
    token_offset = 1

    def __init__(self, target: LoadedModel, config: SpeculativeConfig) -> None:
        super().__init__(target, config)
        folder = self._folder()
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
        # Hidden states of a replayed step, whose addresses never change; none if no step is
        # recorded.
        self._kept: list[Tensor] = []

    def _folder(self) -> Path:
        """Return the folder, or the file, of the head.

        Raises:
            ValueError: no head is named, and none comes with this package.
        """
        if self.config.model is not None:
            file = Path(self.config.model).expanduser()
            return file if file.is_file() else resolve_model(self.config.model)
        # The folder has the course model's name, also where a server has resolved it.
        name = self.target.folder.name
        shipped = shipped_head(name)
        if shipped is None:
            raise ValueError(
                f'speculative_config: nanovllm includes no head for {name!r}: name one as "model"'
            )
        return shipped

    def prepare(self, plan: SchedulerOutput) -> None:
        # A recorded step always keeps the hidden states.
        keeps = self.follows(plan) or bool(self._kept)
        self.aux.states.clear()
        self.layers.layer_calls = self.aux.layer_calls if keeps else self.plain_calls

    def keep(self) -> None:
        states = self.aux.states
        # The largest step is recorded first.
        self._kept = self._kept or [torch.zeros_like(state) for state in states]
        for kept, state in zip(self._kept, states, strict=True):
            kept[: len(state)].copy_(state)

    def _first_features(
        self, requests: list[DraftedRequest], batch: Batch, hidden: Tensor
    ) -> Tensor:
        # The first pass computes the first positions of each request in the target's step.
        firsts = batch.num_scheduled.cumsum() - batch.num_scheduled
        lengths = np.array([request.end - request.start for request in requests])
        sources = upload(ranges(firsts, lengths), torch.int64, hidden.device)
        # A replayed step runs no Python code, which would have set `aux.states`. EAGLE-1 has no
        # auxiliary states.
        states = self.aux.states or self._kept or [hidden]
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
