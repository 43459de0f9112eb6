"""The `halfbyte` command: parse, call the library, print. No numerics here. One command per file."""

from halfbyte.cli import conform, contracts, convert, inspect, study, verify, warm
from halfbyte.cli.app import app

__all__ = ["app", "conform", "contracts", "convert", "inspect", "study", "verify", "warm"]
