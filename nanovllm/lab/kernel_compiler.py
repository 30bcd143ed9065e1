"""Records the Triton launches of the engine, and compiles them for GPUs that are not in this
machine."""

from __future__ import annotations

import pathlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

KIB = 1024


class Target(NamedTuple):
    """A GPU to compile for: Triton's name of it, and what its best-known card has.

    Attributes:
        shared_memory: bytes available to one program.
    """

    backend: str
    arch: int | str
    warp_size: int
    num_processors: int
    shared_memory: int

    def for_triton(self) -> GPUTarget:
        """The target as Triton's compiler takes it."""
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

# Instructions to count in PTX, and in AMD's assembly.
INSTRUCTIONS = {
    "wgmma": r"\bwgmma\.mma_async",
    "tcgen05": r"\btcgen05\.mma",
    "mma.sync": r"(?<![\w.])mma\.sync",
    "mfma": r"\bv_mfma_",
    "cp.async": r"\bcp\.async\.c[ag]",
    "16-byte load": (
        r"\bld\.global[\w.:]*\.(?:v4\.[busf]32|v2\.[busf]64)|\b(?:global|buffer)_load_dwordx4"
    ),
}


class Launch(NamedTuple):
    """A recorded launch: `function[grid](*arguments, **options)`."""

    function: JITFunction
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def constants(self) -> dict[str, Any]:
        """The compile-time arguments of the kernel."""
        names = {param.name: param.is_constexpr for param in self.function.params}
        by_name = {name: value for name, value in self.options.items() if name in names}
        bound = self.function.signature.bind(*self.arguments, **by_name)
        bound.apply_defaults()
        return {name: bound.arguments[name] for name, is_constant in names.items() if is_constant}

    @property
    def dtype(self) -> str:
        """The dtype of the first tensor."""
        import torch

        dtypes = (
            value.dtype
            for value in (*self.arguments, *self.options.values())
            if isinstance(value, torch.Tensor)
        )
        return str(next(dtypes)).removeprefix("torch.")


def record_launches(run: Callable[[], object]) -> list[Launch]:
    """Call `run()`, and return the kernel launches that it makes, in order, instead of executing
    them.

    Tensors may be on any device: the compiler looks only at dtype, address and size.
    """
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []

    def record(
        function: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any
    ) -> None:
        launches.append(Launch(function, arguments, options))

    with mock.patch.object(JITFunction, "run", record):
        run()
    return launches


def specialise(launch: Launch, target: Target) -> tuple[ASTSource, Any]:
    """Return what Triton would compile for a launch: the source with its signature, and the
    compiler's options.

    The signature has types, integers that are 1, and which addresses and integers are divisible by
    16. Triton's own functions decide this."""
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(target.for_triton())
    function = launch.function
    bind = create_function_from_signature(function.signature, function.params, backend)
    bound, specialisation, keywords = bind(*launch.arguments, **launch.options)
    options, signature, constants, attributes = function._pack_args(
        backend, launch.options, bound, specialisation, keywords
    )
    return ASTSource(function, signature, constants, attributes), options


def compile_launch(launch: Launch, target: str) -> dict[str, Any]:
    """Compile a recorded launch for one of `TARGETS`.

    Returns:
        registers and spilled_bytes per thread, shared_memory in bytes per program, num_warps,
        num_stages,
        instructions: how many of each of `INSTRUCTIONS` the assembly has, and assembly: its text.

    Raises:
        triton.TritonError, RuntimeError: the compiler refuses the kernel.
    """
    import triton

    gpu = TARGETS[target]
    source, options = specialise(launch, gpu)
    kernel = triton.compile(source, target=gpu.for_triton(), options=options.__dict__)
    if gpu.backend == "cuda":
        text = kernel.asm["ptx"]
        usage = _usage_of_cubin(kernel.asm["cubin"])
        names = ("REG", "STACK")
    else:  # the assembly ends with its resource usage
        text = usage = kernel.asm["amdgcn"]
        names = (".vgpr_count", ".private_segment_fixed_size")
    registers, spilled = (re.search(rf"{re.escape(name)}:\s*(\d+)", usage) for name in names)
    assert registers and spilled, f"the compiler no longer prints {names}"
    return {
        "registers": int(registers[1]),
        "spilled_bytes": int(spilled[1]),
        "shared_memory": kernel.metadata.shared,
        "num_warps": kernel.metadata.num_warps,
        "num_stages": kernel.metadata.num_stages,
        "instructions": {
            name: len(re.findall(pattern, text)) for name, pattern in INSTRUCTIONS.items()
        },
        "assembly": text,
    }


def _usage_of_cubin(cubin: bytes) -> str:
    """The resource usage of a binary for NVIDIA's GPUs, by the tool in Triton's wheel."""
    import triton

    tool = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
