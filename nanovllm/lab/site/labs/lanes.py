"""Lanes over time, as plain data for the page: what a request, a device or an engine does when."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nanovllm.trace.record import StepRecord, TracedRequest
from nanovllm.trace.trace import Trace

Piece = dict[str, Any]

KINDS = {
    "prefill": "prompt tokens",
    "decode": "an output token",
    "again": "computed before, and lost",
    "waits": "waits",
    "wasted": "a token that no request needs",
    "plan": "plans a step",
    "padding": "one token of padding",
    "stalled": "waits for another engine",
}


def piece(begin: float, end: float, kind: str, text: str = "", title: str = "") -> Piece:
    """Return a piece of a lane, from one time to another."""
    return {"from": begin, "to": end, "kind": kind, "text": text, "title": title or text}


def lanes_of(rows: dict[str, list[Piece]], unit: str) -> dict[str, Any]:
    """Return a picture of lanes, with a legend for the kinds of pieces in it."""
    pieces = [each for row in rows.values() for each in row]
    kinds = {each["kind"] for each in pieces}
    return {
        "unit": unit,
        "end": max((each["to"] for each in pieces), default=0),
        "rows": [{"name": name, "pieces": row} for name, row in rows.items()],
        "legend": {kind: words for kind, words in KINDS.items() if kind in kinds},
    }


def joined(rows: dict[str, list[Piece]]) -> dict[str, list[Piece]]:
    """Join pieces of one kind that follow each other, for pictures with many requests."""
    result: dict[str, list[Piece]] = {}
    for name, pieces in rows.items():
        row: list[Piece] = []
        for each in pieces:
            if row and (row[-1]["kind"], row[-1]["to"]) == (each["kind"], each["from"]):
                row[-1]["to"] = each["to"]
                row[-1]["title"] = f"{name}, steps {row[-1]['from']} to {each['to'] - 1}"
            else:
                row.append({**each, "text": ""})
        result[name] = row
    return result


class Reach:
    """How far the tokens of each request have been computed, in any step so far."""

    def __init__(self) -> None:
        self._ends: dict[str, int] = {}

    def lost(self, share: TracedRequest) -> int:
        """Take a share; return how many of its tokens an earlier step has computed, too."""
        before = self._ends.get(share.request_id, 0)
        end = share.start + share.num_tokens
        self._ends[share.request_id] = max(before, end)
        return max(0, min(end, before) - share.start)


def num_computed_again(records: Iterable[StepRecord]) -> int:
    """Return how many tokens were computed that an earlier step had computed."""
    reach = Reach()
    return sum(reach.lost(share) for record in records for share in record.requests)


def request_lanes(trace: Trace) -> dict[str, list[Piece]]:
    """Return what each request does in each step, until it has ended."""
    reach = Reach()
    rows: dict[str, list[Piece]] = {}
    present: list[str] = []
    for record in trace:
        present += record.arrived
        shares = {share.request_id: share for share in record.requests}
        for name in present:
            row = rows.setdefault(name, [])
            row.append(_piece_of(record, shares.get(name), reach, name))
        present = [name for name in present if name not in record.finished]
    return rows


def _piece_of(record: StepRecord, share: TracedRequest | None, reach: Reach, name: str) -> Piece:
    step = record.step
    if share is None:
        why = "is preempted, and waits" if name in record.preempted else "waits"
        return piece(step, step + 1, "waits", "", f"step {step}: {name} {why}")
    lost = reach.lost(share)
    kind = "again" if lost else share.kind
    words = f"step {step}: {share.num_tokens} tokens of {name}"
    return piece(step, step + 1, kind, "", words + (f", {lost} of them again" if lost else ""))
