"""Guesses that what followed the last two tokens follows again."""


def generate(forward, prompt, num_tokens):
    tokens = list(prompt)
    end = len(prompt) + num_tokens
    while len(tokens) < end:
        guess = []
        for i in range(len(tokens) - 3, -1, -1):
            if tokens[i : i + 2] == tokens[-2:]:
                guess = tokens[i + 2 : i + 2 + 8]
                break
        guess = guess[: end - len(tokens) - 1]
        rows = forward(tokens + guess)
        known = len(tokens)
        tokens.append(rows[known - 1])
        for i, g in enumerate(guess):
            if tokens[-1] != g:
                break
            tokens.append(rows[known + i])
    return tokens[len(prompt) :]
