"""A complete engine without optional features; see README.md."""
