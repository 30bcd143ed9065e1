"""The strategy for running the model on a batch. This one runs it operator by operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from nanovllm.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    ForwardContext,
    forward_context,
)
from nanovllm.core.batch import Batch, StepBuffers

if TYPE_CHECKING:
    from nanovllm.core.runner import ModelRunner
    from nanovllm.models.llama import LlamaForCausalLM


class Forward:
    """Runs the model.

    A subclass may arrange the batch in another way (`sequences`, `pad`), replay recorded work
    (`__call__`), or run a part of the model only.

    Attributes:
        kv_caches: of the model's layers, by the layer's number.
        samples: the runner samples from what `__call__` returns.
    """

    samples = True

    def __init__(self, model: LlamaForCausalLM, backend: AttentionBackend) -> None:
        self.model = model
        self.backend = backend
        self.kv_caches: dict[int, Tensor] = {}

    # ---------------------------------------------------------------- memory

    def cache_shapes(self, num_blocks: int, block_size: int) -> list[tuple[int, ...]]:
        """Return the shape of the KV cache of each layer of this runner."""
        layers = self.model.attention_layers.values()
        return [layer.cache_shape(num_blocks, block_size, self.backend) for layer in layers]

    def take_caches(self, kv_caches: Sequence[Tensor]) -> None:
        """Use these caches for the model's layers: the first ones, since those that features add
        come last."""
        self.kv_caches = dict(zip(self.model.attention_layers, kv_caches, strict=False))

    def make_room(self, num_tokens: int) -> None:
        """Make what a step of at most this many tokens needs, beyond `StepBuffers`."""

    def extra_bytes(self, runner: ModelRunner) -> int:
        """Return the device memory that `prepare` will take: measured, while the runner has small
        caches to try with."""
        return 0

    def prepare(self, runner: ModelRunner) -> None:
        """The runner has its caches and buffers; no step has run."""

    # ---------------------------------------------------------------- one step

    def sequences(self, rows: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return row and number of tokens of each sequence, as attention sees them.

        Args:
            rows, counts: `[num_requests]`, each request's row, and its number of tokens.
        """
        return rows, counts

    def pad(self, buffers: StepBuffers, counts: np.ndarray) -> int:
        """Append padding tokens, each its own sequence, to a batch in the buffers; returns their
        number.

        Args:
            counts: `[num_sequences]`, the number of tokens of each sequence.
        """
        return 0

    def __call__(self, batch: Batch) -> Tensor | None:
        """Run the model on a batch.

        Returns:
            Hidden states `[num_tokens, hidden_size]`, valid until the next call; None if another
            runner continues from here.
        """
        return self.run(batch.input_ids, batch.positions, batch.metadata)

    def run(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Run the layers of this runner; returns hidden states."""
        with forward_context(ForwardContext(self.backend, self.kv_caches, metadata)):
            hidden: Tensor = self.model(input_ids, positions)
            return hidden
