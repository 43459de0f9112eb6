"""Benchmarks. Each checks the bits it timed."""
