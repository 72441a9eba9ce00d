"""The adapter folder: one format for every method, its fingerprint and its card."""
