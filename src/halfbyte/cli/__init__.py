"""The `halfbyte` command: parse, call the library, print. No numerics here. One command per file."""

from halfbyte.cli.interrupts import ended_by_ctrl_c

with ended_by_ctrl_c():
    from halfbyte.cli import calibrate, conform, contracts, convert, evaluate, finish, inspect, study, verify, warm
    from halfbyte.cli.app import app

__all__ = [
    "app",
    "calibrate",
    "conform",
    "contracts",
    "convert",
    "evaluate",
    "finish",
    "inspect",
    "study",
    "verify",
    "warm",
]
