"""Change the code in small ways and see whether the tests notice: a sample of mutations of some files.

    python -m tools.mutate src/halfbyte/casting --tests tests/casting --sample 60 --seed 0

Each mutation swaps a comparison or an operator, moves a whole number by one, turns a condition round, or leaves out a
`not`. The file is changed in place, the tests run until the first failure, and the file is put back. It prints the
mutations that no test noticed and the share of those that one did. Mutations that change nothing (a chunk size, say)
count as unnoticed: read them before you write a test.
"""

from __future__ import annotations

import argparse
import ast
import copy
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.Pow: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """One change: the text of a file before and after, and the line that differs."""

    path: Path
    line: int
    before: str
    after: str
    text: str
    """The whole file with the change."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before} → {self.after}"


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """What a node may be replaced by."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            new = copy.deepcopy(node)
            new.ops = [COMPARISONS[type(operator)]()]
            yield new
        case ast.BinOp() if type(node.op) in OPERATORS:
            binary = copy.deepcopy(node)
            binary.op = OPERATORS[type(node.op)]()
            yield binary
        case ast.BoolOp():
            boolean = copy.deepcopy(node)
            boolean.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield boolean
        case ast.UnaryOp(op=ast.Not()):
            yield copy.deepcopy(node.operand)
        case ast.IfExp():
            yield ast.IfExp(ast.UnaryOp(ast.Not(), copy.deepcopy(node.test)), node.body, node.orelse)
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(number)):
            yield ast.Constant(number + 1)


def mutations(path: Path) -> list[Mutation]:
    """All mutations of a file. Annotations and docstrings are left alone."""
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    tree = ast.parse(text)
    skipped = {id(inner) for note in _annotations(tree) for inner in ast.walk(note)}
    found = []
    raw = text.encode()
    for node in ast.walk(tree):
        if id(node) in skipped or not isinstance(node, ast.expr) or node.end_lineno is None:
            continue
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + (node.end_col_offset or 0)
        for new in changed(node):
            after = f"({ast.unparse(ast.fix_missing_locations(new))})"
            before = raw[begin:end].decode()
            mutated = (raw[:begin] + after.encode() + raw[end:]).decode()
            found.append(Mutation(path, node.lineno, before, after, mutated))
    return found


def _annotations(tree: ast.AST) -> Iterator[ast.AST]:
    """Expressions that no test can notice: annotations, and the parts of f-strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            yield node.returns
        elif isinstance(node, ast.JoinedStr):
            yield node


def is_noticed(mutation: Mutation, tests: list[str], seconds: int) -> bool:
    """Whether some test fails, or never ends, with the mutation in place."""
    original = mutation.path.read_text()
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    try:
        mutation.path.write_text(mutation.text)
        done = subprocess.run(command, capture_output=True, timeout=seconds, check=False)
        return done.returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        mutation.path.write_text(original)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path, help="files, or folders of them")
    parser.add_argument("--tests", nargs="+", required=True, help="what pytest runs for each mutation")
    parser.add_argument("--sample", type=int, default=50, help="how many mutations to try")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=300, help="tests that take longer have noticed")
    given = parser.parse_args()
    files = [file for path in given.sources for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    every = [mutation for file in files for mutation in mutations(file)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the file is put back
    chosen = random.Random(given.seed).sample(every, min(given.sample, len(every)))
    noticed = 0
    for number, mutation in enumerate(chosen, 1):
        if is_noticed(mutation, given.tests, given.seconds):
            noticed += 1
        else:
            print(f"unnoticed: {mutation}", flush=True)
        print(f"{number} of {len(chosen)}, {noticed} noticed", file=sys.stderr)
    print(f"{noticed} of {len(chosen)} noticed ({noticed / len(chosen):.0%}), seed {given.seed}, {len(every)} in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
