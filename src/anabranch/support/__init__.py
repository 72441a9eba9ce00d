"""What every room may need and none is about: files, strict JSON, signals, memory, the processor, threads, plots."""
