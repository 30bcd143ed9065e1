"""Process groups and their collectives, shared memory between ranks, and heartbeats (lectures 20,
21, 23, 24)."""
