"""Carries a plan to the ranks: in this process, in others, under torchrun or on Ray (lecture
20)."""
