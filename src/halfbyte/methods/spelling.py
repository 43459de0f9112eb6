"""One spelling of methods for Python, the command line and torch's operators: `four_six:mse:256`.

A spelling is a name, then options after colons. An option is its value, in the order of the method's options; or
`option=value`; an option that is on or off is on if its name stands there. A name alone means the method with the
contract's own options, and options that are not named are the contract's own.

| spelling | method |
|---|---|
| `amax` | `Amax()` |
| `four_six:mse:256`, `four_six:mse:256:fast_error` | `FourSix("mse", 256)`, `FourSix("mse", 256, fast_error=True)` |
| `sweep`, `sweep:fused` | `Sweep()`, `Sweep(fused=True)` |
| `optimal` | `Optimal()` |
| `optimal:headroom=1`, `optimal:headroom=1,1.5` | `Optimal(headroom=1)`, `Optimal(headroom=(1, 1.5))` |
| `hessian:descent` | `Hessian(h, "descent")`, where the matrices are given beside it |
| `gptq:damping=0.01:headroom=1` | `Gptq(damping=0.01, headroom=1)` |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field
from typing import Any

from halfbyte.errors import InputError, UnsupportedError, unknown_name
from halfbyte.methods.spec import Method, plain_options

TRUTH = {"true": True, "1": True, "false": False, "0": False}


def read_spelling(text: str, known: Mapping[str, type[Method]]) -> tuple[type[Method], dict[str, Any]]:
    """The class that a spelling names, and the options that it gives. Unknown names and options raise."""
    name, *words = text.split(":")
    if name not in known:
        raise unknown_name("method", name, known)
    kind, given = known[name], dict[str, Any]()
    options = {option.name: option for option in plain_options(kind)}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals and key in options and "bool" in str(options[key].type):
            value = "true"
        elif not equals:
            free = [each for each, option in options.items() if each not in given and "bool" not in str(option.type)]
            if not free:
                raise UnsupportedError(f"method {text!r}: {name} takes {_listed(options)}, so {word!r} has no meaning")
            key, value = free[0], word
        if key not in options:
            raise unknown_name(f"option of method {name}", key, options or ["none"])
        if key in given:
            raise UnsupportedError(f"method {text!r} gives {key} twice")
        given[key] = _value(options[key], value, text)
    return kind, given


def spelled_method(text: str, known: Mapping[str, type[Method]], **arrays: Any) -> Method:
    """The method that a spelling means without a contract: options that it does not name have their defaults.

    arrays: what a text cannot hold, such as the `h` of hessian.
    """
    kind, given = read_spelling(text, known)
    if kind.needs and not arrays:
        raise UnsupportedError(f"method {text!r} needs {kind.needs}")
    return kind(**arrays, **given)


def _value(option: Field[Any], text: str, whole: str) -> object:
    """An option's value, read as its type says."""
    kind = str(option.type)
    if text.lower() == "none" and "None" in kind:
        return None
    try:
        if "bool" in kind:
            return TRUTH[text.lower()]
        if "int" in kind and ("float" not in kind or text.lstrip("+-").isdigit()):
            return int(text)
        if "tuple" in kind and "," in text:
            return tuple(map(float, text.split(",")))
        return float(text) if "float" in kind else text
    except (KeyError, ValueError):
        wanted = "true or false" if "bool" in kind else "a whole number" if "float" not in kind else "a number"
        wanted += ", or several with commas" * ("tuple" in kind)
        raise InputError(f"method {whole!r}: {option.name} is {wanted}, not {text!r}") from None


def _listed(options: Mapping[str, Field[Any]]) -> str:
    return f"the options {', '.join(options)}" if options else "no options"
