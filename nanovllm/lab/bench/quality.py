"""`nanovllm bench quality`: what quantized weights, or a setting of the engine, cost in quality,
beside the unquantized model.

Two engines compute the same texts as prompts, in the steps in which they serve. The logits of all
tokens follow from the hidden states of these steps; `prompt_logprobs` would give those of a few.
"""

import importlib
from math import exp
from typing import Any, cast

import torch
from torch import Tensor

from nanovllm.assembly.engine import Engine
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.engine.llm import LLM
from nanovllm.lab.bench.report import Row
from nanovllm.offline.text import own_chats, pieces

# Tokens of a text; and the seed of the chats, far from the seeds of those on which a model was
# calibrated.
LENGTH = 512
SEED = 1_000_000


def documentation() -> str:
    """Text that every Python has: every second topic of its reference."""
    topics = importlib.import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name] for name in sorted(topics)[1::2])


@torch.inference_mode()
def logprobs(llm: LLM, token_ids: list[int]) -> Tensor:
    """The log-probability of every token at each position but the first, `[tokens - 1, vocab_size]`
    float32."""
    model = cast(Engine, llm.engine.core).runner.model
    seen = list[Tensor]()
    hook = model.register_forward_hook(lambda module, inputs, hidden: seen.append(hidden.clone()))
    llm.generate(
        {"prompt_token_ids": token_ids}, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False
    )
    hook.remove()
    return model.compute_logits(torch.cat(seen)[: len(token_ids) - 1]).float().log_softmax(-1)


def compare(title: str, engine: LLM, baseline: LLM, texts: list[list[int]]) -> Row:
    """The row of one kind of text. KL is the divergence of the engine's distribution from the
    baseline's, in nats per token."""
    sums = torch.zeros(4, dtype=torch.float64)
    count = sum(map(len, texts)) - len(texts)
    for text in texts:
        ours = logprobs(engine, text)
        theirs = logprobs(baseline, text)
        targets = torch.tensor(text[1:])[:, None]
        divergence = theirs.exp() * (theirs - ours)
        is_same = ours.argmax(-1) == theirs.argmax(-1)
        found = -ours.gather(1, targets), -theirs.gather(1, targets), divergence, is_same
        sums += torch.stack([each.sum() for each in found])
    loss, baseline_loss, divergence, same = (sums / count).tolist()
    row = {
        "table": "Quality",
        "text": title,
        "tokens": count,
        "perplexity": exp(loss),
        "baseline": exp(baseline_loss),
    }
    difference = 100 * (exp(loss - baseline_loss) - 1)
    return row | {"difference %": difference, "mean KL": divergence, "same top-1 %": 100 * same}


def quality(options: dict[str, Any], baseline_options: dict[str, Any], samples: int) -> list[Row]:
    """Compare an engine with another one, by their settings, on documentation and on chats that the
    second one's model writes.

    Args:
        samples: texts of each kind.
    """
    engine, baseline = (
        LLM(**each | {"enable_prefix_caching": False}) for each in (options, baseline_options)
    )
    length = min(LENGTH, baseline.engine.core.limits.max_request_tokens - 1)
    texts = {
        "Python's documentation": pieces(documentation(), baseline.get_tokenizer(), samples, length)
    }
    texts["chats"] = own_chats(baseline, samples, length, SEED)
    return [compare(title, engine, baseline, each) for title, each in texts.items()]
