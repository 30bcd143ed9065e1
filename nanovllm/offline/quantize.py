"""Makes a quantized checkpoint in the format of compressed-tensors, which this engine, transformers
and vLLM load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from nanovllm.assembly.flags import words_of
from nanovllm.attention.backends import get_backend
from nanovllm.attention.base import (
    AttentionMetadata,
    ForwardContext,
    forward_context,
    kv_cache_shape,
)
from nanovllm.checkpoint.files import UnsupportedModelError, read_json
from nanovllm.checkpoint.hub import resolve_model
from nanovllm.checkpoint.weights import save_tensors
from nanovllm.data.disk import writing
from nanovllm.data.json import JsonObject
from nanovllm.layers.basic import Layer, Linear
from nanovllm.models.config import ModelConfig
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.models.loader import build_model, load_model, stored_config, stored_tensors
from nanovllm.offline.algorithms import (
    Format,
    Quantized,
    awq_factors,
    clip_outliers,
    gptq,
    hessian_of,
    rtn,
)
from nanovllm.offline.text import samples
from nanovllm.ops.reference_quantized import pack

if TYPE_CHECKING:
    from nanovllm.offline.command import Recipe

# But for config.json, which is written anew.
COPIED = (".json", ".jinja", ".txt", "tokenizer.model")
W8 = Format(8, 0)
# The norm before a layer's matrix, from whose outputs AWQ takes the factors of the layer's inputs:
# the first that there is.
NORMS = {
    "qkv_proj": ["input_layernorm"],
    "gate_up_proj": ["pre_feedforward_layernorm", "post_attention_layernorm"],
}


def quantize(name_or_folder: str, out: str | Path, recipe: Recipe) -> Path:
    """Quantize a model, and write it to a new folder.

    Args:
        name_or_folder: course model, local folder, or hub id.

    Returns: the folder. Its config.json says under "quantized_from" what was quantized, and how.

    Raises:
        ValueError: a model or a folder that does not fit; the message says what would.
    """
    folder = resolve_model(name_or_folder).resolve()
    out = Path(out).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"'{out}' exists and is not an empty folder: name a new one")
    config = stored_config(ModelConfig.from_pretrained(folder), folder)
    model = build_model(config)
    names = matrices_of(model, recipe)
    source = {
        name: (old, t)
        for old, t in stored_tensors(config, folder)
        if (name := model.checkpoint_name(old))
    }
    dtype = source[min(names)][1].dtype
    form = W8
    if recipe.scheme == "w4a16":
        form = Format(4, max(0, recipe.group_size or 0), not recipe.asymmetric, dtype)
    calibrator = Calibrator(model, recipe.method, form)
    if recipe.method != "rtn":
        token_ids = torch.tensor(samples(folder, recipe, config.max_position_embeddings))
        calibrator = calibrate(folder, config, token_ids, recipe.method, form)
    tensors: dict[str, Tensor] = {}
    if recipe.quantize_head:
        tied = config.tie_word_embeddings
        _, head = source["model.embed_tokens.weight"] if tied else source.pop("lm_head.weight")
        tensors |= stored("lm_head", rtn(head, W8), W8)
    for name, (old, tensor) in source.items():
        if name in names:
            tensors |= stored(
                old.removesuffix(".weight"), calibrator.found.get(name) or rtn(tensor, form), form
            )
        else:
            tensors[old] = calibrator.changed.get(name, tensor).to(tensor.dtype)
    raw = read_json(folder / "config.json") | {
        "quantization_config": settings_of(recipe),
        "quantized_from": {
            "model": str(folder) if Path(name_or_folder).is_dir() else name_or_folder,
            "settings": words_of(recipe),
        },
        "tie_word_embeddings": config.tie_word_embeddings and not recipe.quantize_head,
    }
    _write_or_remove(folder, out, tensors, raw)
    return out


def _write_or_remove(
    folder: Path, out: Path, tensors: dict[str, Tensor], config: JsonObject
) -> None:
    """Write a checkpoint as `_write` does. If that fails, remove the folder: half a checkpoint is
    of no use, and would be in the way of the next attempt."""
    try:
        with writing(out):
            _write(folder, out, tensors, config)
    except BaseException:  # Ctrl-C, too
        shutil.rmtree(out, ignore_errors=True)
        raise


def _write(folder: Path, out: Path, tensors: dict[str, Tensor], config: JsonObject) -> None:
    """Write a checkpoint: new weights and a new config.json, and copies of the other files of a
    folder."""
    out.mkdir(parents=True, exist_ok=True)
    for file in (
        file for file in folder.iterdir() if file.name.endswith(COPIED) and "index" not in file.name
    ):
        shutil.copyfile(file, out / file.name)
    if (templates := folder / "additional_chat_templates").is_dir():
        shutil.copytree(templates, out / templates.name, dirs_exist_ok=True)
    save_tensors(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def matrices_of(model: LlamaForCausalLM, recipe: Recipe) -> set[str]:
    """The names of the matrices to be quantized: of all linear layers and experts, but for the
    output head.

    Raises:
        UnsupportedModelError: the model does not fit the recipe; the message says what would.
    """
    config = model.config
    size = recipe.group_size or -1
    shapes = dict[str, tuple[int, ...]]()
    if config.quantization is not None:
        mistake = f"this model is quantized already ({config.quantization.method})"
        raise UnsupportedModelError(f"{mistake}: name the original checkpoint")
    if recipe.method != "rtn" and (config.moe or config.kv_lora_rank):
        mistake = (
            f"{recipe.method} is not supported for {config.architecture}, with its experts or "
            "latent attention"
        )
        raise UnsupportedModelError(f"{mistake}: use method rtn")
    for path, layer in model.named_modules():
        if isinstance(layer, Layer) and path != "lm_head" and layer.matrices.packable:
            shapes |= {
                name: place.shape for name, place in layer.places(path) if name.endswith(".weight")
            }
    for name, (_, inputs) in shapes.items():
        if size != -1 and (size < 8 or size % 8 or inputs % size):
            fit = [
                str(n)
                for n in (128, 64, 32, 16)
                if not any(shape[1] % n for shape in shapes.values())
            ]
            mistake = (
                f"group_size {size} must be a multiple of 8 that divides the {inputs} inputs of "
                f"{name}"
            )
            raise UnsupportedModelError(f"{mistake}: use {', '.join(fit)}, or -1 for whole rows")
    return set(shapes)


# ---------------------------------------------------------------- with the inputs of the layers


@torch.inference_mode()
def calibrate(
    folder: Path, config: ModelConfig, token_ids: Tensor, method: str, form: Format
) -> Calibrator:
    """Quantize the matrices of all layers by the inputs that they get. The model computes all
    samples in one pass, in float32. Each matrix is quantized when its inputs are there, and then
    multiplies them: so the layers after it get the inputs that they will get.

    Args:
        token_ids: `[samples, length]`.

    Returns: the calibrator, with all that it has found.
    """
    count, length = token_ids.shape
    model = load_model(folder, config, torch.float32, max_positions=length)
    positions = torch.arange(count * length)
    blocks = torch.arange(count + 1, dtype=torch.int32)  # each sample has one, a large one
    lengths = torch.full((count,), length, dtype=torch.int32)
    metadata = AttentionMetadata(
        query_start_loc=blocks * length,
        seq_lens=lengths,
        block_tables=blocks[:-1, None],
        slot_mapping=positions,
        max_query_len=length,
        max_seq_len=length,
    )
    # Once a layer has attended, its KV is not needed any more: all layers share one cache.
    cache = torch.zeros(kv_cache_shape(count, config.num_kv_heads, length, config.head_dim))
    backend = get_backend("auto", torch.device("cpu"), config.head_dim)
    context = ForwardContext(backend, [cache] * config.num_layers, metadata)
    linears = {path: layer for path, layer in model.named_modules() if isinstance(layer, Linear)}
    with (
        forward_context(context),
        tqdm(linears, desc=f"{method}, {count * length:,} tokens", unit="layer") as bar,
    ):
        calibrator = Calibrator(model, method, form, bar.update)
        for path, layer in linears.items():
            layer.register_forward_pre_hook(partial(calibrator.quantize, path))
        model(token_ids.flatten(), positions % length)
    return calibrator


class Calibrator:
    """Quantizes a model's linear layers one by one, in the order in which they compute.

    Args:
        done: is called after each.

    Attributes:
        found: the quantized matrices, by the checkpoint's names.
        changed: norms that AWQ has changed.
    """

    def __init__(
        self, model: LlamaForCausalLM, method: str, form: Format, done: Callable[[], object] = int
    ) -> None:
        self.model = model
        self.method = method
        self.form = form
        self.done = done
        self.found = dict[str, Quantized]()
        self.changed = dict[str, Tensor]()

    def quantize(self, path: str, layer: Linear, arguments: tuple[Tensor]) -> tuple[Tensor]:
        """Quantize the matrices of a layer, before it computes.

        Args:
            arguments: the layer's inputs, `[tokens, in_features]`.

        Returns: the inputs for the new matrices, which AWQ has changed.
        """
        [x] = arguments
        hessian = hessian_of(x)
        kind = path.rpartition(".")[2]
        # Several heads of queries share the values before o_proj, and a bias in the layer before
        # would have to be scaled, too.
        if (
            self.method == "awq"
            and kind != "o_proj"
            and not (kind == "down_proj" and self.model.config.mlp_bias)
        ):
            factors = awq_factors(layer.weight, hessian, x.abs().mean(0), self.form)
            self.divide_before(path, factors)
            layer.weight.mul_(factors)
            x = x / factors
            hessian = hessian / torch.outer(factors, factors)
        for name, place in (
            (name, place) for name, place in layer.places(path) if name.endswith(".weight")
        ):
            # scores need them
            matrix = place.target
            keeps_outliers = name.endswith(("q_proj.weight", "k_proj.weight"))
            if self.method == "awq" and not keeps_outliers:
                matrix = clip_outliers(matrix, hessian, self.form)
            self.found[name] = (
                gptq(matrix, hessian, self.form)
                if self.method == "gptq"
                else rtn(matrix, self.form)
            )
            place.target.copy_(self.found[name].dequantize())
        self.done()
        return (x,)

    def divide_before(self, path: str, factors: Tensor) -> None:
        """Have what is before a layer, a norm or the MLP's up_proj, divide its outputs by
        `[in_features]` factors."""
        block_path, _, kind = path.rsplit(".", 2)
        if kind == "down_proj":
            self.found[f"{block_path}.mlp.up_proj.weight"].grid.scales.div_(factors[:, None])
            return
        block = self.model.get_submodule(block_path)
        children = dict(block.named_children())
        name = next(name for name in NORMS[kind] if name in children)
        # Its norms multiply by 1 + weight.
        offset = float(self.model.config.architecture == "Gemma2ForCausalLM")
        weight = self.changed[f"{block_path}.{name}.weight"] = getattr(block, name).weight
        weight.copy_((weight + offset) / factors - offset)


# ---------------------------------------------------------------- the files


def stored(layer: str, matrix: Quantized, form: Format) -> dict[str, Tensor]:
    """The tensors that store a matrix: in compressed-tensors' int-quantized format with 8 bits, in
    its pack-quantized format with 4."""
    q = matrix.q
    scales = matrix.grid.scales.to(form.dtype)
    if form.bits == 8:
        return {f"{layer}.weight": q.to(torch.int8), f"{layer}.weight_scale": scales}
    tensors = {
        "weight_packed": pack(q),
        "weight_scale": scales,
        "weight_shape": torch.tensor(q.shape),
    }
    if not form.symmetric:  # packed along the outputs
        tensors["weight_zero_point"] = pack(
            F.pad(matrix.grid.zeros.T, (0, -len(q) % 8))
        ).T.contiguous()
    return {f"{layer}.{kind}": tensor for kind, tensor in tensors.items()}


class QuantizedNumbers(TypedDict):
    """How the numbers of weights or of inputs are quantized, in compressed-tensors' words.

    Attributes:
        strategy: what shares a scale: a "channel" (row) or "group" of weights, a "token" of inputs.
        dynamic: the scales are computed in each step.
        group_size: inputs per group of weights, if the strategy is "group".
    """

    num_bits: int
    type: str
    symmetric: bool
    strategy: str
    dynamic: bool
    group_size: NotRequired[int]


class QuantizedGroup(TypedDict):
    """Matrices that are quantized alike.

    Attributes:
        targets: their kind, or a pattern of their names.
        input_activations: missing if inputs are not quantized.
    """

    format: str
    targets: list[str]
    weights: QuantizedNumbers
    input_activations: NotRequired[QuantizedNumbers]


class QuantizationSettings(TypedDict):
    """`quantization_config` of a config.json in the format of compressed-tensors.

    Attributes:
        format: that of all groups, or "mixed-precision".
        ignore: patterns of the names of matrices that are not quantized.
        config_groups: the groups by name.
    """

    quant_method: str
    format: str
    quantization_status: str
    ignore: list[str]
    config_groups: dict[str, QuantizedGroup]


def _w8a8_group(target: str) -> QuantizedGroup:
    """Weights in 8 bits with a scale per row, and inputs in 8 bits with a scale per token."""
    return {
        "format": "int-quantized",
        "targets": [target],
        "weights": {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": "channel",
            "dynamic": False,
        },
        "input_activations": {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        },
    }


def _w4a16_group(recipe: Recipe) -> QuantizedGroup:
    """Weights in 4 bits with a scale per row or group."""
    weights: QuantizedNumbers = {
        "num_bits": 4,
        "type": "int",
        "symmetric": not recipe.asymmetric,
        "strategy": "channel",
        "dynamic": False,
    }
    size = recipe.group_size or -1
    if size != -1:
        weights["strategy"] = "group"
        weights["group_size"] = size
    return {"format": "pack-quantized", "targets": ["Linear"], "weights": weights}


def settings_of(recipe: Recipe) -> QuantizationSettings:
    """The `quantization_config` that describes the files."""
    groups = {"group_0": _w8a8_group("Linear")}
    if recipe.scheme == "w4a16":
        groups = {"group_0": _w4a16_group(recipe)}
        if recipe.quantize_head:
            groups["group_1"] = _w8a8_group("re:.*lm_head$")
    # Beside what chooses experts, and what latent attention absorbs.
    left = [] if recipe.quantize_head else ["lm_head"]
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if len(groups) > 1 else groups["group_0"]["format"],
        "quantization_status": "compressed",
        "ignore": ["re:.*\\.gate$", "re:.*kv_b_proj$", *left],
        "config_groups": groups,
    }
