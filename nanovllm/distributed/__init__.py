"""Process groups and their collectives, and shared memory between ranks (lectures 20, 21, 23,
24)."""
