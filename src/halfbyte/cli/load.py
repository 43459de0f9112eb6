"""`--check-load` and `--load`: which clients there are, and whether one is installed, before any work begins."""

from __future__ import annotations

import importlib.util

from halfbyte.errors import ModelCodeError, unknown_name
from halfbyte.load_check import CLIENTS

CLIENT_NAMES: tuple[str, ...] = CLIENTS


def check_client(name: str) -> None:
    """Raise if there is no such client, or if it is not installed here."""
    if name not in CLIENT_NAMES:
        raise unknown_name("client", name, CLIENT_NAMES)
    if importlib.util.find_spec(name) is None:
        raise ModelCodeError(f"{name} is not installed in this environment; install it, or leave the check out")
