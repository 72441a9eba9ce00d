"""A quantised copy of the target drafts."""
