"""`nanovllm simulate`: how a fleet of engines would serve a workload. Imports nothing heavy."""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn

from nanovllm.assembly.flags import SHORT_FLAGS, Parser, add_flags
from nanovllm.data.checks import did_you_mean
from nanovllm.data.config import EngineConfig
from nanovllm.data.errors import UsageError
from nanovllm.simulate.arrivals import SyntheticWorkload
from nanovllm.simulate.settings import (
    DEFAULT_MODEL,
    ENGINE_FLAGS,
    ENGINE_GROUPS,
    FLEET_GROUPS,
    FleetConfig,
    check_needed,
    create,
    flag_of,
    known_settings,
    name_of,
)

MODEL_HELP = (
    "known model (see --list), or path of a config.json or of its folder, whose "
    "quantization_config decides the size of the weights; with --calibrate, a model as for "
    "`nanovllm serve`"
)
EXAMPLES = """examples:
  nanovllm simulate --request-rate 20 --replicas 2
  nanovllm simulate --workload trace.jsonl --model llama-3.1-70b -tp 4 --machine H200 --replicas 8
  nanovllm simulate --goodput ttft:300 tpot:25 --find-load
  nanovllm simulate --request-rate 12 --sweep max-num-batched-tokens=512,2048,8192
  nanovllm simulate --list
  nanovllm simulate --list --machine MI300X --model glm-4.6

a file for --machine, with what differs from its base (--list --machine H100 --json has all fields):
  base = "H100"
  price_per_hour = 2.1
  bandwidth = 3.9e12
  between.bandwidth = 25e9
  reach.products = 0.65
"""
# Flags of what the command does, besides the settings of a simulation.
RUNS = (
    *("list", "sweep", "find_load", "calibrate", "replay", "by_time", "perfetto", "processes"),
    *("ray", "json"),
)
# Flags of other runs than simulations, each with the settings that have an effect then.
INSTEAD = {
    "list": ("machine", "model", "json"),
    "replay": ("by_time", "json"),
    "calibrate": ENGINE_FLAGS,
}
# Flags that have an effect only with another one, besides `NEEDED_FLAGS`.
NEEDED_BY_RUNS = {"--ray": "--sweep", "--processes": "--sweep", "--slo-attainment": "--find-load"}


@dataclass(frozen=True)
class Default:
    """The default of a flag, which differs from a given flag of the same value."""

    value: object

    def __str__(self) -> str:
        return str(self.value)


def _refuse_quantization(word: str) -> NoReturn:
    """Name what does in a simulation what a flag of `nanovllm serve` does there."""
    raise argparse.ArgumentTypeError(
        f"{word!r} has no effect here: give --model the path of a config.json with a "
        "quantization_config"
    )


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Flags of one simulation."""
    for title, names in FLEET_GROUPS.items():
        add_flags(FleetConfig, parser.add_argument_group(title), names)
        if "workload" in names:
            add_flags(SyntheticWorkload, parser.add_argument_group("synthetic workload"))
    for title, names in ENGINE_GROUPS.items():
        add_flags(EngineConfig, parser.add_argument_group(title), names, {"model": MODEL_HELP})
    parser.add_argument(
        "--quantization",
        type=_refuse_quantization,
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )
    parser.set_defaults(**{name: Default(parser.get_default(name)) for name in known_settings()})
    parser.set_defaults(model=Default(DEFAULT_MODEL))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.usage = "nanovllm simulate [flags]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    add_settings(parser)
    output = parser.add_argument_group("runs and output")
    output.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="NAME=VALUE,VALUE",
        help="simulate each value of a setting, such as replicas=1,2,4, tp=1,2 or "
        "prefill-config.machine=A100,my.toml; with several --sweep, each combination. A value with "
        'a comma needs quotes: machine=A100,"a,b.toml". The table names the bottleneck of each, '
        "and marks the frontier of P99 TTFT and P99 TPOT",
    )
    output.add_argument(
        "--find-load",
        action="store_true",
        help="find the highest --request-rate (with --workload, the highest --speedup) that the "
        "fleet sustains, and at which --slo-attainment of the requests keep --goodput; with more "
        "requests than --num-prompts, if these are too few to tell",
    )
    _add_other_runs(output)
    output.add_argument("--json", action="store_true", help="print JSON instead of tables")
    output.add_argument(
        "--perfetto",
        type=pathlib.Path,
        metavar="FILE",
        help="write all steps, requests, KV transfers and failures to a file for "
        "https://ui.perfetto.dev",
    )
    output.add_argument(
        "--processes",
        type=int,
        metavar="NUMBER",
        help="with --sweep, number of processes (default: one per core)",
    )
    output.add_argument(
        "--ray", action="store_true", help="with --sweep, use a Ray cluster (RAY_ADDRESS)"
    )


def _add_other_runs(output: argparse._ArgumentGroup) -> None:
    """Flags of what the command does instead of simulating."""
    output.add_argument(
        "--list",
        action="store_true",
        help="instead of simulating, print the machines and models that are known by name, with "
        "the sources of their numbers; with --machine or --model, only that one",
    )
    output.add_argument(
        "--calibrate",
        type=pathlib.Path,
        metavar="FILE",
        help="instead of simulating, run --model on this machine for two minutes, with the layout "
        "of -tp and -pp, and write its step times and its layout to a file for --machine",
    )
    output.add_argument(
        "--replay",
        metavar="TRACE",
        help="instead of simulating, give the arrivals and step times of a file of `nanovllm serve "
        "--trace` to the scheduler, and compare every plan with the recorded one",
    )
    output.add_argument(
        "--by-time",
        choices=("median", "recorded"),
        nargs="?",
        const="median",
        help="with --replay, let requests arrive at their recorded times, instead of before the "
        "recorded steps, and report how much their latencies differ. A step begins the median gap "
        "after the one before, or when it did (recorded)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Simulate, replay, calibrate or list, and print what comes out; returns 1 if a replay differs.

    Raises:
        UsageError: settings or files that cannot be used.
    """
    values = vars(arguments)
    settings = {
        name: values[name] for name in known_settings() if not isinstance(values[name], Default)
    }
    given = [name for name in RUNS if values[name]] + list(settings)
    refuse_idle([flag_of(f"no_{name}" if values[name] is False else name) for name in given])
    if arguments.list:
        return run_list(settings.get("machine"), settings.get("model"), arguments.json)
    if arguments.replay is not None:
        return run_replay(arguments.replay, arguments.by_time, arguments.json)
    if arguments.by_time is not None:
        raise UsageError("--by-time is for replays: name a trace with --replay")
    workload = settings.get("workload", "")
    reads_again = arguments.find_load or arguments.sweep
    if reads_again and os.path.exists(workload) and pathlib.Path(workload).is_fifo():
        raise UsageError(
            f"--workload {workload} is a pipe, which can be read once, and --find-load and "
            "--sweep read it several times: name a file"
        )
    if arguments.calibrate is not None:
        run_calibration(settings, arguments.calibrate)
    elif arguments.sweep:
        run_sweep(settings, arguments)
    else:
        run_once(settings, arguments)
    return 0


def settings_parser() -> Parser:
    """Return a parser of the flags of one simulation."""
    parser = Parser(prog="nanovllm simulate", add_help=False)
    add_settings(parser)
    return parser


def refuse_idle(given: Sequence[str]) -> None:
    """Reject flags that have no effect with others of the given ones, or without others.

    Raises:
        UsageError: one has no effect.
    """
    for name, used in INSTEAD.items():
        idle = [flag for flag in given if name_of(flag) not in (name, *used)]
        if flag_of(name) in given and idle:
            raise UsageError(f"{idle[0]} has no effect with {flag_of(name)}: omit one of them")
    check_needed(given, NEEDED_BY_RUNS)
    for several in ("--sweep", "--find-load"):
        if several in given and "--perfetto" in given:
            raise UsageError(f"--perfetto shows one simulation: omit {several}")


def run_list(machine: str | None, model: str | None, as_json: bool) -> int:
    """Print the machine and the model of these names, or all that are known by name."""
    from nanovllm.simulate.sources import catalog, select

    selection = select(machine, model)
    if as_json:
        print(json.dumps(catalog(selection)))
    else:
        from nanovllm.simulate.tables import print_catalog

        print_catalog(selection)
    return 0


def run_once(settings: Mapping[str, object], arguments: argparse.Namespace) -> None:
    """Simulate, or find the highest load, and print the summary."""
    from nanovllm.simulate.measured import check_writable
    from nanovllm.simulate.simulation import find_load, simulate

    # The last garbage collection, while the process ends, would look at all requests.
    atexit.register(gc.freeze)
    path = arguments.perfetto
    if path is not None:
        check_writable("--perfetto", path)
        workload = str(settings.get("workload", ""))
        if os.path.exists(workload) and path.samefile(workload):
            raise UsageError(f"--perfetto {path}: this is the file of --workload: name another one")
    summary = find_load(settings) if arguments.find_load else simulate(settings, path)
    if arguments.json:
        print(json.dumps(summary))
    else:
        from nanovllm.simulate.tables import print_summary

        print_summary(summary)


def run_sweep(settings: Mapping[str, object], arguments: argparse.Namespace) -> None:
    """Simulate each combination of settings, and print a table of them."""
    from nanovllm.simulate.simulation import find_load, simulate
    from nanovllm.simulate.sweep import combinations, mark_frontier, run_all, with_point

    points = combinations(parse_sweep(arguments.sweep))
    summaries = run_all(
        find_load if arguments.find_load else simulate,
        [with_point(settings, point) for point in points],
        arguments.processes,
        arguments.ray,
    )
    mark_frontier(summaries)
    if arguments.json:
        print(
            json.dumps(
                [
                    {"settings": point, **summary}
                    for point, summary in zip(points, summaries, strict=True)
                ]
            )
        )
    else:
        from nanovllm.simulate.tables import print_sweep

        print_sweep(points, summaries)


def run_replay(path: str, by_time: str | None, as_json: bool) -> int:
    """Replay a trace, and print what the replay has in common with it. Returns 1 if a plan differs
    that should be equal."""
    from nanovllm.simulate.by_time import replay_by_time
    from nanovllm.simulate.replay import replay
    from nanovllm.simulate.tables import print_comparison
    from nanovllm.trace.trace import Trace

    try:
        trace = Trace.load(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}: name a file") from error
    if by_time is not None:
        comparison = replay_by_time(trace, "recorded" if by_time == "recorded" else "median")
        print(json.dumps(comparison)) if as_json else print_comparison(comparison)
        return 0
    result = replay(trace)
    print(json.dumps(asdict(result)) if as_json else result)
    return int(bool(result.difference))


def run_calibration(settings: Mapping[str, object], path: pathlib.Path) -> None:
    """Measure an engine with these settings, write the file, and print how well it predicts."""
    from nanovllm.simulate.calibrate import calibrate
    from nanovllm.simulate.measured import check_writable, write_cost
    from nanovllm.simulate.sources import warnings_of

    check_writable("--calibrate", path)
    cost = calibrate(
        create(EngineConfig, {"model": DEFAULT_MODEL, **settings, "data_parallel_size": 1})
    )
    write_cost(cost, path)
    print(
        f"{path}: steps of {cost.model} on this machine. Of steps that the fit did not see, half "
        f"are within {cost.error:.1%} of the prediction; 16 in a row took {cost.low:.2f} to "
        f"{cost.high:.2f} of it (90 % of them).",
        *warnings_of(cost),
        sep="\n",
    )


def parse_sweep(words: Sequence[str]) -> dict[str, list[object]]:
    """Read lists such as "replicas=1,2,4" or "prefill-config.machine=A100,H100": the values of each
    setting, or of a part of one, as its flag reads them.

    Raises:
        UsageError: not a list, or an unknown setting.
    """
    parser = settings_parser()
    long_names = {flag: name for name, flags in SHORT_FLAGS.items() for flag in flags}
    lists: dict[str, list[object]] = {}
    for word in words:
        flag, equals, values = word.partition("=")
        key = flag.lstrip("-").replace("-", "_")
        key = long_names.get(f"-{key}", key)
        name, *parts = key.split(".")
        is_part = bool(parts) and name.endswith("_config") and not key.endswith("+")
        if name not in known_settings() or is_part != bool(parts):
            raise UsageError(f"--sweep: no setting {flag!r}{did_you_mean(name, known_settings())}")
        if not equals:
            raise UsageError(f"--sweep must be a list such as replicas=1,2,4, got {word!r}")
        lists[key] = []
        switches = {} if parts else {"true": flag_of(name), "false": flag_of(f"no_{name}")}
        for value in split_values(values):
            given = switches.get(value.lower(), ".".join([flag_of(name), *parts]) + f"={value}")
            found = vars(parser.parse_args([given]))[name]
            found = json.loads(found) if parts else found
            for part in parts:
                found = found[part]
            lists[key].append(found)
    return lists


def split_values(text: str) -> list[str]:
    """Return the values of a list. Commas inside JSON objects and lists separate none, nor do those
    of a value in quotes, such as "a,b.toml"."""
    values = [""]
    depth = 0
    is_quoted = False
    for character in text:
        is_quoted ^= character == '"'
        depth += 0 if is_quoted else (character in "{[") - (character in "}]")
        if character == "," and not depth and not is_quoted:
            values.append("")
        else:
            values[-1] += character
    return [value[1:-1] if value[:1] == value[-1:] == '"' else value for value in values]
