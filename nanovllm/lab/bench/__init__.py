"""`nanovllm bench`: speed, start-up and memory, beside other engines on the same machine.

Every engine gets the same token ids, the same number of threads and processes of its own. Engines
take turns, run by run, and are compared pair by pair, because the load of a shared machine changes
all the time."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pathlib
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from nanovllm.assembly.flags import add_flags, choices_of, read_flags
from nanovllm.data.config import EngineConfig
from nanovllm.data.errors import UsageError
from nanovllm.data.parts import load
from nanovllm.lab.bench.engines import ENGINES, PEERS, EngineFailed, EngineSettings, llama_server
from nanovllm.lab.bench.machine import measure_limits, usable_cores
from nanovllm.lab.bench.parts import PARTS, Runner, Setting
from nanovllm.lab.bench.report import Report, conditions
from nanovllm.lab.bench.workloads import NAMED, Workload, custom_workload

if TYPE_CHECKING:
    from nanovllm.lab.bench.suite import Suite

MAX_MODEL_LEN = 2048
KV_CACHE_MEMORY = "2GiB"
_ENGINES = "engine vllm-python llamacpp-python workload repeats threads figure "
_LENGTHS = "input-len output-len "
_PARTS = "part dry-run repeats threads"
#: What each measures, and its options.
BENCHMARKS = {
    "latency": ("one batch", _ENGINES + _LENGTHS + "batch-size"),
    "throughput": ("many concurrent requests, offline", _ENGINES + _LENGTHS + "num-prompts"),
    "serve": (
        "requests to a server",
        _ENGINES + _LENGTHS + "num-prompts request-rate max-concurrency",
    ),
    "all": ("the named workloads of these three", _ENGINES),
    "scheduler": ("host time per step", _PARTS + " vllm-python"),
    "parallel": ("the overhead of tensor, pipeline, data and expert parallelism", _PARTS),
    "speculation": ("the gain from speculative decoding", _PARTS + " vllm-python"),
    "ladder": (
        "one workload on the engine of each lecture",
        _PARTS + " vllm-python llamacpp-python",
    ),
    "kv": ("the cost of KV transfer, and the gain from stored KV", _PARTS),
    "simulate": (
        "requests simulated per second (of the trace of Mooncake's in the folder NANOVLLM_TRACES, "
        "if it is set), and errors against a live engine",
        _PARTS,
    ),
    "gpu": ("test and measure everything that needs an NVIDIA GPU", "dry-run minutes"),
    "quality": (
        "the loss of quality from quantized weights or another setting",
        "baseline samples",
    ),
}


def _number(
    kind: Callable[[str], Any], what: str, is_allowed: Callable[[Any], bool]
) -> Callable[[str], Any]:
    """The type of an option whose value is a number."""

    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if is_allowed(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")

    return parse


_NUM_CORES = len(usable_cores())
_at_least_1 = _number(int, "1 or more", lambda value: value >= 1)
_threads = _number(
    int, f"a number of the {_NUM_CORES} cores", lambda value: 1 <= value <= _NUM_CORES
)
_above_0 = _number(float, "above 0", lambda value: value > 0)


def _file(text: str) -> pathlib.Path:
    path = pathlib.Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: it is a folder")
    if not (folder := path.absolute().parent).is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: there is no folder {folder}")
    return path


def _names(what: str, known: Iterable[str]) -> dict[str, Any]:
    """An option whose value is some of the names that are known."""

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(
                f"unknown name {unknown[0]!r}; there are {', '.join(known)}"
            )
        return names

    return {
        "action": "extend",
        "type": parse,
        "metavar": "NAMES",
        "help": f"one or more of {', '.join(known)}{what}",
    }


def _options(benchmark: str) -> dict[str, dict[str, Any]]:
    """All options with their arguments for argparse."""
    interpreter = "interpreter of the environment that has "
    turns = (
        " (hf: transformers; watched: nanovllm while a client reads its /trace), in alternating "
        "runs; the first engine is compared with the others (default: nanovllm)"
    )
    return {
        "engine": _names(turns, ENGINES),
        **{
            f"{name}-python": {"metavar": "PYTHON", "help": interpreter + what}
            for name, what in PEERS.items()
        },
        "workload": _names(" (default: all of the benchmark)", NAMED),
        **_workload_options(),
        "repeats": {
            "type": _at_least_1,
            "default": 3,
            "help": "runs of each workload (default: 3)",
        },
        "threads": {
            "type": _threads,
            "default": _NUM_CORES,
            "help": "number of cores for an engine (default: all)",
        },
        "figure": {
            "metavar": "FILE",
            "type": _file,
            "help": "draw the runs in a roofline plot (.svg or .png)",
        },
        "part": _names(" (default: all)", PARTS.get(benchmark, ())),
        "dry-run": {
            "action": "store_true",
            "help": "run the same code with tiny sizes, on the CPU; nothing is measured",
        },
        "baseline": {
            "metavar": "MODEL",
            "help": (
                "unquantized model (default: the one that `nanovllm quantize` recorded, else the "
                "same model)"
            ),
        },
        "samples": {
            "type": _at_least_1,
            "default": 8,
            "help": "samples per kind of text, 512 tokens each (default: 8)",
        },
        "minutes": {
            "type": _above_0,
            "default": 9.0,
            "help": "maximum duration in minutes (default: 9)",
        },
    }


def _workload_options() -> dict[str, dict[str, Any]]:
    """Options that describe a custom workload, with their arguments for argparse."""
    own = "custom workload: "
    return {
        "input-len": {"type": _at_least_1, "help": own + "prompt length in tokens"},
        "output-len": {"type": _at_least_1, "help": own + "output tokens"},
        "batch-size": {"type": _at_least_1, "help": own + "requests in the batch"},
        "num-prompts": {"type": _at_least_1, "help": own + "requests"},
        "request-rate": {"type": _above_0, "help": own + "requests per second (default: inf)"},
        "max-concurrency": {
            "type": _at_least_1,
            "help": own + "concurrent requests (default: all)",
        },
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser the benchmarks, each with its own flags."""
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    measure = {"gpu": _measure_gpu, "quality": _measure_quality} | dict.fromkeys(
        PARTS, _measure_parts
    )
    for name, (what, options) in BENCHMARKS.items():
        command = commands.add_parser(name, help=what, description=what, allow_abbrev=False)
        command.set_defaults(measure=measure.get(name, _measure_suite))
        every = _options(name)
        for option in options.split():
            command.add_argument(f"--{option}", **every[option])
        command.add_argument(
            "--json", metavar="FILE", type=_file, help="write all measurements to this file"
        )
        command.add_argument(
            "--markdown", metavar="FILE", type=_file, help="write the tables to this file"
        )
        if name in PARTS:  # they choose the other settings of the engine
            command.add_argument(
                "--model", default=EngineConfig.model, help="model to load (default: %(default)s)"
            )
            command.add_argument("--revision", help="branch, tag or commit of a hub model")
            command.add_argument(
                "--dtype",
                default="auto",
                choices=choices_of(EngineConfig)["dtype"],
                help="data type of weights and KV cache",
            )
            command.add_argument(
                "--seed",
                type=int,
                default=0,
                help="seed of requests and dummy weights (default: 0)",
            )
        elif name != "gpu":
            if name == "quality":
                command.add_argument(
                    "model", nargs="?", default=argparse.SUPPRESS, help="the same as --model"
                )
            add_flags(EngineConfig, command.add_argument_group("engine"))


def run(arguments: argparse.Namespace) -> int:
    """Measure and report; returns the exit code: 1 if a part or a test failed."""
    # Engines have sessions of their own.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        measure: Callable[[argparse.Namespace], int] = arguments.measure
        return measure(arguments)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _measure_suite(arguments: argparse.Namespace) -> int:
    suite = _prepare(arguments)
    start = time.perf_counter()

    def report() -> int:
        facts = suite.facts(time.perf_counter() - start)
        return Report(_command_line(), facts, list(suite.rows())).finish(arguments)

    try:
        suite.run()
    except EngineFailed:  # earlier runs are reported
        report()
        raise
    if arguments.figure is not None and (runs := suite.under_the_roof()):
        from nanovllm.lab.viz.roofline import write_roofline  # it imports matplotlib

        write_roofline(
            arguments.figure, suite.limits.bytes_per_second, suite.limits.flops_per_second, runs
        )
    return report()


def _measure_parts(arguments: argparse.Namespace) -> int:
    from nanovllm.checkpoint.hub import resolve_model
    from nanovllm.lab.bench.local import TINY, write_checkpoint

    parts = PARTS[arguments.benchmark]
    dry_run = arguments.dry_run
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as work:
        if dry_run:  # the course model would take too long
            folder = write_checkpoint(pathlib.Path(work) / "tiny", TINY)
            model = "a tiny one"
        else:
            folder = resolve_model(arguments.model, arguments.revision).resolve()
            model = arguments.model
        setting = Setting(
            dry_run=dry_run,
            folder=str(folder),
            dtype=arguments.dtype,
            threads=arguments.threads,
            seed=arguments.seed,
            repeats=arguments.repeats,
            # Only some of these benchmarks have the options.
            peers={
                name: _python_of(name, arguments)
                for name in PEERS
                if vars(arguments).get(f"{name}_python")
            },
        )
        rows = Runner(setting).run(
            [part for name, part in parts.items() if name in (arguments.part or parts)]
        )
    facts = conditions(
        f"{model}, {arguments.dtype}", arguments.threads, time.perf_counter() - start
    )
    return Report(_command_line(), facts, rows, dry_run).finish(arguments)


def _measure_quality(arguments: argparse.Namespace) -> int:
    from nanovllm.checkpoint.files import read_json
    from nanovllm.checkpoint.hub import resolve_model

    options = engine_options(arguments)
    start = time.perf_counter()
    if options.keys() & {"tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"}:
        raise UsageError(
            "quality is compared in one process, and ranks do not change it: do not set -tp, -pp "
            "and -dp"
        )
    origin = read_json(resolve_model(arguments.model, arguments.revision) / "config.json").get(
        "quantized_from", {}
    )
    baseline = arguments.baseline or origin.get("model", arguments.model)
    common = {
        "dtype": arguments.dtype,
        "device": "cpu",
        "kv_cache_memory": options["kv_cache_memory"],
    }
    settings = options | common | {"model": arguments.model, "revision": arguments.revision}
    compared = common | {
        "model": baseline,
        "revision": arguments.revision if baseline == arguments.model else None,
    }
    try:
        rows = load("nanovllm.lab.bench.quality:quality", "bench quality")(
            settings, compared, arguments.samples
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    facts = conditions(
        f"{arguments.model}, against {baseline}", _NUM_CORES, time.perf_counter() - start
    )
    return Report(_command_line(), facts, rows).finish(arguments)


def _measure_gpu(arguments: argparse.Namespace) -> int:
    import torch

    from nanovllm.lab.bench.gpu.plan import goals, plan

    dry_run = arguments.dry_run
    start = time.perf_counter()
    if dry_run:
        environment = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    elif torch.cuda.is_available():
        # The CPU is only a reference, and its C++ kernels need not be compiled.
        environment = {"NANOVLLM_NATIVE": "0"}
    else:
        torch_is = (
            f"{torch.__version__}, built "
            f"{f'for CUDA {torch.version.cuda}' if torch.version.cuda else 'without CUDA'}"
        )
        raise UsageError(
            f"torch {torch_is}, sees no NVIDIA GPU; --dry-run runs the same code on the CPU"
        )
    rows = Runner(Setting(dry_run), start + 60 * arguments.minutes, environment).run(plan(dry_run))
    facts = conditions("shapes of well-known models", _NUM_CORES, time.perf_counter() - start)
    return Report(_command_line(), facts, [*goals(rows), *rows], dry_run).finish(arguments)


def _command_line() -> str:
    words = sys.argv[1:]
    return shlex.join(["nanovllm", "bench", *(words[1:] if words[:1] == ["bench"] else words)])


def _prepare(arguments: argparse.Namespace) -> Suite:
    """What to measure, checked as far as that is possible before anything starts."""
    from nanovllm.checkpoint.files import UnsupportedModelError
    from nanovllm.checkpoint.hub import resolve_model
    from nanovllm.lab.bench.suite import Suite
    from nanovllm.models.config import ModelConfig

    names = list(dict.fromkeys(arguments.engine or ["nanovllm"]))
    workloads = choose_workloads(arguments)
    pythons = dict.fromkeys(names, sys.executable)
    kinds = {workload.kind for workload in workloads}
    for name in names:
        if not kinds.intersection(ENGINES[name]):
            raise UsageError(
                f"engine {name!r} has no {'server' if 'server' in kinds else 'offline use'}"
            )
    pythons |= {name: _python_of(name, arguments) for name in names if name in PEERS}
    if "server" in kinds and "llamacpp" in names and llama_server(pythons["llamacpp"]) is None:
        raise UsageError(
            "--engine llamacpp needs llama-server to serve: in the folder of --llamacpp-python, or "
            "on the PATH"
        )
    options = engine_options(arguments)
    folder = resolve_model(arguments.model, arguments.revision).resolve()
    try:
        model = ModelConfig.from_pretrained(folder)
    except UnsupportedModelError as error:
        raise UsageError(str(error)) from error
    options.setdefault("max_model_len", min(MAX_MODEL_LEN, model.max_position_embeddings))
    for workload in workloads:
        if workload.max_request_tokens > options["max_model_len"]:
            raise UsageError(
                f"workload {workload.name} has requests of {workload.max_request_tokens} tokens, "
                f"over the {options['max_model_len']} that fit: raise --max-model-len, or choose "
                "others with --workload"
            )
    limits = measure_limits(arguments.dtype, arguments.threads)
    options["dtype"] = limits.dtype
    engines = [
        EngineSettings(name, folder, options, arguments.threads, pythons[name]) for name in names
    ]
    for engine in (each for each in engines if each.name == "llamacpp"):
        from nanovllm.lab.bench.to_gguf import gguf_of  # it imports torch

        scheme = options.get("quantization", "auto"), options.get("quantize_head", False)
        engine.model = gguf_of(folder, limits.dtype, *scheme)
    return Suite(
        name=arguments.model,
        engines=engines,
        workloads=workloads,
        repeats=arguments.repeats,
        seed=arguments.seed,
        model=model,
        limits=limits,
    )


def _python_of(name: str, arguments: argparse.Namespace) -> str:
    """The interpreter of the environment that has a peer."""
    given = getattr(arguments, f"{name}_python")
    if (python := shutil.which(given or "")) is None:
        mistake = (
            f"--engine {name} needs --{name}-python, the interpreter of an environment that "
            "contains it"
        )
        raise UsageError(f"{mistake}, got {given}")
    return os.path.abspath(python)


def choose_workloads(arguments: argparse.Namespace) -> list[Workload]:
    """The workloads that the command line asks for, in the order of their names.

    Raises:
        UsageError: a workload of another benchmark, or options that exclude each other.
    """
    mode = arguments.benchmark
    chosen = arguments.workload
    names = (
        "input_len",
        "output_len",
        "batch_size",
        "num_prompts",
        "request_rate",
        "max_concurrency",
    )
    given = {name: value for name in names if (value := vars(arguments).get(name)) is not None}
    if given and not chosen:
        return [custom_workload(mode, **given)]
    if given:
        flag = "--" + next(iter(given)).replace("_", "-")
        raise UsageError(
            f"{flag} and --workload exclude each other: named workloads have their own lengths"
        )
    for name in chosen or ():
        if mode not in ("all", NAMED[name][0].mode):
            raise UsageError(
                f"workload {name} belongs to `bench {NAMED[name][0].mode}`, not to `bench {mode}`"
            )
    return [
        w
        for name in NAMED
        if name in (chosen or NAMED)
        for w in NAMED[name]
        if mode in ("all", w.mode)
    ]


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine's settings that differ from the defaults; the model and the dtype are chosen
    elsewhere.

    Raises:
        UsageError: a bad value, or a setting that would change what is compared.
    """
    config = read_flags(EngineConfig, arguments)
    if config.device == "cuda":
        raise UsageError("the benchmark measures CPUs; do not set --device")
    options = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default
        and field.name not in ("model", "revision", "dtype")
    }
    for name in ("trace", "tokenizer"):  # engines run in another folder
        if name in options and (name == "trace" or os.path.isdir(options[name])):
            options[name] = os.path.abspath(options[name])
    # Every engine gets the same memory, if it has such a setting.
    return {"kv_cache_memory": KV_CACHE_MEMORY, "device": "cpu"} | options
