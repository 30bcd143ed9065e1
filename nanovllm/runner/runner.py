"""Turns a schedule into tensors, runs the model, and samples: the only place that knows both.

Built by notebooks/17_model_runner.ipynb and 19, 22, 23, 25, 26, 31, 40, 42: edit it there.
"""

from __future__ import annotations

import contextlib
import math
import pathlib
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, nn

from nanovllm.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    ForwardContext,
    forward_context,
    get_backend,
    kv_cache_shape,
)
from nanovllm.data.config import EngineConfig
from nanovllm.data.parts import MissingPartError, load
from nanovllm.data.schedule import ModelRunnerOutput, SampledToken, SchedulerOutput
from nanovllm.distributed.groups import get_dp_group, get_pp_group, get_tp_group
from nanovllm.distributed.pipeline_parallel import layers_here
from nanovllm.kv.block_pool import InvariantError
from nanovllm.kv.no_connector import NoConnector
from nanovllm.layers.tensor_parallel import num_kv_heads_of_rank
from nanovllm.models.config import ModelConfig
from nanovllm.models.loader import load_model
from nanovllm.ops.device import choose_device, choose_dtype, out_of_memory, zeros
from nanovllm.runner.batch import Batch, RequestRows, StepBuffers, copy_blocks
from nanovllm.runner.device_copies import start_fetch, upload
from nanovllm.runner.prompt_logprobs import start_prompt_logprobs
from nanovllm.runner.sampling import SampleKey, Sampler, SamplingRow

if TYPE_CHECKING:
    from nanovllm.distributed.load_balance import LoadBalancer
    from nanovllm.distributed.stage_link import StageLink
    from nanovllm.kv.connector import KVConnectorWorker
    from nanovllm.models.eagle import EagleModel
    from nanovllm.models.llama import LlamaForCausalLM
    from nanovllm.runner.cuda_graphs import CudaGraph, DecodeGraphs
    from nanovllm.runner.speculative.speculator import Speculator
    from nanovllm.runner.structured_output import StructuredOutputManager


class ModelRunner:
    """The model, the KV caches and the buffers of one device.

    Args:
        config: the engine's settings.
        model_config: the model's shape.
        folder: the checkpoint.

    Raises:
        ValueError: this machine does not support the device, dtype or backend, or the weights do
            not fit in the GPU's memory.
    """

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.folder = folder
        self.device = choose_device(config.device)
        self.dtype = choose_dtype(config.dtype, self.device)
        head_dim = model_config.head_dim
        latent = model_config.kv_lora_rank > 0
        self.backend = get_backend(config.attention_backend, self.device, head_dim, latent)
        if config.kv_cache_dtype != "auto":
            self.backend = load("nanovllm.attention.quantized:create", "kv_cache_dtype")(
                self.backend, config, latent
            )
        self.kv_dtype = self.backend.kv_dtype or self.dtype
        max_positions = config.max_model_len or model_config.max_position_embeddings
        with out_of_memory(
            "the weights", "use --dtype auto (16 bits a weight), a smaller model or --device cpu"
        ):
            self.model = load_model(
                folder,
                model_config,
                self.dtype,
                self.device,
                max_positions=max_positions,
                load_format=config.load_format,
                seed=config.seed,
            )
            self.prepare_model(self.model)
        self.sampler = Sampler()
        self.graphs: DecodeGraphs | None = None  # once they are recorded

    @cached_property
    def connector(self) -> KVConnectorWorker | NoConnector:
        """This rank's half of the KV connector; without KV transfer, one that moves nothing."""
        return NoConnector()

    @cached_property
    def structured_output(self) -> StructuredOutputManager:
        """Computes the tokens that grammars allow; see `StructuredOutputManager.start`."""
        create: type[StructuredOutputManager] = load(
            "nanovllm.runner.structured_output:StructuredOutputManager", "structured_outputs"
        )
        return create(self.config, self.model_config, self.folder)

    @cached_property
    def link(self) -> StageLink | None:
        """The connection to the other stages of the pipeline; None if this rank has all layers."""
        if get_pp_group().world_size == 1:
            return None
        create: type[StageLink] = load(
            "nanovllm.distributed.stage_link:StageLink", "pipeline_parallel_size"
        )
        return create(self.model_config.hidden_size, self.dtype, self.device)

    @cached_property
    def balancer(self) -> LoadBalancer | None:
        """Moves experts between ranks (lecture 24); None without `enable_eplb`."""
        if not self.config.enable_eplb:
            return None
        create: Callable[[nn.Module, str], LoadBalancer] = load(
            "nanovllm.models.moe:load_balancer", "enable_eplb"
        )
        return create(self.model, self.config.eplb_config or "{}")

    @cached_property
    def make_graph(self) -> Callable[[], CudaGraph] | None:
        """Makes an empty CUDA graph; None without CUDA graphs. See `graph_maker`."""
        # Expert parallelism needs the number of tokens per rank on the host, in the middle of a
        # step. A graph cannot wait for the host.
        moe = self.model_config.moe
        eager = self.config.enforce_eager or (moe is not None and moe.enable_expert_parallel)
        return graph_maker(self.device, self.backend, eager)

    @cached_property
    def speculator(self) -> Speculator | None:
        """Verifies drafts, and makes them; None without `config.speculative`."""
        if self.config.speculative is None:
            return None
        create: type[Speculator] = load(
            "nanovllm.runner.speculative.speculator:Speculator", "speculative_config"
        )
        return create(self)

    def prepare_model(self, model: LlamaForCausalLM | EagleModel) -> None:
        """Pack the weights, and fuse all layers into one call if the compiled operators are
        there."""
        model.pack_weights()
        if not self.config.enforce_eager:
            with contextlib.suppress(MissingPartError):
                load("nanovllm.models.fused:fuse_layers", "compiled operators")(model)

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Make the KV caches, the buffers and the CUDA graphs, once `config.max_request_tokens` is
        known.

        Raises:
            ValueError: the GPU does not have enough memory.
        """
        config = self.config
        moves_kv = self.config.kv_transfer is not None
        with out_of_memory(
            "the KV cache", "lower num_kv_blocks, kv_cache_memory or gpu_memory_utilization"
        ):
            make_cache = zeros
            if moves_kv:
                make_cache = load("nanovllm.kv_transfer.factory:cache_maker", "KV transfer")(config)
            self.kv_caches = self._make_caches(num_blocks, self.device, make_cache)
            self.host_caches = self._make_caches(num_host_blocks, torch.device("cpu"))
            max_blocks = -(-config.max_request_tokens // config.block_size)
            self.rows = RequestRows(config.max_num_seqs, config.max_request_tokens, max_blocks)
            self.buffers = StepBuffers(config, config.token_budget, max_blocks, self.device)
            if self.device.type != "cpu" and self.backend.compiles_kernels:
                load("nanovllm.runner.cuda_graphs:warm_up", "Triton")(self)
            if self.make_graph is not None:
                self.graphs = load("nanovllm.runner.cuda_graphs:capture_graphs", "CUDA graphs")(
                    self
                )
        if moves_kv:
            create = load("nanovllm.kv_transfer.factory:create_worker_connector", "KV transfer")
            caches = dict(zip(self.layers, self.kv_caches, strict=False))
            self.connector = create(config, self.model_config, caches, self.model, self.backend)

    def _make_caches(
        self, num_blocks: int, device: torch.device, make_cache: Callable[..., Tensor] = zeros
    ) -> list[Tensor]:
        """Return one cache per layer of this rank and of its draft model; none if `num_blocks` is
        0."""
        return [
            make_cache(shape, self.kv_dtype, device)
            for shape in self._cache_shapes(num_blocks)
            if num_blocks
        ]

    @property
    def layers(self) -> range:
        """The numbers of this rank's layers in the model."""
        return layers_here(self.model_config.num_layers)

    def _cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return the shape of one layer's KV cache, with this rank's KV heads only."""
        model = self.model_config
        if model.kv_lora_rank:
            shape: Callable[[int, int, int], tuple[int, ...]] = load(
                "nanovllm.attention.latent:latent_cache_shape",
                f"{model.architecture} (latent attention)",
            )
            return shape(num_blocks, self.config.block_size, model.latent_width)
        heads = num_kv_heads_of_rank(model.num_kv_heads, get_tp_group().world_size)
        width = model.head_dim
        return kv_cache_shape(
            num_blocks, heads, self.config.block_size, width + self.backend.scale_bytes
        )

    def _cache_shapes(self, num_blocks: int) -> list[tuple[int, ...]]:
        drafter = self.speculator.cache_shapes(num_blocks) if self.speculator is not None else []
        return [self._cache_shape(num_blocks)] * len(self.layers) + drafter

    @property
    def bytes_per_block(self) -> int:
        """Device memory per KV block, over all layers of this rank."""
        return sum(math.prod(shape) for shape in self._cache_shapes(1)) * self.kv_dtype.itemsize

    def prepare_inputs(self, schedule: SchedulerOutput) -> Batch:
        """Pack the step's tokens, one request after another, into the persistent buffers."""
        rows = np.array(
            [self.rows.update(scheduled) for scheduled in schedule.requests], dtype=np.int64
        )
        starts = np.array([scheduled.start for scheduled in schedule.requests], dtype=np.int64)
        counts = np.array([scheduled.num_tokens for scheduled in schedule.requests], dtype=np.int64)
        ends = np.cumsum(counts)
        num_tokens = int(counts.sum())
        # For each token: its request's row, and its position there.
        token_rows = np.repeat(rows, counts)
        positions = np.arange(num_tokens) + np.repeat(starts - (ends - counts), counts)
        size = self.config.block_size
        blocks = self.rows.block_tables[token_rows, positions // size]
        max_seq_len = int((starts + counts).max(initial=1))
        width = -(-max_seq_len // size)

        due, lasts = self.rows.due(schedule, starts + counts == self.rows.num_tokens[rows], ends)
        seq_rows, seq_counts = self._sequences(rows, counts)
        num_seqs = len(seq_rows)
        seq_ends = np.cumsum(seq_counts)
        pending = np.flatnonzero([scheduled.last_is_pending for scheduled in schedule.requests])

        buffers = self.buffers
        buffers.wait()
        buffers.input_ids.array[:num_tokens] = self.rows.token_ids[token_rows, positions]
        buffers.positions.array[:num_tokens] = positions
        buffers.slot_mapping.array[:num_tokens] = blocks.astype(np.int64) * size + positions % size
        buffers.query_start_loc.array[1 : num_seqs + 1] = seq_ends
        buffers.seq_lens.array[:num_seqs] = positions[seq_ends - 1] + 1
        buffers.block_tables.array[:num_seqs, :width] = self.rows.block_tables[seq_rows, :width]
        buffers.picks.array[:2, : len(due)] = lasts, rows[due]
        buffers.picks.array[2:, : len(pending)] = ends[pending] - 1, rows[pending]
        if padded := self._padded_size(seq_counts):
            buffers.pad(num_seqs, padded)
            num_seqs = num_tokens = padded
        inputs = buffers.inputs(
            num_seqs, num_tokens, int(seq_counts.max(initial=1)), max_seq_len, upload=True
        )
        last_rows, due_rows = buffers.upload_picks(len(due), len(pending))
        return Batch(
            rows=rows,
            num_scheduled=counts,
            due=due,
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            metadata=inputs.metadata,
            last_rows=last_rows,
            due_rows=due_rows,
        )

    def _sequences(self, rows: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return row and number of tokens of each sequence, as attention sees them.

        A request is one sequence. But if all requests decode, with or without drafts, and a CUDA
        graph can compute the step, each token is a sequence of one: a graph has one token per
        sequence, and a draft sees the drafts before it in the cache."""
        most = 1  # token of a request that decodes, and its drafts
        if self.config.speculative is not None:
            most += self.config.speculative.num_speculative_tokens or 0
        if (
            self.graphs is None
            or counts.max(initial=0) > most
            or counts.sum() > self.graphs.sizes[-1]
        ):
            return rows, counts
        return rows.repeat(counts), np.ones(counts.sum(), dtype=np.int64)

    def _padded_size(self, counts: np.ndarray) -> int:
        """Return the number of one-token sequences to pad this step to; 0 for no padding.

        1                               no requests: one token, for its peers' collectives
        graphs.size_for(sequences)      all sequences have one token, and there are CUDA graphs
        0                               otherwise
        """
        if self.graphs is not None and counts.max(initial=0) == 1:
            return self.graphs.size_for(len(counts))
        return int(len(counts) == 0)

    def execute_model(self, schedule: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step, and wait for its result; see `launch`."""
        return self.launch(schedule)()

    @torch.inference_mode()
    def launch(self, schedule: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Start one step: copy swapped blocks, build the batch, run the model, sample.

        The next step may be launched before this one has ended, with tokens that only the device
        knows (`last_is_pending`). The host waits for the GPU to copy swapped blocks. With the
        attention backend "torch", it also waits for lengths. Otherwise it does not wait.

        Returns:
            A function that waits for the result. On all pipeline stages but the last, the result
            is empty.

        Raises:
            InvariantError: nothing is scheduled, or the schedule does not match the state that
                earlier ones have left.
        """
        if schedule.connector_metadata is None:
            return self._launch(schedule)
        assert not isinstance(self.connector, NoConnector)
        with self.connector.transfers(schedule.connector_metadata, schedule.empty) as output:
            wait = self._launch(schedule) if not schedule.empty else ModelRunnerOutput
        return lambda: replace(wait(), connector_output=output)

    def _launch(self, schedule: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        if schedule.empty and get_dp_group().world_size == 1:
            raise InvariantError("a schedule without requests must not be run")
        copy_blocks(schedule.swap_out, self.kv_caches, self.host_caches)
        copy_blocks(schedule.swap_in, self.host_caches, self.kv_caches)
        for request_id in schedule.removed_ids:
            self.rows.remove(request_id)
        batch = self.prepare_inputs(schedule)
        rows = self._sampling_rows(schedule, batch)
        has_grammar = any(row.params.structured_outputs is not None for row in rows.values())
        mask: Callable[[Tensor], dict[SampleKey, str]] = lambda logits: {}  # noqa: E731
        if has_grammar:
            mask = self.structured_output.start(rows, self.rows.matchers)
        hidden = self._forward(batch)
        if self.balancer is not None:
            self.balancer.after_step(was_dummy=schedule.empty)
        if hidden is None:
            return ModelRunnerOutput
        sampled = self._sample(batch, hidden, rows, mask)
        if self.speculator is not None:
            output = self.speculator.finish(schedule, batch, hidden, sampled)
        else:
            by_request = cast("Callable[[], dict[str, SampledToken]]", sampled)  # no drafts
            output = lambda: ModelRunnerOutput(  # noqa: E731
                {name: [token] for name, token in by_request().items()}
            )
        prompt_logprobs = start_prompt_logprobs(
            self.rows, schedule, batch, hidden, self.model.compute_logits
        )
        anyone_unfinished = self.any_unfinished(schedule)
        return lambda: replace(
            output(), prompt_logprobs=prompt_logprobs(), anyone_unfinished=anyone_unfinished()
        )

    def _forward(self, batch: Batch) -> Tensor | None:
        """Run the model; returns hidden states `[num_tokens, hidden_size]`, valid until the next
        call, or None on all pipeline stages but the last."""
        received = None
        if self.link is not None:
            received = self.link.receive(int(batch.num_scheduled.sum()) or 1)
        if self.graphs is not None and len(batch.rows) and batch.metadata.max_query_len == 1:
            out = self.graphs.replay(batch, received)
            self.connector.save_kv_layers()
        else:
            out = self._run_model(batch.input_ids, batch.positions, batch.metadata, received)
        if self.link is None or get_pp_group().is_last:
            return out
        self.link.send(out)
        return None

    def _run_model(
        self,
        input_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        received: Tensor | None,
    ) -> Tensor:
        """Run the layers of this rank; returns hidden states, or the input of the next pipeline
        stage."""
        # The caches of a draft model come last; `zip` ends before them.
        caches = dict(zip(self.layers, self.kv_caches, strict=False))
        # The model calls the connector after each layer.
        connector = None if isinstance(self.connector, NoConnector) else self.connector
        with forward_context(ForwardContext(self.backend, caches, metadata, connector)):
            hidden: Tensor = self.model(input_ids, positions, received)
            return hidden

    def blank(self, num_tokens: int) -> Tensor | None:
        """Return a substitute for received hidden states, for steps that a stage runs alone: to
        measure memory, or to record graphs."""
        return None if get_pp_group().is_first else self.blank_output(num_tokens)

    def blank_output(self, num_tokens: int) -> Tensor:
        """Return a buffer for this stage's output."""
        return torch.zeros(
            num_tokens, self.model_config.hidden_size, dtype=self.dtype, device=self.device
        )

    def _sampling_rows(
        self, schedule: SchedulerOutput, batch: Batch
    ) -> dict[SampleKey, SamplingRow]:
        """Return the sampler's input for each token that this step samples; empty on all pipeline
        stages but the last. The key is the request id, or (request id, number of drafts before the
        token)."""
        rows: dict[SampleKey, SamplingRow] = {}
        eos_token_ids = self.model_config.eos_token_ids
        row_of = self.rows.row_of
        for i in dict.fromkeys(batch.due.tolist()) if get_pp_group().is_last else ():
            name = schedule.requests[i].request_id
            num_drafts = len(schedule.requests[i].extra_token_ids)
            for place in range(num_drafts + 1):
                key = (name, place) if place else name
                rows[key] = self.rows.sampling_row(
                    name, row_of[name], eos_token_ids, num_drafts - place
                )
        if self.speculator is not None:
            self.speculator.mark(rows, schedule)
        return rows

    def _sample(
        self,
        batch: Batch,
        hidden: Tensor,
        rows: dict[SampleKey, SamplingRow],
        mask: Callable[[Tensor], dict[SampleKey, str]],
    ) -> Callable[[], dict[SampleKey, SampledToken]]:
        """Sample a token for each request that is due. Compute logits for these positions only."""
        if not rows:
            return dict
        logits = self.model.compute_logits(
            hidden[batch.last_rows] if len(rows) < len(hidden) else hidden
        )
        errors = mask(logits)
        tokens, arrive = self.sampler.start(logits, list(rows.values()))
        self.buffers.newest.index_copy_(0, batch.due_rows, tokens)
        return lambda: {
            name: SampledToken(token_id, logprobs, errors.get(name, ""))
            for name, token_id, logprobs in zip(rows, *arrive(), strict=True)
        }

    def any_unfinished(self, schedule: SchedulerOutput) -> Callable[[], bool]:
        """Find out whether any engine in lock-step has unfinished requests. All engines get the
        same answer for the same step.

        In a group of one, the answer is `schedule.unfinished`, without any collective. Otherwise,
        without waiting: upload `[schedule.unfinished]` as float32 (`upload`), all-reduce it, and
        start to fetch the sum (`start_fetch`, whose result waits and returns `[[sum]]`). The answer
        is whether the sum is above 0.

        Returns:
            A function that waits for the answer.
        """
        group = get_dp_group()
        if group.world_size == 1:
            return lambda: schedule.unfinished
        arrive = start_fetch(
            group.all_reduce(upload([schedule.unfinished], torch.float32, self.device))
        )
        return lambda: arrive() != [[0.0]]

    def forget_requests(self) -> None:
        """Drop the state of all requests after a failed step, and stop all KV transfers."""
        for request_id in list(self.rows.row_of):
            self.rows.remove(request_id)
        self.connector.forget_requests()


def graph_maker(
    device: torch.device, backend: AttentionBackend, enforce_eager: bool
) -> Callable[[], CudaGraph] | None:
    """Return a function that makes an empty CUDA graph; None if each step launches its kernels
    separately."""
    if device.type != "cuda" or enforce_eager or not backend.supports_graphs:
        return None
    return partial(
        load("nanovllm.runner.cuda_graphs:CudaGraph", "CUDA graphs"), torch.cuda.Stream(device)
    )
