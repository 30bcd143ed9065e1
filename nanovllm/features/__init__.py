"""Features that plug into the core's hooks: one module or folder each."""
