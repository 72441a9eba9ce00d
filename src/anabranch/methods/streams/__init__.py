"""Speculative Streaming: the target's own streams draft (Bhendawade et al. 2024)."""
