"""What a stage sends stays as it is, although the next step overwrites what it was computed in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.core.forward import Forward
from nanovllm.features.pipeline.stage import StageForward


class Reused(Forward):
    """Writes each step's output to the same buffer, as CUDA graphs do."""

    def __init__(self) -> None:
        super().__init__(None, None)  # type: ignore[arg-type]
        self.out = torch.zeros(4, 2)
        self.steps = 0

    def __call__(self, batch: Any) -> Tensor:
        self.steps += 1
        return self.out.fill_(self.steps)


def test_a_step_does_not_change_what_the_step_before_has_sent() -> None:
    sent: list[Tensor] = []
    link: Any = SimpleNamespace(
        group=SimpleNamespace(is_first=True, is_last=False), send=sent.append
    )
    stage = StageForward(Reused(), link)
    for counts in ([1, 2], []):  # of the second, one token is padding
        batch: Any = SimpleNamespace(num_scheduled=np.array(counts, dtype=np.int64))
        assert stage(batch) is None, "the next stage continues"
    assert [hidden.tolist() for hidden in sent] == [[[1.0, 1.0]] * 3, [[2.0, 2.0]]]
