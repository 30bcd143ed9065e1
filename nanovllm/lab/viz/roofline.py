"""Where runs of a benchmark lie under the roofline (Williams et al. 2009)."""

import pathlib
from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from nanovllm.lab.viz.style import MUTED, PALETTE, image_bytes, use_style


def draw_roofline(
    bytes_per_second: float,
    flops_per_second: float,
    runs: Mapping[str, Mapping[str, tuple[float, float]]],
) -> Figure:
    """The roof of a machine, and below it a point for each workload on each engine.

    Args:
        runs: by engine and workload, the FLOPs that the least work of the workload has per byte,
            and the FLOPs per second at which the engine did it.
    """
    figure, axes = plt.subplots(figsize=(7.5, 4.2))
    found = [place for places in runs.values() for place in places.values()]
    ridge = flops_per_second / bytes_per_second
    least = min(ridge, *(intensity for intensity, _ in found))
    reach = np.array(
        [least / 1.6, ridge, max(2 * ridge, *(1.6 * intensity for intensity, _ in found))]
    )
    axes.loglog(
        reach,
        np.minimum(reach * bytes_per_second, flops_per_second) / 1e9,
        color=MUTED,
        label="the machine's roof",
    )
    for color, marker, (engine, places) in zip(PALETTE, "osD^v<", runs.items(), strict=False):
        x, y = zip(*places.values(), strict=True)
        axes.plot(x, np.array(y) / 1e9, marker, color=color, markersize=7, label=engine)
    for workload in dict.fromkeys(name for places in runs.values() for name in places):
        of_it = [places[workload] for places in runs.values() if workload in places]
        lowest = min(rate for _, rate in of_it) / 1e9
        axes.annotate(
            workload,
            (of_it[0][0], lowest),
            (0, -9),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=9,
        )
    axes.set(
        xlabel="FLOPs per byte that must be read",
        ylabel="GFLOP/s",
        title="Reading is the limit on the slope, computing on the flat part",
    )
    # Room for the names.
    axes.set_ylim(0.4e-9 * min(rate for _, rate in found), 1.6e-9 * flops_per_second)
    axes.legend(loc="lower right")
    axes.grid(True)
    return figure


def write_roofline(path: pathlib.Path, *arguments: Any) -> None:
    """Draw it into a PNG file, or into an SVG file if its name says so."""
    use_style()
    path.write_bytes(
        image_bytes(draw_roofline(*arguments), "svg" if path.suffix == ".svg" else "png")
    )
