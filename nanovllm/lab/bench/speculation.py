"""What drafts gain, on texts of four kinds and in batches: plain and drafting engines answer the
same questions in turn, and vLLM's, too."""

import pathlib
import pydoc_data.topics
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice
from typing import Any

from nanovllm.data.config import COURSE_MODEL
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.engine.llm import LLM
from nanovllm.lab.bench.engines import EngineSettings, OfflineEngine
from nanovllm.lab.bench.metrics import alternate, timed
from nanovllm.lab.bench.parts import Setting, Skip
from nanovllm.lab.bench.report import Row, paired
from nanovllm.lab.bench.workloads import BenchRequest
from nanovllm.models.eagle import shipped_head
from nanovllm.text.tokenizer import Tokenizer

#: As in vLLM's documentation. There, as many tokens are drafted whatever the load.
VLLM_NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_max": 5,
    "prompt_lookup_min": 2,
}

Answered = tuple[float, float | None, list[list[int]]]
# Text that every machine has.
_TEXT = " ".join(pydoc_data.topics.topics["if"].split())[:700]
#: Questions that no head was trained on.
_TASKS = (
    "reverses a string",
    "sorts a list of numbers",
    "counts the words of a text",
    "checks if a number is prime",
)
QUESTIONS = {
    "chat": [
        "What is the capital of France, and why is it famous?",
        "Explain how plants make food from light.",
        "How do I cook rice?",
        "Give me three tips for better sleep.",
        "Why is the sky blue?",
        "What is a black hole?",
        "Write a short story about a dog.",
    ],
    "code": [f"Write a Python function that {task}." for task in _TASKS],
    "summary": [
        f"Summarize this text in two sentences: {_TEXT}",
        f"What is this text about? {_TEXT}",
    ],
    "copy": [
        f"Repeat this text word for word: {_TEXT}",
        "Repeat this list ten times: eggs, tea, bread, oil, salt",
    ],
}


def measure(setting: Setting, method: str) -> Iterator[Row]:
    """Greedy answers to each kind of question one at a time, and to chats in batches.

    Args:
        method: who drafts, see `SpeculativeConfig`; a draft model is the model's own 8-bit copy.
    """
    if setting.dry_run and method == "eagle3":
        raise Skip("a head fits one model")
    copy = {"model": setting.folder, "quantization": "w8a8"}
    head = {"model": str(shipped_head(COURSE_MODEL))}
    more: dict[str, Any] = {"ngram": {"prompt_lookup_min": 2}, "draft_model": copy, "eagle3": head}
    config = {"method": method} | more[method]
    options = setting.options(max_num_seqs=32, max_model_len=512, kv_cache_memory="512MiB")
    plain, drafting = (LLM(**options, speculative_config=each) for each in (None, config))
    tokenizer = plain.get_tokenizer()
    with ExitStack() as stack:
        peers = _start_peers(stack, setting, options) if method == "ngram" else {}
        for kind, batch in [
            *((kind, 1) for kind in QUESTIONS),
            *(("chat", batch) for batch in (8, 32)),
        ]:
            count = 1 if setting.dry_run else max(batch, len(QUESTIONS[kind]))
            prompts = _prompts(tokenizer, kind, count)
            run = partial(
                _answer, prompts=prompts, batch=batch, tokens=4 if setting.dry_run else 128
            )
            works = {"none": partial(run, plain), method: partial(run, drafting)}
            lengths = [len(answer) for answer in works["none"]()[2]]
            works |= {
                name: partial(_time_peer, peer, prompts, batch, lengths)
                for name, peer in peers.items()
            }
            found = alternate(works, setting.repeats)
            if found["none"][0][2] != found[method][0][2]:
                raise RuntimeError(f"{method} changes the answers to {kind}")
            for name, rounds in found.items():
                row: Row = {
                    "table": "Drafts, greedy answers",
                    "questions": kind,
                    "concurrent requests": batch,
                    "drafts": name,
                }
                row |= {"tokens/s": [sum(lengths) / seconds for seconds, *_ in rounds]}
                ratio = paired(
                    *([seconds for seconds, *_ in each] for each in (rounds, found["none"]))
                )
                yield row | {"tokens per verification": rounds[-1][1], "speed ÷ none": ratio}


def _start_peers(
    stack: ExitStack, setting: Setting, options: dict[str, Any]
) -> dict[str, OfflineEngine]:
    """Engines of vLLM, without drafts and with n-grams; none where it is not installed."""
    peers = dict[str, OfflineEngine]()
    if "vllm" in setting.peers:
        for name, drafts in (("vLLM, none", None), ("vLLM, ngram", VLLM_NGRAM)):
            where = pathlib.Path(setting.folder)
            settings = options | {"speculative_config": drafts}
            engine = OfflineEngine(
                EngineSettings("vllm", where, settings, setting.threads, setting.peers["vllm"])
            )
            peers[name] = stack.enter_context(engine)
            engine.rest()  # it waits busily
    return peers


def _prompts(tokenizer: Tokenizer, kind: str, count: int) -> list[list[int]]:
    """Token ids of questions of a kind, from the first again after the last."""
    chats = [
        [{"role": "user", "content": question}]
        for question in islice(cycle(QUESTIONS[kind]), count)
    ]
    texts = [
        tokenizer.apply_chat_template(c) if tokenizer.chat_templates else c[0]["content"]
        for c in chats
    ]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def _answer(llm: LLM, prompts: list[list[int]], batch: int, tokens: int) -> Answered:
    """Seconds, tokens per verification of drafts, and the tokens of each answer."""
    drafts = llm.engine.core.stats.spec_decoding
    answers = list[Any]()
    before = (drafts.num_drafts, drafts.num_accepted_tokens)
    params = SamplingParams(temperature=0, max_tokens=tokens)
    groups = [
        [{"prompt_token_ids": ids} for ids in prompts[i : i + batch]]
        for i in range(0, len(prompts), batch)
    ]
    run = partial(llm.generate, sampling_params=params, use_tqdm=False)
    seconds = timed(lambda: answers.extend(answer for group in groups for answer in run(group)))
    steps = drafts.num_drafts - before[0]
    accepted = drafts.num_accepted_tokens - before[1]
    return (
        seconds,
        1 + accepted / steps if steps else None,
        [answer.outputs[0].token_ids for answer in answers],
    )


def _time_peer(
    engine: OfflineEngine, prompts: list[list[int]], batch: int, lengths: list[int]
) -> Answered:
    """The same for answers of given lengths."""
    requests = [
        BenchRequest(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)
    ]
    groups = [requests[i : i + batch] for i in range(0, len(requests), batch)]
    engine.wake()
    seconds = sum(max(line[-1][0] for line in engine.ask(group)) for group in groups)
    engine.rest()
    return seconds, None, []
