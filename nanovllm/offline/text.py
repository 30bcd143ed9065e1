"""Text to calibrate and to judge on: a file, or chats that the model writes itself."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.data.sampling_params import SamplingParams
from nanovllm.engine.llm import LLM
from nanovllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovllm.offline.command import Recipe

# Stands for what the user says, to find where it begins in the chat template's text.
PLACEHOLDER = "\N{SNOWMAN}"


def user_turn(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens before and after the first turn of a user, in the model's chat template.
    Without a template these are the first token of every text, and nothing."""
    messages = [{"role": "user", "content": PLACEHOLDER}]
    chat = tokenizer.apply_chat_template(messages) if tokenizer.chat_templates else PLACEHOLDER
    before, _, after = chat.partition(PLACEHOLDER)
    opening = tokenizer.encode(before, add_special_tokens=not before) or [0]
    return opening, tokenizer.encode(after, add_special_tokens=False)


def own_chats(llm: LLM, count: int, length: int, seed: int) -> list[list[int]]:
    """Chats of `length` tokens each, of which the model writes both sides, as it was taught to: the
    prompt ends where the user begins to speak (Magpie: Xu et al. 2024, arXiv 2406.08464). A model
    without a chat template begins with nothing but its first token.

    Args:
        seed: of the first chat; the next one has the next seed.
    """
    prompt, _ = user_turn(llm.get_tokenizer())
    common = partial(
        SamplingParams, temperature=1, max_tokens=length - len(prompt), ignore_eos=True
    )
    answers = llm.generate(
        [{"prompt_token_ids": prompt}] * count, [common(seed=seed + i) for i in range(count)]
    )
    return [prompt + list(answer.outputs[0].token_ids) for answer in answers]


def pieces(text: str, tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    """Up to `count` pieces of `length` tokens, spread evenly over a text; one shorter piece if the
    text is shorter."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    count = max(1, min(count, len(token_ids) // length))
    step = (len(token_ids) - length) // max(1, count - 1)
    return [token_ids[i * step : i * step + length] for i in range(count)]


def samples(folder: Path, recipe: Recipe, longest: int) -> list[list[int]]:
    """Token ids to calibrate on, as many in each sample, and at most `longest`."""
    count = recipe.num_samples
    length = min(recipe.sample_length, longest)
    if recipe.calibration is not None:
        text = Path(recipe.calibration).read_text(encoding="utf-8", errors="replace")
        return pieces(text, Tokenizer.from_pretrained(folder), count, length)
    llm = LLM(
        str(folder), max_model_len=length, num_kv_blocks=count * (length // 16 + 2), device="cpu"
    )
    return own_chats(llm, count, length, recipe.seed)
