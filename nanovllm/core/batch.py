"""The data from which a step's tensors are built: a row per running request, and persistent
buffers.

Built by notebooks/17_model_runner.ipynb: edit it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.base import AttentionMetadata
from nanovllm.core.block_pool import InvariantError
from nanovllm.core.sampling import SamplingRow
from nanovllm.core.schedule import ScheduledRequest, SchedulerOutput
from nanovllm.data.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.core.runner import RunnerSettings


class RequestRows:
    """The runner's state of the running requests: one row per request in a few persistent arrays.

    A plan contains only new tokens and blocks; `update` appends them to the requests' rows.

    Attributes:
        token_ids: `[max_num_seqs, max_tokens]` int32, prompt and output of each request.
        block_tables: `[max_num_seqs, max_blocks]` int32.
        num_known, num_tokens: `[max_num_seqs]`, the tokens of each row. `num_tokens` includes those
            that are not known yet, `num_known` does not.
        num_blocks, num_prompt_tokens: `[max_num_seqs]`.
        row_of: request id → row.
        sampling: row → the sampler's input for its request.
    """

    def __init__(
        self, max_num_seqs: int, max_tokens: int, max_blocks: int, eos_token_ids: Sequence[int] = ()
    ) -> None:
        self.token_ids = np.zeros((max_num_seqs, max_tokens), dtype=np.int32)
        self.block_tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self.num_known, self.num_tokens, self.num_blocks, self.num_prompt_tokens = (
            np.zeros(max_num_seqs, dtype=np.int64) for _ in range(4)
        )
        self.eos_token_ids = list(eos_token_ids)
        self.row_of: dict[str, int] = {}
        self.sampling: dict[int, SamplingRow] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def update(self, plan: SchedulerOutput) -> np.ndarray:
        """Add the new tokens and blocks of a step's requests to their rows; returns the rows,
        `[num_requests]`.

        A request with `sampling_params` is newly admitted (`_admit`). New tokens and blocks are
        appended to the row. Placeholders for unknown tokens (`_unknown`) follow: `num_tokens`
        includes them, `num_known` does not.

        Raises:
            InvariantError: "A is admitted, ...", if the request has a row already; "A ... up to
                token 4, 3 are known", if the step computes tokens that the row does not have.
        """
        requests = plan.requests
        for scheduled in requests:
            if scheduled.sampling_params is not None:
                self._admit(scheduled, scheduled.sampling_params)
        rows = np.array([self.row_of[scheduled.request_id] for scheduled in requests])
        new_tokens = [scheduled.new_token_ids for scheduled in requests]
        num_known = append(self.token_ids, rows, self.num_known[rows], new_tokens)
        num_tokens = append(self.token_ids, rows, num_known, self._unknown(plan))
        ends = np.array([scheduled.start + scheduled.num_tokens for scheduled in requests])
        if (ends > num_tokens).any():
            i = int(np.argmax(ends > num_tokens))
            raise InvariantError(
                f"{requests[i].request_id} is scheduled up to token {ends[i]}, but only "
                f"{num_known[i]} are known"
            )
        new_blocks = [scheduled.new_block_ids for scheduled in requests]
        self.num_blocks[rows] = append(self.block_tables, rows, self.num_blocks[rows], new_blocks)
        self.num_known[rows] = num_known
        self.num_tokens[rows] = num_tokens
        return rows

    def _admit(self, scheduled: ScheduledRequest, params: SamplingParams) -> None:
        """Give a request a free row, in which its counters begin at 0."""
        request_id = scheduled.request_id
        if request_id in self.row_of:
            raise InvariantError(f"{request_id} is admitted again, but was not removed before")
        row = self.row_of[request_id] = self._free_rows.pop()
        self.num_known[row] = self.num_blocks[row] = 0
        self.num_prompt_tokens[row] = scheduled.num_prompt_tokens
        stop_ids = params.stop_token_ids + ([] if params.ignore_eos else self.eos_token_ids)
        self.sampling[row] = SamplingRow(
            params=params,
            history=self.token_ids[row],
            num_prompt_tokens=scheduled.num_prompt_tokens,
            stop_ids=stop_ids,
            request_id=request_id,
            length=self.num_tokens[row : row + 1],
        )

    def remove(self, request_id: str) -> None:
        """Drop the state of a request that has ended or was preempted."""
        row = self.row_of.pop(request_id)
        del self.sampling[row]
        self._free_rows.append(row)

    def _unknown(self, plan: SchedulerOutput) -> list[Sequence[int]]:
        """Return placeholders for the tokens of each share that the host does not know: none."""
        return [[] for _ in plan.requests]

    @staticmethod
    def pending(plan: SchedulerOutput) -> np.ndarray:
        """Return the numbers, in the plan, of the requests whose last token only the device knows:
        none."""
        return np.zeros(0, dtype=np.int64)

    def sampling_rows(self, due_ids: list[str]) -> list[SamplingRow]:
        """Return the sampler's input for each token that a step samples.

        Args:
            due_ids: each token's request.
        """
        return [self.sampling[self.row_of[request_id]] for request_id in due_ids]

    @staticmethod
    def due(
        plan: SchedulerOutput, caught_up: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions to sample, as two arrays: the number of the request in the plan,
        and the token's position in the batch.

        A request that has caught up samples after its last token, at `ends[i] - 1`."""
        due = np.flatnonzero(caught_up)
        return due, ends[due] - 1


def spread(
    rows: np.ndarray, starts: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return row and column of each entry of some runs, packed one run after another: run i has
    `counts[i]` entries of row `rows[i]`, and begins at column `starts[i]`."""
    if (counts == 1).all():
        return rows, starts  # as in a step in which all requests decode
    ends = np.cumsum(counts)
    columns = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
    return np.repeat(rows, counts), columns


def append(
    table: np.ndarray, rows: np.ndarray, starts: np.ndarray, pieces: Sequence[Sequence[int]]
) -> np.ndarray:
    """Write each piece into its row of a table, where it begins at column `starts[i]`; returns the
    columns after the pieces."""
    if not any(pieces):
        return starts
    lengths = np.array([len(piece) for piece in pieces])
    ends: np.ndarray = starts + lengths
    table[spread(rows, starts, lengths)] = list(chain.from_iterable(pieces))
    return ends


class StepBuffer:
    """A persistent array in host memory and its copy on the device. On a CPU both are the same
    memory. Their addresses never change.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.array = self.host.numpy()
        self.device = (
            self.host if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        )
        self._view = self.device

    def first(self, count: int) -> Tensor:
        """Return the first `count` entries on the device. Steps of the same size get the same
        view."""
        if len(self._view) != count:
            self._view = self.device[:count]
        return self._view

    def upload(self, count: int) -> Tensor:
        """Copy the first `count` entries to the device."""
        if self.device is not self.host:
            self.first(count).copy_(self.host[:count], non_blocking=True)
        return self.first(count)


class ModelInputs(NamedTuple):
    """The tensors that the model reads in one step.

    Attributes:
        input_ids, positions: `[num_tokens]` int64, packed.
    """

    input_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata


@dataclass
class Batch:
    """The tensors of one step, and the rows of its requests. The tensors are views of the runner's
    buffers, which the next batch overwrites.

    Attributes:
        rows, num_scheduled: `[num_seqs]`, each request's row, and its number of tokens in the step.
        due_ids: for each token to sample, the id of its request.
        input_ids, positions: `[num_tokens]` int64, packed; padding tokens (see `StepBuffers.pad`)
            are at the end.
        last_rows: `[num_due]` int64, for each token to sample, the position in the batch of the
            token before it.
        due_rows: `[num_due]` int64, on the device: for each token to sample, its request's row.
    """

    rows: np.ndarray
    num_scheduled: np.ndarray
    due_ids: list[str]
    input_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    last_rows: Tensor
    due_rows: Tensor


class StepBuffers:
    """Buffers for the inputs of a step. Every step overwrites them.

    For three requests, with 3 tokens from position 0, 1 from position 8 and 2 from position 4, a
    block size of 4, and the block tables [7], [3, 9, 5] and [2, 6], `ModelRunner.prepare_inputs`
    writes

        positions         0  1  2  8  4  5
        slot_mapping     28 29 30 20 24 25      block * 4 + position % 4
        query_start_loc   0  3  4  6            the end of each request, after a 0
        seq_lens          3  9  6               tokens of each request after this step

    Attributes:
        newest: the last sampled token of each request's row, on the device. The next step may need
            it before it has reached the host.
        picks: rows 0 and 1: for each token to sample, the position in the batch after which it is
            sampled, and its request's row. Rows 2 and 3: for each pending token, its position in
            the batch, and its request's row.
        uploaded: recorded on a GPU after a step's uploads.
    """

    def __init__(self, settings: RunnerSettings, device: torch.device) -> None:
        # As attention may see them: each token of a step in which all requests decode.
        seqs = max(settings.max_num_seqs, settings.max_decodes)
        buffer = partial(StepBuffer, device=device)
        self.input_ids, self.positions, self.slot_mapping = (
            buffer((settings.token_budget,), torch.int64) for _ in range(3)
        )
        shapes = (seqs + 1,), (seqs,), (seqs, settings.max_blocks)
        self.query_start_loc, self.seq_lens, self.block_tables = (
            buffer(shape, torch.int32) for shape in shapes
        )
        self.newest = torch.zeros(seqs, dtype=torch.int64, device=device)
        self.picks = buffer((4, settings.max_num_samples), torch.int64)
        self._due = self.picks.device[0], self.picks.device[1]
        self.uploaded = torch.cuda.Event() if device.type == "cuda" else None

    def pad(self, first: int, end: int) -> None:
        """Make rows `first` to `end - 1` sequences of one padding token. Slot -1 keeps its KV from
        being written. It attends to the first slot, since kernels need something to read, and its
        output is not used."""
        self.input_ids.array[first:end] = 0
        self.positions.array[first:end] = 0
        self.slot_mapping.array[first:end] = -1
        self.query_start_loc.array[first : end + 1] = np.arange(first, end + 1)
        self.seq_lens.array[first:end] = 1
        self.block_tables.array[first:end, 0] = 0

    def inputs(
        self,
        num_seqs: int,
        num_tokens: int,
        max_query_len: int,
        max_seq_len: int,
        upload: bool = False,
    ) -> ModelInputs:
        """Return the inputs of a step as views of the device's buffers. With `upload`, copy the
        host's buffers to them first."""
        view = StepBuffer.upload if upload else StepBuffer.first
        metadata = AttentionMetadata(
            query_start_loc=view(self.query_start_loc, num_seqs + 1),
            seq_lens=view(self.seq_lens, num_seqs),
            block_tables=view(self.block_tables, num_seqs),
            slot_mapping=view(self.slot_mapping, num_tokens),
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )
        input_ids = view(self.input_ids, num_tokens)
        return ModelInputs(input_ids, view(self.positions, num_tokens), metadata)

    def wait(self) -> None:
        """Wait until the GPU has copied the last step's buffers. They may be overwritten then."""
        if self.uploaded is not None:
            self.uploaded.synchronize()

    def upload_picks(self, num_due: int, num_pending: int) -> tuple[Tensor, Tensor]:
        """Copy the picks, the last of a step's uploads, and write pending tokens, which only the
        device knows, to their positions.

        Returns:
            `last_rows` and `due_rows` of a `Batch`.
        """
        picks = self.picks.upload(4)
        if num_pending:
            places, sources = picks[2:, :num_pending]
            self.input_ids.device.index_copy_(0, places, self.newest.index_select(0, sources))
        if self.uploaded is not None:
            self.uploaded.record()
        if len(self._due[0]) != num_due:
            self._due = picks[0, :num_due], picks[1, :num_due]
        return self._due
