"""Moves KV between engines and to stores: connectors, transports, stores and blending (lectures 31,
32)."""
