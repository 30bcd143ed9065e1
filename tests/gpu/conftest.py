"""Proofs on an NVIDIA GPU; `make gpu` runs them before it measures.

They are skipped without a GPU. TRITON_INTERPRET=1 makes them a dry run on the CPU: the same code
with a few small cases. `--share i/n` runs every n-th test from the i-th on."""

from __future__ import annotations

import pathlib

import pytest

from tests.gpu.setting import DRY_RUN, ON_GPU


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", default="0/1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    own = [item for item in items if pathlib.Path(__file__).parent in item.path.parents]
    if not ON_GPU and not DRY_RUN:
        for item in own:
            item.add_marker(pytest.mark.skip(reason="it needs an NVIDIA GPU"))
    first, step = map(int, config.getoption("--share", "0/1").split("/"))
    left_out = {id(item) for index, item in enumerate(own) if index % step != first}
    items[:] = [item for item in items if id(item) not in left_out]
