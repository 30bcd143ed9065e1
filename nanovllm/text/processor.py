"""The second half of the engine's front end: turns generated tokens into text, and routes it to its
request.

Offline and served requests pass through the same classes.

Built by notebooks/18_engine.ipynb: edit it there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from nanovllm.data.outputs import (
    CompletionOutput,
    PositionLogprobs,
    RequestFailedError,
    RequestOutput,
    join_pieces,
)
from nanovllm.data.request import EngineOutput, EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.data.structured_outputs import GrammarError
from nanovllm.text.detokenizer import FormFinder, IncrementalDetokenizer, StopChecker
from nanovllm.text.prompts import logprob_dictionary
from nanovllm.text.tokenizer import Tokenizer

# The most ids of ended sequences that are remembered, the latest ones: a step in flight may still
# compute one of the last few.
MAX_KNOWN_IDS = 2**16


class CompletionState:
    """One completion while it is generated: its text, log-probabilities and end."""

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self.index = index
        self.params = params
        self.tokenizer = tokenizer
        # The tokens continue a prompt: a leading space is part of the answer, and so is a character
        # that the prompt leaves incomplete. But a grammar's text is one of its own.
        continued = prompt_token_ids if params.structured_outputs is None else ()
        self.detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens, continued)
        self.has_stops = bool(params.stop)
        self.stop_checker = StopChecker(list(params.stop), params.include_stop_str_in_output)
        # Only text before a form can end with a stop string.
        wanted = params.structured_outputs
        self._form = FormFinder(wanted.free_text_before if wanted else "")
        self.num_tokens = self.engine = 0
        self.cumulative_logprob = 0.0 if params.logprobs is not None else None
        self.finished = False

    def update(self, output: EngineOutput) -> CompletionOutput:
        """Take the engine's next output, token by token where a stop string may be between them;
        returns the new part of the completion."""
        if not self.has_stops or len(output.new_token_ids) <= 1:
            return self._append_tokens(output)
        pieces: list[CompletionOutput] = []
        for part in output.by_token():
            if not self.finished:
                pieces.append(self._append_tokens(part))
        return join_pieces(pieces)

    def _append_tokens(self, output: EngineOutput) -> CompletionOutput:
        """Append the tokens of an output, undivided; returns the new part of the completion: all
        new tokens, their text (`_new_text`), and as `engine` the last `output.engine` that is not
        0: an output that aborts the request has 0 there.

        A stop string ends the completion with finish reason "stop" and the string as stop reason,
        even if the engine reports no end or another one; the caller then tells the engine.

        The output's log-probabilities, if there are any, become dictionaries
        (`logprob_dictionary`), and `cumulative_logprob` adds up those of the sampled tokens, the
        first of each entry."""
        self.engine = output.engine or self.engine
        self.num_tokens += len(output.new_token_ids)
        text, matched = self._new_text(output)
        finish_reason = output.finish_reason if matched is None else "stop"
        stop_reason = output.stop_reason if matched is None else matched
        self.finished = finish_reason is not None
        logprobs = None
        if output.logprobs is not None:
            logprobs = [logprob_dictionary(entry, self.tokenizer) for entry in output.logprobs]
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sum(
                e.logprobs[0] for e in output.logprobs
            )
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=output.new_token_ids,
            cumulative_logprob=self.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            engine=self.engine,
        )

    def _new_text(self, output: EngineOutput) -> tuple[str, str | None]:
        """Return the text that an output adds, and the stop string that was found.

        The new tokens pass through `detokenizer`, and their text through `_search` if there are
        stop strings. With "stop" as finish reason, the last token has no text, unless
        `params.include_stop_str_in_output`. When the engine reports an end, the detokenizer is
        flushed."""
        is_last = output.finish_reason is not None
        # A stop token is not part of the text. If the length ran out, the last token is.
        visible = output.new_token_ids
        if output.finish_reason == "stop" and not self.params.include_stop_str_in_output:
            visible = visible[:-1]
        text = self.detokenizer.append(visible)
        if is_last:
            text += self.detokenizer.flush()
        return self._search(text, is_last) if self.has_stops else (text, None)

    def _search(self, text: str, is_last: bool) -> tuple[str, str | None]:
        """Search for stop strings in the next text; returns the text to emit, and the stop string
        that was found.

        While `num_tokens` (with the new ones) is at most `params.min_tokens` (if that is not 0),
        stop strings do not count (`check=False`), and neither do they once a form has begun. Text
        that may become a stop string is held back, unless it is the last."""
        has_form = self._form.has_begun(text)
        is_early = self.params.min_tokens > 0 and self.num_tokens <= self.params.min_tokens
        text, matched = self.stop_checker.append(text, check=not has_form and not is_early)
        if matched is None and is_last:
            text += self.stop_checker.flush()
        return text, matched


class RequestState:
    """A caller's request: its completions, and the prompt's log-probabilities so far."""

    def __init__(
        self, request_id: str, text: str | None, requests: list[EngineRequest], tokenizer: Tokenizer
    ) -> None:
        self.request_id = request_id
        self.prompt = text
        self.tokenizer = tokenizer
        self.prompt_token_ids = requests[0].prompt_token_ids
        self.completions = {
            r.request_id: CompletionState(i, r.sampling_params, tokenizer, r.prompt_token_ids)
            for i, r in enumerate(requests)
        }
        self.params = requests[0].sampling_params
        self.prompt_logprobs: list[PositionLogprobs] | None = (
            None if self.params.prompt_logprobs is None else [None]
        )
        self.num_cached_tokens = 0
        self.num_unfinished = len(self.completions)

    @property
    def finished(self) -> bool:
        """True once every completion has ended."""
        return self.num_unfinished == 0

    def update(self, completion: CompletionState, output: EngineOutput) -> RequestOutput:
        """Take an output of one completion; returns a `RequestOutput` with its new part only."""
        if output.prompt_logprobs is not None and self.prompt_logprobs is not None:
            # Each of the n sequences reports the prompt, a preempted one twice: only the first
            # report of a position counts.
            known = len(self.prompt_logprobs) - output.prompt_logprobs_start
            new = output.prompt_logprobs[max(0, known) :]
            self.prompt_logprobs += [logprob_dictionary(entry, self.tokenizer) for entry in new]
        if output.num_cached_tokens > self.num_cached_tokens:
            self.num_cached_tokens = output.num_cached_tokens
        delta = completion.update(output)
        self.num_unfinished -= completion.finished
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[delta],
            finished=self.finished,
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            kv_transfer_params=output.kv_transfer_params,
            error=self._error_of(output) if output.error else None,
        )

    def _error_of(self, output: EngineOutput) -> RequestFailedError | GrammarError:
        wanted = self.params.structured_outputs
        if wanted and output.error_kind == "request":
            return GrammarError(wanted.place, output.error)
        return RequestFailedError(output.error)


R = TypeVar("R", bound=RequestState)


class OutputProcessor(Generic[R]):
    """Routes the engine's outputs to their requests.

    A request may have the id of an earlier one. If that one was aborted or ended by a stop string,
    the engine may still compute it for a few steps, so `add` gives the new sequences ids of their
    own: "chat-1", then "chat-1~2". Traces and KV transfers show these.

    Args:
        create: makes the record of a request: a `RequestState`, or what extends it.

    Attributes:
        requests: those that have not ended, by their ids.
    """

    def __init__(self, tokenizer: Tokenizer, create: Callable[..., R]) -> None:
        self.tokenizer = tokenizer
        self.create = create
        self.requests: dict[str, R] = {}
        # By the id of a sequence: its request, and its own state there.
        self._owners: dict[str, tuple[R, CompletionState]] = {}
        # Id of a sequence that got another one -> the one that it was given.
        self._given: dict[str, str] = {}
        # Given id -> how many sequences of that id the front end has ended, the latest ids last.
        self._num_ended_early: dict[str, int] = {}

    def add(self, request_id: str, prompt: str | None, requests: list[EngineRequest]) -> R:
        """Expect outputs for these sequences; returns the record of the request. Changes the id of
        a sequence if an earlier one had it.

        Raises:
            ValueError: the id, or that of one of the sequences, is in use.
        """
        taken = self._owners.keys() & {r.request_id for r in requests}
        if request_id in self.requests or taken:
            raise ValueError(f"request id {min(taken, default=request_id)!r} is in use")
        for request in requests:
            request.request_id = self._unused_id(request.request_id)
        state = self.create(request_id, prompt, requests, self.tokenizer)
        self.requests[request_id] = state
        self._owners |= {key: (state, own) for key, own in state.completions.items()}
        return state

    def process(
        self, outputs: list[EngineOutput]
    ) -> tuple[list[tuple[R, RequestOutput]], list[str]]:
        """Turn the engine's outputs into outputs for the callers.

        Skips outputs of sequences that have ended and of requests that were removed. Removes a
        request once all its completions have ended.

        Returns:
            Requests with their new outputs, and the ids of sequences that a stop string has ended
            and that the engine still computes: the caller must have the engine abort these.
        """
        news = []
        stopped = []
        for output in outputs:
            found = self._owners.get(output.request_id)
            if found is None or found[1].finished:
                continue  # aborted, or ended by a stop string, while the engine was computing
            state, completion = found
            news.append((state, state.update(completion, output)))
            if completion.finished:
                if output.finish_reason is None:
                    stopped.append(output.request_id)
                if output.finish_reason in (None, "abort"):
                    # The front end has ended it, and the engine may still compute it.
                    self._note_early_end(output.request_id)
                if state.finished:
                    self.remove(state.request_id)
        return news, stopped

    def _unused_id(self, sequence_id: str) -> str:
        """The id itself or, if an earlier sequence had it, one with a number."""
        number = self._num_ended_early.get(sequence_id, 0) + 1
        if number == 1:
            return sequence_id
        # A caller may have used the id with this number, too.
        while (
            unused := f"{sequence_id}~{number}"
        ) in self._owners or unused in self._num_ended_early:
            number += 1
        self._given[unused] = sequence_id
        return unused

    def _note_early_end(self, sequence_id: str) -> None:
        """Note that the engine may still compute a sequence: no later one may have its id."""
        given = self._given.get(sequence_id, sequence_id)
        self._num_ended_early[given] = self._num_ended_early.pop(given, 0) + 1
        if len(self._num_ended_early) > MAX_KNOWN_IDS:
            del self._num_ended_early[next(iter(self._num_ended_early))]

    def remove(self, request_id: str) -> list[str]:
        """Forget a request; returns the ids of its sequences that have not ended."""
        state = self.requests.pop(request_id, None)
        if state is None:
            return []
        for sequence_id in state.completions:
            self._owners.pop(sequence_id, None)
        unfinished = [sequence_id for sequence_id, c in state.completions.items() if not c.finished]
        for sequence_id in unfinished:
            self._note_early_end(sequence_id)
        for sequence_id in state.completions:
            self._given.pop(sequence_id, None)
        return unfinished

    def owner(self, sequence_id: str) -> R | None:
        """Return the request that a sequence belongs to; None if it has ended or was removed."""
        return self._owners.get(sequence_id, (None, None))[0]
