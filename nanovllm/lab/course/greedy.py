"""A minimal generation loop for lectures and tests, to run on each rank: no scheduler, no sampling,
a few prompts."""

import torch

from nanovllm.attention.base import AttentionMetadata, ForwardContext, forward_context
from nanovllm.attention.torch import TorchBackend
from nanovllm.models.llama import LlamaForCausalLM

BLOCK_SIZE = 16


class GreedyLoop:
    """Continues all prompts by their likeliest token in each step.

    Args:
        model: of this rank.
        prompts: token ids. Without any, each step computes a dummy batch of one token, since a rank
            that shares experts with others has to take part in their collectives.
        num_tokens: the most tokens to generate per prompt.

    Attributes:
        outputs: the tokens so far, one list per prompt.
    """

    def __init__(self, model: LlamaForCausalLM, prompts: list[list[int]], num_tokens: int) -> None:
        self.model = model
        self.outputs: list[list[int]] = [[] for _ in prompts]
        prompts = prompts or [[0]]
        self._new = [list(prompt) for prompt in prompts]
        self._lengths = [0] * len(prompts)
        longest = max(map(len, prompts)) + num_tokens
        blocks = -(-longest // BLOCK_SIZE)
        self._tables = torch.arange(len(prompts) * blocks, dtype=torch.int32).view(
            len(prompts), blocks
        )
        dtype = model.lm_head.weight.dtype
        num_blocks = self._tables.numel()
        self._backend = TorchBackend()
        self._caches = {
            layer: torch.zeros(
                attention.cache_shape(num_blocks, BLOCK_SIZE, self._backend), dtype=dtype
            )
            for layer, attention in model.attention_layers.items()
        }

    def step(self) -> list[int]:
        """Run one forward pass. Returns the next token of each prompt, and appends it to
        `outputs`."""
        hidden, ends = self._forward()
        tokens = self._likeliest(hidden[ends - 1])
        self._new = [[token] for token in tokens]
        for output, token in zip(self.outputs, tokens, strict=False):
            output.append(token)
        return tokens

    def all_rows(self) -> list[int]:
        """Run one forward pass. Returns the likeliest token after each row of the packed batch."""
        return self._likeliest(self._forward()[0])

    @torch.inference_mode()
    def _likeliest(self, hidden: torch.Tensor) -> list[int]:
        tokens: list[int] = self.model.compute_logits(hidden).argmax(-1).tolist()
        return tokens

    @torch.inference_mode()
    def _forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states of a packed batch, and the row at which each sequence ends."""
        counts = [len(tokens) for tokens in self._new]
        positions = [
            torch.arange(done, done + n) for done, n in zip(self._lengths, counts, strict=True)
        ]
        self._lengths = [done + n for done, n in zip(self._lengths, counts, strict=True)]
        slots = [
            table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
            for table, at in zip(self._tables.long(), positions, strict=True)
        ]
        starts = torch.tensor([0, *counts]).cumsum(0)
        metadata = AttentionMetadata(
            query_start_loc=starts.int(),
            seq_lens=torch.tensor(self._lengths, dtype=torch.int32),
            block_tables=self._tables,
            slot_mapping=torch.cat(slots),
            max_query_len=max(counts),
            max_seq_len=max(self._lengths),
        )
        token_ids = torch.tensor([token for tokens in self._new for token in tokens])
        with forward_context(ForwardContext(self._backend, self._caches, metadata)):
            hidden = self.model(token_ids, torch.cat(positions))
        return hidden, starts[1:]
