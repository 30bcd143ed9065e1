"""Controls over a simulation: when the reader changes a setting, the player shows the new trace."""

from __future__ import annotations

import dataclasses
import html
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ipywidgets as widgets

from nanovllm.assembly.flags import choices_of
from nanovllm.data.config import EngineConfig
from nanovllm.data.resolved_config import DEFAULT_TOKEN_BUDGET
from nanovllm.lab.viz.metrics import percentile, request_metrics
from nanovllm.lab.viz.player import play
from nanovllm.lab.viz.simulate import SimulatedRequest, simulate
from nanovllm.trace.trace import Trace

Requests = Sequence[SimulatedRequest] | Callable[..., Sequence[SimulatedRequest]]
Controls = Mapping[str, Iterable[Any] | None]

CONTROLS = (
    "block_size",
    "num_kv_blocks",
    "max_num_batched_tokens",
    "batching_policy",
    "arrival_rate",
)
_NAMES = {
    "block_size": "block size",
    "num_kv_blocks": "blocks in the pool",
    "kv_tokens": "tokens in the pool",
    "max_num_batched_tokens": "token budget",
    "max_num_seqs": "requests at a time",
    "batching_policy": "policy",
    "arrival_rate": "arrival rate ×",
    "preemption_mode": "preemption",
}
_ARRIVAL_RATES = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 8)
_POWERS = ("block_size", "max_num_batched_tokens")  # controls that double rather than count
_OPTIONS = {field.name for field in dataclasses.fields(EngineConfig)} | set(
    inspect.signature(simulate).parameters
)
_OPTIONS |= {"kv_tokens", "arrival_rate"}


def what_if(
    requests: Requests,
    *,
    views: Iterable[str] = ("tables", "timeline"),
    controls: Iterable[str] | Controls = CONTROLS,
    **options: Any,
) -> WhatIf:
    """Controls over `simulate`: the value of a notebook's cell. Every change runs the real
    scheduler again.

    Args:
        requests: the requests; or a function that makes them, called with the controls that are its
            parameters.
        views: as for `play`.
        controls: options of `simulate` that the reader can change; "arrival_rate", which divides
            the requests' arrival steps; "kv_tokens", the pool's size in tokens, so that
            `block_size` divides the same memory otherwise. A mapping gives the values of each
            (None: the usual ones, around where it begins). A function's parameters can be controls
            too.
        options: further options of `simulate`, and where the controls begin.

    Raises:
        ValueError: a control that is no option of `simulate` and no parameter of `requests`, or
            first settings that cannot run.
    """
    return WhatIf(
        requests,
        views,
        controls if isinstance(controls, Mapping) else dict.fromkeys(controls),
        options,
    )


class WhatIf(widgets.VBox):
    """Controls, the player, and a table of metrics.

    Attributes:
        controls: a widget for each name; setting its `value` runs the simulation again.
        player: shows the newest trace, as `player.trace`.
        figures: numbers of the newest trace by name, as in the table.
        error: why the newest settings could not be run; "" if they could.
    """

    def __init__(
        self, requests: Requests, views: Iterable[str], controls: Controls, options: dict[str, Any]
    ) -> None:
        self._requests = requests
        self._options = options
        self._parameters = inspect.signature(requests).parameters if callable(requests) else {}
        if deaf := [name for name in controls if name not in _OPTIONS | self._parameters.keys()]:
            raise ValueError(f"neither simulate nor the requests have the option {', '.join(deaf)}")
        self.controls = {
            name: _control(name, self._begin(name), values) for name, values in controls.items()
        }
        self.error = ""
        trace = self._run()
        self.player = play(trace, views)
        self.figures = self._first = figures(trace)
        timed = options.get("token_cost") or options.get("step_cost", 1) != 1
        self._unit = "units" if timed else "steps"
        self._table = widgets.HTML(_table(self.figures, self.figures, self._unit))
        self._message = widgets.HTML()
        for control in self.controls.values():
            control.observe(self._turned, "value")
        knobs = widgets.HBox(
            list(self.controls.values()), layout=widgets.Layout(flex_flow="row wrap")
        )
        super().__init__([knobs, self._message, self._table, self.player])

    def _begin(self, name: str) -> Any:
        """The value that a control has at first."""
        defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
        defaults |= {
            "arrival_rate": 1,
            "max_num_batched_tokens": DEFAULT_TOKEN_BUDGET,
            "kv_tokens": 1024,
        }
        for signature in (self._parameters, inspect.signature(simulate).parameters):
            defaults |= {
                n: p.default
                for n, p in signature.items()
                if p.default is not inspect.Parameter.empty
            }
        return self._options.get(name, defaults.get(name))

    @property
    def values(self) -> dict[str, Any]:
        """The settings of the controls."""
        return {name: control.value for name, control in self.controls.items()}

    def _run(self) -> Trace:
        said = self._options | self.values
        given = {name: value for name, value in said.items() if name in self._parameters}
        requests = self._requests(**given) if callable(self._requests) else self._requests
        options = {
            name: value for name, value in said.items() if name in _OPTIONS or name not in given
        }
        rate = options.pop("arrival_rate", 1)
        kv_tokens = options.pop("kv_tokens", None)
        if kv_tokens is not None:
            options["num_kv_blocks"] = kv_tokens // options.get(
                "block_size", EngineConfig.block_size
            )
        if "arrival_rate" not in given:
            requests = [
                dataclasses.replace(r, arrival_step=round(r.arrival_step / rate)) for r in requests
            ]
        return simulate(requests, **options)

    def _turned(self, change: object) -> None:
        try:
            trace = self._run()
        except (ValueError, RuntimeError) as error:
            # Raised by `simulate` for settings that cannot work.
            self.error = str(error)
        else:
            self.error = ""
            self.player.show(trace)
            self.figures = figures(trace)
            self._table.value = _table(self.figures, self._first, self._unit)
        words = f"{self.error.rstrip('.')}. The picture shows the last setting that worked."
        self._message.value = (
            f'<span role="alert">⚠ {html.escape(words)}</span>' if self.error else ""
        )

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        return super()._repr_mimebundle_(**options) | self.player.saved()

    def __repr__(self) -> str:
        return (
            f"What if: {len(self.controls)} controls and a player; run this cell in JupyterLab to "
            "turn them"
        )


def _control(name: str, begin: Any, values: Iterable[Any] | None) -> widgets.ValueWidget:
    """A slider or a list for the values and `begin`."""
    look = {
        "description": _NAMES.get(name, name.replace("_", " ")),
        "style": {"description_width": "130px"},
        "layout": {"width": "380px"},
    }
    values = list(values) if values is not None else _usual(name, begin)
    if isinstance(begin, bool):
        return widgets.Checkbox(begin, indent=False, **look)
    if any(isinstance(value, str) for value in values):
        return widgets.Dropdown(options=values, value=begin, **look)
    if not values and not isinstance(begin, int):
        raise ValueError(f"{name} needs its values: controls={{{name!r}: [...]}}")
    if not values:
        step = max(1, begin // 32)
        return widgets.IntSlider(begin, max(1, begin // 4 // step * step), 2 * begin, step, **look)
    options = sorted({begin, *values} - {None})
    return widgets.SelectionSlider(
        options=options, value=begin if begin is not None else options[0], **look
    )


def _usual(name: str, begin: Any) -> list[Any]:
    """The values to choose from by default; none for settings that get a slider."""
    if name == "arrival_rate":
        return list(_ARRIVAL_RATES)
    if name in _POWERS:
        powers = [2**i for i in range(15)]
        return [power for power in powers if begin / 16 <= power <= begin * 8]
    return list(choices_of(EngineConfig).get(name, ()))


def figures(trace: Trace) -> dict[str, float | None]:
    """Return the metrics in the table under the controls: latencies in units of the trace's time;
    None if there is none.

    Returns:
        `TTFT p50`, `TTFT p99`, `worst gap` (between two tokens of one request), `end` (of the last
        step), `preemptions`, and `KV peak` (blocks held at a time, in percent of the pool).
    """
    metrics = request_metrics(trace, "time").values()
    ttft = [each["ttft"] for each in metrics if each["ttft"] is not None]
    gaps = [gap for each in metrics for gap in each["itl"]]
    return {
        "TTFT p50": percentile(ttft, 50) if ttft else None,
        "TTFT p99": percentile(ttft, 99) if ttft else None,
        "worst gap": max(gaps, default=None),
        "end": max(record.start + record.duration for record in trace),
        "preemptions": sum(len(record.preempted) for record in trace),
        "KV peak": max(100 * (1 - record.num_free_blocks / record.num_blocks) for record in trace),
    }


def _table(now: Mapping[str, float | None], first: Mapping[str, float | None], unit: str) -> str:
    """The figures and how they differ from the first setting's, as HTML: a column each."""
    units = {"preemptions": "", "KV peak": " (%)"}
    columns = [["", "now", "change"]]
    for name, value in now.items():
        begin = first[name]
        change = "" if value is None or begin is None else f"{round(value - begin, 6):+z.4g}"
        number = "none" if value is None else f"{value:.4g}"
        columns.append([f"{name}{units.get(name, f' ({unit})')}", f"<b>{number}</b>", change])
    cell = '<td style="padding-right: 1.2em">{}</td>'.format
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in zip(*columns, strict=True))
    return f'<table style="line-height: 1.5; font-variant-numeric: tabular-nums">{body}</table>'
