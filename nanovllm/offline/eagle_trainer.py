"""Trains an EAGLE-3 head on a target model's hidden states, and evaluates its drafts."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from tqdm import tqdm

from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.offline.eagle_data import Samples, target_states
from nanovllm.offline.eagle_head import DraftHead

if TYPE_CHECKING:
    from nanovllm.offline.eagle_command import TrainingRecipe

# Held-out samples for the evaluation: their share, and their largest number.
HELD_OUT = 0.05
MOST_HELD_OUT = 128
LONGEST_DRAFT = 5  # longest draft in the evaluation
SAVE_SECONDS = 60
DECAY = 0.8  # factor between the weights of consecutive steps in the loss


class Trainer:
    """Data, head and optimizer.

    Attributes:
        draft_to_target: `[draft_vocab_size]` int64, rising: the most frequent tokens of the
            answers.
        states: `[num_tokens, 4 * hidden_size]`, the target's residual streams after three of its
            layers, and its last hidden states.
        best: `[num_tokens]` int64, the index in the draft vocabulary of the target's most likely
            next token; -1 if the vocabulary does not contain it.
        scale: `[3 * hidden_size]`, factors that give all inputs of `fc` the same size. The saved
            `fc` includes them.
        done: number of finished batches.
    """

    def __init__(
        self,
        target: LlamaForCausalLM,
        samples: Samples,
        recipe: TrainingRecipe,
        device: torch.device,
    ) -> None:
        config = target.config
        self.target = target
        self.samples = samples
        self.recipe = recipe
        self.device = device
        order = torch.randperm(
            len(samples.lengths), generator=torch.Generator().manual_seed(recipe.seed)
        )
        count = min(MOST_HELD_OUT, math.ceil(HELD_OUT * len(order)))
        self.held_out = order[:count]
        self.training = order[count:]
        self.done = 0
        frequency = torch.bincount(samples.token_ids[samples.answers], minlength=config.vocab_size)
        most_frequent = frequency.argsort(descending=True, stable=True)[: recipe.draft_vocab_size]
        self.draft_to_target = most_frequent.sort().values.to(device)
        self.target_head = target.lm_head.weight[self.draft_to_target]
        target.pack_weights()
        states, best = zip(*target_states(target, samples, device), strict=True)
        target_to_draft = torch.full((config.vocab_size,), -1, device=device)
        target_to_draft[self.draft_to_target] = torch.arange(
            len(self.draft_to_target), device=device
        )
        self.states = torch.cat(states)
        self.best = target_to_draft[torch.cat(best)]
        self.token_ids, self.offsets, self.lengths, self.starts = (
            tensor.to(device)
            for tensor in (samples.token_ids, samples.offsets, samples.lengths, samples.starts)
        )
        some = samples.answers[torch.randint(len(samples.answers), (8192,))].to(device)
        self.scale = (
            self.states[some, : 3 * config.hidden_size]
            .float()
            .square()
            .mean(0)
            .clamp(min=1e-12)
            .rsqrt()
        )
        torch.manual_seed(recipe.seed)
        positions = recipe.sample_length + max(recipe.steps, LONGEST_DRAFT)
        self.head = DraftHead(config, len(self.draft_to_target), positions, device)
        with torch.no_grad():  # the target's own head, with smaller logits for the start
            self.head.weights["lm_head.weight"].copy_(self.target_head)
            self.head.weights["norm.weight"].copy_(0.3 * target.model.norm.weight)
        self.optimizer = torch.optim.AdamW(
            self.head.weights.values(),
            lr=recipe.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.01,
            fused=True,
        )
        mixed = self.target_head.dtype == torch.bfloat16
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=mixed)

    def batches(self, epoch: int) -> list[Tensor]:
        """Return the sample indices of each batch. The samples of a batch have similar lengths."""
        generator = torch.Generator().manual_seed(self.recipe.seed + epoch)
        order = self.training[torch.randperm(len(self.training), generator=generator)]
        size = self.recipe.batch_size
        chunks = (
            chunk[self.samples.lengths[chunk].argsort()].split(size)
            for chunk in order.split(32 * size)
        )
        found = [batch for chunk in chunks for batch in chunk]
        return [found[i] for i in torch.randperm(len(found), generator=generator).tolist()]

    def drafts(
        self, numbers: Tensor, steps: int, free: bool
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Draft at each position of some samples at which the next token is part of the answer.

        Args:
            numbers: the samples' indices, on the CPU.
            free: each step receives the token that the previous step has predicted; otherwise the
                true token.

        Yields:
            For each step, logits `[rows, draft_vocab_size]`; the indices of the predicted tokens in
            `token_ids`, `[rows]`; and whether they are before the end of the sample, `[rows]`.
        """
        within = torch.arange(int(self.samples.lengths[numbers].max()), device=self.device)
        numbers = numbers.to(self.device)
        last = len(self.token_ids) - 1
        starts = self.starts[numbers, None]
        ends = self.lengths[numbers, None]
        rows = ((within >= starts - 1) & (within < ends - 2)).flatten().nonzero()[:, 0]
        places = self.offsets[numbers, None] + within
        hidden = self.head.linear(
            "fc", self.states[places.clamp(max=last), : len(self.scale)] * self.scale
        )
        token_ids = self.token_ids[(places + 1).clamp(max=last)]
        cache = list[tuple[Tensor, Tensor]]()
        for step in range(steps):
            embedded = self.target.model.embed_tokens(token_ids.flatten()).unflatten(
                0, token_ids.shape
            )
            hidden = self.head.step(embedded, hidden, cache)
            logits = self.head.linear("lm_head", self.head.norm("norm", hidden.flatten(0, 1)[rows]))
            guessed = (places + 2 + step).clamp(max=last)
            yield logits, guessed.flatten()[rows], (within + 2 + step < ends).flatten()[rows]
            if free:
                token_ids.view(-1)[rows] = self.draft_to_target[logits.argmax(-1)]
            else:
                token_ids = self.token_ids[guessed]

    def loss(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of a batch, and the share of first predictions that are the target's most
        likely token."""
        total = torch.zeros((), device=self.device)
        right = []
        cap = self.target.config.logit_soft_cap
        for step, (logits, places, is_there) in enumerate(
            self.drafts(numbers, self.recipe.steps, free=False)
        ):
            # The target's distribution of a token is at the position before it. Skip tokens that
            # are not in the draft vocabulary: the head cannot predict them.
            best = self.best[places - 1]
            counts = is_there & (best >= 0)
            with torch.no_grad():
                scores = (self.states[places - 1, len(self.scale) :] @ self.target_head.T).float()
                p = (scores if not cap else cap * (scores / cap).tanh()).softmax(-1)
            logits = logits.float()
            errors = logits.logsumexp(-1) - (p * logits).sum(-1)  # cross-entropy
            total = total + DECAY**step * (errors * counts).sum() / counts.sum().clamp(min=1)
            right.append((logits.argmax(-1) == best).float().mean())
        return total, right[0]

    def train(self, until: float, file: Path) -> None:
        """Train for the recipe's epochs, starting after the last batch of the checkpoint.

        Args:
            until: when to stop at the latest, in seconds of `time.monotonic`. The learning rate
                falls to its minimum by then.
            file: the checkpoint, which is written once per minute.
        """
        recipe = self.recipe
        weights = list(self.head.weights.values())
        begin = time.monotonic()
        saved = begin
        batches = list[Tensor]()
        per_epoch = len(self.batches(0))
        total = recipe.epochs * per_epoch
        with tqdm(
            total=total, initial=self.done, desc="Training", unit="batch", dynamic_ncols=True
        ) as bar:
            while self.done < total and (now := time.monotonic()) < until:
                epoch, number = divmod(self.done, per_epoch)
                batches = batches if batches and number else self.batches(epoch)
                progress = max(self.done / total, (now - begin) / (until - begin))
                warm_up = min(1, (self.done + 1) / min(100, 1 + total // 20))
                self.optimizer.param_groups[0]["lr"] = (
                    recipe.learning_rate * warm_up * (0.51 + 0.49 * math.cos(math.pi * progress))
                )
                with self.autocast:
                    loss, right = self.loss(batches[number])
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(weights, 0.5)
                self.optimizer.step()
                self.done += 1
                if self.done % 10 == 0:  # reading the loss synchronises with the GPU
                    bar.set_postfix(
                        loss=f"{loss.item():.2f}", acceptance=f"{right.item():.3f}", refresh=False
                    )
                bar.update()
                if now - saved > SAVE_SECONDS:
                    self.save_checkpoint(file)
                    saved = now
        self.save_checkpoint(file)

    def save_checkpoint(self, file: Path) -> None:
        """Write a checkpoint for `load_checkpoint`."""
        state = {
            "head": self.head.weights,
            "optimizer": self.optimizer.state_dict(),
            "done": self.done,
        }
        torch.save(
            state | {"scale": self.scale, "draft_to_target": self.draft_to_target},
            new := file.with_suffix(".new"),
        )
        new.replace(file)

    @torch.no_grad()
    def load_checkpoint(self, file: Path) -> None:
        """Resume from a checkpoint.

        Raises:
            ValueError: the checkpoint was made with different flags.
        """
        state = torch.load(file, map_location=self.device, weights_only=True)
        if not torch.equal(state["draft_to_target"], self.draft_to_target):
            mistake = f"'{file.parents[1]}' has the head of a run with other flags"
            raise ValueError(f"{mistake}: use these settings, or name another folder")
        for name, weight in self.head.weights.items():
            weight.copy_(state["head"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done = state["done"]
        self.scale = state["scale"]

    @torch.no_grad()
    def evaluate(self) -> dict[str, dict[str, list[float]]]:
        """Draft for held-out samples.

        Returns:
            For greedy and for drawn samples: by position, the share of draft tokens that are
            accepted with all tokens before them; and by length of the draft, the tokens per step
            of the target.
        """
        found: dict[str, dict[str, list[float]]] = {}
        for name, greedy in (("temperature 0", True), ("temperature 0.7", False)):
            numbers = self.held_out[self.samples.greedy[self.held_out] == greedy]
            runs = list[Tensor]()
            for batch in numbers.split(self.recipe.batch_size) if len(numbers) else ():
                with self.autocast:
                    hits = [
                        (self.draft_to_target[logits.argmax(-1)] == self.token_ids[places])
                        & is_there
                        for logits, places, is_there in self.drafts(batch, LONGEST_DRAFT, free=True)
                    ]
                counts = self.samples.lengths[batch] - self.samples.starts[batch] - 1
                runs += torch.stack(hits, 1).long().cumprod(1).cpu().split(counts.tolist())
            if runs:
                shares = torch.cat(runs).float().mean(0).tolist()
                lengths = [tokens_per_step(runs, k) for k in range(1, LONGEST_DRAFT + 1)]
                found[name] = {
                    "acceptance": [round(share, 4) for share in shares],
                    "tokens per step": lengths,
                }
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Return the head's tensors to save: in bfloat16, or with `quantize` most matrices in 8
        bits."""
        found: dict[str, Tensor] = {}
        for name, weight in self.head.weights.items():
            tensor = (weight.detach() * (self.scale if name == "fc.weight" else 1)).cpu()
            # The columns of `fc` differ too much in size to share a scale.
            if self.recipe.quantize == "int8" and tensor.ndim == 2 and name != "fc.weight":
                scale = tensor.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
                found |= {name: (tensor / scale).round().to(torch.int8), f"{name}_scale": scale}
            else:
                found[name] = tensor.to(torch.bfloat16)
        ids = self.draft_to_target.cpu()
        known = torch.zeros(self.target.config.vocab_size, dtype=torch.bool).index_fill_(
            0, ids, True
        )
        return found | {"d2t": ids - torch.arange(len(ids)), "t2d": known}


def tokens_per_step(samples: list[Tensor], k: int) -> float:
    """Return the tokens per step of the target with drafts of `k` tokens: a draft of which the
    target accepts n tokens yields n + 1 tokens, and the next draft starts after them.

    Args:
        samples: for each sample, `[rows, at least k]`: 1 where a draft token would be accepted with
            all tokens before it.
    """
    steps = tokens = 0
    for accepted in (sample[:, :k].sum(1).tolist() for sample in samples):
        place = 0
        while place < len(accepted):
            steps = steps + 1
            place = place + 1 + accepted[place]
        tokens += place
    return round(tokens / max(1, steps), 3)
