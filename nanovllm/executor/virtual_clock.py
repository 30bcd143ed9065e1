"""The virtual clock of engines on sleeping devices: what a step's order says about time, and the
timeline of each rank.

Times are whole picoseconds. One second of virtual time takes `scale` seconds of the machine's
monotonic clock, which all processes of a machine share: virtual time 0 is when that clock was 0.
Each message carries a virtual time, and a rank computes from the latest of the messages that it
needs. The times therefore do not depend on how busy the machine is; sleeping only makes the
monotonic clock follow them."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import time
from typing import TYPE_CHECKING, cast

import msgspec

from nanovllm.core.hooks import SchedulerHooks
from nanovllm.core.queues import Queues
from nanovllm.core.request import Request, RequestStatus
from nanovllm.core.schedule import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from nanovllm.data.request import EngineOutput
from nanovllm.processes.activity import waiting_for_others

if TYPE_CHECKING:
    from nanovllm.features.data_parallel.waves import Waves

# The name under which the scheduler's half and the runner's tell each other the time.
VIRTUAL_CLOCK = "virtual_clock"
# Picoseconds per second.
SECOND = 10**12


def read_clock(scale: float) -> int:
    """Return the virtual time that belongs to this moment of the monotonic clock."""
    return int(time.monotonic_ns() * 1000 / scale)


def sleep_until(virtual: int, scale: float) -> None:
    """Sleep until the monotonic clock has reached a virtual time."""
    seconds = virtual * scale / SECOND - time.monotonic()
    if seconds > 0:
        with waiting_for_others():
            time.sleep(seconds)


class VirtualClock(SchedulerHooks):
    """Tells the ranks when each step is ordered, and hears from them when it has ended.

    An engine with work orders a step when the result arrives that it has waited for. An idle engine
    orders one when a request arrives: at the time that the request carries, if another engine has
    computed its prompt, and else at that of the monotonic clock.

    Args:
        scale: seconds per virtual second.
        waves: in which the engine steps together with others; None for an engine alone.

    Attributes:
        now: the latest virtual time of which the engine knows.
        ordered: the time of the last plan.
    """

    def __init__(self, queues: Queues, scale: float, waves: Waves | None = None) -> None:
        self.queues = queues
        self.scale = scale
        self.now = 0
        self.ordered = 0
        self._started = read_clock(scale)
        self._waves = waves
        self._last_wave = -1
        # By identity: a new request may have the id of one that has ended.
        self._known: set[Request] = set()  # requests of the last plan or result
        self._timed: set[Request] = set()  # those of them from which the next plan's time follows

    def planned(self, plan: SchedulerOutput) -> None:
        """Tell the ranks the time."""
        requests = set(self.queues.requests.values())
        new = requests - self._known
        arrivals = [time for request in new if (time := _carried_time(request))]
        is_timed = self._continues() or (bool(new) and len(arrivals) == len(new))
        now = max([self.now, *arrivals, *([] if is_timed else [read_clock(self.scale)])])
        if is_timed or not plan.empty:
            self.now = now
        # These wait for KV that another engine still computes: no message tells when it moves.
        receiving = self.queues.by_status[RequestStatus.WAITING_FOR_REMOTE_KVS]
        untimed = {each for each in receiving if not _carried_time(each)}
        self._known = requests
        self._timed = self._known - untimed
        self.ordered = now
        plan.extras[VIRTUAL_CLOCK] = now

    def _continues(self) -> bool:
        """Whether the engine has had work since the last plan or result."""
        if self._waves is None:
            return not self._timed.isdisjoint(self.queues.requests.values())
        is_same = self._last_wave == self._waves.ended
        self._last_wave = self._waves.ended
        return is_same

    def arrived(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Take in when the step, or a transfer of KV, has ended."""
        reports = (result.extras, *result.others)
        ended = max(cast(int, extras[VIRTUAL_CLOCK]) for extras in reports)
        if ended > self.now:
            self.now = ended
            self._timed = set(self.queues.requests.values())

    def sampled(
        self,
        request: Request,
        scheduled: ScheduledRequest,
        result: ModelRunnerOutput,
        output: EngineOutput,
    ) -> None:
        """Tell the engine that continues a request when its prompt was computed."""
        if request.remote_kv is not None:
            # Between processes, integers have 64 bits.
            request.remote_kv["virtual_time"] = divmod(self.now, SECOND)

    def seconds(self, virtual: int) -> float:
        """Return the virtual seconds since the engine started, rounded as in a trace."""
        return round(max(0, virtual - self._started) / SECOND, 6)


def _carried_time(request: Request) -> int:
    """Return when another engine has computed a request's prompt; 0 if none has."""
    seconds, rest = (request.kv_transfer_params or {}).get("virtual_time", (0, 0))
    return int(seconds * SECOND + rest)


class RankStep(msgspec.Struct, tag="step", frozen=True, kw_only=True):
    """A step on one rank. Each time is when a phase begins.

    Attributes:
        order: the engine has ordered the step.
        compute: the rank has what it needs: its last step is done, and the stage before has sent.
        wait: it has computed, and waits for the slowest rank of its group.
        communicate: all have computed; the time of all collectives of the step begins.
        answer: the step is done.
        tokens: by request, how many it computes; none for a step that only joins other engines.
        parts: by name, what computing and communicating would take on this rank alone, were it no
            straggler.
    """

    order: int
    compute: int
    wait: int
    communicate: int
    answer: int
    tokens: dict[str, int]
    parts: dict[str, int]


class RankRead(msgspec.Struct, tag="read", frozen=True, kw_only=True):
    """Blocks that a rank has read from another engine.

    Attributes:
        begin, end: the time when the link was free for it, and when all had arrived.
        num_bytes: that the blocks have on the predicted machine.
    """

    transfer_id: str
    begin: int
    end: int
    num_bytes: int


Timeline = list[RankStep | RankRead]


class TimelineWriter:
    """Writes a rank's timeline, as JSON lines.

    Args:
        folder: made if it is missing; None: nothing is written.
        name: of the rank. A second rank with this name, or a second run, gets a number after it.
    """

    def __init__(self, folder: str | None, name: str) -> None:
        self._path: pathlib.Path | None = None
        if folder is None:
            return
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        for ending in itertools.chain([""], map(" ({})".format, itertools.count(2))):
            self._path = pathlib.Path(folder, f"{name}{ending}.jsonl")
            with contextlib.suppress(FileExistsError):
                return self._path.touch(exist_ok=False)

    def write(self, entry: RankStep | RankRead) -> None:
        """Add an entry. Readers see it immediately."""
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(entry) + b"\n")


def read_timelines(folder: str | pathlib.Path) -> dict[str, Timeline]:
    """Return the timelines that ranks have written to a folder, by the names of the ranks: "rank 0"
    or, with several engines, "prefill rank 0"."""
    return {
        path.stem: [
            msgspec.json.decode(line, type=RankStep | RankRead)
            for line in path.read_bytes().splitlines()
        ]
        for path in sorted(pathlib.Path(folder).glob("*.jsonl"))
    }
