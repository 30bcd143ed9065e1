"""The block pool, block tables with the prefix cache, and the interface of KV connectors (lectures
11, 12)."""
