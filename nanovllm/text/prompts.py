"""What a caller may send, in all its spellings, and the checks that it must pass before it is
queued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from nanovllm.data.json import JsonObject
from nanovllm.data.kv_transfer import ConnectorInformation
from nanovllm.data.outputs import Logprob
from nanovllm.data.request import TokenLogprobs
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.text.tokenizer import Tokenizer

# Text, token ids, or a dictionary with "prompt" or "prompt_token_ids" (and "cache_salt",
# "kv_transfer_params").
Prompt = str | Sequence[int] | JsonObject
Message = JsonObject


class TooManyTokensError(ValueError):
    """A request has more tokens than any may have, prompt and output together.

    Args:
        field: what has to become smaller: "prompt", or the field that asks for output tokens.
    """

    def __init__(self, message: str, field: str = "prompt") -> None:
        super().__init__(message)
        self.field = field


@dataclass
class EngineLimits:
    """The engine's limits and settings that the front end needs to check a request.

    Attributes:
        max_model_len: the context length in tokens.
        max_request_tokens: the same, or less if the KV pool is smaller.
        kv_transfer: for each engine that shares KV, how peers reach it; see
            `KVConnectorScheduler.information`.
        scheduling_policy: whether requests may have a priority.
        disable_any_whitespace: JSON of structured outputs has no white space between its parts.
        on_gpu: the ranks compute on GPUs; the log names them.
    """

    max_model_len: int
    max_request_tokens: int
    vocab_size: int
    eos_token_ids: list[int] = field(default_factory=list)
    generation_defaults: JsonObject = field(default_factory=dict)
    kv_transfer: list[ConnectorInformation] = field(default_factory=list)
    scheduling_policy: str = "fcfs"
    disable_any_whitespace: bool = False
    on_gpu: bool = False

    @property
    def context_length(self) -> str:
        """The first sentence of an error about a request that is too long, in OpenAI's words:
        clients such as litellm recognise it."""
        sentence = f"This model's maximum context length is {self.max_request_tokens} tokens"
        if self.max_request_tokens < self.max_model_len:
            sentence += (
                " on this server, since its KV pool has no room for more (the model takes "
                f"{self.max_model_len}; raise --kv-cache-memory)"
            )
        return sentence + "."

    def check_length(
        self, num_prompt_tokens: int, max_tokens: int | None = None, field: str = "max_tokens"
    ) -> None:
        """Judge the length of a request: it needs room for its prompt and for the output. All front
        ends ask here; `Scheduler.add_request` checks what reaches the core by another way.

        Args:
            max_tokens: output tokens that must fit, too; None: one.
            field: the name under which the request asks for them.

        Raises:
            TooManyTokensError: names the numbers, and what has to become smaller.
        """
        has = f"the prompt has {num_prompt_tokens} tokens"
        if num_prompt_tokens >= self.max_request_tokens:
            raise TooManyTokensError(
                f"{self.context_length} However, {has} and leaves no room for an answer: shorten "
                "the prompt."
            )
        total = num_prompt_tokens + (max_tokens or 1)
        if total > self.max_request_tokens:
            raise TooManyTokensError(
                f"{self.context_length} However, you requested {max_tokens} output tokens, and "
                f"{has}, together {total}: {field} is too large, or the prompt too long.",
                field,
            )


NO_PROMPT = 'a prompt must be text, token ids, or a dictionary with "prompt" or "prompt_token_ids"'


def unpack_prompt(prompt: Prompt) -> tuple[str | Sequence[int], JsonObject]:
    """The text or the token ids of a prompt, and the dictionary with what else came with it. As in
    vLLM, the token ids count if there are both.

    Raises:
        ValueError: it is no prompt.
    """
    fields: JsonObject = prompt if isinstance(prompt, dict) else {"prompt": prompt}
    content = fields.get("prompt_token_ids", fields.get("prompt"))
    if not isinstance(content, Sequence):
        raise ValueError(NO_PROMPT)
    return content, fields


def read_prompt(prompt: Prompt, tokenizer: Tokenizer) -> tuple[str | None, list[int], JsonObject]:
    """The prompt's text, if it came as text; its token ids; and what else came with it.

    Raises:
        ValueError: it is no prompt.
    """
    content, fields = unpack_prompt(prompt)
    text = content if isinstance(content, str) else None
    token_ids = tokenizer.encode(content) if isinstance(content, str) else content
    if not all(type(token) is int for token in token_ids):
        raise ValueError(NO_PROMPT)
    return text, list(token_ids), fields


def check_request(
    token_ids: list[int], params: SamplingParams, priority: int, limits: EngineLimits
) -> None:
    """Check what a step could not compute.

    Raises:
        ValueError: see `InputProcessor.process`.
    """
    if priority and limits.scheduling_policy != "priority":
        raise ValueError(f"priority must be 0 without --scheduling-policy priority, got {priority}")
    if not token_ids:
        raise ValueError("the prompt is empty: it must have at least one token")
    limits.check_length(len(token_ids))
    checked = [
        ("prompt token ids", token_ids),
        ("stop_token_ids", params.stop_token_ids),
        *(("bad_words_token_ids", word) for word in params.bad_words_token_ids),
        ("logit_bias", list(params.logit_bias or ())),
    ]
    for name, ids in checked:
        if not all(0 <= token < limits.vocab_size for token in ids):
            raise ValueError(
                f"{name} must be from 0 to {limits.vocab_size - 1}, the size of the vocabulary"
            )


def encode_bad_words(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return two token sequences for each word: without a space before it, and with one.

    As in vLLM, white space at a word's beginning is not part of it. A word of nothing but white
    space stays as it is."""
    texts: dict[str, None] = {}
    for word in words:
        stripped = word.lstrip()
        texts |= dict.fromkeys((stripped, f" {stripped}") if stripped else (word,))
    sequences = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return [token_ids for token_ids in sequences if token_ids]


def pair_prompts(
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams],
    priority: Sequence[int] | None,
) -> list[tuple[Prompt, SamplingParams, int]]:
    """Each prompt with its parameters and its priority, which may be one for all or one per prompt.

    Raises:
        ValueError: lists of different lengths.
    """
    single = isinstance(prompts, str | dict) or (len(prompts) > 0 and isinstance(prompts[0], int))
    batch = cast(list[Prompt], [prompts] if single else list(prompts))
    if isinstance(sampling_params, SamplingParams):
        sampling_params = [sampling_params] * len(batch)
    priorities = list(priority) if priority is not None else [0] * len(batch)
    if not len(batch) == len(sampling_params) == len(priorities):
        raise ValueError(
            f"got {len(batch)} prompts, {len(sampling_params)} sampling_params and "
            f"{len(priorities)} priorities: give one for all or one per prompt"
        )
    return list(zip(batch, sampling_params, priorities, strict=True))


def encode_chats(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
    tokenizer: Tokenizer,
    /,
    **options: Any,
) -> list[Prompt]:
    """One or several conversations as prompts; for `options`, see
    `Tokenizer.apply_chat_template`."""
    several = not (messages and isinstance(messages[0], dict))
    conversations = cast(list[list[Message]], messages if several else [messages])
    texts = [tokenizer.apply_chat_template(list(c), **options) for c in conversations]
    # The template writes the special tokens itself.
    return [
        {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)} for text in texts
    ]


def logprob_dictionary(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """The entry by token id: the chosen token first, then the likeliest ones in order."""
    position: dict[int, Logprob] = {}
    for i, (token_id, logprob) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
        rank = entry.rank if i == 0 else i
        position.setdefault(token_id, Logprob(logprob, rank, tokenizer.decode_token(token_id)))
    return position
