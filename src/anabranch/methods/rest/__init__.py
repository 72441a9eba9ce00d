"""Retrieval-based drafts (He et al. 2024)."""
