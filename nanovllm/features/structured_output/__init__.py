"""Structured output: grammars forbid tokens (lecture 19)."""
