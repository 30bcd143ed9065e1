"""Trains an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840) for a model, on text that the model writes itself.

The head predicts the token after next: from the target's hidden states at a position, and the token that follows there. Its own
output takes the place of the hidden states for the next guess, and so on. Training runs these steps as drafting does, for all positions
of a batch at once: the paper's training-time test.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from nanovllm.checkpoint.files import UnsupportedModelError, read_json
from nanovllm.checkpoint.hub import resolve_model
from nanovllm.models.config import ModelConfig
from nanovllm.models.eagle import default_aux_layers
from nanovllm.models.llama import LlamaForCausalLM, rotary_table
from nanovllm.models.loader import load_model
from nanovllm.offline.eagle_command import TrainingRecipe
from nanovllm.offline.eagle_data import Samples, load_samples, target_states
from nanovllm.ops.device import choose_device, choose_dtype

HELD_OUT = 0.05  # of the samples, to judge on; at most
MOST_HELD_OUT = 128
LONGEST_DRAFT = 5  # that is judged
SAVE_SECONDS = 60
DECAY = 0.8  # of the weight in the loss, per step
KEPT = ("hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps")


class Norm(nn.RMSNorm):
    """RMSNorm in float32, as its weight is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class DraftHead(nn.Module):
    """The EAGLE-3 head for training: batches of whole sequences, dense attention, and the names of public checkpoints.

    Args:
        config: the target's.
        draft_vocab_size: tokens that it can guess.
        max_positions: longest sequence plus the number of steps.
    """

    def __init__(self, config: ModelConfig, draft_vocab_size: int, max_positions: int) -> None:
        super().__init__()
        hidden, mlp, width = config.hidden_size, config.intermediate_size, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, width
        linear, norm = partial(nn.Linear, bias=False), partial(Norm, hidden, config.rms_norm_eps)
        q, kv = self.heads * width, self.kv_heads * width
        attention = {"q_proj": linear(2 * hidden, q), "k_proj": linear(2 * hidden, kv), "v_proj": linear(2 * hidden, kv)}
        self.fc = linear(3 * hidden, hidden)
        self.midlayer = nn.ModuleDict({
            "input_layernorm": norm(), "hidden_norm": norm(), "post_attention_layernorm": norm(),
            "self_attn": nn.ModuleDict(attention | {"o_proj": linear(q, hidden)}),
            "mlp": nn.ModuleDict({
                "gate_proj": linear(hidden, mlp), "up_proj": linear(hidden, mlp), "down_proj": linear(mlp, hidden),
            }),
        })  # fmt: skip
        self.norm, self.lm_head = norm(), linear(hidden, draft_vocab_size)
        self.register_buffer("cos_sin", rotary_table(config, max_positions), persistent=False)

    def step(self, embedded: Tensor, hidden: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """One draft step at all positions.

        Args:
            embedded: `[batch, length, hidden_size]`, the tokens that follow.
            hidden: `[batch, length, hidden_size]`: at first of the target, through `fc`; then what the step before returned.
            cache: keys and values of the steps before, to which it adds its own.

        Returns: what `logits` takes, and the next step as `hidden`.
        """
        layer: Any = self.midlayer
        x = torch.cat([layer["input_layernorm"](embedded), layer["hidden_norm"](hidden)], -1)
        x = hidden + layer["self_attn"]["o_proj"](self.attend(x, cache))
        y, mlp = layer["post_attention_layernorm"](x), layer["mlp"]
        return x + mlp["down_proj"](F.silu(mlp["gate_proj"](y)) * mlp["up_proj"](y))

    def attend(self, x: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attention of the step number `len(cache)` at all positions: over the first step's keys up to the own position, and over the
        own keys of each step since. A draft sees the verified tokens and the drafts before it, which belong to no other position."""
        length, step, project = x.shape[1], len(cache), self.midlayer["self_attn"]  # type: ignore[index]
        q, k, v = (
            project[f"{name}_proj"](x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [batch, heads, length, head_dim]
            for name in "qkv"
        )
        cos, sin = self.cos_sin[step : step + length].chunk(2, -1)
        halves = ((part.chunk(2, -1)) for part in (q, k))
        q, k = (torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(v.dtype) for a, b in halves)
        cache.append((k, v))
        # The query heads that share a KV head become more rows of one product.
        q = q.unflatten(1, (self.kv_heads, -1)) * self.head_dim**-0.5  # [batch, kv_heads, group, length, head_dim]
        first = q.flatten(2, 3) @ cache[0][0].mT
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        first = first.unflatten(2, q.shape[2:4]).masked_fill(later, -math.inf)
        own = [(q * k[:, :, None]).sum(-1, keepdim=True) for k, _ in cache[1:]]
        weights = torch.cat([first, *own], -1).softmax(-1).to(v.dtype)
        out = (weights[..., :length].flatten(2, 3) @ cache[0][1]).unflatten(2, q.shape[2:4])
        for i, (_, v) in enumerate(cache[1:]):
            out = out + weights[..., length + i, None] * v[:, :, None]
        return out.flatten(1, 2).transpose(1, 2).flatten(2)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden_size]` to `[rows, draft_vocab_size]`."""
        return self.lm_head(self.norm(hidden))


class Trainer:
    """Data, head and optimizer.

    Attributes:
        draft_to_target: `[draft_vocab_size]` int64, rising.
        states: `[num_tokens, 3 * hidden_size]`, what the target's residual streams were; and its last hidden states.
        best: `[num_tokens]` int64, the target's likeliest next token, as a number in the draft vocabulary; -1 if it is not in it.
        scale: `[3 * hidden_size]`, by which `fc` would have to multiply its inputs, so that all of them have the same size. It is a part
            of `fc` in the file.
    """

    def __init__(self, target: LlamaForCausalLM, samples: Samples, recipe: TrainingRecipe, device: torch.device) -> None:
        config, self.target, self.samples, self.recipe, self.device = target.config, target, samples, recipe, device
        held_out = min(MOST_HELD_OUT, math.ceil(HELD_OUT * len(samples.lengths)))
        order = torch.randperm(len(samples.lengths), generator=torch.Generator().manual_seed(recipe.seed))
        self.held_out, self.training = order[:held_out], order[held_out:]
        self.draft_to_target = draft_vocabulary(samples, config.vocab_size, recipe.draft_vocab_size).to(device)
        target_to_draft = torch.full((config.vocab_size,), -1, device=device)
        target_to_draft[self.draft_to_target] = torch.arange(len(self.draft_to_target), device=device)
        self.target_head = target.lm_head.weight[self.draft_to_target]
        target.pack_weights()
        parts = list(target_states(target, samples, device))
        self.states = torch.cat([states for states, _ in parts])
        self.best = target_to_draft[torch.cat([best for _, best in parts])]
        del parts
        self.token_ids, self.offsets, self.lengths, self.starts = (
            tensor.to(device) for tensor in (samples.token_ids, samples.offsets, samples.lengths, samples.starts)
        )
        width = 3 * config.hidden_size
        some = self.states[samples.answers[torch.randint(len(samples.answers), (8192,))].to(device), :width].float()
        self.scale = 1 / some.square().mean(0).sqrt().clamp(min=1e-6)
        torch.manual_seed(recipe.seed)
        self.head = DraftHead(config, len(self.draft_to_target), recipe.sample_length + max(recipe.steps, LONGEST_DRAFT))
        self.head.to(device)
        with torch.no_grad():
            self.head.lm_head.weight.copy_(self.target_head)
            self.head.norm.weight.copy_(0.3 * target.model.norm.weight)  # it knows little yet, and should not be sure
            self.head.midlayer["self_attn"]["o_proj"].weight.mul_(0.1)
            self.head.midlayer["mlp"]["down_proj"].weight.mul_(0.1)
        self.optimizer = torch.optim.AdamW(
            self.head.parameters(), recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True
        )
        self.done = 0

    # ---------------------------------------------------------------- batches

    def batches(self, epoch: int) -> list[Tensor]:
        """The numbers of the samples of each batch, in which all are of about the same length."""
        generator = torch.Generator().manual_seed(self.recipe.seed + epoch)
        order, size = self.training[torch.randperm(len(self.training), generator=generator)], self.recipe.batch_size
        chunks = (chunk[self.samples.lengths[chunk].argsort()].split(size) for chunk in order.split(32 * size))
        found = [batch for chunk in chunks for batch in chunk]
        return [found[i] for i in torch.randperm(len(found), generator=generator).tolist()]

    def drafts(self, numbers: Tensor, steps: int, free: bool) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Draft at all positions of some samples from which drafting may begin: where the next token is one of the answer, and known.

        Args:
            numbers: of the samples, on the CPU.
            free: each step receives the token that the last one has guessed; otherwise the true one.

        Yields: for each step logits `[rows, draft_vocab_size]`; where the guessed tokens are in `token_ids`, `[rows]`; and whether they
            are there at all, before the end of the sample, `[rows]`.
        """
        length = int(self.samples.lengths[numbers].max())
        numbers = numbers.to(self.device)
        within = torch.arange(length, device=self.device).expand(len(numbers), -1)
        ends = self.lengths[numbers, None]
        places = (self.offsets[numbers, None] + within).clamp(max=len(self.token_ids) - 1)
        rows = ((within >= self.starts[numbers, None] - 1) & (within < ends - 2)).flatten().nonzero()[:, 0]
        states = self.states[places][..., : len(self.scale)]
        token_ids = self.token_ids[(places + 1).clamp(max=len(self.token_ids) - 1)]
        hidden = self.head.fc(states * self.scale)
        cache: list[tuple[Tensor, Tensor]] = []
        for step in range(steps):
            hidden = self.head.step(self.target.model.embed_tokens(token_ids.flatten()).view(*token_ids.shape, -1), hidden, cache)
            guessed = (places + 2 + step).clamp(max=len(self.token_ids) - 1)
            is_there = (within + 2 + step < ends).flatten()[rows]
            logits = self.head.logits(hidden.flatten(0, 1)[rows])
            yield logits, guessed.flatten()[rows], is_there
            if free:
                token_ids.view(-1)[rows] = self.draft_to_target[logits.argmax(-1)]
            else:
                token_ids = self.token_ids[guessed]

    def loss(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The loss over a batch, and the share of first guesses that are the target's likeliest token."""
        total, right = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        hidden_size = self.target_head.shape[1]
        for step, (logits, places, is_there) in enumerate(self.drafts(numbers, self.recipe.steps, free=False)):
            # What the target thinks of a token is at the place before it. A token that the head cannot guess teaches nothing.
            best = self.best[places - 1]
            counts = is_there & (best >= 0)
            with torch.no_grad():
                p = (self.states[places - 1, -hidden_size:] @ self.target_head.T).float().softmax(-1)
            logits = logits.float()
            errors = logits.logsumexp(-1) - (p * logits).sum(-1)
            total = total + DECAY**step * (errors * counts).sum() / counts.sum().clamp(min=1)
            if step == 0:
                right = ((logits.argmax(-1) == best) & is_there).sum() / is_there.sum().clamp(min=1)
        return total, right

    # ---------------------------------------------------------------- the run

    def train(self, until: float, save: Path) -> None:
        """Train for the recipe's epochs, from where a checkpoint ends if there is one.

        Args:
            until: in seconds of `time.monotonic`, when to stop in any case.
            save: file for the checkpoint, written each minute.
        """
        recipe, begin = self.recipe, time.monotonic()
        per_epoch = len(self.batches(0))
        total, first = recipe.epochs * per_epoch, self.done
        saved, loss_mean, right_mean = begin, 0.0, 0.0
        with tqdm(total=total, initial=first, desc="Training", unit="batch", dynamic_ncols=True) as bar:
            for number in range(first, total):
                if number == first or number % per_epoch == 0:
                    batches = self.batches(number // per_epoch)
                now = time.monotonic()
                progress = max(number / total, (now - begin) / max(until - begin, 1e-9) if until < math.inf else 0)
                if now > until:
                    break
                rate = min(1, (number + 1) / max(1, min(100, total // 20))) * (0.02 + 0.49 * (1 + math.cos(math.pi * min(1, progress))))
                for group in self.optimizer.param_groups:
                    group["lr"] = recipe.learning_rate * rate
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.target_head.dtype == torch.bfloat16):
                    loss, right = self.loss(batches[number % per_epoch])
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(self.head.parameters(), 0.5)
                self.optimizer.step()
                self.done = number + 1
                if number % 10 == 0 or self.device.type == "cpu":  # a GPU need not wait each time
                    weight = 0.9 if loss_mean else 0.0
                    loss_mean = weight * loss_mean + (1 - weight) * loss.item()
                    right_mean = weight * right_mean + (1 - weight) * right.item()
                    bar.set_postfix(loss=f"{loss_mean:.3f}", acceptance=f"{right_mean:.3f}", refresh=False)
                bar.update()
                if now - saved > SAVE_SECONDS:
                    self.save_checkpoint(save)
                    saved = now
        self.save_checkpoint(save)

    def save_checkpoint(self, file: Path) -> None:
        """Write what `load_checkpoint` reads."""
        state = {"head": self.head.state_dict(), "optimizer": self.optimizer.state_dict(), "done": self.done}
        torch.save(state | {"scale": self.scale, "draft_to_target": self.draft_to_target}, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)

    def load_checkpoint(self, file: Path) -> None:
        """Go on where a run before this one has ended."""
        state = torch.load(file, map_location=self.device, weights_only=True)
        if not torch.equal(state["draft_to_target"], self.draft_to_target):
            raise ValueError(f"'{file.parent.parent}' has the head of a run with other flags: repeat these, or name another folder")
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done, self.scale = state["done"], state["scale"]

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Draft for held-out samples, as decoding would: after a draft of which it accepts `n` tokens it goes on n + 1 tokens later.

        Returns: for greedy samples and for drawn ones, the share of first, second... draft tokens that are accepted with all before them,
            and the mean number of tokens per step of the target, for drafts of 1, 2... tokens.
        """
        found: dict[str, Any] = {}
        for name, greedy in (("temperature 0", True), ("temperature 0.7", False)):
            numbers = self.held_out[self.samples.greedy[self.held_out] == greedy]
            accepted, steps, tokens = torch.zeros(LONGEST_DRAFT), torch.zeros(LONGEST_DRAFT), torch.zeros(LONGEST_DRAFT)
            rows = 0
            for batch in numbers.split(self.recipe.batch_size) if len(numbers) else ():
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.target_head.dtype == torch.bfloat16):
                    hits = [
                        (self.draft_to_target[logits.argmax(-1)] == self.token_ids[places]) & is_there
                        for logits, places, is_there in self.drafts(batch, LONGEST_DRAFT, free=True)
                    ]
                runs = torch.stack(hits, 1).long().cumprod(1).cpu()  # [rows, LONGEST_DRAFT]
                accepted += runs.sum(0)
                rows += len(runs)
                counts = self.samples.lengths[batch] - 2 - (self.samples.starts[batch] - 1)
                for sample in runs.split(counts.tolist()):
                    for k in range(LONGEST_DRAFT):
                        place, walk = 0, sample[:, : k + 1].sum(1).tolist()
                        while place < len(walk):
                            steps[k] += 1
                            tokens[k] += 1 + walk[place]
                            place += 1 + walk[place]
            if rows:
                found[name] = {
                    "acceptance": [round(share, 4) for share in (accepted / rows).tolist()],
                    "tokens per step": [round(mean, 3) for mean in (tokens / steps).tolist()],
                }
        return found

    # ---------------------------------------------------------------- the file

    def tensors(self) -> dict[str, Tensor]:
        """The head under its public names, in bfloat16, or with `--quantize int8` for most matrices in 8 bits."""
        vocab = len(self.draft_to_target)
        found: dict[str, Tensor] = {}
        for name, tensor in self.head.state_dict().items():
            tensor = tensor.detach().float().cpu() * (self.scale.cpu() if name == "fc.weight" else 1)
            # The columns of fc differ too much in size to share a scale.
            if self.recipe.quantize == "int8" and tensor.ndim == 2 and name != "fc.weight":
                scale = (tensor.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
                found[name], found[f"{name}_scale"] = (tensor / scale).round().to(torch.int8), scale
            else:
                found[name] = tensor.to(torch.bfloat16)
        ids = self.draft_to_target.cpu()
        known = torch.zeros(self.target.config.vocab_size, dtype=torch.bool)
        known[ids] = True
        return found | {"d2t": ids - torch.arange(vocab), "t2d": known}


def draft_vocabulary(samples: Samples, vocab_size: int, draft_vocab_size: int) -> Tensor:
    """The most frequent tokens of the answers, `[draft_vocab_size]` int64, rising. If these have fewer tokens, then some others."""
    counts = torch.bincount(samples.token_ids[samples.answers], minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:draft_vocab_size].sort().values


def head_config(folder: Path, config: ModelConfig, draft_vocab_size: int) -> dict[str, Any]:
    """The head's config.json, which vLLM reads, too."""
    raw = read_json(folder / "config.json")
    rope = {name: raw[name] for name in ("rope_theta", "rope_scaling", "rope_parameters") if name in raw}
    return rope | {name: getattr(config, name) for name in KEPT} | {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "draft_vocab_size": draft_vocab_size, "eagle_aux_hidden_state_layer_ids": list(default_aux_layers(config.num_layers)),
    }  # fmt: skip


def train_eagle(name_or_folder: str, out: str | Path, recipe: TrainingRecipe) -> Path:
    """Train a head, and write it to a folder. If the folder has what an earlier run has left, go on with it.

    Returns: the folder.

    Raises:
        ValueError: a model or a folder that does not fit; the message says what would.
    """
    begin = time.monotonic()
    limit = math.inf if recipe.time_limit is None else 60 * recipe.time_limit
    folder, out = resolve_model(name_or_folder).resolve(), Path(out).expanduser()
    config, device = ModelConfig.from_pretrained(folder), choose_device(recipe.device)
    if config.kv_lora_rank or config.num_layers < 7:
        raise UnsupportedModelError("a head can be trained for a model with ordinary attention and at least 7 layers")
    recipe.device = device.type  # type: ignore[assignment]
    work = out / "training"  # apart from the head, which is all of the safetensors files in its folder
    work.mkdir(parents=True, exist_ok=True)
    samples = load_samples(str(folder), work, recipe, begin + 0.4 * limit)
    target = load_model(folder, config, choose_dtype("auto", device), device, recipe.sample_length)
    target.model.collect_hidden_states(default_aux_layers(config.num_layers))
    trainer, checkpoint = Trainer(target, samples, recipe, device), work / "checkpoint.pt"
    if checkpoint.exists():
        trainer.load_checkpoint(checkpoint)
    trainer.train(begin + 0.93 * limit, checkpoint)
    found = trainer.evaluate()
    raw = head_config(folder, config, len(trainer.draft_to_target))
    made = {"command": " ".join(["nanovllm train-eagle", name_or_folder, *recipe.words()]), "date": str(date.today())}
    made |= {"answer_tokens": len(samples.answers), "batches": trainer.done, "held_out": found}
    raw |= {"trained": made}
    save_file(trainer.tensors(), out / "model.safetensors", {"format": "pt", "config": json.dumps(raw)})
    (out / "config.json").write_text(json.dumps(raw, indent=2), encoding="utf-8")
    for name, values in found.items():
        print(f"{name}: accepted {values['acceptance']}, tokens per step with 1 to {LONGEST_DRAFT} drafts {values['tokens per step']}")
    return out
