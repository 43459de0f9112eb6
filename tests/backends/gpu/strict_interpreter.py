"""Triton's interpreter drops constants that a kernel does not have. A card refuses them, and so does this."""

from __future__ import annotations

import functools
from typing import Any

from triton.runtime.interpreter import GridExecutor

LAUNCH_OPTIONS = {"num_warps", "enable_fp_fusion"}


def refuse_unknown_constants() -> None:
    """From now on a launch with a constant that the kernel does not have raises."""
    launch = GridExecutor.__call__

    @functools.wraps(launch)
    def checked(self: GridExecutor, *arguments: Any, **constants: Any) -> None:
        unknown = set(constants) - set(self.arg_names) - LAUNCH_OPTIONS
        if unknown:
            raise TypeError(f"kernel {self.fn.__name__} has no {', '.join(sorted(unknown))}")
        launch(self, *arguments, **constants)

    GridExecutor.__call__ = checked
