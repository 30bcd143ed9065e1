"""Reads the JSON files of a model folder. Whoever made the folder may be a stranger: each value is checked before it is used.

The descriptions hold all that is read; other fields of a file are ignored.
"""

from __future__ import annotations

import json
import logging
import reprlib
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

logger = logging.getLogger(__name__)

# The index of a model with 100,000 tensors has 10 MB.
LARGEST_FILE = 100 << 20


class ModelFileError(ValueError):
    """A file of a model folder that cannot be used; the message names the file and the field."""


class Fields(dict[str, Any]):
    """The fields that a file has, without those that are null. Asking for another one is an error that names it."""

    def __init__(self, values: dict[str, Any], file: str) -> None:
        super().__init__({name: value for name, value in values.items() if value is not None})
        self.file = file

    def __missing__(self, name: str) -> Any:
        raise ModelFileError(f"{self.file}: {name} is missing")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file.

    Raises:
        ModelFileError: the file is too large, or no JSON object.
    """
    if not path.is_file():
        return {}
    if path.stat().st_size > LARGEST_FILE:
        raise ModelFileError(f"'{path}' has more than {LARGEST_FILE >> 20} MiB")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ModelFileError(f"'{path}' is not valid JSON: it is nested too deeply") from error
    except ValueError as error:
        raise ModelFileError(f"'{path}' is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelFileError(f"'{path}' must hold a JSON object, got {reprlib.repr(values)}")
    return values


def _integral(value: Any) -> Any:
    """An integer for one that is written as a floating-point number, such as 131072.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _integrals(value: Any) -> Any:
    return list(map(_integral, value)) if isinstance(value, list) else _integral(value)


class Description(BaseModel):
    """What is read of a file."""

    model_config = ConfigDict(strict=True, extra="ignore")

    #: Fields that the engine can do without. If one cannot be used, it is ignored with a warning.
    optional: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def check(cls, values: dict[str, Any], file: str) -> dict[str, Any]:
        """The described fields that are there, null or not, without the optional ones that cannot be used.

        Raises:
            ModelFileError: a value that is of another type or out of its range; names the file and the field.
        """
        values = {name: _integrals(value) for name, value in values.items()}
        try:
            return cls.model_validate(values).model_dump(exclude_unset=True)
        except ValidationError as error:
            details = error.errors()[0]
            field = ".".join(map(str, details["loc"]))
            reason = details["msg"].removeprefix("Value error, ").replace("Input should", "must")
            if details["type"] == "missing":
                raise ModelFileError(f"{file}: {field} is missing") from error
            message = f"{file}: {field} {reason}, got {reprlib.repr(details['input'])}"
            if (name := str(details["loc"][0])) not in cls.optional:
                raise ModelFileError(message) from error
            logger.warning("%s; %s is ignored", message, name)
            del values[name]
        return cls.check(values, file)


def between(low: float, high: float) -> AfterValidator:
    """Both included; not a number is out of every range."""

    def check(value: float) -> float:
        if not low <= value <= high:
            raise ValueError(f"must be from {low} to {high}")
        return value

    return AfterValidator(check)


def _as_list(value: Any) -> Any:
    """One id or several; -1 stands for none."""
    ids = [value] if isinstance(value, int) else value
    return [token_id for token_id in ids if token_id != -1] if isinstance(ids, list) else ids


Count = Annotated[int, between(0, 2**20)]
Size = Annotated[int, between(1, 2**20)]
Number = Annotated[float, between(-1e6, 1e6)]
Factor = Annotated[float, between(1e-6, 1e6)]
TokenIds = Annotated[list[int], BeforeValidator(_as_list)]


class RopeScaling(Description):
    """Parameters of rotary positions, of any type."""

    type: str | None = None
    rope_type: str | None = None
    # Some divide by its logarithm. The largest of a known model is 1e11.
    rope_theta: Annotated[float, between(1.001, 1e15)] | None = None
    factor: Factor | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None
    original_max_position_embeddings: Annotated[int, between(1, 2**24)] | None = None
    beta_fast: Factor | None = None
    beta_slow: Factor | None = None
    mscale: Number | None = None
    mscale_all_dim: Number | None = None
    attention_factor: Factor | None = None


NEEDED_BY_ROPE_TYPE = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def _check_rope(values: dict[str, Any]) -> dict[str, Any]:
    """As it is in the file."""
    try:
        found = Fields(RopeScaling.check(values, ""), "")
        for name in NEEDED_BY_ROPE_TYPE.get(found.get("rope_type") or found.get("type") or "default", ()):
            found[name]
    except ModelFileError as error:
        raise ValueError(f"cannot be used: {str(error).removeprefix(': ')}") from error
    if found.get("low_freq_factor", 0) >= found.get("high_freq_factor", 1e9):
        raise ValueError("must have a low_freq_factor below its high_freq_factor")
    return values


Rope = Annotated[dict[str, Any], AfterValidator(_check_rope)]


class ConfigFile(Description):
    """config.json, of all supported architectures."""

    optional = frozenset({"bos_token_id"})

    architectures: list[str] | None = None
    vocab_size: Annotated[int, between(1, 2**24)] | None = None
    hidden_size: Size | None = None
    intermediate_size: Size | None = None
    num_hidden_layers: Annotated[int, between(1, 1000)] | None = None
    num_attention_heads: Annotated[int, between(1, 4096)] | None = None
    num_key_value_heads: Annotated[int, between(1, 4096)] | None = None
    head_dim: Annotated[int, between(2, 65536)] | None = None
    max_position_embeddings: Annotated[int, between(1, 2**24)] | None = None
    rms_norm_eps: Annotated[float, between(0, 1)] | None = None
    rope_theta: Annotated[float, between(1.001, 1e15)] | None = None
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    quantization_config: dict[str, Any] | None = None
    sliding_window: Annotated[int, between(0, 2**31)] | None = None
    use_sliding_window: bool | None = None
    max_window_layers: Count | None = None
    layer_types: list[str] | None = None
    query_pre_attn_scalar: Factor | None = None
    attn_logit_softcapping: Annotated[float, between(0, 1e6)] | None = None
    final_logit_softcapping: Annotated[float, between(0, 1e6)] | None = None
    bos_token_id: TokenIds | None = None
    eos_token_id: TokenIds | None = None
    # Latent attention
    kv_lora_rank: Size | None = None
    q_lora_rank: Count | None = None
    qk_nope_head_dim: Size | None = None
    qk_rope_head_dim: Annotated[int, between(2, 65536)] | None = None
    v_head_dim: Size | None = None
    rope_interleave: bool | None = None
    # Mixtures of experts
    num_experts: Annotated[int, between(0, 65536)] | None = None
    num_local_experts: Annotated[int, between(0, 65536)] | None = None
    n_routed_experts: Annotated[int, between(0, 65536)] | None = None
    num_experts_per_tok: Size | None = None
    moe_intermediate_size: Size | None = None
    decoder_sparse_step: Size | None = None
    mlp_only_layers: list[int] | None = None
    norm_topk_prob: bool | None = None
    first_k_dense_replace: Count | None = None
    moe_layer_freq: Size | None = None
    topk_method: str | None = None
    n_shared_experts: Count | None = None
    scoring_func: str | None = None
    routed_scaling_factor: Number | None = None
    n_group: Count | None = None
    topk_group: Count | None = None


SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class GenerationConfigFile(Description):
    """generation_config.json. The ranges are those of `SamplingParams`."""

    optional = frozenset({"bos_token_id", *SAMPLING_DEFAULTS})

    bos_token_id: TokenIds | None = None
    eos_token_id: TokenIds | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class IndexFile(Description):
    """model.safetensors.index.json: which file each tensor is in."""

    weight_map: dict[str, str]


def _content(token: Any) -> Any:
    """The text of a token that is given as such, or as a serialized `AddedToken`."""
    return token["content"] if isinstance(token, dict) and "content" in token else token


TokenText = Annotated[str, BeforeValidator(_content)]


class AddedTokenFields(Description):
    """A serialized `AddedToken`."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


def _token_list(value: Any) -> Any:
    return list(value.values()) if isinstance(value, dict) else value


TokenTexts = Annotated[list[TokenText], BeforeValidator(_token_list)]


def _templates_by_name(value: Any) -> Any:
    """One template, or a list of such that have names."""
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        return {entry.get("name"): entry.get("template") for entry in value}
    if isinstance(value, str):
        return {"default": value} if value else {}
    return value


class TokenizerConfigFile(Description):
    """tokenizer_config.json, and special_tokens_map.json, which held a part of it before transformers 4.34."""

    optional = frozenset(
        {
            *("bos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
            *("extra_special_tokens", "additional_special_tokens"),
        }
    )

    bos_token: TokenText | None = None
    eos_token: TokenText | None = None
    unk_token: TokenText | None = None
    sep_token: TokenText | None = None
    pad_token: TokenText | None = None
    cls_token: TokenText | None = None
    mask_token: TokenText | None = None
    chat_template: Annotated[dict[str, str], BeforeValidator(_templates_by_name)] | None = None
    added_tokens_decoder: dict[Annotated[int, Field(strict=False)], AddedTokenFields] | None = None
    extra_special_tokens: TokenTexts | None = None
    additional_special_tokens: TokenTexts | None = None


def shard_names(index: Path) -> list[str]:
    """The files that an index names, each once.

    Raises:
        ModelFileError: the index is damaged, or names a file that is not beside it.
    """
    names = sorted(set(IndexFile.check(read_json(index), str(index))["weight_map"].values()))
    if not names:
        raise ModelFileError(f"{index}: weight_map must name at least one file")
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelFileError(
                f"{index}: weight_map must name *.safetensors files in the index's own folder, got {name!r}"
            )
    return names


def check_token_ids(values: dict[str, Any], vocab_size: int, file: str) -> None:
    """See that the ids in a file are of the vocabulary. The engine does not use bos_token_id, and warns.

    Raises:
        ModelFileError: one is not; names the file and the field.
    """
    for name in ("bos_token_id", "eos_token_id"):
        for token_id in values.get(name) or ():
            if 0 <= token_id < vocab_size:
                continue
            message = f"{file}: {name} must be from 0 to {vocab_size - 1}, the size of the vocabulary, got {token_id}"
            if name == "eos_token_id":
                raise ModelFileError(message)
            logger.warning("%s; %s is ignored", message, name)
