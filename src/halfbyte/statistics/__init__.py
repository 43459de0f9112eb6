"""Statistics of the inputs of a model's linear layers: the files that `halfbyte calibrate` writes.

`linear` has what is known of one layer's input, `folder` reads and writes folders of it, `merge` adds runs up,
`imatrix` reads llama.cpp's files. No model runs here, and nothing needs torch. docs/calibration.md has the format.
"""

from halfbyte.statistics.folder import (
    HEADER,
    Statistics,
    is_statistics,
    open_statistics,
    write_header,
    write_statistics,
)
from halfbyte.statistics.linear import MOMENTS, LinearStatistics
from halfbyte.statistics.merge import merge_statistics

__all__ = [
    "HEADER",
    "MOMENTS",
    "LinearStatistics",
    "Statistics",
    "is_statistics",
    "merge_statistics",
    "open_statistics",
    "write_header",
    "write_statistics",
]
