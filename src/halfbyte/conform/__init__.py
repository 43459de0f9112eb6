"""Conformance: golden vectors made by running the peers, put through the public API and compared bit for bit."""

from halfbyte.conform.runner import ConformReport as Report
from halfbyte.conform.runner import Result, run_case, run_vectors
from halfbyte.conform.vectors import Case, Vectors, load_vectors

__all__ = ["Case", "Report", "Result", "Vectors", "load_vectors", "run_case", "run_vectors"]
