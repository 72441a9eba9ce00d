"""Helpers for all rooms: files, strict JSON, signals, memory, the processor, threads, plots."""
