"""What was found: percentages of what the machine can do, ratios, and the targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanovllm.lab.bench.gpu.parts import Outcome
from nanovllm.lab.bench.gpu.setting import Row
from nanovllm.lab.bench.roofline import Work, roofline_share

OURS, FLASH = "nanovllm", "SDPA flash"
OTHERS = (FLASH, "SDPA cuDNN", "flex_attention")
GRAPHS = "nanovllm, graphs"


@dataclass
class Target:
    """A goal; `measured` and `reached` are None if it was not measured."""

    metric: str
    goal: str
    measured: float | None
    reached: bool | None

    @classmethod
    def at_least(cls, metric: str, goal: float, unit: str, values: Sequence[float]) -> Target:
        """The smallest value has to reach the goal."""
        worst = min(values, default=None)
        return cls(metric, f"≥ {goal:g}{unit}", worst, None if worst is None else worst >= goal)

    @classmethod
    def at_most(cls, metric: str, goal: float, unit: str, values: Sequence[float]) -> Target:
        """The largest value must not be above the goal."""
        worst = max(values, default=None)
        return cls(metric, f"≤ {goal:g}{unit}", worst, None if worst is None else worst <= goal)


class Results:
    """Everything that was found.

    Args:
        context: command, date and the like.
    """

    def __init__(self, outcomes: Sequence[Outcome], context: dict[str, Any], dry_run: bool) -> None:
        self.outcomes, self.context, self.dry_run = outcomes, context, dry_run
        self.limits = {row["name"]: row["value"] for row in self.rows("limits")}
        self.derive()

    def rows(self, table: str) -> list[Row]:
        """The rows of a table, from all parts."""
        return [row for outcome in self.outcomes for row in outcome.rows if row["table"] == table]

    @property
    def failed(self) -> bool:
        """Whether a part failed, or a check did."""
        return any(outcome.status == "failed" for outcome in self.outcomes) or any(
            row["passed"] is False for row in self.rows("checks")
        )

    def derive(self) -> None:
        """Add to each row what follows from it and from the machine's ceilings, if those were measured."""
        bandwidth, peak = (self.limits.get(f"{name}_per_second") for name in ("bytes", "flops"))
        for row in self.rows("decode") + self.rows("latent"):
            if "seconds" in row and bandwidth:
                row["percent_of_copy"] = 100 * row["num_bytes"] / row["seconds"] / bandwidth
        for row in self.rows("prefill") + self.rows("latent"):
            if "seconds" in row and peak:
                row["percent_of_peak"] = 100 * row["flops"] / row["seconds"] / peak
        for row in self.rows("end_to_end"):
            if "seconds" not in row:
                continue
            row["tokens_per_second"] = row["tokens"] / row["seconds"]
            if bandwidth and peak:
                work = Work(row["num_bytes"], row["flops"])
                row["percent_of_roofline"] = roofline_share(work, row["seconds"], bandwidth, peak).percent
            if bandwidth and "step_seconds" in row:
                row["percent_of_weight_bandwidth"] = 100 * row["weight_bytes"] / bandwidth / row["step_seconds"]

    def prefill_ratios(self, other: str) -> dict[tuple[int, int], float]:
        """How much longer the other implementation takes, by (query_len, context)."""
        times: dict[str, dict[tuple[int, int], float]] = {OURS: {}, other: {}}
        for row in self.rows("prefill"):
            if row["implementation"] in times and "seconds" in row:
                times[row["implementation"]][row["query_len"], row["context"]] = row["seconds"]
        return {key: times[other][key] / own for key, own in times[OURS].items() if key in times[other]}

    def end_to_end_ratio(self, row: Row) -> float | None:
        """Tokens a second of nanovllm with graphs over those of this row, on the same work."""
        for own in self.rows("end_to_end"):
            same = own["shape"] == row["shape"] and own["workload"] == row["workload"]
            if same and own["engine"] == GRAPHS and {"seconds"} <= own.keys() & row.keys():
                return row["seconds"] / own["seconds"]
        return None

    def _values(self, table: str, column: str, **wanted: Any) -> list[float]:
        return [
            row[column]
            for row in self.rows(table)
            if column in row and all(row[name] == value for name, value in wanted.items())
        ]

    def targets(self) -> list[Target]:
        """The goals for an H200; each takes the worst of its values."""
        big_decodes = [
            row["percent_of_copy"]
            for row in self.rows("decode")
            if row["batch"] >= 64 and row["context"] >= 8192 and "percent_of_copy" in row
        ]
        latent_decodes = [
            row["percent_of_copy"]
            for row in self.rows("latent")
            if (row["heads"], row["batch"]) in ((16, 64), (16, 256))
            and row["context"] >= 8192
            and "percent_of_copy" in row
        ]
        at_8k = self._values("prefill", "percent_of_peak", implementation=OURS, query_len=8192, context=0)
        slower = [1 / ratio for ratio in self.prefill_ratios(FLASH).values()]
        step = self._values(
            "end_to_end", "percent_of_weight_bandwidth", shape="Llama-3.1-8B", engine=GRAPHS, workload="W1"
        )
        throughput = self._values(
            "end_to_end", "percent_of_roofline", shape="Llama-3.2-1B", engine=GRAPHS, workload="256 requests"
        )
        gaps = [100 * share for share in self._values("step_split", "host_gaps", engine=GRAPHS)]
        at_least, at_most = Target.at_least, Target.at_most
        found = [
            at_least("decode attention from 64 × 8k up, of copy bandwidth", 85, " %", big_decodes),
            at_least("latent decode, 16 heads, from 64 × 8k up, of copy bandwidth", 80, " %", latent_decodes),
            at_least("prefill attention of 8k, of the bf16 matrix peak", 60, " %", at_8k),
            at_most("prefill attention, time over that of torch's flash SDPA", 1.1, "", slower),
            at_least("8B shape, decode step of one stream, of the weight-bandwidth limit", 85, " %", step),
            at_least("1B shape, 256 requests, of the roofline", 60, " %", throughput),
            at_most("host gap in a decode step, with graphs", 5, " %", gaps),
        ]
        # Nothing can be reached in a dry run.
        return [replace(target, reached=None) for target in found] if self.dry_run else found
