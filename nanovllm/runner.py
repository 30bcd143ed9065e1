"""Turns a schedule into tensors, runs the model, and samples: the only place that knows both.

Built by notebooks/17_model_runner.ipynb: edit it there, then run `python -m nanovllm.course build`.
"""

from __future__ import annotations

import math
import pathlib
from dataclasses import dataclass

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
from nanovllm.config import EngineConfig, parse_bytes
from nanovllm.kv.block_pool import InvariantError
from nanovllm.kv.manager import BlockCopies
from nanovllm.models.config import ModelConfig
from nanovllm.models.loader import load_model
from nanovllm.request import TokenLogprobs
from nanovllm.sampling import Sampler, SamplingRow, gather_logprobs
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import SampledToken, Schedule, ScheduledRequest, StepResult

# Rows of prompt log-probabilities that are computed at a time: a row of logits is as long as the vocabulary.
LOGPROB_ROWS = 256


class RequestRows:
    """What the runner remembers of the running requests: a row each in a few arrays that live as long as it does.

    A schedule names only what is new (tokens, blocks); the rows put it after what they have.
    """

    def __init__(self, max_num_seqs: int, max_tokens: int, max_blocks: int) -> None:
        self.token_ids = np.zeros((max_num_seqs, max_tokens), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self.block_tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self.params: dict[str, SamplingParams] = {}
        self.row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def remove(self, request_id: str) -> None:
        """Forget a request that ended or lost its blocks."""
        self._free_rows.append(self.row_of.pop(request_id))
        del self.params[request_id]

    def update(self, scheduled: ScheduledRequest) -> int:
        """Take over what is new about a request; returns its row.

        Raises:
            InvariantError: it is admitted twice, or tokens that it builds on never came.
        """
        request_id = scheduled.request_id
        new_tokens, blocks = scheduled.new_token_ids, scheduled.new_block_ids
        if scheduled.sampling_params is not None:
            if request_id in self.row_of:
                raise InvariantError(f"{request_id} is admitted, and was not removed before")
            row = self.row_of[request_id] = self._free_rows.pop()
            self.params[request_id] = scheduled.sampling_params
            self.num_tokens[row] = self.num_blocks[row] = 0
            self.num_prompt_tokens[row] = scheduled.num_prompt_tokens
        else:
            row = self.row_of[request_id]
        start, first = int(self.num_tokens[row]), int(self.num_blocks[row])
        known = start + len(new_tokens)
        if scheduled.start + scheduled.num_tokens > known:
            raise InvariantError(
                f"{request_id} shall compute up to token {scheduled.start + scheduled.num_tokens}, {known} are known"
            )
        self.token_ids[row, start:known] = new_tokens
        self.block_tables[row, first : first + len(blocks)] = blocks
        self.num_tokens[row] = known
        self.num_blocks[row] = first + len(blocks)
        return row


class StepBuffer:
    """An array in host memory and its twin on the device, made once: every step writes into the same place.

    On the CPU the two are one. A CUDA graph reads from fixed addresses, which is why the twin never moves.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.array = self.host.numpy()
        self.device = self.host if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)

    def upload(self, count: int) -> Tensor:
        """The first `count` entries on the device."""
        if self.device is not self.host:
            self.device[:count].copy_(self.host[:count], non_blocking=True)
        return self.device[:count]


@dataclass
class Batch:
    """The tensors of one step, and the rows of the requests in it. They are the runner's buffers: building the next
    batch overwrites them.

    Attributes:
        rows, num_scheduled: `[num_seqs]`, the row of each request, and how many tokens of it are computed.
        input_ids, positions: `[num_tokens]` int64, packed.
    """

    rows: np.ndarray
    num_scheduled: np.ndarray
    input_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata


def choose_device(name: str) -> torch.device:
    """The device called `name`; "auto" is a CUDA GPU if torch sees one.

    Raises:
        ValueError: CUDA is asked for and is not there.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but torch sees no CUDA GPU; use --device cpu")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype called `name`; "auto" is bfloat16 where the hardware multiplies it, else float16 on a GPU and
    float32 on a CPU."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        # Older GPUs can emulate bfloat16, which costs more than it saves.
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float16
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", lambda: {})()
    return (
        torch.bfloat16 if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else torch.float32
    )


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take host memory only page by page, as they are written: a pool that is never full stays small.
    (`torch.zeros` writes all of them at once; the operating system's own zero pages cost nothing.)"""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    data = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape)


class ModelRunner:
    """Model, KV caches and buffers of one device.

    Args:
        config: the engine's settings.
        model_config: the model's shape.
        folder: the checkpoint.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path) -> None:
        self.config = config
        self.model_config = model_config
        self.device = choose_device(config.device)
        self.dtype = choose_dtype(config.dtype, self.device)
        self.backend = get_backend(config.attention_backend, self.device, model_config.head_dim, self.dtype)
        max_positions = config.max_model_len or model_config.max_position_embeddings
        self.model = load_model(
            folder, model_config, self.dtype, self.device, max_positions, config.load_format, config.seed
        )
        self.model.pack_weights()
        self.sampler = Sampler()
        self.kv_caches: list[Tensor] = []
        self.host_caches: list[Tensor] = []

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Make the KV caches, one tensor a layer, and the buffers; `config.max_request_tokens` is known now."""
        model, config = self.model_config, self.config
        shape = (model.num_kv_heads, config.block_size, model.head_dim)
        self.kv_caches = [
            zeros(kv_cache_shape(num_blocks, *shape), self.dtype, self.device)
            for _ in range(model.num_layers)
        ]
        self.host_caches = [
            zeros(kv_cache_shape(num_host_blocks, *shape), self.dtype, torch.device("cpu"))
            for _ in range(model.num_layers if num_host_blocks else 0)
        ]
        max_blocks = -(-config.max_request_tokens // config.block_size)
        self.rows = RequestRows(config.max_num_seqs, config.max_request_tokens, max_blocks)
        tokens, seqs = config.token_budget, config.max_num_seqs
        self._input_ids = StepBuffer((tokens,), torch.int64, self.device)
        self._positions = StepBuffer((tokens,), torch.int64, self.device)
        self._slot_mapping = StepBuffer((tokens,), torch.int64, self.device)
        self._query_start_loc = StepBuffer((seqs + 1,), torch.int32, self.device)
        self._seq_lens = StepBuffer((seqs,), torch.int32, self.device)
        self._block_tables = StepBuffer((seqs, max_blocks), torch.int32, self.device)
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

        if self._uploaded is not None:
            self._uploaded.synchronize()  # the GPU may not have fetched the last step's numbers yet
        self._input_ids.array[:num_tokens] = self.rows.token_ids[token_rows, positions]
        self._positions.array[:num_tokens] = positions
        self._slot_mapping.array[:num_tokens] = blocks.astype(np.int64) * size + positions % size
        self._query_start_loc.array[1 : num_seqs + 1] = ends
        self._seq_lens.array[:num_seqs] = seq_lens
        self._block_tables.array[:num_seqs, :width] = self.rows.block_tables[rows, :width]
        return self._upload(rows, counts, num_tokens, max_seq_len)

    def _upload(self, rows: np.ndarray, counts: np.ndarray, num_tokens: int, max_seq_len: int) -> Batch:
        num_seqs = len(rows)
        metadata = AttentionMetadata(
            query_start_loc=self._query_start_loc.upload(num_seqs + 1),
            seq_lens=self._seq_lens.upload(num_seqs),
            block_tables=self._block_tables.upload(num_seqs),
            slot_mapping=self._slot_mapping.upload(num_tokens),
            max_query_len=int(counts.max()),
            max_seq_len=max_seq_len,
        )
        batch = Batch(
            rows, counts, self._input_ids.upload(num_tokens), self._positions.upload(num_tokens), metadata
        )
        if self._uploaded is not None:
            self._uploaded.record()
        return batch

    # ---------------------------------------------------------------- one step

    @torch.inference_mode()
    def execute(self, schedule: Schedule) -> StepResult:
        """Run one step: move blocks, build the batch, run the model, sample.

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
        with forward_context(ForwardContext(self.backend, self.kv_caches, batch.metadata)):
            hidden = self.model(batch.input_ids, batch.positions)
        result = StepResult()
        self._sample(schedule, batch, hidden, result)
        self._prompt_logprobs(schedule, batch, hidden, result)
        return result

    def _sample(self, schedule: Schedule, batch: Batch, hidden: Tensor, result: StepResult) -> None:
        """Requests that have caught up with their tokens get a new one; only their last row becomes logits."""
        ends = np.cumsum(batch.num_scheduled)
        due = [
            (scheduled, int(row), int(end) - 1)
            for scheduled, row, end in zip(schedule.requests, batch.rows, ends, strict=True)
            if scheduled.start + scheduled.num_tokens == self.rows.num_tokens[row]
        ]
        if not due:
            return
        last_rows = torch.tensor([index for _, _, index in due], device=self.device)
        logits = self.model.compute_logits(hidden[last_rows] if len(due) < len(hidden) else hidden)
        token_ids, logprobs = self.sampler.sample(
            logits, [self._sampling_row(s.request_id, row) for s, row, _ in due]
        )
        for (scheduled, _, _), token_id, entry in zip(due, token_ids, logprobs, strict=True):
            result.sampled[scheduled.request_id] = SampledToken(token_id, entry)

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
        from_blocks, to_blocks = (torch.tensor(ids) for ids in zip(*copies, strict=True))
        for source_cache, target_cache in zip(source, target, strict=True):
            moved = source_cache[from_blocks.to(source_cache.device)]
            target_cache[to_blocks.to(target_cache.device)] = moved.to(target_cache.device)

    def _prompt_logprobs(self, schedule: Schedule, batch: Batch, hidden: Tensor, result: StepResult) -> None:
        """Log-probability of each prompt token given those before it, for the part of the prompt in this step."""
        first = 0
        for scheduled, row in zip(schedule.requests, batch.rows, strict=True):
            count = self.rows.params[scheduled.request_id].prompt_logprobs
            # The hidden state at position p predicts position p + 1, which must still be of the prompt.
            last = min(scheduled.start + scheduled.num_tokens, int(self.rows.num_prompt_tokens[row]) - 1)
            if count is not None and last > scheduled.start:
                targets = torch.from_numpy(
                    self.rows.token_ids[row, scheduled.start + 1 : last + 1].astype(np.int64)
                )
                entries: list[TokenLogprobs] = []
                for i in range(0, len(targets), LOGPROB_ROWS):
                    part = targets[i : i + LOGPROB_ROWS].to(self.device)
                    logits = self.model.compute_logits(hidden[first + i : first + i + len(part)])
                    entries += gather_logprobs(logits, part, [count] * len(part))
                result.prompt_logprobs[scheduled.request_id] = entries
            first += scheduled.num_tokens

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
            longest = config.max_model_len or self.model_config.max_position_embeddings
            count = min(budget // size, config.max_num_seqs * -(-longest // config.block_size))
        if count < 1:
            raise ValueError(
                f"no KV block of {size} bytes fits into {max(0, budget)} bytes: "
                f"raise kv_cache_memory or gpu_memory_utilization, or lower block_size"
            )
        return count

    def _free_memory(self) -> int:
        """Bytes that the KV pool may take if nobody says how many, once the weights are loaded."""
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return int(free - total * (1 - self.config.gpu_memory_utilization))
        return min(psutil.virtual_memory().available // 4, 4 * 2**30)
