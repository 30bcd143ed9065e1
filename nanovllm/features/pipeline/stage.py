"""The forward pass of one stage of a pipeline: gets hidden states from the stage before, and sends
them to the next.

Built by notebooks/23_pipeline_parallel.ipynb: edit it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm.core.batch import Batch, StepBuffers
from nanovllm.core.forward import Forward
from nanovllm.distributed.pipeline_parallel import stage_input
from nanovllm.distributed.stage_link import StageLink

if TYPE_CHECKING:
    from nanovllm.core.runner import ModelRunner


class StageForward(Forward):
    """Runs the layers of one stage.

    Args:
        forward: runs them, from the hidden states in the model's `StageInput`.
        link: connects this stage to the one before and the one after.
        reuses_output: `forward` may write the next step's output to the same memory.
    """

    def __init__(self, forward: Forward, link: StageLink, reuses_output: bool) -> None:
        super().__init__(forward.model, forward.backend)
        self.forward = forward
        self.link = link
        self.reuses_output = reuses_output
        self.samples = link.group.is_last

    # ---------------------------------------------------------------- memory

    def take_caches(self, kv_caches: Sequence[Tensor]) -> None:
        """See `Forward`."""
        super().take_caches(kv_caches)
        self.forward.take_caches(kv_caches)

    def make_room(self, num_tokens: int) -> None:
        """Make the buffer for the hidden states of the stage before."""
        if not self.link.group.is_first:
            stage_input(self.model).hidden = torch.zeros(
                num_tokens,
                self.model.config.hidden_size,
                dtype=self.link.dtype,
                device=self.link.device,
            )

    def extra_bytes(self, runner: ModelRunner) -> int:
        """See `Forward`."""
        return self.forward.extra_bytes(runner)

    def prepare(self, runner: ModelRunner) -> None:
        """See `Forward`."""
        self.forward.prepare(runner)

    # ---------------------------------------------------------------- a step

    def sequences(self, rows: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `Forward`."""
        return self.forward.sequences(rows, counts)

    def pad(self, buffers: StepBuffers, counts: np.ndarray) -> int:
        """See `Forward`."""
        return self.forward.pad(buffers, counts)

    def __call__(self, batch: Batch) -> Tensor | None:
        """Receive, run the layers, and send; returns hidden states on the last stage only."""
        # A batch of padding has no request, and one token.
        num_tokens = int(batch.num_scheduled.sum()) or 1
        if not self.link.group.is_first:
            self.link.receive(stage_input(self.model).hidden[:num_tokens])
        out = self.forward(batch)
        if self.samples or out is None:
            return out
        sent = out[:num_tokens]
        # The next step may begin before this one's output has been sent.
        self.link.send(sent.clone() if self.reuses_output else sent)
        return None
