"""Films of a trace: GIF files of the JavaScript player, which headless Chromium plays beat by beat
for the camera."""

import contextlib
import hashlib
import io
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from nanovllm.lab.viz.player import WEB, Source, bundle
from nanovllm.trace.trace import Trace

DEFAULT_STEPS = 60  # what can be followed in a quarter of a minute
# What `animate` can show: the player's views, from top to bottom.
VIEWS = {
    "tables": ["tables"],
    "pool": ["pool"],
    "scheduler": ["queues", "budget", "pool"],
    "timeline": ["timeline", "budget", "usage"],
    "attention": ["attention"],
    "batch": ["batch"],
}
Progress = Callable[[Sequence[Any]], Iterable[Any]]
_UNCHANGED = 255  # the last of the 256 palette entries stands for "as in the frame before"
_GIF_WIDTH = 900  # pixels
_TALLEST = 1600  # CSS pixels; the player does not draw views that are outside of the window


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser.

    Raises:
        ModuleNotFoundError: playwright is not installed.
        RuntimeError: there is no Chromium.
    """
    from playwright.sync_api import Error, sync_playwright

    options: dict[str, Any] = {
        "args": ["--disable-dev-shm-usage"],
        "executable_path": shutil.which("chromium"),
    }
    if os.geteuid() == 0:
        options["args"].append("--no-sandbox")  # Chromium has no sandbox for root
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(**options)
        except Error as error:
            raise RuntimeError(
                "Chromium could not be started: `playwright install chromium` installs it"
            ) from error
        yield browser


@dataclass(frozen=True)
class Beat:
    """A picture of a film.

    Attributes:
        step: number of the step that is shown.
        words: the caption; without it, the player lists what the scheduler changed in this step.
        focus: a request id or the number of a block, which the player sets off from the others.
        seconds: how long the picture stands.
    """

    step: int
    words: str = ""
    focus: str | int | None = None
    seconds: float = 0.4


@dataclass
class Film:
    """Everything that a film is made of.

    Attributes:
        views: names of the player's views, from top to bottom.
        settings: more for the views: `words`, request id to the texts of its tokens, is written
            into block tables.
        width: of the player's page, in CSS pixels; the narrower, the larger are the texts in the
            GIF.
    """

    trace: Trace
    title: str
    views: Sequence[str]
    beats: Sequence[Beat]
    settings: Mapping[str, Any] = field(default_factory=dict)
    width: int = 600

    def digest(self) -> str:
        """A hash of the steps and the script, which `shoot` writes into the file as a comment: a
        test compares it with that of the committed file."""
        script = [
            self.title,
            list(self.views),
            [asdict(beat) for beat in self.beats],
            dict(self.settings),
            self.width,
        ]
        return hashlib.sha256(
            b"".join([*list(self.trace.lines())[1:], json.dumps(script).encode()])
        ).hexdigest()

    def shoot(self, progress: Progress = iter) -> bytes:
        """Play the film in headless Chromium.

        Args:
            progress: iterates over the beats, and may tell how far it is.

        Returns:
            The bytes of a GIF file of 900 pixels width, as high as the views need.

        Raises:
            ModuleNotFoundError: playwright is not installed.
            RuntimeError: there is no Chromium.
        """
        # Playwright's blocking interface refuses to run in a thread that has an event loop, as a
        # notebook's has.
        with ThreadPoolExecutor(1) as thread:
            pictures = thread.submit(self._pictures, progress).result()
        return gif_bytes(pictures, [beat.seconds for beat in self.beats], self.digest())

    def _pictures(self, progress: Progress) -> list[Image.Image]:
        window: Any = {"width": self.width, "height": _TALLEST}
        with chromium() as browser:
            return self.play(
                browser.new_page(viewport=window, device_scale_factor=_GIF_WIDTH / self.width),
                progress,
            )

    def play(self, page: Any, progress: Progress = iter) -> list[Image.Image]:
        """Screenshots of all beats, taken in a page of a browser."""
        errors: list[Any] = []
        page.on("pageerror", lambda error: errors.append(error))
        sheets = pathlib.Path(__file__).with_name("film.css"), WEB / "player.css"
        style = "".join(sheet.read_text(encoding="utf-8") for sheet in sheets)
        page.set_content(
            f'<!doctype html><meta charset="utf-8"><style>{style}</style><body></body>'
        )
        page.add_script_tag(
            type="module", content=f"{bundle('film.js')}\nwindow.openFilm = openFilm;"
        )
        page.wait_for_function("window.openFilm !== undefined")
        film: dict[str, Any] = {"text": b"".join(self.trace.lines()).decode(), "title": self.title}
        film |= {"views": list(self.views), "settings": dict(self.settings)}
        page.evaluate("film => { window.film = openFilm(film); }", film)
        index = {record.step: number for number, record in enumerate(self.trace)}
        beats = [
            {"index": index[beat.step], "words": beat.words, "focus": beat.focus}
            for beat in self.beats
        ]
        page.evaluate("indices => film.fit(indices)", [beat["index"] for beat in beats])
        page.evaluate("beat => film.show(beat)", beats[0])
        height = page.evaluate("document.body.getBoundingClientRect().height")
        clip = {"x": 0, "y": 0, "width": self.width, "height": height}
        pictures = []
        for beat in progress(beats):
            page.evaluate("beat => film.show(beat)", beat)
            pictures.append(Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB"))
        if errors:
            raise RuntimeError(f"the player failed: {errors[0]}")
        return pictures


def gif_bytes(pictures: Sequence[Image.Image], seconds: Sequence[float], comment: str) -> bytes:
    """An endless animation. All frames share the 255 colours that most of their pixels have, and
    nothing is dithered: flat areas keep their colour, and what stays the same from frame to frame
    takes no space."""
    frames = [
        np.asarray(picture.convert("RGBA")).view("<i4")[..., 0] & 0xFFFFFF for picture in pictures
    ]
    colors, counts = np.unique(np.stack(frames), return_counts=True)
    palette = _channels(colors[np.argsort(-counts, kind="stable")[:_UNCHANGED]])
    nearest = np.array(
        [((palette - color) ** 2).sum(axis=1).argmin() for color in _channels(colors)], np.uint8
    )
    images = []
    for number, frame in enumerate(frames):
        pixels = nearest[np.searchsorted(colors, frame)]
        if number:
            pixels[frame == frames[number - 1]] = _UNCHANGED
        images.append(Image.fromarray(pixels))
        images[-1].putpalette(palette.astype(np.uint8).tobytes())
    first, *others = images
    # Each frame is drawn over the one before.
    look: dict[str, Any] = {"transparency": _UNCHANGED, "disposal": 1}
    look |= {"duration": [round(1000 * each) for each in seconds], "loop": 0, "comment": comment}
    first.save(buffer := io.BytesIO(), "GIF", save_all=True, append_images=others, **look)
    return buffer.getvalue()


def _channels(colors: np.ndarray) -> np.ndarray:
    """0xBBGGRR `[n]` -> red, green and blue `[n, 3]`."""
    return np.stack([colors >> shift & 255 for shift in (0, 8, 16)], axis=-1)


def animate(
    trace: Source,
    view: str = "tables",
    steps: Iterable[int] | None = None,
    progress: Progress = iter,
) -> bytes:
    """An animation of a trace: the bytes of a GIF file with a picture per step.

    Args:
        trace: a trace, or the path of one.
        view: what to show, one of `VIEWS`.
        steps: numbers of the steps to show; those that the trace does not have are left out. By
            default the first 60.
        progress: iterates over the pictures, and may tell how far it is.

    Raises:
        ValueError: no such view, or none of the steps is in the trace.
        TraceError: the file is not a trace.
        ModuleNotFoundError: playwright is not installed.
        RuntimeError: there is no Chromium.
    """
    if view not in VIEWS:
        raise ValueError(f"no such view: {view!r} (there are {', '.join(VIEWS)})")
    trace = trace if isinstance(trace, Trace) else Trace.load(trace)
    present = list(dict.fromkeys(record.step for record in trace))
    wanted = set(present[:DEFAULT_STEPS] if steps is None else steps)
    chosen = [step for step in present if step in wanted]
    if not chosen:
        reason = f"it has steps {present[0]} to {present[-1]}" if present else "it is empty"
        raise ValueError(f"none of these steps is in the trace: {reason}")
    seconds = min(1.5, max(0.25, 15 / len(chosen)))
    beats = [Beat(step, seconds=seconds) for step in chosen]
    return Film(trace, f"{view.capitalize()}, step by step", VIEWS[view], beats).shoot(progress)
