"""The target: one decoder for every family, its cache, weights, loading and packing."""
