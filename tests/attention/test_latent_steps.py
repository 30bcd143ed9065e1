"""The steps of latent attention against ordinary attention in float64, one at a time; `test_latent`
has the backends."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanovllm.attention.latent import absorb, decode_absorbed, expand, unabsorb

HEADS, RANK, ROPE, NOPE, V = 3, 6, 2, 4, 5


def draw(*shape: int) -> Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))
    )


def same(got: Tensor, expected: Tensor, words: str) -> None:
    torch.testing.assert_close(got, expected, msg=lambda difference: f"{words}\n{difference}")


def test_keys_and_values_of_each_head() -> None:
    rows, up = draw(7, RANK + ROPE), draw(HEADS, NOPE + V, RANK)
    keys, values = expand(rows, up, NOPE)
    assert keys.shape == (HEADS, 7, NOPE + ROPE) and values.shape == (HEADS, 7, V)
    for head in range(HEADS):
        for token in range(7):
            product = up[head] @ rows[token, :RANK]
            same(keys[head, token, :NOPE], product[:NOPE], "the first channels of the product")
            same(keys[head, token, NOPE:], rows[token, RANK:], "the rotated channels, as they are")
            same(values[head, token], product[NOPE:], "the other channels of the product")


def test_absorbed_queries_give_the_scores_of_expanded_keys() -> None:
    q, rows, up = draw(5, HEADS, NOPE + ROPE), draw(7, RANK + ROPE), draw(HEADS, NOPE + V, RANK)
    absorbed = absorb(q, up, ROPE)
    assert absorbed.shape == (5, HEADS, RANK + ROPE)
    same(absorbed[:, :, RANK:], q[:, :, NOPE:], "the rotated channels stay unchanged")
    keys, _ = expand(rows, up, NOPE)
    scores = torch.einsum("qhr,tr->qht", absorbed, rows)
    same(scores, torch.einsum("qhd,htd->qht", q, keys), "q . (W c) = (W^T q) . c")


def test_averages_of_latents_become_averages_of_values() -> None:
    rows, up, weights = draw(7, RANK + ROPE), draw(HEADS, NOPE + V, RANK), draw(5, HEADS, 7)
    averages = torch.einsum("qht,tr->qhr", weights, rows[:, :RANK])
    _, values = expand(rows, up, NOPE)
    out = unabsorb(averages, up, V)
    assert out.shape == (5, HEADS, V)
    same(out, torch.einsum("qht,htv->qhv", weights, values), "sum p (W c) = W (sum p c)")


def cache_of(sequences: list[Tensor], block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences in pages in falling order, and NaN in all slots that no token has: cache, block
    tables, lengths."""
    counts = [-(-len(rows) // block_size) for rows in sequences]
    cache = torch.full(
        (sum(counts) + 1, block_size, RANK + ROPE), float("nan"), dtype=sequences[0].dtype
    )
    tables, free = (
        torch.full((len(sequences), max(counts) + 2), 10**6, dtype=torch.int32),
        sum(counts),
    )
    for s, (rows, count) in enumerate(zip(sequences, counts, strict=True)):
        for i in range(count):
            part = rows[i * block_size : (i + 1) * block_size]
            cache[free, : len(part)] = part
            tables[s, i] = free
            free -= 1
    return cache, tables, torch.tensor([len(rows) for rows in sequences], dtype=torch.int32)


def attend(q: Tensor, rows: Tensor, scale: float) -> Tensor:
    """One query per head over rows that are keys, and whose latents are values."""
    return (q @ rows.T * scale).softmax(-1) @ rows[:, :RANK]


@pytest.mark.parametrize("lengths", [[1], [4], [5, 1, 8], [3, 12, 4, 7]], ids=str)
@pytest.mark.parametrize("block_size", [1, 4])
def test_each_sequence_sees_its_own_rows_only(lengths: list[int], block_size: int) -> None:
    sequences, q = (
        [draw(length, RANK + ROPE) for length in lengths],
        draw(len(lengths), HEADS, RANK + ROPE),
    )
    cache, tables, seq_lens = cache_of(sequences, block_size)
    before = cache.clone()
    out = decode_absorbed(q, cache, tables, seq_lens, RANK, 0.5)
    expected = torch.stack([attend(q[s], rows, 0.5) for s, rows in enumerate(sequences)])
    assert out.shape == expected.shape
    is_nan = bool(out.isnan().any())
    assert not is_nan, "a row past the last token may be NaN, and 0 * NaN is NaN: it must become 0"
    same(out, expected, "softmax(scale * q . rows) times the rows' latents, for each sequence")
    assert torch.equal(cache.nan_to_num(), before.nan_to_num()), "the cache stays"


def test_16_bit_numbers_are_multiplied_in_float32() -> None:
    sequences, q = [draw(40, RANK + ROPE).bfloat16()], draw(1, HEADS, RANK + ROPE).bfloat16()
    out = decode_absorbed(q, *cache_of(sequences, 4), RANK, 1.0)
    expected = attend(q[0].float(), sequences[0].float(), 1.0).bfloat16()
    assert out.dtype == torch.bfloat16, "the dtype of q"
    same(out[0], expected, "rounded once, at the end")
