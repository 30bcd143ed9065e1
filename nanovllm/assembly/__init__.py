"""Where an engine is put together: the only package that knows all features."""
