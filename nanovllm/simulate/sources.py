"""Where the numbers of simulations come from, as plain data: all machines and models that are known
by name, and what one simulation has used."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from nanovllm.simulate.machines import known_corrections, known_machines
from nanovllm.simulate.measured import MeasuredCost
from nanovllm.simulate.models import find_model, model_names
from nanovllm.simulate.report import Summary
from nanovllm.simulate.roofline import Roofline


def catalog() -> Summary:
    """Return all machines, the corrections that they name as `efficiency`, and all models. Machines
    and corrections have the fields and units of machines.toml."""
    return {
        "machines": msgspec.to_builtins(known_machines()),
        "corrections": msgspec.to_builtins(known_corrections()),
        "models": {name: _described(name) for name in model_names()},
    }


def _described(name: str) -> Summary:
    """Return what decides about a model's cost."""
    model = find_model(name)
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


def sources_of(costs: Sequence[tuple[str, Roofline | MeasuredCost]]) -> Summary:
    """Return where the step times of a simulation come from: machines and corrections by name, and
    the model; and each file of a calibration, with what it measured, and how well it predicts.

    Args:
        costs: of each kind of engine, with the name or the file of its machine.
    """
    computed = [cost for _, cost in costs if isinstance(cost, Roofline)]
    measured = {name: cost for name, cost in costs if isinstance(cost, MeasuredCost)}
    found: Summary = {}
    if computed:
        machines = [cost.machine for cost in computed]
        found["machines"] = {each.name: each.source for each in machines}
        found["corrections"] = {each.efficiency: each.reach.source for each in machines}
        found["model"] = computed[0].model.source
    if measured:
        found["calibrations"] = {
            name: {
                "measured": f"steps of {cost.model} on {cost.machine}",
                "error": cost.error,
                "low": cost.low,
                "high": cost.high,
            }
            for name, cost in measured.items()
        }
    return found
