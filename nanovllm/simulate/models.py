"""Shapes of models, from a config.json or by name, and how an engine's ranks divide them."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nanovllm.data.checks import check_pipeline_parallel, did_you_mean
from nanovllm.data.errors import UsageError

if TYPE_CHECKING:
    from nanovllm.data.json import JsonObject
    from nanovllm.models.config import ModelConfig

# Architectures that the engine does not run, and one that it does with the same matrices and KV,
# whose steps cost as much. Routing, norms, biases and rotary positions differ.
SAME_MATRICES = {
    "Glm4MoeForCausalLM": "Qwen3MoeForCausalLM",
    "MiniMaxM2ForCausalLM": "MixtralForCausalLM",
    "Phi3ForCausalLM": "LlamaForCausalLM",
}
# Activations have 16 bits.
ACTIVATION_BYTES = 2
# Bytes per logit while an engine samples: the model's logits, and the copy for log-probabilities,
# in 16 bits; in 32 bits, the logits before and after temperature and truncation.
LOGIT_BYTES = 2 + 2 + 4 + 4
# Bytes per logit of the rows among which the sampler searches nuclei, and how many rows it takes.
SEARCH_BYTES = 40
SEARCH_ROWS = 64
# To draw, it needs probabilities in 32 bits, and pads them to a multiple of this number of tokens.
DRAW_BLOCK = 256
_ROTARY = {"partial_rotary_factor", "rope_parameters", "rope_scaling"}


class Matrix(NamedTuple):
    """A weight matrix, as one rank of the tensor-parallel group has it.

    Attributes:
        part: "projections" of attention, "mlp" (routers and shared experts, too), "experts" or
            "head".
        layers: layers that have it.
        bytes_per_weight: 2 also for the matrices that quantized checkpoints leave as they are.
        copies: experts of a layer on this rank.
    """

    part: str
    inputs: int
    outputs: int
    layers: int
    bytes_per_weight: float = 2
    copies: float = 1

    @property
    def size(self) -> int:
        """Weights in all layers, of one copy."""
        return self.inputs * self.outputs * self.layers


@dataclass(frozen=True)
class Layout:
    """How engines divide a model, in the engine's own settings.

    Attributes:
        expert_imbalance: tokens of the busiest rank's experts, relative to the mean.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    num_redundant_experts: int = 0
    expert_imbalance: float = 1.0

    def __str__(self) -> str:
        words = [f"TP {self.tensor_parallel_size}", f"PP {self.pipeline_parallel_size}"]
        if self.data_parallel_size > 1:
            words.append(f"DP {self.data_parallel_size}")
        if self.enable_expert_parallel:
            words.append("EP")
        if self.num_redundant_experts:
            words.append(f"{self.num_redundant_experts} redundant experts")
        return ", ".join(words)

    @property
    def devices(self) -> int:
        """Devices of one of the `data_parallel_size` engines."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def expert_ranks(self) -> int:
        """Ranks that share the experts of a layer as whole ones."""
        return (
            self.tensor_parallel_size * self.data_parallel_size
            if self.enable_expert_parallel
            else 1
        )

    def expert_uses(self, top_k: int) -> float:
        """Return the rows that all experts of the busiest rank multiply with, per token of an
        engine. With whole experts on each rank, every engine's tokens go to all ranks."""
        share = self.expert_imbalance * self.data_parallel_size / self.expert_ranks
        return top_k * (share if self.expert_ranks > 1 else 1)

    def check(self, config: ModelConfig) -> None:
        """Check that the model can be divided like this.

        Raises:
            UsageError: it cannot; the message is the engine's own.
        """
        from nanovllm.distributed.expert_slots import slots_per_rank
        from nanovllm.executor.grid import check_tensor_parallel

        moe = config.moe
        try:
            if moe is not None:
                config = replace(
                    config, moe=replace(moe, enable_expert_parallel=self.enable_expert_parallel)
                )
                slots_per_rank(moe.num_experts, self.expert_ranks, self.num_redundant_experts)
            check_tensor_parallel(config, self.tensor_parallel_size)
            check_pipeline_parallel(config.num_layers, self.pipeline_parallel_size)
        except ValueError as error:
            raise UsageError(str(error)) from None


@dataclass(frozen=True)
class ModelShape:
    """A model's shape, and the sizes of its numbers.

    Attributes:
        bytes_per_weight: of the layers' matrices; embedding, head and routers have 2.
        bytes_per_element: of the KV cache.
        source: where the shape is from.
    """

    name: str
    config: ModelConfig
    bytes_per_weight: float = 2
    bytes_per_element: float = 2
    source: str = ""

    @property
    def num_parameters(self) -> int:
        """All weights, without biases and norms."""
        *layers, head = self.matrices(Layout())
        ends = 1 if self.config.tie_word_embeddings else 2
        return ends * head.size + sum(round(matrix.size * matrix.copies) for matrix in layers)

    def kv_bytes_per_token(self, tensor_parallel_size: int = 1) -> float:
        """Return the bytes of a token on one rank, in all layers. A KV head, or a latent, that
        several ranks need is on each of them."""
        shares = min(tensor_parallel_size, self.config.num_kv_heads)
        return self.config.kv_elements_per_token * self.bytes_per_element / shares

    def weight_bytes(self, layout: Layout) -> float:
        """Return the bytes of the weights on the device that has most of them."""
        *layers, head = self.matrices(layout)
        stages = layout.pipeline_parallel_size
        # The embedding is as large as the head. In a pipeline, they are in different stages.
        ends = 1 if self.config.tie_word_embeddings or stages > 1 else 2
        layer_bytes = sum(
            matrix.size * matrix.copies * matrix.bytes_per_weight for matrix in layers
        )
        return layer_bytes / stages + ends * head.size * head.bytes_per_weight

    def activation_bytes(self, layout: Layout, num_tokens: int, num_requests: int) -> float:
        """Return the most memory that a step takes on a rank besides weights and KV, in bytes: in
        the widest part of a layer, or while the rank samples.

        All parts of a layer need its input, the residual stream and the normalised input, and also

            attention   what it projects, and its outputs
            MLP         gate, up and their product
            experts     the same per use of an expert; or the outputs per use in 32 bits, twice

        Copies of normalised queries and keys are not counted.
        """
        hidden = self.config.hidden_size
        tp = layout.tensor_parallel_size
        projections = self._projections(tp)
        attention = projections[-1][0] + sum(outputs for _, outputs in projections)
        widths = [attention, 3 * self.config.intermediate_size / tp]
        if (moe := self.config.moe) is not None:
            uses = layout.expert_uses(moe.top_k)
            gated = uses * moe.intermediate_size / (1 if layout.enable_expert_parallel else tp)
            # The sum of the outputs is there in 32 and in 16 bits.
            widths += [3 * gated, gated + (4 * uses + 3) * hidden]
        drawn = (8 if self.config.vocab_size % DRAW_BLOCK else 4) * num_requests
        searched = SEARCH_BYTES * min(num_requests, SEARCH_ROWS)
        sampling = self.config.vocab_size * (LOGIT_BYTES * num_requests + max(drawn, searched))
        return max(
            ACTIVATION_BYTES * num_tokens * (3 * hidden + max(widths)),
            ACTIVATION_BYTES * num_tokens * hidden + sampling,
        )

    def matrices(self, layout: Layout) -> list[Matrix]:
        """Return the matrices that a rank multiplies with, the head last."""
        config = self.config
        moe = config.moe
        hidden = config.hidden_size
        tp = layout.tensor_parallel_size
        num_sparse = sum(moe.sparse_layers) if moe else 0
        found = [
            Matrix("projections", inputs, outputs, config.num_layers, self.bytes_per_weight)
            for inputs, outputs in self._projections(tp)
        ]
        found += self._mlp("mlp", config.intermediate_size // tp, config.num_layers - num_sparse)
        if moe is not None:
            size = moe.intermediate_size // (1 if layout.enable_expert_parallel else tp)
            slots = (moe.num_experts + layout.num_redundant_experts) / layout.expert_ranks
            found.append(Matrix("mlp", hidden, moe.num_experts, num_sparse))
            found += self._mlp("mlp", moe.num_shared_experts * size, num_sparse)
            found += self._mlp("experts", size, num_sparse, slots)
        return [*found, Matrix("head", hidden, config.vocab_size // tp, 1)]

    def _mlp(self, part: str, channels: int, layers: int, copies: float = 1) -> list[Matrix]:
        hidden = self.config.hidden_size
        shapes = [(hidden, 2 * channels), (channels, hidden)] if channels * layers else []
        return [Matrix(part, *shape, layers, self.bytes_per_weight, copies) for shape in shapes]

    def _projections(self, tp: int) -> list[tuple[int, int]]:
        config = self.config
        hidden = config.hidden_size
        heads = config.num_heads // tp
        if not config.kv_lora_rank:
            kv_heads = max(1, config.num_kv_heads // tp)
            channels = heads * config.head_dim
            return [(hidden, channels + 2 * kv_heads * config.head_dim), (channels, hidden)]
        values = heads * config.v_head_dim
        queries = heads * (config.qk_nope_head_dim + config.head_dim)
        rank = config.q_lora_rank
        return [
            *([(hidden, rank), (rank, queries)] if rank else [(hidden, queries)]),
            (hidden, config.latent_width),
            # Keys and values from latents; in decodes, queries to latents and outputs from them.
            (config.kv_lora_rank, heads * config.qk_nope_head_dim),
            (config.kv_lora_rank, values),
            (values, hidden),
        ]


@cache
def _read() -> dict[str, dict[str, object]]:
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def model_names() -> list[str]:
    """Return the names that `find_model` knows."""
    return list(_read())


def _plain(name: str) -> str:
    """Return a name without what does not decide about the shape: case, the organisation, and the
    ending for what the model was trained to do."""
    return re.sub(r"-(base|chat|instruct)$", "", name.lower().rpartition("/")[2])


@cache
def _plain_names() -> dict[str, str]:
    """Return the plain names of the known models and of their sources, each with the known name."""
    return {
        _plain(word): name for name, raw in _read().items() for word in (str(raw["source"]), name)
    }


def _config_of(raw: JsonObject) -> ModelConfig:
    """Read a config.json of an architecture that the engine runs, or of one in `SAME_MATRICES`."""
    from nanovllm.checkpoint.files import ConfigFile, check_supported
    from nanovllm.models.config import SUPPORTED_ARCHITECTURES, ModelConfig

    architectures = ConfigFile.check(raw, "config.json").get("architectures")
    architecture = architectures[0] if architectures else "none"
    check_supported("architecture", architecture, [*SUPPORTED_ARCHITECTURES, *SAME_MATRICES])
    if architecture in SUPPORTED_ARCHITECTURES:
        return ModelConfig.from_dict(raw)
    fields = {name: value for name, value in raw.items() if name not in _ROTARY}
    fields["architectures"] = [SAME_MATRICES[architecture]]
    return replace(ModelConfig.from_dict(fields), architecture=architecture)


def find_model(name: str, *, kv_cache_dtype: str = "auto") -> ModelShape:
    """Return a model by its name, in any case, or that of a repository; or from the config.json at
    a path or in a folder.

    Args:
        kv_cache_dtype: see `EngineConfig`; all but "auto" take a byte per number.

    Raises:
        UsageError: an unknown name, with the list of names; or an unusable config.json.
    """
    from nanovllm.checkpoint.files import read_json

    path = Path(name, "config.json") if os.path.isdir(name) else Path(name)
    if name not in _read() and not os.path.isfile(path):
        names = _plain_names()
        plain = _plain(name)
        if plain not in names:
            hint = did_you_mean(plain, names, names)
            raise UsageError(
                f"--model {name!r} {'has no config.json' if os.path.isdir(name) else 'is unknown'}"
                f"{hint + ' Choose' if hint else ': choose'} {', '.join(_read())}, which --list "
                "describes, or give the path of a config.json"
            )
        name = names[plain]
    # Of old AutoGPTQ and AutoAWQ, which wrote how weights are quantized into files of their own.
    old_files = (path.with_name(f"{each}_config.json") for each in ("quantize", "quant"))
    try:
        raw = _read().get(name) or {
            "quantization_config": next(filter(None, map(read_json, old_files)), None),
            **read_json(path),
        }
        config = _config_of(raw)
    except ValueError as error:
        raise UsageError(f"--model {name}: {error}") from None
    full = 4 if "float32" in (raw.get("torch_dtype"), raw.get("dtype")) else 2
    rules = config.quantization.rules if config.quantization else ()
    weight = rules[0].format.bits / 8 if rules else full
    return ModelShape(
        name,
        config,
        bytes_per_weight=weight,
        bytes_per_element=full if kv_cache_dtype == "auto" else 1,
        source=f"huggingface.co/{raw['source']}" if name in _read() else str(path),
    )
