"""Measuring beside each other: suites, contenders, alternating runs, reports."""
