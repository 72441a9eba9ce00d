"""Speculative Streaming: adapter, multi-stream attention, pruning, scoring, drafting, the adapter folder."""
