"""Drafts over HTTP: a server that drafts gives the same texts, counts what became of its drafts,
and lets a request go without them."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from nanovllm.trace.trace import Trace
from tests.server_process import ServerProcess, wait_until
from tests.trace.drafting import SPECULATION

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
# Three bytes, so that n-grams occur again.
ANSWER: dict[str, Any] = {
    "max_tokens": 40,
    "ignore_eos": True,
    "logit_bias": dict.fromkeys(("97", "98", "99"), 100),
}
TOLD = {"model": "tiny", "messages": [{"role": "user", "content": "abcabc"}], "temperature": 0}


@pytest.fixture(scope="module")
def drafting(
    tiny_model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server that drafts up to three tokens, and records a trace."""
    folder = tmp_path_factory.mktemp("drafting")
    flags = [
        "--speculative-config",
        SPECULATION,
        "--trace",
        str(folder / "run.jsonl"),
        "--no-enable-prefix-caching",
    ]
    with ServerProcess(tiny_model, folder, *flags) as running:
        yield running


def counted(server: ServerProcess) -> dict[str, float]:
    """The counters of drafts, by their names without the prefix; those by place as "0", "1", ..."""
    wait_until(server.is_idle)
    prefix, places = "spec_decode_", 'spec_decode_num_accepted_tokens_per_pos_total{position="'
    found = {name: value for name, value in server.metrics().items() if name.startswith(prefix)}
    numbers = {name: found.pop(f"{prefix}{name}_total") for name in COUNTERS}
    return numbers | {
        name.removeprefix(places).removesuffix('"}'): value for name, value in found.items()
    }


def grown(server: ServerProcess, before: dict[str, float]) -> dict[str, float]:
    return {name: value - before[name] for name, value in counted(server).items()}


def test_the_text_is_the_same_and_drafts_are_counted(
    drafting: ServerProcess, server: ServerProcess
) -> None:
    before, prompts = counted(drafting), ["abcabcabc", "aaaa", "cab"]
    answers = [
        [where.complete(prompt=prompt, **ANSWER)["choices"][0]["text"] for prompt in prompts]
        for where in (drafting, server)
    ]
    assert answers[0] == answers[1] and all(len(text) == 40 for text in answers[0])
    now = grown(drafting, before)
    assert set(now) == {*COUNTERS, "0", "1", "2"}
    assert 0 < now["num_drafts"] <= now["num_draft_tokens"] <= 3 * now["num_drafts"]
    assert now["num_drafts"] >= now["0"] >= now["1"] >= now["2"] > 0, (
        "a draft is accepted only if those before it are"
    )
    assert now["0"] + now["1"] + now["2"] == now["num_accepted_tokens"] < now["num_draft_tokens"]


def test_the_trace_tells_what_the_metrics_count(
    drafting: ServerProcess, tmp_path: pathlib.Path
) -> None:
    drafting.complete(prompt="abcabcabc", **ANSWER)
    now = counted(drafting)
    trace = Trace.load(drafting.output.parent / "run.jsonl", partial=True)
    drafts = [share for record in trace for share in record.requests if share.num_drafts]
    assert now["num_drafts"] == len(drafts) > 0
    assert now["num_draft_tokens"] == sum(share.num_drafts for share in drafts)
    for place in range(3):
        assert now[str(place)] == sum(share.num_accepted > place for share in drafts)


def test_a_request_without_drafts(drafting: ServerProcess) -> None:
    """`num_speculative_tokens` is the most that a request wants."""
    texts = {}
    for most in (None, 0, 1, 2, 100):
        before = counted(drafting)
        texts[most] = drafting.complete(prompt="abcabcabc", **ANSWER, num_speculative_tokens=most)[
            "choices"
        ][0]["text"]
        now = grown(drafting, before)
        assert (now["num_drafts"] > 0) == (most != 0)
        assert now["num_draft_tokens"] <= now["num_drafts"] * min(3 if most is None else most, 3)
    assert len(set(texts.values())) == 1
    before = counted(drafting)
    chat = drafting.post("/v1/chat/completions", TOLD | ANSWER | {"num_speculative_tokens": 0})
    assert chat.status_code == 200 and chat.json()["usage"]["completion_tokens"] == 40
    assert not any(grown(drafting, before).values())
    chunks = drafting.events("/v1/completions", {"prompt": "abcabcabc", "temperature": 0} | ANSWER)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == texts[None]
    assert len(chunks) < 40, "a chunk may have several tokens"


def test_a_number_of_drafts_that_is_none(drafting: ServerProcess) -> None:
    response = drafting.post("/v1/completions", {"prompt": "abc", "num_speculative_tokens": -1})
    assert response.status_code == 400 and "num_speculative_tokens" in json.dumps(response.json())


def test_a_server_that_does_not_draft_has_no_such_metrics(server: ServerProcess) -> None:
    server.complete(prompt="abcabcabc", **ANSWER, num_speculative_tokens=3)
    assert not [name for name in server.metrics() if name.startswith("spec_decode")]
