"""Checks, before anything loads, whether a model and this machine can take the grid of ranks that
the settings ask for."""

import os

from nanovllm.data.config import EngineConfig
from nanovllm.executor.base import choose_backend
from nanovllm.models.config import ModelConfig


def check_tensor_parallel(config: ModelConfig, tp: int) -> None:
    """Check that the layers of a model can be divided among `tp` ranks, before anything is loaded.

    Raises:
        ValueError: they cannot; the message says why, and which numbers of ranks fit.
    """
    if misfits := _misfits(config, tp):
        *others, last = (str(n) for n in range(1, config.num_heads + 1) if not _misfits(config, n))
        fit = f"{', '.join(others)} or {last}" if others else f"only {last}"
        raise ValueError(
            f"{', '.join(misfits)} cannot be divided among {tp} ranks; tensor_parallel_size may be "
            f"{fit}"
        )


def _misfits(config: ModelConfig, tp: int) -> list[str]:
    """The sizes of a model that cannot be divided among `tp` ranks, in words."""
    moe = config.moe
    counts = {"attention heads": config.num_heads}
    if moe is None or not all(moe.sparse_layers):
        counts["MLP channels (intermediate_size)"] = config.intermediate_size
    if moe is not None and not moe.enable_expert_parallel:  # with it, experts stay whole
        counts["channels of an expert (moe_intermediate_size)"] = moe.intermediate_size
    misfits = [f"{count} {what}" for what, count in counts.items() if count % tp]
    if config.num_kv_heads % tp and tp % config.num_kv_heads:
        misfits.append(f"{config.num_kv_heads} KV heads")
    return misfits


def check_grid(config: EngineConfig, model_config: ModelConfig) -> None:
    """Check, before anything loads, that the experts can be divided as the settings say, and that
    there are enough processes and devices.

    Raises:
        ValueError: the message names what would fit.
    """
    tensor = config.tensor_parallel_size
    pipeline = config.pipeline_parallel_size
    data = config.data_parallel_size
    if (moe := model_config.moe) is not None and moe.enable_expert_parallel:
        from nanovllm.distributed.expert_slots import slots_per_rank

        slots_per_rank(moe.num_routed, tensor * data, moe.num_redundant_experts)
    backend = choose_backend(config)
    here = config.world_size
    asked = f"tensor_parallel_size {tensor} x pipeline_parallel_size {pipeline} is {here} ranks"
    if backend == "external_launcher":
        if data > 1:
            raise ValueError(
                "data_parallel_size above 1 does not work under torchrun: start the engine "
                "without torchrun"
            )
        processes = int(os.environ.get("WORLD_SIZE", here))
        if processes != here:
            raise ValueError(
                f"{asked}, but torchrun has started WORLD_SIZE = {processes} processes: start "
                f"{here}, or change the sizes"
            )
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if backend == "ray" or not config.may_use_gpu:  # Ray knows where its GPUs are
        return
    import torch

    devices = torch.cuda.device_count()
    if torch.cuda.is_available() and here > devices:
        raise ValueError(
            f"{asked}, {here} of them here, but this machine has {devices} GPUs: lower the sizes, "
            "or use several machines or device cpu"
        )
