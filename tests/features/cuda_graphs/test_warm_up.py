"""Before it serves, an engine on a GPU has every attention kernel compiled that its batches will
launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from nanovllm import LLM, SamplingParams, ops
from nanovllm.attention import triton as attention
from nanovllm.attention.torch import TorchBackend
from nanovllm.attention.triton import Hardware, TritonBackend
from nanovllm.features.cuda_graphs.graphs import WarmUp
from nanovllm.lab.kernel_compiler import TARGETS, record_launches, specialise
from nanovllm.ops.support import is_interpreted
from tests.oracle import make_checkpoint
from tests.stand_ins import set_backend, set_constants

if is_interpreted():
    pytest.skip("nothing is compiled", allow_module_level=True)


class Noted(TritonBackend):
    """Notes in which specialisation its kernels would be compiled; plain torch computes."""

    seen: set[Any]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        metadata: Any,
        scale: float,
        rotary: Any = None,
        **options: Any,
    ) -> Tensor:
        def launch() -> Tensor:
            return super(Noted, self).forward(
                q, k, v, kv_cache, metadata, scale, rotary=rotary, **options
            )

        for recorded in record_launches(launch):
            source, choices = specialise(recorded, TARGETS["sm_90"])
            self.seen.add((recorded.function.__name__, source.hash(), choices.hash()))
        if not metadata.seq_lens.all():
            return torch.zeros_like(q)  # padding
        q, k = ops.apply_rope(q, k, rotary.positions, rotary.cos_sin)
        return TorchBackend().forward(q, k, v, kv_cache, metadata, scale, **options)


@pytest.mark.parametrize("variant", ["llama", "gemma2"])
def test_what_is_served_was_warmed_up(
    variant: str, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Noted.seen = set()
    set_constants(monkeypatch, attention, SHORT_CONTEXT=64)  # the tiny model has no long contexts
    backend = Noted(Hardware(6, 227 * 1024))
    set_backend(monkeypatch, lambda: backend)
    llm = LLM(
        str(make_checkpoint(tmp_path, variant)),
        device="cpu",
        dtype="bfloat16",
        num_kv_blocks=512,
        max_num_seqs=13,
        max_num_batched_tokens=160,
    )
    core = llm.engine.core
    WarmUp(core.model_config.num_heads).allocated(core.runner)
    warm = set(Noted.seen)
    Noted.seen.clear()
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    for count in (1, 3, 13):
        lengths = [1, 2, 9, 17, 40, 150, 240, 3, 33, 65, 5, 100, 12][:count]
        prompts = [
            {"prompt_token_ids": [3 + (i * 7 + j) % 300 for j in range(n)]}
            for i, n in enumerate(lengths)
        ]
        llm.generate(prompts, params, use_tqdm=False)
    llm.generate({"prompt_token_ids": [5] * 245}, params, use_tqdm=False)
    names = {name for name, *_ in Noted.seen}
    assert names == {
        "write_kv_kernel",
        "decode_attention_kernel",
        "combine_kernel",
        "mixed_attention_kernel",
    }
    assert Noted.seen <= warm, f"{len(Noted.seen - warm)} kernels would be compiled in mid-serving"
