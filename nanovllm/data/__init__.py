"""Plain data that all packages share: configuration, requests, sampling parameters and outputs."""
