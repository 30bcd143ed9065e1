"""Speculative decoding: guessed tokens that a step verifies (lecture 42)."""
