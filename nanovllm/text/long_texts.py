"""Tokenizes long texts beside an event loop: a few at a time, in portions, and stops early at a
text that is too long."""

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from nanovllm.text.prompts import EngineLimits, TooManyTokensError
from nanovllm.text.tokenizer import Tokenizer

# Characters per portion, which take 20 to 100 ms. Other texts get their turn between two portions.
PORTION = 2**16
# So many threads at a time, so that long texts wait only for each other, and short work does not
# wait for them.
THREADS = CapacityLimiter(2)
MARGIN = 4


async def encode_long_text(
    tokenizer: Tokenizer, text: str, add_special_tokens: bool, limits: EngineLimits
) -> list[int]:
    """The token ids of a text.

    Args:
        tokenizer: the tokenizer, which releases the interpreter lock while it works.
        limits: of a request. Portions are tokenized separately and have a few more tokens than the
            whole text, so a long text is refused only once its portions have `MARGIN` times as many
            tokens as any request may have.

    Raises:
        ValueError: the text is not valid Unicode, or has far too many tokens
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
            if count > MARGIN * limits.max_request_tokens:
                raise TooManyTokensError(f"{limits.context_length} However, the text has more.")
    return await run_sync(tokenizer.encode, text, add_special_tokens, limiter=THREADS)
