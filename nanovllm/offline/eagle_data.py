"""What an EAGLE-3 head is trained on: the target's own answers, and the hidden states that it had while it wrote them."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from nanovllm.attention.base import AttentionMetadata, ForwardContext, forward_context, get_backend, kv_cache_shape
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.engine.llm import LLM
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.offline.eagle_command import TrainingRecipe
from nanovllm.offline.text import PLACEHOLDER, pieces

USER_TOKENS = 64  # of a turn at most that the model writes for the user
BLOCK_SIZE = 16
ROWS = {"cpu": 2048, "cuda": 16384}  # tokens in a forward pass of the target, whose logits are as wide as its vocabulary


@dataclass
class Samples:
    """Token sequences, packed one after another. The order of all of them is random.

    Attributes:
        token_ids: `[num_tokens]` int64.
        lengths: `[num_samples]` int64.
        starts: `[num_samples]` int64, the number of a sample's first tokens that are a prompt.
        greedy: `[num_samples]` bool: the model chose the likeliest token each time; it drew the others at temperature 0.7.
    """

    token_ids: Tensor
    lengths: Tensor
    starts: Tensor
    greedy: Tensor

    @classmethod
    def of(cls, pairs: list[tuple[list[int], list[int], bool]]) -> Samples:
        """From prompts, answers, and whether they are greedy."""
        pairs = [(prompt, answer, greedy) for prompt, answer, greedy in pairs if len(answer) > 2]
        if len(pairs) < 2:
            raise ValueError("there are not even two samples to train on: raise num_samples, sample_length or time_limit")
        token_ids = torch.tensor([token for prompt, answer, _ in pairs for token in prompt + answer])
        sizes = torch.tensor([[len(prompt) + len(answer), len(prompt)] for prompt, answer, _ in pairs])
        return cls(token_ids, *sizes.T.contiguous(), torch.tensor([greedy for _, _, greedy in pairs]))

    @property
    def offsets(self) -> Tensor:
        """`[num_samples]` int64: where each begins in `token_ids`."""
        return self.lengths.cumsum(0) - self.lengths

    @property
    def answers(self) -> Tensor:
        """The places in `token_ids` of all tokens of answers."""
        within = torch.arange(len(self.token_ids)) - self.offsets.repeat_interleave(self.lengths)
        return (within >= self.starts.repeat_interleave(self.lengths)).nonzero()[:, 0]


def load_samples(model: str, folder: Path, recipe: TrainingRecipe, deadline: float) -> Samples:
    """The samples that a run before this one has left in a folder, or new ones, which are left there."""
    file = folder / "samples.safetensors"
    if not file.exists():
        made = vars(make_samples(model, recipe, deadline))
        save_file(made | {"token_ids": made["token_ids"].int()}, file)
    found = load_file(file)
    return Samples(**found | {"token_ids": found["token_ids"].long()})


def make_samples(model: str, recipe: TrainingRecipe, deadline: float) -> Samples:
    """Let the engine write chats, or the answers to the user's.

    Args:
        deadline: in seconds of `time.monotonic`, after which it begins no further chats.
    """
    on_gpu, length = recipe.device == "cuda", recipe.sample_length
    seqs = 1024 if on_gpu else 64
    blocks = seqs * (-(-length // BLOCK_SIZE) + 1)
    llm = LLM(
        model, device=recipe.device, max_model_len=length, max_num_seqs=seqs, num_kv_blocks=blocks,
        max_num_batched_tokens=16384 if on_gpu else 2048, block_size=BLOCK_SIZE,
    )  # fmt: skip
    tokenizer, text = llm.get_tokenizer(), Path(recipe.data).read_text("utf-8", "replace") if recipe.data else ""
    if recipe.data and not text.lstrip().startswith("{"):
        return Samples.of([(piece[:1], piece[1:], False) for piece in pieces(text, tokenizer, recipe.num_samples, length)])
    if recipe.data:
        chats = [encode_chat(tokenizer, json.loads(line)["messages"]) for line in text.splitlines() if line.strip()]
        prompts = chats[: recipe.num_samples]
    else:
        now = time.monotonic()
        prompts = user_turns(llm, recipe, now + (deadline - now) / 4)
    prompts = [prompt for prompt in prompts if len(prompt) <= length - 4]
    greedy = [i % 2 == 0 for i in range(len(prompts))]
    common = partial(SamplingParams, max_tokens=length)  # and no more than there is room for
    params = [common(temperature=0.0 if its else 0.7, seed=recipe.seed + i) for i, its in enumerate(greedy)]
    answers = complete(llm, prompts, params, "Writing answers", deadline)
    del llm
    gc.collect()  # the engine's memory is needed
    return Samples.of(list(zip(prompts, answers, greedy, strict=True)))


def encode_chat(tokenizer, messages: list[dict[str, str]]) -> list[int]:
    """The tokens of a chat, up to where the model is to answer; a last message that is an answer already is left out."""
    messages = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)


def user_turns(llm: LLM, recipe: TrainingRecipe, deadline: float) -> list[list[int]]:
    """Prompts that end where the model is to answer: the model was taught chats, so it can also write what a user says, if the prompt
    ends where the user begins to speak (Magpie: Xu et al. 2024, arXiv 2406.08464). A model without a chat template continues its own
    beginnings of texts."""
    tokenizer = llm.get_tokenizer()
    messages = [{"role": "user", "content": PLACEHOLDER}]
    chat = tokenizer.apply_chat_template(messages) if tokenizer.chat_templates else PLACEHOLDER
    before, _, after = chat.partition(PLACEHOLDER)
    opening = tokenizer.encode(before, add_special_tokens=not before) or [0]
    closing = tokenizer.encode(after, add_special_tokens=False)
    limit = max(8, min(USER_TOKENS, recipe.sample_length // 2 - len(opening) - len(closing)))
    common = partial(SamplingParams, temperature=1.0, top_p=0.95, max_tokens=limit)
    params = [common(seed=recipe.seed + i) for i in range(recipe.num_samples)]
    turns = complete(llm, [opening] * len(params), params, "Writing questions", deadline)
    ends = set(closing[:1])  # what ends the turn is the first token of what comes after it
    return [opening + [token for token in turn if token not in ends] + closing for turn in turns if turn]


def complete(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], what: str, deadline: float
) -> list[list[int]]:
    """The tokens with which the engine continues each prompt. As `LLM.generate`, but without the text, which costs Python more time than
    all the rest; and when the deadline has passed, it returns what there is."""
    engine, core, answers = llm.engine, llm.engine.core, [list[int]() for _ in prompts]
    for i, (prompt, its) in enumerate(zip(prompts, params, strict=True)):
        [request] = engine.input_processor.process(str(i), {"prompt_token_ids": prompt}, its)[1]
        core.add_request(request)
    unfinished = set(range(len(prompts)))
    with tqdm(total=len(prompts), desc=what, unit="chat", dynamic_ncols=True) as bar:
        while core.has_unfinished:
            if time.monotonic() > deadline:
                for i in unfinished:
                    core.abort_request(str(i))
            for output in core.step():
                answers[int(output.request_id)] += output.new_token_ids
                if output.finish_reason is not None:
                    unfinished.discard(int(output.request_id))
                    bar.update()
    return answers


@torch.inference_mode()
def target_states(target: LlamaForCausalLM, samples: Samples, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Run the target over the samples, some thousand tokens at a time, as it ran when it wrote them.

    Yields: the residual streams that it collects and its last hidden states, side by side, `[tokens, 4 * hidden_size]`; and its
        likeliest next tokens, `[tokens]`.
    """
    config = target.config
    backend = get_backend("auto", device, config.head_dim)
    groups: list[list[int]] = [[]]
    for i, length in enumerate(lengths := samples.lengths.tolist()):
        if groups[-1] and sum(lengths[j] for j in groups[-1]) + length > ROWS[device.type]:
            groups.append([])
        groups[-1].append(i)
    most = max(sum(-(-lengths[i] // BLOCK_SIZE) for i in group) for group in groups)
    # Once a layer has attended, its KV is not needed any more: all layers share one cache.
    shape = kv_cache_shape(most, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    cache = torch.zeros(shape, dtype=target.model.norm.weight.dtype, device=device)
    first = 0
    for group in tqdm(groups, desc="Computing hidden states", unit="batch", dynamic_ncols=True):
        sizes = torch.tensor([lengths[i] for i in group])
        positions = torch.cat([torch.arange(size) for size in sizes.tolist()])
        blocks = -(-sizes // BLOCK_SIZE)
        tables = (blocks.cumsum(0) - blocks)[:, None] + torch.arange(int(blocks.max()))
        slots = tables.clamp(max=most - 1)[:, 0].repeat_interleave(sizes) * BLOCK_SIZE + positions
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        vectors = (starts.int(), sizes.int(), tables.clamp(max=most - 1).int(), slots)
        largest = int(sizes.max())
        metadata = AttentionMetadata(*(vector.to(device) for vector in vectors), largest, largest)
        token_ids = samples.token_ids[first : first + len(positions)].to(device)
        with forward_context(ForwardContext(backend, [cache] * config.num_layers, metadata)):
            hidden = target(token_ids, positions.to(device))
        best = target.compute_logits(hidden).argmax(-1)
        yield torch.cat([*target.model.aux_hidden_states, hidden], 1), best
        first += len(positions)
