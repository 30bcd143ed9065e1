"""Work done before serving: makes quantized checkpoints and draft heads (lectures 41, 42)."""
