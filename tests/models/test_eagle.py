"""EAGLE heads against a few lines of torch with dense attention, through the paged cache; their
files under all public names, and what is refused."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from nanovllm.attention.backends import get_backend
from nanovllm.attention.base import (
    AttentionMetadata,
    ForwardContext,
    forward_context,
    kv_cache_shape,
)
from nanovllm.distributed.groups import Grid
from nanovllm.lab.course.ranks import run_ranks
from nanovllm.layers.quantization import W8A8
from nanovllm.layers.tensor_parallel import parallelize
from nanovllm.models.config import ModelConfig
from nanovllm.models.eagle import AuxHiddenStates, EagleModel, load_draft_model, shipped_head
from nanovllm.models.fused import fuse_layers
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.models.loader import load_model
from nanovllm.ops import native
from tests.oracle import make_checkpoint, reference_model

HIDDEN, MLP, HEADS, KV_HEADS, WIDTH, VOCAB, DRAFT_VOCAB, EPS, THETA = (
    64,
    48,
    4,
    2,
    16,
    320,
    40,
    1e-5,
    10000.0,
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "rms_norm_eps": EPS,
    "max_position_embeddings": 256,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}
EAGLE1 = {name: value for name, value in CONFIG.items() if name != "draft_vocab_size"} | {
    "architectures": ["LlamaForCausalLM"]
}


def random_head(eagle3: bool = True, seed: int = 1) -> dict[str, Tensor]:
    """A head under the names of EAGLE's own checkpoints."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    wide, layer = (2 * HIDDEN, "midlayer") if eagle3 else (HIDDEN, "layers.0")
    tensors = {
        f"{layer}.self_attn.q_proj.weight": matrix(HEADS * WIDTH, wide),
        f"{layer}.self_attn.k_proj.weight": matrix(KV_HEADS * WIDTH, wide),
        f"{layer}.self_attn.v_proj.weight": matrix(KV_HEADS * WIDTH, wide),
        f"{layer}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * WIDTH),
        f"{layer}.mlp.gate_proj.weight": matrix(MLP, HIDDEN),
        f"{layer}.mlp.up_proj.weight": matrix(MLP, HIDDEN),
        f"{layer}.mlp.down_proj.weight": matrix(HIDDEN, MLP),
        f"{layer}.post_attention_layernorm.weight": 1 + matrix(HIDDEN),
        "fc.weight": matrix(HIDDEN, (3 if eagle3 else 2) * HIDDEN),
    }
    if not eagle3:
        return tensors | {"fc.bias": matrix(HIDDEN)}
    tensors |= {
        name: 1 + matrix(HIDDEN)
        for name in (
            "midlayer.input_layernorm.weight",
            "midlayer.hidden_norm.weight",
            "norm.weight",
        )
    }
    ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[ids] = True
    return tensors | {
        "lm_head.weight": matrix(DRAFT_VOCAB, HIDDEN),
        "d2t": ids - torch.arange(DRAFT_VOCAB),
        "t2d": known,
    }


def write(folder: pathlib.Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---------------------------------------------------------------- the reference


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def attention(x: Tensor, t: dict[str, Tensor], at: str) -> Tensor:
    """Causal attention over one whole sequence, `[length, width of inputs]` to
    `[length, hidden]`."""
    length = len(x)
    angles = torch.outer(
        torch.arange(length).float(), THETA ** -(torch.arange(0, WIDTH, 2) / WIDTH)
    )
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def rotated(y: Tensor) -> Tensor:
        real, imaginary = y.chunk(2, -1)
        both = torch.complex(real, imaginary) * turn
        return torch.cat([both.real, both.imag], -1)

    q, k, v = (
        (x @ t[f"{at}.self_attn.{name}_proj.weight"].T).view(length, -1, WIDTH) for name in "qkv"
    )
    q, k, v = (
        rotated(q),
        rotated(k).repeat_interleave(HEADS // KV_HEADS, 1),
        v.repeat_interleave(HEADS // KV_HEADS, 1),
    )
    scores = torch.einsum("ihd,jhd->hij", q, k) / WIDTH**0.5
    weights = scores.masked_fill(
        torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf
    ).softmax(-1)
    return (
        torch.einsum("hij,jhd->ihd", weights, v).reshape(length, -1)
        @ t[f"{at}.self_attn.o_proj.weight"].T
    )


def mlp(x: Tensor, t: dict[str, Tensor], at: str) -> Tensor:
    gate, up = (x @ t[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return (F.silu(gate) * up) @ t[f"{at}.mlp.down_proj.weight"].T


def reference(
    t: dict[str, Tensor], embedded: Tensor, hidden: Tensor, norm_before_residual: bool
) -> Tensor:
    """The feedback of all positions of one sequence, from its embedded tokens and its hidden
    states, after `fc` in EAGLE-3."""
    if "norm.weight" in t:
        at, g = "midlayer", norm(hidden, t["midlayer.hidden_norm.weight"])
        x = torch.cat([norm(embedded, t["midlayer.input_layernorm.weight"]), g], 1)
        x = (g if norm_before_residual else hidden) + attention(x, t, at)
    else:
        at, x = "layers.0", torch.cat([embedded, hidden], 1) @ t["fc.weight"].T + t["fc.bias"]
        x = x + attention(x, t, at)
    return x + mlp(norm(x, t[f"{at}.post_attention_layernorm.weight"]), t, at)


# ---------------------------------------------------------------- through the paged cache


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    folder = make_checkpoint(tmp_path_factory.mktemp("target"))
    return load_model(folder, ModelConfig.from_pretrained(folder), torch.float32)


def load(folder: pathlib.Path, target: LlamaForCausalLM) -> EagleModel:
    return load_draft_model(folder, target, torch.float32, "cpu", 64, transforms=[parallelize])


class Drafter:
    """Calls a head as a runner does, for one sequence whose blocks are anywhere in the cache."""

    def __init__(self, model: EagleModel) -> None:
        self.model, self.blocks, size = model, torch.tensor([7, 2, 5, 0], dtype=torch.int32), 8
        self.backend, self.size = get_backend("auto", torch.device("cpu"), WIDTH), size
        self.cache = torch.full(
            model.attention_layers[0].cache_shape(8, size, self.backend), torch.nan
        )

    def __call__(self, input_ids: Tensor, first: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """One draft step of the positions from `first` on."""
        positions = first + torch.arange(len(input_ids))
        end = first + len(input_ids)
        slots = self.blocks[positions // self.size].long() * self.size + positions % self.size
        vectors = (
            torch.tensor([0, len(input_ids)], dtype=torch.int32),
            torch.tensor([end], dtype=torch.int32),
        )
        metadata = AttentionMetadata(*vectors, self.blocks[None], slots, len(input_ids), end)
        with (
            torch.inference_mode(),
            forward_context(ForwardContext(self.backend, {0: self.cache}, metadata)),
        ):
            return self.model(input_ids, positions, hidden)


KINDS = [("eagle3", {}), ("eagle3", {"norm_before_residual": True}), ("eagle1", {})]


@pytest.mark.parametrize(("kind", "changes"), KINDS, ids=str)
def test_prefill_and_drafts_are_those_of_the_reference(
    kind: str, changes: dict[str, Any], target: LlamaForCausalLM, tmp_path: pathlib.Path
) -> None:
    """A prompt in two chunks, three drafts, then verified tokens in their place, and another
    draft."""
    eagle3 = kind == "eagle3"
    t = random_head(eagle3)
    model = load(write(tmp_path, t, (CONFIG if eagle3 else EAGLE1) | changes), target)
    embedding, drafter = target.model.embed_tokens.weight, Drafter(model)
    assert model.aux_layers == ((0, 1, 2) if eagle3 else ())
    assert drafter.cache.shape == (8, 2, KV_HEADS, 8, WIDTH)
    if eagle3:
        assert torch.equal(model.draft_to_target, torch.arange(DRAFT_VOCAB) + t["d2t"])
        assert torch.equal(model.draft_to_target, t["t2d"].nonzero()[:, 0])
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCAB, (20,), generator=generator)
    aux = torch.randn(20, (3 if eagle3 else 1) * HIDDEN, generator=generator)
    verified = aux @ t["fc.weight"].T if eagle3 else aux
    assert torch.allclose(model.combine_hidden_states(aux), verified, atol=1e-5)

    def expected(hidden: Tensor) -> tuple[Tensor, Tensor]:
        feedback = reference(t, embedding[ids[: len(hidden)]], hidden, bool(changes))
        out = norm(feedback, t["norm.weight"]) if eagle3 else feedback
        return out @ (t["lm_head.weight"] if eagle3 else target.lm_head.weight).T, feedback

    def check(found: tuple[Tensor, Tensor], hidden: Tensor) -> Tensor:
        logits, feedback = expected(hidden)
        count = len(found[0])
        assert torch.allclose(model.compute_logits(found[0]), logits[-count:], atol=1e-4)
        assert torch.allclose(found[1], feedback[-count:], atol=1e-4)
        return feedback[-1:]

    check(drafter(ids[:9], 0, verified[:9].clone()), verified[:9])
    hidden = verified[:12]
    kept = hidden[9:].clone()
    feedback = check(drafter(ids[9:12], 9, kept), hidden)
    assert torch.equal(kept, hidden[9:]), "the caller's hidden states have changed"
    for position in range(12, 15):
        hidden = torch.cat([hidden, feedback])
        feedback = check(drafter(ids[position : position + 1], position, feedback), hidden)
    # Two of them were accepted: the true hidden states take the place of the guessed ones.
    check(drafter(ids[12:15], 12, verified[12:15]), verified[:15])
    hidden = torch.cat([verified[:15], expected(verified[:15])[1][-1:]])
    check(drafter(ids[15:16], 15, hidden[15:]), hidden)


def logits_of_rank(target: pathlib.Path, head: pathlib.Path) -> Tensor:
    return logits_of(
        load(
            head,
            load_model(
                target, ModelConfig.from_pretrained(target), torch.float32, transforms=[parallelize]
            ),
        )
    )


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_share_a_head(tp: int, kind: str, tmp_path: pathlib.Path) -> None:
    eagle3 = kind == "eagle3"
    folder = make_checkpoint(tmp_path / "target")
    head = write(tmp_path / "head", random_head(eagle3), CONFIG if eagle3 else EAGLE1)
    expected = logits_of_rank(folder, head)
    for found in run_ranks(logits_of_rank, Grid(tensor=tp), folder, head):
        assert torch.allclose(found, expected, atol=1e-4)


# ---------------------------------------------------------------- what the target hands out


def run(target: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """The last hidden states of one sequence."""
    config, size = target.config, len(ids)
    shape = kv_cache_shape(1, config.num_kv_heads, size, config.head_dim)
    caches = [
        torch.zeros(shape, dtype=target.model.norm.weight.dtype) for _ in range(config.num_layers)
    ]
    vectors = torch.tensor([0, size], dtype=torch.int32), torch.tensor([size], dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    metadata = AttentionMetadata(*vectors, table, torch.arange(size), size, size)
    backend = get_backend("auto", torch.device("cpu"), config.head_dim)
    with torch.inference_mode(), forward_context(ForwardContext(backend, caches, metadata)):
        return target(ids, torch.arange(size))


@pytest.mark.parametrize("variant", ["llama", "llama-mha-tied", "qwen3", "gemma2", "mixtral"])
def test_the_residual_streams_are_those_of_transformers(
    variant: str, tmp_path: pathlib.Path
) -> None:
    """At the input of each layer, with the layers one by one and in calls of several; and the
    results keep their bits."""
    folder = make_checkpoint(tmp_path, variant)
    ids = torch.randint(3, 320, (17,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference_model(str(folder))(ids[None], output_hidden_states=True).hidden_states

    def fresh() -> LlamaForCausalLM:
        return load_model(folder, ModelConfig.from_pretrained(folder), torch.float32)

    plain = fresh()
    hidden = run(plain, ids)
    num_layers = plain.config.num_layers
    for layers in [(1,), (0, 2), (0, 1, 2)]:
        for fuses in (False, True):
            target = fresh()
            if fuses:
                target.pack_weights()
                fuse_layers(target)
            plain_calls = target.model.layer_calls
            fits = variant not in ("gemma2", "mixtral") and native.is_available() and fuses
            assert len(plain_calls) == (1 if fits else num_layers)
            aux = AuxHiddenStates(target.model, layers)
            parts = len({0, *layers}) if fits else num_layers
            assert len(aux.layer_calls) == parts + len(layers)
            target.model.layer_calls = aux.layer_calls
            for _ in range(2):  # the second time anew
                found = run(target, ids)
                assert len(aux.states) == len(layers)
                for layer, states in zip(layers, aux.states, strict=True):
                    assert torch.allclose(states, expected[layer][0], atol=2e-4, rtol=1e-4), (
                        layer,
                        fuses,
                    )
            if not fuses:
                assert torch.equal(found, hidden)
            target.model.layer_calls = plain_calls
            assert torch.equal(run(target, ids), found)


# ---------------------------------------------------------------- names


def logits_of(model: EagleModel) -> Tensor:
    ids = torch.arange(5)
    return model.compute_logits(
        Drafter(model)(ids, 0, torch.linspace(-1, 1, 5 * HIDDEN).view(5, HIDDEN))[0]
    )


def speculators(config: dict[str, Any]) -> dict[str, Any]:
    own = ("architectures", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    inner = {name: value for name, value in config.items() if name not in own} | {
        "model_type": "llama"
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "transformer_layer_config": inner,
    }


def renamed(tensors: dict[str, Tensor], layer: str, prefix: str = "") -> dict[str, Tensor]:
    apart = ("d2t", "t2d", "lm_head.weight")
    return {
        name if name in apart else prefix + name.replace("midlayer", layer): tensor
        for name, tensor in tensors.items()
    }


def in_8_bits(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With each matrix as integers, of which a power of two is the scale, so that no number changes
    much."""
    found = dict(tensors)
    for name in [
        name for name, tensor in tensors.items() if tensor.ndim == 2 and name != "fc.weight"
    ]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 127
        found |= {name: (tensors[name] / scale).round().to(torch.int8), f"{name}_scale": scale}
    return found


@pytest.mark.parametrize(
    "form", ["SpecForge", "speculators", "vLLM", "nvidia", "int32 d2t", "one file"]
)
def test_heads_under_other_names_are_the_same(
    form: str, target: LlamaForCausalLM, tmp_path: pathlib.Path
) -> None:
    t = random_head()
    expected = logits_of(load(write(tmp_path / "own", t, CONFIG), target))
    folder = tmp_path / "other"
    if form == "SpecForge":
        write(folder, {name: tensor for name, tensor in t.items() if name != "t2d"}, CONFIG)
    elif form == "speculators":
        write(folder, renamed(t, "layers.0"), speculators(CONFIG))
    elif form == "vLLM":
        write(
            folder,
            renamed(t, "layers.0", "model."),
            CONFIG | {"architectures": ["Eagle3LlamaForCausalLM"]},
        )
    elif form == "one file":
        folder.mkdir()
        save_file(t, folder / "head.safetensors", {"config": json.dumps(CONFIG)})
        folder /= "head.safetensors"
    elif form == "nvidia":
        own = {
            name: value
            for name, value in CONFIG.items()
            if name != "eagle_aux_hidden_state_layer_ids"
        }
        write(folder, t, own | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}})
    else:
        write(folder, t | {"d2t": t["d2t"].int()}, CONFIG)
    assert torch.equal(logits_of(load(folder, target)), expected)


def test_a_head_has_its_own_embedding_or_the_target_s(
    target: LlamaForCausalLM, tmp_path: pathlib.Path
) -> None:
    t, embedding = random_head(), target.model.embed_tokens.weight
    expected = logits_of(load(write(tmp_path / "own", t, CONFIG), target))
    same = logits_of(
        load(
            write(tmp_path / "same", t | {"embed_tokens.weight": embedding.clone()}, CONFIG), target
        )
    )
    other = logits_of(
        load(
            write(tmp_path / "other", t | {"embed_tokens.weight": embedding.flip(0)}, CONFIG),
            target,
        )
    )
    assert torch.equal(same, expected) and not torch.allclose(other, expected)


def test_matrices_in_8_bits(target: LlamaForCausalLM, tmp_path: pathlib.Path) -> None:
    t = random_head()
    folder = write(tmp_path / "small", in_8_bits(t), CONFIG)
    assert (folder / "model.safetensors").stat().st_size < 0.5 * sum(
        tensor.nbytes for tensor in t.values()
    )
    head, stored = load(folder, target), in_8_bits(t)
    for name in (
        name for name in stored if name.endswith("down_proj.weight") or name == "lm_head.weight"
    ):
        weight: Any = head.get_submodule(name.removesuffix(".weight")).weight
        assert weight.scheme == W8A8 and torch.equal(
            weight.dequantize(), stored[name] * stored[f"{name}_scale"]
        )
    original = logits_of(load(write(tmp_path / "large", t, CONFIG), target))
    error = (logits_of(head) - original).norm() / original.norm()
    assert 1e-4 < error < 0.03


WRONG: list[tuple[dict[str, Any], dict[str, Tensor | None], str]] = [
    (
        {"architectures": ["Eagle3DeepseekV2ForCausalLM"]},
        {},
        "'Eagle3DeepseekV2ForCausalLM' is not supported; supported are Llama",
    ),
    ({"num_hidden_layers": 2}, {}, "2 layers is not supported; supported is one layer"),
    ({"norm_output": True}, {}, "norm_output is not supported"),
    ({"eagle_config": {"norm_before_fc": True}}, {}, "norm_before_fc is not supported"),
    (
        {"speculators_model_type": "dflash"},
        {},
        "'dflash' is not supported; supported are eagle, eagle3",
    ),
    (
        {"hidden_size": 128},
        {},
        "has a hidden size of 128, and the model one of 64: use a head that was trained",
    ),
    ({"target_hidden_size": 128}, {}, "target's hidden size of 128"),
    ({"vocab_size": 512}, {}, "has a vocabulary of 512, and the model one of 320"),
    (
        {"eagle_aux_hidden_state_layer_ids": [2, 15, 27]},
        {},
        r"reads layers \[2, 15, 27\], and the model has layers 0 to 2",
    ),
    ({"draft_vocab_size": 30}, {}, "d2t must map the 30 tokens"),
    ({}, {"d2t": torch.full((DRAFT_VOCAB,), VOCAB)}, "d2t must map the 40 tokens"),
    ({}, {"mask_hidden": torch.zeros(HIDDEN)}, "this draft head has no place for 'mask_hidden'"),
    ({}, {"lm_head.weight": None}, "lacks lm_head.weight"),
    ({}, {"midlayer.mlp.up_proj.weight": None}, "lacks midlayer.mlp.up_proj.weight"),
    ({"intermediate_size": 56}, {}, r"midlayer.mlp.*_proj.weight has shape \["),
]


@pytest.mark.parametrize(
    ("changes", "tensors", "message"), WRONG, ids=[message for _, _, message in WRONG]
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any],
    tensors: dict[str, Tensor | None],
    message: str,
    target: LlamaForCausalLM,
    tmp_path: pathlib.Path,
) -> None:
    t = {name: tensor for name, tensor in (random_head() | tensors).items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path, t, CONFIG | changes), target)


def test_no_head_is_shipped_for_an_unknown_model() -> None:
    assert shipped_head("no/such-model") is None
