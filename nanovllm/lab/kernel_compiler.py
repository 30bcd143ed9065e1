"""What Triton would compile for a kernel's launch, and what its compiler makes of it, for GPUs that are not there."""

from __future__ import annotations

import pathlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

KIB = 1024


class Target(NamedTuple):
    """A GPU to compile for: its name to Triton, and what its best-known card has.

    Attributes:
        shared_memory: bytes that one program may use.
    """

    backend: str
    arch: int | str
    warp_size: int
    num_processors: int
    shared_memory: int

    def for_triton(self) -> GPUTarget:
        """The same for Triton's compiler."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.backend, self.arch, self.warp_size)


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 108, 163 * KIB),  # A100
    "sm_86": Target("cuda", 86, 32, 82, 99 * KIB),  # RTX 3090
    "sm_89": Target("cuda", 89, 32, 128, 99 * KIB),  # RTX 4090
    "sm_90": Target("cuda", 90, 32, 132, 227 * KIB),  # H100, H200
    "sm_100": Target("cuda", 100, 32, 148, 227 * KIB),  # B200
    "sm_120": Target("cuda", 120, 32, 170, 99 * KIB),  # RTX 5090
    "gfx942": Target("hip", "gfx942", 64, 304, 64 * KIB),  # MI300X
    "gfx950": Target("hip", "gfx950", 64, 256, 160 * KIB),  # MI355X
}

# What to count in PTX or in AMD's assembly.
INSTRUCTIONS = {
    "wgmma": r"\bwgmma\.mma_async",
    "tcgen05": r"\btcgen05\.mma",
    "mma.sync": r"(?<![\w.])mma\.sync",
    "mfma": r"\bv_mfma_",
    "cp.async": r"\bcp\.async\.c[ag]",
    "16-byte load": r"\bld\.global[\w.:]*\.(?:v4\.[busf]32|v2\.[busf]64)|\b(?:global|buffer)_load_dwordx4",
}


# ---------------------------------------------------------------- launches


@dataclass(frozen=True)
class Launch:
    """A kernel as it was launched: `function[grid](*arguments, **options)`."""

    function: JITFunction
    grid: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def named(self) -> dict[str, Any]:
        """All arguments by name, in the kernel's order."""
        named = {name: value for name, value in self.options.items() if name in self.function.arg_names}
        bound = self.function.signature.bind(*self.arguments, **named)
        bound.apply_defaults()
        return dict(bound.arguments)

    @property
    def constants(self) -> dict[str, Any]:
        """The arguments that the kernel takes at compile time."""
        named = self.named
        return {p.name: named[p.name] for p in self.function.params if p.is_constexpr}

    @property
    def dtype(self) -> str:
        """Of the first tensor."""
        first = next(value for value in self.named.values() if hasattr(value, "dtype"))
        return str(first.dtype).removeprefix("torch.")


def record_launches(run: Callable[[], object]) -> list[Launch]:
    """Call `run()`; kernels that it launches do not run but are noted, in order.

    Tensors may be on any device: to the compiler only dtype, address and size matter.
    """
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []

    def record(function: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append(Launch(function, grid, arguments, options))

    with mock.patch.object(JITFunction, "run", record):
        run()
    return launches


def specialise(launch: Launch, target: Target) -> tuple[ASTSource, Any]:
    """What Triton would compile for a launch: the source with its signature, and the compiler's options.

    The signature has types, integers that are 1, and which addresses and integers are divisible by 16; the functions
    that decide are Triton's own.
    """
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    backend, function = make_backend(target.for_triton()), launch.function
    bind = create_function_from_signature(function.signature, function.params, backend)
    bound, specialisation, keywords = bind(*launch.arguments, **launch.options)
    options, signature, constants, attributes = function._pack_args(
        backend, launch.options, bound, specialisation, keywords
    )
    return ASTSource(function, signature, constants, attributes), options


# ---------------------------------------------------------------- what the compiler makes of them


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel, and what it needs of the hardware.

    Attributes:
        ptx: NVIDIA's virtual assembly; for an AMD target, its real one.
        registers: of a thread.
        spilled_bytes: of a thread: the stack, for what did not fit into registers.
        shared_memory: bytes of a program.
        instructions: how often the text has those of `INSTRUCTIONS`.
    """

    ptx: str = field(repr=False)
    registers: int
    spilled_bytes: int
    shared_memory: int
    num_warps: int
    num_stages: int
    instructions: Counter[str]


def compile_launch(launch: Launch, target: str) -> Compiled:
    """Compile a recorded launch for one of `TARGETS`.

    Raises:
        triton.TritonError, RuntimeError: the compiler refuses the kernel.
    """
    import triton

    gpu = TARGETS[target]
    source, options = specialise(launch, gpu)
    kernel = triton.compile(source, target=gpu.for_triton(), options=options.__dict__)
    text = kernel.asm["ptx" if gpu.backend == "cuda" else "amdgcn"]
    if gpu.backend == "cuda":
        usage, registers, stack = _usage_of_cubin(kernel.asm["cubin"]), "REG", "STACK"
    else:  # at the end of the assembly
        usage, registers, stack = text, ".vgpr_count", ".private_segment_fixed_size"
    return Compiled(
        text,
        _number_after(registers, usage),
        _number_after(stack, usage),
        kernel.metadata.shared,
        kernel.metadata.num_warps,
        kernel.metadata.num_stages,
        Counter({name: len(re.findall(pattern, text)) for name, pattern in INSTRUCTIONS.items()}),
    )


def _usage_of_cubin(cubin: bytes) -> str:
    """What the tool in Triton's wheel says on a binary for NVIDIA's GPUs."""
    import triton

    tool = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _number_after(name: str, text: str) -> int:
    found = re.search(rf"{re.escape(name)}:\s*(\d+)", text)
    assert found is not None, f"the compiler no longer says {name}"
    return int(found[1])
