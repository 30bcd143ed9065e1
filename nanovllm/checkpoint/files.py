"""Reads the JSON files of a model folder, which may come from an untrusted source: each value is
checked before it is used.

The descriptions list all fields that are read; other fields of a file are ignored.
"""

import json
import logging
import reprlib
from collections.abc import Collection, Mapping, Set
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)

from nanovllm.data.json import JsonObject

logger = logging.getLogger(__name__)

# The index of a model with 100,000 tensors has 10 MB.
LARGEST_FILE = 100 << 20


class ModelFileError(ValueError):
    """A file of a model folder that cannot be used; the message names the file and the field."""


class UnsupportedModelError(ValueError):
    """A checkpoint that this engine cannot run; the message says why, and what is supported."""


def check_supported(what: str, value: str, supported: Collection[str]) -> None:
    """Raise an UnsupportedModelError, which names the supported values, unless the value is one of
    them."""
    if value not in supported:
        raise UnsupportedModelError(
            f"{what} {value!r} is not supported; supported are {', '.join(supported)}"
        )


class Fields(dict[str, Any]):
    """The fields of a file that are not null. Indexing with another name raises an error that names
    the field and the file."""

    def __init__(self, values: Mapping[str, object], file: str) -> None:
        super().__init__({name: value for name, value in values.items() if value is not None})
        self.file = file

    def __missing__(self, name: str) -> Any:
        raise ModelFileError(f"{self.file}: {name} is missing")


def read_json(path: Path) -> JsonObject:
    """Read the object in a JSON file; empty if there is no such file.

    Raises:
        ModelFileError: the file is too large, or no JSON object.
    """
    if not path.is_file():
        return {}
    if path.stat().st_size > LARGEST_FILE:
        raise ModelFileError(f"'{path}' has more than {LARGEST_FILE >> 20} MiB")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (RecursionError, ValueError) as error:
        raise ModelFileError(f"'{path}' is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelFileError(f"'{path}' must hold a JSON object, got {reprlib.repr(values)}")
    return values


def _integral(value: object) -> object:
    """The value, with integers for floating-point numbers such as 131072.0, in lists and objects
    too."""
    if isinstance(value, list):
        return list(map(_integral, value))
    if isinstance(value, dict):
        return {name: _integral(entry) for name, entry in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Description(BaseModel):
    """The fields that are read from a file, with their types and ranges."""

    model_config = ConfigDict(strict=True, extra="ignore")

    #: Fields that the engine can do without: an invalid one is ignored with a warning.
    optional: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def read(cls, values: Mapping[str, object], file: str) -> Fields:
        """The checked fields that are not null; see `check`."""
        return Fields(cls.check(values, file), file)

    @classmethod
    def check(cls, values: Mapping[str, object], file: str) -> JsonObject:
        """The described fields that the file has, null or not, without invalid optional ones.

        Raises:
            ModelFileError: a value that is of another type or out of its range; names the file and
                the field.
        """
        whole = {name: _integral(value) for name, value in values.items()}
        try:
            return cls.model_validate(whole).model_dump(exclude_unset=True)
        except ValidationError as error:
            details = error.errors()[0]
            reason = details["msg"].removeprefix("Value error, ").replace("Input should", "must")
            reason = reason.replace("greater than or equal to", "at least").replace(
                "less than or equal to", "at most"
            )
            message = (
                f"{file}: {'.'.join(map(str, details['loc']))} {reason}, got "
                f"{reprlib.repr(details['input'])}"
            )
            if (name := str(details["loc"][0])) not in cls.optional:
                raise ModelFileError(message) from error
            logger.warning("%s; %s is ignored", message, name)
            del whole[name]
        return cls.check(whole, file)


def described(
    name: str, fields: Mapping[Any, str], optional: Set[str] = frozenset()
) -> type[Description]:
    """A description whose fields, named in words after their type, may all be absent or null."""
    types = {
        field: (kind | None, None) for kind, names in fields.items() for field in names.split()
    }
    model: type[Description] = create_model(name, __base__=Description, **types)  # type: ignore[call-overload]
    model.optional = frozenset(optional)
    return model


def between(low: float, high: float) -> object:
    """A check of a range, both ends included; NaN is out of every range."""
    return Field(ge=low, le=high)


def _as_list(value: object) -> object:
    """A list of ids, from one id or several; -1 means none."""
    ids = [value] if isinstance(value, int) else value
    return [token_id for token_id in ids if token_id != -1] if isinstance(ids, list) else ids


Count = Annotated[int, between(0, 2**20)]
Size = Annotated[int, between(1, 2**20)]
Number = Annotated[float, between(-1e6, 1e6)]
Factor = Annotated[float, between(1e-6, 1e6)]
TokenIds = Annotated[list[int], BeforeValidator(_as_list)]


# Some rotary types divide by theta's logarithm. The largest theta of a known model is 1e11.
Theta = Annotated[float, between(1.001, 1e15)]
RopeScaling = described(
    "RopeScaling",
    {
        str: "type rope_type",
        Theta: "rope_theta",
        Factor: "factor low_freq_factor high_freq_factor beta_fast beta_slow attention_factor",
        Number: "mscale mscale_all_dim partial_rotary_factor",
        Annotated[int, between(1, 2**24)]: "original_max_position_embeddings",
        bool: "truncate",
        # Parameters per layer type, which are not supported.
        JsonObject: "full_attention sliding_attention",
    },
)
NEEDED_BY_ROPE_TYPE = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


def _check_rope(found: Description) -> Description:
    fields = found.model_dump()
    needed = NEEDED_BY_ROPE_TYPE.get(fields["rope_type"] or fields["type"] or "default", ())
    if missing := [name for name in needed if fields[name] is None]:
        raise ValueError(f"must have {missing[0]}")
    if (fields["low_freq_factor"] or 0) >= (fields["high_freq_factor"] or 1e9):
        raise ValueError("must have a low_freq_factor below its high_freq_factor")
    return found


Rope = Annotated[RopeScaling, AfterValidator(_check_rope)]  # type: ignore[valid-type]


# config.json, of all supported architectures: type and range of each field. Any field may be absent
# or null.
CONFIG_FIELDS: dict[object, str] = {
    str: "hidden_act hidden_activation topk_method scoring_func",
    bool: (
        "tie_word_embeddings attention_bias mlp_bias use_sliding_window rope_interleave "
        "norm_topk_prob use_bidirectional_attention"
    ),
    list[str]: "architectures layer_types",
    list[int]: "mlp_only_layers",
    JsonObject: "quantization_config",
    TokenIds: "eos_token_id",
    Rope: "rope_parameters rope_scaling",
    Count: (
        "max_window_layers q_lora_rank first_k_dense_replace n_shared_experts n_group topk_group"
    ),
    Size: (
        "hidden_size intermediate_size kv_lora_rank qk_nope_head_dim v_head_dim "
        "num_experts_per_tok moe_intermediate_size decoder_sparse_step moe_layer_freq"
    ),
    Number: "routed_scaling_factor",
    Factor: "query_pre_attn_scalar partial_rotary_factor",
    Theta: "rope_theta",
    Annotated[
        int, between(1, 2**24)
    ]: "vocab_size max_position_embeddings original_max_position_embeddings",
    Annotated[int, between(1, 1000)]: "num_hidden_layers",
    Annotated[int, between(1, 4096)]: "num_attention_heads num_key_value_heads",
    Annotated[int, between(2, 65536)]: "head_dim qk_rope_head_dim",
    Annotated[int, between(0, 65536)]: "num_experts num_local_experts n_routed_experts",
    Annotated[int, between(0, 2**31)]: "sliding_window",
    Annotated[float, between(0, 1)]: "rms_norm_eps",
    Annotated[float, between(0, 1e6)]: "attn_logit_softcapping final_logit_softcapping",
}
ConfigFile = described("ConfigFile", CONFIG_FIELDS)

SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


# generation_config.json. `SamplingParams` checks the defaults.
GenerationConfigFile = described(
    "GenerationConfigFile", {TokenIds: "eos_token_id", object: " ".join(SAMPLING_DEFAULTS)}
)


def _check_shard(name: str) -> str:
    if Path(name).name != name or not name.endswith(".safetensors"):
        raise ValueError("must be a *.safetensors file in the index's own folder")
    return name


# model.safetensors.index.json: which file each tensor is in.
IndexFile = described(
    "IndexFile", {dict[str, Annotated[str, AfterValidator(_check_shard)]]: "weight_map"}
)


# The text of a token that the file gives as text or as a serialized `AddedToken`.
TokenText = Annotated[
    str, BeforeValidator(lambda token: token.get("content") if isinstance(token, dict) else token)
]


class AddedTokenFields(Description):
    """A serialized `AddedToken`."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


TokenTexts = Annotated[
    list[TokenText], BeforeValidator(lambda v: list(v.values()) if isinstance(v, dict) else v)
]


def _templates_by_name(value: object) -> object:
    """Templates by name, from one template or a list of named ones."""
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        return {entry.get("name"): entry.get("template") for entry in value}
    if isinstance(value, str):
        return {"default": value} if value else {}
    return value


NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# tokenizer_config.json, and special_tokens_map.json, which held a part of it before transformers
# 4.34.
TokenizerConfigFile = described(
    "TokenizerConfigFile",
    {
        TokenText: " ".join(NAMED_TOKENS),
        TokenTexts: "extra_special_tokens additional_special_tokens",
        Annotated[dict[str, str], BeforeValidator(_templates_by_name)]: "chat_template",
        dict[Annotated[int, Field(strict=False)], AddedTokenFields]: "added_tokens_decoder",
    },
    optional={*NAMED_TOKENS, "extra_special_tokens", "additional_special_tokens"} - {"eos_token"},
)


def shard_names(index: Path) -> list[str]:
    """The names of the files that an index lists, each once.

    Raises:
        ModelFileError: the index is damaged, or names a file that is not beside it.
    """
    return sorted(set(IndexFile.read(read_json(index), str(index))["weight_map"].values()))


def check_token_ids(values: Fields, vocab_size: int) -> None:
    """Check that the ids in a file are in the vocabulary.

    Raises:
        ModelFileError: an eos_token_id is not; names the file and the field.
    """
    for token_id in values.get("eos_token_id") or ():
        if not 0 <= token_id < vocab_size:
            raise ModelFileError(
                f"{values.file}: eos_token_id must be from 0 to {vocab_size - 1}, the size of the "
                f"vocabulary, got {token_id}"
            )
