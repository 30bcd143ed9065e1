"""A plain model knows no parallelism: no module of it imports process groups, and it is whole
whatever groups this rank is in, until it is transformed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from nanovllm.distributed import groups
from nanovllm.distributed.groups import GroupCoordinator
from nanovllm.distributed.pipeline_parallel import StageInput, keep_stage
from nanovllm.layers.tensor_parallel import QKVParallelLinear, parallelize
from nanovllm.models.config import ModelConfig
from nanovllm.models.loader import build_model
from tests.house import ROOT

# What lectures up to 18 build or use for a model of a dense architecture.
PLAIN = ["models.llama", "models.loader", "models.gemma2", "models.fused", "layers.basic", "ops"]


@pytest.mark.parametrize("name", PLAIN)
def test_no_process_group_is_imported(name: str) -> None:
    script = (
        f"import sys, nanovllm.{name}\n"
        "print([m for m in sys.modules if m.startswith('nanovllm.distributed')"
        " or m == 'nanovllm.layers.tensor_parallel'])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def shape() -> ModelConfig:
    return ModelConfig.from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
        }
    )


def test_groups_make_no_difference_to_a_plain_model(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {name: tuple(p.shape) for name, p in build_model(shape()).named_parameters()}
    for kind in ("tp", "pp"):
        monkeypatch.setitem(groups.own_groups, kind, GroupCoordinator(kind, [0, 1], 1))
    plain = build_model(shape())
    assert {name: tuple(p.shape) for name, p in plain.named_parameters()} == whole
    assert list(plain.attention_layers) == [0, 1] and plain.is_tied
    part = build_model(shape(), [parallelize, keep_stage])
    attention = part.model.layers[1].get_submodule("self_attn")
    assert isinstance(attention.qkv_proj, QKVParallelLinear)
    assert list(part.attention_layers) == [1] and isinstance(part.model.embed_tokens, StageInput)
    assert part.lm_head.weight.shape == (16, 16)
    assert list(part.checkpoint_places()["model.embed_tokens.weight"][0].shape) == [32, 16]


def test_a_group_of_one_leaves_a_model_as_it_is() -> None:
    model = build_model(shape())
    before = dict(model.named_modules())
    with torch.device("meta"):
        for transform in (parallelize, keep_stage):
            transform(model)
    assert dict(model.named_modules()) == before
