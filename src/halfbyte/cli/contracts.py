"""`halfbyte contracts`: which projects halfbyte reproduces, and their formulas."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from halfbyte.cli.app import app, err, file_option, out, write_json
from halfbyte.cli.tables import print_table
from halfbyte.contracts import CONTRACTS, Contract
from halfbyte.contracts.options import option_choices
from halfbyte.contracts.spec import DecodeRule, Rule, formulas, spelled_methods
from halfbyte.errors import UnsupportedError, unknown_name
from halfbyte.formats import E2M1, get_format
from halfbyte.methods import Gptq


@app.command(short_help="List the contracts, or show one.")
def contracts(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Show this contract with its formulas.")] = None,
    json_file: Annotated[
        Path | None,
        file_option("--json", "Also write everything to this file as JSON"),
    ] = None,
) -> None:
    """List the contracts, or show one: the project whose bytes it gives, its options, methods and formulas.

    Methods are spelled as --method and quantize(method=...) take them: [:x] may be left out, x|y is a choice. hessian
    and gptq need statistics of the inputs: --stats, hb.Hessian(h), or hb.gptq(...). After methods that the contract
    takes with an option alone there is this option: (mode=x).

    Exit code 0: done. 2: there is no such contract, or the file cannot be written.
    """
    if json_file is not None and (name is None or name in CONTRACTS):
        described = {known: _as_json(known) for known in CONTRACTS if name in (None, known)}
        write_json("contracts", json_file, described)
    if name is None:
        table = Table()
        table.add_column("contract", no_wrap=True)
        for column in ("formats", "methods", "source"):
            table.add_column(column, overflow="fold")
        for make in CONTRACTS.values():
            contract = make()
            table.add_row(contract.name, ", ".join(_formats(contract)), ", ".join(_listed(make)), contract.source)
        print_table(table, optional=("source",))
        return
    if name not in CONTRACTS:
        err().print(f"halfbyte contracts: {unknown_name('contract', name, CONTRACTS)}", markup=False, soft_wrap=True)
        raise typer.Exit(2)
    make = CONTRACTS[name]
    contract = make()
    out().print(f"{contract.name}: {contract.source}\n", markup=False)
    for paragraph in (inspect.getdoc(inspect.getmodule(make)) or "").split("\n\n"):
        out().print(" ".join(paragraph.split()) + "\n", markup=False)
    known = option_choices(make)
    for option, default in (make.__kwdefaults__ or {}).items():
        more = [repr(value) for value in known.get(option, ()) if value != default and not isinstance(value, bool)]
        out().print(f"  {option}={default!r}" + (f" (or {', '.join(more)})" if more else ""), markup=False)
    for format, rule in contract.rules.items():
        out().print(f"  methods of {format}: {', '.join(_spelled(format, rule)) or 'none'}", markup=False)
    for option, added in _under_options(make).items():
        for format, spellings in added.items():
            out().print(f"  methods of {format} with {option} too: {', '.join(spellings)}", markup=False)
    for format, rule in contract.rules.items():
        table = Table("slot", title=f"{contract.name}, {format}", title_justify="left")
        table.add_column("formula", overflow="fold")
        for slot, formula in formulas(rule).items():
            table.add_row(slot, formula)
        print_table(table)


def _as_json(name: str) -> dict[str, object]:
    """All that is shown of a contract, with its default options."""
    make = CONTRACTS[name]
    contract = make()
    return {
        "source": contract.source,
        "formats": _formats(contract),
        "methods": _methods(contract),
        "methods_by_format": {format: _spelled(format, rule) for format, rule in contract.rules.items()},
        "methods_by_option": _under_options(make),
        "options": dict(make.__kwdefaults__ or {}),
        "choices": option_choices(make),
        "formulas": {format: formulas(rule) for format, rule in contract.rules.items()},
    }


def _formats(contract: Contract) -> list[str]:
    return [f"{name} (decode)" if isinstance(rule, DecodeRule) else name for name, rule in contract.rules.items()]


def _methods(contract: Contract) -> list[str]:
    """Every method that the contract takes with these options, as `--method` and quantize(method=…) spell it."""
    return list(dict.fromkeys(text for format, rule in contract.rules.items() for text in _spelled(format, rule)))


def _spelled(format: str, rule: Rule) -> list[str]:
    """The methods of one format. gptq computes with any rule that quantizes to 4 bits."""
    solved = not isinstance(rule, DecodeRule) and get_format(format).element == E2M1
    return spelled_methods(rule) + [Gptq.name] * solved


def _under_options(make: Callable[..., Contract]) -> dict[str, dict[str, list[str]]]:
    """What one option adds to the methods of the defaults: the option as name=value, the format, and the methods."""
    own = {format: _spelled(format, rule) for format, rule in make().rules.items()}
    found: dict[str, dict[str, list[str]]] = {}
    for option, values in option_choices(make).items():
        for value in values:
            with suppress(UnsupportedError):  # a value that belongs to another option
                for format, rule in make(**{option: value}).rules.items():
                    if added := [text for text in _spelled(format, rule) if text not in own.get(format, ())]:
                        found.setdefault(f"{option}={value}", {})[format] = added
    return found


def _listed(make: Callable[..., Contract]) -> list[str]:
    """All methods of a contract for the table, those that an option adds last."""
    options: dict[tuple[str, ...], list[str]] = {}  # of what they add
    for option, added in _under_options(make).items():
        texts = _short(list(dict.fromkeys(text for spellings in added.values() for text in spellings)))
        options.setdefault(tuple(texts), []).append(option)
    return _short(_methods(make())) + [
        f"{text} ({' or '.join(names)})" for texts, names in options.items() for text in texts
    ]


def _short(spellings: list[str]) -> list[str]:
    """Spellings for a table: the choices of each option side by side."""
    names = list(dict.fromkeys(text.split(":")[0] for text in spellings))
    return [_choices(name, [text for text in spellings if text.split(":")[0] == name]) for name in names]


def _choices(name: str, spellings: list[str]) -> str:
    words = [text.split(":")[1:] for text in spellings]
    length = max(map(len, words))
    choices = [list(dict.fromkeys(word[at] for word in words if len(word) > at)) for at in range(length)]
    optional = [any(len(word) <= at for word in words) for at in range(length)]
    return name + "".join(
        f"[:{'|'.join(choice)}]" if may else f":{'|'.join(choice)}"
        for choice, may in zip(choices, optional, strict=True)
    )
