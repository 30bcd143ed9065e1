"""Tokenizes long texts beside an event loop: a few at a time, in portions, and stops early at a
text that is too long."""

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from nanovllm.text.tokenizer import Tokenizer

# Characters per portion, which take 20 to 100 ms. Other texts get their turn between two portions.
PORTION = 2**16
# So many threads at a time, so that long texts wait only for each other, and short work does not
# wait for them.
THREADS = CapacityLimiter(2)
MARGIN = 4


class TooManyTokensError(ValueError):
    """A text has more tokens than the caller accepts."""


def context_length(limit: int, of_model: int | None = None) -> str:
    """The first sentence of an error about a request that is too long, in OpenAI's words: clients
    such as litellm recognise it.

    Args:
        limit: tokens that a request may have, prompt and answer together.
        of_model: the context length, if the limit may be lower because the KV pool is small.
    """
    sentence = f"This model's maximum context length is {limit} tokens"
    if of_model is not None and limit < of_model:
        sentence += (
            f" on this server, since its KV pool has no room for more (the model takes {of_model})"
        )
    return sentence + "."


async def encode_long_text(
    tokenizer: Tokenizer, text: str, add_special_tokens: bool, most: int
) -> list[int]:
    """The token ids of a text.

    Args:
        tokenizer: the tokenizer, which releases the interpreter lock while it works.
        most: how many tokens the caller accepts. Portions are tokenized separately and have a few
            more tokens than the whole text, so a long text is refused only once its portions have
            `MARGIN` times as many.

    Raises:
        ValueError: the text is not valid Unicode, or has far more than `most` tokens
            (`TooManyTokensError`).
    """
    if len(text) > PORTION:
        count = 0
        for start in range(0, len(text), PORTION):
            count += len(
                await run_sync(
                    tokenizer.encode, text[start : start + PORTION], False, limiter=THREADS
                )
            )
            if count > MARGIN * most:
                raise TooManyTokensError(f"{context_length(most)} However, the text has more.")
    return await run_sync(tokenizer.encode, text, add_special_tokens, limiter=THREADS)
