"""Models of 1 to 2 billion parameters that README names: the configuration as it is published, with
random weights."""

from __future__ import annotations

import gc
import json
import pathlib
import random
from typing import Any

import pytest
import torch

from nanovllm import LLM
from nanovllm.models.config import ModelConfig
from tests.oracle import greedy, make_tokenizer

LLAMA_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
QWEN3_1_7B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PUBLISHED = {"Llama-3.2-1B-Instruct": LLAMA_1B, "Qwen3-1.7B": QWEN3_1_7B}
# By day two layers and few tokens, of the published width.
REDUCED: dict[str, Any] = {
    "num_hidden_layers": 2,
    "vocab_size": 1000,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}


def random_folder(
    folder: pathlib.Path, published: dict[str, Any], changes: dict[str, Any]
) -> pathlib.Path:
    """A checkpoint in bfloat16, whose config.json has exactly the published keys."""
    import transformers

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(published | changes))
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:  # of a size at which the text depends on all of the prompt
                parameter.normal_(0, parameter.shape[1] ** -0.5 * (1 if "embed" in name else 2))
    model.tie_weights()
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(published | changes))
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return folder


@torch.inference_mode()
def choices(
    folder: pathlib.Path, prompts: list[list[int]], continuations: list[list[int]]
) -> list[list[int]]:
    """What transformers prefers in the place of each token, see `tests.oracle.greedy_choices`; its
    model is not kept."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    found = []
    for prompt, tokens in zip(prompts, continuations, strict=True):
        logits = model(torch.tensor([prompt + tokens[:-1]]), logits_to_keep=len(tokens)).logits[0]
        found.append(logits.argmax(dim=-1).tolist())
    return found


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(REDUCED, id="two layers"),
        pytest.param({}, id="whole", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.timeout(3600)  # a whole model takes minutes on a busy machine
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration(
    tmp_path: pathlib.Path, name: str, changes: dict[str, Any]
) -> None:
    """The two models are in memory one after the other: a whole one in float32 takes 5 to 7 GB."""
    folder = random_folder(tmp_path / "model", PUBLISHED[name], changes)
    config = ModelConfig.from_pretrained(folder)
    draw = random.Random(name)
    prompts = [
        [draw.randrange(4, config.vocab_size) for _ in range(length)] for length in (1, 9, 200)
    ]
    llm = LLM(str(folder), dtype="float32", max_model_len=512, num_kv_blocks=64)
    found = greedy(llm, prompts, 12)
    del llm
    gc.collect()
    assert found == choices(folder, prompts, found)
    assert all(len(set(tokens)) > 6 for tokens in found), "the text does not depend on the prompt"


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Llama-3.2-1B-Instruct", 1.236), ("Qwen3-1.7B", 1.721)],
    ids=lambda value: str(value),
)
def test_the_published_number_of_parameters(name: str, billions: float) -> None:
    """Of the model that is built, with one matrix for embedding and head."""
    from nanovllm.models.loader import build_model

    model = build_model(ModelConfig.from_dict(PUBLISHED[name]))
    # On the meta device each name has a parameter of its own.
    count = sum(p.numel() for path, p in model.named_parameters() if not path.startswith("lm_head"))
    assert round(count / 1e9, 3) == billions
