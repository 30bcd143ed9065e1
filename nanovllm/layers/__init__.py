"""Linear, norm, rotary and embedding layers, and their tensor-parallel forms (lectures 10, 22)."""
