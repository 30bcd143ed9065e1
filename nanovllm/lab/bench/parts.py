"""The benchmarks that have parts (`bench scheduler`, `parallel`, `speculation`, `kv`, `simulate`,
`gpu`), and the runner that starts each part in its own process."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from nanovllm.lab.bench import report
from nanovllm.lab.bench.engines import end_of_log
from nanovllm.lab.bench.machine import NoiseMeter, usable_cores
from nanovllm.lab.bench.report import Row
from nanovllm.lab.processes import python_environment

if TYPE_CHECKING:
    import torch

    from nanovllm.models.config import ModelConfig

#: A part is not started with less time than this.
LEAST_SECONDS = 10.0
_MOST_AT_ONCE = 10


class Skip(Exception):
    """A part does not apply to this machine; the message says why."""


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@dataclass
class Setting:
    """What a part is told.

    Attributes:
        dry_run: run the same code on the CPU with tiny sizes; nothing is measured.
        folder: the checkpoint.
        threads: cores that one engine computes on; several ranks share them.
        repeats: how often something long is measured; what is short is measured a multiple of that.
        seconds: the part is killed after this time.
        before: the rows of earlier parts.
        peers: engines that are measured beside nanovllm ("vllm", "llamacpp"), each with the
            interpreter of its environment.
    """

    dry_run: bool = False
    folder: str = ""
    dtype: str = "auto"
    threads: int = 1
    seed: int = 0
    repeats: int = 3
    seconds: float = 600.0
    before: list[Row] = field(default_factory=list)
    peers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._started = time.perf_counter()

    @functools.cached_property
    def model(self) -> ModelConfig:
        """The checkpoint's configuration."""
        from nanovllm.models.config import ModelConfig

        return ModelConfig.from_pretrained(pathlib.Path(self.folder))

    @property
    def device(self) -> torch.device:
        """The GPU of `bench gpu`; in a dry run the CPU."""
        import torch

        return torch.device("cpu" if self.dry_run else "cuda")

    @property
    def fastest_device(self) -> str:
        """A GPU if there is one; in a dry run the CPU."""
        import torch

        return "cuda" if torch.cuda.is_available() and not self.dry_run else "cpu"

    @property
    def seconds_left(self) -> float:
        """The time until the part is killed."""
        return self.seconds - (time.perf_counter() - self._started)

    def percent_of(self, limit: str, rate: float) -> float | None:
        """A rate in percent of a ceiling that the first part of `bench gpu` measured; None if it
        did not."""
        return next(
            (100 * rate / row["value"] for row in self.before if row.get("limit") == limit), None
        )

    def options(self, **more: Any) -> dict[str, Any]:
        """Settings of an engine on this model: fields of `EngineConfig`."""
        memory = "8MiB" if self.dry_run else "512MiB"
        common = {"model": self.folder, "dtype": self.dtype, "seed": self.seed, "device": "cpu"}
        # Without a prefix cache every run computes its prompts.
        return common | {"kv_cache_memory": memory, "enable_prefix_caching": False} | more

    def tensor_size(self) -> int | None:
        """The fewest ranks, from two to four, among which the model's layers can be divided; None
        if there is no such number."""
        from nanovllm.executor.grid import check_tensor_parallel

        for size in (2, 3, 4):
            with contextlib.suppress(ValueError):
                check_tensor_parallel(self.model, size)
                return size
        return None


@dataclass(frozen=True)
class Part:
    """A part of a benchmark.

    Attributes:
        function: "module:function"; it is called with a `Setting` and the arguments, and yields
            rows.
        seconds: when it is killed.
        alone: it measures, so nothing else may run beside it.
    """

    title: str
    function: str
    arguments: tuple[str, ...] = ()
    seconds: float = 3600.0
    alone: bool = True


_PARALLEL = "nanovllm.lab.bench.parallel."
_KV = "nanovllm.lab.bench.kv."
_SIMULATE = "nanovllm.lab.bench.simulate:"
_DRAFTS = "nanovllm.lab.bench.speculation:measure"
#: What `--part` names.
PARTS = {
    "scheduler": {
        "scheduler": Part("the scheduler alone", "nanovllm.lab.bench.steps:scheduler"),
        "step": Part("a decode step by part", "nanovllm.lab.bench.steps:step_parts"),
    },
    "parallel": {
        "orders": Part("commands to the ranks", _PARALLEL + "orders:orders"),
        "executor": Part("executor overhead", "nanovllm.lab.bench.steps:executor"),
        "all-reduce": Part("all-reduce", _PARALLEL + "all_reduce:all_reduces"),
        "pipeline": Part("pipeline bubble", _PARALLEL + "pipeline:pipeline"),
        "experts": Part("expert shuffle", _PARALLEL + "shuffle:experts"),
        "weights": Part("weights per rank", _PARALLEL + "engines:weights"),
        "throughput": Part("tokens per second", _PARALLEL + "engines:throughput"),
    },
    "speculation": {
        m: Part(f"drafts of {m}", _DRAFTS, (m,)) for m in ("ngram", "draft_model", "eagle3")
    },
    "kv": {
        "transport": Part("from cache to cache", _KV + "transport:transport"),
        "router": Part("router overhead", _KV + "router:router"),
        "latency": Part("streams while prompts arrive", _KV + "latency:latency"),
        "first-token": Part(
            "time to first token with remote prefill", _KV + "first_token:first_token"
        ),
        "tiers": Part("prefixes in other stores", _KV + "tiers:tiers"),
    },
    "ladder": {
        "ladder": Part("the engine of each lecture", "nanovllm.lab.bench.ladder:ladder"),
        "step": Part("a decode step by part", "nanovllm.lab.bench.steps:step_parts"),
    },
    "simulate": {
        "trace": Part("a trace on eight simulated engines", _SIMULATE + "trace"),
        "command": Part("the whole command with a trace", _SIMULATE + "command"),
        "fleet": Part("1,250 simulated engines", _SIMULATE + "fleet"),
        "live": Part("live loads, and simulated ones", "nanovllm.lab.bench.live:live"),
    },
}


class Runner:
    """Runs parts. A part that fails, or is killed because its time is over, keeps the rows that it
    has written.

    Args:
        deadline: when everything has to be over, by `time.perf_counter`.
        environment: further environment variables of the parts.
    """

    def __init__(
        self,
        setting: Setting,
        deadline: float = math.inf,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.setting = setting
        self.deadline = deadline
        self.environment = dict(environment or {})
        self._processes: set[subprocess.Popen[bytes]] = set()

    def run(self, parts: Sequence[Part]) -> list[Row]:
        """Run parts one after another, neighbours that are not timed beside each other; returns all
        rows."""
        rows: list[Row] = []
        for alone, group in itertools.groupby(parts, lambda part: part.alone):
            workers = 1 if alone else min(_MOST_AT_ONCE, len(usable_cores()))
            with concurrent.futures.ThreadPoolExecutor(workers) as pool:
                futures = [pool.submit(self._run_part, part, rows) for part in group]
                try:
                    for future in futures:
                        future.result()
                except BaseException:
                    # Ctrl-C reaches this process alone: each part has a session of its own.
                    self.deadline = 0.0
                    pool.shutdown(wait=False, cancel_futures=True)
                    for process in list(self._processes):
                        _kill(process)
                    raise
        return rows

    def _run_part(self, part: Part, found: list[Row]) -> None:
        """Run a part, and add its rows to those that were found before."""
        begin = time.perf_counter()
        meter = NoiseMeter()
        seconds = min(part.seconds, self.deadline - begin)
        rows = list[Row]()
        status = "failed"
        why = ""
        if seconds < LEAST_SECONDS:
            why = "no time was left for it"
        else:
            setting = asdict(self.setting) | {"seconds": seconds, "before": list(found)}
            order = {"function": part.function, "arguments": part.arguments, "setting": setting}
            with tempfile.TemporaryDirectory() as folder:
                why = self._process(json.dumps(order), seconds, pathlib.Path(folder))
                lines = pathlib.Path(folder, "rows").read_text().splitlines(keepends=True)
                # A row that it was writing when it was killed is not whole.
                rows = [json.loads(line) for line in lines if line.endswith("\n")]
            if not why:
                status = "done"
                for row in rows:
                    if "skipped" in row:
                        status = "skipped"
                        why = row["skipped"]
        noise = meter.read()
        took = time.perf_counter() - begin
        print(f"{part.title}: {status}{why and f' ({why})'}, {took:.0f} s", file=sys.stderr)
        row = {
            "table": report.PARTS,
            "part": part.title,
            "status": status,
            "why": why,
            "s": round(took),
        }
        row |= {"steal %": 100 * noise.steal, "others %": 100 * noise.others}
        found += [row for row in rows if "table" in row] + [row]

    def _process(self, order: str, seconds: float, folder: pathlib.Path) -> str:
        """Run a part to its end; returns what went wrong, or nothing."""
        environment = python_environment() | {"HF_HUB_OFFLINE": "1"} | self.environment
        (folder / "order").write_text(order)
        command = [sys.executable, "-m", "nanovllm.lab.bench"]
        with (
            open(folder / "order") as given,
            open(folder / "rows", "w") as rows,
            open(folder / "log", "w") as log,
        ):
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=given,
                stdout=rows,
                stderr=log,
                cwd=folder,
                start_new_session=True,
            )
        self._processes.add(process)
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            why = f"stopped after {seconds:.0f} s"
        else:
            why = f"exit code {code}" if code else ""
            if code < 0:
                why = f"killed by {signal.Signals(-code).name}"
        finally:
            _kill(process)
            self._processes.discard(process)
        return why and why + end_of_log(folder / "log")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a part and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
