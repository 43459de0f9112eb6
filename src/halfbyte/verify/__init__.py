"""Checks of a checkpoint that trust neither the tool that wrote it nor the reader that takes it without complaint."""

from halfbyte.verify.check import LIMIT, verify
from halfbyte.verify.problems import Problem, Report, WeightError
from halfbyte.verify.summary import Summary, summarize

__all__ = ["LIMIT", "Problem", "Report", "Summary", "WeightError", "summarize", "verify"]
