"""Turns a schedule into tensors, runs the model on them, and samples (lectures 16, 17, 19, 40)."""
