"""KV blocks on the move: from engine to engine, and to where they are kept."""
