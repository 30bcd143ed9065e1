"""What a reader gets of a completion, and what the engine is told of: no model, one rule per
test."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from tokenizers.decoders import ByteLevel

from nanovllm.data.request import EngineOutput, EngineRequest, TokenLogprobs
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.text.processor import MAX_KNOWN_IDS, CompletionState, OutputProcessor, RequestState
from nanovllm.text.token_decoder import TokenDecoder


class Pieces:
    """A tokenizer of a few tokens: "<end>" (special), "The", " E", "ND", " cat", and the two halves
    of "é"."""

    all_special_ids: ClassVar = [0]
    special_ids: ClassVar = frozenset([0])
    token_decoder = TokenDecoder(ByteLevel())
    pieces = (b"<end>", b"The", b" E", b"ND", b" cat", b"\xc3", b"\xa9")

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def ascii_text(self, token_id: int) -> str | None:
        spelled = self.pieces[token_id]
        return spelled.decode("ascii") if spelled.isascii() else None

    def convert_ids_to_tokens(self, token_ids: list[int]) -> list[str]:
        return [repr(self.pieces[token_id]) for token_id in token_ids]

    def decode_token(self, token_id: int) -> str:
        return self.pieces[token_id].decode(errors="replace")


END, THE, E, ND, CAT, FIRST_HALF, SECOND_HALF = range(7)


def completion(**params: Any) -> CompletionState:
    return CompletionState(0, SamplingParams(**params), Pieces())  # type: ignore[arg-type]


def output(
    token_id: int, reason: str | None = None, name: str = "r", **others: Any
) -> EngineOutput:
    return EngineOutput(name, [token_id], finish_reason=reason, **others)


def test_a_piece_has_the_new_tokens_and_the_text_that_is_certain() -> None:
    state = completion()
    pieces = [state.update(output(token)) for token in (THE, FIRST_HALF, SECOND_HALF)]
    assert [piece.token_ids for piece in pieces] == [[THE], [FIRST_HALF], [SECOND_HALF]], (
        "every piece names its new tokens, also one whose text is held back"
    )
    assert [piece.text for piece in pieces] == ["The", "", "é"], (
        "half a character waits for its other half"
    )
    assert state.num_tokens == 3, "`num_tokens` counts all tokens so far"
    assert not state.finished and pieces[-1].finish_reason is None, "no reason to end was given"


@pytest.mark.parametrize(
    ("reason", "included", "text", "rule"),
    [
        ("stop", False, "", "a token that ends the request is not part of its text"),
        (
            "stop",
            True,
            " cat",
            "with include_stop_str_in_output, the token that ends the request is part of the text",
        ),
        ("length", False, " cat", "when the length runs out, the last token is part of the text"),
    ],
)
def test_whether_the_last_token_is_part_of_the_text(
    reason: str, included: bool, text: str, rule: str
) -> None:
    last = completion(include_stop_str_in_output=included).update(
        output(CAT, reason, stop_reason=CAT)
    )
    assert last.text == text, rule
    assert last.token_ids == [CAT], "the last token is among the token ids in any case"
    assert (last.finish_reason, last.stop_reason) == (reason, CAT), (
        "the engine's reasons are passed on"
    )


def test_what_was_held_back_comes_with_the_end() -> None:
    state = completion(stop=["END"])
    assert [state.update(output(THE)).text, state.update(output(E)).text] == ["The", " "], (
        '"E" may be the beginning of the stop string "END", so it is held back'
    )
    last = state.update(output(FIRST_HALF, "length"))
    assert last.text == "E�", (
        "at the end, flush the stop checker and the detokenizer: no further text will come"
    )
    assert state.finished, "`finished` must be True after the output with a finish reason"
    last = completion(stop=["END"]).update(output(E, "length"))
    assert last.text == " E", "what the stop checker holds back is emitted at the end"


@pytest.mark.parametrize("reason", [None, "length"])
def test_a_stop_string_ends_the_completion(reason: str | None) -> None:
    state = completion(stop=["END"])
    state.update(output(E))
    last = state.update(output(ND, reason))
    assert last.text == "", (
        "the stop string is not part of the text, and nothing is emitted after it"
    )
    assert (last.finish_reason, last.stop_reason) == ("stop", "END"), (
        "a stop string counts as a stop, also if the length runs out at the same token; "
        "`stop_reason` names it"
    )
    assert state.finished, (
        "`finished` must be True after a stop string, although the engine goes on"
    )


def test_a_stop_string_below_min_tokens_does_not_count() -> None:
    state = completion(stop=["END"], min_tokens=2)
    early = [state.update(output(token)) for token in (E, ND)]
    assert not state.finished and early[1].text == "END", (
        'min_tokens=2: an "END" that the second token completes is text'
    )
    late = [state.update(output(token)) for token in (E, ND)]
    assert late[-1].finish_reason == "stop", (
        "the third and fourth token are above min_tokens: now END counts"
    )


def test_logprobs_are_added_up() -> None:
    state = completion(logprobs=1)
    entries = [TokenLogprobs([THE, E], [-0.5, -1.0], 1), TokenLogprobs([E, THE], [-2.0, -0.1], 2)]
    pieces = [state.update(output(entry.token_ids[0], logprobs=[entry])) for entry in entries]
    assert [piece.cumulative_logprob for piece in pieces] == [-0.5, -2.5], (
        "the sum over the chosen tokens, the first of each entry"
    )
    assert [list(piece.logprobs[0]) for piece in pieces if piece.logprobs] == [
        [THE, E],
        [E, THE],
    ], "one entry per new token"
    assert completion().update(output(THE)).cumulative_logprob is None, (
        "nothing is added up if log-probabilities were not asked for"
    )


def test_the_engine_is_known_from_the_first_output_on() -> None:
    state = completion()
    state.update(output(THE, engine=2))
    assert state.update(output(E, "abort")).engine == 2, (
        "an output that aborts the request does not name its engine"
    )


def processor(*names: str, **params: Any) -> OutputProcessor[RequestState]:
    """One that knows request r with these sequences."""
    made = OutputProcessor(Pieces(), RequestState)  # type: ignore[arg-type]
    made.add("r", "", [EngineRequest(name, [THE], SamplingParams(**params)) for name in names])
    return made


def test_outputs_of_requests_that_are_gone_are_skipped() -> None:
    front = processor("r")
    assert front.process([output(THE, name="gone")]) == ([], []), "no request has this sequence"
    front.remove("r")
    assert front.process([output(THE)]) == ([], []), (
        "this request was removed: a step was in flight meanwhile"
    )


def test_a_reused_id_gets_no_output_of_the_earlier_request() -> None:
    front = OutputProcessor(Pieces(), RequestState)  # type: ignore[arg-type]
    sent = []
    for _ in range(3):
        requests = [EngineRequest("r", [THE], SamplingParams())]
        front.add("r", "", requests)
        sent.append(requests[0].request_id)
        [(_, new)], _ = front.process([output(CAT, name=sent[-1])])
        assert (new.request_id, new.outputs[0].text) == ("r", " cat"), "callers see their own id"
        assert front.process([output(THE, name=earlier) for earlier in sent[:-1]]) == ([], []), (
            "late tokens"
        )
        assert front.remove("r") == [sent[-1]], "the engine is told to abort the latest one"
    assert sent == ["r", "r~2", "r~3"], "ids show what the caller has named the request"
    front.add("x", "", [EngineRequest("r~4", [THE], SamplingParams())])
    requests = [EngineRequest("r", [THE], SamplingParams())]
    front.add("r", "", requests)
    assert requests[0].request_id == "r~5", "a caller may use any id, also one with a number"


def test_a_request_that_the_engine_has_ended_leaves_its_id_free() -> None:
    """Traces show the id that the caller gave, however often it is used: no late token can come."""
    front = OutputProcessor(Pieces(), RequestState)  # type: ignore[arg-type]
    for _ in range(3):
        requests = [EngineRequest("r", [THE], SamplingParams())]
        front.add("r", "", requests)
        assert requests[0].request_id == "r"
        front.process([EngineOutput("r", [CAT], finish_reason="length")])
        assert front.remove("r") == [] and not front._given


def test_the_number_of_known_ids_is_bounded() -> None:
    front = OutputProcessor(Pieces(), RequestState)  # type: ignore[arg-type]
    for i in range(MAX_KNOWN_IDS + 5):
        front.add(f"r{i}", "", [EngineRequest(f"r{i}", [THE], SamplingParams())])
        front.remove(f"r{i}")
    assert len(front._num_ended_early) == MAX_KNOWN_IDS
    latest = f"r{MAX_KNOWN_IDS}"
    assert front._unused_id(latest) == f"{latest}~2"


def test_the_engine_is_told_of_a_stop_string_once() -> None:
    front = processor("r-0", "r-1", stop=["END"])
    assert front.process([output(E, name="r-0"), output(E, name="r-1")])[1] == [], (
        "no stop string is complete yet"
    )
    new, stopped = front.process([output(ND, name="r-0")])
    assert stopped == ["r-0"], (
        "the stop string has ended r-0 and the engine does not know: it must be told"
    )
    assert [piece.finish_reason for _, o in new for piece in o.outputs] == ["stop"], (
        "the caller gets the last piece, too"
    )
    assert front.process([output(CAT, name="r-0")]) == ([], []), (
        "r-0 has ended: what the engine still computes is skipped"
    )


def test_the_engine_is_not_told_of_an_end_that_it_reports() -> None:
    for reason in ("stop", "length", "abort"):
        assert processor("r").process([output(CAT, reason)])[1] == [], (
            f"the engine itself reports {reason!r}: it knows"
        )
    front = processor("r", stop=["END"])
    front.process([output(E)])
    assert front.process([output(ND, "length")])[1] == [], (
        "it knows of the end, though not of the stop string"
    )


def test_a_request_is_forgotten_when_its_last_completion_has_ended() -> None:
    front = processor("r-0", "r-1")
    [(_, first)], _ = front.process([output(CAT, "length", "r-0")])
    assert not first.finished and front.requests, "r-1 has not ended: the request goes on"
    [(_, second)], _ = front.process([output(CAT, "length", "r-1")])
    assert second.finished, "both have ended: this output says that the request has finished"
    assert not front.requests and front.owner("r-0") is None, (
        "a finished request is removed: its id can be used again"
    )
