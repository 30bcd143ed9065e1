"""The costs of the ranks of an engine whose devices sleep: a `Roofline` for the layers of each
stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nanovllm.data.config import EngineConfig
from nanovllm.data.errors import UsageError
from nanovllm.data.sleep_config import SleepConfig
from nanovllm.distributed.cost_model import Link
from nanovllm.executor.rank_cost import RankTimes
from nanovllm.simulate.cost import StepWork
from nanovllm.simulate.machines import Machine, machine_of
from nanovllm.simulate.models import ACTIVATION_BYTES, Layout, ModelShape, find_model
from nanovllm.simulate.roofline import Roofline, kv_blocks
from nanovllm.simulate.workload import SECOND

if TYPE_CHECKING:
    from nanovllm.models.config import ModelConfig


@dataclass(frozen=True)
class StageCost:
    """A `RankCost`: every rank of a stage has the same.

    Attributes:
        engine: the model and the layout of the engine.
        stage: the same for the layers of this stage alone.
        is_last: the stage samples.
        kv_link: from other engines.
        block_size: tokens per KV block.
    """

    engine: Roofline
    stage: Roofline
    is_last: bool
    kv_link: Link
    block_size: int

    @property
    def bytes_per_block(self) -> int:
        """Device memory per KV block."""
        tp = self.stage.layout.tensor_parallel_size
        return round(self.stage.model.kv_bytes_per_token(tp) * self.block_size)

    def step(self, shares: Sequence[tuple[int, int]], num_samples: int) -> RankTimes:
        """See `RankCost`."""
        contexts = [start + 1 for start, count in shares if count == 1]
        work = StepWork(
            num_decodes=len(contexts),
            decode_context=sum(contexts),
            prefills=[share for share in shares if share[1] > 1],
            num_samples=num_samples if self.is_last else 0,
        )
        parts = [part for part in self.stage.parts(work) if part.seconds]
        times = dict.fromkeys((part.name for part in parts), 0)
        for part in parts:
            times[part.name] += round(part.seconds * SECOND)
        if not self.is_last:
            times["launches"] -= round(self.stage.head_launches * SECOND)
        links = {part.name for part in parts if part.bound == "link"}
        communicate = sum(time for name, time in times.items() if name in links)
        return RankTimes(
            compute=sum(times.values()) - communicate,
            communicate=communicate,
            send=self._send(sum(count for _, count in shares)),
            parts=times,
        )

    def _send(self, num_tokens: int) -> int:
        layout = self.engine.layout
        link = self.engine.machine.pair_link(layout.devices)
        hidden = num_tokens * self.engine.model.config.hidden_size * ACTIVATION_BYTES
        return round(link.message(hidden / layout.tensor_parallel_size) * SECOND)

    def transfer(self, num_bytes: int) -> int:
        """See `RankCost`."""
        return round(self.kv_link.message(num_bytes) * SECOND)

    def num_blocks(self, config: EngineConfig) -> int:
        """See `RankCost`."""
        engine = self.engine
        return kv_blocks(engine.model, engine.machine, engine.layout, config)


def create_rank_cost(
    config: EngineConfig, sleep: SleepConfig, folder: str, layers: range
) -> StageCost:
    """Return the cost of a rank.

    Args:
        folder: of the engine's model.
        layers: of the rank's stage.

    Raises:
        UsageError: an unknown machine or model.
    """
    with _named_by_sleep_config():
        machine = machine_of(sleep.machine)
        model = find_model(sleep.model or folder, kv_cache_dtype=config.kv_cache_dtype)
    layout = Layout(
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
        data_parallel_size=config.data_parallel_size if config.in_lock_step else 1,
        enable_expert_parallel=config.enable_expert_parallel,
        expert_imbalance=sleep.expert_imbalance,
    )
    return StageCost(
        engine=Roofline(model, machine, layout),
        stage=Roofline(
            _stage_of(model, layers), machine, replace(layout, pipeline_parallel_size=1)
        ),
        is_last=layers.stop == model.config.num_layers,
        kv_link=_kv_link(machine, sleep),
        block_size=config.block_size,
    )


def find_model_config(name: str) -> ModelConfig:
    """Return the shape of the model that a `sleep_config` names.

    Raises:
        UsageError: an unknown name; the message has the list.
    """
    with _named_by_sleep_config():
        return find_model(name).config


@contextmanager
def _named_by_sleep_config() -> Iterator[None]:
    """Let errors name the field instead of the flag of `nanovllm simulate`."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"sleep_config: {str(error).removeprefix('--')}") from None


def _stage_of(model: ModelShape, layers: range) -> ModelShape:
    """Return a model with only these layers."""
    config = replace(model.config, num_layers=len(layers))
    if config.moe is not None:
        sparse = config.moe.sparse_layers[layers.start : layers.stop]
        config = replace(config, moe=replace(config.moe, sparse_layers=sparse))
    return replace(model, config=config)


def _kv_link(machine: Machine, sleep: SleepConfig) -> Link:
    found = machine.network_link
    latency = found.latency if sleep.kv_latency_us is None else sleep.kv_latency_us / 1e6
    bandwidth = found.bandwidth if sleep.kv_gb_per_s is None else sleep.kv_gb_per_s * 1e9
    return Link("from other engines", latency, bandwidth)
