"""`nanovllm bench`: speed, start-up and memory, beside other engines on the same machine.

Every engine gets the same token ids, the same number of threads and processes of its own. Engines take turns, run by run, and
are compared pair by pair, because the load of a shared machine changes all the time.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import shlex
import signal
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

from nanovllm.data.config import EngineConfig
from nanovllm.lab.bench.engines import ENGINES, SERVING_ENGINES, EngineFailed, EngineSettings
from nanovllm.lab.bench.machine import measure_limits, usable_cores
from nanovllm.lab.bench.workloads import NAMED, Workload, custom_workload, endless_workload

if TYPE_CHECKING:
    from nanovllm.lab.bench.suite import Suite

MAX_MODEL_LEN, KV_CACHE_MEMORY = 2048, "2GiB"
BENCHMARKS = {
    "latency": "one batch",
    "throughput": "many requests at once, offline",
    "serve": "requests to a server",
    "all": "the named workloads of these three",
    "watch": "what it costs nanovllm's server that a client reads its /trace",
    "parallel": "what it costs that several processes compute together",
    "kv": "what it costs to move KV, and what it gains to keep it",
    "gpu": "prove and measure everything that needs an NVIDIA GPU",
}
_SUITE, _PARTS = ("latency", "throughput", "serve", "all"), ("parallel", "kv")
_OFFLINE_AND_SERVE = ("latency", "throughput", "serve")
#: Option, type, default, the benchmarks that have it, help.
OPTIONS: list[tuple[str, Any, Any, tuple[str, ...], str]] = [
    ("engine", [str], "nanovllm", _SUITE, f"of {', '.join(ENGINES)} (hf is transformers), separated by commas or by "
     "repeating the flag; they run in turn, and the first is compared with the others"),
    ("vllm-python", str, None, _SUITE, "interpreter of the environment that has vLLM"),
    ("workload", [str], None, _SUITE, f"some of {', '.join(NAMED)} (default: all that the benchmark has)"),
    ("input-len", int, None, (*_OFFLINE_AND_SERVE, "watch"), "a workload of your own: prompt length in tokens"),
    ("output-len", int, None, (*_OFFLINE_AND_SERVE, "watch"), "the same: output tokens"),
    ("batch-size", int, None, ("latency",), "the same: requests in the batch"),
    ("num-prompts", int, None, ("throughput", "serve"), "the same: requests"),
    ("request-rate", float, None, ("serve",), "requests per second (default: inf)"),
    ("max-concurrency", int, None, ("serve",), "requests at once (default: all)"),
    ("repeats", int, 3, (*_SUITE, *_PARTS), "runs of each workload"),
    ("threads", int, None, (*_SUITE, "watch", *_PARTS), "cores that an engine computes on (default: all)"),
    ("pairs", int, 100, ("watch",), "pairs of windows with a watcher, and as many without"),
    ("streams", int, 16, ("watch",), "requests at once"),
    ("window", float, 1.0, ("watch",), "seconds of a window"),
    ("dry-run", bool, None, ("gpu", *_PARTS), "run the same code with tiny sizes, on the CPU; nothing is measured"),
    ("part", [str], None, _PARTS, "some of orders, executor, all-reduce, pipeline, experts, weights, throughput "
     "(parallel), or transport, router, latency, first-token, tiers (kv)"),
    ("minutes", float, 9.0, ("gpu",), "how long it may take"),
]  # fmt: skip
#: Settings of the engine that a benchmark leaves free; the others leave all.
_FREE = {**dict.fromkeys(_PARTS, ("model", "revision", "dtype", "seed")), "gpu": ()}


class BenchError(ValueError):
    """The command line asks for something that cannot be measured; the message lists what can."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser the flags of `bench`."""
    names = "; ".join(f"{name}: {what}" for name, what in BENCHMARKS.items())
    parser.add_argument("benchmark", choices=list(BENCHMARKS), help=f"what to measure. {names}")
    group = parser.add_argument_group("benchmark")
    for name, kind, default, owners, what in OPTIONS:
        how: dict[str, Any] = {"metavar": name.rpartition("-")[2].upper(), "type": kind}
        if kind is bool:
            how = {"action": "store_const", "const": True}
        elif kind == [str]:
            how = {"action": "append", "metavar": "NAMES"}
        shown = f" (default: {default})" if default is not None else ""
        only = f"{' and '.join(owners)}: " if len(owners) < 4 else ""
        group.add_argument(f"--{name}", help=only + what + shown, **how)
    group.add_argument("--json", metavar="FILE", help="write all measurements to this file")
    group.add_argument("--markdown", metavar="FILE", help="write the tables to this file")
    EngineConfig.add_arguments(parser.add_argument_group("engine"))


def run(arguments: argparse.Namespace) -> int:
    """Measure and report; returns the exit code: 2 for a bad command line, 1 if an engine or a part failed."""
    from nanovllm.models.config import UnsupportedModelError

    measure = {"watch": _measure_watched, "gpu": _measure_gpu, "parallel": _measure_parts, "kv": _measure_parts}
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)  # engines have sessions of their own
    try:
        _check(arguments)
        return measure.get(arguments.benchmark, _measure_suite)(arguments)
    except (BenchError, UnsupportedModelError) as error:
        print(f"nanovllm bench: error: {error}", file=sys.stderr)
        return 2
    except EngineFailed as error:
        print(f"nanovllm bench: error: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, previous)


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what cannot work before anything starts, and fill in defaults."""
    benchmark = arguments.benchmark
    for option, _, default, owners, _ in OPTIONS:
        name = option.replace("-", "_")
        if getattr(arguments, name) is None:
            setattr(arguments, name, [default] if name == "engine" else default)
        elif benchmark not in owners:
            where = " and ".join(f"`bench {owner}`" for owner in owners)
            raise BenchError(f"`bench {benchmark}` has no option --{option}: it belongs to {where}")
    if benchmark in _FREE:
        free = _FREE[benchmark]
        if EngineConfig.from_arguments(arguments) != EngineConfig(**{name: getattr(arguments, name) for name in free}):
            but = f", except {', '.join(f'--{name}' for name in free)}" if free else ""
            raise BenchError(f"`bench {benchmark}` chooses the engine's settings itself{but}: leave the others out")
    num_cores = len(usable_cores())
    if arguments.threads is None:
        arguments.threads = num_cores
    if not 1 <= arguments.threads <= num_cores:
        raise BenchError(f"--threads must be from 1 to {num_cores}, the cores there are, got {arguments.threads}")
    for name in ("repeats", "pairs"):
        if getattr(arguments, name) < 1:
            raise BenchError(f"--{name} must be 1 or more, got {getattr(arguments, name)}")
    for name in ("minutes", "window"):
        if not 0 < getattr(arguments, name) < float("inf"):
            raise BenchError(f"--{name} must be above 0, got {getattr(arguments, name)}")
    for path in filter(None, (arguments.json, arguments.markdown)):
        if not pathlib.Path(path).absolute().parent.is_dir() or pathlib.Path(path).is_dir():
            raise BenchError(f"cannot write {path!r}: there is no such folder, or it is one")


def _measure_suite(arguments: argparse.Namespace) -> int:
    from nanovllm.lab.bench.report import Report

    suite = _prepare(arguments)
    start, failure = time.perf_counter(), None
    try:
        suite.run()
    except EngineFailed as error:  # earlier runs are reported
        failure = error
    facts = suite.facts(time.perf_counter() - start)
    code = Report(_command_line(), facts, list(suite.rows())).finish(arguments)
    if failure is not None:
        raise failure
    return code


def _measure_watched(arguments: argparse.Namespace) -> int:
    from nanovllm.lab.bench import watch
    from nanovllm.lab.bench.report import Report

    suite, start = _prepare(arguments), time.perf_counter()
    rows = watch.measure(suite, arguments.pairs, arguments.window)
    return Report(_command_line(), suite.facts(time.perf_counter() - start), rows).finish(arguments)


def _measure_parts(arguments: argparse.Namespace) -> int:
    from nanovllm.checkpoint.hub import resolve_model
    from nanovllm.lab.bench.local import TINY, write_checkpoint
    from nanovllm.lab.bench.parts import PARTS, Runner, Setting
    from nanovllm.lab.bench.report import Report, conditions

    parts = PARTS[arguments.benchmark]
    names = _split_names(arguments.part, "part", parts)
    dry_run, start = bool(arguments.dry_run), time.perf_counter()
    with tempfile.TemporaryDirectory() as work:
        if dry_run:  # the course model would take too long
            folder, model = write_checkpoint(pathlib.Path(work) / "tiny", TINY), "a tiny one"
        else:
            folder, model = resolve_model(arguments.model, arguments.revision).resolve(), arguments.model
        settings = arguments.dtype, arguments.threads, arguments.seed, arguments.repeats
        runner = Runner(Setting(dry_run, str(folder), *settings))
        rows = runner.run([part for name, part in parts.items() if name in names])
    facts = conditions(f"{model}, {arguments.dtype}", arguments.threads, time.perf_counter() - start)
    return Report(_command_line(), facts, rows, dry_run).finish(arguments)


def _measure_gpu(arguments: argparse.Namespace) -> int:
    import torch

    from nanovllm.lab.bench.gpu.plan import goals, plan
    from nanovllm.lab.bench.parts import Runner, Setting
    from nanovllm.lab.bench.report import Report, conditions

    dry_run, start = bool(arguments.dry_run), time.perf_counter()
    environment = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if not dry_run:
        obstacle = None
        if torch.version.cuda is None:
            obstacle = f"torch {torch.__version__} was built without CUDA: install a build for CUDA"
        elif not torch.cuda.is_available():
            obstacle = "torch sees no NVIDIA GPU"
        if obstacle is not None:
            raise BenchError(f"{obstacle}; to run the same code on the CPU, without measuring, add --dry-run")
        environment = {"NANOVLLM_NATIVE": "0"}  # the CPU is only a reference, and its C++ kernels need not be compiled
    rows = Runner(Setting(dry_run), start + 60 * arguments.minutes, environment).run(plan(dry_run))
    facts = conditions("shapes of well-known models", arguments.threads, time.perf_counter() - start)
    return Report(_command_line(), facts, [*goals(rows), *rows], dry_run).finish(arguments)


def _command_line() -> str:
    words = sys.argv[1:]
    return shlex.join(["nanovllm", "bench", *(words[1:] if words[:1] == ["bench"] else words)])


def _prepare(arguments: argparse.Namespace) -> Suite:
    """What to measure, checked as far as that is possible before anything starts."""
    from nanovllm.checkpoint.hub import resolve_model
    from nanovllm.lab.bench.suite import Suite
    from nanovllm.models.config import ModelConfig

    names = _split_names(arguments.engine, "engine", ENGINES)
    if len(set(names)) < len(names):
        raise BenchError(f"an engine is named twice: {', '.join(names)}")
    workloads = choose_workloads(arguments)
    for name in set(names) - set(SERVING_ENGINES):
        if all(workload.mode == "serve" for workload in workloads):
            raise BenchError(f"engine {name!r} has no server; it can do latency and throughput")
    python = arguments.vllm_python
    if "vllm" in names:
        if python is None:
            raise BenchError("--engine vllm needs --vllm-python, the interpreter of the environment that has it")
        if not os.access(python, os.X_OK) or pathlib.Path(python).is_dir():
            raise BenchError(f"--vllm-python: {python!r} is not an executable file")
    options = engine_options(arguments)
    folder = resolve_model(arguments.model, arguments.revision).resolve()
    model = ModelConfig.from_pretrained(folder)
    options.setdefault("max_model_len", min(MAX_MODEL_LEN, model.max_position_embeddings))
    for workload in workloads:
        if workload.max_request_tokens > options["max_model_len"]:
            raise BenchError(
                f"workload {workload.name} has requests of {workload.max_request_tokens} tokens, over the "
                f"{options['max_model_len']} that fit: raise --max-model-len, or choose others with --workload"
            )
    limits = measure_limits(arguments.dtype, arguments.threads)
    options["dtype"] = limits.dtype
    pythons = {"vllm": os.path.abspath(python)} if python else {}
    engines = [
        EngineSettings(name, folder, options, arguments.threads, pythons.get(name, sys.executable)) for name in names
    ]
    return Suite(arguments.model, engines, workloads, arguments.repeats, arguments.seed, model, limits)


def _split_names(given: list[str] | None, what: str, known: Any) -> list[str]:
    """["nanovllm,vllm", "hf"] -> ["nanovllm", "vllm", "hf"]; all that are known for None."""
    names = list(known) if given is None else [name.strip() for words in given for name in words.split(",")]
    for name in names:
        if name not in known:
            raise BenchError(f"unknown {what} {name!r}; there are {', '.join(known)}")
    return names


def choose_workloads(arguments: argparse.Namespace) -> list[Workload]:
    """The workloads that the command line asks for, in the order of their names.

    Raises:
        BenchError: an unknown workload, one of another benchmark, or options that exclude each other.
    """
    mode = arguments.benchmark
    names = ("input_len", "output_len", "batch_size", "num_prompts", "request_rate", "max_concurrency")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    try:
        if mode == "watch":
            return [endless_workload(arguments.streams, **given)]
        if given and not arguments.workload:
            return [custom_workload(mode, **given)]
    except ValueError as error:
        raise BenchError(str(error)) from error
    if given:
        flag = "--" + next(iter(given)).replace("_", "-")
        raise BenchError(f"{flag} and --workload exclude each other: named workloads have their own lengths")
    chosen = _split_names(arguments.workload, "workload", NAMED)
    for name in chosen if arguments.workload and mode != "all" else ():
        if NAMED[name][0].mode != mode:
            raise BenchError(f"workload {name} belongs to `bench {NAMED[name][0].mode}`, not to `bench {mode}`")
    return [w for name in NAMED if name in chosen for w in NAMED[name] if mode in ("all", w.mode)]


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
    for name in ("trace", "tokenizer"):  # engines run in another folder
        if name in options and (name == "trace" or os.path.isdir(options[name])):
            options[name] = os.path.abspath(options[name])
    # Every engine gets the same memory, if it has such a setting.
    return {"kv_cache_memory": KV_CACHE_MEMORY, "device": "cpu"} | options
