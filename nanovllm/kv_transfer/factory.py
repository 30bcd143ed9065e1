"""Which connectors there are, how the two halves of one are made, and what must be equal on engines
that share KV."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import xxhash
from torch import Tensor

from nanovllm.checkpoint.weights import weight_files
from nanovllm.data.config import EngineConfig
from nanovllm.data.parts import needed_for
from nanovllm.distributed.groups import get_tp_group
from nanovllm.kv_transfer import running
from nanovllm.kv_transfer.connector import KVConnectorScheduler, KVConnectorWorker
from nanovllm.kv_transfer.layout import KVLayout
from nanovllm.models.config import ModelConfig
from nanovllm.ops.device import choose_device, choose_dtype

if TYPE_CHECKING:
    from nanovllm.core.runner import ModelRunner
    from nanovllm.executor.uniproc import Worker

# The scheduler's half of a connector, and a rank's.
Halves = tuple[type[KVConnectorScheduler], type[KVConnectorWorker]]


def _local() -> Halves:
    from nanovllm.kv_transfer.pd.disaggregated import DisaggregatedScheduler, DisaggregatedWorker

    return DisaggregatedScheduler, DisaggregatedWorker


def _nixl() -> Halves:
    from nanovllm.kv_transfer.pd.disaggregated import DisaggregatedScheduler, NixlWorker

    return DisaggregatedScheduler, NixlWorker


def _offloading() -> Halves:
    from nanovllm.kv_transfer.stores.offloading import OffloadingScheduler
    from nanovllm.kv_transfer.stores.offloading_worker import OffloadingWorker

    return OffloadingScheduler, OffloadingWorker


def _blend() -> Halves:
    from nanovllm.kv_transfer.blend.connector import BlendScheduler, BlendWorker

    return BlendScheduler, BlendWorker


# The function that imports a connector, by the connector's name.
CONNECTORS: dict[str, Callable[[], Halves]] = {
    "local": _local,
    "nixl": _nixl,
    "offloading": _offloading,
    "pool": _offloading,
    "blend": _blend,
}


def _halves(config: EngineConfig) -> Halves:
    """Import the connector that the settings name."""
    assert config.kv_transfer is not None
    name = config.kv_transfer.kv_connector
    if name not in CONNECTORS:
        raise ValueError(f"kv_connector must be one of {', '.join(CONNECTORS)}; got {name!r}")
    with needed_for("this kv_connector"):
        return CONNECTORS[name]()


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
    half, _ = _halves(config)
    return half(config, kv_identity(config, model_config, folder), ranks)


def cache_maker(config: EngineConfig) -> Callable[..., Tensor]:
    """The function that makes a layer's cache `(shape, dtype, device)` in memory that the connector
    can use."""
    _, half = _halves(config)
    return half.empty_kv_cache


def create_worker_connector(
    config: EngineConfig, model_config: ModelConfig, runner: ModelRunner
) -> KVConnectorWorker:
    """Make a rank's half.

    Args:
        runner: has its caches.

    Raises:
        ValueError: see `create_scheduler_connector`.
    """
    group = get_tp_group()
    kv_caches = runner.forward.kv_caches  # by the layer's number in the model
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
    _, half = _halves(config)
    connector = half(config, layout, kv_caches)
    connector.model = runner.forward.model
    connector.backend = runner.forward.backend
    connector.token_budget = runner.settings.token_budget
    return connector


def handshake_metadata(worker: Worker) -> object:
    """Return how the ranks of other engines reach this rank, as plain data; see
    `KVConnectorWorker.get_handshake_metadata`."""
    return connector_of(worker.runner).get_handshake_metadata()


def connector_of(runner: ModelRunner) -> KVConnectorWorker:
    """Return the rank's half of the connector, of a runner with KV transfer."""
    [transfer] = [each for each in runner.features if isinstance(each, running.KVTransferRunner)]
    return transfer.connector


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
    if config.device == "sleep":
        weights = "none"
    elif config.load_format == "dummy":
        weights = f"dummy, seed {config.seed}"
    else:
        weights = weights_digest(folder)
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
