"""The router's root page in a browser."""

from __future__ import annotations

from string import Template
from typing import Any

from nanovllm.router.app import OVERVIEW

pytest_plugins = ["tests.browser"]


def test_every_column_is_in_sight_on_a_phone(page: Any) -> None:
    row = "".join(f"<td>{cell}</td>" for cell in ("prefill", "http://127.0.0.1:36491", "ready", "12", "10,231", "0"))
    page.set_viewport_size({"width": 390, "height": 844})
    page.set_content(Template(OVERVIEW.read_text()).substitute(rows=f"<tr>{row}</tr>"))
    cells = [cell.bounding_box() for cell in page.locator("th, td").all()]
    assert len(cells) == 12 and all(cell["x"] + cell["width"] <= 390 for cell in cells)
