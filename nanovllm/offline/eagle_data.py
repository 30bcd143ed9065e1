"""What an EAGLE-3 head is trained on: the target's own answers, and the hidden states that it had
while it wrote them."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from nanovllm.attention.backends import get_backend
from nanovllm.attention.base import (
    AttentionMetadata,
    ForwardContext,
    forward_context,
    kv_cache_shape,
)
from nanovllm.checkpoint.weights import save_tensors
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.engine.llm import LLM
from nanovllm.models.eagle import AuxHiddenStates, default_aux_layers
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.offline.text import PLACEHOLDER, pieces
from nanovllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovllm.offline.eagle_command import TrainingRecipe

USER_TOKENS = 64  # at most, of a turn that the model writes for the user
BLOCK_SIZE = 16
# By device: requests at a time, and tokens in a forward pass.
SEQS = {"cpu": 64, "cuda": 1024}
TOKENS = {"cpu": 2048, "cuda": 16384}


@dataclass
class Samples:
    """Token sequences, packed one after another.

    Attributes:
        token_ids: `[num_tokens]` int64.
        lengths: `[num_samples]` int64.
        starts: `[num_samples]` int64, the number of a sample's first tokens that are a prompt.
        greedy: `[num_samples]` bool: the model chose the likeliest token each time; it drew the
            others at temperature 0.7.
    """

    token_ids: Tensor
    lengths: Tensor
    starts: Tensor
    greedy: Tensor

    @classmethod
    def of(cls, pairs: list[tuple[list[int], list[int], bool]]) -> Samples:
        """From prompts, answers, and whether they are greedy. Leaves out answers of one or two
        tokens.

        Raises:
            ValueError: fewer than two are left.
        """
        pairs = [pair for pair in pairs if len(pair[1]) > 2]
        if len(pairs) < 2:
            mistake = "there are not even two samples to train on"
            raise ValueError(f"{mistake}: raise num_samples, sample_length or time_limit")
        token_ids = torch.tensor(
            [token for prompt, answer, _ in pairs for token in prompt + answer]
        )
        lengths, starts = torch.tensor(
            [[len(prompt + answer), len(prompt)] for prompt, answer, _ in pairs]
        ).unbind(1)
        return cls(
            token_ids,
            lengths.clone(),
            starts.clone(),
            torch.tensor([greedy for *_, greedy in pairs]),
        )

    @property
    def offsets(self) -> Tensor:
        """`[num_samples]` int64: where each begins in `token_ids`."""
        return self.lengths.cumsum(0) - self.lengths

    @property
    def answers(self) -> Tensor:
        """The places in `token_ids` of all tokens of answers."""
        within = torch.arange(len(self.token_ids)) - self.offsets.repeat_interleave(self.lengths)
        return (within >= self.starts.repeat_interleave(self.lengths)).nonzero()[:, 0]


def load_samples(
    model: str, folder: Path, recipe: TrainingRecipe, device: str, deadline: float
) -> Samples:
    """The samples that an earlier run has left in a folder, or new ones, which are left there; see
    `make_samples`."""
    file = folder / "samples.safetensors"
    if not file.exists():
        made = vars(make_samples(model, recipe, device, deadline))
        gc.collect()  # the engine's memory is needed
        save_tensors(made | {"token_ids": made["token_ids"].int()}, file)
    found = load_file(file)
    return Samples(**found | {"token_ids": found["token_ids"].long()})


def make_samples(model: str, recipe: TrainingRecipe, device: str, deadline: float) -> Samples:
    """Let the engine write chats, or the answers of chats in a file; or cut a text into pieces.

    Args:
        deadline: in seconds of `time.monotonic`, after which it takes what there is.
    """
    length = recipe.sample_length
    seqs = SEQS[device]
    blocks = seqs * (length // BLOCK_SIZE + 2)
    llm = LLM(
        model,
        device=device,
        max_model_len=length,
        num_kv_blocks=blocks,
        max_num_seqs=seqs,
        max_num_batched_tokens=TOKENS[device],
        block_size=BLOCK_SIZE,
    )
    tokenizer = llm.get_tokenizer()
    text = Path(recipe.data).read_text("utf-8", "replace") if recipe.data else ""
    if recipe.data is None:
        prompts = user_turns(llm, recipe, time.monotonic() + 0.25 * (deadline - time.monotonic()))
    elif text.lstrip().startswith("{"):
        prompts = [encode_chat(tokenizer, line) for line in text.splitlines() if line.strip()][
            : recipe.num_samples
        ]
    else:
        cut = pieces(text, tokenizer, recipe.num_samples, length)
        return Samples.of([(piece[:1], piece[1:], False) for piece in cut])
    prompts = [prompt for prompt in prompts if len(prompt) <= length - 4]
    greedy = [i % 2 == 0 for i in range(len(prompts))]
    common = partial(SamplingParams, max_tokens=length)  # and no more than there is room for
    params = [
        common(temperature=0.0 if its else 0.7, seed=recipe.seed + i)
        for i, its in enumerate(greedy)
    ]
    answers = complete(llm, prompts, params, "Writing answers", deadline)
    return Samples.of(list(zip(prompts, answers, greedy, strict=True)))


def encode_chat(tokenizer: Tokenizer, line: str) -> list[int]:
    """The tokens of a chat, up to where the model is to answer. An answer that it ends with is left
    out: the head learns the model's.

    Args:
        line: {"messages": [...]}.
    """
    try:
        chat = json.loads(line)["messages"]
        asked = chat[:-1] if chat[-1]["role"] == "assistant" else chat
        return tokenizer.encode(tokenizer.apply_chat_template(asked), add_special_tokens=False)
    except (KeyError, IndexError, TypeError, AttributeError, json.JSONDecodeError) as error:
        form = '{"messages": [{"role": "user", "content": "..."}]}'
        raise ValueError(
            f"each line of the data must be a chat, {form}; got {line[:80]!r}"
        ) from error


def user_turns(llm: LLM, recipe: TrainingRecipe, deadline: float) -> list[list[int]]:
    """Prompts that end where the model is to answer: the model was taught chats, so it can also
    write what a user says, if the prompt ends where the user begins to speak (Magpie: Xu et al.
    2024, arXiv 2406.08464). A model without a chat template continues its own beginnings of texts.
    """
    tokenizer = llm.get_tokenizer()
    messages = [{"role": "user", "content": PLACEHOLDER}]
    chat = tokenizer.apply_chat_template(messages) if tokenizer.chat_templates else PLACEHOLDER
    before, _, after = chat.partition(PLACEHOLDER)
    opening = tokenizer.encode(before, add_special_tokens=not before) or [0]
    closing = tokenizer.encode(after, add_special_tokens=False)
    limit = max(8, min(USER_TOKENS, recipe.sample_length // 2 - len(opening + closing)))
    common = partial(SamplingParams, temperature=1.0, top_p=0.95, max_tokens=limit)
    params = [common(seed=recipe.seed + i) for i in range(recipe.num_samples)]
    turns = complete(llm, [opening] * len(params), params, "Writing questions", deadline)
    ends = set(closing[:1])  # what ends the turn is the first token of what comes after it
    return [
        opening + [token for token in turn if token not in ends] + closing for turn in turns if turn
    ]


def complete(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], what: str, deadline: float
) -> list[list[int]]:
    """The tokens with which the engine continues each prompt. As `LLM.generate`, but without the
    text, which takes more of Python's time than all the rest; and when the deadline has passed, it
    returns what there is."""
    core = llm.engine.core
    process = llm.engine.input_processor.process
    answers = [list[int]() for _ in prompts]
    for i, (prompt, its) in enumerate(zip(prompts, params, strict=True)):
        core.add_request(process(str(i), {"prompt_token_ids": prompt}, its)[1][0])
    unfinished = set(range(len(prompts)))
    gc.freeze()  # the collector need not visit the model between steps
    with tqdm(total=len(prompts), desc=what, unit="chat", dynamic_ncols=True) as bar:
        while core.has_unfinished:
            for i in unfinished if time.monotonic() > deadline else ():
                core.abort_request(str(i))
            for output in core.step():
                answers[int(output.request_id)] += output.new_token_ids
                if output.finish_reason is not None:
                    unfinished.discard(int(output.request_id))
                    bar.update()
    gc.unfreeze()
    return answers


@torch.inference_mode()
def target_states(
    target: LlamaForCausalLM, samples: Samples, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Run the target over the samples, some thousand tokens at a time.

    Yields: the residual streams that it collects and its last hidden states, side by side,
        `[tokens, 4 * hidden_size]`; and its likeliest next tokens, `[tokens]`.
    """
    config = target.config
    longest = int(samples.lengths.max())
    width = -(-longest // BLOCK_SIZE)  # blocks of each sample
    groups = torch.arange(len(samples.lengths)).split(max(1, TOKENS[device.type] // longest))
    # Once a layer has attended, its KV is not needed any more: all layers share one cache.
    shape = kv_cache_shape(len(groups[0]) * width, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    caches = [
        torch.zeros(shape, dtype=target.model.norm.weight.dtype, device=device)
    ] * config.num_layers
    backend = get_backend("auto", device, config.head_dim)
    within = torch.arange(longest)
    plain_calls = target.model.layer_calls
    aux = AuxHiddenStates(target.model, default_aux_layers(config.num_layers))
    for group in tqdm(groups, desc="Computing hidden states", unit="batch", dynamic_ncols=True):
        sizes = samples.lengths[group]
        first = int(samples.offsets[group[0]])
        tables = torch.arange(len(group) * width, dtype=torch.int32).view(-1, width)
        slots = torch.arange(len(group))[:, None] * width * BLOCK_SIZE + within
        real = within < sizes[:, None]
        starts = F.pad(sizes.cumsum(0), (1, 0)).int()
        metadata = AttentionMetadata(
            query_start_loc=starts.to(device),
            seq_lens=sizes.int().to(device),
            block_tables=tables.to(device),
            slot_mapping=slots[real].to(device),
            max_query_len=int(sizes.max()),
            max_seq_len=int(sizes.max()),
        )
        token_ids = samples.token_ids[first : first + int(sizes.sum())].to(device)
        with forward_context(ForwardContext(backend, caches, metadata)):
            target.model.layer_calls = aux.layer_calls
            hidden = target(token_ids, within.expand(len(group), -1)[real].to(device))
            target.model.layer_calls = plain_calls
        yield (torch.cat([*aux.states, hidden], 1), target.compute_logits(hidden).argmax(-1))
