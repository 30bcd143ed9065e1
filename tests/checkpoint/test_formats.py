"""The table of supported formats."""

from __future__ import annotations

from pathlib import Path

import nanovllm.layers.quantization
from nanovllm.checkpoint.formats import SUPPORTED
from nanovllm.layers.quantization.stored import WEIGHTS


def support_table() -> str:
    """Return `SUPPORTED` as a table in Markdown."""
    zeros = {(False,): "no", (True,): "yes", (False, True): "yes or no"}
    rows = [
        "| format | bits | a scale per | zero points | act order | activations | in memory |",
        "| --- | ---: | --- | --- | --- | --- | --- |",
    ]
    for (layout, bits), support in SUPPORTED.items():
        inputs = "as they are" + (", or 8 bits per token" * support.quantizes_inputs)
        memory = "dequantized" if support.dequantized else "as stored"
        order = "yes" if support.any_order else "no"
        scales = " or ".join(support.scales)
        rows.append(
            f"| {layout} | {bits} | {scales} | {zeros[support.zeros]} | {order} | {inputs} | "
            f"{memory} |"
        )
    return "\n".join(rows)


def test_the_readme_has_the_table_of_what_is_supported() -> None:
    folder = Path(nanovllm.layers.quantization.__file__).parent
    assert support_table() in (folder / "README.md").read_text(encoding="utf-8")


def test_every_layout_of_the_table_has_a_reader() -> None:
    readers = nanovllm.layers.quantization.READERS
    for (layout, _), support in SUPPORTED.items():
        assert layout in WEIGHTS
        assert support.dequantized != (layout in readers)
