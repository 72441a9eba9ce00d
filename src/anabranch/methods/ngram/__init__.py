"""N-gram drafts: a Katz back-off model over token ids (Katz 1987)."""
