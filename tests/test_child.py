"""A process of its own that answers a question: its answer, its error, its end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import halfbyte
from halfbyte.child import LONGEST, ask, one_line
from halfbyte.errors import ModelCodeError

SOURCE = str(Path(halfbyte.__file__).parents[1])


def asked(folder: Path, body: str, *arguments: str, seconds: float = 60) -> Any:
    """What a module whose `main` has this body answers."""
    program = f"import os, sys\nfrom halfbyte.child import answer\ndef main(*given):\n    {body}\nanswer(main)\n"
    (folder / "sample_child.py").write_text(program)
    return ask("sample_child", *arguments, settings={"PYTHONPATH": f"{folder}{os.pathsep}{SOURCE}"}, seconds=seconds)


def test_the_answer_is_what_main_returns(tmp_path: Path) -> None:
    assert asked(tmp_path, "print('talk'); return {'given': given}", "a", "b c") == {"given": ["a", "b c"]}


def test_no_network_and_no_code_in_the_users_cache(tmp_path: Path) -> None:
    found = asked(tmp_path, "return [os.environ['HF_HUB_OFFLINE'], os.environ['HF_MODULES_CACHE']]")
    assert found[0] == "1"
    assert not Path(found[1]).exists()


def test_an_error_is_its_text_on_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelCodeError) as caught:
        asked(tmp_path, "raise ValueError('first\\n  second')")
    assert str(caught.value) == "ValueError: first second"


def test_an_error_of_our_own_comes_without_its_class(tmp_path: Path) -> None:
    with pytest.raises(ModelCodeError) as caught:
        asked(tmp_path, "from halfbyte.errors import ModelCodeError; raise ModelCodeError('not installed')")
    assert str(caught.value) == "not installed"


def test_a_process_that_dies_in_silence(tmp_path: Path) -> None:
    with pytest.raises(ModelCodeError, match="ended with status -9 and said nothing"):
        asked(tmp_path, "os.kill(os.getpid(), 9)")


def test_a_process_that_takes_too_long_is_stopped_with_its_children(tmp_path: Path) -> None:
    body = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.fork() or os.getpid())); import time; time.sleep(600)"
    with pytest.raises(ModelCodeError, match="no answer after 3 s"):
        asked(tmp_path, body, seconds=3)
    grandchild = Path("/proc", (tmp_path / "pid").read_text(), "cmdline")
    while grandchild.exists() and grandchild.read_bytes():  # killed, and about to go
        os.sched_yield()


def test_a_folder_where_the_user_is_does_not_hide_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "json.py").write_text("raise ImportError('the wrong one')")
    monkeypatch.chdir(tmp_path / "here")
    assert asked(tmp_path, "return 1") == 1


def test_a_long_text_is_cut() -> None:
    assert one_line("x" * (LONGEST + 1)) == "x" * LONGEST + "…"
