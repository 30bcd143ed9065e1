"""Plain data that all rooms share: configuration, requests, sampling parameters, outputs, and the schedule of a step
(lecture 13)."""
