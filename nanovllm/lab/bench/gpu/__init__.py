"""`nanovllm bench gpu`: one command that proves and measures the engine on a machine with an NVIDIA GPU."""
