"""The picture at the end of each lecture: the rooms of the house, and the way of a request through
them, with what is yours by then."""

import functools
import hashlib
import importlib
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
from figures_parallel import box
from IPython.display import Image, display
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanovllm.lab.course.build import find_lectures, find_root
from nanovllm.lab.course.notebook import read_lecture
from nanovllm.lab.viz.style import (
    BACKGROUND,
    FAINT,
    INK,
    MUTED,
    PALETTE,
    image_bytes,
    ink_on,
    pale,
    use_style,
)

# From the top to the ground: an import goes down or to the left, never up.
FLOORS = """
    lab cli
    simulate server router offline
    trace assembly engine
    executor
    features kv_transfer
    core
    text layers attention models
    distributed
    ops processes
    data checkpoint
"""
# The calls between an HTTP request and its answer: indented below the function that calls them,
# with the module first. A call with a question mark is part of some settings only, and is drawn in
# the lectures that build it.
CALLS = """
server.chat ChatEndpoint.submit_request
    engine.async_engine AsyncEngine.generate
        text.input_processor InputProcessor.process
engine.process EngineLoop.run
    engine.group? DataParallelCore.step
    simulate.fleet? Fleet.run
    core.engine EngineCore.step
        core.scheduler Scheduler.schedule
        features.data_parallel.lock_step? LockStep.has_work
            features.async_scheduling? OneStepAhead.may_plan
            features.speculation.scheduling? Speculation.before_step
            features.decodes_first? continue_decoding
            features.pipeline.scheduling? PipelineSteps.limit_share
            core.kv_cache_manager KVCacheManager.get_computed_blocks
            kv_transfer.scheduling? KVTransfer.admit
            kv_transfer.stores.offloading? OffloadingScheduler.get_num_new_matched_tokens
            core.kv_cache_manager KVCacheManager.allocate_slots
                core.block_pool BlockPool.get_new_blocks
        simulate.cost? StepCost.step
        simulate.measured? MeasuredCost.step
        executor.remote RemoteExecutor.launch
            executor.worker run_worker
                core.runner ModelRunner.launch
                    kv_transfer.running? KVTransferRunner.before_step
                    core.batch RequestRows.update
                    features.structured_output.running? StructuredOutput.rows_ready
                        features.structured_output.masks? StructuredOutputManager.start
                    features.pipeline.stage? StageForward.__call__
                        distributed.stage_link? StageLink.receive
                    features.cuda_graphs.graphs? GraphForward.__call__
                    core.forward Forward.run
                    models.llama LlamaForCausalLM.forward
                        layers.tensor_parallel RowParallelLinear.forward
                            ops.reference_quantized? linear_w8a8
                            distributed.process_groups ProcessGroupCoordinator.all_reduce
                        attention.torch? TorchBackend.forward
                        attention.latent? TorchLatentBackend.forward
                        attention.triton_simple? SimpleTritonBackend.forward
                        attention.triton TritonBackend.forward
                        models.moe? MoE.forward
                            distributed.expert_parallel? ExpertDispatcher.dispatch
                    core.sampling Sampler.start
                    features.speculation.verification? keep_accepted
                    features.data_parallel.lock_step? LockStepRunner.after_step
        core.scheduler Scheduler.update_from_output
            features.speculation.scheduling? Speculation.sampled
        kv_transfer.scheduling? KVTransfer.update_from_transfers
engine.async_engine AsyncEngine._deliver
    text.processor OutputProcessor.process
    engine.request_stream RequestStream.put
"""


@functools.cache
def builders() -> dict[str, list[int]]:
    """The modules that lectures build, each with the numbers of its lectures in order."""
    root, found = find_root(Path.cwd()), dict[str, list[int]]()
    for path in find_lectures(root):
        for module in dict.fromkeys(cell.module or "" for cell in read_lecture(path, root).exports):
            found.setdefault(module, []).append(int(path.stem[:2]))
    return found


def look(lecture: int, lectures: Sequence[int]) -> str:
    """The colour of what these lectures build: for the reader of this one it is new, known, or to
    come."""
    if lecture in lectures:
        return PALETTE[0]
    return pale(PALETTE[0]) if any(number < lecture for number in lectures) else BACKGROUND


class Room(NamedTuple):
    """A package, and the lectures that build parts of it."""

    name: str
    lectures: list[int]


class Call(NamedTuple):
    """A function on the way of a request, the calls above it, and the lectures that build it."""

    name: str
    depth: int
    lectures: list[int]


def rooms() -> list[list[Room]]:
    """The packages, floor by floor."""
    return [
        [
            Room(name, [n for module in built_in(name) for n in builders()[module]])
            for name in line.split()
        ]
        for line in FLOORS.strip().split("\n")
    ]


def built_in(room: str) -> list[str]:
    """The modules of a package that lectures build."""
    return [module for module in builders() if module.split(".")[0] == room]


def calls(lecture: int) -> list[Call]:
    """The calls that the picture of a lecture shows. Each function exists."""
    found = []
    for line in CALLS.strip().split("\n"):
        module, name = line.split()
        depth = (len(line) - len(line.lstrip())) // 4
        lectures = builders().get(module.rstrip("?"), [])
        if module.endswith("?") and lecture not in lectures:
            continue
        owner = importlib.import_module(f"nanovllm.{module.rstrip('?')}")
        functools.reduce(getattr, name.split("."), owner)
        found.append(Call(name, depth, lectures))
    return found


def fingerprint(lecture: int) -> str:
    """A number of all that the picture of a lecture shows: another one, if it has to be drawn
    again."""
    shown = [
        [(room.name, look(lecture, room.lectures)) for floor in rooms() for room in floor],
        [(call, look(lecture, call.lectures)) for call in calls(lecture)],
    ]
    return hashlib.sha256(repr(shown).encode()).hexdigest()[:12]


def draw_rooms(ax: Axes, lecture: int) -> None:
    floors = rooms()
    for row, floor in enumerate(floors):
        width = 6 / len(floor)
        for column, room in enumerate(floor):
            fill = look(lecture, room.lectures)
            box(ax, column * width, row, width - 0.08, 0.9, room.name, fill)
    ax.set(xlim=(-0.1, 6.1), ylim=(len(floors), -0.15))
    ax.set_title("the rooms")
    ax.axis("off")


def draw_calls(ax: Axes, lecture: int) -> None:
    shown = calls(lecture)
    for row, call in enumerate(shown):
        fill = look(lecture, call.lectures)
        ax.text(
            0.35 * call.depth,
            row,
            f" {call.name} ",
            va="center",
            family="monospace",
            fontsize=8.5,
            color=ink_on(fill) if call.lectures else MUTED,
            fontweight="bold" if lecture in call.lectures else "normal",
            bbox={
                "boxstyle": "square,pad=0.16",
                "facecolor": fill,
                "edgecolor": MUTED if call.lectures else FAINT,
                "linewidth": 0.6,
            },
        )
        ax.text(
            8.6,
            row,
            " · ".join(map(str, call.lectures)),
            va="center",
            ha="right",
            fontsize=8.5,
            color=INK,
        )
    ax.set(xlim=(0, 8.6), ylim=(len(shown) - 0.4, -0.6))
    ax.set_title("who calls whom, and the lectures that build it")
    ax.axis("off")


def draw(lecture: int) -> Figure:
    """Draw what a reader of this lecture has built: blue is new, pale blue is from earlier
    lectures, white is to come or in no lecture."""
    use_style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 5.6), width_ratios=(3, 5))
    draw_rooms(left, lecture)
    draw_calls(right, lecture)
    return figure


def house() -> list[list[tuple[str, str]]]:
    """The packages, floor by floor, each with the numbers of the lectures that build parts of
    it."""
    return [
        [(room.name, ", ".join(map(str, sorted(set(room.lectures))))) for room in floor]
        for floor in rooms()
    ]


def draw_house() -> Figure:
    """Draw all packages and their lectures; those that no lecture builds are white."""
    use_style()
    figure, ax = plt.subplots(figsize=(9, 5.6))
    for row, floor in enumerate(house()):
        width = 6 / len(floor)
        for column, (name, numbers) in enumerate(floor):
            fill = pale(PALETTE[0]) if numbers else BACKGROUND
            # A line has room for twelve numbers in a package of this width.
            words = "\n".join([name, *textwrap.wrap(numbers, round(11 * width))])
            box(ax, column * width, row, width - 0.08, 0.92, words, fill)
    ax.set(xlim=(-0.1, 6.1), ylim=(len(FLOORS.strip().split("\n")), -0.1))
    ax.axis("off")
    return figure


def house_fingerprint() -> str:
    """A number of all that `draw_house` shows."""
    return hashlib.sha256(repr(house()).encode()).hexdigest()[:12]


def show_house() -> None:
    """Show `draw_house`, with its fingerprint."""
    figure = draw_house()
    image = Image(image_bytes(figure), metadata={"map": house_fingerprint()})
    plt.close(figure)
    display(image)


def where_you_are(lecture: int) -> None:
    """Show `draw`. The output carries the picture's fingerprint, so that a test finds a saved
    picture of an older engine."""
    figure = draw(lecture)
    image = Image(image_bytes(figure), metadata={"map": fingerprint(lecture)})
    plt.close(figure)
    display(image)
