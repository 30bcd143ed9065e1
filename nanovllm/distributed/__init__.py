"""Process groups and their collectives, shared memory between ranks, and the heartbeats of processes (lectures 21, 23, 24)."""
