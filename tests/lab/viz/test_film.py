"""Films of a trace: the committed files, and what Chromium shows, beat by beat."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import io
import itertools
import pathlib
import shutil
from typing import Any

import films
import pytest
from matplotlib.text import Text
from PIL import Image, ImageChops

from nanovllm.data.trace_settings import TraceSettings
from nanovllm.lab.viz import SimulatedRequest, animate, simulate
from nanovllm.lab.viz.figures import FILMS
from nanovllm.lab.viz.film import VIEWS, Beat, Film, gif_bytes
from nanovllm.trace.trace import Trace
from tests.compiled import needs_compiled

pytest_plugins = ["tests.browser"]
FOLDER = pathlib.Path(__file__).parents[3] / "figures"


def crowded_trace(mode: str = "recompute") -> Trace:
    """More requests than the pool has room for: they wait, share a prefix, and are preempted."""
    requests = [
        SimulatedRequest(i, [1, 2, 3, 4, 5 + i, 6], 13, request_id=f"r{i}") for i in range(5)
    ]
    return simulate(
        requests, num_kv_blocks=9, block_size=4, preemption_mode=mode, check_invariants=True
    )


def frames(data: bytes) -> list[tuple[Image.Image, int]]:
    """Pictures of a GIF file, each with its milliseconds."""
    image = Image.open(io.BytesIO(data))
    found = []
    for number in range(image.n_frames):  # type: ignore[attr-defined]
        image.seek(number)
        found.append((image.convert("RGB"), image.info["duration"]))
    return found


def changed(one: Image.Image, other: Image.Image) -> float:
    """The share of pixels that differ visibly."""
    difference = (
        ImageChops.difference(one, other).convert("L").point(lambda value: 255 * (value > 40))
    )
    return difference.histogram()[255] / (one.width * one.height)


# ---------------------------------------------------------------- the committed files


def test_every_animation_in_the_folder_can_be_redrawn() -> None:
    assert {path.name for path in FOLDER.glob("*.gif")} == FILMS.keys() | films.FILMS.keys()


# Two of them show shared memory, for which functions are compiled.
DRAWN = [
    pytest.param(name, marks=[needs_compiled] * (name in ("shared_memory.gif", "fetch.gif")))
    for name in films.FILMS
]


@functools.cache
def drawn(name: str) -> films.Reel:
    """A film of part 2: what it shows happens now, on real ranks."""
    return films.FILMS[name]()


@pytest.mark.parametrize("name", [*FILMS, *DRAWN])
def test_a_committed_animation_is_the_film_of_its_story(name: str) -> None:
    film: Film | films.Reel = FILMS[name]() if name in FILMS else drawn(name)
    data = (FOLDER / name).read_bytes()
    image = Image.open(io.BytesIO(data))
    assert image.info["comment"].decode() == film.digest(), "run make figures"
    assert len(data) < 500_000 and image.width == 900 and image.info["loop"] == 0
    shown = frames(data)
    assert sum(time for _, time in shown) == pytest.approx(
        1000 * sum(beat.seconds for beat in film.beats)
    )
    assert all(changed(one, other) > 0 for (one, _), (other, _) in itertools.pairwise(shown))


def test_a_film_that_is_shot_again_is_the_committed_one() -> None:
    """Chromium and its fonts differ from machine to machine: a few pixels may, too."""
    again, committed = (
        frames(FILMS["prefix_cache.gif"]().shoot()),
        frames((FOLDER / "prefix_cache.gif").read_bytes()),
    )
    assert [time for _, time in again] == [time for _, time in committed]
    for (one, _), (other, _) in zip(again, committed, strict=True):
        assert abs(one.height - other.height) < 40 and changed(one, other.resize(one.size)) < 0.15


# ---------------------------------------------------------------- what is on the page


def test_beats_show_their_step_their_words_and_their_focus(page: Any) -> None:
    film = FILMS["block_tables.gif"]()
    pictures = film.play(page)
    assert len(pictures) == len(film.beats) and len({picture.size for picture in pictures}) == 1
    for number in (3, 6):
        beat = film.beats[number]
        index = [record.step for record in film.trace].index(beat.step)
        arguments = {"index": index, "words": beat.words, "focus": beat.focus}
        assert page.evaluate("beat => film.show(beat)", arguments) == beat.words
        assert page.locator("h1 .step").inner_text() == f"step {beat.step}"
        assert page.locator("p").inner_text() == beat.words
    assert (
        not page.locator(".nv-controls").is_visible() and not page.locator(".nv-story").is_visible()
    )


def test_the_captions_stay_in_their_box(page: Any) -> None:
    for make in FILMS.values():
        film = make()
        page.set_viewport_size({"width": film.width, "height": 1600})
        dataclasses.replace(film, beats=film.beats[:1]).play(page)
        for words in {beat.words for beat in film.beats}:
            page.locator("p").evaluate("(box, words) => { box.textContent = words; }", words)
            fits = page.locator("p").evaluate("box => box.scrollHeight <= box.clientHeight + 1")
            assert fits, words


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", DRAWN)
def test_the_texts_of_drawn_films_stay_on_the_picture_and_in_their_box(
    name: str, every: int
) -> None:
    film = drawn(name)
    for beat in film.beats[::every]:
        figure = film.figure(beat)
        note = figure.axes[-1]
        for text in figure.findobj(Text):
            box, place = text.get_window_extent(), note.bbox if text.axes is note else figure.bbox
            inside = (
                place.x0 <= box.x0
                and box.x1 <= place.x1
                and place.y0 <= box.y0
                and box.y1 <= place.y1
            )
            assert inside or not text.get_visible() or not text.get_text(), text.get_text()


@pytest.mark.parametrize("view", VIEWS)
def test_each_view_is_drawn_and_told(view: str, page: Any) -> None:
    trace = crowded_trace("swap")
    film = Film(trace, view, VIEWS[view], [Beat(step) for step in (0, 4, 8)])
    pictures = film.play(page)
    assert changed(pictures[0], pictures[-1]) > 0.001
    assert page.locator(".nv-view").count() == len(VIEWS[view])


def test_without_words_the_player_tells_what_changed(page: Any) -> None:
    trace = crowded_trace()
    Film(trace, "", ["queues"], [Beat(0)]).play(page)
    told = [
        page.evaluate("index => film.show({ index, words: '', focus: null })", i)
        for i in range(len(trace))
    ]
    for record, words in zip(trace, told, strict=True):
        for what, ids in (
            ("Preempted", record.preempted),
            ("Admitted", record.admitted),
            ("Finished", record.finished),
        ):
            assert (f"{what}: {', '.join(ids)}." in words) == bool(ids)
    assert any("found in the prefix cache: 4." in words for words in told)
    assert any(words.startswith("This step computes: 0 prefill and ") for words in told)


# ---------------------------------------------------------------- animate


def test_an_animation_has_a_picture_per_step_also_where_an_event_loop_runs(
    page: Any, tmp_path: pathlib.Path
) -> None:
    """The browser of the fixture runs one in this thread, as a notebook does."""
    assert asyncio.get_running_loop().is_running()
    crowded_trace().save(tmp_path / "run.jsonl")
    data = animate(tmp_path / "run.jsonl", "pool", range(3, 6))
    assert data.startswith(b"GIF89a") and len(frames(data)) == 3


def test_steps_and_views_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="no such view: 'films'"):
        animate(crowded_trace(), "films")
    with pytest.raises(ValueError, match="it has steps 0 to"):
        animate(crowded_trace(), steps=[99])
    with pytest.raises(ValueError, match="it is empty"):
        animate(Trace(settings=TraceSettings(num_blocks=1, block_size=1)))


def test_without_chromium_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: str(tmp_path / name))
    with pytest.raises(RuntimeError, match="playwright install chromium"):
        animate(crowded_trace(), "pool", [0])


def test_a_gif_keeps_its_pictures() -> None:
    pictures = [Image.new("RGB", (40, 30), "#FFFFFF") for _ in range(3)]
    for number, picture in enumerate(pictures):
        picture.paste((10 * number, 114, 178), (number, 5, number + 9, 14))
    shown = frames(gif_bytes(pictures, [0.5, 1.0, 2.0], "three"))
    assert [time for _, time in shown] == [500, 1000, 2000]
    assert all(
        not ImageChops.difference(one, other).getbbox()
        for (one, _), other in zip(shown, pictures, strict=True)
    )
