"""EAGLE draft heads (EAGLE-1: Li et al. 2024, arXiv 2401.15077; EAGLE-3: Li et al. 2025, arXiv
2503.01840).

A head is one decoder layer that reads what the target has computed. Of position i it takes the
target's hidden states and the token at position i + 1, which the target has just chosen, and
guesses the token at i + 2. To guess further, its own output stands in for the hidden states that
only the target could compute. EAGLE-3 reads the residual stream of three of the target's layers,
and guesses among the most frequent tokens only; EAGLE-1 reads the last hidden states, predicts the
next ones, and leaves the rest to the target's output head."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from nanovllm.attention.base import Rotary
from nanovllm.checkpoint.files import (
    ConfigFile,
    Description,
    ModelFileError,
    UnsupportedModelError,
    check_supported,
    flag,
    integer,
    json_object,
    list_of,
    read_json,
    text,
)
from nanovllm.checkpoint.weights import open_tensors, weight_files
from nanovllm.data.json import JsonObject
from nanovllm.data.parts import needed_for
from nanovllm.layers.basic import Embedding, Layer, Linear, LMHead, Place, QKVLinear, RMSNorm
from nanovllm.models.config import ModelConfig
from nanovllm.models.llama import (
    MLP,
    AttentionLayer,
    DecoderLayer,
    LayerCall,
    LlamaForCausalLM,
    LlamaModel,
    SelfAttention,
    rotary_table,
)
from nanovllm.models.loader import allocate_weights, load_weights

if TYPE_CHECKING:
    from nanovllm.models.fused import FusedLayers

# What config.json calls a head with the layer of this architecture. Some files name the target's
# architecture.
LLAMA = (
    "LlamaForCausalLM LlamaForCausalLMEagle EagleLlamaForCausalLM LlamaForCausalLMEagle3 "
    "Eagle3LlamaForCausalLM"
)
LLAMA += " Eagle3Speculator Eagle3DraftModel"
ARCHITECTURES = dict.fromkeys(LLAMA.split(), "LlamaForCausalLM")
ARCHITECTURES |= {name: name for name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM")}
ARCHITECTURES["Eagle3Qwen3ForCausalLM"] = "Qwen3ForCausalLM"
EagleFile = Description(
    {
        integer: "draft_vocab_size target_hidden_size",
        flag: "norm_before_residual norm_before_fc fc_norm norm_output",
        text: "speculators_model_type",
        list_of(integer): "eagle_aux_hidden_state_layer_ids",
        json_object: "eagle_config transformer_layer_config",
    }
)
AuxFile = Description(
    {list_of(integer): "eagle_aux_hidden_state_layer_ids", flag: "norm_before_fc"}
)
UNSUPPORTED = ("norm_before_fc", "fc_norm", "norm_output")
UNUSED = ("t2d",)  # d2t says it, too
HEADS = Path(__file__).parent / "heads"


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """The layers at whose input EAGLE-3 reads the residual stream: early, in the middle, and
    late."""
    return (2, num_layers // 2, num_layers - 3)


@dataclass(frozen=True)
class EagleConfig:
    """The shape of a head.

    Attributes:
        layer: of its layer; with the vocabulary of the target.
        draft_vocab_size: tokens that it can guess.
        aux_layers: of the target, see `default_aux_layers`; empty for EAGLE-1.
        norm_before_residual: the layer adds to the normalised hidden states.
        has_embedding, has_head, fc_bias: the file has these tensors; otherwise embedding or output
            head are the target's.
    """

    layer: ModelConfig
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    norm_before_residual: bool
    has_embedding: bool
    has_head: bool
    fc_bias: bool

    @classmethod
    def of(cls, raw: JsonObject, tensors: dict[str, Tensor], num_layers: int) -> EagleConfig:
        """From a parsed config.json, and the names of the tensors.

        Args:
            num_layers: of the target.

        Raises:
            UnsupportedModelError: a head of another kind; the message says what is supported.
            ModelFileError: a field that is missing, or of another type.
        """
        fields = EagleFile.read(raw, "config.json")
        check_supported(
            "speculators_model_type",
            fields.get("speculators_model_type", "eagle3"),
            ["eagle", "eagle3"],
        )
        inner = AuxFile.read(fields.get("eagle_config", {}), "config.json: eagle_config")
        raw = raw | fields.get("transformer_layer_config", {})
        architectures = ConfigFile.read(raw, "config.json").get("architectures") or [
            "LlamaForCausalLM"
        ]
        check_supported("a draft head of architecture", architectures[0], ARCHITECTURES)
        kind = ARCHITECTURES[architectures[0]]
        if "midlayer.self_attn.q_norm.weight" in tensors:
            kind = "Qwen3ForCausalLM"
        layer = ModelConfig.from_dict(raw | {"architectures": [kind], "quantization_config": None})
        layer = replace(layer, architecture="draft head")  # in messages
        if layer.num_layers != 1 or (
            wrong := [name for name in UNSUPPORTED if fields.get(name, inner.get(name))]
        ):
            what = f"{layer.num_layers} layers" if layer.num_layers != 1 else wrong[0]
            raise UnsupportedModelError(
                f"a draft head with {what} is not supported; supported is one layer, without "
                f"{', '.join(UNSUPPORTED)}"
            )
        is_eagle3 = "midlayer.hidden_norm.weight" in tensors
        aux = fields.get("eagle_aux_hidden_state_layer_ids") or inner.get(
            "eagle_aux_hidden_state_layer_ids"
        )
        aux_layers = tuple(aux or default_aux_layers(num_layers)) if is_eagle3 else ()
        if list(aux_layers) != sorted({*aux_layers} & {*range(num_layers)}):
            what = (
                f"the draft head reads layers {list(aux_layers)}, and the model has layers 0 to "
                f"{num_layers - 1}"
            )
            raise UnsupportedModelError(f"{what}: use a head that was trained for this model")
        vocab_size = (
            fields.get("draft_vocab_size", layer.vocab_size) if is_eagle3 else layer.vocab_size
        )
        return cls(
            layer=layer,
            draft_vocab_size=vocab_size,
            aux_layers=aux_layers,
            norm_before_residual=fields.get("norm_before_residual", False),
            has_embedding="embed_tokens.weight" in tensors,
            # The target's head would score other tokens.
            has_head="lm_head.weight" in tensors or vocab_size != layer.vocab_size,
            fc_bias="fc.bias" in tensors,
        )


class EagleAttention(SelfAttention):
    """The attention of EAGLE-3, whose inputs are a token's embedding and hidden states, side by
    side."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, 0)
        self.qkv_proj = QKVLinear(
            2 * config.hidden_size,
            config.head_dim,
            config.num_heads,
            config.num_kv_heads,
            bias=config.qkv_bias,
        )


class EagleLayer(nn.Module):
    """The one layer: a decoder layer, whose first norms are EAGLE-3's."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        layer = config.layer
        hidden = layer.hidden_size
        eps = layer.rms_norm_eps
        if config.aux_layers:
            self.input_layernorm = RMSNorm(hidden, eps)
            self.hidden_norm = RMSNorm(hidden, eps)
        self.self_attn = EagleAttention(layer) if config.aux_layers else SelfAttention(layer, 0)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MLP(hidden, layer.intermediate_size, layer.mlp_bias)

    def forward(self, x: Tensor, residual: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """As `DecoderLayer.forward`, for inputs that are normalised already."""
        x, residual = self.post_attention_layernorm.add(self.self_attn(x, rotary), residual)
        return self.mlp(x), residual


class EagleModel(nn.Module):
    """What both kinds of heads have in common.

    Args:
        config: its shape.
        target: whose embedding and output head it uses, unless it has its own.

    Attributes:
        draft_to_target: `[draft_vocab_size]` int64, the target's ids of the tokens that it can
            guess.
        aux_layers: see `EagleConfig`; what `AuxHiddenStates` takes.
        fused: what runs in the place of the layer, where a CPU can (models/fused.py).
    """

    fused: FusedLayers | None = None
    pack_weights: Callable[[], None] = LlamaForCausalLM.pack_weights  # type: ignore[assignment]
    draft_to_target: Tensor
    cos_sin: Tensor

    def __init__(self, config: EagleConfig, target: LlamaForCausalLM) -> None:
        super().__init__()
        self.config = config.layer
        self.aux_layers = config.aux_layers
        hidden = config.layer.hidden_size
        vocab_size = config.layer.vocab_size
        self.fc = Linear(hidden * (len(config.aux_layers) or 2), hidden, config.fc_bias)
        self.midlayer = EagleLayer(config)
        self.embed_tokens = Embedding(vocab_size, hidden) if config.has_embedding else None
        self.lm_head = LMHead(config.draft_vocab_size, hidden) if config.has_head else None
        # The target's modules are called, and are no part of this one.
        self.embed_for_target: Callable[[Tensor], Tensor] = target.model.embed_tokens.forward
        self.score_for_target: Callable[[Tensor], Tensor] = target.compute_logits

    @property
    def attention_layers(self) -> dict[int, AttentionLayer]:
        """See `LlamaForCausalLM.attention_layers`."""
        return {0: self.midlayer.self_attn}

    def embed(self, token_ids: Tensor) -> Tensor:
        """`[num_tokens]` to `[num_tokens, hidden_size]`."""
        if self.embed_tokens is None:
            return self.embed_for_target(token_ids)
        return self.embed_tokens(token_ids)

    def combine_hidden_states(self, aux: Tensor) -> Tensor:
        """What a first draft step takes as `hidden`, `[num_tokens, hidden_size]`, of what the
        target has computed: for EAGLE-3 its auxiliary states side by side,
        `[num_tokens, 3 * hidden_size]`; for EAGLE-1 its last hidden states."""
        return self.fc(aux) if self.aux_layers else aux

    def compute_logits(self, x: Tensor) -> Tensor:
        """`[num_rows, hidden_size]` to `[num_rows, draft_vocab_size]`."""
        return self.score_for_target(x) if self.lm_head is None else self.lm_head(x)

    def tie_weights(self) -> None:
        """See `LlamaForCausalLM.tie_weights`; nothing here is tied."""

    def checkpoint_places(self) -> dict[str, list[Place]]:
        """See `LlamaForCausalLM.checkpoint_places`."""
        layers = [
            (path, module) for path, module in self.named_modules() if isinstance(module, Layer)
        ]
        return {name: [place] for path, layer in layers for name, place in layer.places(path)}

    def checkpoint_name(self, name: str) -> str:
        """See `LlamaForCausalLM.checkpoint_name`; these are EAGLE-3's own names."""
        return name


class Eagle3(EagleModel):
    """EAGLE-3: reads three residual streams, and has an output head of its own."""

    def __init__(self, config: EagleConfig, target: LlamaForCausalLM) -> None:
        super().__init__(config, target)
        self.norm = RMSNorm(config.layer.hidden_size, config.layer.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One draft step.

        Args:
            input_ids: `[num_tokens]` int64, the token after each position.
            positions: `[num_tokens]` int64.
            hidden: `[num_tokens, hidden_size]`, of `combine_hidden_states`, or the second result of
                the step before.

        Returns: what `compute_logits` takes, and what stands in for the hidden states of the
        guessed tokens; `[num_tokens, hidden_size]`."""
        embedded = self.midlayer.input_layernorm(self.embed(input_ids))
        normed = self.midlayer.hidden_norm(hidden)
        residual = (normed if self.norm_before_residual else hidden).clone()  # is overwritten
        layer = self.fused or self.midlayer
        x, residual = layer(
            torch.cat([embedded, normed], 1), residual, Rotary(positions, self.cos_sin)
        )
        return self.norm.add(x, residual)


class Eagle1(EagleModel):
    """EAGLE-1, and EAGLE-2, which has the same head: its output is like the target's last hidden
    states."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One draft step, as in `Eagle3.forward`; both results are the same tensor."""
        x = self.fc(torch.cat([self.embed(input_ids), hidden], 1))
        x, residual = (self.fused or self.midlayer)(x, x.clone(), Rotary(positions, self.cos_sin))
        return residual.add_(x), residual


class AuxHiddenStates:
    """Keeps the residual stream at the input of some layers of a target, in each forward pass whose
    `LlamaModel.layer_calls` are these.

    Args:
        target: whose calls are continued: its layers, or calls of several layers each, which
            become one call for each part between the streams that are kept.
        layers: numbers of layers, in rising order.

    Attributes:
        layer_calls: the target's calls, and what keeps the streams between them.
        states: of the last pass, a `[num_tokens, hidden_size]` tensor per layer. It stays the same
            list.
    """

    def __init__(self, target: LlamaModel, layers: Sequence[int]) -> None:
        self.states: list[Tensor] = []
        self.layer_calls: list[LayerCall] = []
        for call in target.layer_calls:
            if isinstance(call, DecoderLayer):
                self._append(call, call.self_attn.layer, layers)
                continue
            for part in cast("FusedLayers", call).split(layers):
                self._append(part, part.numbers[0], layers)

    def _append(self, call: LayerCall, number: int, layers: Sequence[int]) -> None:
        """Append a call that begins with layer `number`."""
        if number in layers:
            self.layer_calls.append(partial(keep_stream, self.states, layers.index(number)))
        self.layer_calls.append(call)


def keep_stream(
    states: list[Tensor], index: int, x: Tensor, residual: Tensor, rotary: Rotary
) -> tuple[Tensor, Tensor]:
    """Keep the residual stream as `states[index]`, the last one. (A method would make a cycle with
    the target's layers, which would keep their memory until Python's garbage collection.)"""
    states[index:] = [x + residual]
    return x, residual


# ---------------------------------------------------------------- files


def shipped_head(model_name: str) -> Path | None:
    """The EAGLE-3 head that comes with this package for a model, by the name that a user gives;
    None if there is none."""
    file = HEADS / f"{model_name}-eagle3.safetensors"
    return file if file.is_file() else None


@torch.inference_mode()
def load_draft_model(
    folder: Path,
    target: LlamaForCausalLM,
    dtype: torch.dtype,
    device: torch.device | str,
    max_positions: int,
    transforms: Sequence[Callable[[nn.Module], None]] = (),
) -> EagleModel:
    """Load a head for a target.

    Args:
        folder: with config.json and safetensors files under the names of EAGLE, SpecForge,
            speculators or vLLM; or one safetensors file with the configuration in its metadata.
        max_positions: length of the longest sequence.
        transforms: see `build_model`.

    Raises:
        ValueError: a head that cannot be loaded, or that does not fit the target; the message says
            what would work.
    """
    raw, tensors = read_head(Path(folder))
    config = EagleConfig.of(raw, tensors, target.config.num_layers)
    _check_fit(folder, config, raw.get("target_hidden_size"), target.config)
    offsets = tensors.pop("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
    ids = torch.arange(len(offsets), device="cpu") + offsets
    if (
        len(ids) != config.draft_vocab_size
        or ids.min() < 0
        or ids.max() >= target.config.vocab_size
    ):
        raise ModelFileError(
            f"'{folder}': d2t must map the {config.draft_vocab_size} tokens of the draft to ids of "
            "the model"
        )
    with torch.device("meta"):
        model = Eagle3(config, target) if config.aux_layers else Eagle1(config, target)
        for transform in transforms:
            transform(model)
    if any(name.endswith("_scale") for name in tensors):
        # 8-bit weights, and inputs that are rounded to 8 bits, too.
        with needed_for("quantization"):
            from nanovllm.checkpoint.quantization import W8A8_CHECKPOINT
            from nanovllm.layers.quantization import quantize_layers
        quantize_layers(model, W8A8_CHECKPOINT, tensors.items())  # type: ignore[arg-type]
    load_weights(model, ((name, tensor.to("meta")) for name, tensor in tensors.items()))  # type: ignore[arg-type]
    allocate_weights(model, dtype, device)
    model.register_buffer(
        "cos_sin", rotary_table(config.layer, max_positions).to(device), persistent=False
    )
    model.register_buffer("draft_to_target", ids.to(device), persistent=False)
    load_weights(model, tensors.items())  # type: ignore[arg-type]
    return model.eval()


def _check_fit(
    folder: Path, config: EagleConfig, target_hidden_size: int | None, target: ModelConfig
) -> None:
    """Raise an error if a head has other sizes than a target."""
    hidden = target.hidden_size
    for what, its, has in (
        ("hidden size", config.layer.hidden_size, hidden),
        ("target's hidden size", target_hidden_size or hidden, hidden),
        ("vocabulary", config.layer.vocab_size, target.vocab_size),
    ):
        if its != has:
            raise UnsupportedModelError(
                f"the draft head '{folder}' has a {what} of {its}, and the model one of {has}: use "
                "a head that was trained for this model"
            )


def read_head(path: Path) -> tuple[JsonObject, dict[str, Tensor]]:
    """The configuration and the tensors of a head, under EAGLE-3's own names."""
    raw = read_json(path / "config.json")
    found = dict[str, Tensor]()
    for file in [path] if path.is_file() else weight_files(path):
        with open_tensors(file) as tensors:
            if path.is_file():
                raw = json.loads((tensors.metadata() or {}).get("config", "{}"))
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    names = {name: name.removeprefix("model.").replace("layers.0.", "midlayer.") for name in found}
    return raw, {new: found[name] for name, new in names.items() if new not in UNUSED}
