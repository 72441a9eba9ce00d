"""Fit speculation to a machine: measure what steps cost, replay what drafts would have given, choose and check."""
