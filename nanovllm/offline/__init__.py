"""Work done before serving: makes quantized checkpoints (lecture 41)."""
