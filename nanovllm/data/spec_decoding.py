"""What became of drafts: plain data."""

from dataclasses import dataclass, field
from itertools import zip_longest


@dataclass
class SpecDecodingStats:
    """What became of drafts (lecture 42), since the engine started.

    Attributes:
        num_drafts: how often drafts of a request were verified.
        num_draft_tokens: drafted tokens that were verified.
        num_accepted_tokens: those that the request got.
        num_accepted_tokens_per_pos: the same by their place in the draft.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    def add(self, num_drafts: int, num_draft_tokens: int, per_pos: list[int]) -> None:
        """Count more of them."""
        self.num_drafts += num_drafts
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += sum(per_pos)
        both = zip_longest(self.num_accepted_tokens_per_pos, per_pos, fillvalue=0)
        self.num_accepted_tokens_per_pos = [old + new for old, new in both]
