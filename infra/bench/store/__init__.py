"""Benchmarks of the store. Each prints the machine and compares alternatives within one run."""
