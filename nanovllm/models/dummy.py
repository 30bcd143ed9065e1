"""A checkpoint of random weights, for measurements: `load_format="dummy"`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from nanovllm.models.llama import LlamaForCausalLM


def dummy_tensors(model: LlamaForCausalLM, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield random weights of a plausible size: norms are 1, all others normal with a deviation of
    0.02. A tensor depends only on the seed and on its name, so that devices that share a model have
    the same weights as a single device."""
    parameter = next(model.parameters())
    for name, [place, *_] in model.checkpoint_places().items():
        tensor = torch.ones(place.shape, dtype=parameter.dtype, device=parameter.device)
        if "norm" not in name:
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = torch.Generator(parameter.device).manual_seed(
                int.from_bytes(digest[:6], "little")
            )
            tensor.normal_(0.0, 0.02, generator=generator)
        yield name, tensor
