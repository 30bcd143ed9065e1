"""Decides what the next step computes, under one token budget, and which engine gets a request
(lectures 13, 23–43)."""
