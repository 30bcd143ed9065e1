"""Samples on which an EAGLE-3 head is trained: answers that the target writes itself, or a file
that is used unchanged."""

from __future__ import annotations

import gc
import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from nanovllm.checkpoint.weights import save_tensors
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.engine.llm import LLM
from nanovllm.offline.text import pieces, user_turn
from nanovllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovllm.offline.eagle_command import TrainingRecipe

USER_TOKENS = 64  # at most, of a turn that the model writes for the user
BLOCK_SIZE = 16
# By device: concurrent requests of the engine, and tokens per step.
MAX_NUM_SEQS = {"cpu": 64, "cuda": 1024}
MAX_NUM_TOKENS = {"cpu": 2048, "cuda": 16384}


class Sample(NamedTuple):
    """A prompt, and the answer to learn.

    Attributes:
        greedy: the model chose the most likely token each time.
    """

    prompt: list[int]
    answer: list[int]
    greedy: bool


@dataclass
class Samples:
    """Token sequences, packed one after another.

    Attributes:
        token_ids: `[num_tokens]` int64.
        lengths: `[num_samples]` int64.
        starts: `[num_samples]` int64, the number of a sample's first tokens that are a prompt.
        greedy: `[num_samples]` bool, see `Sample`. The model drew the others at temperature 0.7.
    """

    token_ids: Tensor
    lengths: Tensor
    starts: Tensor
    greedy: Tensor

    @classmethod
    def pack(cls, samples: list[Sample]) -> Samples:
        """Pack samples, without those whose answers have one or two tokens.

        Raises:
            ValueError: fewer than two are left.
        """
        samples = [sample for sample in samples if len(sample.answer) > 2]
        if len(samples) < 2:
            mistake = "there are not even two samples to train on"
            raise ValueError(f"{mistake}: raise num_samples, sample_length or time_limit")
        return cls(
            token_ids=torch.tensor(
                [token for each in samples for token in each.prompt + each.answer]
            ),
            lengths=torch.tensor([len(each.prompt) + len(each.answer) for each in samples]),
            starts=torch.tensor([len(each.prompt) for each in samples]),
            greedy=torch.tensor([each.greedy for each in samples]),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def to(self, device: torch.device) -> Samples:
        """Return a copy on a device."""
        return Samples(**{name: tensor.to(device) for name, tensor in vars(self).items()})

    @property
    def offsets(self) -> Tensor:
        """Index of each sample's first token in `token_ids`, `[num_samples]` int64."""
        return self.lengths.cumsum(0) - self.lengths

    @property
    def answers(self) -> Tensor:
        """Indices in `token_ids` of all tokens of answers, `[num_answer_tokens]` int64."""
        within = torch.arange(len(self.token_ids)) - self.offsets.repeat_interleave(self.lengths)
        return (within >= self.starts.repeat_interleave(self.lengths)).nonzero()[:, 0]


def load_samples(
    model: str, folder: Path, recipe: TrainingRecipe, device: str, deadline: float
) -> Samples:
    """Return the samples that an earlier run has left in a folder; otherwise make them, and leave
    them there; see `make_samples`."""
    file = folder / "samples.safetensors"
    if not file.exists():
        made = vars(make_samples(model, recipe, device, deadline))
        gc.collect()  # the engine's memory is needed
        save_tensors(made | {"token_ids": made["token_ids"].int()}, file)
    found = load_file(file)
    return Samples(**found | {"token_ids": found["token_ids"].long()})


def make_samples(model: str, recipe: TrainingRecipe, device: str, deadline: float) -> Samples:
    """Let the engine write chats, or the answers of the chats in a file; or cut a text into pieces.

    Args:
        deadline: in seconds of `time.monotonic`, after which the engine stops writing.
    """
    llm = writing_engine(model, recipe.sample_length, device)
    if recipe.data is None:
        turns_deadline = time.monotonic() + 0.25 * (deadline - time.monotonic())
        prompts = user_turns(llm, recipe, turns_deadline)
        return Samples.pack(answered(llm, prompts, recipe, deadline))
    text = Path(recipe.data).read_text("utf-8", "replace")
    if text.lstrip().startswith("{"):
        lines = [line for line in text.splitlines() if line.strip()]
        prompts = [encode_chat(llm.get_tokenizer(), line) for line in lines]
        return Samples.pack(answered(llm, prompts[: recipe.num_samples], recipe, deadline))
    cut = pieces(text, llm.get_tokenizer(), recipe.num_samples, recipe.sample_length)
    return Samples.pack([Sample(piece[:1], piece[1:], greedy=False) for piece in cut])


def writing_engine(model: str, sample_length: int, device: str) -> LLM:
    """Return an engine that runs as many samples simultaneously as the device takes."""
    max_num_seqs = MAX_NUM_SEQS[device]
    return LLM(
        model,
        device=device,
        max_model_len=sample_length,
        num_kv_blocks=max_num_seqs * (sample_length // BLOCK_SIZE + 2),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=MAX_NUM_TOKENS[device],
        block_size=BLOCK_SIZE,
    )


def answered(
    llm: LLM, prompts: list[list[int]], recipe: TrainingRecipe, deadline: float
) -> list[Sample]:
    """Let the engine answer prompts that leave room for an answer: every second one greedily, and
    the others at temperature 0.7."""
    length = recipe.sample_length
    prompts = [prompt for prompt in prompts if len(prompt) <= length - 4]
    greedy = [i % 2 == 0 for i in range(len(prompts))]
    params = [
        # The engine lowers `max_tokens` to the room that is left.
        SamplingParams(
            temperature=0.0 if is_greedy else 0.7, seed=recipe.seed + i, max_tokens=length
        )
        for i, is_greedy in enumerate(greedy)
    ]
    answers = complete(llm, prompts, params, "Writing answers", deadline)
    return [
        Sample(prompt, answer, is_greedy)
        for prompt, answer, is_greedy in zip(prompts, answers, greedy, strict=True)
    ]


def encode_chat(tokenizer: Tokenizer, line: str) -> list[int]:
    """Return the tokens of a chat, up to the model's turn. Leave out an answer at the end of the
    chat: the head learns the model's own.

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
    """Return prompts that end where the model's turn begins. The model was taught chats, so it can
    also write the user's turn, if the prompt ends where that turn begins (Magpie: Xu et al. 2024,
    arXiv 2406.08464). A model without a chat template continues its own beginnings of texts.
    """
    opening, closing = user_turn(llm.get_tokenizer())
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
    """Return the tokens with which the engine continues each prompt. This is `LLM.generate` without
    the text, which takes more of Python's time than everything else; and requests that have not
    ended at the deadline are aborted, and keep the tokens that they have."""
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
