"""Which connectors there are, how the two halves of one are made, and what must be equal on engines
that share KV."""

import hashlib
import pathlib
from collections.abc import Callable, Sequence

import xxhash
from torch import Tensor

from nanovllm.attention.base import AttentionBackend
from nanovllm.checkpoint.weights import weight_files
from nanovllm.data.config import EngineConfig
from nanovllm.data.parts import load
from nanovllm.distributed.groups import get_tp_group
from nanovllm.kv.connector import KVConnectorScheduler, KVConnectorWorker
from nanovllm.kv_transfer.layout import KVLayout
from nanovllm.models.config import ModelConfig
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.ops.device import choose_device, choose_dtype

# Name -> its two halves, imported when they are asked for.
PD = "nanovllm.kv_transfer.pd.disaggregated"
BLEND = "nanovllm.kv_transfer.blend.connector"
OFFLOADING = "nanovllm.kv_transfer.stores.offloading"
CONNECTORS = {
    "local": (f"{PD}:DisaggregatedScheduler", f"{PD}:DisaggregatedWorker"),
    "nixl": (f"{PD}:DisaggregatedScheduler", f"{PD}:NixlWorker"),
    "offloading": (f"{OFFLOADING}:OffloadingScheduler", f"{OFFLOADING}_worker:OffloadingWorker"),
    "pool": (f"{OFFLOADING}:OffloadingScheduler", f"{OFFLOADING}_worker:OffloadingWorker"),
    "blend": (f"{BLEND}:BlendScheduler", f"{BLEND}:BlendWorker"),
}


def _halves(config: EngineConfig) -> tuple[str, str]:
    """The names of the two classes of the connector that the settings name: the scheduler's half,
    and a rank's."""
    assert config.kv_transfer is not None
    name = config.kv_transfer.kv_connector
    if name not in CONNECTORS:
        raise ValueError(f"kv_connector must be one of {', '.join(CONNECTORS)}; got {name!r}")
    return CONNECTORS[name]


def _worker_half(config: EngineConfig) -> type[KVConnectorWorker]:
    half: type[KVConnectorWorker] = load(_halves(config)[1], "this kv_connector")
    return half


def create_scheduler_connector(
    config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path, ranks: Sequence[object]
) -> KVConnectorScheduler:
    """Make the scheduler's half.

    Args:
        folder: the checkpoint.
        ranks: what each rank's half says of itself; see `KVConnectorWorker.get_handshake_metadata`.

    Raises:
        ValueError: the connector does not exist (the message lists those that do), or its settings
            make no sense.
    """
    half: type[KVConnectorScheduler] = load(_halves(config)[0], "this kv_connector")
    return half(config, kv_identity(config, model_config, folder), ranks)


def cache_maker(config: EngineConfig) -> Callable[..., Tensor]:
    """The function that makes a layer's cache `(shape, dtype, device)` in memory that the connector
    can use."""
    return _worker_half(config).empty_kv_cache


def create_worker_connector(
    config: EngineConfig,
    model_config: ModelConfig,
    kv_caches: dict[int, Tensor],
    model: LlamaForCausalLM,
    backend: AttentionBackend,
) -> KVConnectorWorker:
    """Make a rank's half.

    Args:
        kv_caches: the rank's caches, by the layer's number in the model.
        model, backend: what computes on the rank.

    Raises:
        ValueError: see `create_scheduler_connector`.
    """
    group = get_tp_group()
    cache = next(iter(kv_caches.values()))
    layout = KVLayout(
        num_layers=model_config.num_layers,
        num_kv_heads=0 if model_config.kv_lora_rank else model_config.num_kv_heads,
        block_size=config.block_size,
        width=cache.shape[-1],
        dtype=str(cache.dtype).removeprefix("torch."),
        num_blocks=len(cache),
        first_layer=min(kv_caches),
        end_layer=max(kv_caches) + 1,
        tp_rank=group.rank_in_group,
        tp_size=group.world_size,
    )
    connector = _worker_half(config)(config, layout, kv_caches)
    connector.model = model
    connector.backend = backend
    return connector


def weights_digest(folder: pathlib.Path) -> str:
    """A digest of a checkpoint's configuration and of all its weights, which have just been read
    and are in the page cache.

    It covers all bytes, since samples could not distinguish two models that differ in one bias. It
    finds mistakes, not forgeries: xxHash is not cryptographic, but as fast as memory."""
    digest = xxhash.xxh3_128()
    for path in [folder / "config.json", *weight_files(folder), *sorted(folder.glob("*.gguf"))]:
        if path.exists():
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, xxhash.xxh3_128).digest())
    return digest.hexdigest()


def kv_identity(
    config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path
) -> dict[str, str | int]:
    """What must be equal, under the names that an error message shows.

    Args:
        folder: the checkpoint.
    """
    weights = (
        f"dummy, seed {config.seed}" if config.load_format == "dummy" else weights_digest(folder)
    )
    latent = model_config.kv_lora_rank > 0
    return {
        "model": model_config.architecture,
        "vocab_size": model_config.vocab_size,
        "weights": f"{weights} {model_config.quantization or ''}".strip(),
        "dtype": str(choose_dtype(config.dtype, choose_device(config.device))).removeprefix(
            "torch."
        ),
        "kv_cache_dtype": config.kv_cache_dtype.partition("_")[0],
        "block_size": config.block_size,
        "num_layers": model_config.num_layers,
        "num_kv_heads": 0 if latent else model_config.num_kv_heads,
        "width": model_config.latent_width if latent else model_config.head_dim,
    }
