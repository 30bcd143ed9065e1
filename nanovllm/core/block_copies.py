"""Copies whole KV blocks between device and host memory, for requests that are swapped."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.core.device_copies import upload
from nanovllm.core.request import BlockCopies


def copy_blocks(copies: BlockCopies, source: list[Tensor], target: list[Tensor]) -> None:
    """Copy whole blocks between device and host memory, in the caches of all layers."""
    if not copies:
        return
    places = zip(zip(*copies, strict=True), (source, target), strict=True)
    from_blocks, to_blocks = (upload(ids, torch.int64, caches[0].device) for ids, caches in places)
    for source_cache, target_cache in zip(source, target, strict=True):
        target_cache[to_blocks] = source_cache[from_blocks].to(target_cache.device)
