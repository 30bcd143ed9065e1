"""`nanovllm kernels`: every Triton kernel that the engine can launch, compiled for GPUs that are not there.

Launches are recorded from the engine's own code, which runs on tensors without memory (torch's device "meta") and for
the hardware of a target that it is told about. So what is compiled here is what that GPU would run, in the
same specialisation, and there is no second list of signatures to go stale.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.cli.main import UsageError
from nanovllm.lab.kernel_compiler import (
    INSTRUCTIONS,
    KIB,
    TARGETS,
    Compiled,
    Launch,
    Target,
    compile_launch,
    record_launches,
    specialise,
)

if TYPE_CHECKING:
    import rich.table

DEFAULT_TARGETS = ("sm_80", "sm_90", "gfx942")
# Where a spill is an error; elsewhere it is only shown.
NO_SPILL_TARGETS = ("sm_80", "sm_90")
TENSOR_CORES = ("wgmma", "tcgen05", "mma.sync", "mfma")


# ---------------------------------------------------------------- every launch of the engine

DTYPES = ("bfloat16", "float16", "float32")
HEAD_DIMS = (64, 80, 96, 128, 256)
GROUPS = (1, 3, 4, 7, 8)  # query heads that share a KV head
BLOCK_SIZES = (16, 32, 64, 128, 256)
VARIANTS = ((0, 0.0), (4096, 0.0), (0, 50.0), (4096, 50.0))  # (sliding window, soft cap)
NUM_KV_HEADS = 8
# Latent attention as in DeepSeek-V2-Lite, and in V2 and V3 on four ranks and on one; (nope, rope, v, rank).
LATENT_HEADS, LATENT_SIZES = (16, 32, 128), (128, 64, 128, 512)
# Rows of SmolLM2-135M, Llama-3.2-1B, Llama-3.1-8B and Llama-3.1-70B.
HIDDEN_SIZES = (576, 2048, 4096, 8192)
INTERMEDIATE_SIZES = (1536, 8192, 14336, 28672)
# (experts of a rank, hidden size, intermediate size) of Mixtral-8x7B, Qwen3-30B-A3B, and DeepSeek-V3 on 8 ranks.
EXPERTS = ((8, 4096, 14336), (128, 2048, 768), (32, 7168, 2048))
ROWS_PER_EXPERT = (4, 100, 1000)  # for every height of a tile


class Batch(NamedTuple):
    """What the host knows of a step, and therefore all that can decide about its launches."""

    num_seqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int


DECODES = tuple(Batch(num_seqs, num_seqs, 1, 131072) for num_seqs in (64, 1, 8, 16, 32, 128, 256, 512))
# Queries for every height of a tile, of one sequence or several, with long contexts and short ones.
PREFILLS = (
    Batch(1, 8, 8, 131072),
    Batch(64, 2112, 2048, 131072),
    Batch(1, 4, 4, 2000),
    Batch(1, 2048, 2048, 2048),
    Batch(17, 85, 8, 200),
)
FEW_BATCHES = (DECODES[0], *PREFILLS[:2])


class Case(NamedTuple):
    """A model's attention, and the batches that it meets."""

    head_dim: int
    dtype: str
    group: int = 4
    block_size: int = 16
    sliding_window: int = 0
    soft_cap: float = 0.0
    batches: tuple[Batch, ...] = FEW_BATCHES


def cases(dtypes: Sequence[str], head_dims: Sequence[int], everything: bool) -> Iterator[Case]:
    """The whole product, or a part in which each value occurs. Beside bfloat16, which takes as much, float16 is there
    once."""
    for dtype, head_dim in itertools.product(dtypes, head_dims):
        if everything:
            for group, block_size, variant in itertools.product(GROUPS, BLOCK_SIZES, VARIANTS):
                yield Case(head_dim, dtype, group, block_size, *variant, DECODES + PREFILLS)
        elif (dtype, head_dim) == ("bfloat16", 128):
            yield Case(head_dim, dtype, batches=DECODES + PREFILLS)
            yield from (Case(head_dim, dtype, group) for group in GROUPS)
            yield from (Case(head_dim, dtype, 4, block_size) for block_size in BLOCK_SIZES)
            yield from (Case(head_dim, dtype, 4, 16, *variant) for variant in VARIANTS)
        elif dtype != "float16" or head_dim == 128 or "bfloat16" not in dtypes:
            yield Case(head_dim, dtype)


def launch_attention(case: Case, target: Target) -> None:
    """Run the Triton backend on tensors without memory, as a model would on the target."""
    import torch

    from nanovllm.attention.base import AttentionMetadata, Rotary, kv_cache_shape
    from nanovllm.attention.triton import Hardware, TritonBackend

    backend = TritonBackend(Hardware(target.num_processors, target.shared_memory, target.warp_size))
    dtype, num_heads = getattr(torch, case.dtype), case.group * NUM_KV_HEADS
    with torch.device("meta"):
        # Over 2^31 bytes, as on a real GPU: Triton addresses smaller tensors in another way on AMD.
        num_blocks = 2**32 // (NUM_KV_HEADS * case.block_size * case.head_dim)
        shape = kv_cache_shape(num_blocks, NUM_KV_HEADS, case.block_size, case.head_dim)
        kv_cache = torch.empty(shape, dtype=dtype)
        cos_sin = torch.empty(131072, case.head_dim, dtype=torch.float32)
        for num_seqs, num_tokens, max_query_len, max_seq_len in case.batches:
            heads = torch.empty(num_tokens, num_heads + 2 * NUM_KV_HEADS, case.head_dim, dtype=dtype)
            q, k, v = heads.split([num_heads, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
            rotary = Rotary(torch.empty(num_tokens, dtype=torch.int64), cos_sin)
            max_blocks = -(-max_seq_len // case.block_size)
            metadata = AttentionMetadata(
                query_start_loc=torch.empty(num_seqs + 1, dtype=torch.int32),
                seq_lens=torch.empty(num_seqs, dtype=torch.int32),
                block_tables=torch.empty(num_seqs, max_blocks, dtype=torch.int32),
                slot_mapping=torch.empty(num_tokens, dtype=torch.int64),
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
            )
            backend.forward(q, k, v, kv_cache, metadata, 0.1, case.sliding_window, case.soft_cap, rotary)


def launch_latent_attention(dtype_name: str, target: Target) -> None:
    """The same of latent attention, for steps of decodes; prompts go through torch."""
    import torch

    from nanovllm.attention.base import AttentionMetadata
    from nanovllm.attention.latent import latent_cache_shape
    from nanovllm.attention.latent_kernels import TritonLatentBackend
    from nanovllm.attention.triton import Hardware

    backend = TritonLatentBackend(Hardware(target.num_processors, target.shared_memory, target.warp_size))
    (nope, rope, v, rank), dtype = LATENT_SIZES, getattr(torch, dtype_name)
    with torch.device("meta"):
        kv_cache = torch.empty(latent_cache_shape(2**32 // (16 * rank), 16, rank + rope), dtype=dtype)
        # All numbers of parts once; further heads and dtypes change other things.
        few = [(num_heads, batch) for num_heads in LATENT_HEADS for batch in DECODES[:2]]
        every = [(LATENT_HEADS[0], batch) for batch in DECODES] if dtype_name == "bfloat16" else []
        for num_heads, (num_seqs, _, _, max_seq_len) in every + few:
            q = torch.empty(num_seqs, num_heads, nope + rope, dtype=dtype)
            metadata = AttentionMetadata(
                query_start_loc=torch.empty(num_seqs + 1, dtype=torch.int32),
                seq_lens=torch.empty(num_seqs, dtype=torch.int32),
                block_tables=torch.empty(num_seqs, max_seq_len // 16, dtype=torch.int32),
                slot_mapping=torch.empty(num_seqs, dtype=torch.int64),
                max_query_len=1,
                max_seq_len=max_seq_len,
            )
            up = torch.empty(num_heads, nope + v, rank, dtype=dtype)
            latent = torch.empty(num_seqs, rank + rope, dtype=dtype)
            backend.forward(q, latent, up, kv_cache, metadata, 0.1)


def launch_operators(dtype_name: str, head_dims: Iterable[int]) -> None:
    """Run the small operators on tensors without memory."""
    import torch

    from nanovllm.ops import triton as ops

    dtype = getattr(torch, dtype_name)
    with torch.device("meta"):
        for hidden in HIDDEN_SIZES:
            x = torch.empty(64, hidden, dtype=dtype)
            ops.rms_norm(x, x[0], 1e-5)
            ops.add_rms_norm(x, torch.empty_like(x), x[0], 1e-5)
        for size in INTERMEDIATE_SIZES:
            ops.silu_and_mul(torch.empty(64, 2 * size, dtype=dtype))
        for (num_experts, hidden, size), rows in itertools.product(EXPERTS, ROWS_PER_EXPERT):
            counts = torch.empty(num_experts, dtype=torch.int64)
            x = torch.empty(num_experts * rows, hidden, dtype=dtype)
            gate_up = ops.grouped_linear(x, torch.empty(num_experts, 2 * size, hidden, dtype=dtype), counts)
            ops.grouped_linear(
                gate_up[:, :size].contiguous(), torch.empty(num_experts, hidden, size, dtype=dtype), counts
            )
        for head_dim in head_dims:
            heads = torch.empty(64, 6 * NUM_KV_HEADS, head_dim, dtype=dtype)
            q, k, _ = heads.split([4 * NUM_KV_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
            ops.rms_norm(q, heads[0, 0], 1e-6)
            cos_sin = torch.empty(131072, head_dim, dtype=torch.float32)
            ops.apply_rope(q, k, torch.empty(64, dtype=torch.int64), cos_sin)


def engine_launches(
    target: str, dtypes: Iterable[str] = DTYPES, head_dims: Iterable[int] = HEAD_DIMS, everything: bool = False
) -> list[Launch]:
    """The launches that the engine can make on a target, each specialisation once."""
    dtypes, head_dims, gpu = tuple(dtypes), tuple(head_dims), TARGETS[target]

    def run() -> None:
        for case in cases(dtypes, head_dims, everything):
            launch_attention(case, gpu)
        for dtype in dtypes:
            launch_latent_attention(dtype, gpu)
            launch_operators(dtype, head_dims)

    distinct: dict[tuple[str, str], Launch] = {}
    for launch in record_launches(run):
        source, options = specialise(launch, gpu)
        distinct.setdefault((source.hash(), options.hash()), launch)
    return list(distinct.values())


# ---------------------------------------------------------------- judgement


@dataclass
class Finding:
    """A launch, what became of it on a target, and what is wrong with that."""

    target: str
    launch: Launch
    compiled: Compiled | None = None
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        constants = (f"{name}={value}" for name, value in self.launch.constants.items())
        return " ".join([self.target, self.launch.function.__name__, self.launch.dtype, *constants])

    def as_json(self) -> dict[str, Any]:
        """Everything but the assembly."""
        named = {"target": self.target, "kernel": self.launch.function.__name__, "dtype": self.launch.dtype}
        resources = dict(vars(self.compiled)) if self.compiled is not None else {}
        resources.pop("ptx", None)
        return {**named, "constants": self.launch.constants, **resources, "problems": self.problems}


def examine(launch: Launch, target: str) -> Finding:
    """Compile a launch and judge the result."""
    from triton import TritonError

    finding = Finding(target, launch)
    try:
        compiled = finding.compiled = compile_launch(launch, target)
    except (TritonError, RuntimeError) as error:
        finding.problems.append(f"does not compile: {_cause(error)}")
        return finding
    limit = TARGETS[target].shared_memory
    if compiled.shared_memory > limit:
        finding.problems.append(f"needs {compiled.shared_memory} bytes of shared memory; {limit} is the limit")
    if compiled.spilled_bytes and target in NO_SPILL_TARGETS:
        finding.problems.append(f"spills {compiled.spilled_bytes} bytes a thread")
    # Hopper's matrix instruction takes 64 rows, and no exact float32.
    rows = launch.constants.get("TILE_ROWS", 0)
    if target == "sm_90" and rows >= 64 and launch.dtype != "float32" and not compiled.instructions["wgmma"]:
        finding.problems.append(f"has tiles of {rows} rows and no wgmma")
    reads_pages = {"BLOCK_SIZE", "TILE_KEYS"} <= launch.constants.keys()
    if TARGETS[target].backend == "cuda" and reads_pages and not compiled.instructions["cp.async"]:
        finding.problems.append("waits for each tile of keys: no cp.async")
    return finding


def _cause(error: BaseException) -> str:
    """The last line of the innermost error: Triton wraps it once for every call in the kernel."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error) or type(error).__name__).strip().splitlines()[-1]


def examine_all(targets: Iterable[str], launches: Callable[[str], list[Launch]]) -> Iterator[Finding]:
    """Findings in order, on all cores: threads will do, as the compiler's passes do not hold Python's lock."""
    jobs = [(launch, target) for target in targets for launch in launches(target)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(examine, *zip(*jobs, strict=True))


# ---------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `kernels`."""
    parser.add_argument(
        "--target",
        nargs="+",
        action="extend",
        metavar="GPU",
        help=f"of {', '.join(TARGETS)} (default: {' '.join(DEFAULT_TARGETS)})",
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES, help="only these (default: all)")
    parser.add_argument(
        "--head-dim", nargs="+", type=int, choices=HEAD_DIMS, default=HEAD_DIMS, help="only these (default: all)"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="every combination of sizes, which takes hours (default: a part in which each size occurs)",
    )
    parser.add_argument("--verbose", action="store_true", help="a line for every configuration")
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path, help="write the numbers to a file, too")


def run(arguments: argparse.Namespace) -> int:
    """Compile and print the table; 1 if a kernel does not fit a target."""
    from rich.console import Console
    from rich.progress import track

    targets = list(dict.fromkeys(arguments.target or DEFAULT_TARGETS))
    unknown = [target for target in targets if target not in TARGETS]
    if unknown:
        raise UsageError(f"unknown target {', '.join(unknown)}; known are {', '.join(TARGETS)}")
    _require_compiler()
    launches = {
        target: engine_launches(target, arguments.dtype, arguments.head_dim, arguments.all) for target in targets
    }
    progress = Console(stderr=True)
    findings = list(
        track(
            examine_all(targets, launches.__getitem__),
            "compiling",
            sum(map(len, launches.values())),
            console=progress,
            transient=True,
            disable=not progress.is_terminal,
        )
    )
    failed = [finding for finding in findings if finding.problems]
    console = Console(width=None if sys.stdout.isatty() else 170, highlight=False)
    console.print(as_table(findings, arguments.verbose))
    for finding in failed:
        console.print(f"{finding}: {'; '.join(finding.problems)}", style="red", soft_wrap=True, markup=False)
    console.print(f"{len(findings)} configurations, {len(failed)} with problems")
    if arguments.json is not None:
        numbers = [finding.as_json() for finding in findings]
        arguments.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


def _require_compiler() -> None:
    """Raises: UsageError: kernels cannot be compiled in this process."""
    from nanovllm.ops.support import is_interpreted

    if importlib.util.find_spec("triton") is None:
        raise UsageError("the package 'triton' is not installed (there is none for macOS and Windows)")
    if is_interpreted():
        raise UsageError("TRITON_INTERPRET=1 puts an interpreter in the compiler's place: unset it")


def as_table(findings: Iterable[Finding], verbose: bool = False) -> rich.table.Table:
    """A line for every configuration, or for all of a kernel that have the same tile: with the most that any of them
    takes of what is scarce, and the fewest of the instructions that are wanted."""
    from rich.table import Table

    lines: dict[tuple[str, ...], list[Compiled]] = {}
    for finding in findings:
        if finding.compiled is not None:
            lines.setdefault(_line_of(finding, verbose), []).append(finding.compiled)
    table = Table("target", "kernel", "dtype", *(("constants",) if verbose else ("head", "tile")))
    for name in (
        "of",
        "registers",
        "spilled",
        "shared KiB",
        "tensor cores",
        "cp.async",
        "16-byte load",
        "warps",
        "stages",
    ):
        table.add_column(name, justify="right")
    for line, group in lines.items():
        fewest = {name: min(compiled.instructions[name] for compiled in group) for name in INSTRUCTIONS}
        shared = max(compiled.shared_memory for compiled in group) / KIB
        table.add_row(
            *line,
            str(len(group)),
            str(max(compiled.registers for compiled in group)),
            str(max(compiled.spilled_bytes for compiled in group)),
            f"{shared:.1f} of {TARGETS[line[0]].shared_memory // KIB}",
            " ".join(f"{name} {fewest[name]}" for name in TENSOR_CORES if fewest[name]) or "-",
            str(fewest["cp.async"]),
            str(fewest["16-byte load"]),
            "/".join(map(str, sorted({compiled.num_warps for compiled in group}))),
            "/".join(map(str, sorted({compiled.num_stages for compiled in group}))),
        )
    return table


def _line_of(finding: Finding, verbose: bool) -> tuple[str, ...]:
    """What stands at the beginning of a finding's line."""
    launch, constants = finding.launch, finding.launch.constants
    line = (finding.target, launch.function.__name__.removesuffix("_kernel"), launch.dtype)
    if verbose:
        return *line, " ".join(f"{name}={value}" for name, value in constants.items())
    tile = "×".join(str(constants[name]) for name in ("TILE_ROWS", "TILE_KEYS", "TILE_OUTPUTS") if name in constants)
    return *line, str(constants.get("HEAD_DIM", constants.get("RANK", ""))), tile
