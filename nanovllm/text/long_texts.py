"""Tokenizes long texts beside an event loop: a few at a time, in portions, and none that is far too long to its end."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from nanovllm.text.tokenizer import Tokenizer

# Characters that are tokenized at a time: 20 to 100 ms. Other texts get their turn between two portions.
PORTION = 2**16
MAX_THREADS = 2


class TooManyTokensError(ValueError):
    """A text has far more tokens than the caller can use."""


class LongTexts:
    """Tokenizes in threads of its own, so that long texts wait for one another and short work waits for none of them.

    Args:
        tokenizer: the tokenizer, which releases the interpreter lock while it works.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(MAX_THREADS, "nanovllm-tokenize")

    async def encode(self, text: str, add_special_tokens: bool, most: int | None = None) -> list[int]:
        """The token ids of a text.

        Args:
            most: give up once portions of the text have more tokens than this. The portions are counted apart, and have a
                few more tokens than the whole: use a multiple of the real limit.

        Raises:
            ValueError: the text is not valid Unicode, or has more than `most` tokens (`TooManyTokensError`).
        """
        loop = asyncio.get_running_loop()
        if most is not None and len(text) > PORTION:
            count = 0
            for start in range(0, len(text), PORTION):
                portion = text[start : start + PORTION]
                count += len(await loop.run_in_executor(self._threads, self._tokenizer.encode, portion, False))
                if count > most:
                    raise TooManyTokensError(f"the text has more than {most} tokens")
        return await loop.run_in_executor(self._threads, self._tokenizer.encode, text, add_special_tokens)

    def close(self) -> None:
        """Forget the texts that wait, and end the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
