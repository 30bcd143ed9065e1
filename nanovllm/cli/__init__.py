"""The `nanovllm` command, and the chat in the terminal."""
