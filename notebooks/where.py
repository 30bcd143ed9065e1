"""The picture at the end of each lecture: the rooms of the house, and the way of a request through
them, with what is yours by then."""

import functools
import importlib
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from figures_parallel import box
from matplotlib.axes import Axes

from nanovllm.lab.course.build import find_lectures, find_root
from nanovllm.lab.course.notebook import read_lecture
from nanovllm.lab.viz.style import BACKGROUND, FAINT, INK, MUTED, PALETTE, ink_on, pale, use_style

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
        text.processor InputProcessor.process
engine.process EngineLoop.run
    engine.group? DataParallelCore.step
    core.engine EngineCore.step
        core.scheduler Scheduler.schedule
        features.data_parallel.lock_step? LockStep.has_work
            features.async_scheduling? OneStepAhead.may_plan
            features.speculation.scheduling? Speculation.before_step
            features.decodes_first? continue_decoding
            features.pipeline.scheduling? PipelineSteps.limit_share
            core.kv_cache_manager KVCacheManager.get_computed_blocks
            kv_transfer.pd.consumer? ConsumerSide.get_num_new_matched_tokens
            kv_transfer.stores.offloading? OffloadingScheduler.get_num_new_matched_tokens
            core.kv_cache_manager KVCacheManager.allocate_slots
                core.block_pool BlockPool.get_new_blocks
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


def draw_rooms(ax: Axes, lecture: int) -> None:
    floors = [line.split() for line in FLOORS.split("\n") if line.strip()]
    for row, rooms in enumerate(floors):
        width = 6 / len(rooms)
        for column, room in enumerate(rooms):
            lectures = [
                n
                for module, numbers in builders().items()
                if module.split(".")[0] == room
                for n in numbers
            ]
            box(ax, column * width, row, width - 0.08, 0.9, room, look(lecture, lectures))
    ax.set(xlim=(-0.1, 6.1), ylim=(len(floors), -0.15))
    ax.set_title("the rooms")
    ax.axis("off")


def draw_calls(ax: Axes, lecture: int) -> None:
    row = 0
    for line in CALLS.strip().split("\n"):
        module, name = line.split()
        lectures = builders().get(module.rstrip("?"), [])
        if module.endswith("?") and lecture not in lectures:
            continue
        functools.reduce(
            getattr, name.split("."), importlib.import_module(f"nanovllm.{module.rstrip('?')}")
        )  # it is there
        depth, fill = (len(line) - len(line.lstrip())) // 4, look(lecture, lectures)
        ax.text(
            0.35 * depth,
            row,
            f" {name} ",
            va="center",
            family="monospace",
            fontsize=8.5,
            color=ink_on(fill) if lectures else MUTED,
            fontweight="bold" if lecture in lectures else "normal",
            bbox={
                "boxstyle": "square,pad=0.16",
                "facecolor": fill,
                "edgecolor": MUTED if lectures else FAINT,
                "linewidth": 0.6,
            },
        )
        ax.text(
            8.6,
            row,
            " · ".join(map(str, lectures)),
            va="center",
            ha="right",
            fontsize=8.5,
            color=INK,
        )
        row += 1
    ax.set(xlim=(0, 8.6), ylim=(row - 0.4, -0.6))
    ax.set_title("who calls whom, and the lectures that build it")
    ax.axis("off")


def where_you_are(lecture: int) -> None:
    """Draw what a reader of this lecture has built: blue is new, pale blue is from earlier
    lectures, white is to come or in no lecture."""
    use_style()
    _, (rooms, calls) = plt.subplots(1, 2, figsize=(9, 5.6), width_ratios=(3, 5))
    draw_rooms(rooms, lecture)
    draw_calls(calls, lecture)
