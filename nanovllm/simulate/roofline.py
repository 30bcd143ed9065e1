"""Predicts the time of a step from the shape of a model and the data of a machine.

Each part of a step takes the larger of bytes / bandwidth and FLOPs / peak, with the shares of both
that programs have been measured to reach; collectives take latency + bytes / bandwidth. The parts
follow each other: nothing overlaps. Sliding windows count as full attention.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from nanovllm.data.errors import UsageError
from nanovllm.distributed.cost_model import best_all_reduce, ring_all_gather
from nanovllm.simulate.cost import StepWork
from nanovllm.simulate.machines import GIB, Machine
from nanovllm.simulate.models import Layout, Matrix, ModelShape
from nanovllm.simulate.workload import SECOND

# Activations have 16 bits. The small operators between two products read the outputs of the one
# and write the inputs of the other once more.
ACTIVATION_BYTES = 2


class Part(NamedTuple):
    """A part of a step.

    Attributes:
        bound: "bytes", "FLOPs", "link" or "host": what its time is spent on.
    """

    name: str
    seconds: float
    bound: str


class Roofline:
    """A `StepCost`: see `create_cost`."""

    def __init__(self, model: ModelShape, machine: Machine, layout: Layout) -> None:
        layout.check(model.config)
        self.model = model
        self.machine = machine
        self.layout = layout
        self.config = model.config
        self.reach = machine.reach
        self.matrices = model.matrices(layout)
        self._decodes: dict[int, tuple[int, int]] = {}

    def step(self, work: StepWork) -> int:
        """Return the time of a step, in picoseconds, over all stages of the pipeline."""
        if not work.prefills and work.num_samples == work.num_decodes:
            base, per_token = self.decode(work.num_decodes)
            return base + per_token * work.decode_context
        return round(sum(part.seconds for part in self.parts(work)) * SECOND)

    def decode(self, num_decodes: int) -> tuple[int, int]:
        """Return base and price per token of context: see `StepCost`."""
        if num_decodes not in self._decodes:
            parts = self.parts(StepWork(num_decodes, 0, (), num_decodes))
            base = round(sum(part.seconds for part in parts) * SECOND)
            self._decodes[num_decodes] = base, round(self._attention(1).seconds * SECOND)
        return self._decodes[num_decodes]

    def bottleneck(self, work: StepWork) -> Part:
        """Return the part of a step that takes longest."""
        return max(self.parts(work), key=lambda part: part.seconds)

    def parts(self, work: StepWork) -> list[Part]:
        """Return the parts of a step: one for each matrix, and others."""
        reach = self.reach
        num_tokens = work.num_decodes + sum(count for _, count in work.prefills)
        num_requests = work.num_decodes + len(work.prefills)
        uses = [self._uses(matrix, num_tokens, work.num_samples) for matrix in self.matrices]
        pairs = list(zip(self.matrices, uses, strict=True))
        num_kernels = self.config.num_layers + 2 * sum(m.layers for m in self.matrices)
        moved = sum(use * _activation_bytes(matrix) for matrix, use in pairs)
        return [
            *(self._product(matrix, use, num_tokens) for matrix, use in pairs),
            self._larger("operators", moved, reach.bandwidth, 0, 1),
            self._attention(work.decode_context),
            self._prompt_attention(work),
            Part("launches", num_kernels * reach.kernel, "host"),
            Part("host", reach.host_step + reach.host_request * num_requests, "host"),
            *self._collectives(num_tokens, is_decode=not work.prefills),
        ]

    def _larger(
        self, name: str, num_bytes: float, bandwidth: float, flops: float, peak: float
    ) -> Part:
        """Return a part that reaches this share of the bandwidth, or `peak` FLOP/s."""
        moving = num_bytes / (self.machine.bandwidth * bandwidth)
        computing = flops / peak
        bound = "bytes" if moving > computing else "FLOPs"
        return Part(name, max(moving, computing), bound)

    def _uses(self, matrix: Matrix, num_tokens: int, num_samples: int) -> float:
        """Return the rows that a matrix, or all experts of a rank, multiply with."""
        if matrix.part != "experts" or self.config.moe is None:
            return num_samples if matrix.part == "head" else num_tokens
        # Each engine's tokens go to all ranks, of which this engine has as many as it has shares.
        imbalance = self.layout.expert_imbalance * self.layout.data_parallel_size
        uses = num_tokens * self.config.moe.top_k
        return uses * (imbalance / self.layout.expert_ranks if self._is_spread else 1)

    @property
    def _is_spread(self) -> bool:
        return self.layout.expert_ranks > 1

    def _product(self, matrix: Matrix, uses: float, num_tokens: int) -> Part:
        copies = matrix.copies if uses else 0
        if matrix.part == "experts" and self.config.moe is not None:
            # The expected number of experts that are read, if all are equally likely.
            ranks = self.layout.data_parallel_size if self._is_spread else 1
            share = self.config.moe.top_k / (matrix.copies * self.layout.expert_ranks)
            copies *= 1 - (1 - share) ** (num_tokens * ranks)
        num_bytes = matrix.size * matrix.bytes_per_weight * copies + uses * _activation_bytes(
            matrix
        )
        peak = self.machine.peak(matrix.bytes_per_weight) * self.reach.products
        return self._larger(
            matrix.part, num_bytes, self.reach.bandwidth, 2 * matrix.size * uses, peak
        )

    def _attention(self, context: int) -> Part:
        """Return attention of decodes, which works on latents where there are some."""
        config = self.config
        channels = 2 * config.head_dim
        if config.kv_lora_rank:
            channels = config.latent_width + config.kv_lora_rank
        heads = config.num_heads // self.layout.tensor_parallel_size
        return self._larger(
            "attention",
            context * self.model.kv_bytes_per_token(self.layout.tensor_parallel_size),
            self.reach.attention_bandwidth,
            context * 2 * config.num_layers * heads * channels,
            self.machine.flops["bf16"] * self.reach.attention_products,
        )

    def _prompt_attention(self, work: StepWork) -> Part:
        config = self.config
        channels = 2 * config.head_dim
        if config.kv_lora_rank:
            channels = config.qk_nope_head_dim + config.head_dim + config.v_head_dim
        heads = config.num_heads // self.layout.tensor_parallel_size
        pairs = sum(count * start + count * (count + 1) // 2 for start, count in work.prefills)
        read = sum(start for start, _ in work.prefills)
        return self._larger(
            "prompt attention",
            read * self.model.kv_bytes_per_token(self.layout.tensor_parallel_size),
            self.reach.attention_bandwidth,
            2 * config.num_layers * heads * channels * pairs,
            self.machine.flops["bf16"] * self.reach.prompt_attention,
        )

    def _collectives(self, num_tokens: int, *, is_decode: bool) -> list[Part]:
        layout = self.layout
        tp = layout.tensor_parallel_size
        rows = num_tokens * self.config.hidden_size
        num_sparse = (
            sum(self.config.moe.sparse_layers) if self.config.moe and self._is_spread else 0
        )
        found = []
        if tp > 1:
            # One after attention, and one after what the ranks have slices of.
            count = 2 * self.config.num_layers - num_sparse
            found.append(Part("all-reduce", count * self._sum(rows * ACTIVATION_BYTES), "link"))
        if layout.pipeline_parallel_size > 1:
            message = self.machine.link(layout.devices).message(rows * ACTIVATION_BYTES / tp)
            found.append(Part("stages", (layout.pipeline_parallel_size - 1) * message, "link"))
        if num_sparse:
            # FP8 numbers have a scale per 128.
            element = 1 + 4 / 128 if self.model.bytes_per_weight == 1 else ACTIVATION_BYTES
            for name, size in (("dispatch", element), ("combine", ACTIVATION_BYTES)):
                seconds = self._all_to_all(rows / tp * size, is_decode=is_decode)
                found.append(Part(name, num_sparse * seconds, "link"))
        return found

    def _sum(self, num_bytes: float) -> float:
        """Return the seconds to sum over the tensor-parallel ranks: in each node, then between."""
        ranks = self.layout.tensor_parallel_size
        local = min(ranks, self.machine.devices)
        inside = self.machine.link(local)
        if local == ranks:
            return best_all_reduce(inside, ranks, num_bytes)[1]
        within = 2 * ring_all_gather(inside, local, num_bytes / local)
        nodes = math.ceil(ranks / local)
        return within + best_all_reduce(self.machine.link(ranks), nodes, num_bytes / local)[1]

    def _all_to_all(self, num_bytes: float, *, is_decode: bool) -> float:
        """Return the seconds to send this rank's tokens to their experts.

        In decodes, each token is sent to each of its experts; in prompts, once to each node that
        has one of them, which passes it on: the two ways of DeepEP.

        Args:
            num_bytes: of one copy of the tokens.
        """
        moe = self.config.moe
        assert moe is not None
        ranks = self.layout.expert_ranks
        nodes = math.ceil(ranks / self.machine.devices)
        copies = float(moe.top_k)
        if nodes > 1 and not is_decode:
            copies = distinct_nodes(moe.num_groups, moe.topk_group, moe.top_k, nodes)
        others = (nodes - 1) / nodes if nodes > 1 else (ranks - 1) / ranks
        sent = num_bytes * copies * self.layout.expert_imbalance * others
        return self.reach.all_to_all + sent / self.machine.link(ranks).bandwidth


def _activation_bytes(matrix: Matrix) -> int:
    """Return the bytes that a product reads and writes per row."""
    return ACTIVATION_BYTES * (matrix.inputs + matrix.outputs) * matrix.layers


def distinct_nodes(num_groups: int, topk_group: int, top_k: int, nodes: int) -> float:
    """Return the expected number of nodes that have an expert of a token. With groups of experts,
    `topk_group` of them are chosen; without, `top_k` experts."""
    if num_groups % nodes:
        return nodes * (1 - (1 - 1 / nodes) ** top_k)
    elsewhere = num_groups - num_groups // nodes
    return nodes * (1 - math.comb(elsewhere, topk_group) / math.comb(num_groups, topk_group))


def create_cost(model: ModelShape, machine: Machine, layout: Layout) -> Roofline:
    """Return the cost of a step of one engine.

    With expert parallelism, the engines of `data_parallel_size` are taken to have equal steps.

    Raises:
        UsageError: the model cannot be divided like this; the message is the engine's own.
    """
    return Roofline(model, machine, layout)


def kv_blocks(
    model: ModelShape,
    machine: Machine,
    layout: Layout,
    block_size: int,
    gpu_memory_utilization: float = 0.9,
) -> int:
    """Return the number of KV blocks of one engine.

    Raises:
        UsageError: the model does not fit; the message says by how many GB.
    """
    weights = model.weight_bytes(layout)
    room = machine.memory_gib * GIB * gpu_memory_utilization - weights
    per_token = model.kv_bytes_per_token(layout.tensor_parallel_size)
    size = block_size * per_token / layout.pipeline_parallel_size
    if room < size:
        raise UsageError(
            f"{model.name} does not fit on {machine.name}: {(size - room) / 1e9:.1f} GB per device "
            f"are missing ({weights / 1e9:.1f} GB of weights); raise tensor_parallel_size, or "
            "choose a machine with more memory"
        )
    return int(room // size)
