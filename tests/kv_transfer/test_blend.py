"""CacheBlend: the rotation against fresh keys, scattered rows against whole prompts, the blend
against transformers."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanovllm.attention.backends import get_backend
from nanovllm.attention.base import (
    AttentionBackend,
    ForwardContext,
    forward_context,
    kv_cache_shape,
)
from nanovllm.distributed.groups import Grid
from nanovllm.kv_transfer.blend.blend import BlendOutput, BlendRows, blend, scattered_metadata
from nanovllm.kv_transfer.blend.chunks import Chunk, place_chunk, save_chunk
from nanovllm.kv_transfer.blend.rotation import rotate_keys
from nanovllm.lab.course.ranks import run_ranks
from nanovllm.layers.tensor_parallel import parallelize
from nanovllm.models.config import ModelConfig
from nanovllm.models.llama import LlamaForCausalLM, rotary_table
from nanovllm.models.loader import load_model
from nanovllm.ops.attention import gather_kv
from tests.examples import examples
from tests.oracle import make_checkpoint, reference_model

BLOCK_SIZE, NUM_BLOCKS = 8, 40
CPU = torch.device("cpu")
# Rotations of every kind, keys that are normalised first, windows, experts, bounded scores.
MODELS = ["llama", "llama3-rope", "linear-rope", "qwen3", "mistral-window", "mixtral", "gemma2"]


@dataclass
class Setting:
    """A model, its caches, and the blocks of one sequence, in no order."""

    model: LlamaForCausalLM
    backend: AttentionBackend
    caches: list[Tensor]
    table: Tensor

    @torch.inference_mode()
    def compute(self, token_ids: list[int], start: int = 0) -> Tensor:
        """Hidden states of tokens that follow each other."""
        positions = torch.arange(start, start + len(token_ids))
        metadata = scattered_metadata(positions, self.table, BLOCK_SIZE)
        with forward_context(ForwardContext(self.backend, self.caches, metadata)):
            return self.model(torch.tensor(token_ids), positions)

    def chunk(self, token_ids: list[int], behind: list[int]) -> Chunk:
        self.compute(behind + token_ids)
        return save_chunk(self.caches, self.table, len(behind), len(behind) + len(token_ids))

    def kv(self, layer: int, length: int) -> Tensor:
        """`[2, num_kv_heads, length, head_dim]`."""
        return torch.stack(gather_kv(self.caches[layer], self.table, length))

    def wipe(self) -> None:
        for cache in self.caches:
            cache.fill_(math.nan)

    def blend(
        self, token_ids: list[int], chunks: list[tuple[int, Chunk]], *args: Any, **options: Any
    ) -> BlendOutput:
        self.wipe()
        return blend(
            self.model, self.backend, self.caches, self.table, token_ids, chunks, *args, **options
        )


def make_setting(
    folder: str, backend: str = "torch", dtype: torch.dtype = torch.float64, ranks: int = 1
) -> Setting:
    config = ModelConfig.from_pretrained(folder)
    model = load_model(
        folder, config, dtype, CPU, NUM_BLOCKS * BLOCK_SIZE, transforms=[parallelize]
    )
    attends = get_backend(backend, CPU, config.head_dim)
    caches = [
        torch.zeros(attention.cache_shape(NUM_BLOCKS, BLOCK_SIZE, attends), dtype=dtype)
        for attention in model.attention_layers.values()
    ]
    table = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    return Setting(model, attends, caches, table)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    """The folder of a variant's checkpoint, made when first asked for."""
    folders: dict[str, str] = {}

    def get(variant: str) -> str:
        if variant not in folders:
            folders[variant] = str(make_checkpoint(tmp_path_factory.mktemp(variant), variant))
        return folders[variant]

    return get


def tokens(count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 259) for _ in range(count)]


SYSTEM, DOCUMENTS, QUESTION = (
    tokens(5, 0),
    [tokens(30, 1), tokens(21, 2), tokens(26, 3)],
    tokens(7, 4),
)
PROMPT = SYSTEM + DOCUMENTS[2] + DOCUMENTS[0] + QUESTION[:2] + DOCUMENTS[1] + QUESTION[2:]
PLACES = {2: 5, 0: 31, 1: 63}  # where each document begins there


def documents(setting: Setting, behind: list[int]) -> list[tuple[int, Chunk]]:
    return [(start, setting.chunk(DOCUMENTS[i], behind)) for i, start in PLACES.items()]


# ----------------------------------------------------------------------------------------- rotation


@pytest.mark.parametrize("variant", MODELS)
def test_moved_keys_are_the_keys_that_are_computed_there(variant: str, checkpoint) -> None:
    """In the first layer, which sees no other token, to float64's rounding: the projections of a
    chunk and of the whole prompt are library products of different sizes. Placing a chunk does not
    change its values at all."""
    setting = make_setting(checkpoint(variant))
    chunks = documents(setting, tokens(11, 9))
    setting.compute(PROMPT)
    fresh = setting.kv(0, len(PROMPT))
    setting.wipe()
    for start, chunk in chunks:
        place_chunk(chunk, start, setting.caches, setting.table, setting.model.model.cos_sin)
    for start, chunk in chunks:
        moved, there = (
            kv[:, :, start : start + len(chunk)] for kv in (setting.kv(0, len(PROMPT)), fresh)
        )
        torch.testing.assert_close(moved, there, rtol=1e-12, atol=1e-12)
        assert torch.equal(moved[1], chunk.kv[0, 1].transpose(0, 1))


@settings(max_examples=examples(50), derandomize=True)
@given(
    before=st.integers(0, 7000),
    after=st.integers(0, 7000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rotation_there_and_back(before: int, after: int, dtype: torch.dtype, checkpoint) -> None:
    cos_sin = rotary_table(ModelConfig.from_pretrained(checkpoint("llama")), 7100)
    keys = torch.randn(2, 5, 3, 16, generator=torch.Generator().manual_seed(before)).to(dtype)
    there, here = torch.arange(after, after + 5), torch.arange(before, before + 5)
    moved = rotate_keys(keys, here, there, cos_sin)
    assert moved.dtype == dtype and moved.shape == keys.shape
    torch.testing.assert_close(moved.norm(dim=-1), keys.norm(dim=-1))
    torch.testing.assert_close(
        rotate_keys(moved, there, here, cos_sin),
        keys,
        atol=0.03 if dtype.itemsize == 2 else 1e-6,
        rtol=0,
    )
    exact = rotate_keys(keys.double(), here, there, cos_sin)
    torch.testing.assert_close(
        moved.double(), exact, atol=0.02 if dtype.itemsize == 2 else 1e-6, rtol=0
    )


# ----------------------------------------------------------------------------------- scattered rows


@settings(max_examples=examples(40), derandomize=True)
@given(
    rows=st.sets(st.integers(0, 79), min_size=1),
    window=st.sampled_from([0, 1, 13]),
    backend=st.sampled_from(["torch", "cpu"]),
)
def test_scattered_rows_attend_as_in_the_whole_prompt(
    rows: set[int], window: int, backend: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(80, heads, 16, generator=generator) for heads in (6, 2, 2))
    cache = torch.zeros(kv_cache_shape(NUM_BLOCKS, 2, BLOCK_SIZE, 16))
    table = torch.randperm(NUM_BLOCKS, generator=generator).to(torch.int32)
    attention = get_backend(backend, CPU)
    whole = attention.forward(
        q, k, v, cache, scattered_metadata(torch.arange(80), table, BLOCK_SIZE), 0.25, window
    )
    some = torch.tensor(sorted(rows))
    metadata = scattered_metadata(some, table, BLOCK_SIZE)
    before = cache.clone()
    out = attention.forward(q[some], k[some], v[some], cache, metadata, 0.25, window)
    torch.testing.assert_close(out, whole[some], atol=1e-5, rtol=1e-5)
    assert torch.equal(cache, before)
    assert metadata.query_start_loc[-1] == len(rows) and metadata.max_seq_len == max(rows) + 1


# ---------------------------------------------------------------------------------- nothing is lost


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("variant", MODELS)
def test_ratio_1_is_full_recompute(variant: str, backend: str, checkpoint) -> None:
    """Bit for bit: hidden state, and keys and values of every layer."""
    setting = make_setting(checkpoint(variant), backend, torch.float32)
    chunks = documents(setting, [])
    hidden = setting.compute(PROMPT)[-1:]
    expected = [setting.kv(layer, len(PROMPT)) for layer in range(3)]
    out = setting.blend(PROMPT, chunks, 1.0)
    assert torch.equal(out.hidden, hidden)
    assert all(torch.equal(setting.kv(layer, len(PROMPT)), kv) for layer, kv in enumerate(expected))
    assert out.num_rows == [len(PROMPT)] * 3 and len(out.selected) == 30 + 21 + 26


@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
def test_a_true_prefix_is_reused_as_it_is(ratio: float, checkpoint) -> None:
    setting = make_setting(checkpoint("llama"))
    chunk = setting.chunk(SYSTEM + DOCUMENTS[0], [])
    prompt = SYSTEM + DOCUMENTS[0] + QUESTION
    expected = setting.compute(prompt)[-1:]
    out = setting.blend(prompt, [(0, chunk)], ratio)
    torch.testing.assert_close(out.hidden, expected, rtol=1e-10, atol=1e-10)
    assert out.num_rows == [len(QUESTION)] * 3 and out.selected == []
    # Even if there is nothing else: the last token is always computed.
    expected = setting.compute(SYSTEM + DOCUMENTS[0])[-1:]
    out = setting.blend(SYSTEM + DOCUMENTS[0], [(0, chunk)], ratio)
    torch.testing.assert_close(out.hidden, expected, rtol=1e-10, atol=1e-10)
    assert out.num_rows == [1] * 3


def test_what_is_computed_already_is_not_written(checkpoint) -> None:
    """A prefix that ends within a chunk: its blocks may be somebody else's, too."""
    setting = make_setting(checkpoint("llama"))
    chunks = documents(setting, QUESTION)
    setting.compute(PROMPT[:40])
    expected = [setting.kv(layer, 40) for layer in range(3)]
    out = blend(
        setting.model, setting.backend, setting.caches, setting.table, PROMPT, chunks, 0.25, 40
    )
    assert all(torch.equal(setting.kv(layer, 40), kv) for layer, kv in enumerate(expected))
    assert out.num_rows == [49, 49, 7 + math.ceil(42 * 0.25)] and min(out.selected) >= 40
    whole = blend(
        setting.model, setting.backend, setting.caches, setting.table, PROMPT, chunks, 1.0, 40
    )
    torch.testing.assert_close(whole.hidden, setting.compute(PROMPT)[-1:], rtol=1e-10, atol=1e-10)


def test_a_chunk_that_had_another_prefix_is_not_taken_for_exact(checkpoint) -> None:
    setting = make_setting(checkpoint("llama"))
    chunk = setting.chunk(DOCUMENTS[0], SYSTEM)
    assert setting.blend(DOCUMENTS[0] + QUESTION, [(0, chunk)], 0.5).num_rows == [37, 37, 15 + 7]


# ----------------------------------------------------------------------------- against transformers


class DenseBlend:
    """CacheBlend with the pieces of transformers' Llama, in float64, over plain matrices: no pages,
    no packed rows. A chunk's keys come from a run at the positions at which they are wanted, so
    that nothing has to be rotated."""

    def __init__(self, folder: str) -> None:
        import copy

        self.model = copy.deepcopy(reference_model(folder)).double().model
        self.config = self.model.config

    def heads(self, x: Tensor, count: int) -> Tensor:
        return x.view(len(x), count, -1).transpose(0, 1)  # [heads, rows, head_dim]

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        from transformers.models.llama.modeling_llama import rotate_half

        cos, sin = (
            table[0].double() for table in self.model.rotary_emb(x.float(), positions[None])
        )
        return x * cos + rotate_half(x) * sin

    def layer(self, number: int, x: Tensor, rows: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One layer for the tokens at `rows`, which overwrites their `keys` and `values`
        `[heads, length, head_dim]`."""
        layer, attention = self.model.layers[number], self.model.layers[number].self_attn
        normed = layer.input_layernorm(x)
        num_heads, num_kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        q = self.rotate(self.heads(attention.q_proj(normed), num_heads), rows)
        keys[:, rows] = self.rotate(self.heads(attention.k_proj(normed), num_kv_heads), rows)
        values[:, rows] = self.heads(attention.v_proj(normed), num_kv_heads)
        group = num_heads // num_kv_heads
        scores = q @ keys.repeat_interleave(group, 0).transpose(1, 2) * attention.scaling
        hidden = torch.arange(keys.shape[1]) > rows[:, None]
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        out = weights @ values.repeat_interleave(group, 0)
        x = x + attention.o_proj(out.transpose(0, 1).flatten(1))
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def empty(self, length: int) -> list[tuple[Tensor, Tensor]]:
        shape = (
            self.config.num_key_value_heads,
            length,
            self.config.hidden_size // self.config.num_attention_heads,
        )
        return [
            (torch.full(shape, math.nan).double(), torch.full(shape, math.nan).double())
            for _ in self.model.layers
        ]

    @torch.inference_mode()
    def run(
        self, places: dict[int, int], behind: list[int], ratio: float, check: int
    ) -> tuple[Tensor, list[int]]:
        """Last hidden state, and the tokens of the documents that went all the way."""
        caches, own = self.empty(len(PROMPT)), torch.ones(len(PROMPT), dtype=torch.bool)
        for document, start in places.items():
            text = behind + DOCUMENTS[document]
            alone, x = self.empty(len(text)), self.model.embed_tokens(torch.tensor(text))
            for number in range(len(caches)):
                # Rotary positions only count relative to each other: the prefix may have negative
                # ones.
                x = self.shifted(number, x, alone[number], start - len(behind))
                for cache, part in zip(caches[number], alone[number], strict=True):
                    cache[:, start : start + len(DOCUMENTS[document])] = part[:, len(behind) :]
            own[start : start + len(DOCUMENTS[document])] = False
        rows, x = torch.arange(len(PROMPT)), self.model.embed_tokens(torch.tensor(PROMPT))
        for number, (keys, values) in enumerate(caches):
            before = keys.clone(), values.clone()
            x = self.layer(number, x, rows, keys, values)
            if number == check:
                far = sum(
                    (a - b).square().sum((0, 2))
                    for a, b in zip(before, (keys, values), strict=True)
                )
                far[own] = math.inf
                kept = far.argsort(descending=True)[
                    : int(own.sum()) + math.ceil(ratio * int((~own).sum()))
                ]
                rows = kept.sort().values
                x = x[rows]
        return self.model.norm(x[-1:]), rows[~own[rows]].tolist()

    def shifted(self, number: int, x: Tensor, cache: tuple[Tensor, Tensor], shift: int) -> Tensor:
        """A layer for a whole text whose first token has the position `shift`."""
        rotate, self.rotate = self.rotate, lambda x, rows: rotate(x, rows + shift)  # type: ignore[method-assign]
        try:
            return self.layer(number, x, torch.arange(len(x)), *cache)
        finally:
            self.rotate = rotate  # type: ignore[method-assign]


@pytest.mark.parametrize("ratio", [0.01, 0.15, 0.5, 1.0])
@pytest.mark.parametrize("behind", [0, 4], ids=["alone", "behind"])
def test_blend_against_transformers(behind: int, ratio: float, checkpoint) -> None:
    folder, prefix = checkpoint("llama"), tokens(behind, 8)
    setting = make_setting(folder)
    out = setting.blend(PROMPT, documents(setting, prefix), ratio)
    hidden, selected = DenseBlend(folder).run(PLACES, prefix, ratio, check=1)
    # transformers' rotary table is float32.
    torch.testing.assert_close(out.hidden, hidden, atol=1e-4, rtol=1e-4)
    assert out.selected == selected
    assert out.num_rows == [89, 89, 12 + math.ceil(77 * ratio)]


def test_full_recompute_has_the_logits_of_transformers(checkpoint) -> None:
    setting = make_setting(checkpoint("llama"), dtype=torch.float32)
    out = setting.blend(PROMPT, documents(setting, SYSTEM), 1.0)
    with torch.inference_mode():
        expected = reference_model(checkpoint("llama"))(torch.tensor([PROMPT])).logits[0, -1:]
        torch.testing.assert_close(
            setting.model.compute_logits(out.hidden), expected, atol=2e-3, rtol=1e-4
        )


# ---------------------------------------------------------------------------------------- selection


def test_what_is_kept_and_what_is_overwritten(checkpoint) -> None:
    """Behind the check layer, exactly the tokens that were not selected are as they came."""
    setting = make_setting(checkpoint("llama"))
    chunks = documents(setting, SYSTEM)
    setting.wipe()
    for start, chunk in chunks:
        place_chunk(chunk, start, setting.caches, setting.table, setting.model.model.cos_sin)
    placed = setting.kv(2, 84)
    seen: list[BlendRows] = []

    def by_position(rows: BlendRows) -> Tensor:
        seen.append(rows)
        return rows.positions.float()

    out = setting.blend(PROMPT, chunks, 0.25, check_layer=0, score=by_position)
    own = [*range(5), 61, 62, *range(84, 89)]
    assert [len(rows.positions) for rows in seen] == [89] and out.num_rows == [89, 12 + 20, 12 + 20]
    # The last 20 of the documents' tokens, at the end of the last document and no further.
    assert out.selected == list(range(64, 84))
    assert seen[0].offsets[63:84].tolist() == list(range(21)) and (seen[0].offsets[own] == -1).all()
    unchanged = (setting.kv(2, 84) == placed).all(dim=3).all(dim=1).all(dim=0)
    assert unchanged.nonzero().flatten().tolist() == [i for i in range(64) if i not in own]


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("max_rows", [1, 10, 89])
def test_pieces_make_the_whole(ratio: float, max_rows: int, checkpoint) -> None:
    setting = make_setting(checkpoint("llama"))
    chunks = documents(setting, SYSTEM)
    whole, kv = setting.blend(PROMPT, chunks, ratio), setting.kv(2, len(PROMPT))
    pieces = setting.blend(PROMPT, chunks, ratio, max_rows=max_rows)
    assert pieces.selected == whole.selected and pieces.num_rows == whole.num_rows
    torch.testing.assert_close(pieces.hidden, whole.hidden, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(setting.kv(2, len(PROMPT)), kv, rtol=1e-10, atol=1e-10)


def test_ratio_0_computes_nothing_of_a_chunk(checkpoint) -> None:
    setting = make_setting(checkpoint("llama"))
    chunks = documents(setting, SYSTEM)
    out = setting.blend(PROMPT, chunks, 0.0)
    assert out.num_rows == [12] * 3 and out.selected == [] and bool(out.hidden.isfinite().all())


# ---------------------------------------------------------------------------------------- two ranks


def blend_on_a_rank(folder: str) -> tuple[Tensor, list[int]]:
    setting = make_setting(folder, dtype=torch.float32, ranks=2)
    out = setting.blend(PROMPT, documents(setting, SYSTEM), 0.2)
    return out.hidden, out.selected


def test_ranks_with_some_of_the_heads_select_the_same(checkpoint) -> None:
    setting = make_setting(checkpoint("llama"), dtype=torch.float32)
    one = setting.blend(PROMPT, documents(setting, SYSTEM), 0.2)
    for hidden, selected in run_ranks(blend_on_a_rank, Grid(tensor=2), checkpoint("llama")):
        assert selected == one.selected
        torch.testing.assert_close(hidden, one.hidden, atol=1e-3, rtol=1e-4)
