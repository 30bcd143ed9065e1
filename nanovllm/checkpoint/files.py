"""Reads the JSON files of a model folder, which may come from an untrusted source: each value is
checked before it is used.

The descriptions list all fields that are read; other fields of a file are ignored.
"""

import json
import logging
import re
import reprlib
from collections.abc import Callable, Collection, Mapping, Set
from pathlib import Path
from typing import Any

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


class Mistake(ValueError):
    """A value that cannot be used.

    Args:
        reason: continues "the value must".
        path: names and indices that lead to it, from the value that is checked.
    """

    def __init__(self, reason: str, value: object, *path: object) -> None:
        super().__init__(reason)
        self.reason = reason
        self.value = value
        self.path = path


# Returns a value in the form in which it is used, or raises a `Mistake`.
Kind = Callable[[object], object]


def anything(value: object) -> object:
    """A value of any type."""
    return value


def text(value: object) -> str:
    """A string."""
    if not isinstance(value, str):
        raise Mistake("be a valid string", value)
    return value


def flag(value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise Mistake("be a valid boolean", value)
    return value


def whole(low: int, high: int) -> Kind:
    """An integer from `low` to `high`."""

    def check(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise Mistake("be a valid integer", value)
        return value

    return _between(check, low, high)


def number(low: float, high: float) -> Kind:
    """A number from `low` to `high`; NaN is out of every range."""

    def check(value: object) -> int | float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise Mistake("be a valid number", value)
        return value

    in_range = _between(check, low, high)
    return lambda value: float(in_range(value))  # type: ignore[arg-type]


def _between(kind: Callable[[object], int | float], low: float, high: float) -> Kind:
    def check(value: object) -> int | float:
        found = kind(value)
        if not found >= low:
            raise Mistake(f"be at least {low}", value)
        if found > high:
            raise Mistake(f"be at most {high}", value)
        return found

    return check


def list_of(kind: Kind, length: int | None = None) -> Kind:
    """A list of this kind of values, and of this length."""

    def check(value: object) -> list[object]:
        if not isinstance(value, list):
            raise Mistake("be a valid list", value)
        if length is not None and len(value) != length:
            raise Mistake(f"have {length} entries", value)
        return [_entry(kind, entry, index) for index, entry in enumerate(value)]

    return check


def dict_of(kind: Kind, key: Kind = text) -> Kind:
    """An object with this kind of values, and of names."""

    def check(value: object) -> dict[object, object]:
        if not isinstance(value, dict):
            raise Mistake("be a valid dictionary", value)
        return {_entry(key, name, name): _entry(kind, entry, name) for name, entry in value.items()}

    return check


def _entry(kind: Kind, value: object, place: object) -> object:
    """Check a value at a place of a list or an object."""
    try:
        return kind(value)
    except Mistake as mistake:
        mistake.path = (place, *mistake.path)
        raise


def after(prepare: Callable[[object], object], kind: Kind) -> Kind:
    """A value that is of this kind after `prepare`."""
    return lambda value: kind(prepare(value))


json_object = dict_of(anything)


class Description:
    """The fields that are read from a file, or from an object in one.

    Args:
        fields: of each kind, the names in words. All may be absent or null.
        optional: fields that the engine can do without: an invalid one is ignored with a warning.
    """

    def __init__(self, fields: Mapping[Kind, str], optional: Set[str] = frozenset()) -> None:
        self.kinds = {name: kind for kind, names in fields.items() for name in names.split()}
        self.optional = optional

    def __call__(self, value: object) -> JsonObject:
        """As a `Kind`: return the described fields of an object."""
        if not isinstance(value, dict):
            raise Mistake("be a valid dictionary", value)
        return {
            name: _entry(self._of(name), value[name], name) for name in self.kinds if name in value
        }

    def _of(self, name: str) -> Kind:
        kind = self.kinds[name]
        return lambda value: None if value is None else kind(value)

    def read(self, values: Mapping[str, object], file: str) -> Fields:
        """The checked fields that are not null; see `check`."""
        return Fields(self.check(values, file), file)

    def check(self, values: Mapping[str, object], file: str) -> JsonObject:
        """The described fields that the file has, null or not, without invalid optional ones.

        Raises:
            ModelFileError: a value that is of another type or out of its range; names the file and
                the field.
        """
        found = {}
        for name in self.kinds:
            if name not in values:
                continue
            try:
                found[name] = _entry(self._of(name), _integral(values[name]), name)
            except Mistake as mistake:
                message = (
                    f"{file}: {'.'.join(map(str, mistake.path))} must {mistake.reason}, got "
                    f"{reprlib.repr(mistake.value)}"
                )
                if name not in self.optional:
                    raise ModelFileError(message) from mistake
                logger.warning("%s; %s is ignored", message, name)
        return found


def _as_list(value: object) -> object:
    """A list of ids, from one id or several; -1 means none."""
    ids = [value] if isinstance(value, int) else value
    return [token_id for token_id in ids if token_id != -1] if isinstance(ids, list) else ids


integer = whole(-(2**62), 2**62)
token_ids = after(_as_list, list_of(integer))
count = whole(0, 2**20)
size = whole(1, 2**20)
length = whole(1, 2**24)
factor = number(1e-6, 1e6)
coefficient = number(-1e6, 1e6)
# Some rotary types divide by theta's logarithm. The largest theta of a known model is 1e11.
theta = number(1.001, 1e15)

RopeScaling = Description(
    {
        text: "type rope_type",
        theta: "rope_theta",
        factor: "factor low_freq_factor high_freq_factor beta_fast beta_slow attention_factor",
        coefficient: "mscale mscale_all_dim partial_rotary_factor",
        length: "original_max_position_embeddings",
        flag: "truncate",
        # Parameters per layer type, which are not supported.
        json_object: "full_attention sliding_attention",
    }
)
NEEDED_BY_ROPE_TYPE = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


def rope(value: object) -> object:
    """Parameters of rotary scaling: complete, and in order."""
    fields = RopeScaling(value)
    kind = fields.get("rope_type") or fields.get("type") or "default"
    for name in NEEDED_BY_ROPE_TYPE.get(kind, ()):
        if fields.get(name) is None:
            raise Mistake(f"have {name}", value)
    if (fields.get("low_freq_factor") or 0) >= (fields.get("high_freq_factor") or 1e9):
        raise Mistake("have a low_freq_factor below its high_freq_factor", value)
    return fields


# config.json, of all supported architectures: type and range of each field. Any field may be absent
# or null.
CONFIG_FIELDS: dict[Kind, str] = {
    text: "hidden_act hidden_activation topk_method scoring_func",
    flag: (
        "tie_word_embeddings attention_bias mlp_bias use_sliding_window rope_interleave "
        "norm_topk_prob use_bidirectional_attention"
    ),
    list_of(text): "architectures layer_types",
    list_of(integer): "mlp_only_layers",
    json_object: "quantization_config",
    token_ids: "eos_token_id",
    rope: "rope_parameters rope_scaling",
    count: (
        "max_window_layers q_lora_rank first_k_dense_replace n_shared_experts n_group topk_group"
    ),
    size: (
        "hidden_size intermediate_size kv_lora_rank qk_nope_head_dim v_head_dim "
        "num_experts_per_tok moe_intermediate_size decoder_sparse_step moe_layer_freq"
    ),
    coefficient: "routed_scaling_factor",
    factor: "query_pre_attn_scalar partial_rotary_factor",
    theta: "rope_theta",
    length: "vocab_size max_position_embeddings original_max_position_embeddings",
    whole(1, 1000): "num_hidden_layers",
    whole(1, 4096): "num_attention_heads num_key_value_heads",
    whole(2, 65536): "head_dim qk_rope_head_dim",
    whole(0, 65536): "num_experts num_local_experts n_routed_experts",
    whole(0, 2**31): "sliding_window",
    number(0, 1): "rms_norm_eps",
    number(0, 1e6): "attn_logit_softcapping final_logit_softcapping",
}
ConfigFile = Description(CONFIG_FIELDS)

SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


# generation_config.json. `SamplingParams` checks the defaults.
GenerationConfigFile = Description(
    {token_ids: "eos_token_id", anything: " ".join(SAMPLING_DEFAULTS)}
)


def _shard(value: object) -> str:
    name = text(value)
    if Path(name).name != name or not name.endswith(".safetensors"):
        raise Mistake("be a *.safetensors file in the index's own folder", name)
    return name


# model.safetensors.index.json: which file each tensor is in.
IndexFile = Description({dict_of(_shard): "weight_map"})


def _token_text(value: object) -> object:
    """The text of a token that the file gives as text or as a serialized `AddedToken`."""
    return value.get("content") if isinstance(value, dict) else value


AddedTokenFields = Description(
    {text: "content", flag: "single_word lstrip rstrip normalized special"}
)


def _added_token(value: object) -> JsonObject:
    """A serialized `AddedToken`."""
    fields = AddedTokenFields(value)
    for name in ("content", *fields):
        if fields.get(name) is None:
            raise Mistake(f"have {name}", value)
    return fields


def _index(value: object) -> int:
    """A token's id, as a name in an object."""
    if not isinstance(value, str) or re.fullmatch(r"-?\d{1,9}", value) is None:
        raise Mistake("be a valid integer", value)
    return int(value)


def _values(value: object) -> object:
    """The entries of a list, or of an object."""
    return list(value.values()) if isinstance(value, dict) else value


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
token_text = after(_token_text, text)
# tokenizer_config.json, and special_tokens_map.json, which held a part of it before transformers
# 4.34.
TokenizerConfigFile = Description(
    {
        token_text: " ".join(NAMED_TOKENS),
        after(_values, list_of(token_text)): "extra_special_tokens additional_special_tokens",
        after(_templates_by_name, dict_of(text)): "chat_template",
        dict_of(_added_token, _index): "added_tokens_decoder",
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
