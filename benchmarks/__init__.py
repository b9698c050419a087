"""Runnable benchmarks: each prints a table and writes JSON to `benchmarks/results`."""
