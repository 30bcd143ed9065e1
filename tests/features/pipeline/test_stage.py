"""What a stage sends stays as it is, also if the next step overwrites what it was computed in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanovllm.core.forward import Forward
from nanovllm.features.pipeline.stage import StageForward


class Counted(Forward):
    """Computes the number of the step; writes it to the same buffer each time, as CUDA graphs do,
    or to new memory."""

    def __init__(self, reuses_output: bool) -> None:
        super().__init__(None, None)  # type: ignore[arg-type]
        self.reuses_output = reuses_output
        self.out = torch.zeros(4, 2)
        self.steps = 0

    def __call__(self, batch: Any) -> Tensor:
        self.steps += 1
        if not self.reuses_output:
            self.out = torch.zeros(4, 2)
        return self.out.fill_(self.steps)


@pytest.mark.parametrize("reuses_output", [False, True])
def test_a_step_does_not_change_what_the_step_before_has_sent(reuses_output: bool) -> None:
    sent: list[Tensor] = []
    link: Any = SimpleNamespace(
        group=SimpleNamespace(is_first=True, is_last=False), send=sent.append
    )
    forward = Counted(reuses_output)
    stage = StageForward(forward, link, reuses_output)
    for counts in ([1, 2], []):  # of the second, one token is padding
        batch: Any = SimpleNamespace(num_scheduled=np.array(counts, dtype=np.int64))
        assert stage(batch) is None, "the next stage continues"
        is_copied = sent[-1].data_ptr() != forward.out.data_ptr()
        assert is_copied == reuses_output, "copied only if it must be"
    assert [hidden.tolist() for hidden in sent] == [[[1.0, 1.0]] * 3, [[2.0, 2.0]]]
