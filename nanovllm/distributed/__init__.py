"""Many devices: groups of ranks, what they say to one another, and how a model is divided among them."""
