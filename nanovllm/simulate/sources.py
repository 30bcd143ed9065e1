"""Where the numbers of simulations come from, as plain data: all machines and models that are known
by name, and what one simulation has used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from nanovllm.simulate.machines import Efficiency, Machine, known_machines, machine_of
from nanovllm.simulate.measured import MeasuredCost
from nanovllm.simulate.models import ModelShape, find_model, model_names
from nanovllm.simulate.report import Summary
from nanovllm.simulate.roofline import Roofline

# Share of the time. On an idle machine, threads wait for processors in less than a hundredth of it.
MOST_WAITED = 0.05


class Selection(NamedTuple):
    """Machines and models, by name."""

    machines: Mapping[str, Machine]
    models: Mapping[str, ModelShape]

    @property
    def corrections(self) -> dict[str, Efficiency]:
        """The corrections that the machines name as `efficiency`."""
        return {each.efficiency: each.reach for each in self.machines.values()}


def select(machine: str | None = None, model: str | None = None) -> Selection:
    """Return the machine and the model of these names or files; without any, all that are known by
    name.

    Raises:
        UsageError: an unknown name, with the list of names; or a file that describes none.
    """
    if machine is None and model is None:
        return Selection(known_machines(), {name: find_model(name) for name in model_names()})
    machines = [] if machine is None else [machine_of(machine)]
    models = [] if model is None else [find_model(model)]
    return Selection({each.name: each for each in machines}, {each.name: each for each in models})


def catalog(selection: Selection) -> Summary:
    """Return the data of machines, their corrections, and models. Machines and corrections have the
    fields and units of machines.toml."""
    return {
        "machines": msgspec.to_builtins(selection.machines),
        "corrections": msgspec.to_builtins(selection.corrections),
        "models": {name: _described(model) for name, model in selection.models.items()},
    }


def _described(model: ModelShape) -> Summary:
    """Return what decides about a model's cost."""
    moe = model.config.moe
    return {
        "source": model.source,
        "architecture": model.config.architecture,
        "num_parameters": model.num_parameters,
        "bytes_per_weight": model.bytes_per_weight,
        "kv_bytes_per_token": model.kv_bytes_per_token(),
        "num_layers": model.config.num_layers,
        "num_experts": moe.num_experts if moe else 0,
        "num_experts_per_tok": moe.top_k if moe else 0,
        "max_model_len": model.config.max_position_embeddings,
    }


def warnings_of(cost: object) -> list[str]:
    """Tell whether other programs have disturbed the measurement of a cost."""
    return (
        [
            f"other programs disturbed the measurement of {cost.model} on {cost.machine}: its "
            f"threads waited for a processor in {cost.waited:.0%} of the time. Repeat --calibrate "
            "on an idle machine"
        ]
        if isinstance(cost, MeasuredCost) and cost.waited > MOST_WAITED
        else []
    )


def sources_of(costs: Sequence[tuple[str, Roofline | MeasuredCost]]) -> Summary:
    """Return where the step times of a simulation come from: machines and corrections by name, and
    the model; and each file of a calibration, with what it measured, and how well it predicts.

    Args:
        costs: of each kind of engine, with the name or the file of its machine.
    """
    computed = [cost for _, cost in costs if isinstance(cost, Roofline)]
    machines = [cost.machine for cost in computed]
    found: Summary = {
        "machines": {each.name: each.source for each in machines},
        "corrections": {each.efficiency: each.reach.source for each in machines},
        "model": computed[0].model.source if computed else "",
        "calibrations": {
            name: {
                "measured": f"steps of {cost.model} on {cost.machine}",
                "error": cost.error,
                "low": cost.low,
                "high": cost.high,
            }
            for name, cost in costs
            if isinstance(cost, MeasuredCost)
        },
    }
    return {name: value for name, value in found.items() if value}
