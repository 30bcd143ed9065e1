"""Environments of the processes of several engines: each gets its cores and GPUs."""

from __future__ import annotations

import os

from nanovllm.data.config import EngineConfig


def rank_environments(config: EngineConfig) -> list[dict[str, str]]:
    """For each engine, the variables of its process: its share of the cores, and its GPUs.

    Raises:
        ValueError: there are not enough GPUs.
    """
    import torch

    size = config.data_parallel_size
    ranks = config.world_size
    threads = max(1, torch.get_num_threads() // size)
    environments = [{"OMP_NUM_THREADS": str(threads)} for _ in range(size)]
    if not config.may_use_gpu or not torch.cuda.is_available():
        return environments
    count = torch.cuda.device_count()
    if count < size * ranks:
        raise ValueError(
            f"data_parallel_size {size} x {ranks} ranks per engine need {size * ranks} GPUs, but "
            f"this machine has {count}: use data_parallel_size {max(1, count // ranks)}, or "
            "device cpu"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    devices = visible.split(",")
    for rank, environment in enumerate(environments):
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices[rank * ranks : (rank + 1) * ranks])
    return environments
