"""`nanovllm bench`: speed, start-up and memory, beside other engines on the same machine.

Every engine gets the same token ids, the same number of threads and processes of its own; engines take turns, run by
run, and are compared pair by pair, because a machine that others use as well is never the same twice.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import os
import pathlib
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import rich.console

from nanovllm.data.config import EngineConfig
from nanovllm.lab.bench.engines import ENGINES, OFFLINE_ENGINES, SERVING_ENGINES, EngineSettings
from nanovllm.lab.bench.machine import measure_limits, usable_cores
from nanovllm.lab.bench.workloads import NAMED, Mode, Workload, custom_workload, endless_workload

if TYPE_CHECKING:
    from nanovllm.lab.bench.engines import EngineFailed
    from nanovllm.lab.bench.report import Context
    from nanovllm.lab.bench.suite import Results, Suite

MAX_MODEL_LEN, KV_CACHE_MEMORY = 2048, "2GiB"
DEFAULT_REPEATS, DEFAULT_MINUTES = 3, 9.0
DEFAULT_PAIRS, DEFAULT_STREAMS, DEFAULT_WINDOW = 100, 16, 1.0
_CUSTOM = ("input_len", "output_len", "batch_size", "num_prompts", "request_rate", "max_concurrency")
#: Options of some benchmarks only.
_OWNERS = {
    "dry_run": ("gpu", "parallel", "kv"),
    "minutes": ("gpu",),
    "part": ("parallel", "kv"),
    **dict.fromkeys(("pairs", "streams", "window"), ("watch",)),
}
#: What benchmarks that have parts let one choose of the engine.
_PARTS_SETTINGS = ("model", "revision", "dtype", "seed")


class BenchError(ValueError):
    """The command line asks for something that cannot be measured; the message says what could."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser the flags of `bench`."""
    parser.add_argument(
        "benchmark",
        choices=["latency", "throughput", "serve", "all", "watch", "parallel", "kv", "gpu"],
        help="what to measure; watch: what it costs nanovllm's server that somebody reads its /trace; parallel: what it "
        "costs that several processes compute together; kv: what it costs, and gains, that KV is moved and kept; gpu: prove and measure everything that an NVIDIA GPU is needed for",
    )
    group = parser.add_argument_group("benchmark")
    group.add_argument(
        "--engine",
        action="append",
        metavar="NAMES",
        help="nanovllm, hf (transformers) or vllm; several, with commas or by repeating the flag, run in turn, and the "
        "first is compared with the others (default: nanovllm)",
    )
    group.add_argument("--vllm-python", metavar="PATH", help="interpreter of the environment that has vLLM")
    group.add_argument(
        "--workload",
        action="append",
        metavar="NAMES",
        help=f"some of {', '.join(NAMED)} (default: all that the benchmark has)",
    )
    group.add_argument("--input-len", type=int, metavar="TOKENS", help="a workload of your own: prompt length")
    group.add_argument("--output-len", type=int, metavar="TOKENS", help="the same: output tokens")
    group.add_argument("--batch-size", type=int, metavar="N", help="the same, latency: requests in the batch")
    group.add_argument("--num-prompts", type=int, metavar="N", help="the same, throughput and serve: requests")
    group.add_argument("--request-rate", type=float, metavar="R", help="serve: requests a second (default: inf)")
    group.add_argument("--max-concurrency", type=int, metavar="N", help="serve: requests at once (default: all)")
    group.add_argument(
        "--repeats", type=int, default=DEFAULT_REPEATS, metavar="N", help="runs of each (default: %(default)s)"
    )
    group.add_argument("--threads", type=int, metavar="N", help="cores an engine computes on (default: all)")
    group.add_argument(
        "--pairs",
        type=int,
        metavar="N",
        help=f"watch: pairs of windows, and as many that nobody watches (default: {DEFAULT_PAIRS})",
    )
    group.add_argument("--streams", type=int, metavar="N", help=f"watch: requests at once (default: {DEFAULT_STREAMS})")
    group.add_argument(
        "--window", type=float, metavar="S", help=f"watch: seconds of a window (default: {DEFAULT_WINDOW:g})"
    )
    group.add_argument(
        "--dry-run",
        action="store_const",
        const=True,
        help="gpu: the same code on the CPU, with tiny sizes; no measurement; parallel, kv: tiny sizes, likewise",
    )
    group.add_argument(
        "--part",
        action="append",
        metavar="NAMES",
        help="parallel: some of orders, executor, all-reduce, pipeline, experts, weights, throughput; kv: some of transport, "
        "router, latency, first-token, tiers (default: all)",
    )
    group.add_argument("--minutes", type=float, metavar="M", help="gpu: how long it may take (default: 9)")
    group.add_argument("--json", metavar="FILE", help="write every run to this file")
    group.add_argument("--markdown", metavar="FILE", help="write the tables to this file")
    EngineConfig.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and report; returns the exit code: 2 for a bad command line, 1 if an engine failed."""
    from nanovllm.models.config import UnsupportedModelError

    others = {"gpu": _measure_gpu, "parallel": _measure_parts, "kv": _measure_parts, "watch": _measure_watched}
    measure = others.get(arguments.benchmark, _measure)
    try:
        for name, owners in _OWNERS.items():
            if arguments.benchmark not in owners and getattr(arguments, name) is not None:
                names = " and ".join(f"`bench {owner}`" for owner in owners)
                _refuse(arguments, name, f"it belongs to {names}")
        return measure(arguments)
    except (BenchError, UnsupportedModelError) as error:
        print(f"nanovllm bench: error: {error}", file=sys.stderr)
        return 2


def _measure(arguments: argparse.Namespace) -> int:
    from nanovllm.lab.bench import report

    suite, results = _prepare(arguments)
    with _ending_engines():
        seconds, error = suite.timed_run(results)
    context = _context(arguments, suite, results, seconds)
    report.print_tables(results, context, _console())
    _write(arguments, report.as_json(results, context), report.markdown(results, context))
    return _failed(error) if error is not None else 0


def _measure_watched(arguments: argparse.Namespace) -> int:
    from nanovllm.lab.bench import report, watch
    from nanovllm.lab.bench.engines import EngineFailed

    given = {name: getattr(arguments, name) for name in ("engine", "vllm_python", "workload", *_CUSTOM)}
    given["repeats"] = None if arguments.repeats == DEFAULT_REPEATS else arguments.repeats
    for name, value in given.items():
        if value is not None and name not in ("input_len", "output_len"):
            _refuse(arguments, name, "it measures nanovllm's server, with --streams and --pairs")
    num_pairs = DEFAULT_PAIRS if arguments.pairs is None else arguments.pairs
    window = DEFAULT_WINDOW if arguments.window is None else arguments.window
    if num_pairs < 1 or not 0 < window < float("inf"):
        raise BenchError("--pairs must be 1 or more and --window above 0")
    suite, results = _prepare(arguments)
    start = time.perf_counter()
    try:
        with _ending_engines():
            found = watch.measure(suite, results, num_pairs, window)
    except EngineFailed as error:
        return _failed(error)
    context = _context(arguments, suite, results, time.perf_counter() - start)
    lines = found.lines(context, suite.workloads[0])
    report.show([found.table()], lines, _console())
    _write(arguments, found.as_json(context), report.document(context.command, [lines], [found.table()]))
    return 0


def _measure_parts(arguments: argparse.Namespace) -> int:
    for name in ("engine", "vllm_python", "workload", *_CUSTOM):
        if getattr(arguments, name) is not None:
            _refuse(arguments, name, "it has workloads of its own; --part chooses among them")
    config = EngineConfig.from_arguments(arguments)
    if config != EngineConfig(**{name: getattr(arguments, name) for name in _PARTS_SETTINGS}):
        free = ", ".join(f"--{name}" for name in _PARTS_SETTINGS)
        raise BenchError(
            f"`bench {arguments.benchmark}` chooses the engine's settings itself, except {free}: leave the others out"
        )
    num_threads = _check(arguments, ["nanovllm"], [])
    from nanovllm.lab.bench import report
    from nanovllm.lab.bench.parallel.findings import Report
    from nanovllm.lab.bench.parts import part_names, run_parts

    command = importlib.import_module(f"nanovllm.lab.bench.{arguments.benchmark}.command")
    try:
        chosen = {name: command.PARTS[name] for name in part_names(arguments.part, command.PARTS)}
    except ValueError as error:
        raise BenchError(str(error)) from error
    start = time.perf_counter()
    with _ending_engines():
        parts = run_parts(chosen, config, num_threads, arguments.repeats, bool(arguments.dry_run))
    seconds = time.perf_counter() - start
    model = "a tiny one" if arguments.dry_run else config.model
    context = report.Context.now(_command_line(), model, config.dtype, num_threads, seconds)
    found = Report(context, parts, bool(arguments.dry_run), command.TITLE)
    report.show(found.tables(), found.lines(), _console())
    _write(arguments, found.as_json(), report.document(context.command, [found.lines()], found.tables()))
    return int(found.failed)


@contextlib.contextmanager
def _ending_engines() -> Iterator[None]:
    """Engines have sessions of their own: however this process is told to stop, it has to end them."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _context(arguments: argparse.Namespace, suite: Suite, results: Results, seconds: float) -> Context:
    from nanovllm.lab.bench.report import Context

    dtype, threads = suite.engines[0].options["dtype"], suite.engines[0].num_threads
    return Context.now(_command_line(), arguments.model, dtype, threads, seconds, results)


def _console() -> rich.console.Console:
    # Where nobody watches, the tables need not fit into a window.
    return rich.console.Console(width=None if sys.stdout.isatty() else 120)


def _write(arguments: argparse.Namespace, json: str, markdown: str) -> None:
    for path, text in ((arguments.json, json), (arguments.markdown, markdown)):
        if path is not None:
            pathlib.Path(path).write_text(text, encoding="utf-8")


def _failed(error: EngineFailed) -> int:
    print(f"nanovllm bench: error: {error}", file=sys.stderr)
    return 1


def _refuse(arguments: argparse.Namespace, name: str, why: str) -> NoReturn:
    raise BenchError(f"`bench {arguments.benchmark}` has no option --{name.replace('_', '-')}: {why}")


def _measure_gpu(arguments: argparse.Namespace) -> int:
    given = [name for name in ("engine", "workload", "threads", *_CUSTOM) if getattr(arguments, name) is not None]
    if arguments.repeats != DEFAULT_REPEATS:
        given.append("repeats")
    if given:
        _refuse(arguments, given[0], "it measures the same everywhere")
    if EngineConfig.from_arguments(arguments) != EngineConfig():
        raise BenchError("`bench gpu` chooses the engine's settings itself: leave them out")
    arguments.dry_run = bool(arguments.dry_run)
    arguments.minutes = DEFAULT_MINUTES if arguments.minutes is None else arguments.minutes
    if not 0 < arguments.minutes < float("inf"):
        raise BenchError(f"--minutes must be above 0, got {arguments.minutes}")
    _check_files(arguments)
    from nanovllm.lab.bench.gpu import command

    obstacle = None if arguments.dry_run else command.why_no_gpu()
    if obstacle is not None:
        raise BenchError(f"{obstacle}; to run the same code on the CPU, without measuring, add --dry-run")
    return command.run(arguments, _command_line())


def _prepare(arguments: argparse.Namespace) -> tuple[Suite, Results]:
    """What to measure, checked as far as that is possible before anything starts, and where to keep it."""
    from nanovllm.checkpoint.hub import resolve_model
    from nanovllm.lab.bench.suite import Results, Suite
    from nanovllm.models.config import ModelConfig

    names = engine_names(arguments.engine or ["nanovllm"])
    workloads = choose_workloads(arguments)
    options = engine_options(arguments)
    num_threads = _check(arguments, names, workloads)
    folder = resolve_model(arguments.model, arguments.revision).resolve()
    model = ModelConfig.from_pretrained(folder)
    options.setdefault("max_model_len", min(MAX_MODEL_LEN, model.max_position_embeddings))
    for workload in workloads:
        if workload.max_request_tokens > options["max_model_len"]:
            raise BenchError(
                f"workload {workload.name} has requests of {workload.max_request_tokens} tokens, over the "
                f"{options['max_model_len']} that fit: raise --max-model-len, or choose others with --workload"
            )
    limits = measure_limits(arguments.dtype, num_threads)
    options["dtype"] = limits.dtype
    pythons = {"vllm": arguments.vllm_python}
    engines = [EngineSettings(name, folder, options, num_threads, pythons.get(name, sys.executable)) for name in names]
    results = Results(names, arguments.repeats, workloads, limits)
    return Suite(engines, workloads, arguments.repeats, arguments.seed, model), results


def _command_line() -> str:
    words = sys.argv[1:]
    return shlex.join(["nanovllm", "bench", *(words[1:] if words[:1] == ["bench"] else words)])


def engine_names(given: list[str]) -> list[str]:
    """["nanovllm,vllm", "hf"] -> ["nanovllm", "vllm", "hf"]

    Raises:
        BenchError: an engine that is not known, or one named twice.
    """
    names = [name.strip() for part in given for name in part.split(",")]
    for name in names:
        if name not in ENGINES:
            raise BenchError(f"unknown engine {name!r}; there are {', '.join(ENGINES)}")
        if names.count(name) > 1:
            raise BenchError(f"engine {name!r} is named twice")
    return names


def choose_workloads(arguments: argparse.Namespace) -> list[Workload]:
    """The workloads that the command line asks for, in the order of their names.

    Raises:
        BenchError: an unknown workload, one of another benchmark, or options that exclude each other.
    """
    mode, custom = arguments.benchmark, {name: getattr(arguments, name) for name in _CUSTOM}
    if mode == "watch":
        streams = DEFAULT_STREAMS if arguments.streams is None else arguments.streams
        try:
            return [endless_workload(streams, arguments.input_len, arguments.output_len)]
        except ValueError as error:
            raise BenchError(str(error)) from error
    given = [name for name, value in custom.items() if value is not None]
    if given:
        flag = "--" + given[0].replace("_", "-")
        if arguments.workload:
            raise BenchError(f"{flag} and --workload exclude each other: named workloads have their own lengths")
        if mode == "all":
            raise BenchError(f"{flag} needs one benchmark: latency, throughput or serve, not all")
        try:
            return [custom_workload(mode, **custom)]
        except ValueError as error:
            raise BenchError(str(error)) from error
    names = [name.strip() for part in arguments.workload or [",".join(NAMED)] for name in part.split(",")]
    for name in names:
        if name not in NAMED:
            raise BenchError(f"unknown workload {name!r}; there are {', '.join(NAMED)}")
        if arguments.workload and mode != "all" and NAMED[name][0].mode != mode:
            raise BenchError(f"workload {name} belongs to `bench {NAMED[name][0].mode}`, not to `bench {mode}`")
    modes: tuple[Mode, ...] = ("latency", "throughput", "serve")
    wanted = modes if mode == "all" else (mode,)
    return [w for name in NAMED if name in names for w in NAMED[name] if w.mode in wanted]


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine's settings that differ from the defaults; the model and the dtype are chosen elsewhere.

    Raises:
        BenchError: a bad value, or a setting that would change what is compared.
    """
    try:
        config = EngineConfig.from_arguments(arguments)
    except ValueError as error:
        raise BenchError(str(error)) from error
    if config.device == "cuda":
        raise BenchError("the benchmark measures CPUs; leave --device out")
    options = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default and field.name not in ("model", "revision", "dtype")
    }
    if config.trace is not None:  # engines run in another folder
        options["trace"] = os.path.abspath(config.trace)
    if config.tokenizer is not None and os.path.isdir(config.tokenizer):
        options["tokenizer"] = os.path.abspath(config.tokenizer)
    # The same for every engine, as far as it can be told.
    return {"kv_cache_memory": KV_CACHE_MEMORY, "device": "cpu"} | options


def _check(arguments: argparse.Namespace, names: list[str], workloads: list[Workload]) -> int:
    """Refuse what cannot work before anything starts; returns the number of threads."""
    if arguments.repeats < 1:
        raise BenchError(f"--repeats must be 1 or more, got {arguments.repeats}")
    num_cores = len(usable_cores())
    num_threads = num_cores if arguments.threads is None else arguments.threads
    if not 1 <= num_threads <= num_cores:
        raise BenchError(f"--threads must be from 1 to {num_cores}, the cores there are, got {num_threads}")
    modes = {"serve" if w.mode == "serve" else "offline" for w in workloads}
    for name in names:
        if modes == {"serve"} and name not in SERVING_ENGINES:
            raise BenchError(f"engine {name!r} has no server; it can do latency and throughput")
        if modes == {"offline"} and name not in OFFLINE_ENGINES:
            raise BenchError(f"engine {name!r} is a server; it can do `bench serve`")
    if "vllm" in names:
        python = arguments.vllm_python
        if python is None:
            raise BenchError("--engine vllm needs --vllm-python, the interpreter of the environment that has it")
        if not os.access(python, os.X_OK) or pathlib.Path(python).is_dir():
            raise BenchError(f"--vllm-python: {python!r} is not an executable file")
        arguments.vllm_python = os.path.abspath(python)
    _check_files(arguments)
    return num_threads


def _check_files(arguments: argparse.Namespace) -> None:
    for path in filter(None, (arguments.json, arguments.markdown)):
        if not pathlib.Path(path).absolute().parent.is_dir() or pathlib.Path(path).is_dir():
            raise BenchError(f"cannot write {path!r}: there is no such folder, or it is one")
