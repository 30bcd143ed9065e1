"""The class of each supported architecture, imported when a checkpoint asks for it."""

from __future__ import annotations

from collections.abc import Callable

from nanovllm.data.parts import needed_for
from nanovllm.models.llama import LlamaForCausalLM


def _mixture() -> type[LlamaForCausalLM]:
    from nanovllm.models.moe import MoEForCausalLM

    return MoEForCausalLM


def _deepseek() -> type[LlamaForCausalLM]:
    from nanovllm.models.deepseek import DeepseekForCausalLM

    return DeepseekForCausalLM


def _gemma2() -> type[LlamaForCausalLM]:
    from nanovllm.models.gemma2 import Gemma2ForCausalLM

    return Gemma2ForCausalLM


# All others are Llama with another configuration.
MODEL_CLASSES: dict[str, Callable[[], type[LlamaForCausalLM]]] = {
    "MixtralForCausalLM": _mixture,
    "Qwen3MoeForCausalLM": _mixture,
    "Gemma2ForCausalLM": _gemma2,
    "DeepseekV2ForCausalLM": _deepseek,
    "DeepseekV3ForCausalLM": _deepseek,
}


def model_class(architecture: str) -> type[LlamaForCausalLM]:
    """Return the class of an architecture, by its name in config.json.

    Raises:
        MissingPartError: this copy of the package does not have it.
    """
    if architecture not in MODEL_CLASSES:
        return LlamaForCausalLM
    with needed_for(f"architecture {architecture}"):
        found = MODEL_CLASSES[architecture]()
    return found
