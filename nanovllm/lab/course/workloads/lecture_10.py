"""Second part of lecture 10: generate with fewer rows.

Without a cache, each new token costs a forward pass over all tokens so far. Counted are the rows
that pass through the model. The tokens must be those of this loop, greedy decoding. There is a way
without a cache: a forward pass predicts the token after *each* of its rows, so it can confirm
several guesses. Where could a guess come from?
"""

from collections.abc import Callable


def generate(
    forward: Callable[[list[int]], list[int]], prompt: list[int], num_tokens: int
) -> list[int]:
    """Return the tokens that follow the prompt.

    Args:
        forward: counts; takes all tokens of a sequence, and returns for each of them the likeliest
            token after it.
    """
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(forward(tokens)[-1])
    return tokens[len(prompt) :]
