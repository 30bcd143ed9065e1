"""Quantized checkpoints by a packer of their own: numpy, from the descriptions of the formats,
without the engine's code."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Array = np.ndarray[Any, Any]


def words(numbers: Array, bits: int) -> Tensor:
    """Unsigned numbers packed along the last axis into int32, the first in the lowest bits."""
    per_word = 32 // bits
    padded = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, -numbers.shape[-1] % per_word)])
    grouped = padded.astype(np.uint64).reshape(*padded.shape[:-1], -1, per_word)
    packed = sum(grouped[..., i] << np.uint64(bits * i) for i in range(per_word))
    return torch.from_numpy(np.ascontiguousarray(packed).astype(np.uint32).view(np.int32))  # type: ignore[union-attr]


def grid(weight: Array, bits: int, group: int, asymmetric: bool) -> tuple[Array, Array, Array]:
    """(unsigned numbers [N, K], scales [N, G] float32, unsigned zero points [N, G]), rounded to
    nearest."""
    grouped = weight.reshape(len(weight), -1, group).astype(np.float64)
    top = 2**bits - 1
    if asymmetric:
        low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
        scales = ((high - low) / top).astype(np.float32)
        zeros = np.clip(np.rint(-low / scales), 0, top)
    else:
        scales = (np.abs(grouped).max(-1) * 2 / top).astype(np.float32)
        zeros = np.full(scales.shape, 2 ** (bits - 1))
    numbers = np.clip(np.rint(grouped / scales[..., None]) + zeros[..., None], 0, top)
    return numbers.reshape(weight.shape).astype(np.int64), scales, zeros.astype(np.int64)


def floats(numbers: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers))


def gptq(numbers: Array, scales: Array, zeros: Array, bits: int, version: int) -> dict[str, Tensor]:
    inputs = numbers.shape[1]
    return {
        "qweight": words(numbers, bits).T.contiguous(),
        "qzeros": words(zeros.T - (version == 1), bits),
        "scales": floats(scales.T),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // (inputs // scales.shape[1]),
        "bias": torch.zeros(len(numbers)),
    }


def awq(numbers: Array, scales: Array, zeros: Array) -> dict[str, Tensor]:
    def in_order(rows: Array) -> Tensor:
        return words(
            rows.reshape(len(rows), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(rows.shape), 4
        )

    return {"qweight": in_order(numbers.T), "qzeros": in_order(zeros.T), "scales": floats(scales.T)}


def packed(
    numbers: Array, scales: Array, zeros: Array, bits: int, asymmetric: bool
) -> dict[str, Tensor]:
    tensors = {
        "weight_packed": words(numbers, bits),
        "weight_scale": floats(scales),
        "weight_shape": torch.tensor(numbers.shape),
    }
    return tensors | (
        {"weight_zero_point": words(zeros.T, bits).T.contiguous()} if asymmetric else {}
    )


def int_quantized(numbers: Array, scales: Array, zeros: Array) -> dict[str, Tensor]:
    return {
        "weight": floats((numbers - zeros[:, :1]).astype(np.int8)),
        "weight_scale": floats(scales),
    }


def compressed_tensors(
    form: str, bits: int, group: int, asymmetric: bool, quantizes_inputs: bool
) -> dict[str, Any]:
    """A `quantization_config` as compressed-tensors writes it; a group of 0 is a whole row."""
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": not asymmetric,
        "dynamic": False,
        **strategy,
    }
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    entry = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs if quantizes_inputs else None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": entry | {"output_activations": None, "format": form}},
    }


# name -> (bits, group, asymmetric, how to store a matrix, quantization_config)
Store = Callable[[Array, Array, Array], dict[str, Tensor]]
FORMATS: dict[str, tuple[int, int, bool, Store, dict[str, Any]]] = {}
for bits, group, version in ((4, 16, 1), (4, 16, 2), (8, 16, 1), (8, 0, 2)):
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "sym": True,
        "desc_act": False,
    }
    store: Any = lambda q, s, z, bits=bits, version=version: gptq(q, s, z, bits, version)  # noqa: E731
    # The label says version 1 whatever the file is.
    FORMATS[f"gptq {bits} bits, groups of {group}, version {version}"] = (
        bits,
        group,
        False,
        store,
        settings,
    )
FORMATS["awq"] = (
    4,
    16,
    True,
    awq,
    {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "GEMM"},
)
for bits, group, asymmetric in (
    (4, 16, False),
    (4, 16, True),
    (4, 0, False),
    (4, 0, True),
    (8, 16, False),
):
    store = lambda q, s, z, bits=bits, asymmetric=asymmetric: packed(q, s, z, bits, asymmetric)  # noqa: E731
    name = f"{'a' if asymmetric else ''}symmetric {bits} bits, groups of {group}"
    settings = compressed_tensors("pack-quantized", bits, group, asymmetric, False)
    FORMATS[name] = bits, group, asymmetric, store, settings
for inputs in (False, True):
    settings = compressed_tensors("int-quantized", 8, 0, False, inputs)
    FORMATS["w8a8" if inputs else "w8a16"] = 8, 0, False, int_quantized, settings
# As compressed-tensors stores W4A8, 4-bit weights in bytes, and as it may be told to, in words.
FORMATS["w4a8"] = (
    4,
    16,
    False,
    int_quantized,
    compressed_tensors("int-quantized", 4, 16, False, True),
)
for asymmetric in (False, True):
    store = lambda q, s, z, asymmetric=asymmetric: packed(q, s, z, 4, asymmetric)  # noqa: E731
    settings = compressed_tensors("pack-quantized", 4, 16, asymmetric, True)
    FORMATS["w4a8 in words, asymmetric" if asymmetric else "w4a8 in words"] = (
        4,
        16,
        asymmetric,
        store,
        settings,
    )


def is_quantized(name: str) -> bool:
    """Matrices of linear layers and experts; neither embeddings nor heads nor routers."""
    others = ("embed", "lm_head", "norm", "mlp.gate.", "moe.gate.")
    return name.endswith(".weight") and not any(word in name for word in others)


# name and matrix -> (the tensors that store it, by the ends of their names; its dequantized floats)
Stored = tuple[dict[str, Tensor], Tensor]


def store_checkpoint(
    source: pathlib.Path,
    folder: pathlib.Path,
    settings: dict[str, Any],
    store: Callable[[str, Tensor], Stored],
    chosen: Callable[[str], bool] = is_quantized,
) -> tuple[pathlib.Path, pathlib.Path]:
    """(quantized checkpoint, the same with dequantized weights in float32)."""
    quantized, plain = folder / "quantized", folder / "plain"
    for each in (quantized, plain):
        shutil.copytree(source, each)
    small: dict[str, Tensor] = {}
    large: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not chosen(name):
            small[name] = large[name] = tensor
            continue
        tensors, large[name] = store(name, tensor)
        small |= {f"{name.removesuffix('weight')}{end}": t for end, t in tensors.items()}
    # Biases instead of GPTQ's zeros.
    small |= {name: tensor for name, tensor in large.items() if not chosen(name)}
    save_file(small, quantized / "model.safetensors", {"format": "pt"})
    save_file(large, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (quantized / "config.json").write_text(
        json.dumps(config | {"quantization_config": settings}), encoding="utf-8"
    )
    return quantized, plain


def stored_as(kind: str, matrix: Tensor) -> Stored:
    """A matrix in one of `FORMATS`."""
    bits, group, asymmetric, store, _ = FORMATS[kind]
    numbers, scales, zeros = grid(matrix.numpy(), bits, group or matrix.shape[1], asymmetric)
    each = numbers.reshape(*scales.shape, -1) - zeros[..., None]
    whole = floats((each * scales[..., None]).astype(np.float32).reshape(tuple(matrix.shape)))
    return store(numbers, scales, zeros), whole


def quantize_checkpoint(
    source: pathlib.Path, folder: pathlib.Path, kind: str
) -> tuple[pathlib.Path, pathlib.Path]:
    """(checkpoint in one of `FORMATS`, the same with dequantized weights in float32)."""
    return store_checkpoint(source, folder, FORMATS[kind][4], lambda _, t: stored_as(kind, t))
