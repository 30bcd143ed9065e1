"""One simulation, from settings to a summary as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from nanovllm.assembly.flags import parse_numbers, words_of
from nanovllm.data.checks import did_you_mean
from nanovllm.data.config import EngineConfig
from nanovllm.data.errors import UsageError
from nanovllm.simulate.arrivals import SyntheticWorkload, create_workload
from nanovllm.simulate.disaggregated import DisaggregatedFleet
from nanovllm.simulate.fleet import Fleet
from nanovllm.simulate.links import Links
from nanovllm.simulate.outages import UnreliableFleet, idle_outages
from nanovllm.simulate.plan import FleetPlan, plan_fleet
from nanovllm.simulate.report import KV_LINK, TIMES, Summary, notes_of, summarize
from nanovllm.simulate.settings import DEFAULT_MODEL, FleetConfig, create, known_settings
from nanovllm.simulate.sources import sources_of, warnings_of
from nanovllm.simulate.sweep import PRECISION, highest_load, number_in
from nanovllm.simulate.tiers import Tiers
from nanovllm.simulate.traces import read_workload
from nanovllm.simulate.workload import SECOND, Workload

# A fleet sustains a load if requests arrive for this number of times as long as a request takes.
# In less time, many of them fit in the fleet before any has to wait.
ENOUGH_TIMES = 20
# Requests or, if several arrive together, bursts or sessions: with fewer, the rate depends on how
# their arrivals were drawn.
ENOUGH_STARTS = 500
# Runs of one rate, each with twice the requests of the one before. If the time that a request takes
# grows with them, requests wait for each other, and the fleet does not sustain the rate.
MAX_RUNS = 3
# Seconds by which requests take longer, at most, for each second by which they arrive later. With a
# rate that is 4 % too high, they take longer by 0.04 s, whatever the objectives say about it.
MAX_GROWTH = 0.01


def simulate(settings: Mapping[str, object], perfetto: Path | None = None) -> Summary:
    """Simulate a fleet; returns its summary (`report.summarize`).

    Args:
        settings: fields of `FleetConfig` and `SyntheticWorkload`, and those of `EngineConfig` that
            `ENGINE_FLAGS` lists. Without a model, it is llama-3.1-8b.
        perfetto: a file to write all steps to; see `perfetto.FleetRecorder`.

    Raises:
        UsageError: an unknown setting, or one that makes no sense, alone or with another.
    """
    known = known_settings()
    if unknown := [name for name in settings if name not in known]:
        raise UsageError(f"there is no setting {unknown[0]!r}{did_you_mean(unknown[0], known)}")
    config = create(FleetConfig, settings)
    goodput = parse_numbers("--goodput", config.goodput, TIMES, "a time in ms, such as ttft:200")
    workload = _workload(config, settings)
    plan, inherited, trace_notes = _plan(config, settings, workload)
    fleet = plan.create_fleet(workload, fast=perfetto is None)
    tiers = plan.create_tiers(fleet)
    links = _links_of(fleet, tiers)
    if perfetto is None:
        result = fleet.run(workload)
    else:
        from nanovllm.simulate.perfetto import FleetRecorder

        recorder = FleetRecorder(fleet, links)
        result = fleet.run(workload)
        recorder.write(perfetto, result.duration)
    summary = summarize(
        result,
        goodput=goodput,
        engines=plan.engines,
        links=links,
        dollars_per_hour=sum(each.price_per_hour for each in plan.engines),
    )
    if config.acceptance:
        for name in ("num_draft_tokens", "num_accepted_tokens"):
            summary[f"spec_decode_{name}"] = sum(getattr(each, name) for each in result.replicas)
    if tiers is not None:
        num_queried = sum(each.num_queried_tokens for each in result.replicas)
        summary |= tiers.summary(plan.block_size, num_queried)
    warnings = dict.fromkeys(words for kind in plan.kinds for words in warnings_of(kind.cost))
    notes = [*_notes(summary, plan), *trace_notes, *warnings]
    if isinstance(fleet, UnreliableFleet) and fleet.outages:
        notes += idle_outages(fleet.outages, fleet.groups, result.duration)
        _add_outages(summary, fleet, result.duration)
    if notes:
        summary["notes"] = notes
    sources = sources_of([(str(kind.config.machine), kind.cost) for kind in plan.kinds])
    if inherited:
        summary["from_trace"] = inherited
    return {"setup": plan.description, "sources": sources, **summary}


def _plan(
    config: FleetConfig, settings: Mapping[str, object], workload: Workload
) -> tuple[FleetPlan, dict[str, object], list[str]]:
    """Return the plan of a fleet, the settings that it has from the trace of a workload, and notes
    about them.

    Raises:
        UsageError: see `plan_fleet`. The message has the settings of the trace that it mentions.
    """
    if workload.recorded is None:
        return plan_fleet(config, _engine(config, settings)), {}, []
    # Here, since other workloads do not need it.
    from nanovllm.simulate.recorded import as_flags, inherit

    inherited, notes = inherit(workload.recorded, settings)
    try:
        return plan_fleet(config, _engine(config, {**inherited, **settings})), inherited, notes
    except UsageError as error:
        words = str(error).replace("-", "_")
        named = {name: value for name, value in inherited.items() if name in words}
        if not named:
            raise
        raise UsageError(f"{error}; the trace has {as_flags(named)}") from error


def _notes(summary: Summary, plan: FleetPlan) -> list[str]:
    """Return what a reader of the summary might miss."""
    num_cut = summary.get("num_cut", 0)
    if not num_cut:
        return []
    words = "answer was cut" if num_cut == 1 else "answers were cut"
    resolved = plan.kinds[-1].resolved
    limit = resolved.max_request_tokens
    flag = "--max-model-len" if limit == resolved.max_model_len else "--num-kv-blocks"
    return [f"{num_cut:,} {words} by {flag}: prompt and output have {limit:,} tokens at most"]


def _add_outages(summary: Summary, fleet: UnreliableFleet, duration: int) -> None:
    """Set "outages" of each engine: from when to when it was not ready, in seconds."""
    replicas = summary["replicas"]
    assert isinstance(replicas, list)
    for replica, group in zip(replicas, fleet.groups, strict=True):
        replica["outages"] = [
            {"begin": each.begin / SECOND, "end": None if each.end is None else each.end / SECOND}
            for each in sorted(fleet.outages, key=lambda outage: outage.begin)
            if each.replica in group and each.begin <= duration
        ]


def find_load(settings: Mapping[str, object]) -> Summary:
    """Find the highest load that keeps `FleetConfig.goodput`, and that the fleet sustains; returns
    the summary of this load, and the load as its request_rate or speedup.

    Raises:
        UsageError: see `simulate` and `sweep.highest_load`.
    """
    config = create(FleetConfig, settings)
    if not config.goodput:
        raise UsageError("--find-load needs --goodput, the times to keep: such as ttft:200 tpot:50")
    if config.workload is None:
        return _find_rate(settings, config.slo_attainment)
    last = (
        max(each.arrival for each in read_workload(config.workload, limit=config.limit).requests)
        / SECOND
    )

    def run(speedup: float) -> Summary | None:
        summary = simulate({**settings, "speedup": speedup})
        keeps = number_in(summary, "slo_attainment") >= config.slo_attainment
        return summary if keeps and _is_sustained(summary, last / speedup) else None

    speedup, summary = highest_load(run, config.speedup)
    beyond = simulate({**settings, "speedup": speedup * PRECISION})
    if number_in(beyond, "slo_attainment") >= config.slo_attainment:
        note = (
            "the fleet may sustain a higher speedup, but the file is too short to tell: requests "
            f"would arrive for less than {ENOUGH_TIMES} times as long as a request takes"
            if _times(beyond, last / speedup / PRECISION) < ENOUGH_TIMES
            else "a higher speedup keeps the objectives, too, but requests take longer and longer"
        )
        summary["notes"] = [*notes_of(summary), note]
    return {"speedup": speedup, **summary}


def _find_rate(settings: Mapping[str, object], attainment: float) -> Summary:
    """Find the highest request rate, with as many requests as are necessary."""
    given = create(SyntheticWorkload, settings)
    num_prompts = max(given.num_prompts, ENOUGH_STARTS * given.burst_size * given.num_turns)
    # Until the first session ends, and after the last one has begun, the rate is lower.
    ramps = 2 * (given.num_turns - 1) * given.turn_interval

    def run(rate: float) -> Summary | None:
        nonlocal num_prompts
        number = max(num_prompts, math.ceil(2 * rate * ramps))
        for _ in range(MAX_RUNS):
            summary = simulate({**settings, "request_rate": rate, "num_prompts": number})
            if number_in(summary, "slo_attainment") < attainment:
                return None
            if _is_sustained(summary, number / rate - ramps):
                num_prompts = number
                return summary
            number *= 2
        return None

    # From a low rate on, doubling it at most doubles the number of requests in the fleet.
    rate, summary = highest_load(run, min(1.0, given.request_rate))
    if num_prompts > given.num_prompts:
        summary["notes"] = [
            *notes_of(summary),
            f"--find-load served {num_prompts:,} requests, as with --num-prompts {num_prompts}: "
            f"{given.num_prompts:,} are too few to tell which rate the fleet sustains",
        ]
    return {"request_rate": rate, **summary}


def _is_sustained(summary: Summary, seconds: float) -> bool:
    """Return whether a fleet sustains a load.

    Args:
        seconds: in which requests arrive.
    """
    is_long = _times(summary, seconds) >= ENOUGH_TIMES
    return is_long and number_in(summary, "e2el_growth") <= MAX_GROWTH


def _times(summary: Summary, seconds: float) -> float:
    """Return how many times as long as a request these seconds are."""
    return 1000 * seconds / number_in(summary, "mean_e2el_ms")


def _links_of(fleet: Fleet, tiers: Tiers | None) -> dict[str, Links]:
    """Return the links over which KV is sent, by name."""
    found = {} if tiers is None else {"store": tiers.store, "host link": tiers.host}
    return found | ({KV_LINK: fleet.links} if isinstance(fleet, DisaggregatedFleet) else {})


def _engine(config: FleetConfig, settings: Mapping[str, object]) -> EngineConfig:
    """Return the settings of an engine."""
    engine = {"model": DEFAULT_MODEL, **settings, "data_parallel_size": 1}
    if config.kv_store_size and not settings.get("kv_offloading_size"):
        engine["kv_connector"] = "pool"
    return create(EngineConfig, engine)


def _workload(config: FleetConfig, settings: Mapping[str, object]) -> Workload:
    synthetic = create(SyntheticWorkload, settings)
    if config.workload is None:
        return create_workload(synthetic, _engine(config, settings).block_size)
    if idle := words_of(synthetic):
        flag = idle[0].partition("=")[0]
        hint = "; --limit is the number of rows to read" if flag == "--num-prompts" else ""
        raise UsageError(
            f"{flag} has no effect with --workload: it is for synthetic workloads{hint}"
        )
    return read_workload(config.workload, config.speedup, config.limit)
