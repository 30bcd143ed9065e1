"""Turns a schedule into tensors, runs the model, and samples: the only place that knows both.

Built by notebooks/17_model_runner.ipynb: edit it there, then run `python -m nanovllm.course build`.
"""

from __future__ import annotations

import logging
import pathlib
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import psutil
import torch
from torch import Tensor

from nanovllm.attention.base import (
    AttentionMetadata,
    ForwardContext,
    forward_context,
    get_backend,
    kv_cache_shape,
)
from nanovllm.batch import Batch, RequestRows, StepBuffer
from nanovllm.config import EngineConfig, parse_bytes
from nanovllm.cuda_graphs import DecodeGraphs, graph_maker, ladder
from nanovllm.device import MemoryProfile, choose_device, choose_dtype, out_of_memory, zeros
from nanovllm.kv.block_pool import InvariantError
from nanovllm.kv.manager import BlockCopies
from nanovllm.models.config import ModelConfig
from nanovllm.models.loader import load_model
from nanovllm.request import TokenLogprobs
from nanovllm.sampling import Sampler, SamplingRow, start_logprobs, upload
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import SampledToken, Schedule, StepResult

# Rows of prompt log-probabilities that are computed at a time: a row of logits is as long as the vocabulary.
LOGPROB_ROWS = 256

logger = logging.getLogger(__name__)


class ModelRunner:
    """Model, KV caches and buffers of one device.

    Args:
        config: the engine's settings.
        model_config: the model's shape.
        folder: the checkpoint.

    Raises:
        ValueError: a device, dtype or backend that cannot be had, or weights that do not fit into the GPU.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path) -> None:
        self.config = config
        self.model_config = model_config
        self.device = choose_device(config.device)
        self.dtype = choose_dtype(config.dtype, self.device)
        self.backend = get_backend(config.attention_backend, self.device, model_config.head_dim, self.dtype)
        max_positions = config.max_model_len or model_config.max_position_embeddings
        with out_of_memory(
            "the weights", "use --dtype auto (16 bits a weight), a smaller model or --device cpu"
        ):
            self.model = load_model(
                folder, model_config, self.dtype, self.device, max_positions, config.load_format, config.seed
            )
            self.model.pack_weights()
        self.sampler = Sampler()
        self.kv_caches: list[Tensor] = []
        self.host_caches: list[Tensor] = []
        self.make_graph = graph_maker(self.device, self.backend, config.enforce_eager)

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Make the KV caches, the buffers and the CUDA graphs; `config.max_request_tokens` is known now.

        Raises:
            ValueError: the GPU has not enough memory.
        """
        config = self.config
        with out_of_memory("the KV cache", "lower num_kv_blocks, kv_cache_memory or gpu_memory_utilization"):
            self.kv_caches = self._make_caches(num_blocks, self.device)
            self.host_caches = self._make_caches(num_host_blocks, torch.device("cpu"))
            max_blocks = -(-config.max_request_tokens // config.block_size)
            self.rows = RequestRows(config.max_num_seqs, config.max_request_tokens, max_blocks)
            self._make_buffers(config.token_budget, max_blocks)
            if self.device.type != "cpu" and hasattr(self.backend, "step_kinds"):
                self._warm_up()
            self.graphs = None
            if self.make_graph is not None:
                self.graphs = self._capture_graphs()

    def _make_caches(self, num_blocks: int, device: torch.device) -> list[Tensor]:
        """One tensor a layer; none for no blocks."""
        model = self.model_config
        shape = kv_cache_shape(num_blocks, model.num_kv_heads, self.config.block_size, model.head_dim)
        return [zeros(shape, self.dtype, device) for _ in range(model.num_layers if num_blocks else 0)]

    def _make_buffers(self, tokens: int, max_blocks: int) -> None:
        """For steps of up to `tokens` tokens, and block tables of up to `max_blocks` blocks."""
        seqs = self.config.max_num_seqs
        self._input_ids = StepBuffer((tokens,), torch.int64, self.device)
        self._positions = StepBuffer((tokens,), torch.int64, self.device)
        self._slot_mapping = StepBuffer((tokens,), torch.int64, self.device)
        self._query_start_loc = StepBuffer((seqs + 1,), torch.int32, self.device)
        self._seq_lens = StepBuffer((seqs,), torch.int32, self.device)
        self._block_tables = StepBuffer((seqs, max_blocks), torch.int32, self.device)
        self._last_rows = StepBuffer((seqs,), torch.int64, self.device)
        # The newest token of each request's row, as sampled: it may be needed before it has come to the host.
        self._newest = torch.zeros(seqs, dtype=torch.int64, device=self.device)
        self._due_rows = StepBuffer((seqs,), torch.int64, self.device)
        self._pending = StepBuffer((2, seqs), torch.int64, self.device)
        # Marks the end of a step's uploads, on a GPU.
        self._uploaded = torch.cuda.Event() if self.device.type == "cuda" else None

    def build_batch(self, schedule: Schedule) -> Batch:
        """Pack the step's tokens one request after another, into buffers that are always the same ones."""
        rows = np.array([self.rows.update(scheduled) for scheduled in schedule.requests])
        starts = np.array([scheduled.start for scheduled in schedule.requests])
        counts = np.array([scheduled.num_tokens for scheduled in schedule.requests])
        ends = np.cumsum(counts)
        num_seqs, num_tokens = len(rows), int(ends[-1])
        # For each token: its request's row, and its position there.
        token_rows = np.repeat(rows, counts)
        positions = np.arange(num_tokens) + np.repeat(starts - (ends - counts), counts)
        size = self.config.block_size
        blocks = self.rows.block_tables[token_rows, positions // size]
        seq_lens = starts + counts
        max_seq_len = int(seq_lens.max())
        width = -(-max_seq_len // size)

        due = np.flatnonzero(seq_lens == self.rows.num_tokens[rows])
        graph_size = 0
        if self.graphs is not None and num_tokens == num_seqs:  # one token of each
            graph_size = self.graphs.size_for(num_seqs)

        if self._uploaded is not None:
            self._uploaded.synchronize()  # the GPU may not have fetched the last step's numbers yet
        self._input_ids.array[:num_tokens] = self.rows.token_ids[token_rows, positions]
        self._positions.array[:num_tokens] = positions
        self._slot_mapping.array[:num_tokens] = blocks.astype(np.int64) * size + positions % size
        self._query_start_loc.array[1 : num_seqs + 1] = ends
        self._seq_lens.array[:num_seqs] = seq_lens
        self._block_tables.array[:num_seqs, :width] = self.rows.block_tables[rows, :width]
        self._last_rows.array[: len(due)] = ends[due] - 1
        self._due_rows.array[: len(due)] = rows[due]
        pending = np.flatnonzero([scheduled.last_is_pending for scheduled in schedule.requests])
        self._pending.array[0, : len(pending)] = ends[pending] - 1
        self._pending.array[1, : len(pending)] = rows[pending]
        if graph_size:
            self._pad(num_seqs, graph_size)
            num_seqs = num_tokens = graph_size
        self._upload(num_seqs, num_tokens)
        last_rows, due_rows = self._last_rows.upload(len(due)), self._due_rows.upload(len(due))
        if len(pending):
            places, sources = self._pending.upload(2)[:, : len(pending)]
            self._input_ids.device.index_copy_(0, places, self._newest.index_select(0, sources))
        if self._uploaded is not None:
            self._uploaded.record()
        inputs = self._inputs(num_seqs, num_tokens, int(counts.max()), max_seq_len)
        return Batch(rows, counts, due, *inputs, last_rows, due_rows, graph_size)

    def _upload(self, num_seqs: int, num_tokens: int) -> None:
        for buffer in (self._input_ids, self._positions, self._slot_mapping):
            buffer.upload(num_tokens)
        for buffer in (self._seq_lens, self._block_tables):
            buffer.upload(num_seqs)
        self._query_start_loc.upload(num_seqs + 1)

    def _inputs(
        self, num_seqs: int, num_tokens: int, max_query_len: int, max_seq_len: int
    ) -> tuple[Tensor, Tensor, AttentionMetadata]:
        """Token ids, positions and metadata of a step: views of the device's buffers, as they are at this moment."""
        metadata = AttentionMetadata(
            query_start_loc=self._query_start_loc.device[: num_seqs + 1],
            seq_lens=self._seq_lens.device[:num_seqs],
            block_tables=self._block_tables.device[:num_seqs],
            slot_mapping=self._slot_mapping.device[:num_tokens],
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )
        return self._input_ids.device[:num_tokens], self._positions.device[:num_tokens], metadata

    # ---------------------------------------------------------------- one step

    def execute(self, schedule: Schedule) -> StepResult:
        """Run one step, and wait for what it samples; see `launch`."""
        return self.launch(schedule)()

    @torch.inference_mode()
    def launch(self, schedule: Schedule) -> Callable[[], StepResult]:
        """Start one step: move blocks, build the batch, run the model, sample. The next step may be launched before this
        one has ended, with tokens that only the device knows (`last_is_pending`). Nothing waits for a GPU, but for
        blocks that are swapped and for an attention backend that reads lengths on the host ("torch").

        Returns:
            A function that waits for the results.

        Raises:
            InvariantError: nothing is scheduled, or the schedule does not follow from those before it.
        """
        if schedule.empty:
            raise InvariantError("a schedule without requests is not to be run")
        self._copy_blocks(schedule.swap_out, self.kv_caches, self.host_caches)
        self._copy_blocks(schedule.swap_in, self.host_caches, self.kv_caches)
        for request_id in schedule.removed_ids:
            self.rows.remove(request_id)
        batch = self.build_batch(schedule)
        hidden = self._forward(batch)
        sampled = self._sample(schedule, batch, hidden)
        prompt_logprobs = self._prompt_logprobs(schedule, batch, hidden)
        return lambda: StepResult(sampled(), prompt_logprobs())

    def _forward(self, batch: Batch) -> Tensor:
        """Hidden states of the batch, `[num_tokens, hidden_size]`, until the next call."""
        if batch.graph_size:
            assert self.graphs is not None
            self.graphs.replay(batch.graph_size)
            return self._hidden[: len(batch.rows)]
        with forward_context(ForwardContext(self.backend, self.kv_caches, batch.metadata)):
            return self.model(batch.input_ids, batch.positions)

    def _sample(
        self, schedule: Schedule, batch: Batch, hidden: Tensor
    ) -> Callable[[], dict[str, SampledToken]]:
        """Requests that are due get a new token; only their last row becomes logits."""
        if not len(batch.due):
            return dict
        due = [(schedule.requests[i].request_id, int(batch.rows[i])) for i in batch.due]
        logits = self.model.compute_logits(hidden[batch.last_rows] if len(due) < len(hidden) else hidden)
        tokens, arrive = self.sampler.start(logits, [self._sampling_row(*pair) for pair in due])
        self._newest.index_copy_(0, batch.due_rows, tokens)

        def wait() -> dict[str, SampledToken]:
            return {
                request_id: SampledToken(token_id, entry)
                for (request_id, _), token_id, entry in zip(due, *arrive(), strict=True)
            }

        return wait

    def _sampling_row(self, request_id: str, row: int) -> SamplingRow:
        params = self.rows.params[request_id]
        stop_ids = (
            params.stop_token_ids
            if params.ignore_eos
            else params.stop_token_ids + self.model_config.eos_token_ids
        )
        tokens = self.rows.token_ids[row, : self.rows.num_tokens[row]]
        return SamplingRow(params, tokens, int(self.rows.num_prompt_tokens[row]), stop_ids)

    @staticmethod
    def _copy_blocks(copies: BlockCopies, source: list[Tensor], target: list[Tensor]) -> None:
        if not copies:
            return
        from_blocks, to_blocks = (
            torch.tensor(ids, pin_memory=caches[0].is_cuda).to(caches[0].device, non_blocking=True)
            for ids, caches in zip(zip(*copies, strict=True), (source, target), strict=True)
        )
        for source_cache, target_cache in zip(source, target, strict=True):
            target_cache[to_blocks] = source_cache[from_blocks].to(target_cache.device)

    def _prompt_logprobs(
        self, schedule: Schedule, batch: Batch, hidden: Tensor
    ) -> Callable[[], dict[str, list[TokenLogprobs]]]:
        """Log-probability of each prompt token given those before it, for the part of the prompt in this step."""
        first = 0
        arrivals: dict[str, list[Callable[[], list[TokenLogprobs]]]] = {}
        for scheduled, row in zip(schedule.requests, batch.rows, strict=True):
            count = self.rows.params[scheduled.request_id].prompt_logprobs
            # The hidden state at position p predicts position p + 1, which must still be of the prompt.
            last = min(scheduled.start + scheduled.num_tokens, int(self.rows.num_prompt_tokens[row]) - 1)
            if count is not None and last > scheduled.start:
                targets = self.rows.token_ids[row, scheduled.start + 1 : last + 1]
                parts = arrivals[scheduled.request_id] = []
                for i in range(0, len(targets), LOGPROB_ROWS):
                    part = upload(targets[i : i + LOGPROB_ROWS], torch.int64, self.device)
                    logits = self.model.compute_logits(hidden[first + i : first + i + len(part)])
                    parts.append(start_logprobs(logits, part, [count] * len(part)))
            first += scheduled.num_tokens
        return lambda: {
            request_id: [entry for arrive in parts for entry in arrive()]
            for request_id, parts in arrivals.items()
        }

    # ---------------------------------------------------------------- CUDA graphs

    def _pad(self, first: int, end: int) -> None:
        """Let the rows `first : end` be sequences of one token, which is written nowhere and sees nothing."""
        self._input_ids.array[first:end] = 0
        self._positions.array[first:end] = 0
        self._slot_mapping.array[first:end] = -1
        self._query_start_loc.array[first : end + 1] = np.arange(first, end + 1)
        self._seq_lens.array[first:end] = 0

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Have every kernel compiled before somebody waits for it: a step of each kind that the backend names, of
        padding only."""
        most, start = min(self.config.max_num_seqs, self.config.token_budget), time.perf_counter()
        kinds = self.backend.step_kinds(  # type: ignore[attr-defined]
            self.model_config.num_heads, self.kv_caches[0], most, self.config.token_budget
        )
        self._pad(0, most)
        self._upload(most, most)
        for num_seqs, max_query_len, max_seq_len in kinds:
            input_ids, positions, metadata = self._inputs(num_seqs, num_seqs, max_query_len, max_seq_len)
            with forward_context(ForwardContext(self.backend, self.kv_caches, metadata)):
                self.model(input_ids, positions)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the first batch will overwrite what is being uploaded
        logger.info("warmed up with %d kinds of steps in %.1f s", len(kinds), time.perf_counter() - start)

    def _decode(self, size: int) -> Tensor:
        """Hidden states of the `size` requests in the buffers, one token each: what a graph records. So it makes
        everything of buffers that never move, and knows no length."""
        input_ids, positions, metadata = self._inputs(size, size, 1, self.config.max_request_tokens)
        with forward_context(ForwardContext(self.backend, self.kv_caches, metadata)):
            return self._hidden[:size].copy_(self.model(input_ids, positions))

    def _graph_sizes(self) -> list[int]:
        return ladder(min(self.config.max_num_seqs, self.config.token_budget))

    def _empty_graphs(self) -> DecodeGraphs:
        """No graph yet, and buffers full of padding to record with."""
        assert self.make_graph is not None
        most = self._graph_sizes()[-1]
        shape = (most, self.model_config.hidden_size)
        self._hidden = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self._pad(0, most)
        self._upload(most, most)
        return DecodeGraphs(self.make_graph)

    @torch.inference_mode()
    def _capture_graphs(self) -> DecodeGraphs:
        graphs, start = self._empty_graphs(), time.perf_counter()
        for size in reversed(self._graph_sizes()):
            graphs.capture(size, self._decode)
        seconds, most = time.perf_counter() - start, graphs.sizes[-1]
        logger.info("%d CUDA graphs, for up to %d requests, in %.1f s", len(graphs.sizes), most, seconds)
        return graphs

    # ---------------------------------------------------------------- memory

    @property
    def bytes_per_block(self) -> int:
        """Device memory that one KV block takes, over all layers."""
        return self.model_config.kv_elements_per_token * self.config.block_size * self.dtype.itemsize

    def num_blocks_that_fit(self) -> int:
        """Blocks for the KV pool: as told, or by `kv_cache_memory`, or a sane part of what is free.

        Raises:
            ValueError: not one block fits.
        """
        config, size = self.config, self.bytes_per_block
        if config.num_kv_blocks is not None:
            return config.num_kv_blocks
        if config.kv_cache_memory is not None:
            budget = parse_bytes(config.kv_cache_memory, "kv_cache_memory")
            count = budget // size
        else:
            budget = self._free_memory()
            # Nobody asked for memory beyond what all running requests fill at their longest.
            longest = -(-self._longest_request() // config.block_size)
            count = min(budget // size, config.max_num_seqs * longest)
        if count < 1:
            raise ValueError(
                f"no KV block of {size} bytes fits into {max(0, budget)} bytes: "
                f"raise kv_cache_memory or gpu_memory_utilization, or lower block_size"
            )
        return count

    def _longest_request(self) -> int:
        positions = self.model_config.max_position_embeddings
        return min(self.config.max_model_len or positions, positions)

    def _free_memory(self) -> int:
        """Bytes that the KV pool may take if nobody says how many, once the weights are loaded."""
        if self.device.type != "cuda":
            return min(psutil.virtual_memory().available // 4, 4 * 2**30)
        with out_of_memory("the largest step", "lower max_num_batched_tokens or max_num_seqs"):
            profile = self._profile_memory()
        share = self.config.gpu_memory_utilization
        left = profile.left(share)
        logger.info(
            "GPU memory: %.2f GiB, of which %.0f %% may be used: %s; that leaves %.2f GiB for the KV pool",
            profile.total / 2**30, 100 * share, profile, left / 2**30,
        )  # fmt: skip
        return left

    def _profile_memory(self) -> MemoryProfile:
        """Run the largest step that there can be, record two graphs, and see what that takes."""
        torch.cuda.empty_cache()
        weights = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self._run_largest_step()
        # What stays allocated (buffers, workspaces of libraries) is in use from now on.
        activations = torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)
        free, total = self._free_and_total()
        graphs = self._graph_memory() if self.make_graph is not None else 0
        return MemoryProfile(total, total - free, weights, activations, graphs)

    def _free_and_total(self) -> tuple[int, int]:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)

    @torch.inference_mode()
    def _run_largest_step(self) -> None:
        """As many tokens as a step may have, of as many requests as there may be, every one of which samples. All read
        one block of zeros, and write nothing."""
        config, longest = self.config, self._longest_request()
        budget = config.token_budget if config.enable_chunked_prefill else max(config.token_budget, longest)
        num_seqs = min(config.max_num_seqs, budget)
        counts = np.full(num_seqs, min(budget // num_seqs, longest))
        # The rest of the budget goes to the first request, which has the longest prompt then.
        counts[0] = min(longest, counts[0] + budget % num_seqs)
        num_tokens, most = int(counts.sum()), int(counts.max())
        self.kv_caches = self._make_caches(1, self.device)
        self._make_buffers(budget, -(-longest // config.block_size))
        self._slot_mapping.array[:] = -1
        self._query_start_loc.array[1 : num_seqs + 1] = np.cumsum(counts)
        self._seq_lens.array[:num_seqs] = counts
        self._upload(num_seqs, num_tokens)
        input_ids, positions, metadata = self._inputs(num_seqs, num_tokens, most, most)
        with forward_context(ForwardContext(self.backend, self.kv_caches, metadata)):
            hidden = self.model(input_ids, positions)
        params = SamplingParams(temperature=1, top_p=0.9, logprobs=1)
        row = SamplingRow(params, np.zeros(1, dtype=np.int32), 1)
        self.sampler.sample(self.model.compute_logits(hidden[:num_seqs]), [row] * num_seqs)

    @torch.inference_mode()
    def _graph_memory(self) -> int:
        """Bytes that the ladder of graphs will take: the largest with the memory that all share, and as much for each of
        the others as the second."""
        sizes = self._graph_sizes()
        free = [self._free_and_total()[0]]
        graphs = self._empty_graphs()
        largest_two = sizes[:-3:-1]
        self._decode(largest_two[-1])  # what it compiles and loads is not to be counted as a graph's
        for size in largest_two:
            graphs.capture(size, self._decode)
            free.append(self._free_and_total()[0])
        largest, *others = (before - after for before, after in pairwise(free))
        return largest + sum(others) * (len(sizes) - 1)
