"""Checks of options, shared by the functions that create contracts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import ParamSpec, cast

import numpy as np

from halfbyte.contracts.spec import Contract
from halfbyte.errors import InputError, UnsupportedError, refuse_array, unknown_name
from halfbyte.methods.four_six import BlockError

P = ParamSpec("P")

ERROR_MODES = ("MAE", "MSE")
"""The peers' names of the error measures of 4over6."""


def check_choice(rule: str, holds: bool) -> None:
    """Raise an error with the text `rule` unless it holds: the combination of options has no meaning."""
    if not holds:
        raise UnsupportedError(rule)


def check_name(kind: str, name: object, known: Iterable[object]) -> None:
    """Raise an error that lists the known names unless `name` is one of them. None means that nothing was chosen."""
    if name is not None and name not in (listed := list(known)):
        raise unknown_name(kind, name, listed)


def error_name(mode: str) -> BlockError:
    """Our name of an error measure, from a peer's spelling (MAE, MSE)."""
    check_name("4over6 error mode", str(mode).upper(), ERROR_MODES)
    return cast(BlockError, mode.lower())


def changed(make: Callable[..., Contract], given: Mapping[str, object]) -> tuple[tuple[str, object], ...]:
    """The options that differ from the defaults of a contract function, for its repr; hashable."""
    defaults = make.__kwdefaults__ or {}
    return tuple((key, frozen(value)) for key, value in given.items() if key in defaults and value != defaults[key])


def frozen(value: object) -> object:
    """Lists and mappings as tuples."""
    if isinstance(value, Mapping):
        return tuple(sorted(value.items()))
    return tuple(value) if isinstance(value, list) else value


def encode_factor(value: object) -> np.float32 | None:
    """A global scale given as an encode factor: positive and finite, or None."""
    if value is None:
        return None
    try:
        factor = np.float32(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"global_scale must be a number, not {value!r}") from error
    if np.ndim(factor):
        raise InputError(f"global_scale must be one number, not an array of shape {np.shape(factor)}")
    if not (np.isfinite(factor) and factor > 0):
        raise InputError(f"global_scale must be positive and finite, not {value!r}")
    return factor


def choices(**known: Iterable[object]) -> Callable[[Callable[P, Contract]], Callable[P, Contract]]:
    """Decorate a contract function: the values that its options can take, for those who list them."""

    def mark(make: Callable[P, Contract]) -> Callable[P, Contract]:
        make.choices = {option: tuple(values) for option, values in known.items()}  # type: ignore[attr-defined]
        return make

    return mark


def option_choices(make: Callable[..., Contract]) -> dict[str, tuple[object, ...]]:
    """The options of a contract function with few possible values, and these values."""
    switches: dict[str, tuple[object, ...]] = {
        option: (False, True) for option, default in (make.__kwdefaults__ or {}).items() if isinstance(default, bool)
    }
    return switches | getattr(make, "choices", {})


def listing_options(make: Callable[P, Contract]) -> Callable[P, Contract]:
    """Decorate a contract function: an unknown option raises an error that lists the known ones."""

    @functools.wraps(make)
    def checked(*arguments: P.args, **options: P.kwargs) -> Contract:
        known = make.__kwdefaults__ or {}
        for key in options:
            if key not in known:
                raise unknown_name(f"option of {make.__name__}", key, known or ["none"])
            if key != "global_scale":  # which says more of arrays by itself
                refuse_array(f"{key} of {make.__name__}", options[key])
        return make(*arguments, **options)

    checked.__kwdefaults__ = make.__kwdefaults__  # type: ignore[attr-defined]
    return checked
