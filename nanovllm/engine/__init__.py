"""Owns the step loop: the engine core, its process, data-parallel groups, the async client and
`LLM` (lectures 18–43, 91)."""
