"""Reads a checkpoint's `quantization_config`, and refuses what cannot be loaded before any weight
is read.

Which layers are quantized, with how many bits and in which groups, is what the tensors' names and
shapes say (layers/quantization)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nanovllm.checkpoint.files import Fields, UnsupportedModelError, check_supported, described
from nanovllm.data.json import JsonObject

if TYPE_CHECKING:
    from nanovllm.data.config import EngineConfig

# Schemes that quantize an unquantized checkpoint while it is loaded.
ONLINE = ("w8a8", "w4a16", "w4a8")

FILE = "config.json: quantization_config"
Settings = described(
    "Settings",
    {
        str: "quant_method checkpoint_format format version",
        int: "bits w_bit group_size q_group_size",
        bool: "sym desc_act static_groups zero_point",
        dict[str, JsonObject]: "config_groups",
        JsonObject: "kv_cache_scheme sparsity_config transform_config",
    },
)
Sparsity = described("Sparsity", {str: "format"})
Group = described(
    "Group", {str: "format", JsonObject: "weights input_activations output_activations"}
)
Scheme = described(
    "Scheme",
    {
        int: "num_bits group_size",
        str: "type strategy",
        bool: "symmetric",
        object: "actorder dynamic",
    },
)


@dataclass(frozen=True)
class QuantizationConfig:
    """How the weights of a model are quantized.

    Attributes:
        method: "gptq", "awq" or "compressed-tensors": how the checkpoint stores them; one of
            `ONLINE`: the scheme to which an unquantized checkpoint is quantized while it is loaded;
            "none".
        group_sizes: of the checkpoint's groups of inputs; -1 for whole rows.
        quantizes_inputs: weights that the checkpoint stores as bytes are multiplied by inputs that
            are quantized, too (W8A8).
        w4a8: so are 4-bit weights that it stores in words.
        bits: of weights that are stored as bytes.
        head: an output head that is not quantized in the checkpoint becomes W8A8, and so does the
            embedding if it is the same matrix.
    """

    method: str = "none"
    group_sizes: tuple[int, ...] = (-1,)
    quantizes_inputs: bool = False
    w4a8: bool = False
    bits: int = 8
    head: bool = False

    @classmethod
    def from_dict(cls, raw: JsonObject) -> QuantizationConfig:
        """Read the `quantization_config` of a parsed config.json.

        Raises:
            UnsupportedModelError: the message says what would work.
            ModelFileError: a field of another type.
        """
        fields = Settings.read(raw["quantization_config"], FILE)
        # Old checkpoints do not name their method.
        old = "gptq" if "desc_act" in fields else None
        if "w_bit" in fields:
            old = "awq"
        method = (fields.get("quant_method", old) or fields["quant_method"]).replace("_", "-")
        check_supported("quant_method", method, _READERS)
        return _READERS[method](fields)


def _refuse(wrong: object, what: str, cure: str) -> None:
    if wrong:
        raise UnsupportedModelError(f"{FILE}: {what} is not supported; {cure}")


def _read_gptq(fields: Fields) -> QuantizationConfig:
    check_supported(
        "checkpoint_format", fields.get("checkpoint_format", "gptq"), ["gptq", "gptq_v2"]
    )
    _refuse(fields["bits"] not in (4, 8), f"{fields['bits']} bits", "quantize to 4 or 8")
    _refuse(
        not fields.get("sym", True),
        "asymmetric GPTQ",
        "quantize with sym: true, or to compressed-tensors",
    )
    reordered = (
        fields.get("desc_act") and fields["group_size"] > 0 and not fields.get("static_groups")
    )
    _refuse(
        reordered,
        "desc_act with groups",
        "quantize with static_groups: true, desc_act: false or group_size: -1",
    )
    return QuantizationConfig("gptq", (fields["group_size"],))


def _read_awq(fields: Fields) -> QuantizationConfig:
    check_supported("version of AWQ", fields.get("version", "gemm").lower(), ["gemm"])
    bits = fields.get("bits", fields.get("w_bit", 4))
    _refuse(bits != 4, f"{bits} bits", "quantize to 4")
    _refuse(not fields.get("zero_point", True), "zero_point: false", "quantize with zero points")
    return QuantizationConfig(
        "awq", (fields["group_size"] if "group_size" in fields else fields["q_group_size"],)
    )


def _read_compressed_tensors(fields: Fields) -> QuantizationConfig:
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
    groups = [Group.read(entry, FILE) for entry in fields["config_groups"].values()]
    found = {_check_group(group, fields.get("format", "")) for group in groups}
    whole = {each[1:] for each in found if not each[0]}
    words = {each[2] for each in found if each[:2] == (True, 4)}
    _refuse(
        max(len(whole), len(words)) > 1,
        "weights of one format with and without quantized inputs, or bytes with 4 and with 8 bits,",
        "use one of them for all layers",
    )
    sizes = {group.get("weights", {}).get("group_size") or -1 for group in groups}
    bits, inputs = next(iter(whole), (8, False))
    return QuantizationConfig(
        "compressed-tensors", tuple(sorted(sizes)), inputs, True in words, bits
    )


def _check_group(group: Fields, form: str) -> tuple[bool, int, bool]:
    """Check a group of layers. Returns whether their weights are packed in words, their bits, and
    whether their inputs are quantized."""
    weights, inputs = (
        Scheme.read(group.get(name, {}), FILE) for name in ("weights", "input_activations")
    )
    form = group.get("format", form)
    check_supported("format of compressed-tensors", form, ["pack-quantized", "int-quantized"])
    bits, kind, strategy, symmetric = (
        weights.get(name) for name in ("num_bits", "type", "strategy", "symmetric")
    )
    packed = form == "pack-quantized"
    fits = kind == "int" and bits in (4, 8) and (symmetric or (packed and bits == 4))
    fits = fits and strategy in (("group", "channel") if packed or bits == 4 else ("channel",))
    _refuse(
        not fits,
        f"{form} with {'' if symmetric else 'a'}symmetric {bits}-bit {kind} weights per {strategy}",
        "use pack-quantized with 4 or symmetric 8 bits per group or channel, or int-quantized with "
        "symmetric 8 bits per channel",
    )
    _refuse(
        weights.get("actorder") == "group",
        "actorder: group",
        "use actorder: weight, which keeps groups together",
    )
    dynamic = {
        "num_bits": 8,
        "type": "int",
        "strategy": "token",
        "dynamic": True,
        "symmetric": True,
    }
    differs = inputs and (
        (packed and bits == 8) or any(inputs.get(name) != value for name, value in dynamic.items())
    )
    _refuse(
        differs or group.get("output_activations"),
        f"{form} with quantized activations of this kind",
        "use int-quantized with dynamic symmetric 8-bit integers per token, or remove them",
    )
    return packed, bits or 0, bool(inputs)


_READERS = {"gptq": _read_gptq, "awq": _read_awq, "compressed-tensors": _read_compressed_tensors}


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
    head = config.quantize_head
    method = "none" if found is None else found.method
    if asked == "w4a8" and found is not None:  # its weights as they are
        found = replace(found, w4a8=True)
        asked = "auto"
    if asked in ONLINE and found is not None:
        raise ValueError(
            f"quantization {asked!r} is for an unquantized checkpoint, and this one is {method}: "
            "do not set it, or use the original checkpoint"
        )
    if asked not in ("auto", *ONLINE, method):
        kind = "not quantized" if found is None else method
        raise ValueError(
            f"quantization {asked!r} does not fit this checkpoint, which is {kind}: do not set it"
        )
    method = asked if asked in ONLINE else method
    if config.load_format == "dummy" and found is not None:
        # Random numbers are quantized while they are made.
        method = "w8a8" if found.quantizes_inputs else "w4a16"
        if found.w4a8 or found.bits == 4:
            method = "w4a8"
    return (
        replace(found or QuantizationConfig(), method=method, head=head)
        if head or method != "none"
        else None
    )
