"""Reads a checkpoint's `quantization_config`, and rejects what cannot be loaded before any weight
is read.

The configuration says in which format a layer is quantized. Which layers are quantized at all is
what the tensors' names and dtypes say (layers/quantization)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nanovllm.checkpoint.files import (
    Description,
    Fields,
    ModelFileError,
    UnsupportedModelError,
    anything,
    check_supported,
    dict_of,
    flag,
    json_object,
    list_of,
    size,
    text,
    whole,
)
from nanovllm.checkpoint.formats import FILE, SUPPORTED, MatrixFormat, check_format
from nanovllm.data.json import JsonObject

if TYPE_CHECKING:
    from nanovllm.data.config import EngineConfig

# Schemes that quantize an unquantized checkpoint while it is loaded.
ONLINE = ("w8a8", "w4a16", "w4a8")

# Bits and group sizes; `check_format` rejects unsupported ones.
small = whole(-(2**20), 2**20)
block = list_of(size, length=2)
Settings = Description(
    {
        text: "quant_method checkpoint_format format version activation_scheme fmt",
        small: "bits w_bit group_size q_group_size",
        flag: "sym desc_act static_groups zero_point",
        block: "weight_block_size",
        dict_of(json_object): "config_groups dynamic",
        json_object: "kv_cache_scheme sparsity_config transform_config",
    }
)
Sparsity = Description({text: "format"})
Override = Description({small: "bits group_size", flag: "sym desc_act static_groups"})
Group = Description(
    {
        text: "format",
        list_of(text): "targets",
        json_object: "weights input_activations output_activations",
    }
)
Numbers = Description(
    {
        small: "num_bits group_size",
        text: "type strategy",
        flag: "symmetric",
        block: "block_structure",
        anything: "actorder dynamic",
    }
)


@dataclass(frozen=True)
class Rule:
    """The format of the layers that a target names.

    Attributes:
        target: a layer's name, a regular expression for the beginning of names after "re:", or
            "Linear" or "Embedding" for all such layers.
    """

    target: str
    format: MatrixFormat

    @property
    def rank(self) -> int:
        """Place in the order in which rules are tried: names, then expressions, then kinds."""
        if self.target in KINDS:
            return 2
        return 1 if self.target.startswith("re:") else 0

    def names(self, layer: str) -> bool:
        """Return True if the target names this layer of the checkpoint."""
        if self.target in KINDS:
            return (self.target == "Embedding") == layer.endswith("embed_tokens")
        if self.target.startswith("re:"):
            return re.match(self.target.removeprefix("re:"), layer) is not None
        return self.target == layer


KINDS = ("Linear", "Embedding")


@dataclass(frozen=True)
class QuantizationConfig:
    """How the weights of a model are quantized.

    Attributes:
        method: "gptq", "awq", "compressed-tensors" or "fp8": how the checkpoint stores them; one of
            `ONLINE`: the scheme to which an unquantized checkpoint is quantized while it is loaded;
            "none".
        rules: the formats of the checkpoint's quantized layers; the first rule that names a layer
            has its format.
        w4a8: 4-bit weights are multiplied by inputs that are quantized to 8 bits.
        head: an output head that is not quantized in the checkpoint becomes W8A8, and so does the
            embedding if it is the same matrix.
    """

    method: str = "none"
    rules: tuple[Rule, ...] = ()
    w4a8: bool = False
    head: bool = False

    @classmethod
    def from_dict(cls, raw: JsonObject) -> QuantizationConfig:
        """Read the `quantization_config` of a parsed config.json.

        Raises:
            UnsupportedModelError: the message names what would work.
            ModelFileError: a field that is missing, of another type or out of its range.
        """
        fields = Settings.read(raw["quantization_config"], FILE)
        # Old checkpoints do not name their method.
        old = "gptq" if "desc_act" in fields else None
        if "w_bit" in fields:
            old = "awq"
        method = (fields.get("quant_method", old) or fields["quant_method"]).replace("_", "-")
        check_supported("quant_method", method, _READERS)
        rules = _READERS[method](fields)
        for rule in rules:
            check_format(rule.format)
        return cls(method, tuple(sorted(rules, key=lambda rule: rule.rank)))

    def format_of(self, layer: str) -> MatrixFormat | None:
        """Return the format of a quantized layer, by its name in the checkpoint; None if no rule
        names it. A single format needs no names."""
        formats = {rule.format for rule in self.rules}
        if len(formats) == 1:
            return self.rules[0].format
        return next((rule.format for rule in self.rules if rule.names(layer)), None)

    @property
    def is_dequantized(self) -> bool:
        """True if all weights of the checkpoint are dequantized while they are loaded."""
        return bool(self.rules) and all(
            SUPPORTED[rule.format.layout, rule.format.bits].dequantized for rule in self.rules
        )


# An 8-bit checkpoint with a scale per row, whose inputs are quantized, too.
W8A8_CHECKPOINT = QuantizationConfig(
    "compressed-tensors",
    (Rule("Linear", MatrixFormat("int-quantized", bits=8, scales="row", quantizes_inputs=True)),),
)


def _refuse(wrong: object, what: str, cure: str) -> None:
    if wrong:
        raise UnsupportedModelError(f"{FILE}: {what} is not supported; {cure}")


def _check_expression(target: str) -> None:
    try:
        re.compile(target.removeprefix("re:"))
    except re.error as error:
        raise ModelFileError(f"{FILE}: {target!r} is no regular expression: {error}") from error


def _grouped(size: int) -> tuple[str, int]:
    """(what shares a scale, inputs per group) for the group size of a file: -1 for whole rows."""
    return ("row", 0) if size == -1 else ("group", size)


def _read_gptq(fields: Fields) -> list[Rule]:
    check_supported(
        "checkpoint_format", fields.get("checkpoint_format", "gptq"), ["gptq", "gptq_v2"]
    )
    rules = []
    for pattern, raw in fields.get("dynamic", {}).items():
        if pattern.startswith("-:"):  # layers that are not quantized
            continue
        target = f"re:{pattern.removeprefix('+:')}"
        _check_expression(target)
        override = Override.read(raw, f"{FILE}.dynamic")
        rules.append(Rule(target, _gptq_format(Fields({**fields, **override}, FILE))))
    return [*rules, Rule("Linear", _gptq_format(fields))]


def _gptq_format(fields: Fields) -> MatrixFormat:
    scales, size = _grouped(fields["group_size"])
    reorders = fields.get("desc_act", False) and not fields.get("static_groups", False)
    return MatrixFormat(
        layout="gptq",
        bits=fields["bits"],
        scales=scales,
        group_size=size,
        has_zeros=not fields.get("sym", True),
        any_order=reorders and scales == "group",
    )


def _read_awq(fields: Fields) -> list[Rule]:
    check_supported("version of AWQ", fields.get("version", "gemm").lower(), ["gemm"])
    size = fields["group_size"] if "group_size" in fields else fields["q_group_size"]
    scales, size = _grouped(size)
    found = MatrixFormat(
        layout="awq",
        bits=fields.get("bits", fields.get("w_bit", 4)),
        scales=scales,
        group_size=size,
        has_zeros=fields.get("zero_point", True),
    )
    return [Rule("Linear", found)]


def _read_fp8(fields: Fields) -> list[Rule]:
    check_supported("fmt", fields.get("fmt", "e4m3"), ["e4m3"])
    scheme = fields.get("activation_scheme", "dynamic")
    check_supported("activation_scheme", scheme, ["dynamic", "static"])
    outputs, inputs = fields.get("weight_block_size", (0, 0))
    scales = "block" if inputs else "tensor"
    return [Rule("Linear", MatrixFormat("fp8", bits=8, scales=scales, block=(outputs, inputs)))]


def _read_compressed_tensors(fields: Fields) -> list[Rule]:
    transforms = fields.get("transform_config", {})
    has_transforms = transforms.get("config_groups", transforms)  # a transform_config may be empty
    for name, found in (
        ("kv_cache_scheme", fields.get("kv_cache_scheme")),
        ("transform_config", has_transforms),
    ):
        _refuse(found, name, "remove it, and quantize only the weights")
    sparsity_config = fields.get("sparsity_config") or {"format": "dense"}
    sparsity = Sparsity.read(sparsity_config, f"{FILE}.sparsity_config")["format"]
    _refuse(
        sparsity != "dense",
        f"sparsity_config of format {sparsity!r}",
        "save the weights in format 'dense'",
    )
    rules = []
    for entry in fields["config_groups"].values():
        group = Group.read(entry, FILE)
        found = _format_of_group(group, fields.get("format", ""))
        targets = group.get("targets", ["Linear"])
        for target in sorted(targets):
            _check_expression(target if target.startswith("re:") else "")
            rules.append(Rule(target, found))
    return rules


STRATEGIES = {"group": "group", "channel": "row", "tensor": "tensor", "block": "block"}
# For weights that do not name theirs: by the sign of the group size.
STRATEGY_BY_SIGN = {1: "group", 0: "tensor", -1: "channel"}
LAYOUTS = {"pack-quantized": "int", "int-quantized": "int", "float-quantized": "float"}
# Inputs that are quantized in each step.
DYNAMIC_INPUTS = {
    "num_bits": 8,
    "type": "int",
    "strategy": "token",
    "dynamic": True,
    "symmetric": True,
}


def _format_of_group(group: Fields, form: str) -> MatrixFormat:
    """Read the format of a group of layers; `form` is the default."""
    weights, inputs = (
        Numbers.read(group.get(name, {}), f"{FILE}: {name}")
        for name in ("weights", "input_activations")
    )
    kind = weights.get("type", "int")
    form = group.get("format", form)
    if form == "naive-quantized":  # an older name
        form = f"{kind}-quantized"
    check_supported("format of compressed-tensors", form, LAYOUTS)
    _refuse(
        kind != LAYOUTS[form], f"{form} with {kind} weights", f"use weights of type {LAYOUTS[form]}"
    )
    size = weights.get("group_size", 0)
    strategy = weights.get("strategy", STRATEGY_BY_SIGN[(size > 0) - (size < 0)])
    check_supported("strategy of weights", strategy, STRATEGIES)
    has_integers = kind == "int" and bool(inputs)
    differs = any(inputs.get(name) != value for name, value in DYNAMIC_INPUTS.items())
    _refuse(
        (has_integers and differs) or group.get("output_activations"),
        f"{form} with quantized activations of this kind",
        "use int-quantized with dynamic symmetric 8-bit integers per token, or remove them",
    )
    outputs, block_inputs = weights["block_structure"] if strategy == "block" else (0, 0)
    return MatrixFormat(
        layout=form,
        bits=weights["num_bits"],
        scales=STRATEGIES[strategy],
        group_size=size if strategy == "group" else 0,
        block=(outputs, block_inputs),
        has_zeros=not weights.get("symmetric", True),
        any_order=weights.get("actorder") == "group",
        quantizes_inputs=has_integers,
    )


_READERS: Mapping[str, Callable[[Fields], list[Rule]]] = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "compressed-tensors": _read_compressed_tensors,
    "fp8": _read_fp8,
}


def with_settings(
    found: QuantizationConfig | None, config: EngineConfig
) -> QuantizationConfig | None:
    """Add what the engine's settings say.

    Args:
        found: what the checkpoint says; None if it is not quantized.

    Raises:
        ValueError: the setting does not fit the checkpoint.
    """
    asked = config.quantization
    if asked == "w4a8" and found is not None:  # its weights as they are
        found = replace(found, w4a8=True)
        asked = "auto"
    if asked == "fp8" and found is not None and found.is_dequantized:
        asked = "auto"
    _check_setting(found, asked)
    method = "none" if found is None else found.method
    if asked in ONLINE:
        method = asked
    if config.load_format == "dummy" and found is not None:
        # Random numbers are quantized while they are made.
        method = _dummy_method(found)
        found = None
    if method == "none" and not config.quantize_head:
        return None
    return replace(found or QuantizationConfig(), method=method, head=config.quantize_head)


def _check_setting(found: QuantizationConfig | None, asked: str) -> None:
    """Raise a ValueError if `--quantization` does not fit the checkpoint."""
    method = "none" if found is None else found.method
    if asked in ONLINE and found is not None:
        raise ValueError(
            f"quantization {asked!r} is for an unquantized checkpoint, and this one is {method}: "
            "do not set it, or use the original checkpoint"
        )
    if asked not in ("auto", *ONLINE, method):
        kind = "not quantized" if found is None else method
        cure = "do not set it"
        if asked == "fp8" and found is None:
            cure = "use w8a8 for 8 bits per weight, or a checkpoint in fp8"
        raise ValueError(
            f"quantization {asked!r} does not fit this checkpoint, which is {kind}: {cure}"
        )


def _dummy_method(found: QuantizationConfig) -> str:
    """Return the scheme that is nearest to that of a checkpoint's layers."""
    if found.is_dequantized:
        return "none"
    form = found.rules[-1].format
    if form.bits == 8:
        return "w8a8"
    return "w4a8" if found.w4a8 or form.quantizes_inputs else "w4a16"
