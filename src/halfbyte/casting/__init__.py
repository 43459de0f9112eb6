"""Casts between block formats: MXFP4 to NVFP4 and back, and all to bfloat16."""

from halfbyte.casting.api import cast
from halfbyte.casting.report import CastReport, ShareCost

__all__ = ["CastReport", "ShareCost", "cast"]
