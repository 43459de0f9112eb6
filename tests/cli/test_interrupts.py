"""Ctrl-C before a command has begun: no traceback."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import typer

from halfbyte.cli import app
from halfbyte.cli.interrupts import ended_by_ctrl_c

IMPORTING = """
import os, signal, sys, time

class Interrupt:
    def find_spec(name, path=None, target=None):
        if name == "halfbyte.cli.calibrate":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1e-3)  # a Python handler would run here
            raise SystemExit("went on")

signal.signal(signal.SIGINT, getattr(signal, sys.argv[1]))
sys.meta_path.insert(0, Interrupt)
import halfbyte.cli
"""


@pytest.mark.parametrize(
    ("handler", "code", "said"), [("default_int_handler", -signal.SIGINT, ""), ("SIG_IGN", 1, "went on\n")]
)
def test_ctrl_c_while_modules_are_imported(handler: str, code: int, said: str) -> None:
    program = [sys.executable, "-c", IMPORTING, handler]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr, done.stdout) == (code, said, "")


def test_afterwards_ctrl_c_is_an_exception_again() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ended_by_ctrl_c():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_the_commands_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(app: typer.Typer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("typer.main.get_command", interrupted)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as end:  # the latter would stop all tests
        app()
    assert getattr(end.value, "code", None) == 130
