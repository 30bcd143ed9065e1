"""Many simulations: all combinations of settings, or the highest load that a fleet keeps up
with."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence

import msgspec

from nanovllm.data.errors import UsageError
from nanovllm.data.json import JsonObject
from nanovllm.simulate.machines import file_of
from nanovllm.simulate.report import Summary, num_lost
from nanovllm.simulate.settings import NEEDED_FLAGS, flag_of, name_of, parse_role

Settings = Mapping[str, object]
# The times that the frontier compares.
TTFT = "p99_ttft_ms"
TPOT = "p99_tpot_ms"
# Two rates of `highest_load` that differ by less are equal.
PRECISION = 1.02
MAX_FACTOR = 2.0**20


def combinations(lists: Mapping[str, Sequence[object]]) -> list[dict[str, object]]:
    """Return each combination of one value per name."""
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


def with_point(settings: Settings, point: Settings) -> dict[str, object]:
    """Return settings with those of a point in their place. A name with dots, such as
    "prefill_config.machine", is a part of a setting that is JSON. Settings that have no effect at
    this point alone, such as the bandwidth of a store of size 0, have their defaults.

    Raises:
        UsageError: a setting that has parts in the point is not a JSON object.
    """
    found = dict(settings)
    for name, value in sorted(point.items(), key=lambda item: "." in item[0]):
        whole, *parts = name.split(".")
        if not parts:
            found[whole] = value
            continue
        flag = flag_of(whole)
        try:
            data = msgspec.json.decode(str(found.get(whole) or "{}"), type=JsonObject)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{flag} must be a JSON object, got {found[whole]!r}") from error
        inner = data
        for part in parts[:-1]:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise UsageError(f"{flag} must have a JSON object as {part}, got {inner!r}")
        inner[parts[-1]] = value
        found[whole] = json.dumps(data)
    for name in idle_settings(found, point):
        found.pop(name, None)
    return found


def idle_settings(settings: Settings, point: Settings) -> list[str]:
    """Return the settings that have no effect, since a point sets nothing where they need it."""
    idle = [
        name_of(flag)
        for flag, needed in NEEDED_FLAGS.items()
        if name_of(needed) in point and not settings[name_of(needed)]
    ]
    sizes = ("kv_offloading_size", "kv_store_size")
    modes = ("preemption_mode", "prefill_config", "decode_config")
    uses_host = any(settings.get(name) for name in sizes) or any(
        "swap" in str(settings.get(name)) for name in modes
    )
    is_swept = any(name in point for name in (*sizes, *modes))
    return [*idle, "kv_offloading_bandwidth"] if is_swept and not uses_host else idle


def with_files(settings: Settings) -> dict[str, object]:
    """Return settings with the fields of the files that name machines, so that they mean the same
    in other processes and on other nodes.

    Raises:
        UsageError: such a file cannot be read; or see `parse_role`.
    """
    found = dict(settings)
    if isinstance(machine := found.get("machine"), str):
        found["machine"] = file_of(machine) or machine
    for role in ("prefill_config", "decode_config"):
        if text := found.get(role):
            own = parse_role(flag_of(role), str(text))
            found[role] = json.dumps(with_files(own), default=str)
    return found


def run_all(
    run: Callable[[Settings], Summary],
    points: Sequence[Settings],
    num_processes: int | None = None,
    use_ray: bool = False,
) -> list[Summary]:
    """Return the summary of each point, on all cores, or on all nodes of a Ray cluster if there is
    one. A point whose settings are impossible has an "error" instead. Files of machines are read by
    this process, and sent to the others.

    Args:
        run: a function of a module, which other processes can import.
        num_processes: processes on this machine, at most (default: one per core).
        use_ray: connect to a cluster, or start one; otherwise use it if this program has already.

    Raises:
        UsageError: Ray is wanted, and not installed; all points are impossible; or see
            `with_files`.
    """
    jobs = [(run, with_files(point)) for point in points]
    num_processes = min(len(points), num_processes or _num_cores())
    if use_ray or ("ray" in sys.modules and sys.modules["ray"].is_initialized()):
        summaries = _run_on_ray(jobs)
    elif num_processes <= 1:
        summaries = list(map(_run, jobs))
    else:
        summaries = _run_on_cores(jobs, num_processes)
    if all("error" in summary for summary in summaries):
        raise UsageError(str(summaries[0]["error"]))
    return summaries


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _run(job: tuple[Callable[[Settings], Summary], Settings]) -> Summary:
    run, point = job
    try:
        return run(point)
    except UsageError as error:
        return {"error": str(error)}


def _run_on_cores(
    jobs: Sequence[tuple[Callable[[Settings], Summary], Settings]], num_processes: int
) -> list[Summary]:
    """Run jobs in processes, which end with this one, however it ends.

    Raises:
        UsageError: one has ended before, which the kernel does when memory is short.
    """
    # A browser, in which single simulations run, too, has no processes.
    import multiprocessing
    import signal
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(num_processes, context, initializer=_end_with_parent) as pool:
        # Ctrl-C interrupts this process only: others inherit the mask.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            results = [pool.submit(_run, job) for job in jobs]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            return [each.result() for each in results]
        except BaseException as error:  # Ctrl-C, too
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            if isinstance(error, BrokenProcessPool):
                raise UsageError(
                    "a process of --sweep has ended early, perhaps since memory is short: lower "
                    "--processes"
                ) from error
            raise


def _end_with_parent() -> None:
    """Let this process end as soon as the one that has started it has ended."""
    import multiprocessing
    import threading

    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _run_on_ray(jobs: Sequence[tuple[Callable[[Settings], Summary], Settings]]) -> list[Summary]:
    try:
        import ray
    except ImportError as error:
        raise UsageError("--ray needs Ray: pip install 'nanovllm[ray]'") from error
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    remote = ray.remote(_run)
    summaries: list[Summary] = ray.get([remote.remote(job) for job in jobs])
    return summaries


def mark_frontier(summaries: Sequence[Summary]) -> None:
    """Set "on_frontier" in each summary: no other one has a P99 TTFT and a P99 TPOT of which one is
    shorter, and none longer. Times of requests that were lost or cut are missing, so only those
    with the smallest share of them are compared."""
    for summary in summaries:
        summary["on_frontier"] = False
    done = [summary for summary in summaries if summary.get("completed")]
    least = min(map(_missing_share, done), default=0.0)
    compared = [summary for summary in done if _missing_share(summary) == least]
    best = (float("inf"), float("inf"))
    for ttft, tpot, summary in sorted(
        ((number_in(each, TTFT), number_in(each, TPOT), each) for each in compared),
        key=lambda row: row[:2],
    ):
        if tpot < best[1]:
            best = (ttft, tpot)
        summary["on_frontier"] = (ttft, tpot) == best


def _missing_share(summary: Summary) -> float:
    """Return the share of the requests that were lost, or whose answers were cut."""
    lost = num_lost(summary)
    cut = number_in(summary, "num_cut") if "num_cut" in summary else 0
    return (lost + cut) / (lost + number_in(summary, "completed"))


def number_in(summary: Summary, name: str) -> float:
    """Return a number of a summary."""
    value = summary[name]
    assert isinstance(value, int | float)
    return value


def highest_load(run: Callable[[float], Summary | None], start: float) -> tuple[float, Summary]:
    """Find the highest load that a fleet keeps up with: to within 2 %, if a higher load never
    helps.

    Args:
        run: simulates a load; returns None if the fleet does not keep up.
        start: the load to begin with.

    Returns:
        The load, and its summary.

    Raises:
        UsageError: no load, or every load.
    """
    kept: Summary = {}
    low = high = 0.0
    load = start
    while not low or not high or high / low > PRECISION:
        if not start / MAX_FACTOR < load < start * MAX_FACTOR:
            raise UsageError(
                f"the objectives of --goodput are {'always' if low else 'never'} kept, even at a "
                f"load of {load:.3g}: change them"
            )
        if (summary := run(load)) is None:
            high = load
        else:
            low = load
            kept = summary
        load = (low * high) ** 0.5 if low and high else low * 2 or high / 2
    return low, kept
