"""Random workloads under random settings, and a digest of all that a scheduler does with each.

    python -m tests.core.workloads --store    # after a change that is meant to change plans

`schedules.json` has the digests, in the order of their seeds. The digest of a workload covers every
plan, every output, and after each event all queues, block tables, pools and counters: everything
that later decisions depend on."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import pathlib
import random
import sys
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import msgspec

from nanovllm.assembly.scheduling import create_manager, create_scheduler
from nanovllm.core.request import Request, RequestStatus
from nanovllm.core.schedule import ModelRunnerOutput, SampledToken, SchedulerOutput
from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineOutput, EngineRequest, TokenLogprobs
from nanovllm.data.resolved_config import resolve
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.features.speculation.scheduling import num_drafts_wanted
from nanovllm.features.step_time_limit import StepTimeLimit
from nanovllm.kv_transfer.scheduling import KVTransfer
from tests.content_runner import ContentRunner
from tests.core.test_scheduler_machine import MillisecondPerToken
from tests.kv_transfer.test_transfer_scheduler import ScriptedConnector

STORED = pathlib.Path(__file__).with_name("schedules.json")
NUM_WORKLOADS = 500
MODEL_LEN = 60


class World:
    """A scheduler with all that it talks to. Only this class knows how they are called."""

    def __init__(self, workload: Workload) -> None:
        config = workload.config
        if workload.has_connector:
            policy = "fail" if workload.fails else "recompute"
            transfer = json.dumps({"kv_load_failure_policy": policy})
            config = dataclasses.replace(config, kv_transfer_config=transfer)
        self.config = config
        resolved = resolve(
            config,
            model_max_len=MODEL_LEN,
            num_kv_blocks=workload.num_blocks,
            num_host_blocks=workload.num_host_blocks,
        )
        self.manager = create_manager(resolved)
        self.connector: ScriptedConnector | None = None
        if workload.has_connector:
            self.connector = ScriptedConnector(config, workload.runner.look, config.block_size)
        self.scheduler = create_scheduler(resolved, self.manager, self.connector)
        for feature in self.scheduler.features:
            if isinstance(feature, StepTimeLimit) and workload.is_scripted:
                feature.step_times = MillisecondPerToken()

    @property
    def requests(self) -> dict[str, Request]:
        """All unfinished requests."""
        return self.scheduler.queues.requests

    @property
    def running(self) -> list[Request]:
        """Those that run."""
        return self.scheduler.queues.running

    def add(self, source: EngineRequest, number: int) -> None:
        """Add a request, or raise ValueError."""
        request = Request(source, number)
        if self.config.scheduling_policy == "fcfs":
            request.order = (0, number)
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        """End a request."""
        assert self.scheduler.abort_request(name)

    def plan(self) -> SchedulerOutput:
        """Plan a step."""
        return self.scheduler.schedule()

    def update(
        self, plan: SchedulerOutput, result: ModelRunnerOutput, seconds: float
    ) -> list[EngineOutput]:
        """Take the result of a step that took so long."""
        outputs = self.scheduler.update_from_output(plan, result)
        self.scheduler.took(plan, seconds)
        return outputs

    def take_transfers(self) -> list[EngineOutput]:
        """Handle what the connector has received."""
        assert self.connector is not None
        received = self.connector.take_output()
        for name in received.aborts:
            self.scheduler.abort_request(name)
        kv_transfer = next(each for each in self.scheduler.features if isinstance(each, KVTransfer))
        return kv_transfer.update_from_transfers(received, self.scheduler)

    def state(self) -> dict[str, Any]:
        """All that later decisions depend on."""
        scheduler = self.scheduler
        queues = scheduler.queues
        receiving = queues.by_status[RequestStatus.WAITING_FOR_REMOTE_KVS]
        manager = self.manager
        stats = scheduler.stats
        state: dict[str, Any] = {
            "queues": [
                [request.request_id for request in queue]
                for queue in (queues.waiting, receiving, queues.running, queues.swapped)
            ],
            "requests": [self._facts_of(request) for request in self.requests.values()],
            "tables": [manager.tables, manager.host_tables, manager.held],
            "pools": [
                [
                    pool.ref_counts,
                    list(pool.free_block_queue),
                    [(key.hex(), block) for key, block in pool.cached_blocks.items()],
                    pool.num_evictions,
                ]
                for pool in (manager.pool, manager.host_pool)
            ],
            "counters": [
                scheduler.num_preemptions,
                scheduler.num_queried_tokens,
                scheduler.num_hit_tokens,
                stats.num_external_queried_tokens,
                stats.num_external_hit_tokens,
            ],
        }
        if self.connector is not None:
            state["transfers"] = [
                self.connector.offers,
                sorted(self.connector.coming),
                sorted(self.connector.going),
            ]
        if self.config.speculative is not None:
            state["drafts"] = stats.spec_decoding
        return state

    def _facts_of(self, request: Request) -> list[Any]:
        return [
            request.request_id,
            request.token_ids,
            request.num_computed_tokens,
            request.num_pending_tokens,
            request.extra_token_ids,
            request.num_sent_tokens,
            request.max_num_tokens,
            request.num_cached_tokens,
            request.finish_reason,
            request.order,
            request.status.value,
            request.num_external_tokens,
            request.num_preemptions,
            request.stop_reason,
            request.kv_transfer_params,
        ]

    def record_of(self, plan: SchedulerOutput) -> list[Any]:
        """Return a plan as plain data."""
        return [
            [self._share_of(scheduled, plan) for scheduled in plan.requests],
            plan.removed_ids,
            plan.swap_out,
            plan.swap_in,
            plan.preempted,
            plan.admitted,
            plan.resumed,
            plan.blocked_by,
            plan.num_prefill_tokens,
            plan.num_tokens,
            plan.num_samples,
        ]

    def _share_of(self, scheduled: Any, plan: SchedulerOutput) -> list[Any]:
        return [
            scheduled.request_id,
            scheduled.start,
            scheduled.num_tokens,
            scheduled.new_token_ids,
            list(scheduled.new_block_ids),
            scheduled.sampling_params is not None,
            scheduled.num_prompt_tokens,
            scheduled.samples,
            scheduled.last_is_pending,
            list(scheduled.extra_token_ids),
            num_drafts_wanted(plan).get(scheduled.request_id, 0),
        ]

    def record_of_output(self, output: EngineOutput) -> list[Any]:
        """Return an output as plain data."""
        return [
            output.request_id,
            output.new_token_ids,
            output.prompt_logprobs_start,
            output.finish_reason,
            output.stop_reason,
            output.num_cached_tokens,
            output.kv_transfer_params,
            output.error,
        ]

    def fail(self, result: ModelRunnerOutput, name: str) -> None:
        """Say in a step's result that no token could be sampled for a request."""
        result.sampled[name] = [SampledToken(0, error="no token fits")]


class Workload:
    """A random life of a scheduler.

    Attributes:
        events: how often what happened.
        digest: of all that happened so far.
    """

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        choose = draw.choice
        method = choose(["", "", "", "ngram", "draft_model"])
        self.is_large = draw.random() < (0.6 if method else 0.25)
        self.num_blocks = draw.randint(20, 60) if self.is_large else draw.randint(4, 14)
        self.num_host_blocks = choose([0, 4, 40])
        self.has_connector = draw.random() < 0.3
        self.fails = draw.random() < 0.5
        self.is_scripted = draw.random() < 0.6
        stages = choose([1, 1, 1, 2, 3])
        is_ahead = stages == 1 and draw.random() < 0.5
        self.config = self._settings(method, stages, is_ahead)
        self.steps_ahead = stages - 1 or int(is_ahead)
        self.salts: dict[str, str | None] = {}
        self.runner = ContentRunner(self.config.block_size, self.salts)
        self.runner.random = random.Random(seed + 1)
        self.world = World(self)
        self.params: dict[str, SamplingParams] = {}
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.count = 0
        self.events: Counter[str] = Counter()
        self.digest = hashlib.sha256()

    def _settings(self, method: str, stages: int, is_ahead: bool) -> EngineConfig:
        draw = self.draw
        choose = draw.choice
        policy = choose(["chunked", "chunked", "chunked", "prefill_first", "static"])
        if method and policy == "static":
            policy = "chunked"
        if method and stages > 1:
            method = "ngram"
        speculative: dict[str, Any] = {
            "method": method,
            "num_speculative_tokens": draw.randint(1, 5),
            "prompt_lookup_min": 1,
        }
        if method == "draft_model":
            speculative["model"] = "the content runner's"
        if method and draw.random() < 0.5:
            speculative["num_speculative_tokens_per_batch_size"] = [[1, 8, draw.randint(1, 4)]]
        max_num_seqs = draw.randint(2, 12 if self.is_large else 6)
        is_cut = draw.random() < 0.75
        return EngineConfig(
            block_size=choose([1, 2, 3, 4]),
            num_kv_blocks=self.num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + choose([0, 1, 3, 20]) if is_cut else None,
            long_prefill_token_threshold=choose([0, 0, 1, 2, 5]),
            enable_chunked_prefill=is_cut,
            batching_policy=policy,
            preemption_mode=choose(["recompute", "swap"]),
            enable_prefix_caching=draw.random() < 0.8,
            scheduling_policy=choose(["fcfs", "priority"]),
            pipeline_parallel_size=stages,
            async_scheduling=is_ahead,
            max_step_ms=choose([None, None, 1, 2, 5]),
            speculative_config=speculative if method else None,
        )

    def live(self) -> None:
        """Let requests come, run and go, until all have ended."""
        whats = [self.add_some] * 3 + [self.abort, self.use_an_id_again] + [self.come] * 3
        whats += [self.push, self.push, self.go]
        if self.draw.random() < 0.1:
            whats.append(self.world.manager.pool.reset_prefix_cache)
        for _ in range(self.draw.randint(20, 60)):
            self.draw.choice(whats)()
            self.note(self.world.state())
            for _ in range(self.draw.randint(0, 5)):
                self.step()
        for _ in range(6000):
            if self.step():
                continue
            self.come()
            self.go()
            if not self.world.requests and not self.world.manager.held:
                break
        else:
            raise AssertionError("a request starves")
        pool = self.world.manager.pool
        assert pool.num_free == pool.num_blocks, "blocks are lost"

    def note(self, fact: Any) -> None:
        """Let a fact count for the digest."""
        self.digest.update(msgspec.json.encode(fact))

    # ---------------------------------------------------------------- what happens

    def add_some(self) -> None:
        """Some requests that begin alike come."""
        draw = self.draw
        longest = 45 if self.is_large else 20
        prompt = [draw.randint(0, 1) for _ in range(draw.randint(1, longest))]
        for i in range(draw.randint(1, 4)):
            self.add(prompt[: max(1, len(prompt) - i)], f"r{self.count}")

    def use_an_id_again(self) -> None:
        """A request comes whose id was, or is, in use."""
        if self.salts:
            self.add([0], self.draw.choice(sorted(self.salts)))

    def add(self, prompt: list[int], name: str) -> None:
        """A request comes."""
        draw = self.draw
        options: dict[str, Any] = {"max_tokens": draw.randint(1, 25)}
        if draw.random() < 0.15:
            options["presence_penalty"] = 0.5
        if draw.random() < 0.1:
            options["prompt_logprobs"] = 1
        if draw.random() < 0.2:
            options["min_tokens"] = min(3, options["max_tokens"])
        if draw.random() < 0.2:
            options["structured_outputs"] = {"regex": "[ab]*"}
        params = SamplingParams(**options)
        salt = draw.choice([None, None, None, "x"])
        salt = self.salts.get(name, salt)
        source = EngineRequest(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=params,
            eos_token_ids=draw.choice([[], [3]]),
            priority=draw.randint(0, 2),
            cache_salt=salt,
        )
        offered = min(draw.choice([0, 3, 99, 99]), len(prompt))
        is_wanted = draw.random() < 0.5
        connector = self.world.connector
        if connector is not None and name not in self.world.requests:
            connector.offers[name] = offered
            (connector.wanted.add if is_wanted else connector.wanted.discard)(name)
        try:
            self.world.add(source, self.count)
        except ValueError as error:
            self.note(str(error))
            self.events["refused"] += 1
            return
        self.count += 1
        self.params[name] = params
        self.salts[name] = salt

    def abort(self) -> None:
        """A client gives up."""
        if self.world.requests:
            self.events["aborts"] += 1
            self.world.abort(self.draw.choice(sorted(self.world.requests)))

    def come(self) -> None:
        """KV from elsewhere arrives, perhaps not all of it."""
        connector = self.world.connector
        if connector is None or not connector.coming:
            return
        name = self.draw.choice(sorted(connector.coming))
        transfer = connector.coming[name]
        size = self.config.block_size
        invalid = set[int]()
        mine = transfer.table[transfer.positions.start // size :]
        if self.draw.random() < 0.4:
            invalid = set(self.draw.sample(mine, self.draw.randint(1, len(mine))))
        self.runner.receive(
            transfer.table,
            transfer.positions,
            transfer.request.token_ids,
            self.salts[name],
            invalid,
        )
        self.events["arrivals from elsewhere"] += 1
        connector.come(name, invalid)

    def push(self) -> None:
        """Another engine begins to read the blocks of a running request."""
        connector = self.world.connector
        if connector is None:
            return
        running = [r for r in self.world.running if r.request_id not in connector.going]
        if running and self.draw.random() < 0.3:
            request = self.draw.choice(running)
            connector.read(request, self.world.manager.tables[request.request_id])

    def go(self) -> None:
        """Another engine has read what it wanted."""
        connector = self.world.connector
        if connector is None or not connector.going:
            return
        self.events["reads by others"] += 1
        transfer = connector.go(self.draw.choice(sorted(connector.going)))
        found = self.runner.look(transfer.table, len(transfer.content))
        assert found == transfer.content, "the reader has seen somebody else's content"

    # ---------------------------------------------------------------- steps

    def step(self) -> bool:
        """Run a step; return False if nothing is to be computed."""
        world = self.world
        if world.connector is not None:
            self.note([world.record_of_output(output) for output in world.take_transfers()])
        plan = world.plan()
        self.count_events(plan)
        self.note(world.record_of(plan))
        self.note(world.state())
        if plan.empty or not world.requests:
            if self.in_flight:
                self.take_result()
                return True
            return False
        result = self.runner.execute_model(plan)
        self.disturb(plan, result)
        self.in_flight.append((plan, result))
        while len(self.in_flight) > self.steps_ahead:
            self.take_result()
        return True

    def disturb(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Add errors, and log-probabilities of prompts."""
        for scheduled in plan.requests:
            name = scheduled.request_id
            if self.params[name].prompt_logprobs is not None and scheduled.start < 5:
                result.prompt_logprobs[name] = [TokenLogprobs([1], [0.0], 1)]
            if name in result.sampled and self.draw.random() < 0.003:
                self.world.fail(result, name)

    def take_result(self) -> None:
        """Give the oldest step's result to the scheduler."""
        plan, result = self.in_flight.popleft()
        seconds = self.draw.choice([0.01, 0.011, 0.02, 0.001])
        outputs = self.world.update(plan, result, seconds)
        self.note([self.world.record_of_output(output) for output in outputs])
        self.events["outputs"] += len(outputs)
        for output in outputs:
            self.events[f"ends: {output.finish_reason}"] += output.finish_reason is not None
        self.note(self.world.state())
        self.world.scheduler.check_invariants()

    def count_events(self, plan: SchedulerOutput) -> None:
        """Count what a plan has in it."""
        events = self.events
        events["steps"] += 1
        events["empty plans"] += plan.empty
        events[f"blocked by: {plan.blocked_by}"] += 1
        for how in plan.preempted.values():
            events[f"preempted: {how}"] += 1
        events["resumed"] += len(plan.resumed)
        events["prefix hits"] += sum(map(bool, plan.admitted.values()))
        for scheduled in plan.requests:
            events["shares"] += 1
            events["shares with pending tokens"] += scheduled.last_is_pending
            events["shares that sample more than once"] += scheduled.samples > 1


def digest_of(seed: int, events: Counter[str] | None = None) -> str:
    """Let a workload live, and return its digest."""
    workload = Workload(seed)
    workload.live()
    if events is not None:
        events.update(workload.events)
    return workload.digest.hexdigest()[:16]


def stored() -> list[str]:
    """Return the stored digests, by seed."""
    digests: list[str] = json.loads(STORED.read_text(encoding="utf-8"))
    return digests


def differences(seeds: range) -> Iterator[int]:
    """Yield the seeds whose digests are not the stored ones."""
    for seed, wanted in zip(seeds, itertools.islice(stored(), seeds.start, None), strict=False):
        if digest_of(seed) != wanted:
            yield seed


def main() -> None:
    """Compare or store all digests, and print what happened in the workloads."""
    events: Counter[str] = Counter()
    digests = [digest_of(seed, events) for seed in range(NUM_WORKLOADS)]
    if "--store" in sys.argv[1:]:
        STORED.write_text(json.dumps(digests, indent=0) + "\n", encoding="utf-8")
    for name, number in sorted(events.items()):
        print(f"{number:>9,} {name}")
    changed = [seed for seed, was in enumerate(stored()) if digests[seed] != was]
    print(f"changed: {changed}" if changed else "no difference")


if __name__ == "__main__":
    main()
