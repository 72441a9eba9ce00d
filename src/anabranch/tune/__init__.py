"""Drafts fitted to the machine: measure what a pass costs and what drafts would have given, and choose."""
