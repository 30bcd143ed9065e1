"""Engines as callers see them: `LLM`, the async client, the engine's process and data-parallel
groups (lectures 18, 25, 91)."""
