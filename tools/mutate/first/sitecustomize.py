"""Loaded by every Python that the tests of a copy start, if its folder comes first in PYTHONPATH.

An editable install leads every import of halfbyte to the files that it was made from. In a copy they must come from
the copy.
"""

import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__name__.startswith("ScikitBuild")]
