"""What drafts gain, on texts of four kinds and in batches: plain and drafting engines answer the same questions in turn."""

import pydoc_data.topics
from collections.abc import Iterator
from functools import partial
from itertools import cycle, islice
from typing import Any

from nanovllm.data.config import COURSE_MODEL
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.engine.llm import LLM
from nanovllm.lab.bench.metrics import alternate, timed
from nanovllm.lab.bench.parts import Setting, Skip
from nanovllm.lab.bench.report import Row, paired
from nanovllm.models.eagle import shipped_head

# Text that every machine has.
_TEXT = " ".join(pydoc_data.topics.topics["if"].split())[:700]
#: Questions that no head was trained on.
_TASKS = (
    "reverses a string",
    "sorts a list of numbers",
    "counts the words of a text",
    "checks whether a number is prime",
)
QUESTIONS = {
    "chat": [
        "What is the capital of France, and why is it famous?", "Explain how plants make food from light.", "How do I cook rice?",
        "Give me three tips for better sleep.", "Why is the sky blue?", "What is a black hole?", "Write a short story about a dog.",
    ],
    "code": [f"Write a Python function that {task}." for task in _TASKS],
    "summary": [f"Summarize this text in two sentences: {_TEXT}", f"What is this text about? {_TEXT}"],
    "copy": [f"Repeat this text word for word: {_TEXT}", "Repeat this list ten times: eggs, tea, bread, oil, salt"],
}  # fmt: skip


def measure(setting: Setting, method: str) -> Iterator[Row]:
    """Greedy answers to each kind of question one at a time, and to chats in batches.

    Args:
        method: who drafts, see `SpeculativeConfig`; a draft model is the model's own 8-bit copy.
    """
    if setting.dry_run and method == "eagle3":
        raise Skip("a head fits one model")
    copy, head = {"model": setting.folder, "quantization": "w8a8"}, {"model": str(shipped_head(COURSE_MODEL))}
    more: dict[str, Any] = {"ngram": {"prompt_lookup_min": 2}, "draft_model": copy, "eagle3": head}
    config = {"method": method} | more[method]
    options = setting.options(max_num_seqs=32, max_model_len=512, kv_cache_memory="512MiB")
    engines = {name: LLM(**options, speculative_config=each) for name, each in (("none", None), (method, config))}
    for kind, batch in [*((kind, 1) for kind in QUESTIONS), *(("chat", batch) for batch in (8, 32))]:
        questions = list(islice(cycle(QUESTIONS[kind]), max(batch, len(QUESTIONS[kind]))))[
            : 1 if setting.dry_run else None
        ]
        works = {
            name: partial(_answer, llm, questions, batch, 4 if setting.dry_run else 128)
            for name, llm in engines.items()
        }
        found = alternate(works, setting.repeats)
        if found["none"][0][2] != found[method][0][2]:
            raise RuntimeError(f"{method} changes the answers to {kind}")
        for name, rounds in found.items():
            row: Row = {"table": "Drafts, greedy answers", "questions": kind, "at once": batch, "drafts": name}
            row |= {"tokens/s": [sum(map(len, texts)) / seconds for seconds, _, texts in rounds]}
            ratio = paired(*([seconds for seconds, *_ in each] for each in (rounds, found["none"])))
            yield row | {"tokens per verification": rounds[-1][1], "speed ÷ none": ratio}


def _answer(llm: LLM, questions: list[str], batch: int, tokens: int) -> tuple[float, float | None, list[list[int]]]:
    """Seconds, tokens per verification of drafts, and the tokens of each answer."""
    tokenizer, drafts = llm.get_tokenizer(), llm.engine.core.stats.spec_decoding
    chats = [[{"role": "user", "content": question}] for question in questions]
    prompts = [tokenizer.apply_chat_template(chat) for chat in chats] if tokenizer.chat_templates else questions
    before, answers = (drafts.num_drafts, drafts.num_accepted_tokens), list[Any]()
    params, groups = SamplingParams(temperature=0, max_tokens=tokens), range(0, len(prompts), batch)
    run = partial(llm.generate, sampling_params=params, use_tqdm=False)
    seconds = timed(lambda: answers.extend(answer for i in groups for answer in run(prompts[i : i + batch])))
    steps, accepted = drafts.num_drafts - before[0], drafts.num_accepted_tokens - before[1]
    return seconds, 1 + accepted / steps if steps else None, [answer.outputs[0].token_ids for answer in answers]
