"""Trains an EAGLE-3 head on a target model's hidden states."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from tqdm import tqdm

from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.offline.eagle_drafts import DraftStep, SampleDrafter
from nanovllm.offline.eagle_evaluation import LONGEST_DRAFT
from nanovllm.offline.eagle_head import DraftHead
from nanovllm.offline.eagle_samples import Samples
from nanovllm.offline.eagle_targets import TrainingData

if TYPE_CHECKING:
    from nanovllm.offline.eagle_command import TrainingRecipe

# Held-out samples for the evaluation: their share, and their largest number.
HELD_OUT = 0.05
MOST_HELD_OUT = 128
SAVE_SECONDS = 60
DECAY = 0.8  # factor between the weights of consecutive steps in the loss


def split_samples(num_samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the samples to train on, and of those for the evaluation, int64."""
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed))
    count = min(MOST_HELD_OUT, math.ceil(HELD_OUT * num_samples))
    return order[count:], order[:count]


def untrained_drafter(
    target: LlamaForCausalLM, samples: Samples, recipe: TrainingRecipe, device: torch.device
) -> SampleDrafter:
    """Return a drafter whose head begins with random weights, but with the target's output head,
    and with the target's last norm for smaller logits."""
    data = TrainingData.of(target, samples, recipe.draft_vocab_size, device)
    generator = torch.Generator().manual_seed(recipe.seed)
    answers = samples.answers
    some = answers[torch.randint(len(answers), (8192,), generator=generator)].to(device)
    scale = data.aux[some].float().square().mean(0).clamp(min=1e-12).rsqrt()
    max_positions = recipe.sample_length + max(recipe.steps, LONGEST_DRAFT)
    draft_vocab_size = len(data.output_head)
    head = DraftHead(target.config, draft_vocab_size, max_positions, scale, generator)
    with torch.no_grad():
        head.weights["lm_head.weight"].copy_(data.output_head)
        head.weights["norm.weight"].copy_(0.3 * target.model.norm.weight)
    return SampleDrafter(target, head, samples, data)


class Trainer:
    """Trains a drafter's head.

    Args:
        training: indices of the samples to train on, int64.

    Attributes:
        num_done: number of finished batches.
    """

    def __init__(self, drafter: SampleDrafter, training: Tensor, recipe: TrainingRecipe) -> None:
        self.drafter = drafter
        self.head = drafter.head
        self.training = training
        self.recipe = recipe
        self.num_done = 0
        self.optimizer = torch.optim.AdamW(
            self.head.weights.values(),
            lr=recipe.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.01,
            fused=True,
        )

    # ---------------------------------------------------------------- batches

    def train(self, until: float, file: Path) -> None:
        """Train for the recipe's epochs, starting after the last batch of the checkpoint.

        Args:
            until: when to stop at the latest, in seconds of `time.monotonic`. The learning rate
                falls to its minimum by then.
            file: the checkpoint, which is written once per minute.
        """
        begin = time.monotonic()
        saved = begin
        batches = list[Tensor]()
        per_epoch = len(self.batches(0))
        total = self.recipe.epochs * per_epoch
        with tqdm(
            total=total, initial=self.num_done, desc="Training", unit="batch", dynamic_ncols=True
        ) as bar:
            while self.num_done < total and (now := time.monotonic()) < until:
                epoch, number = divmod(self.num_done, per_epoch)
                batches = batches if batches and number else self.batches(epoch)
                progress = max(self.num_done / total, (now - begin) / (until - begin))
                self.optimizer.param_groups[0]["lr"] = self.learning_rate(progress, total)
                loss, acceptance = self.train_batch(batches[number])
                if self.num_done % 10 == 0:  # reading the loss synchronises with the GPU
                    bar.set_postfix(
                        loss=f"{loss.item():.2f}",
                        acceptance=f"{acceptance.item():.3f}",
                        refresh=False,
                    )
                bar.update()
                if now - saved > SAVE_SECONDS:
                    self.save_checkpoint(file)
                    saved = now
        self.save_checkpoint(file)

    def batches(self, epoch: int) -> list[Tensor]:
        """Return the sample indices of each batch. The samples of a batch have similar lengths."""
        generator = torch.Generator().manual_seed(self.recipe.seed + epoch)
        order = self.training[torch.randperm(len(self.training), generator=generator)]
        size = self.recipe.batch_size
        lengths = self.drafter.samples.lengths
        found = [
            batch
            for chunk in order.split(32 * size)
            for batch in chunk[lengths[chunk].argsort()].split(size)
        ]
        return [found[i] for i in torch.randperm(len(found), generator=generator).tolist()]

    def learning_rate(self, progress: float, num_batches: int) -> float:
        """Return the learning rate of the next batch: it rises over the first batches, and falls
        along a cosine.

        Args:
            progress: share of the training that is over.
            num_batches: of the whole training.
        """
        warm_up = min(1, (self.num_done + 1) / min(100, 1 + num_batches // 20))
        cosine = 0.51 + 0.49 * math.cos(math.pi * progress)
        return self.recipe.learning_rate * warm_up * cosine

    # ---------------------------------------------------------------- one batch

    def train_batch(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Train on a batch of samples; see `loss`."""
        with self.drafter.autocast:
            loss, acceptance = self.loss(numbers)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.head.weights.values(), 0.5)
        self.optimizer.step()
        self.num_done += 1
        return loss, acceptance

    def loss(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of a batch of samples, and the share of first predictions that are the
        target's most likely token."""
        data = self.drafter.data
        total = torch.zeros((), device=data.best.device)
        right = []
        for step, draft in enumerate(self.drafter.drafts(numbers, self.recipe.steps, free=False)):
            # The target's distribution of a token is at the position before it. Skip tokens that
            # are not in the draft vocabulary: the head cannot predict them.
            best = data.vocabulary.target_to_draft[data.best[draft.places - 1]]
            counts = draft.is_there & (best >= 0)
            p = self.target_distribution(draft)
            logits = draft.logits.float()
            errors = logits.logsumexp(-1) - (p * logits).sum(-1)  # cross-entropy
            total = total + DECAY**step * (errors * counts).sum() / counts.sum().clamp(min=1)
            right.append((logits.argmax(-1) == best).float().mean())
        return total, right[0]

    @torch.no_grad()
    def target_distribution(self, draft: DraftStep) -> Tensor:
        """Return the target's distributions over the draft vocabulary,
        `[num_rows, draft_vocab_size]` float32."""
        data = self.drafter.data
        scores = (data.hidden[draft.places - 1] @ data.output_head.T).float()
        cap = self.drafter.target.config.logit_soft_cap
        return (scores if not cap else cap * (scores / cap).tanh()).softmax(-1)

    # ---------------------------------------------------------------- checkpoints

    def save_checkpoint(self, file: Path) -> None:
        """Write a checkpoint for `load_checkpoint`."""
        new = file.with_suffix(".new")
        torch.save(
            {
                "head": self.head.weights,
                "scale": self.head.scale,
                "draft_to_target": self.drafter.data.vocabulary.draft_to_target,
                "optimizer": self.optimizer.state_dict(),
                "done": self.num_done,
            },
            new,
        )
        new.replace(file)

    @torch.no_grad()
    def load_checkpoint(self, file: Path) -> None:
        """Resume from a checkpoint.

        Raises:
            ValueError: the checkpoint was made with different flags.
        """
        vocabulary = self.drafter.data.vocabulary
        state = torch.load(file, map_location=self.head.scale.device, weights_only=True)
        if not torch.equal(state["draft_to_target"], vocabulary.draft_to_target):
            mistake = f"'{file.parents[1]}' has the head of a run with other flags"
            raise ValueError(f"{mistake}: use these settings, or name another folder")
        for name, weight in self.head.weights.items():
            weight.copy_(state["head"][name])
        self.head.scale = state["scale"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.num_done = state["done"]
