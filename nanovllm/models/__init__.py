"""Model configurations, weight loading, and one file per family of architectures (lectures 10, 24,
26)."""
