"""`nanovllm bench quality`: what quantized weights, or a setting of the engine, cost in quality, beside the unquantized model.

Two engines compute the same texts as prompts, step by step as they serve. The logits of all tokens follow from the hidden states of these steps:
`prompt_logprobs` would give those of the best few.
"""

from __future__ import annotations

import importlib
from math import exp
from typing import Any

import torch
from torch import Tensor

from nanovllm.data.sampling_params import SamplingParams
from nanovllm.engine.llm import LLM
from nanovllm.lab.bench.report import Row
from nanovllm.offline.text import own_chats, pieces

LENGTH = 512  # tokens of a text
SEED = 1_000_000  # of the chats: far from the seeds of those on which a model was calibrated


def documentation() -> str:
    """Text that every Python has: every second topic of its reference."""
    topics = importlib.import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name] for name in sorted(topics)[1::2])


@torch.inference_mode()
def logprobs(llm: LLM, token_ids: list[int]) -> Tensor:
    """The log-probability of every token at each position but the first, `[tokens - 1, vocab_size]` float32."""
    model, seen = llm.engine.core.executor.runner.model, list[Tensor]()  # type: ignore[attr-defined]  # an in-process one
    hook = model.register_forward_hook(lambda module, inputs, hidden: seen.append(hidden.clone()))
    llm.generate({"prompt_token_ids": token_ids}, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    hook.remove()
    return model.compute_logits(torch.cat(seen)[: len(token_ids) - 1]).float().log_softmax(-1)


def compare(title: str, engine: LLM, baseline: LLM, texts: list[list[int]]) -> Row:
    """The row of one kind of text. KL is the divergence of the engine's distribution from the baseline's, in nats, mean over the tokens."""
    sums, count = torch.zeros(4, dtype=torch.float64), sum(map(len, texts)) - len(texts)
    for text in texts:
        ours, theirs, targets = logprobs(engine, text), logprobs(baseline, text), torch.tensor(text[1:])[:, None]
        losses = [-each.gather(1, targets).sum() for each in (ours, theirs)]
        divergence, is_same = theirs.exp() * (theirs - ours), ours.argmax(-1) == theirs.argmax(-1)
        sums += torch.stack([*losses, divergence.sum(), is_same.sum()])
    loss, baseline_loss, divergence, same = (sums / count).tolist()
    found = {"tokens": count, "perplexity": exp(loss), "of the baseline": exp(baseline_loss)}
    found |= {"increase %": 100 * (exp(loss - baseline_loss) - 1), "mean KL": divergence, "same top-1 %": 100 * same}
    return {"table": "Quality", "text": title} | found


def quality(options: dict[str, Any], baseline_options: dict[str, Any], samples: int) -> list[Row]:
    """Compare an engine with another one, by their settings, on documentation and on chats that the second one's model writes.

    Args:
        samples: texts of each kind.
    """
    engine, baseline = (LLM(**each, enable_prefix_caching=False) for each in (options, baseline_options))
    length = min(LENGTH, baseline.engine.core.limits.max_request_tokens - 1)
    texts = {"Python's documentation": pieces(documentation(), baseline.get_tokenizer(), samples, length)}
    texts["chats"] = own_chats(baseline, samples, length, SEED)
    return [compare(title, engine, baseline, each) for title, each in texts.items()]
