"""Repairs bfloat16 in Triton's interpreter, so that it computes as a GPU does, and hastens it.

NumPy has no bfloat16, so the interpreter (`TRITON_INTERPRET=1`, triton 3.6 to 3.9) keeps such
numbers as uint16: their bit patterns. Loads, stores and selections work; all other operations give
wrong results without an error:

* `tl.dot`, `+`, `*`, `-` and comparisons treat the patterns as integers.
* Rounding float32 to bfloat16 cuts the lower half off, while hardware rounds to the nearest number,
  ties to even. A NaN whose bits are all in the lower half becomes an infinity.
* Widening breaks subnormal numbers, and integers and float64 are not converted at all.

`repair` replaces these operations by ones that widen to float32, compute, and round. Not repaired,
and not used by the kernels here: `tl.sum` and `tl.fma` in bfloat16, and atomics.

Each call of a function in a kernel, `tl.max` included, lets the interpreter search all of
`triton.language` for what to replace, which takes two thirds of its time. `hasten` makes it search
once, and replace once per launch."""

import inspect
from collections.abc import Callable
from functools import cache, partialmethod

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

Operation = Callable[..., TensorHandle]


def widen(bits: np.ndarray) -> np.ndarray:
    """float32 numbers from bfloat16 bit patterns (uint16), exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """Bit patterns (uint16) of the bfloat16 numbers nearest to float32 ones, ties to even."""
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # 64 bits, so that a NaN does not overflow
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _is_bfloat16(handle: TensorHandle) -> bool:
    return bool(handle.dtype.scalar == tl.bfloat16)


def _widened(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(widen(handle.data), tl.float32) if _is_bfloat16(handle) else handle


def _elementwise(self: InterpreterBuilder, original: Operation, *operands: object) -> TensorHandle:
    """An operation on one or two tensors, computed in float32 and rounded once where they are
    bfloat16."""
    *handles, function = operands
    if not any(map(_is_bfloat16, handles)):
        return original(self, *operands)
    result = original(self, *map(_widened, handles), function)
    if result.data.dtype != np.float32:  # a comparison
        return result
    return TensorHandle(narrow(result.data), tl.bfloat16)


def _cast(
    self: InterpreterBuilder, original: Operation, source: TensorHandle, target: tl.dtype
) -> TensorHandle:
    if _is_bfloat16(source) and target.scalar != tl.bfloat16:
        source = _widened(source)
        return source if target.scalar == tl.float32 else original(self, source, target)
    if target.scalar == tl.bfloat16 and not _is_bfloat16(source):
        return TensorHandle(narrow(source.data.astype(np.float32)), tl.bfloat16)
    return original(self, source, target)


def _dot(
    self: InterpreterBuilder, original: Operation, a: TensorHandle, b: TensorHandle, *others: object
) -> TensorHandle:
    # A product of two bfloat16 numbers is exact in float32, where tensor cores add the products up,
    # too.
    return original(self, _widened(a), _widened(b), *others)


# Method of the interpreter -> what replaces it, and gets the original method as its first argument.
REPAIRS = {
    "binary_op": _elementwise,
    "unary_op": _elementwise,
    "cast_impl": _cast,
    "create_dot": _dot,
}


@cache
def _builtins(package: object) -> list[str]:
    """Return the names of a package's functions that the interpreter replaces."""
    return [name for name, value in inspect.getmembers(package) if tl.core.is_builtin(value)]


def _patch_builtin(package: object, builder: InterpreterBuilder, scope: object) -> None:
    for name in _builtins(package):
        if tl.core.is_builtin(member := getattr(package, name)):
            interpreter._patch_attr(package, name, member, builder, scope)


def hasten() -> None:
    """Make the interpreter of this process replace functions once per launch."""
    # Functions that were called since the launch began.
    prepared: set[Callable[..., object]] = set()
    prepare, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore

    def prepare_once(function: Callable[..., object]) -> object:
        if function in prepared:
            return None
        prepared.add(function)
        return prepare(function)

    def restore_all(scope: object) -> None:
        restore(scope)
        prepared.clear()

    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = prepare_once
    interpreter._LangPatchScope.restore = restore_all


@cache
def repair() -> None:
    """Repair the interpreter of this process, and hasten it; a second call does nothing."""
    hasten()
    for name, repaired in REPAIRS.items():
        setattr(
            InterpreterBuilder, name, partialmethod(repaired, getattr(InterpreterBuilder, name))
        )
