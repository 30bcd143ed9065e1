"""What every part is told."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass
from typing import Any

from nanovllm.models.config import ModelConfig


@dataclass(frozen=True)
class Setting:
    """What to measure on, and how often.

    Attributes:
        folder: the checkpoint.
        threads: cores that one engine computes on; several ranks share them.
        repeats: times that something long is measured; what is short is measured so many times more often.
        dry_run: tiny sizes: the same code, and no measurement.
    """

    folder: pathlib.Path
    model: ModelConfig
    dtype: str
    threads: int
    seed: int
    repeats: int
    dry_run: bool

    def options(self, **more: Any) -> dict[str, Any]:
        """Settings of an engine on this model: fields of `EngineConfig`."""
        memory = "8MiB" if self.dry_run else "512MiB"
        common = {"dtype": self.dtype, "seed": self.seed, "device": "cpu", "kv_cache_memory": memory}
        # Every run computes its prompts.
        return common | {"enable_prefix_caching": False} | more

    def tensor_size(self) -> int | None:
        """The fewest ranks, up to four, among which each layer of the model can be divided; None if it cannot."""
        from nanovllm.models.config import check_tensor_parallel

        for size in (2, 3, 4):
            try:
                check_tensor_parallel(self.model, size)
            except ValueError:
                continue
            return size
        return None
