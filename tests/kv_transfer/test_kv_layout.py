"""What two ranks have in common: every layer and head comes from exactly one rank, whatever the
parallelism."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.kv_transfer.layout import KVLayout
from nanovllm.kv_transfer.transport.pieces import Piece, check_same, pieces_from, pieces_to
from tests.kv_ranks import layouts

TP_SIZES = (1, 2, 3, 4, 8)


def fits(heads: int, tp: int) -> bool:
    return heads % tp == 0 or tp % heads == 0


@st.composite
def two_engines(draw: st.DrawFn) -> tuple[list[KVLayout], list[KVLayout]]:
    heads = draw(st.integers(0, 8))
    layers = draw(st.integers(2, 5))
    sizes = st.sampled_from([tp for tp in TP_SIZES if heads == 0 or fits(heads, tp)])
    one, other = (
        layouts(pp=draw(st.integers(1, 2)), tp=draw(sizes), num_layers=layers, num_kv_heads=heads)
        for _ in "ab"
    )
    return one, other


@given(two_engines())
def test_every_layer_and_head_comes_from_one_rank(engines):
    mine, theirs = engines
    for layout in mine:
        cells = Counter()
        for piece in pieces_from(layout, tuple(theirs)):
            other = theirs[piece.peer]
            for layer in piece.layers:
                assert layer in other.layers
                for i in range(piece.num_heads):
                    head = layout.heads[piece.local_head + i]
                    assert head == other.heads[piece.remote_head + i]
                    cells[layer, head] += 1
        assert cells == Counter((layer, head) for layer in layout.layers for head in layout.heads)


@given(two_engines())
def test_who_writes_and_who_reads_mean_the_same(engines):
    mine, theirs = engines
    reads = {
        (piece.peer, i, piece.layers, piece.remote_head, piece.local_head, piece.num_heads)
        for i, layout in enumerate(mine)
        for piece in pieces_from(layout, tuple(theirs))
    }
    writes = {
        (i, piece.peer, piece.layers, piece.local_head, piece.remote_head, piece.num_heads)
        for i, layout in enumerate(theirs)
        for piece in pieces_to(layout, tuple(mine))
    }
    assert reads == writes


def test_replicas_share_the_work():
    """Four ranks with one KV head in two copies each: both copies of the other engine are asked."""
    mine, theirs = layouts(tp=4), layouts(tp=8)
    asked = [piece.peer for layout in mine for piece in pieces_from(layout, tuple(theirs))]
    assert len(set(asked)) == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 16),
        ("dtype", "bfloat16"),
        ("width", 16),
        ("num_kv_heads", 4),
        ("num_layers", 3),
        ("num_kv_heads", 0),
    ],
)
def test_what_does_not_fit_is_named_with_both_values(field, value):
    mine, theirs = layouts()[0], layouts(**{field: value})[0]
    name = {"width": "head_dim"}.get(field, field)
    with pytest.raises(
        ValueError, match=f"{name} is {getattr(mine, field)!r} here and {value!r} there"
    ):
        check_same(mine.fingerprint, theirs.fingerprint)
    with pytest.raises(ValueError, match=name):
        pieces_from(mine, (theirs,))


def test_other_parallelism_and_number_of_blocks_fit():
    check_same(layouts()[0].fingerprint, layouts(pp=2, tp=2, num_blocks=99)[3].fingerprint)


@pytest.mark.parametrize("missing", [0, 3])
def test_missing_and_repeated_ranks_are_refused(missing):
    theirs = layouts(pp=2, tp=2)
    theirs[missing] = theirs[(missing + 1) % 4]
    with pytest.raises(ValueError, match="exactly once"):
        pieces_from(layouts()[0], tuple(theirs))


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "int32"},
        {"end_layer": 3},
        {"first_layer": -1},
        {"first_layer": 2},
        {"tp_rank": 1},
        {"num_kv_heads": 3, "tp_size": 2},
        {"block_size": 0},
        {"num_blocks": 1 << 50},
        {"num_kv_heads": -1},
    ],
)
def test_layouts_that_cannot_be_are_refused(change):
    with pytest.raises(ValueError):
        dataclasses.replace(layouts()[0], **change)


@pytest.mark.parametrize("heads", [0, 1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2])
def test_runs_are_where_torch_has_the_heads(heads, tp):
    layout = layouts(tp=tp, num_kv_heads=heads)[-1]
    cache = torch.arange(layout.num_blocks * layout.block_bytes // 4, dtype=torch.float32).view(
        layout.cache_shape
    )
    flat = cache[5].reshape(-1).view(torch.uint8)
    assert len(flat) == layout.block_bytes
    for first in range(len(layout.heads)):
        for count in range(1, len(layout.heads) - first + 1):
            num_runs, size = Piece(0, layout.layers, first, first, count).runs(layout, layout)
            starts = [
                first * layout.head_bytes + i * layout.block_bytes // 2 for i in range(num_runs)
            ]
            found = torch.cat([flat[start : start + size] for start in starts]).view(torch.float32)
            wanted = cache[5] if layout.is_latent else cache[5][:, first : first + count]
            assert torch.equal(found, wanted.reshape(-1))
