"""One attention interface over the paged KV cache, and its backends in torch, C++ and Triton
(lectures 14, 15, 26)."""
