"""The outside oracle: `transformers` in float32, and tiny random checkpoints of every supported
architecture."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import torch

from nanovllm import LLM, SamplingParams

TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

# Latent attention, and no experts in any layer.
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 8,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}

# name -> (transformers' configuration class, what differs from TINY)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-long": ("LlamaConfig", {"max_position_embeddings": 1024}),
    "llama-mha-tied": ("LlamaConfig", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-biased": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("LlamaConfig", {"head_dim": 24}),
    "llama3-rope": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "linear-rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
    ),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", {"sliding_window": 12}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "deepseek-v2-dense": ("DeepseekV2Config", LATENT),
    "deepseek-v2-dense-yarn": (
        "DeepseekV2Config",
        LATENT | {"q_lora_rank": 24, "rope_parameters": YARN},
    ),
    "deepseek-v3-dense": ("DeepseekV3Config", LATENT | {"attention_bias": True}),
    "deepseek-v3-dense-yarn": (
        "DeepseekV3Config",
        LATENT
        | {"q_lora_rank": 24, "rope_interleave": False, "rope_parameters": YARN | {"mscale": 1.0}},
    ),
    "deepseek-v2": (
        "DeepseekV2Config",
        LATENT | {"first_k_dense_replace": 1, "routed_scaling_factor": 0.8},
    ),
    "deepseek-v2-groups": (
        "DeepseekV2Config",
        LATENT
        | {
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "rope_parameters": YARN,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        LATENT | {"first_k_dense_replace": 1, "q_lora_rank": 24, "n_shared_experts": 1},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    # The second layer has an ordinary MLP, and weights of the chosen experts are not made to sum to
    # 1.
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe-normed": (
        "Qwen3MoeConfig",
        {
            "head_dim": 32,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
        },
    ),
    # The first and the third layer have windows. The caps are below what scores and logits reach
    # here.
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 256,
            "query_pre_attn_scalar": 1600,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 4.0,
            "sliding_window": 12,
            "tie_word_embeddings": True,
        },
    ),
}


def randomize(model: torch.nn.Module, embedding_deviation: float = 1.0) -> None:
    """Give a model random weights with which its text depends on all of the prompt, so that an
    error anywhere changes the output: those of the usual size give nearly the same token for
    ever."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
            else:
                parameter.normal_(0, 0.25 if "embed" not in name else embedding_deviation)


def make_checkpoint(
    folder: pathlib.Path, variant: str = "llama", shards: int = 1, seed: int = 0
) -> pathlib.Path:
    """Save a tiny random checkpoint, with a byte-level tokenizer, and return its folder."""
    import transformers

    config_class, changes = VARIANTS[variant]
    config = getattr(transformers, config_class)(**(TINY | changes))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Gemma multiplies embeddings with sqrt(hidden_size). With large ones, its tied head would
    # repeat the last token.
    embedding_deviation = config.hidden_size**-0.5 if config.model_type == "gemma2" else 1.0
    randomize(model, embedding_deviation)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
    size = sum(p.numel() * 4 for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=size // shards + 1 if shards > 1 else "50GB")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "chat_template": template,
                "eos_token": "</s>",
            }
        )
    )
    return folder


def make_tokenizer() -> Any:
    """Bytes as tokens, after three special ones."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<s>", "</s>"]
    vocabulary = {token: i for i, token in enumerate(special + alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@functools.cache
def reference_model(folder: str) -> Any:
    """transformers' model of a checkpoint, in float32."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def reference_tokens(
    folder: str, prompt: list[int], count: int, stop_ids: tuple[int, ...] = ()
) -> list[int]:
    """Greedy continuation by transformers: `count` tokens, or fewer if one of `stop_ids` comes."""
    return list(_reference_tokens(folder, tuple(prompt), count, stop_ids))


@functools.cache
@torch.inference_mode()
def _reference_tokens(
    folder: str, prompt: tuple[int, ...], count: int, stop_ids: tuple[int, ...]
) -> tuple[int, ...]:
    out = reference_model(folder).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=0,
    )
    return tuple(out[0, len(prompt) :].tolist())


@torch.inference_mode()
def greedy_choices(
    folder: str, prompts: list[list[int]], continuations: list[list[int]], count: int
) -> list[list[int]]:
    """What transformers would choose in the place of each of `count` tokens of the prompts'
    continuations, given all before it. If these are the tokens themselves, a continuation is its
    greedy one, by induction; and a single pass has shown it."""
    choices = []
    for prompt, tokens in zip(prompts, continuations, strict=True):
        assert len(tokens) == count
        logits = reference_model(folder)(
            torch.tensor([prompt + tokens[:-1]]), logits_to_keep=count
        ).logits[0]
        choices.append(logits.argmax(dim=-1).tolist())
    return choices


def greedy(llm: LLM, prompts: list[list[int]], count: int, **options: Any) -> list[list[int]]:
    """Greedy tokens by nanovllm, one list a prompt."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **options)
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
