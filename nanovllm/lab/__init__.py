"""Benchmarks, pictures, the course tool and the table of compiled kernels; the engine never imports
it."""
