"""Attention over the paged cache: one interface, several backends."""
