"""The grouped matrix product against float64: every height of a tile, groups of any size."""

from __future__ import annotations

import pytest
import torch

from nanovllm.ops import reference, triton_grouped
from nanovllm.ops.triton_grouped import choose_grouped_tiles, grouped_linear
from tests.stand_ins import refuse_reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SMALL, TALL = (16, 64, 32, 4, 3), (64, 128, 64, 4, 3)


@pytest.fixture(autouse=True)
def no_fallback(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that hands its work to plain torch would agree with plain torch."""
    if "fallback" in request.node.name:
        return

    refuse_reference(monkeypatch, triton_grouped)


def check(
    counts: list[int], outputs: int, inputs: int, dtype: torch.dtype, spare_rows: int = 0
) -> None:
    generator = torch.Generator().manual_seed(sum(counts) + outputs)
    rows = sum(counts) + spare_rows
    # Rows of a wider tensor, whose other columns are poison.
    wide = torch.full((rows, inputs + 3), float("nan"), dtype=dtype)
    x = wide[:, :inputs]
    x.copy_(torch.randn(rows, inputs, generator=generator))
    weight = torch.randn(len(counts), outputs, inputs, generator=generator).to(dtype)
    groups = torch.tensor(counts)
    out = grouped_linear(x, weight, groups)
    exact = reference.grouped_linear(x.double(), weight.double(), groups)
    assert out.shape == (rows, outputs) and out.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        out[: sum(counts)].double(), exact[: sum(counts)], rtol=2 * eps, atol=1e-5 + eps
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "counts", [[5], [0, 3, 0, 17, 1], [16, 16], [0, 0, 40], [1] * 9, [33, 0, 0, 0, 0, 15]], ids=str
)
def test_groups_of_any_size(counts: list[int], dtype: torch.dtype) -> None:
    check(counts, 80, 72, dtype)


@pytest.mark.parametrize("tiles", [SMALL, TALL], ids=["small", "tall"])
def test_tiles_that_groups_do_not_fill(
    tiles: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = triton_grouped.GroupedTiles(*tiles)
    monkeypatch.setattr(triton_grouped, "choose_grouped_tiles", lambda rows, dtype: chosen)
    check([70, 0, 1, 64, 65], 130, 100, torch.bfloat16)


def test_rows_of_no_group_are_left_alone() -> None:
    check([4, 0, 9], 64, 32, torch.float32, spare_rows=20)


def test_nothing_to_do() -> None:
    weight = torch.randn(3, 8, 16)
    assert grouped_linear(torch.empty(0, 16), weight, torch.zeros(3, dtype=torch.int64)).shape == (
        0,
        8,
    )
    check([0, 0], 8, 16, torch.float32, spare_rows=3)


def test_weights_beyond_two_to_the_31() -> None:
    """Offsets of experts have 64 bits. Only one expert of the 4 GiB is ever touched."""
    memory = torch.empty(2**31 + 32 * 16, dtype=torch.bfloat16)
    weight = memory.as_strided((2, 32, 16), (2**31, 16, 1))
    weight[1].copy_(torch.randn(32, 16))
    x = torch.randn(3, 16).bfloat16()
    expected = x.double() @ weight[1].double().T
    out = grouped_linear(x, weight, torch.tensor([0, 3]))
    torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)


def test_every_height_is_chosen() -> None:
    heights = {
        choose_grouped_tiles(rows, torch.bfloat16)[0] for rows in (1, 32, 33, 256, 257, 5000)
    }
    assert heights == {16, 64, 128}
    assert choose_grouped_tiles(5000, torch.float32)[0] == 16


@pytest.mark.parametrize("case", ["float64", "gaps", "gradient"])
def test_fallback_for_what_the_kernel_does_not_cover(case: str) -> None:
    dtype = torch.float64 if case == "float64" else torch.float32
    x, weight = torch.randn(6, 32, dtype=dtype), torch.randn(2, 8, 32, dtype=dtype)
    counts = torch.tensor([2, 4])
    if case == "gaps":
        x = torch.randn(6, 64, dtype=dtype)[:, ::2]
    x.requires_grad = case == "gradient"
    out = grouped_linear(x, weight, counts)
    assert torch.equal(out, reference.grouped_linear(x, weight, counts))
