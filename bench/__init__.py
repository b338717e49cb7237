"""Benchmarks and machine-code checks."""
