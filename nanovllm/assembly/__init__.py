"""Where settings become flags, and an engine is put together: the only package that knows all
features."""
