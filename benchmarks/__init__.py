"""Benchmarks. Each one checks the bits of the results that it timed."""
