"""The engine as it stands after a lecture: a package that generates and serves."""

import shutil
from pathlib import Path

from nanovllm.lab.course.build import build, find_lectures, read_lectures, write
from nanovllm.lab.course.notebook import PACKAGE, CourseError

FIRST = 18  # the lecture that completes an engine
SERVER = 90  # lectures from here on are about the way in, which every stage has
LAST = 91  # the last lecture

# The parts that the package can do without: for each, the first lecture that builds or names it,
# and patterns of its files.
PARTS: dict[str, tuple[int, list[str]]] = {
    "KV on the move": (31, ["kv_transfer/**/*", "router/**/*", "data/kv_transfer_config.py"]),
    "many processes": (
        20,
        [
            "executor/multiprocess.py",
            "executor/remote.py",
            "executor/reception.py",
            "executor/grid.py",
            "executor/ray.py",
            "executor/torchrun.py",
            "executor/worker.py",
            "engine/group.py",
            "features/data_parallel/*",
            "distributed/groups.py",
            "distributed/process_groups.py",
            "distributed/shared_collectives.py",
            "distributed/shared_memory.*",
        ],
    ),
    "experts, latent attention, Gemma 2": (
        24,
        [
            "models/moe.py",
            "models/moe_config.py",
            "models/deepseek.py",
            "models/gemma2.py",
            "attention/latent*.py",
            "attention/triton_latent.py",
            "ops/triton_grouped.py",
            "distributed/expert_parallel.py",
            "distributed/expert_slots.py",
            "data/eplb_config.py",
            "distributed/load_balance.py",
            "distributed/load_balancer.py",
            "features/expert_balance.py",
        ],
    ),
    "Triton": (15, ["ops/triton*.py", "attention/triton*.py", "attention/latent_kernels.py"]),
    "CUDA graphs": (40, ["features/cuda_graphs/*"]),
    "compiled operators": (10, ["ops/native.py", "ops/cpu_*"]),
    "layers in one call": (40, ["models/fused.py"]),
    "GGUF files": (
        10,
        [
            "checkpoint/conversion.py",
            "checkpoint/course_model.py",
            "checkpoint/gguf*.py",
            "checkpoint/pip_run.py",
        ],
    ),
    "quantization": (
        41,
        [
            "checkpoint/quantization.py",
            "layers/quantization/*",
            "ops/*quantized*",
            "offline/algorithms.py",
            "offline/command.py",
            "offline/quantize.py",
            "offline/text.py",
            "attention/*quantized*",
        ],
    ),
    "speculation": (
        42,
        [
            "data/speculative_config.py",
            "features/speculation/*",
            "models/eagle.py",
            "models/heads/*",
            "offline/*eagle*",
        ],
    ),
    "structured output": (
        19,
        [
            "text/grammar_check.py",
            "text/examples.py",
            "text/forms.py",
            "text/grammars.py",
            "text/guides.py",
            "text/schema_sizes.py",
            "text/schemas.py",
            "features/structured_output/*",
            "server/tools.py",
        ],
    ),
    "traces": (
        13,
        ["trace/**/*", "server/page.py", "server/web/*", "cli/trace.py", "cli/replay.py"],
    ),
    "chat in the terminal": (90, ["cli/chat.py"]),
    "workshop": (89, ["lab/**/*"]),
    "limits and older policies": (19, ["features/batching_policies.py", "features/step_time*.py"]),
    "pipelines": (
        23,
        ["features/pipeline/*", "distributed/pipeline_parallel.py", "distributed/stage_link.py"],
    ),
    "layers of several ranks": (22, ["layers/tensor_parallel.py"]),
    "sleeping devices": (
        20,
        [
            "executor/sleeping*.py",
            "executor/rank_cost.py",
            "executor/virtual_clock.py",
            "assembly/sleeping.py",
            "data/sleep_config.py",
        ],
    ),
    "the fast path for decodes": (43, ["features/decodes_first.py"]),
    "the simulator": (51, ["simulate/*"]),
}


def write_stage(root: Path, last: int, folder: Path) -> None:
    """Write the package as it stands after lecture `last`: without the parts of later lectures, and
    with modules built from the cells up to that lecture. What later lectures build of the remaining
    modules is there as it will be.

    Raises:
        CourseError: there is no such stage, the folder is not empty, or a module cannot be built.
    """
    stages = [
        number for path in find_lectures(root) if FIRST <= (number := _number(path.name)) < SERVER
    ]
    if last not in stages:
        raise CourseError(
            f"there is no stage {last}; lectures after which there is an engine: "
            f"{', '.join(map(str, stages))}"
        )
    if folder.is_dir() and any(folder.iterdir()):
        raise CourseError(f"{folder} is not empty: name a new folder")
    copy = Path(
        shutil.copytree(
            root / PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__")
        )
    )
    for first, patterns in PARTS.values():
        for path in [path for pattern in patterns for path in copy.glob(pattern) if path.is_file()]:
            if last < first < SERVER:
                path.unlink(missing_ok=True)
    lectures = [
        lecture for lecture in read_lectures(root) if not last < _number(lecture.name) < SERVER
    ]
    for lecture in lectures:
        lecture.exports = [
            cell for cell in lecture.exports if not last < _number(cell.lecture) < SERVER
        ]
    write(folder, [module for module in build(root, lectures) if (folder / module.path).exists()])
    for path in sorted(copy.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    shutil.copy(root / "pyproject.toml", folder)


def _number(lecture: str) -> int:
    return int(Path(lecture).name[:2])
