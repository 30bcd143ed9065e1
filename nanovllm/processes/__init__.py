"""Processes of engines and ranks: the channel from each to its parent, and the supervisor that
finds out which of them is to blame for a failure."""
