"""Small checks that the contract functions share for their options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import cast

from halfbyte.contracts.spec import Contract
from halfbyte.errors import UnknownNameError, UnsupportedError, unknown_name
from halfbyte.methods.four_six import BlockError


def check_choice(rule: str, holds: bool) -> None:
    """Raise with the rule where a combination of options has no meaning."""
    if not holds:
        raise UnsupportedError(rule)


def check_name(kind: str, name: object, known: Iterable[object]) -> None:
    """Raise with the known names where an option's value is none of them."""
    if name not in (listed := list(known)):
        raise unknown_name(kind, name, listed)


def error_name(mode: str) -> BlockError:
    """A peer's spelling of an error measure (MAE, MSE) as ours."""
    check_name("4over6 error mode", mode.upper(), ("MAE", "MSE"))
    return cast(BlockError, mode.lower())


def changed(make: Callable[..., Contract], given: Mapping[str, object]) -> tuple[tuple[str, object], ...]:
    """The options that differ from the defaults of a contract function, for its repr."""
    defaults = make.__kwdefaults__ or {}
    return tuple((key, value) for key, value in given.items() if key in defaults and value != defaults[key])


def make_contract(make: Callable[..., Contract], options: Mapping[str, object]) -> Contract:
    """Call a contract function with options read from a file; an unknown key raises with the known ones."""
    known = make.__kwdefaults__ or {}
    for key in options:
        if key not in known:
            raise unknown_name(f"option of {make.__name__}", key, known or ["none"])
    try:
        return make(**options)
    except TypeError as error:
        raise UnknownNameError(f"{make.__name__}: {error}") from error
