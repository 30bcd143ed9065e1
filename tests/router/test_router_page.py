"""The router's root page in a browser."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jinja2

from nanovllm.router.app import OVERVIEW

pytest_plugins = ["tests.browser"]


def test_every_column_is_in_sight_on_a_phone(page: Any) -> None:
    server = SimpleNamespace(role="prefill", url="http://127.0.0.1:36491", problem="")
    vars(server).update(num_running=12, num_answered=10_231, num_failures=0)
    page.set_viewport_size({"width": 390, "height": 844})
    page.set_content(jinja2.Template(OVERVIEW.read_text()).render(servers=[server]))
    cells = [cell.bounding_box() for cell in page.locator("th, td").all()]
    assert len(cells) == 12 and all(cell["x"] + cell["width"] <= 390 for cell in cells)
    assert page.get_by_text("10,231").count() == 1
