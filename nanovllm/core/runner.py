"""Turns a schedule into tensors, runs the model, and samples: the only place that knows both.

Built by notebooks/17_model_runner.ipynb: edit it there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm.core.batch import Batch, ModelInputs, StepBuffers, spread
from nanovllm.core.block_copies import copy_blocks
from nanovllm.core.forward import Forward
from nanovllm.core.prompt_logprobs import start_prompt_logprobs
from nanovllm.core.rows_ahead import RowsAhead
from nanovllm.core.runner_hooks import LaunchedStep, RunnerHookCalls, RunnerHooks, Wait
from nanovllm.core.sampling import Sampler, SamplingRow
from nanovllm.core.schedule import ModelRunnerOutput, SampledToken, SchedulerOutput
from nanovllm.ops.device import out_of_memory, zeros

if TYPE_CHECKING:
    from nanovllm.models.llama import LlamaForCausalLM


@dataclass(frozen=True)
class RunnerSettings:
    """The sizes of a runner's caches and buffers.

    Attributes:
        max_num_seqs: the most running requests.
        max_request_tokens, max_blocks: the most tokens and the most KV blocks of a request.
        token_budget: the most tokens of a step.
        max_num_samples: the most tokens that a step samples.
        max_decodes: the most tokens of a step in which all requests decode.
    """

    max_num_seqs: int
    max_request_tokens: int
    max_blocks: int
    token_budget: int
    max_num_samples: int
    max_decodes: int


class ModelRunner:
    """The model, the KV caches and the buffers of one device.

    Args:
        forward: runs the model.
        device, kv_dtype, block_size: of the KV caches; `block_size` in tokens.
        eos_token_ids: end a request's output.
        sampler: chooses tokens from logits; by default a `Sampler`.
        features: take part in each step; see `RunnerHooks`.
        make_cache: makes a layer's cache `(shape, dtype, device)`, all zeros.

    Attributes:
        notify: called, by any thread, when a feature has something to report although no step runs.
            The runner's owner may set it before `allocate`.
    """

    def __init__(
        self,
        forward: Forward,
        device: torch.device,
        kv_dtype: torch.dtype,
        block_size: int,
        *,
        eos_token_ids: Sequence[int] = (),
        sampler: Sampler | None = None,
        features: Sequence[RunnerHooks] = (),
        make_cache: Callable[..., Tensor] = zeros,
    ) -> None:
        self.forward = forward
        self.device = device
        self.kv_dtype = kv_dtype
        self.eos_token_ids = list(eos_token_ids)
        self.block_size = block_size
        self.sampler = sampler or Sampler()
        self.features = features
        self.hooks = RunnerHookCalls(features)
        self.make_cache = make_cache
        self.notify: Callable[[], None] = lambda: None

    @property
    def model(self) -> LlamaForCausalLM:
        """The model that runs."""
        return self.forward.model

    # ---------------------------------------------------------------- memory

    def allocate(self, settings: RunnerSettings, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Make the KV caches and the buffers, on the device and, for swapped requests, in host
        memory.

        Raises:
            ValueError: the GPU does not have enough memory.
        """
        with out_of_memory(
            "the KV cache", "lower num_kv_blocks, kv_cache_memory or gpu_memory_utilization"
        ):
            self.rows = RowsAhead(
                settings.max_num_seqs,
                settings.max_request_tokens,
                settings.max_blocks,
                self.eos_token_ids,
            )
            self.make_buffers(settings, num_blocks, self.make_cache)
            self.host_caches = self._make_caches(num_host_blocks, torch.device("cpu"))
            # First: threads that a feature starts could disturb what it prepares.
            self.forward.prepare(self)
            for allocated in self.hooks.allocated:
                allocated(self)

    def make_buffers(
        self, settings: RunnerSettings, num_blocks: int, make_cache: Callable[..., Tensor] = zeros
    ) -> None:
        """Make the device's KV caches and the buffers of a step."""
        self.settings = settings
        self.kv_caches = self._make_caches(num_blocks, self.device, make_cache)
        self.forward.take_caches(self.kv_caches)
        self.forward.make_room(settings.token_budget)
        self.buffers = StepBuffers(settings, self.device)

    def _make_caches(
        self, num_blocks: int, device: torch.device, make_cache: Callable[..., Tensor] = zeros
    ) -> list[Tensor]:
        """Return the cache of each layer of the model, and those that features add; none if
        `num_blocks` is 0."""
        if num_blocks == 0:
            return []
        return [
            make_cache(shape, self.kv_dtype, device) for shape in self._cache_shapes(num_blocks)
        ]

    def _cache_shapes(self, num_blocks: int) -> list[tuple[int, ...]]:
        shapes = self.forward.cache_shapes(num_blocks, self.block_size)
        for added in self.hooks.cache_shapes:
            shapes += added(num_blocks)
        return shapes

    @property
    def bytes_per_block(self) -> int:
        """Device memory per KV block, over all layers."""
        return sum(math.prod(shape) for shape in self._cache_shapes(1)) * self.kv_dtype.itemsize

    # ---------------------------------------------------------------- a batch

    def prepare_inputs(self, plan: SchedulerOutput) -> Batch:
        """Pack the step's tokens, one request after another, into the persistent buffers."""
        rows = self.rows.update(plan)
        starts = np.array([scheduled.start for scheduled in plan.requests])
        counts = np.array([scheduled.num_tokens for scheduled in plan.requests])
        ends = np.cumsum(counts)
        due, lasts = self.rows.due(plan, starts + counts == self.rows.num_tokens[rows], ends)
        pending = self.rows.pending(plan)
        inputs = self._write_sequences(rows, counts, self._write_tokens(rows, starts, counts))
        picks = self.buffers.picks.array
        picks[:2, : len(due)] = lasts, rows[due]
        picks[2:, : len(pending)] = ends[pending] - 1, rows[pending]
        last_rows, due_rows = self.buffers.upload_picks(len(due), len(pending))
        return Batch(
            rows=rows,
            num_scheduled=counts,
            due_ids=[plan.requests[i].request_id for i in due.tolist()],
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            metadata=inputs.metadata,
            last_rows=last_rows,
            due_rows=due_rows,
        )

    def _write_tokens(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Pack the step's tokens into `input_ids`, `positions` and `slot_mapping` of `buffers`, one
        request after another: request i has the tokens of row `rows[i]` at positions `starts[i]` to
        `starts[i] + counts[i] - 1`.

        The slot of position p, in 64 bits, is `block * block_size + p % block_size`, with the block
        at `p // block_size` of the row's block table. Call `buffers.wait()` before writing.

        Returns:
            The position of each token, `[num_tokens]`.
        """
        # For each token: its request's row, and its position there.
        token_rows, positions = spread(rows, starts, counts)
        size = self.block_size
        blocks = self.rows.block_tables[token_rows, positions // size]
        num_tokens = len(positions)
        buffers = self.buffers
        buffers.wait()
        buffers.input_ids.array[:num_tokens] = self.rows.token_ids[token_rows, positions]
        buffers.positions.array[:num_tokens] = positions
        buffers.slot_mapping.array[:num_tokens] = blocks.astype(np.int64) * size + positions % size
        return positions

    def _write_sequences(
        self, rows: np.ndarray, counts: np.ndarray, positions: np.ndarray
    ) -> ModelInputs:
        """Write where each sequence begins, its length and its block table, and pad the batch if
        `forward` asks for it; returns the model's inputs, uploaded."""
        buffers = self.buffers
        seq_rows, seq_counts = self.forward.sequences(rows, counts)
        num_seqs = len(seq_rows)
        seq_ends = np.cumsum(seq_counts)
        seq_lens = positions[seq_ends - 1] + 1
        max_seq_len = int(seq_lens.max())
        width = -(-max_seq_len // self.block_size)
        buffers.query_start_loc.array[1 : num_seqs + 1] = seq_ends
        buffers.seq_lens.array[:num_seqs] = seq_lens
        buffers.block_tables.array[:num_seqs, :width] = self.rows.block_tables[seq_rows, :width]
        num_padding = self.forward.pad(buffers, seq_counts)
        return buffers.inputs(
            num_seqs + num_padding,
            len(positions) + num_padding,
            int(seq_counts.max()),
            max_seq_len,
            upload=True,
        )

    # ---------------------------------------------------------------- a step

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step, and wait for its result; see `launch`."""
        return self.launch(plan)()

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput) -> Wait:
        """Start one step: copy swapped blocks, build the batch, run the model, sample.

        The next step may be launched before this one has ended, with tokens that only the device
        knows (`last_is_pending`). The host waits for the GPU to copy swapped blocks. With the
        attention backend "torch", it also waits for lengths. Otherwise it does not wait.

        Returns:
            A function that waits for the result.

        Raises:
            InvariantError: the schedule does not match the state that earlier ones have left.
        """
        for before_step in self.hooks.before_step:
            before_step(plan)
        step, wait = self._launch(plan)
        for after_step in self.hooks.after_step:
            wait = after_step(step, wait)
        return wait

    def _launch(self, plan: SchedulerOutput) -> tuple[LaunchedStep, Wait]:
        if plan.empty:
            return LaunchedStep(plan), ModelRunnerOutput
        copy_blocks(plan.swap_out, self.kv_caches, self.host_caches)
        copy_blocks(plan.swap_in, self.host_caches, self.kv_caches)
        for request_id in plan.removed_ids:
            self._remove(request_id)
        batch = self.prepare_inputs(plan)
        rows = self._sampling_rows(batch)
        for rows_ready in self.hooks.rows_ready:
            rows_ready(plan, rows)
        hidden = self.forward(batch)
        step = LaunchedStep(plan, batch, hidden)
        if hidden is None:
            return step, ModelRunnerOutput
        sampled = self._sample(batch, hidden, rows)
        prompt_logprobs = start_prompt_logprobs(
            self.rows, plan, batch, hidden, self.model.compute_logits
        )
        return step, lambda: ModelRunnerOutput(sampled(), prompt_logprobs())

    def _sampling_rows(self, batch: Batch) -> list[SamplingRow]:
        """Return the sampler's input for each token that this step samples."""
        return self.rows.sampling_rows(batch.due_ids) if self.forward.samples else []

    def _sample(
        self, batch: Batch, hidden: Tensor, rows: list[SamplingRow]
    ) -> Callable[[], dict[str, list[SampledToken]]]:
        """Sample the tokens that are due. Compute logits for these positions only.

        Returns:
            A function that waits for the tokens, by request.
        """
        if not rows:
            return dict
        logits = self.model.compute_logits(
            hidden[batch.last_rows] if len(rows) < len(hidden) else hidden
        )
        errors: dict[str, str] = {}
        for logits_ready in self.hooks.logits_ready:
            errors |= logits_ready(logits, rows)
        tokens, arrive = self.sampler.start(logits, rows)
        self.buffers.newest.index_copy_(0, batch.due_rows, tokens)

        def wait() -> dict[str, list[SampledToken]]:
            sampled: dict[str, list[SampledToken]] = {name: [] for name in batch.due_ids}
            for name, token_id, logprobs in zip(batch.due_ids, *arrive(), strict=True):
                sampled[name].append(SampledToken(token_id, logprobs, errors.get(name, "")))
            return sampled

        return wait

    # ---------------------------------------------------------------- the end

    def _remove(self, request_id: str) -> None:
        self.rows.remove(request_id)
        for removed in self.hooks.removed:
            removed(request_id)

    def forget_requests(self) -> None:
        """Drop the state of all requests after a failed step."""
        for request_id in list(self.rows.row_of):
            self._remove(request_id)
        for forget in self.hooks.forget_requests:
            forget()

    def close(self) -> None:
        """Free what features hold."""
        for close in self.hooks.close:
            close()
