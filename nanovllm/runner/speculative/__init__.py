"""Drafts tokens with a model, and verifies drafts (lecture 42)."""
