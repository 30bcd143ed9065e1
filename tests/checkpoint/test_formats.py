"""The table of supported formats."""

from __future__ import annotations

from pathlib import Path

import nanovllm.layers.quantization
from nanovllm.checkpoint.formats import SUPPORTED, support_table
from nanovllm.layers.quantization.stored import WEIGHTS


def test_the_readme_has_the_table_of_what_is_supported() -> None:
    folder = Path(nanovllm.layers.quantization.__file__).parent
    assert support_table() in (folder / "README.md").read_text(encoding="utf-8")


def test_every_layout_of_the_table_has_a_reader() -> None:
    readers = nanovllm.layers.quantization.READERS
    for (layout, _), support in SUPPORTED.items():
        assert layout in WEIGHTS
        assert support.dequantized != (layout in readers)
