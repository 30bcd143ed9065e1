"""The tensors of a quantized checkpoint, and how they store each matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.checkpoint.files import ModelFileError, UnsupportedModelError
from nanovllm.checkpoint.formats import MatrixFormat
from nanovllm.checkpoint.quantization import QuantizationConfig
from nanovllm.layers.quantization.storage import group_size
from nanovllm.layers.quantization.weight import Scheme

# The tensor that has the weights of a layer, in each layout, and its dtype.
WEIGHTS: dict[str, tuple[str, torch.dtype]] = {
    "gptq": ("qweight", torch.int32),
    "awq": ("qweight", torch.int32),
    "pack-quantized": ("weight_packed", torch.int32),
    "int-quantized": ("weight", torch.int8),
    "float-quantized": ("weight", torch.float8_e4m3fn),
    "fp8": ("weight", torch.float8_e4m3fn),
}
# Ends of the names of other tensors of words.
WORDS = (".qzeros", ".weight_zero_point")


@dataclass(frozen=True)
class Header:
    """What is known of a tensor before its numbers are read.

    Attributes:
        name: its name in the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class StoredTensors:
    """The tensors of a quantized checkpoint.

    Args:
        tensors: names and tensors; numbers are read from `g_idx` only.
        rename: from the names of tensors to the names of a model's tensors; None for tensors that
            it does not need.

    Attributes:
        shapes: shapes of the tensors, by the model's names.
        orders: the inputs of layers in the order of their groups; of layers whose inputs are not in
            this order.
    """

    def __init__(
        self,
        config: QuantizationConfig,
        tensors: Iterable[tuple[str, Tensor]],
        rename: Callable[[str], str | None],
    ) -> None:
        self.config = config
        self.headers: dict[str, Header] = {}
        self.orders: dict[str, Tensor] = {}
        self._formats: dict[str, MatrixFormat | None] = {}
        groups: dict[str, Tensor] = {}
        for name_in_file, tensor in tensors:
            name = rename(name_in_file)
            if name is None:
                continue
            self.headers[name] = Header(name_in_file, tuple(tensor.shape), tensor.dtype)
            if name.endswith(WORDS) and tensor.dtype is not torch.int32:
                kind = str(tensor.dtype).removeprefix("torch.")
                raise ModelFileError(f"{name_in_file} must be of int32, got {kind}")
            if name.endswith(".g_idx"):
                groups[name.removesuffix(".g_idx")] = tensor
        self.shapes = {name: header.shape for name, header in self.headers.items()}
        for layer, of_inputs in groups.items():
            self._read_order(layer, of_inputs)

    def _read_order(self, layer: str, groups: Tensor) -> None:
        """Read the order of a layer's inputs.

        Args:
            groups: the group of each input.

        Raises:
            ModelFileError: the groups do not have the same number of inputs.
        """
        form = self.format(layer)
        inputs = groups.numel()
        if form is None:
            return
        size = group_size(layer, inputs, form.group_size) or max(inputs, 1)
        expected = torch.arange(inputs, device="cpu") // size
        groups = groups.flatten().long()
        if torch.equal(groups, expected):
            return
        order = groups.argsort(stable=True)
        if not torch.equal(groups[order], expected):
            raise ModelFileError(
                f"{self.headers[f'{layer}.g_idx'].name}: a group does not have {size} inputs; "
                "download it again, or quantize again with the group_size of config.json"
            )
        self.orders[layer] = order

    def has(self, layer: str) -> bool:
        """Return True if the checkpoint has a matrix for a layer."""
        return f"{layer}.weight" in self.headers or self.format(layer) is not None

    def format(self, layer: str) -> MatrixFormat | None:
        """Return how a layer's matrix is stored, by the model's name of the layer; None if it is
        not quantized.

        Raises:
            UnsupportedModelError: the configuration does not name the layer, or says otherwise than
                the file.
        """
        if layer not in self._formats:
            self._formats[layer] = self._read_format(layer)
        return self._formats[layer]

    def _read_format(self, layer: str) -> MatrixFormat | None:
        kinds = ("qweight", "weight_packed", "weight")
        found = [
            self.headers[name] for kind in kinds if (name := f"{layer}.{kind}") in self.headers
        ]
        if not found:
            return None
        header = found[0]
        in_file, _, kind = header.name.rpartition(".")
        if kind == "weight" and header.dtype.itemsize > 1:
            return None
        form = self.config.format_of(in_file)
        if form is None:
            raise UnsupportedModelError(
                f"{header.name} is quantized, and no target in config.json names it: add it to a "
                "group in quantization_config"
            )
        if (kind, header.dtype) != WEIGHTS[form.layout]:
            raise UnsupportedModelError(
                f"{header.name} ({str(header.dtype).removeprefix('torch.')}) is not in the format "
                f"that config.json names, {form.layout}: correct quantization_config"
            )
        if form.any_order and f"{layer}.g_idx" not in self.headers:
            raise ModelFileError(
                f"the checkpoint lacks {in_file}.g_idx, the order of its inputs (desc_act): "
                "download it again"
            )
        return form

    def scheme(self, layer: str, form: MatrixFormat, inputs: int) -> Scheme:
        """Return the scheme of integers that a layer's matrix is stored in.

        Raises:
            UnsupportedModelError: the inputs cannot be divided into the format's groups.
        """
        if form.layout == "int-quantized" and form.bits == 8:
            return Scheme(8, quantizes_inputs=form.quantizes_inputs)
        return Scheme(
            bits=form.bits,
            group_size=group_size(layer, inputs, form.group_size),
            has_zeros=form.has_zeros,
            quantizes_inputs=form.quantizes_inputs or (form.bits == 4 and self.config.w4a8),
            reordered=layer in self.orders,
        )
