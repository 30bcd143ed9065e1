"""The simulated devices of `device="sleep"`: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from nanovllm.data.checks import Amount, Keywords

if TYPE_CHECKING:
    from nanovllm.data.config import EngineConfig

Factor = Annotated[float, Meta(gt=0, le=1e9)]
# KV connectors whose transfers a link's time can be added to.
CONNECTORS = ("local", None, "none")


@dataclass(frozen=True)
class SleepConfig(Keywords):
    """Settings of devices that sleep for as long as a step is predicted to take.

    Attributes:
        machine: the GPU of each rank, and the links between them: a name, or the path of a file, as
            for `nanovllm simulate --machine`.
        model: the model whose steps are predicted, by its name in `nanovllm.simulate.models` or the
            folder of its config.json; None: the engine's model, whose tokenizer is used anyway.
        scale: seconds that pass per predicted second.
        expert_imbalance: tokens of the busiest rank's experts, relative to the mean.
        stragglers: by rank, as text, the factor on its computing time; 1 for all others.
        kv_latency_us, kv_gb_per_s: microseconds and gigabytes per second of a rank's link to
            engines with which it shares KV; by default what transfers reach of the machine's link
            to other nodes.
        timelines: folder in which each rank writes its timeline, see `executor.virtual_clock`.

    Raises:
        ValueError: an invalid value; the message names the fix.
    """

    machine: str = "H100"
    model: str | None = None
    scale: Factor = 1.0
    expert_imbalance: Annotated[float, Meta(ge=1, le=1e9)] = 1.0
    stragglers: dict[str, Factor] = field(default_factory=dict)
    kv_latency_us: Amount | None = None
    kv_gb_per_s: Factor | None = None
    timelines: str | None = None

    @classmethod
    def of(cls, config: EngineConfig) -> SleepConfig:
        """Return the sleep settings of an engine with `device="sleep"`.

        Raises:
            ValueError: `sleep_config` is not JSON, or has an invalid value; or another setting
                needs a device that computes.
        """
        connector = config.kv_transfer.kv_connector if config.kv_transfer is not None else None
        needs = {
            "speculative_config": config.speculative_config,
            "enable_eplb": config.enable_eplb,
            "quantization": config.quantization != "auto" or config.quantize_head,
            "preemption_mode 'swap'": config.preemption_mode == "swap",
            f"kv_connector {connector!r}": connector not in CONNECTORS,
        }
        if refused := [name for name, is_set in needs.items() if is_set]:
            raise ValueError(f"device 'sleep' cannot be combined with {refused[0]}: do not set it")
        try:
            found = cls(**msgspec.json.decode(config.sleep_config or "{}"))
        except (TypeError, msgspec.DecodeError) as error:
            raise ValueError(
                f'sleep_config must be JSON such as {{"machine": "H100", "scale": 10}}: {error}'
            ) from error
        num_ranks = config.world_size * config.data_parallel_size
        if unknown := found.stragglers.keys() - {str(rank) for rank in range(num_ranks)}:
            raise ValueError(
                f"sleep_config: stragglers has rank {min(unknown)!r}, and the ranks are 0 to "
                f"{num_ranks - 1}"
            )
        return found
