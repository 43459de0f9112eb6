"""The arguments of `halfbyte convert`: options that take several patterns, and sizes of memory."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from typer.core import TyperCommand

from halfbyte.errors import InputError

if TYPE_CHECKING:
    from typer._click.core import Context  # typer's own copy of click: for the signature alone

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
SEVERAL = ("--keep", "--include", "--ignore", "--extra-high-precision-layers-hf")
FLAGS = (
    "--experts-only", "--modules-from-model", "--trust-remote-code", "--dry-run", "--overwrite", "--quiet", "-q",
    "--json-log", "--smooth", "--strict-stats", "--help", "-h",
)  # fmt: skip
"""Options that take no value."""


class Convert(TyperCommand):
    """An option for patterns takes several of them: `--keep a b c` means `--keep a --keep b --keep c`.

    This is so after SRC and DST. Before them a pattern could be mistaken for a path, so an option takes only one.
    """

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, expand(args))


def expand(args: list[str]) -> list[str]:
    """The arguments, with the option repeated before each of its further patterns."""
    result: list[str] = []
    option = None
    positional = 0
    takes_value = False
    for argument in args:
        if argument.startswith("-") and argument != "-":
            option = argument if argument in SEVERAL else None
            takes_value = "=" not in argument and argument not in FLAGS
            result.append(argument)
        elif takes_value:
            takes_value = False
            result.append(argument)
        elif option is not None and positional >= 2:
            result += [option, argument]
        else:
            positional += 1
            result.append(argument)
    return result


def memory_size(text: str, option: str = "--max-memory") -> int:
    """The number of bytes in a text such as 2GB, 512MiB or 1e9.

    >>> memory_size("2GB"), memory_size("1.5GiB")
    (2000000000, 1610612736)
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]i?)?b?\s*", text, re.IGNORECASE)
    try:
        size = int(float(found.group(1)) * UNITS[(found.group(2) or "").upper()]) if found else 0
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise InputError(f"{option} {text!r} is not a size; examples: 2GB, 512MiB")
    return size
