"""CUDA graphs: a decode step in one launch (lecture 40)."""
