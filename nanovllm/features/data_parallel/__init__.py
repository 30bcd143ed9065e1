"""Data parallelism: several engines, each with requests of its own (lecture 25)."""
