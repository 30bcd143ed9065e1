"""Carries a schedule to the ranks: in this process, in other processes, under torchrun or on Ray."""
