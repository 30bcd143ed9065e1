"""Tokenizes long texts beside an event loop: a few at a time, in portions, and stops early at a text that is too long."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from nanovllm.text.tokenizer import Tokenizer

# Characters per portion, which take 20 to 100 ms. Other texts get their turn between two portions.
PORTION = 2**16
MAX_THREADS = 2
MARGIN = 4


class TooManyTokensError(ValueError):
    """A text has more tokens than the caller accepts."""


class LongTexts:
    """Tokenizes in threads of its own, so that long texts wait only for each other, and short work does not wait for them.

    Args:
        tokenizer: the tokenizer, which releases the interpreter lock while it works.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(MAX_THREADS, "nanovllm-tokenize")

    async def encode(self, text: str, add_special_tokens: bool, most: int) -> list[int]:
        """The token ids of a text.

        Args:
            most: how many tokens the caller accepts. Portions are tokenized separately and have a few more tokens than the whole
                text, so a long text is refused only once its portions have `MARGIN` times as many.

        Raises:
            ValueError: the text is not valid Unicode, or has far more than `most` tokens (`TooManyTokensError`).
        """
        loop = asyncio.get_running_loop()
        if len(text) > PORTION:
            count = 0
            for start in range(0, len(text), PORTION):
                portion = text[start : start + PORTION]
                count += len(await loop.run_in_executor(self._threads, self._tokenizer.encode, portion, False))
                if count > MARGIN * most:
                    raise TooManyTokensError(f"the text has more than {most} tokens")
        return await loop.run_in_executor(self._threads, self._tokenizer.encode, text, add_special_tokens)

    def close(self) -> None:
        """Drop the waiting texts, and end the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
