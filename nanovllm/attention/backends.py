"""The attention backends, by name; each is imported when it is chosen, so that a machine without a
GPU never imports Triton."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from nanovllm.attention.base import AttentionBackend
from nanovllm.data.parts import needed_for
from nanovllm.ops.support import why_no_triton

logger = logging.getLogger(__name__)

BACKENDS = ("torch", "cpu", "triton", "triton_simple")
# The smallest kernel: plain attention over all earlier tokens (lecture 15).
SIMPLE = "triton_simple"


def backend_class(name: str, latent: bool) -> type[AttentionBackend]:
    """Import the class of a backend.

    Args:
        name: one of `BACKENDS`.
        latent: for latent attention (lecture 26).
    """
    if name == SIMPLE:
        from nanovllm.attention.triton_simple import SimpleTritonBackend

        return SimpleTritonBackend
    if name == "triton" and latent:
        from nanovllm.attention.triton_latent import TritonLatentBackend

        return TritonLatentBackend
    if name == "triton":
        from nanovllm.attention.triton import TritonBackend

        return TritonBackend
    if latent:
        from nanovllm.attention.latent import TorchLatentBackend

        return TorchLatentBackend
    from nanovllm.attention.torch import CpuBackend, TorchBackend

    return CpuBackend if name == "cpu" else TorchBackend


def get_backend(
    name: str,
    device: torch.device,
    head_dim: int = 64,
    latent: bool = False,
    extras: Sequence[str] = (),
) -> AttentionBackend:
    """Create the backend called `name`; "auto" takes the fastest one for the device.

    Args:
        latent: for latent attention.
        extras: of the model or the settings, in words: such as "sliding windows".

    Raises:
        ValueError: an unknown name, or a backend that cannot run this model on this device; names
            the alternative.
    """
    if name not in (*BACKENDS, "auto"):
        raise ValueError(
            f"attention backend {name!r} is not available here; available: {', '.join(BACKENDS)}"
        )
    if name == "cpu" and device.type != "cpu":
        raise ValueError(f"attention backend 'cpu' does not run on {device.type}; use 'torch'")
    if name == SIMPLE and (lacks := ["latent attention"] * latent + [*extras]):
        raise ValueError(
            f"attention backend {SIMPLE!r} does not support {' or '.join(lacks)}; use 'triton'"
        )
    if name == "auto" and device.type == "cpu":
        name = "cpu"
    if name in ("auto", "triton", SIMPLE):
        obstacle = why_no_triton(device, head_dim)
        if obstacle is not None and name != "auto":
            raise ValueError(
                f"attention backend {name!r} cannot run here: {obstacle}; use 'auto' or 'torch'"
            )
        if obstacle is not None:
            logger.warning(
                "using the slow attention backend 'torch', because 'triton' cannot run: %s",
                obstacle,
            )
        if name == "auto":
            name = "triton" if obstacle is None else "torch"
    with needed_for(f"attention backend {name!r}"):
        kind = backend_class(name, latent)
    return kind()


def backend_name(backend: AttentionBackend, given: str = "auto") -> str:
    """Return the name in `BACKENDS` of a backend: the given one, or else the one that "auto" has
    become."""
    return backend.name.partition(",")[0] if given == "auto" else given
