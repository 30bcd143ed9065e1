"""Reads a checkpoint's config.json into one plain-data class for all supported architectures."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nanovllm.checkpoint import files
from nanovllm.checkpoint.files import Fields, ModelFileError, UnsupportedModelError, read_json
from nanovllm.data.json import JsonObject
from nanovllm.data.parts import needed_for
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.models.defaults import DEFAULTS, with_defaults

if TYPE_CHECKING:
    from nanovllm.checkpoint.quantization import QuantizationConfig
    from nanovllm.models.moe_config import MoEConfig

logger = logging.getLogger(__name__)


# More than any known model has.
MAX_POSITIONS = 2**24


@dataclass(frozen=True)
class Architecture:
    """How an architecture differs from Llama.

    Attributes:
        has_experts: it may have a mixture of experts.
        latent: latent attention (DeepSeek).
        qkv_bias: of the projections to q, k and v; None: config.json says it (`attention_bias`).
        qk_norm: queries and keys are normalised.
        alternating: every second layer has a sliding window.
        activation: key of the activation function, and its only supported value.
        rope_types: supported types of rotary scaling.
        routing: values of keys that may be absent or null. defaults.py has the defaults of missing
            keys.
    """

    has_experts: bool = False
    latent: bool = False
    qkv_bias: bool | None = None
    qk_norm: bool = False
    alternating: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    routing: Mapping[str, object] = field(default_factory=dict)


_MIXTRAL = Architecture(has_experts=True, routing={"norm_topk_prob": True})
_DEEPSEEK = Architecture(has_experts=True, latent=True, rope_types=("default", "yarn"))
_V3_ROUTING = {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
# By the name in config.json.
SUPPORTED_ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True),
    "Qwen3ForCausalLM": Architecture(qk_norm=True),
    "MixtralForCausalLM": _MIXTRAL,
    "Qwen3MoeForCausalLM": replace(_MIXTRAL, qk_norm=True, routing={}),
    "Gemma2ForCausalLM": Architecture(
        alternating=True, activation=("hidden_activation", "gelu_pytorch_tanh")
    ),
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": replace(_DEEPSEEK, routing=_V3_ROUTING),
}


@dataclass
class ModelConfig:
    """The shape of a model.

    Attributes:
        layer_windows: sliding window of each layer in tokens, 0 for full attention.
        attention_scale: factor on q·k, 0 for the usual `head_dim ** -0.5`.
        q_lora_rank, kv_lora_rank, qk_nope_head_dim, v_head_dim: of latent attention (DeepSeek);
            kv_lora_rank is 0 for a model without. With it, `head_dim` counts the rotated channels
            (qk_rope_head_dim), and q_lora_rank 0 means that queries are not compressed.
        rope_interleave: pairs of rotated channels are neighbours in the checkpoint (DeepSeek).
        moe: experts and how tokens are routed to them; None for a model without experts.
        attention_soft_cap, logit_soft_cap: bound on attention scores and on logits, 0 for none
            (Gemma 2).
        rope_scaling: the checkpoint's parameters, {"rope_type": "default"} if it has none.
        quantization: how the weights are quantized; None if they are not.
        eos_token_ids: every id that ends a sequence, from config.json and from
            generation_config.json.
        generation_defaults: sampling values that the checkpoint recommends.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: JsonObject = field(default_factory=lambda: {"rope_type": "default"})
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layer_windows: list[int] = field(default_factory=list)
    attention_scale: float = 0.0
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    moe: MoEConfig | None = None
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    v_head_dim: int = 0
    rope_interleave: bool = False
    quantization: QuantizationConfig | None = None
    eos_token_ids: list[int] = field(default_factory=list)
    generation_defaults: JsonObject = field(default_factory=dict)

    @classmethod
    def from_pretrained(cls, folder: str | pathlib.Path) -> ModelConfig:
        """Read config.json and generation_config.json; and quantize_config.json or
        quant_config.json, unless config.json says how the weights are quantized.

        Raises:
            UnsupportedModelError: an architecture, activation or rotary scaling that is not
                supported.
            ModelFileError: a field that is missing, of another type or out of its range.
        """
        names = ("config", "generation_config", "quantize_config", "quant_config")
        raw, generation, of_gptq, of_awq = (
            read_json(pathlib.Path(folder, f"{name}.json")) for name in names
        )
        # Old AutoGPTQ and AutoAWQ wrote the settings of the quantization into files of their own.
        return cls.from_dict({"quantization_config": of_gptq or of_awq or None} | raw, generation)

    @classmethod
    def from_dict(cls, raw: JsonObject, generation: JsonObject | None = None) -> ModelConfig:
        """The same from parsed files; transformers 4 and 5 spell some keys differently, and both
        are read."""
        checked = files.ConfigFile.check(raw, "config.json")
        architecture = (checked.get("architectures") or ["none"])[0]
        files.check_supported("architecture", architecture, SUPPORTED_ARCHITECTURES)
        traits = SUPPORTED_ARCHITECTURES[architecture]
        fields = _with_defaults(checked, architecture)
        num_heads = fields["num_attention_heads"]
        num_layers = fields["num_hidden_layers"]
        theta, scaling, max_positions = _rotary(fields, architecture)
        defaults = files.GenerationConfigFile.read(generation or {}, "generation_config.json")
        for file in (fields, defaults):
            files.check_token_ids(file, fields["vocab_size"])
        # Qwen2 has biases on q, k and v only; Llama's attention_bias puts one on the output too.
        attention_bias = fields.get("attention_bias", False)
        latent = traits.latent
        same = ["vocab_size", "hidden_size", "intermediate_size"]
        same += ["kv_lora_rank", "qk_nope_head_dim", "v_head_dim"] if latent else []
        optional = ["rms_norm_eps", "tie_word_embeddings", "mlp_bias"]
        optional += ["q_lora_rank"] if latent else []
        config = cls(
            architecture=architecture,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=1 if latent else fields.get("num_key_value_heads") or num_heads,
            head_dim=fields.get("qk_rope_head_dim")
            or fields.get("head_dim")
            or fields["hidden_size"] // num_heads,
            max_position_embeddings=max_positions,
            rope_theta=theta,
            rope_scaling=scaling,
            qkv_bias=attention_bias if traits.qkv_bias is None else traits.qkv_bias,
            output_bias=attention_bias and architecture != "Qwen2ForCausalLM",
            qk_norm=traits.qk_norm,
            layer_windows=_windows(fields, architecture),
            attention_scale=fields["query_pre_attn_scalar"] ** -0.5
            if "query_pre_attn_scalar" in fields
            else 0.0,
            attention_soft_cap=fields.get("attn_logit_softcapping", 0.0),
            logit_soft_cap=fields.get("final_logit_softcapping", 0.0),
            moe=_experts(fields, architecture) if traits.has_experts else None,
            rope_interleave=latent and fields.get("rope_interleave", True),
            eos_token_ids=_eos_token_ids(fields, defaults),
            generation_defaults=_sampling_defaults(defaults),
            quantization=_quantization(fields) if fields.get("quantization_config") else None,
            **{name: fields[name] for name in same},
            **{name: fields[name] for name in optional if name in fields},
        )
        config._check_heads()
        return config

    def _check_heads(self) -> None:
        wrong = ""
        if self.num_heads % self.num_kv_heads:
            counts = f"{self.num_heads} and {self.num_kv_heads}"
            wrong = f"num_attention_heads must be a multiple of num_key_value_heads, got {counts}"
        elif self.head_dim < 2 or self.head_dim % 2:
            wrong = (
                f"head_dim must be even, since channels are rotated in pairs, got {self.head_dim}"
            )
        elif (found := len(self.layer_windows)) != self.num_layers:
            wrong = (
                f"layer_types must have num_hidden_layers ({self.num_layers}) entries, got {found}"
            )
        if wrong:
            raise ModelFileError(f"config.json: {wrong}")

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers that the KV cache stores for one token, over all layers."""
        return self.num_layers * (
            self.latent_width if self.kv_lora_rank else 2 * self.num_kv_heads * self.head_dim
        )

    @property
    def latent_width(self) -> int:
        """Numbers of a token's row in a layer's latent cache: the latent and the rotated part of
        the key."""
        return self.kv_lora_rank + self.head_dim


def _experts(fields: Fields, architecture: str) -> MoEConfig | None:
    """Read the mixture of experts; None for a model without."""
    with needed_for(f"architecture {architecture}"):
        from nanovllm.models.moe_config import MoEConfig
    return MoEConfig.from_dict(fields)


def _quantization(fields: Fields) -> QuantizationConfig:
    """Read how the weights are quantized."""
    with needed_for("quantization"):
        from nanovllm.checkpoint.quantization import QuantizationConfig
    return QuantizationConfig.from_dict(fields)


def _with_defaults(raw: JsonObject, architecture: str) -> Fields:
    """The fields of a config.json and the defaults of missing ones.

    Raises:
        UnsupportedModelError: an activation function or attention that is not supported.
    """
    traits = SUPPORTED_ARCHITECTURES[architecture]
    found = Fields(with_defaults(raw, architecture), "config.json")
    found = Fields({**traits.routing, **found}, "config.json")
    key, activation = traits.activation
    files.check_supported(key, found.get(key, activation), [activation])
    if found.get("use_bidirectional_attention"):
        raise UnsupportedModelError(
            "use_bidirectional_attention is not supported; supported is causal attention"
        )
    return found


def _rotary(raw: Fields, architecture: str) -> tuple[float, JsonObject, int]:
    """Return theta, the scaling parameters, and the most positions. transformers 5 writes the first
    two into `rope_parameters`, and transformers 4 into `rope_theta` and `rope_scaling`. If a file
    has both, `rope_scaling` replaces all of `rope_parameters`, theta included, as in transformers.
    Of checkpoints with YaRN, some store the original length and some the stretched one; as in vLLM,
    the parameters decide."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    scaling = {name: value for name, value in given.items() if value is not None}
    per_layer_type = [name for name, value in scaling.items() if isinstance(value, dict)]
    if per_layer_type:
        what = f"rotary parameters per layer type ({', '.join(per_layer_type)}) are"
        raise UnsupportedModelError(
            f"{what} not supported; supported is one set of parameters for all layers"
        )
    if scaling.pop("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModelError(
            "partial_rotary_factor is not supported; supported is 1, all channels of a head"
        )
    theta = scaling.pop("rope_theta", raw.get("rope_theta", DEFAULTS[architecture]["rope_theta"]))
    kind = scaling.pop("type", "default")
    kind = scaling.setdefault("rope_type", kind)
    supported = SUPPORTED_ARCHITECTURES[architecture].rope_types
    files.check_supported("rope_scaling of type", kind, supported)
    if kind in ("llama3", "yarn"):
        original = raw.get(
            "original_max_position_embeddings", scaling.get("original_max_position_embeddings")
        )
        scaling["original_max_position_embeddings"] = original or raw["max_position_embeddings"]
    max_positions = raw["max_position_embeddings"]
    if kind == "yarn":
        original = scaling["original_max_position_embeddings"]
        max_positions = int(original * scaling["factor"])
        if not 1 <= max_positions <= MAX_POSITIONS:
            raise ModelFileError(
                f"config.json: rope_scaling stretches {original} positions to {max_positions}, and "
                f"must lead to 1 to {MAX_POSITIONS}"
            )
    return float(theta), scaling, max_positions


def _windows(raw: Fields, architecture: str) -> list[int]:
    """Sliding window of each layer. Mistral has one for all layers, Gemma 2 for every second layer
    from the first, and Qwen for those that `layer_types` or `max_window_layers` names, if
    `use_sliding_window` is true."""
    keys = DEFAULTS[architecture]
    num_layers = raw["num_hidden_layers"]
    has_window = "sliding_window" in keys and (
        "use_sliding_window" not in keys or raw.get("use_sliding_window")
    )
    window = raw.get("sliding_window", 0) if has_window else 0
    kinds = raw.get("layer_types")
    if kinds is not None:
        for kind in kinds:
            files.check_supported("a layer of type", kind, ("full_attention", "sliding_attention"))
        return [window if kind == "sliding_attention" else 0 for kind in kinds]
    if SUPPORTED_ARCHITECTURES[architecture].alternating:
        return [0 if layer % 2 else window for layer in range(num_layers)]
    first = raw.get("max_window_layers", 0) if "max_window_layers" in keys else 0
    return [window if layer >= first else 0 for layer in range(num_layers)]


def _eos_token_ids(raw: Fields, generation: Fields) -> list[int]:
    """The tokens that end an output, of both files, each once."""
    return list(dict.fromkeys(raw.get("eos_token_id", []) + generation.get("eos_token_id", [])))


def _sampling_defaults(generation: Fields) -> JsonObject:
    """The recommended values that `SamplingParams` accepts; others are ignored with a warning."""
    defaults = {name: generation[name] for name in files.SAMPLING_DEFAULTS if name in generation}
    for name, value in list(defaults.items()):
        try:
            SamplingParams(**{name: value})
        except ValueError as error:
            logger.warning("generation_config.json: %s; %s is ignored", error, name)
            del defaults[name]
    return defaults
