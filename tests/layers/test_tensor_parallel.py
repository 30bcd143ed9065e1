"""Tensor parallelism: on 2, 3 and 4 ranks a model says what it says on one, and each rank loads
only its share."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm import LLM
from nanovllm.attention.base import AttentionMetadata, ForwardContext, forward_context
from nanovllm.attention.torch import TorchBackend
from nanovllm.checkpoint.hub import resolve_model
from nanovllm.checkpoint.weights import CheckpointError
from nanovllm.distributed import groups
from nanovllm.distributed.groups import Grid, GroupCoordinator, get_tp_group
from nanovllm.executor.grid import check_tensor_parallel
from nanovllm.lab.course.ranks import run_ranks
from nanovllm.layers.basic import Layer
from nanovllm.layers.tensor_parallel import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    Shard,
    VocabParallelEmbedding,
    num_kv_heads_of_rank,
    parallelize,
)
from nanovllm.models.config import ModelConfig
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.models.loader import build_model, checkpoint_tensors, load_model, load_weights
from tests import oracle
from tests.oracle import (
    TINY,
    VARIANTS,
    greedy,
    greedy_choices,
    make_checkpoint,
    reference_model,
    reference_tokens,
)

DENSE = [
    name
    for name, (cls, _) in VARIANTS.items()
    if cls in ("LlamaConfig", "MistralConfig", "Qwen2Config", "Qwen3Config", "Gemma2Config")
]
# 3 ranks cannot share 263 rows evenly; the head is tied in one and has padding of its own in the
# other.
UNEVEN = {"vocab_size": 263, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "uneven": ("LlamaConfig", UNEVEN),
    "uneven-tied": ("LlamaConfig", UNEVEN | {"tie_word_embeddings": True}),
    "wide": (
        "LlamaConfig",
        {"num_attention_heads": 8, "num_key_value_heads": 2, "attention_bias": True},
    ),
}
# The ranks and what runs on them. With 4 ranks there are more of them than KV heads.
CASES = {
    2: DENSE,
    3: ["uneven", "uneven-tied"],
    4: ["llama", "llama-biased", "llama-mha-tied", "gemma2", "wide"],
}
PROMPTS = [
    [5, 9, 100, 22, 7, 8, 200, 31, 44, 45, 46, 250, 251, 3, 17, 90, 4, 6, 11],
    [12],
    [66, 67, 68] * 7,
]
NEW_TOKENS = 12


def dense_forward(model: LlamaForCausalLM, prompt: list[int]) -> Tensor:
    """Logits of all rows of one sequence, with a cache of its own."""
    n = len(prompt)
    caches = [
        torch.zeros(attention.cache_shape(1, n, TorchBackend()))
        for attention in model.attention_layers.values()
    ]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, n], dtype=torch.int32),
        seq_lens=torch.tensor([n], dtype=torch.int32),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=torch.arange(n),
        max_query_len=n,
        max_seq_len=n,
    )
    with forward_context(ForwardContext(TorchBackend(), caches, metadata)):
        return model.compute_logits(model(torch.tensor(prompt), torch.arange(n)))


def run_models(
    folders: dict[str, str], prompts: list[list[int]], new_tokens: int
) -> dict[str, Any]:
    """What one rank finds for every checkpoint: logits, collectives of that forward, and greedy
    tokens of an engine that runs in full on every rank, with chunked prefill."""
    found: dict[str, Any] = {}
    group = get_tp_group()
    for name, folder in folders.items():
        config = ModelConfig.from_pretrained(folder)
        with torch.inference_mode():
            model = load_model(
                folder, config, torch.float32, max_positions=256, transforms=[parallelize]
            )
            group.calls.clear()
            group.bytes_sent.clear()
            logits = dense_forward(model, prompts[0])
        counted = dict(group.calls), dict(group.bytes_sent)
        llm = LLM(
            folder,
            dtype="float32",
            num_kv_blocks=24,
            block_size=8,
            max_model_len=64,
            max_num_batched_tokens=16,
            max_num_seqs=4,
        )
        weights = sum(parameter.nbytes for parameter in model.parameters())
        found[name] = logits.numpy(), counted, greedy(llm, prompts, new_tokens), weights
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("checkpoints")
    with pytest.MonkeyPatch.context() as patch:
        for name, variant in MORE.items():
            patch.setitem(oracle.VARIANTS, name, variant)
        names = sorted({name for names in CASES.values() for name in names})
        return {name: str(make_checkpoint(root / name, name)) for name in names}


@pytest.fixture(scope="module")
def ranks(folders: dict[str, str]) -> dict[int, list[dict[str, Any]]]:
    """What each rank of each grid found; one start of the processes a grid."""
    return {
        tp: run_ranks(
            run_models,
            Grid(tensor=tp),
            {n: folders[n] for n in names},
            PROMPTS,
            NEW_TOKENS,
            timeout=600,
        )
        for tp, names in CASES.items()
    }


@pytest.mark.parametrize(
    ("tp", "name"), [(tp, name) for tp, names in CASES.items() for name in names]
)
class TestOnRanks:
    def test_logits(
        self, ranks: dict[int, list[dict[str, Any]]], folders: dict[str, str], tp: int, name: str
    ) -> None:
        with torch.inference_mode():
            expected = reference_model(folders[name])(torch.tensor([PROMPTS[0]])).logits[0]
        for rank in range(tp):
            logits = torch.from_numpy(ranks[tp][rank][name][0])
            assert logits.shape == expected.shape
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)
            # Bit for bit, since every rank samples for itself.
            assert torch.equal(logits, torch.from_numpy(ranks[tp][0][name][0]))

    def test_greedy_tokens(
        self, ranks: dict[int, list[dict[str, Any]]], folders: dict[str, str], tp: int, name: str
    ) -> None:
        expected = [reference_tokens(folders[name], prompt, NEW_TOKENS) for prompt in PROMPTS]
        for rank in range(tp):
            assert ranks[tp][rank][name][2] == expected

    def test_calls_and_bytes(
        self, ranks: dict[int, list[dict[str, Any]]], folders: dict[str, str], tp: int, name: str
    ) -> None:
        config = ModelConfig.from_pretrained(folders[name])
        rows, reduces = len(PROMPTS[0]), 2 * config.num_layers + 1
        vocab_of_rank = -(-config.vocab_size // tp)
        calls = {"all_reduce": reduces, "all_gather": 1}
        sent = {
            "all_reduce": reduces * rows * config.hidden_size * 4,
            "all_gather": rows * vocab_of_rank * 4,
        }
        for rank in range(tp):
            assert ranks[tp][rank][name][1] == (calls, sent)

    def test_weights_are_shared(
        self, ranks: dict[int, list[dict[str, Any]]], folders: dict[str, str], tp: int, name: str
    ) -> None:
        """A rank has its share of all matrices; whole are only the vectors, and KV heads that
        several ranks need."""
        config = ModelConfig.from_pretrained(folders[name])
        with torch.device("meta"):
            whole = LlamaForCausalLM(config, 1)
        extra = num_kv_heads_of_rank(config.num_kv_heads, tp) - config.num_kv_heads / tp
        kv_extra = config.num_layers * 2 * extra * config.head_dim * (config.hidden_size + 1)
        vectors = (
            sum(p.numel() for p in whole.parameters() if p.ndim == 1)
            + 2 * config.num_layers * config.hidden_size
        )
        padding = 2 * config.hidden_size
        share = sum(p.numel() for p in whole.parameters()) / tp
        for rank in range(tp):
            assert ranks[tp][rank][name][3] / 4 <= share + kv_extra + vectors + padding


def course_model_tokens(folder: str, prompts: list[list[int]]) -> list[list[int]]:
    return greedy(LLM(folder, dtype="float32", num_kv_blocks=32, max_model_len=128), prompts, 16)


def test_the_course_model_on_three_ranks() -> None:
    """9 heads and 3 KV heads; also against the same engine on one rank."""
    folder = str(resolve_model("smollm2-135m"))
    prompts = [[504, 3575, 282, 4649, 314], [1, 100, 2000, 30000, 49151, 7]]
    expected = course_model_tokens(folder, prompts)
    assert expected == greedy_choices(folder, prompts, expected, 16)
    assert (
        run_ranks(course_model_tokens, Grid(tensor=3), folder, prompts, timeout=300)
        == [expected] * 3
    )


# ---------------------------------------------------------- what each rank loads, without processes


def rank_of(rank: int, tp: int) -> GroupCoordinator:
    """A rank's group, nobody else being there."""
    return GroupCoordinator("tp", list(range(tp)), rank)


class Watched:
    """A checkpoint's tensor that counts the numbers that are taken from it."""

    def __init__(self, tensor: Tensor, taken: list[int]) -> None:
        self.tensor, self.taken, self.shape = tensor, taken, tensor.shape

    def __getitem__(self, where: tuple[slice, ...]) -> Tensor:
        part = self.tensor[where]
        self.taken.append(part.nbytes)
        return part


def load_share(
    folder: str, rank: int, tp: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[LlamaForCausalLM, int]:
    """A rank's model, and how many bytes of the checkpoint it read."""
    monkeypatch.setitem(groups.own_groups, "tp", rank_of(rank, tp))
    config, taken = ModelConfig.from_pretrained(folder), []
    model = load_model(folder, config, torch.float32, load_format="dummy", transforms=[parallelize])
    tensors: Iterator[Any] = (
        (n, Watched(t, taken)) for n, t in checkpoint_tensors(pathlib.Path(folder))
    )
    with torch.inference_mode():
        load_weights(model, tensors)
    return model, sum(taken)


@pytest.mark.parametrize(
    ("tp", "name"), [(1, "llama"), (2, "llama"), (4, "llama"), (2, "gemma2"), (3, "uneven")]
)
def test_each_rank_reads_only_its_slices(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, tp: int, name: str
) -> None:
    folder = folders[name]
    config = ModelConfig.from_pretrained(folder)
    file_bytes = sum(tensor.nbytes for _, tensor in checkpoint_tensors(pathlib.Path(folder)))
    read = [load_share(folder, rank, tp, monkeypatch)[1] for rank in range(tp)]
    norms = sum(t.nbytes for n, t in checkpoint_tensors(pathlib.Path(folder)) if "norm" in n)
    # Of each KV head.
    copies = tp * num_kv_heads_of_rank(config.num_kv_heads, tp) // config.num_kv_heads
    kv = 4 * 2 * config.num_layers * config.num_kv_heads * config.head_dim * config.hidden_size
    assert sum(read) == file_bytes + (tp - 1) * norms + (copies - 1) * kv
    # Within a row of the vocabulary's padding all read the same.
    assert max(read) - min(read) <= 2 * tp * config.hidden_size * 4


def test_the_shards_make_up_the_checkpoint(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every number of every tensor is on some rank, where `Place` says that it is."""
    whole = dict(checkpoint_tensors(pathlib.Path(folders["uneven"])))
    seen = {name: torch.full(tensor.shape, float("nan")) for name, tensor in whole.items()}
    for rank in range(3):
        model, _ = load_share(folders["uneven"], rank, 3, monkeypatch)
        places = model.checkpoint_places()
        assert places.keys() == whole.keys()
        for name, [place] in places.items():
            seen[name][place.source] = place.target
    for name, tensor in whole.items():
        assert torch.equal(seen[name], tensor), name


def test_a_vocabulary_with_fewer_tokens_than_ranks_need_rows(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 tokens on 4 ranks: 2, 2, 1 and none."""
    shards = [Shard.of(5, rank_of(rank, 4)) for rank in range(4)]
    assert [(s.start, s.size) for s in shards] == [(0, 2), (2, 2), (4, 1), (5, 0)]
    place = VocabParallelEmbedding(5, 3, rank_of(3, 4)).place("weight")
    assert place.target.shape == (0, 3) and place.shape == (5, 3)


def test_a_shard_does_not_accept_a_checkpoint_of_another_size(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice of a larger tensor has the right shape; the tensor has not."""
    monkeypatch.setitem(groups.own_groups, "tp", rank_of(0, 2))
    folder = folders["llama"]
    config = ModelConfig.from_pretrained(folder)
    model = load_model(folder, config, torch.float32, transforms=[parallelize])
    name = "model.layers.0.self_attn.q_proj.weight"
    with (
        torch.inference_mode(),
        pytest.raises(CheckpointError, match=r"has shape \[128, 64\].* says \[64, 64\]"),
    ):
        load_weights(model, iter([(name, torch.zeros(128, 64))]))
    with torch.inference_mode(), pytest.raises(CheckpointError, match=r"lacks .* and \d+ more"):
        load_weights(model, iter([(name, torch.zeros(64, 64))]))


# ---------------------------------------------------------------- layers


def filled(layer: Any, *parts: Tensor, bias: Tensor | None = None) -> Any:
    """A layer that has loaded its share of whole matrices."""
    for part, whole in enumerate(parts):
        place = layer.place("weight", part)
        place.target.copy_(whole[place.source])
    if bias is not None:
        place = layer.place("bias")
        place.target.copy_(bias[place.source])
    return layer


@pytest.mark.parametrize("tp", [1, 2, 3, 6])
def test_columns_side_by_side_and_rows_added_up_are_the_whole_product(tp: int) -> None:
    torch.manual_seed(0)
    x, up, down, bias, out_bias = (
        torch.randn(shape) for shape in [(5, 8), (12, 8), (8, 12), (12,), (8,)]
    )
    hidden, addends = [], []
    for rank in range(tp):
        group = rank_of(rank, tp)
        column = filled(ColumnParallelLinear(8, 12, bias=True, group=group), up, bias=bias)
        row = filled(
            RowParallelLinear(12, 8, bias=True, reduce=False, group=group), down, bias=out_bias
        )
        hidden.append(column(x))
        addends.append(row(hidden[-1]))
    torch.testing.assert_close(torch.cat(hidden, dim=1), x @ up.T + bias)
    torch.testing.assert_close(sum(addends), (x @ up.T + bias) @ down.T + out_bias)


def test_merged_columns_keep_their_parts_together() -> None:
    gate, up = torch.arange(12.0).view(6, 2), 100 + torch.arange(12.0).view(6, 2)
    layer = filled(MergedColumnParallelLinear(2, [6, 6], group=rank_of(1, 3)), gate, up)
    assert torch.equal(layer.weight, torch.cat([gate[2:4], up[2:4]]))


@pytest.mark.parametrize(
    ("tp", "heads", "kv_heads"), [(1, 4, 2), (2, 4, 2), (4, 4, 2), (4, 8, 1), (3, 9, 3), (8, 16, 4)]
)
def test_each_query_head_finds_its_kv_head_on_its_own_rank(
    tp: int, heads: int, kv_heads: int
) -> None:
    head_dim, group_size = 2, heads // kv_heads
    q, k, v = (
        base + torch.arange(n).repeat_interleave(head_dim)[:, None].float()
        for base, n in [(0, heads), (100, kv_heads), (200, kv_heads)]
    )
    seen = []
    for rank in range(tp):
        layer = filled(
            QKVParallelLinear(1, head_dim, heads, kv_heads, group=rank_of(rank, tp)), q, k, v
        )
        numbers = layer.weight.view(-1, head_dim)[:, 0].int().tolist()
        n, m = layer.num_heads, layer.num_kv_heads
        assert len(numbers) == n + 2 * m and m == num_kv_heads_of_rank(kv_heads, tp)
        for i, head in enumerate(numbers[:n]):
            kv = i // (n // m)  # as attention pairs them, which knows only what is on this rank
            assert (
                numbers[n + kv] == 100 + head // group_size
                and numbers[n + m + kv] == 200 + head // group_size
            )
        seen += numbers[:n]
    assert seen == list(range(heads))


def test_a_layer_without_bias_has_no_place_for_one() -> None:
    layers: list[Layer] = [
        ColumnParallelLinear(4, 4),
        RowParallelLinear(4, 4),
        VocabParallelEmbedding(4, 4),
        ParallelLMHead(4, 4),
    ]
    for layer in layers:
        with pytest.raises(AttributeError):
            layer.place("bias")


def test_a_tied_head_shares_the_memory_of_its_shard(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = load_share(folders["uneven-tied"], 2, 3, monkeypatch)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    model.pack_weights()
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.lm_head.weight.shape[0] == 88


# ---------------------------------------------------------------- grids that do not fit


def shape(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(TINY | {"architectures": ["LlamaForCausalLM"]} | changes)


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        (
            {
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "hidden_size": 576,
                "intermediate_size": 1536,
            },
            2,
            (
                "9 attention heads, 3 KV heads cannot be divided among 2 ranks; "
                "tensor_parallel_size may be 1 or 3"
            ),
        ),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 2},
            3,
            "2 KV heads cannot be divided among 3 ranks; tensor_parallel_size may be 1, 2 or 6",
        ),
        (
            {"intermediate_size": 98},
            4,
            r"98 MLP channels \(intermediate_size\) cannot be divided among 4 ranks; .* 1 or 2",
        ),
        ({"intermediate_size": 97}, 2, "may be only 1"),
    ],
)
def test_a_grid_that_does_not_fit_is_refused_with_those_that_do(
    changes: dict[str, Any], tp: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_tensor_parallel(shape(**changes), tp)


def test_grids_that_fit_are_let_through_and_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    for tp in (1, 2, 4):
        check_tensor_parallel(shape(), tp)
        monkeypatch.setitem(groups.own_groups, "tp", rank_of(tp - 1, tp))
        build_model(shape(), [parallelize])
    with pytest.raises(ValueError, match="4 attention heads"):
        check_tensor_parallel(shape(), 3)


def test_experts_count_unless_they_stay_whole() -> None:
    mixture = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 33,
        "norm_topk_prob": True,
        "intermediate_size": 97,
    }
    with pytest.raises(ValueError, match=r"33 channels of an expert .* may be only 1"):
        check_tensor_parallel(shape(**mixture), 2)
    with pytest.raises(ValueError, match="97 MLP channels"):
        check_tensor_parallel(with_whole_experts(shape(**mixture, mlp_only_layers=[1])), 2)
    check_tensor_parallel(with_whole_experts(shape(**mixture)), 2)


def with_whole_experts(config: ModelConfig) -> ModelConfig:
    assert config.moe is not None
    return dataclasses.replace(
        config, moe=dataclasses.replace(config.moe, enable_expert_parallel=True)
    )
