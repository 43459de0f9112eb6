"""Triton's interpreter, as strict as a card, and without what it does in vain."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor

LAUNCH_OPTIONS = {"num_warps", "enable_fp_fusion"}


def set_up() -> None:
    """Before the first launch of a process."""
    refuse_unknown_constants()
    patch_once()
    leave_out_unread_checks()
    look_up_dtypes_once()


def refuse_unknown_constants() -> None:
    """From now on a launch with a constant that the kernel does not have raises, as on a card. Triton drops it."""
    launch = GridExecutor.__call__

    @functools.wraps(launch)
    def checked(self: GridExecutor, *arguments: Any, **constants: Any) -> None:
        unknown = set(constants) - set(self.arg_names) - LAUNCH_OPTIONS
        if unknown:
            raise TypeError(f"kernel {self.fn.__name__} has no {', '.join(sorted(unknown))}")
        launch(self, *arguments, **constants)

    GridExecutor.__call__ = checked


def patch_once() -> None:
    """The language is made to compute with numpy once per launch and module; Triton does it at each call of a function.

    That takes two fifths of the time of a search.
    """
    patch: Callable[[Any], Any] = interpreter._patch_lang
    scopes: dict[int, Any] = {}  # by the module of the function: what to undo when the launch is over

    class Launch:
        """What the launch itself undoes: the patches of every module."""

        def restore(self) -> None:
            while scopes:
                scopes.popitem()[1].restore()

    def patched(function: Any) -> Launch:
        module = id(function.__globals__)
        if module not in scopes:
            scopes[module] = patch(function)
        return Launch()  # functions called within the launch drop it

    interpreter._patch_lang = patched


def leave_out_unread_checks() -> None:
    """Sums and products of integers are not computed once more in 64 bits: only Triton's debug mode looks at that."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def look_up_dtypes_once() -> None:
    """numpy's dtype for one of Triton's: a table that Triton makes anew for each operation."""
    find: Callable[[Any], Any] = interpreter._get_np_dtype
    found: dict[str, Any] = {}

    def looked_up(dtype: Any) -> Any:
        if dtype.name not in found:
            found[dtype.name] = find(dtype)
        return found[dtype.name]

    interpreter._get_np_dtype = looked_up
