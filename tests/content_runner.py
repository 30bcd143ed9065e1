"""A runner without a model: its KV cache holds, for each slot, the hash of the prefix that ends
there.

So it knows at every step whether each token that attention would read is the right one, whoever
wrote it (a step, a copy from host memory, another engine), and what it samples depends on the whole
prefix: any mistake of scheduler, block tables, prefix cache, swapping or transfers either fails
here or changes the output."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection
from functools import lru_cache

from nanovllm.core.schedule import (
    ModelRunnerOutput,
    SampledToken,
    ScheduledRequest,
    SchedulerOutput,
)
from nanovllm.features.speculation.scheduling import DRAFTS, num_drafts_wanted

VOCABULARY = 6


@lru_cache(maxsize=200_000)
def content(prefix: tuple[int, ...], salt: str | None = None) -> bytes:
    """What the cache should hold for the last token of the prefix, among requests with this cache
    salt."""
    return hashlib.sha256(repr((prefix, salt)).encode()).digest()


def next_token(token_ids: list[int]) -> int:
    """What this "model" samples after the tokens."""
    return content(tuple(token_ids))[0] % VOCABULARY


class ContentRunner:
    """Executes schedules as `ModelRunner` does, on contents instead of tensors."""

    def __init__(self, block_size: int, salts: dict[str, str | None]) -> None:
        self.block_size = block_size
        self.salts = salts  # request id -> cache salt
        self.device: dict[tuple[int, int], bytes] = {}  # (block, offset) -> content
        self.host: dict[tuple[int, int], bytes] = {}
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, list[int]] = {}
        # Request id -> its last token, which may be needed before it is sent.
        self.sampled: dict[str, int] = {}
        self.ahead: set[str] = set()  # requests whose tokens end with one that was not sent yet
        self.drafts: dict[str, list[int]] = {}  # request id -> those of the step
        self.random = random.Random(0)  # draws which drafts are right

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Move blocks, write what is new, check everything that is read, sample."""
        self._copy(plan.swap_out, self.device, self.host)
        self._copy(plan.swap_in, self.host, self.device)
        for request_id in plan.removed_ids:
            del self.tokens[request_id], self.tables[request_id]
            self.drafts.pop(request_id, None)
            self.ahead.discard(request_id)
        written: set[tuple[int, int]] = set()
        for scheduled in plan.requests:
            if scheduled.sampling_params is not None:
                assert scheduled.request_id not in self.tokens, "admitted twice"
                self.tokens[scheduled.request_id], self.tables[scheduled.request_id] = [], []
            tokens = self.tokens[scheduled.request_id]
            if scheduled.request_id in self.ahead:
                assert tokens.pop() == scheduled.new_token_ids[0], "another token than was sampled"
                self.ahead.remove(scheduled.request_id)
            tokens += scheduled.new_token_ids
            if scheduled.last_is_pending:
                tokens.append(self.sampled[scheduled.request_id])
                self.ahead.add(scheduled.request_id)
            self.tables[scheduled.request_id] += scheduled.new_block_ids
            self.drafts[scheduled.request_id] = list(scheduled.extra_token_ids)
            for position in range(scheduled.start, scheduled.start + scheduled.num_tokens):
                slot = self._slot(scheduled.request_id, position)
                assert slot not in written, "two writers in one step"
                written.add(slot)
                self.device[slot] = self._content(scheduled.request_id, position)
        sampled: dict[str, list[SampledToken]] = {}
        for scheduled in plan.requests:
            name, drafts = scheduled.request_id, self.drafts[scheduled.request_id]
            tokens, end = self.tokens[name], scheduled.start + scheduled.num_tokens
            for position in range(end):
                found = self.device.get(self._slot(scheduled.request_id, position))
                assert found == self._content(scheduled.request_id, position), (
                    f"wrong content at position {position}"
                )
            assert scheduled.samples == (1 + len(drafts)) * (end == len(tokens) + len(drafts))
            for place in range(scheduled.samples):
                self.sampled[name] = next_token([*tokens, *drafts[:place]])
                sampled.setdefault(name, []).append(SampledToken(self.sampled[name]))
        result = ModelRunnerOutput(self._kept(plan, sampled))
        wanted = num_drafts_wanted(plan)
        result.extras[DRAFTS] = {
            scheduled.request_id: self._draft(scheduled, wanted[scheduled.request_id], result)
            for scheduled in plan.requests
            if scheduled.request_id in wanted
        }
        return result

    def _kept(
        self, plan: SchedulerOutput, sampled: dict[str, list[SampledToken]]
    ) -> dict[str, list[SampledToken]]:
        """The tokens up to the first that was not drafted. `keep_accepted` says so, too, but is in
        a module that imports torch: for a check of a scheduler, the longest part."""
        drafts = {each.request_id: each.extra_token_ids for each in plan.requests}
        kept = {}
        for name, tokens in sampled.items():
            agree = [
                draft == token.token_id for draft, token in zip(drafts[name], tokens, strict=False)
            ]
            kept[name] = tokens[: [*agree, False].index(False) + 1]
        return kept

    def _draft(
        self, scheduled: ScheduledRequest, num_drafts: int, result: ModelRunnerOutput
    ) -> list[int]:
        """Some drafts, of which most are right. A model that makes them writes all but the last
        into the request's blocks, and makes as many as have slots there."""
        name, drafts = scheduled.request_id, list[int]()
        new = result.sampled[name]
        for _ in range(num_drafts):
            right = next_token([*self.tokens[name], *(token.token_id for token in new), *drafts])
            drafts.append(
                right if self.random.random() < 0.7 else self.random.randrange(VOCABULARY)
            )
        end = scheduled.start + scheduled.num_tokens
        num_rejected = len(scheduled.extra_token_ids) + 1 - len(new)
        num_slots = len(self.tables[name]) * self.block_size
        return drafts[: num_slots - (end - num_rejected)]

    def receive(
        self,
        table: list[int],
        positions: range,
        token_ids: list[int],
        salt: str | None,
        spoiled: Collection[int] = (),
    ) -> None:
        """Content from elsewhere comes into a request's blocks, and garbage into those that are
        spoiled."""
        for position in positions:
            block, offset = table[position // self.block_size], position % self.block_size
            whole = content(tuple(token_ids[: position + 1]), salt)
            self.device[block, offset] = b"garbage" if block in spoiled else whole

    def look(self, table: list[int], num_tokens: int) -> list[bytes | None]:
        """What somebody elsewhere would read in these blocks."""
        size = self.block_size
        return [self.device.get((table[i // size], i % size)) for i in range(num_tokens)]

    def _content(self, request_id: str, position: int) -> bytes:
        tokens = [*self.tokens[request_id], *self.drafts[request_id]]
        return content(tuple(tokens[: position + 1]), self.salts[request_id])

    def _slot(self, request_id: str, position: int) -> tuple[int, int]:
        return self.tables[request_id][position // self.block_size], position % self.block_size

    def _copy(self, copies: list[tuple[int, int]], source: dict, target: dict) -> None:
        for offset in range(self.block_size):
            moved = [source.get((block, offset)) for block, _ in copies]
            for (_, block), value in zip(copies, moved, strict=True):
                if value is None:
                    target.pop((block, offset), None)
                else:
                    target[block, offset] = value
