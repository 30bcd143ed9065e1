"""`nanovllm bench quality`: what a quantized model, or an engine's setting, costs in quality, against the unquantized model.

Both engines compute the same texts, each as a prompt. From the hidden states of these steps come the logits of all tokens, which `prompt_logprobs` would give
for a few tokens only.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from nanovllm.data.sampling_params import SamplingParams
from nanovllm.engine.llm import LLM
from nanovllm.lab.bench.report import Row
from nanovllm.offline.text import own_chats, pieces

# Far from those of the chats that a model was calibrated on.
SEED = 1_000_000


def documentation() -> str:
    """Text that every Python has: every second topic of its reference."""
    topics = importlib.import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name] for name in sorted(topics)[1::2])


@torch.inference_mode()
def logprobs(llm: LLM, token_ids: list[int]) -> Tensor:
    """The log-probability of every token at each position but the first, `[tokens - 1, vocab_size]` float32."""
    executor: Any = llm.engine.core.executor
    model, seen = executor.runner.model, list[Tensor]()
    hook = model.register_forward_hook(lambda module, inputs, hidden: seen.append(hidden.clone()))
    llm.generate({"prompt_token_ids": token_ids}, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    hook.remove()
    return model.compute_logits(torch.cat(seen)[: len(token_ids) - 1]).float().log_softmax(-1)


def compare(title: str, engine: LLM, baseline: LLM, texts: list[list[int]]) -> Row:
    """The row of one kind of text."""
    sums, count = torch.zeros(4, dtype=torch.float64), 0
    for text in texts:
        next_ids = torch.tensor(text[1:])[:, None]
        ours, theirs = logprobs(engine, text), logprobs(baseline, text)
        divergence = (theirs.exp() * (theirs - ours)).sum()
        same = (ours.argmax(-1) == theirs.argmax(-1)).sum()
        sums += torch.stack(
            [-ours.gather(1, next_ids).sum(), -theirs.gather(1, next_ids).sum(), divergence, same]
        ).double()
        count += len(next_ids)
    loss, baseline_loss, divergence, same = (sums / count).tolist()
    perplexity, unquantized = torch.tensor([loss, baseline_loss]).exp().tolist()
    return {
        "table": "Quality",
        "text": title,
        "tokens": count,
        "perplexity": perplexity,
        "of the baseline": unquantized,
        "increase %": 100 * (perplexity / unquantized - 1),
        "mean KL": divergence,
        "same top-1 %": 100 * same,
    }


def quality(options: dict[str, Any], baseline_options: dict[str, Any], samples: int, length: int) -> list[Row]:
    """Compare an engine with another one, on documentation and on chats that the other one's model writes.

    Args:
        options, baseline_options: settings of the two engines.
        samples, length: pieces of each kind of text, and tokens of each.
    """
    common = {
        "enable_prefix_caching": False,
        "max_model_len": length + 1,
        "num_kv_blocks": samples * (length // 16 + 2),
    }
    engine, baseline = LLM(**common | options), LLM(**common | baseline_options)
    texts = {
        "Python's documentation": pieces(documentation(), baseline.get_tokenizer(), samples, length),
        "chats": own_chats(baseline, samples, length, SEED),
    }
    return [compare(title, engine, baseline, each) for title, each in texts.items()]
