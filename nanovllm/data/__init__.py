"""Plain data that all packages share: configuration, requests, sampling parameters, outputs, and
the schedule of a step (lecture 13)."""
