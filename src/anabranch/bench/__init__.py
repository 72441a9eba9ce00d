"""Benchmarks: suites, contenders, alternating measurement, reports."""
