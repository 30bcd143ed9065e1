"""A rank whose device sleeps for as long as its share of a step is predicted to take.

Scheduler, executor, block tables, batches, process groups and KV connectors are the real ones. Only
three things differ: `SleepingForward` takes the place of the model, tokens are arbitrary words, and
the caches have one byte per head and token in a single layer."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from nanovllm.attention.base import AttentionBackend
from nanovllm.core.batch import Batch
from nanovllm.core.forward import Forward
from nanovllm.core.runner import ModelRunner, RunnerSettings
from nanovllm.core.runner_hooks import RunnerHooks, Wait
from nanovllm.core.sampling import SamplingRow
from nanovllm.core.schedule import ModelRunnerOutput, SampledToken, SchedulerOutput
from nanovllm.distributed.groups import get_ep_group
from nanovllm.executor.rank_cost import RankCost
from nanovllm.executor.virtual_clock import (
    SECOND,
    VIRTUAL_CLOCK,
    RankStep,
    TimelineWriter,
    sleep_until,
)

if TYPE_CHECKING:
    from nanovllm.distributed.stage_link import StageLink
    from nanovllm.executor.sleeping_transfers import ReadClock
    from nanovllm.models.llama import LlamaForCausalLM

# Sampled tokens are among these ids: in the vocabularies of today's models short words, after the
# special tokens and single bytes.
FIRST_WORD = 300
NUM_WORDS = 1000


class SleepingModel(nn.Module):
    """Stands for a model: has no weights, and gives every token the same probability.

    Args:
        layers: numbers of this rank's layers.
    """

    def __init__(self, layers: range, vocab_size: int) -> None:
        super().__init__()
        self.attention_layers = {layer: nn.Identity() for layer in layers}
        self.vocab_size = vocab_size

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`[num_tokens, 1]` to `[num_tokens, vocab_size]`."""
        return hidden.expand(-1, self.vocab_size).clone()


class SleepingForward(Forward):
    """Sleeps while the step would run.

    Args:
        cost: of this rank.
        link: to the stages before and after; None without a pipeline.
        cache_shape: for one block, all layers together.
        slowdown: factor on the computing time.
        timeline: gets what this rank does.

    Attributes:
        plan: the step's plan.
        order: when it was ordered.
        free: when the rank has done all that it was ordered so far.
    """

    def __init__(
        self,
        model: SleepingModel,
        backend: AttentionBackend,
        cost: RankCost,
        link: StageLink | None,
        *,
        cache_shape: tuple[int, ...],
        slowdown: float,
        scale: float,
        timeline: TimelineWriter,
    ) -> None:
        super().__init__(cast("LlamaForCausalLM", model), backend)
        self.cost = cost
        self.link = link
        self.cache_shape = cache_shape
        self.slowdown = slowdown
        self.scale = scale
        self.timeline = timeline
        self.samples = link is None or link.group.is_last
        self.plan = SchedulerOutput()
        self.order = 0
        self.free = 0

    def cache_shapes(self, num_blocks: int, block_size: int) -> list[tuple[int, ...]]:
        """See `Forward`."""
        return [(num_blocks, *self.cache_shape)]

    def take_caches(self, kv_caches: Sequence[Tensor]) -> None:
        """Use the same memory for all layers."""
        self.kv_caches = dict.fromkeys(self.model.attention_layers, kv_caches[0])

    def __call__(self, batch: Batch) -> Tensor | None:
        """Receive, sleep, meet the other ranks of the stage, and send."""
        ends = batch.metadata.seq_lens.tolist()
        counts = batch.num_scheduled.tolist() or [1]  # a batch of padding has one token
        shares = [(end - count, count) for end, count in zip(ends, counts, strict=True)]
        times = self.cost.step(shares, len(batch.due_ids))
        compute = max(self.order, self.free, self._receive())
        wait = compute + round(times.compute * self.slowdown)
        sleep_until(wait, self.scale)
        communicate, duration = self._meet(wait, times.communicate)
        self.free = communicate + duration
        sleep_until(self.free, self.scale)
        self.timeline.write(
            RankStep(
                order=self.order,
                compute=compute,
                wait=wait,
                communicate=communicate,
                answer=self.free,
                tokens={each.request_id: each.num_tokens for each in self.plan.requests},
                parts=times.parts,
            )
        )
        if self.samples:
            return torch.zeros(sum(counts), 1)
        assert self.link is not None, "a stage before the last has a next one"
        self.link.send(torch.tensor(divmod(self.free + times.send, SECOND)))
        return None

    def _receive(self) -> int:
        """Return when the hidden states of the stage before are here; 0 on the first stage."""
        if self.link is None or self.link.group.is_first:
            return 0
        arrival = torch.zeros(2, dtype=torch.int64)
        self.link.receive(arrival)
        seconds, rest = (int(each) for each in arrival)
        return seconds * SECOND + rest

    @staticmethod
    def _meet(computed: int, communicate: int) -> tuple[int, int]:
        """Return when the last rank of the stage has computed, and how long the collectives of all
        of them take."""
        # A virtual time may have more than 64 bits: whole seconds and the rest have fewer.
        own = torch.tensor([[*divmod(computed, SECOND), communicate]])
        found = get_ep_group().all_gather(own, dim=0).tolist()
        last = max(seconds * SECOND + rest for seconds, rest, _ in found)
        return last, max(communicate for *_, communicate in found)


class SleepingRunner(ModelRunner):
    """Runs steps on a device that sleeps.

    Args:
        forward: sleeps.
        block_size: tokens per block.
        eos_token_ids: are not sampled.
        create_read_clock: called once the runner has caches and features; None if this engine
            shares no KV.
    """

    def __init__(
        self,
        forward: SleepingForward,
        block_size: int,
        *,
        eos_token_ids: Sequence[int],
        features: Sequence[RunnerHooks],
        make_cache: Callable[..., Tensor],
        create_read_clock: Callable[[ModelRunner, SleepingForward], ReadClock] | None,
    ) -> None:
        super().__init__(
            forward,
            torch.device("cpu"),
            torch.int8,
            block_size,
            eos_token_ids=eos_token_ids,
            features=features,
            make_cache=make_cache,
        )
        self.sleeper = forward
        vocab_size = cast(SleepingModel, forward.model).vocab_size
        first = min(FIRST_WORD, vocab_size // 2)
        words = range(first, min(first + NUM_WORDS, vocab_size))
        self._words = [word for word in words if word not in self.eos_token_ids]
        self._create_read_clock = create_read_clock
        self._reads: ReadClock | None = None

    @property
    def bytes_per_block(self) -> int:
        """Memory per KV block on the predicted device."""
        return self.sleeper.cost.bytes_per_block

    def allocate(self, settings: RunnerSettings, num_blocks: int, num_host_blocks: int = 0) -> None:
        """See `ModelRunner`."""
        super().allocate(settings, num_blocks, num_host_blocks)
        if self._create_read_clock is not None:
            self._reads = self._create_read_clock(self, self.sleeper)

    def launch(self, plan: SchedulerOutput) -> Wait:
        """Run a step, see `ModelRunner`, and tell when it, and transfers of KV, have ended."""
        sleeper = self.sleeper
        reads = self._reads
        sleeper.plan = plan
        sleeper.order = cast(int, plan.extras[VIRTUAL_CLOCK])
        if reads is not None:
            reads.take_orders(plan, sleeper.order)
        before = sleeper.free
        wait = super().launch(plan)
        # An empty plan computes only together with other engines.
        ended = sleeper.free if sleeper.free > before else 0

        def wait_and_tell() -> ModelRunnerOutput:
            result = wait()
            arrived = 0 if reads is None else reads.take_ends(result)
            result.extras[VIRTUAL_CLOCK] = max(ended, arrived)
            return result

        return wait_and_tell

    def _sample(
        self, batch: Batch, hidden: Tensor, rows: list[SamplingRow]
    ) -> Callable[[], dict[str, list[SampledToken]]]:
        """Choose a word for each request, by the last token of its prompt and the position."""
        sampled = {row.request_id: [self._word_for(row)] for row in rows}
        return lambda: sampled

    def _word_for(self, row: SamplingRow) -> SampledToken:
        seed = b"%d %d" % (row.history[row.num_prompt_tokens - 1], row.num_tokens)
        word = self._words[zlib.crc32(seed) % len(self._words)]
        params = row.params
        if params.logprobs is not None or params.structured_outputs is not None:
            error = "device 'sleep' computes no logits: ask for no logprobs and structured outputs"
            return SampledToken(word, error=error)
        return SampledToken(word)
