"""Counts for lectures 16 to 51. Each is made twice: with the reader's file, and with the file as it
was.

Lectures without a second part, and why:

    15            what a kernel saves is time; the rows that it reads are counted in lecture 14
    17, 18, 43    they do the host's work at another time, or faster: no count falls
    19            its masks are equal whatever computes them; what they cost is time
    22            its ranks communicate by the all-reduce, which lecture 21 counts
    25            routing is counted in lecture 51, on a whole fleet
    26            its two orders of multiplication differ in time and not in a count
    31            a block is sent once whatever the order; when it is sent decides, hence time
    91            it serves the counts of the others
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from nanovllm.core.schedule import SchedulerOutput
from nanovllm.core.scheduler import Scheduler
from nanovllm.data.config import EngineConfig
from nanovllm.data.resolved_config import resolve
from nanovllm.distributed.expert_parallel import ExpertPlacement
from nanovllm.distributed.load_balance import balance, plan_moves
from nanovllm.lab.bench.simulate import AffineCost
from nanovllm.lab.course.workloads import Load, UnfairError
from nanovllm.lab.viz.simulate import SimulatedRequest, simulate
from nanovllm.simulate.arrivals import SyntheticWorkload, create_workload
from nanovllm.simulate.assembly import create_engine
from nanovllm.simulate.cost import StepWork
from nanovllm.simulate.engine import SimulatedEngine
from nanovllm.simulate.fleet import Fleet
from nanovllm.simulate.report import MILLISECOND

RANKS = 8
NODE = 4
NUMBERS = 96
ROUND_COST = 20
SLOW_COST = 8
BALANCE = 1.05  # times the lecture's load of the busiest rank


def count_16(load: Load) -> int:
    """Probabilities that are sorted to find the nucleus of each row."""
    import torch

    generator = torch.Generator().manual_seed(0)
    sharpness = torch.tensor([3.0, 3.5, 4.0, 4.5, 5.0, 6.0]).repeat(4)[:, None]
    logits = torch.randn(24, 32768, generator=generator, dtype=torch.float64) * sharpness
    probabilities = logits.softmax(1)
    top_p = [0.9] * len(logits)
    sorted_ones = 0

    def largest(rows: Sequence[int], width: int) -> torch.Tensor:
        nonlocal sorted_ones
        width = min(width, probabilities.shape[1])
        sorted_ones += len(rows) * width
        return probabilities[list(rows)].topk(width).values

    found = load()["nucleus"](largest, top_p)
    falling = probabilities.sort(descending=True).values
    last = (falling.cumsum(1) < 0.9).sum(1)
    if list(found) != falling.gather(1, last[:, None]).flatten().tolist():
        raise UnfairError("a nucleus is not the smallest that has the probability top_p")
    return sorted_ones


def count_20(load: Load) -> int:
    """Bytes of the orders that an executor sends to its ranks."""
    # Loaded twice: a rank in another process shares no variable with the executor.
    encode = load()["Encoder"]().encode
    decode = load()["Decoder"]().decode
    num_bytes = 0

    class Sending(Scheduler):
        def schedule(self) -> SchedulerOutput:
            nonlocal num_bytes
            plan = super().schedule()
            order = encode(plan)
            num_bytes += len(order)
            if decode(order) != plan:
                raise UnfairError("a rank reads another plan than was sent")
            return plan

    draw = random.Random(0)
    requests = [
        SimulatedRequest(3 * n, draw.randrange(20, 60), draw.randrange(10, 40)) for n in range(24)
    ]
    simulate(requests, num_kv_blocks=64, block_size=8, max_num_seqs=8, scheduler_class=Sending)
    return num_bytes


def count_21(load: Load) -> int:
    """Time units of an all-reduce over two nodes."""
    import numpy as np

    values = np.arange(1, RANKS * NUMBERS + 1).reshape(RANKS, NUMBERS) ** 2
    expected = np.tile(values.sum(0), (RANKS, 1))
    units = 0
    for transfers in load()["all_reduce"](RANKS, NUMBERS):
        before = values.copy()
        sent = np.zeros((2, RANKS), dtype=int)  # by each rank, and to each
        crossed = np.zeros(RANKS // NODE, dtype=int)  # out of each node
        for source, target, start, end, adds in transfers:
            values[target, start:end] *= adds
            values[target, start:end] += before[source, start:end]
            sent[0, source] += end - start
            sent[1, target] += end - start
            crossed[source // NODE] += (end - start) * (source // NODE != target // NODE)
        units += ROUND_COST + max(int(sent.max()), SLOW_COST * int(crossed.max()))
    if (values != expected).any():
        raise UnfairError("a rank does not have the sum")
    return units


def count_23(load: Load) -> int:
    """Time units of the slowest stage, added over models and numbers of stages."""
    models = [
        [12, *[10] * 30, 47],  # with the embedding, and with the output head
        [5, 4, 4, *[12] * 57, 40],  # dense layers, then layers with experts
        [*[5, 5, 5, 5, 5, 11] * 7, 36],  # sliding windows, and every sixth layer full attention
    ]
    units = 0
    for costs in models:
        for stages in (2, 4, 8):
            left = list(costs)
            slowest = 0
            for size in load()["layers_per_stage"](list(costs), stages):
                slowest = max(slowest, sum(left[:size]))
                del left[:size]
                stages -= size > 0
            if left or stages:
                raise UnfairError("every layer needs a stage, and every stage a layer")
            units += slowest
    return units


def count_24(load: Load) -> int:
    """Experts that are moved while their loads change."""
    draw = random.Random(0)
    usual = ours = ExpertPlacement.initial(32, 8, 8)
    loads = [draw.randrange(50, 150) for _ in range(32)]
    for expert in draw.sample(range(32), 4):
        loads[expert] *= 6
    num_moves = 0
    busiest = busiest_usual = 0.0
    for _ in range(24):
        loads = [max(1, round(each * draw.uniform(0.9, 1.1))) for each in loads]
        usual = balance(loads, usual)
        new = load()["rebalance"](list(loads), ours)
        num_moves += len(plan_moves(ours, new))
        ours = new
        busiest += max(ours.rank_loads(loads))
        busiest_usual += max(usual.rank_loads(loads))
    if busiest > BALANCE * busiest_usual:
        raise UnfairError(
            f"the busiest ranks have {busiest / busiest_usual:.2f} times the tokens that they have "
            f"with the lecture's placements, more than {BALANCE}"
        )
    return num_moves


def count_32(load: Load) -> int:
    """Blocks that are computed or copied into the store."""
    store = load()["MyStore"](96)
    draw = random.Random(0)
    chains = [[b"%d-%d" % (chat, i) for i in range(24)] for chat in range(6)]
    num_blocks = 0
    for turn in range(72):
        chain = chains[draw.randrange(6)][: 8 + turn // 6]
        for keys in (chain, [b"once %d-%d" % (turn, i) for i in range(12)]):
            there = store.contains(keys)
            if not all(key in store.slots for key in keys[:there]):
                raise UnfairError("the store counts a block that it does not keep")
            store.put(keys, [memoryview(b"0")] * len(keys))
            num_blocks += len(keys) - there
    if len(store.slots) > 96:
        raise UnfairError("the store keeps more blocks than it has slots")
    return num_blocks + int(store.stats.stored)


def count_40(load: Load) -> int:
    """Rows of padding in replayed graphs."""
    draw = random.Random(0)
    seen = [
        max(1, min(64, round(draw.gauss(mean, 1.5))))
        for mean, steps in ((6, 300), (13, 150), (21, 200), (29, 250), (52, 100))
        for _ in range(steps)
    ]
    sizes = sorted(load()["graph_sizes"](list(seen), 11))
    if len(sizes) > 11 or sizes[-1] < max(seen):
        raise UnfairError("at most 11 graphs, and one that is large enough for every step")
    return sum(next(size for size in sizes if size >= num_rows) - num_rows for num_rows in seen)


def count_41(load: Load) -> int:
    """Squared error of quantized weights."""
    import torch

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 256, generator=generator)
    weight[:, ::37] *= 2.5
    values, scales = load()["quantize"](weight.clone(), 32)
    is_rounded = (values == values.round()).all() and -8 <= values.min() <= values.max() <= 7
    if values.shape != (64, 256) or scales.shape != (64, 8) or not is_rounded:
        raise UnfairError("each of 64 rows needs 256 integers from -8 to 7, and 8 scales")
    restored = (values.double().unflatten(1, (8, 32)) * scales.double()[..., None]).flatten(1)
    return round(100 * float((weight - restored).square().sum()))


def count_42(load: Load) -> int:
    """Forward passes, with up to four drafts each, that write a sequence."""
    draw = random.Random(0)
    phrases = [[draw.randrange(4) for _ in range(30)] for _ in range(8)]
    text = [token for _ in range(40) for token in phrases[draw.randrange(8)]]
    proposer = load()["MyProposer"](3, 1)
    known = 10
    passes = 0
    while known < len(text):
        drafts = proposer.propose(text[:known], 4)
        if len(drafts) > 4:
            raise UnfairError("more than four drafts")
        right = 0
        while right < len(drafts) and text[known + right : known + right + 1] == [drafts[right]]:
            right += 1
        known += right + 1
        passes += 1
    return passes


class SlowedCost(AffineCost):
    """Steps that take `factor` times as long."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def step(self, work: StepWork) -> int:
        """Return the time of a step."""
        return self.factor * super().step(work)

    def decode(self, num_decodes: int) -> tuple[int, int]:
        """Return base and price per token of context."""
        base, per_context = super().decode(num_decodes)
        return self.factor * base, self.factor * per_context


def count_51(load: Load) -> int:
    """Milliseconds to first tokens, of fleets in which two engines of six are slow."""
    config = EngineConfig(block_size=16, num_kv_blocks=1024, max_num_seqs=16)
    resolved = resolve(config, model_max_len=4096, num_kv_blocks=1024)
    loads = SyntheticWorkload(
        request_rate=12.0,
        num_prompts=300,
        random_input_len=800,
        random_output_len=70,
        random_range_ratio=0.9,
    )
    picoseconds = 0
    for slow in ((0, 3), (1, 4), (2, 5)):
        costs = [SlowedCost(4 if number in slow else 1) for number in range(6)]
        engines = [create_engine(SimulatedEngine, resolved, cost) for cost in costs]
        result = Fleet(engines, load()["MyRouter"](6)).run(create_workload(loads, 16))
        for request in result.requests:
            if request.first_token is None:
                raise UnfairError("a request was rejected")
            picoseconds += request.first_token - request.arrival
    return picoseconds // MILLISECOND


MEASURES: dict[int, Callable[[Load], int]] = {
    16: count_16,
    20: count_20,
    21: count_21,
    23: count_23,
    24: count_24,
    32: count_32,
    40: count_40,
    41: count_41,
    42: count_42,
    51: count_51,
}
