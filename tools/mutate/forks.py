"""Tests of mutations in forks of one process that has imported and collected everything, which takes most of the time.

In a fork the code of the mutated function is put in place of the old, in every function object that has it, whoever
holds it. That is what a fresh import would give for functions that nobody calls before the tests; for others, and for
lines outside functions, `tools.mutate.trial` starts afresh.
"""

from __future__ import annotations

import functools
import gc
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import IO

from tools.mutate.changes import Mutation
from tools.mutate.pytest_run import await_end, start_pytest

NOT_REPLACEABLE = 77
"""Exit status of a fork that could not put the new code in place."""
OUTPUT = "server.txt"


@dataclass
class Server:
    """A process that waits for what to try, as its caller sees it."""

    pid: int
    requests: IO[str]
    answers: IO[str]
    copy: Path

    def ask(self, mutation: Mutation, tests: list[str], seconds: float) -> tuple[int, str]:
        """The exit status of these tests with a mutation in place, and the name of the first that failed."""
        failed = self.copy / "failed.txt"
        failed.write_text("")
        self.requests.write(json.dumps([mutation.path.as_posix(), mutation.text, tests, seconds]) + "\n")
        self.requests.flush()
        return int(self.answer()), failed.read_text()

    def answer(self) -> str:
        answer = self.answers.readline()
        if not answer:
            self.close()
            raise RuntimeError((self.copy / OUTPUT).read_text()[-3000:])
        return answer

    def close(self) -> None:
        self.requests.close()
        self.answers.close()
        await_end(self.pid, 10)


def start_server(copy: Path, tests: list[str]) -> Server:
    """Collect tests in a process of their own, and wait there."""
    (request_end, requests), (answers, answer_end) = os.pipe(), os.pipe()
    pid = start_pytest(
        copy,
        tests,
        {"MUTATE_SERVE": f"{request_end} {answer_end}", "MUTATE_FAILED": str(copy / "failed.txt")},
        close=(requests, answers),
        output=OUTPUT,
    )
    os.close(request_end)
    os.close(answer_end)
    server = Server(pid, os.fdopen(requests, "w"), os.fdopen(answers), copy)
    server.answer()
    return server


def serve() -> list[str] | None:
    """In the server: answer until nobody asks any more, then None. In each fork: the names of the tests to run."""
    request_end, answer_end = map(int, os.environ["MUTATE_SERVE"].split())
    with os.fdopen(request_end) as requests, os.fdopen(answer_end, "w") as answers:
        gc.collect()
        gc.freeze()
        print("collected", file=answers, flush=True)
        for line in requests:
            path, text, tests, seconds = json.loads(line)
            pid = os.fork()
            if pid == 0:
                os.setsid()
                gc.unfreeze()
                try:
                    put_in_place(Path(path).resolve(), text)
                except ValueError:
                    os._exit(NOT_REPLACEABLE)
                return list(tests)
            print(await_end(pid, seconds), file=answers, flush=True)
    return None


def put_in_place(path: Path, text: str) -> None:
    """Give every function of a file its code as in a new text, whose lines are where they were. Forget what was cached.

    Raises ValueError if a function has other outer variables than before, and if no code is another: then the change is
    in the values of arguments that are left out, or in a decorator, which an import makes.
    """
    new = {
        (code.co_qualname, code.co_firstlineno): code
        for code in _nested(compile(text, str(path), "exec", dont_inherit=True))
    }
    changed = False
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__code__.co_filename == str(path):
            code = new.get((thing.__code__.co_qualname, thing.__code__.co_firstlineno))
            if code is None:
                raise ValueError(f"{thing.__qualname__} is gone")
            changed = changed or code != thing.__code__
            thing.__code__ = code
        elif type(thing) is functools._lru_cache_wrapper and thing.__module__.startswith("halfbyte"):
            thing.cache_clear()
    if not changed:
        raise ValueError("no code is another")


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
