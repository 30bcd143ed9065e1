"""Rows of a benchmark, read by tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nanovllm.lab.bench.report import GOALS, Row


def goals(found: Iterable[Row]) -> list[Row]:
    return [row for row in found if row["table"] == GOALS]


def rows_of(found: Iterable[Row]) -> list[Row]:
    return [row for row in found if row["table"] != GOALS]


def reached(found: Iterable[Row]) -> list[bool | None]:
    return [row["reached"] for row in goals(found)]


def measured(found: Iterable[Row]) -> list[Any]:
    return [row["measured"] for row in goals(found)]
