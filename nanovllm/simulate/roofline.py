"""Predicts the time of a step from the shape of a model and the data of a machine.

Each part of a step takes the larger of bytes / bandwidth and FLOPs / peak, with the shares of both
that programs have been measured to reach; collectives take latency + bytes / bandwidth. The parts
follow each other: nothing overlaps. Sliding windows count as full attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from nanovllm.data.config import EngineConfig
from nanovllm.data.errors import UsageError
from nanovllm.data.resolved_config import DEFAULT_TOKEN_BUDGET
from nanovllm.distributed.cost_model import best_all_reduce, ring_all_gather
from nanovllm.simulate.cost import StepCost, StepWork
from nanovllm.simulate.machines import GIB, Machine
from nanovllm.simulate.models import ACTIVATION_BYTES, Layout, Matrix, ModelShape
from nanovllm.simulate.workload import SECOND

# Share of the memory for all that an engine holds, by default.
USUAL_UTILIZATION = 0.9


class Part(msgspec.Struct, frozen=True, gc=False):
    """A part of a step.

    Attributes:
        bound: "bytes", "FLOPs", "link" or "host": what its time is spent on.
    """

    name: str
    seconds: float
    bound: str


def longest_part(parts: Sequence[Part]) -> Part:
    """Return the part that takes longest."""
    return max(parts, key=lambda part: part.seconds)


class Product(msgspec.Struct, frozen=True):
    """Times of the products with a matrix, in seconds.

    Attributes:
        read: to read the weights, of all copies.
        move: to read the input and write the output of one row. The small operators before and
            after a product take this time once more.
        compute: to multiply one row.
    """

    part: str
    read: float
    move: float
    compute: float

    def of(self, rows: float, copies: float) -> Part:
        """Return the part of a step in which so many rows use this share of the copies."""
        moving = copies * self.read + rows * self.move
        computing = rows * self.compute
        if moving > computing:
            return Part(self.part, moving, "bytes")
        return Part(self.part, computing, "FLOPs")


class Roofline(StepCost):
    """The cost of a step of one engine, computed. With expert parallelism, the engines of
    `data_parallel_size` are taken to have equal steps.

    Raises:
        UsageError: the model cannot be divided like this; the message is the engine's own.
    """

    def __init__(self, model: ModelShape, machine: Machine, layout: Layout) -> None:
        layout.check(model.config)
        self.model = model
        self.machine = machine
        self.layout = layout
        self.config = model.config
        self.reach = machine.reach
        self.matrices = model.matrices(layout)
        self._products = [self._product(matrix) for matrix in self.matrices]
        num_kernels = model.config.num_layers + 2 * sum(each.layers for each in self.matrices)
        self._launches = num_kernels * self.reach.kernel
        # Seconds for the launches of the head's kernels, of all launches.
        self.head_launches = 2 * self.matrices[-1].layers * self.reach.kernel
        config = model.config
        decode_channels = prompt_channels = 2 * config.head_dim
        if config.kv_lora_rank:  # decodes work on latents, and prompts on keys and values
            decode_channels = config.latent_width + config.kv_lora_rank
            prompt_channels = config.qk_nope_head_dim + config.head_dim + config.v_head_dim
        self._decode_pair = self._pair(decode_channels, self.reach.attention_products)
        self._prompt_pair = self._pair(prompt_channels, self.reach.prompt_attention)
        # Seconds to read keys and values of a token.
        self._read = model.kv_bytes_per_token(layout.tensor_parallel_size) / (
            machine.bandwidth * self.reach.attention_bandwidth
        )
        # Seconds for a token that a decode attends to.
        self._token = max(self._read, self._decode_pair)
        # Times that occur again and again, of a number of tokens, samples or decodes.
        self._token_times: dict[tuple[int, bool], float] = {}
        self._sample_times: dict[int, float] = {}
        self._decodes: dict[int, tuple[int, int]] = {}

    def step(self, work: StepWork) -> int:
        """Return the time of a step, in picoseconds, over all stages of the pipeline."""
        prefills = work.prefills
        num_tokens = num_decodes = work.num_decodes
        num_samples = work.num_samples
        if not prefills and num_samples == num_decodes:
            base, per_token = self.decode(num_decodes)
            return base + per_token * work.decode_context
        for _, count in prefills:
            num_tokens += count
        seconds = self._fixed(num_tokens, num_samples, num_decodes + len(prefills), not prefills)
        moving, computing = self._prompt_times(prefills)
        prompts = moving if moving > computing else computing
        seconds += work.decode_context * self._token + prompts
        return round(seconds * SECOND)

    def decode(self, num_decodes: int) -> tuple[int, int]:
        """Return base and price per token of context: see `StepCost`."""
        if num_decodes not in self._decodes:
            seconds = self._fixed(num_decodes, num_decodes, num_decodes, True)
            per_token = self._token
            self._decodes[num_decodes] = round(seconds * SECOND), round(per_token * SECOND)
        return self._decodes[num_decodes]

    def head(self, work: StepWork) -> int:
        """Return what the slowest stage takes longer: see `StepCost`."""
        head = self.head_launches
        head += sum(part.seconds for part in self._sample_parts(work.num_samples))
        stages = self.layout.pipeline_parallel_size
        least, left_over = divmod(self.config.num_layers, stages)
        if left_over:
            # The last stage has `least` layers, and others have one more: see `layer_range`.
            num_tokens = work.num_decodes + sum(count for _, count in work.prefills)
            host = self._host(work.num_decodes + len(work.prefills))
            layers = self.step(work) / SECOND - head - host - self._messages(num_tokens)
            per_layer = layers / self.config.num_layers
            slowest = max(least * per_layer + head, (least + 1) * per_layer)
            head = (stages * slowest - layers - head) / (stages - 1)
        return round(head * SECOND)

    def parts(self, work: StepWork) -> list[Part]:
        """Return the parts of a step: one for each matrix, and others."""
        num_tokens = work.num_decodes + sum(count for _, count in work.prefills)
        *layers, operators = self._token_parts(num_tokens, not work.prefills)
        head, more_operators = self._sample_parts(work.num_samples)
        return [
            *layers,
            head,
            replace(operators, seconds=operators.seconds + more_operators.seconds),
            self._attention(work.decode_context),
            self._prompt_attention(work.prefills),
            Part("host", self._host(work.num_decodes + len(work.prefills)), "host"),
        ]

    def _fixed(
        self, num_tokens: int, num_samples: int, num_requests: int, is_decode: bool
    ) -> float:
        """Return the seconds of a step without attention."""
        if (tokens := self._token_times.get((num_tokens, is_decode))) is None:
            tokens = sum([part.seconds for part in self._token_parts(num_tokens, is_decode)])
            self._token_times[num_tokens, is_decode] = tokens
        if (samples := self._sample_times.get(num_samples)) is None:
            samples = sum([part.seconds for part in self._sample_parts(num_samples)])
            self._sample_times[num_samples] = samples
        return tokens + samples + self._host(num_requests)

    def _host(self, num_requests: int) -> float:
        """Return the seconds for which devices wait for hosts: each stage has its own."""
        stage = self.reach.host_step + self.reach.host_request * num_requests
        return self.layout.pipeline_parallel_size * stage

    def _token_parts(self, num_tokens: int, is_decode: bool) -> list[Part]:
        """Return the parts whose time depends on the number of tokens; the operators last."""
        parts = []
        operators = 0.0
        for product in self._products[:-1]:
            uses: float = num_tokens
            copies = 1.0
            if product.part == "experts":
                uses *= self._uses_per_token
                copies = self._share_of_experts(num_tokens)
            parts.append(product.of(uses, copies))
            operators += uses * product.move
        parts.append(Part("launches", self._launches, "host"))
        parts += self._collectives(num_tokens, is_decode=is_decode)
        return [*parts, Part("operators", operators, "bytes")]

    def _sample_parts(self, num_samples: int) -> tuple[Part, Part]:
        """Return the product with the head, and the operators around it."""
        head = self._products[-1]
        operators = Part("operators", num_samples * head.move, "bytes")
        return head.of(num_samples, copies=1.0 if num_samples else 0.0), operators

    @property
    def _is_spread(self) -> bool:
        return self.layout.expert_ranks > 1

    @property
    def _uses_per_token(self) -> float:
        """Rows that all experts of a rank multiply with, per token of the engine."""
        moe = self.config.moe
        assert moe is not None
        return self.layout.expert_uses(moe.top_k)

    def _share_of_experts(self, num_tokens: int) -> float:
        """Return the share of a rank's experts that is read, if all are equally likely."""
        moe = self.config.moe
        assert moe is not None
        ranks = self.layout.data_parallel_size if self._is_spread else 1
        slots = next(each.copies for each in self.matrices if each.part == "experts")
        share = moe.top_k / (slots * self.layout.expert_ranks)
        return float(1 - (1 - share) ** (num_tokens * ranks))

    def _product(self, matrix: Matrix) -> Product:
        bandwidth = self.machine.bandwidth * self.reach.bandwidth
        peak = self.machine.peak(matrix.bytes_per_weight) * self.reach.products
        num_channels = (matrix.inputs + matrix.outputs) * matrix.layers
        return Product(
            part=matrix.part,
            read=matrix.size * matrix.bytes_per_weight * matrix.copies / bandwidth,
            move=ACTIVATION_BYTES * num_channels / bandwidth,
            compute=2 * matrix.size / peak,
        )

    def _attention(self, context: int) -> Part:
        bound = "bytes" if self._read > self._decode_pair else "FLOPs"
        return Part("attention", context * self._token, bound)

    def _prompt_attention(self, prefills: Sequence[tuple[int, int]]) -> Part:
        moving, computing = self._prompt_times(prefills)
        bound = "bytes" if moving > computing else "FLOPs"
        return Part("prompt attention", max(moving, computing), bound)

    def _prompt_times(self, prefills: Sequence[tuple[int, int]]) -> tuple[float, float]:
        """Return the seconds to read keys and values, and to compute."""
        read = num_pairs = 0
        for start, count in prefills:
            read += start
            num_pairs += count * (2 * start + count + 1) // 2
        return read * self._read, num_pairs * self._prompt_pair

    def _pair(self, channels: int, reach: float) -> float:
        """Return the seconds for the attention of one token to another.

        Args:
            channels: of a key and a value.
            reach: share of the peak that is reached.
        """
        heads = self.config.num_heads // self.layout.tensor_parallel_size
        return 2 * self.config.num_layers * heads * channels / (self.machine.flops["bf16"] * reach)

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
            found.append(Part("stages", self._messages(num_tokens), "link"))
        if num_sparse:
            # FP8 numbers have a scale per 128.
            element = 1 + 4 / 128 if self.model.bytes_per_weight == 1 else ACTIVATION_BYTES
            for name, size in (("dispatch", element), ("combine", ACTIVATION_BYTES)):
                seconds = self._all_to_all(rows / tp * size, is_decode=is_decode)
                found.append(Part(name, num_sparse * seconds, "link"))
        return found

    def _messages(self, num_tokens: int) -> float:
        """Return the seconds for which hidden states are on their way between stages."""
        layout = self.layout
        num_bytes = num_tokens * self.config.hidden_size * ACTIVATION_BYTES
        link = self.machine.pair_link(layout.devices)
        message = link.message(num_bytes / layout.tensor_parallel_size)
        return (layout.pipeline_parallel_size - 1) * message

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


def distinct_nodes(num_groups: int, topk_group: int, top_k: int, nodes: int) -> float:
    """Return the expected number of nodes that have an expert of a token. With groups of experts,
    `topk_group` of them are chosen; without, `top_k` experts."""
    if num_groups % nodes:
        return nodes * (1 - (1 - 1 / nodes) ** top_k)
    elsewhere = num_groups - num_groups // nodes
    return nodes * (1 - math.comb(elsewhere, topk_group) / math.comb(num_groups, topk_group))


def kv_blocks(model: ModelShape, machine: Machine, layout: Layout, engine: EngineConfig) -> int:
    """Return the number of KV blocks of one engine. CUDA graphs are not subtracted.

    Raises:
        UsageError: the model does not fit; the message says by how many GB.
    """
    tp = layout.tensor_parallel_size
    num_tokens, num_requests = largest_step(engine, model.config.max_position_embeddings)
    activations = model.activation_bytes(layout, num_tokens, num_requests)
    weights = model.weight_bytes(layout)
    num_sharing = layout.expert_ranks if model.config.moe else tp
    collectives = machine.collectives_gib if max(tp, num_sharing) > 1 else 0
    size = engine.block_size * model.kv_bytes_per_token(tp) / layout.pipeline_parallel_size
    held = weights + activations + GIB * (machine.reserved_gib + collectives)
    room = machine.memory_gib * GIB * engine.gpu_memory_utilization - held
    if room < size:
        is_large = held + size > machine.memory_gib * GIB * USUAL_UTILIZATION
        remedy = (
            "raise tensor_parallel_size, lower max_num_batched_tokens or max_num_seqs, or choose "
            "a machine with more memory"
            if is_large
            else f"raise gpu_memory_utilization {engine.gpu_memory_utilization:g}"
        )
        raise UsageError(
            f"{model.name} does not fit on {machine.name}: {(size - room) / 1e9:.1f} GB per device "
            f"are missing ({weights / 1e9:.1f} GB of weights, {activations / 1e9:.1f} GB of "
            f"activations); {remedy}"
        )
    return int(room // size)


def largest_step(engine: EngineConfig, positions: int) -> tuple[int, int]:
    """Return the most tokens and the most requests of a step, as an engine runs it at its start to
    measure activations.

    Args:
        positions: of the model.
    """
    longest = min(engine.max_model_len or positions, positions)
    budget = engine.max_num_batched_tokens or DEFAULT_TOKEN_BUDGET
    if not engine.enable_chunked_prefill:
        budget = max(budget, longest)
    num_requests = min(engine.max_num_seqs, budget)
    return min(budget, num_requests * longest), num_requests
