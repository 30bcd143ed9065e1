"""Reads the structure of a GGUF file, which may come from an untrusted source: each length is
checked against the file before anything of that length is read.

Reference: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import reprlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from nanovllm.checkpoint.files import LARGEST_FILE, ModelFileError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
# Metadata fields, or tensors. Models of hundreds of layers have a few thousand tensors.
_MOST_ENTRIES = 1 << 16
# Elements of a list. The longest ones of known models are merges, half as many.
_MOST_ELEMENTS = 1 << 20
# Of ggml's tensors.
_MOST_DIMENSIONS = 4
# As `struct` names them.
_NUMBERS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
    GGUFValueType.BOOL: "<?",
}
T = TypeVar("T")
# What metadata consists of: lists are not nested.
Scalar = int | float | str
Value = Scalar | list[Scalar]
_WORDS = {int: "an integer", float: "a number", str: "text", bool: "true or false", list: "a list"}


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor of a GGUF file is, and how it is stored.

    Attributes:
        kind: the type of its numbers, or of its blocks of quantized numbers.
        shape: sizes, the outermost first (the file has the innermost first).
        offset: of its first byte in the file.
        num_bytes: size in the file.
    """

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class GgufFile:
    """The metadata of a GGUF file, and the places of its tensors.

    Attributes:
        path: the file.
        metadata: name → number, bool, text, or list of these.
        tensors: name → tensor.
    """

    def __init__(self, path: Path) -> None:
        """Read all but the numbers of the tensors.

        Raises:
            ModelFileError: the file is damaged or incomplete, of another version, or one of several
                that make up a model; the message names it.
            OSError: the file cannot be read.
        """
        self.path = path
        with path.open("rb") as opened:
            if opened.read(len(_MAGIC)) != _MAGIC:
                raise self.error("it does not begin with 'GGUF', as a GGUF file does")
            self._data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self._size = len(self._data)
        self._position = len(_MAGIC)
        version = self._integer("<I")
        if version not in _VERSIONS:
            raise self.error(f"its version is {version}; supported are 2 and 3, little-endian")
        num_tensors = self._count("tensors")
        num_fields = self._count("metadata fields")
        self.metadata = self._read_metadata(num_fields)
        self._check_whole()
        self.tensors = self._read_tensors(num_tensors)

    def error(self, reason: str) -> ModelFileError:
        """The error of a file that cannot be used, for a reason, on one line: names in the file
        may contain anything."""
        message = f"cannot use the GGUF file '{self.path}': {reason}"
        return ModelFileError("".join(char if char.isprintable() else " " for char in message))

    def get(self, name: str, kind: type[T], default: T | None = None) -> T:
        """A value of the metadata.

        Args:
            name: "llama.block_count", for example.
            kind: int, float (integers count too), str, bool or list.
            default: if the file lacks the value; None if it must not.

        Raises:
            ModelFileError: the value is missing, or of another type.
        """
        found: object = self.metadata.get(name, default)
        if found is None:
            raise self.error(f"{name} is missing")
        kinds = (int, float) if kind is float else kind
        is_flag = isinstance(found, bool) and kind is not bool
        if not isinstance(found, kinds) or is_flag:
            raise self.error(f"{name} must be {_WORDS[kind]}, got {reprlib.repr(found)}")
        return cast(T, found)

    def check_type(self, name: str) -> None:
        """Refuse a tensor of a type that the library cannot dequantize.

        Raises:
            ModelFileError: names the tensor and its type.
        """
        kind = self.tensors[name].kind
        _, block_bytes = GGML_QUANT_SIZES[kind]
        try:
            quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
        except NotImplementedError as error:
            raise self.error(
                f"the type {kind.name} of the tensor {reprlib.repr(name)} is not supported"
            ) from error

    def dequantize(self, tensor: GgufTensor, start: int, stop: int) -> np.ndarray:
        """The numbers of some rows of a tensor, float32 [rows, shape[-1]]."""
        rows = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.offset)
        rows = rows.reshape(math.prod(tensor.shape[:-1]), -1)
        return np.array(quants.dequantize(rows[start:stop], tensor.kind), np.float32)

    def _check_whole(self) -> None:
        """Refuse a part of a model."""
        count = self.get("split.count", int, 1)
        if count > 1:
            number = self.get("split.no", int, 0) + 1
            raise self.error(
                f"it is file {number} of the {count} that a model was split into: merge them, with "
                "llama.cpp's llama-gguf-split --merge FIRST_FILE MERGED_FILE"
            )

    def _take(self, num_bytes: int) -> int:
        """Step over bytes of the header, and return where they begin."""
        start = self._position
        self._position += num_bytes
        if self._position > self._size:
            raise self.error("it ends too early: was the download or the copy interrupted?")
        if self._position > LARGEST_FILE:
            raise self.error(f"its metadata has more than {LARGEST_FILE >> 20} MiB")
        return start

    def _number(self, kind: str) -> float:
        """The next number. A float32 becomes the shortest decimal that rounds to it: 1e-05 instead
        of 9.99999974e-06."""
        (number,) = struct.unpack_from(kind, self._data, self._take(struct.calcsize(kind)))
        return float(str(np.float32(number))) if kind == "<f" else number

    def _integer(self, kind: str) -> int:
        return int(self._number(kind))

    def _count(self, what: str) -> int:
        count: int = self._integer("<Q")
        if count > _MOST_ENTRIES:
            raise self.error(f"it claims to have {count} {what}; at most are {_MOST_ENTRIES}")
        return count

    def _text(self) -> str:
        length = self._integer("<Q")
        start = self._take(length)
        try:
            return self._data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self.error(f"the text at byte {start} is no UTF-8") from error

    def _value(self) -> Value:
        kind = self._value_type()
        if kind == GGUFValueType.STRING:
            return self._text()
        if kind != GGUFValueType.ARRAY:
            return self._number(_NUMBERS[kind])
        element = self._value_type()
        count = self._integer("<Q")
        if element == GGUFValueType.ARRAY:
            raise self.error("it has lists of lists")
        if count > _MOST_ELEMENTS:
            raise self.error(f"it has a list of {count} elements; at most are {_MOST_ELEMENTS}")
        if element == GGUFValueType.STRING:
            return [self._text() for _ in range(count)]
        code = _NUMBERS[element]
        size = struct.calcsize(code)
        start = self._take(count * size)
        found = struct.iter_unpack(code, self._data[start : start + count * size])
        return [number for (number,) in found]

    def _value_type(self) -> GGUFValueType:
        number = self._integer("<I")
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise self.error(f"it has a value of the unknown type {number}") from error

    def _read_metadata(self, count: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        for _ in range(count):
            name = self._text()
            if name in metadata:
                raise self.error(f"it has {reprlib.repr(name)} twice")
            metadata[name] = self._value()
        return metadata

    def _read_tensors(self, count: int) -> dict[str, GgufTensor]:
        """Read the places of the tensors, and check that they are in the file."""
        found: dict[str, GgufTensor] = {}
        for _ in range(count):
            name = self._text()
            if name in found:
                raise self.error(f"it has the tensor {reprlib.repr(name)} twice")
            found[name] = self._read_tensor(name)
        alignment = self.get("general.alignment", int, _DEFAULT_ALIGNMENT)
        if alignment < 1:
            raise self.error(f"general.alignment must be at least 1, got {alignment}")
        start = -(-self._position // alignment) * alignment
        for name, tensor in found.items():
            if start + tensor.offset + tensor.num_bytes > self._size:
                raise self.error(
                    f"the tensor {reprlib.repr(name)} is not all there: was the download or the "
                    "copy interrupted?"
                )
        return {
            name: GgufTensor(t.kind, t.shape, start + t.offset, t.num_bytes)
            for name, t in found.items()
        }

    def _read_tensor(self, name: str) -> GgufTensor:
        """Read where a tensor is; the offset counts from the first tensor."""
        num_dimensions = self._integer("<I")
        if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
            raise self.error(f"the tensor {reprlib.repr(name)} has {num_dimensions} dimensions")
        sizes = [self._integer("<Q") for _ in range(num_dimensions)]
        shape = tuple(reversed(sizes))
        number = self._integer("<I")
        offset = self._integer("<Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise self.error(
                f"the tensor {reprlib.repr(name)} is of the unknown type {number}"
            ) from error
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        if min(shape) < 1 or shape[-1] % block_size:
            raise self.error(f"the tensor {reprlib.repr(name)} of {kind.name} has shape {shape}")
        return GgufTensor(kind, shape, offset, math.prod(shape) // block_size * block_bytes)
