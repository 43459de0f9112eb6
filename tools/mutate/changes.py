"""All small changes of a file: each swaps a comparison or an operator, moves a whole number by one, turns a condition
round, leaves out a `not`, or leaves out a call whose result nobody uses."""

from __future__ import annotations

import ast
import copy
from collections import Counter
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
    """One change of a file."""

    path: Path
    number: int
    """Of the line, from 1."""
    function: str
    """The function or method around it, `Class.method`; empty in the body of the module or of a class."""
    line: str
    """The text of the line where the change begins, stripped."""
    change: str
    """Before → after. If the line has several of the same kind, the later ones carry `(2nd)`, `(3rd)`, …"""
    text: str
    """The whole file with the change."""

    def __str__(self) -> str:
        return f"{self.path}:{self.number}: {self.change}   in: {self.line}"


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
        case ast.AugAssign() if type(node.op) in OPERATORS:
            assignment = copy.deepcopy(node)
            assignment.op = OPERATORS[type(node.op)]()
            yield assignment
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
        case ast.Expr(value=ast.Call()):
            yield ast.Constant(None)


def mutations(path: Path) -> list[Mutation]:
    """All mutations of a file, in the order of its lines. What `_unnoticeable` lists is left alone."""
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    tree = ast.parse(text)
    skipped = {id(inner) for note in _unnoticeable(tree) for inner in ast.walk(note)}
    conditions = {id(node.test) for node in ast.walk(tree) if isinstance(node, ast.If | ast.While)}
    raw = text.encode()
    found: list[Mutation] = []
    times: Counter[tuple[int, str]] = Counter()
    for node, function in _inside(tree, ""):
        if id(node) in skipped or not isinstance(node, ast.expr | ast.stmt) or node.end_lineno is None:
            continue
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + (node.end_col_offset or 0)
        before = raw[begin:end].decode()
        news = list(changed(node))
        if id(node) in conditions and isinstance(node, ast.Name | ast.Call | ast.Attribute | ast.Subscript):
            news.append(ast.UnaryOp(ast.Not(), copy.deepcopy(node)))
        for new in news:
            after = ast.unparse(ast.fix_missing_locations(new))
            lost = "\n" * (before.count("\n") - after.count("\n"))  # the lines below stay where they are
            open, close = ("(", ")") if isinstance(node, ast.expr) else ("", "")
            change = " ".join(f"{before} → {open}{after}{close}".split())
            times[node.lineno, change] += 1
            nth = times[node.lineno, change]
            if nth > 1:
                change += f" ({nth}{'nd' if nth == 2 else 'rd' if nth == 3 else 'th'})"
            mutated = (raw[:begin] + f"{open}{after}{lost}{close}".encode() + raw[end:]).decode()
            found.append(Mutation(path, node.lineno, function, lines[node.lineno - 1].strip(), change, mutated))
    return sorted(found, key=lambda mutation: mutation.number)


def _inside(node: ast.AST, function: str, prefix: str = "") -> Iterator[tuple[ast.AST, str]]:
    """Every node below one, each with the outermost function around it."""
    for child in ast.iter_child_nodes(node):
        yield child, function
        name, below = function, prefix
        if isinstance(child, ast.ClassDef) and not function:
            below = f"{prefix}{child.name}."
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not function:
            name = f"{prefix}{child.name}"
        yield from _inside(child, name, below)


LOOKS_AND_CHECKS = {"dataclass": ("slots", "repr"), "field": ("repr",), "zip": ("strict",)}
"""Function → arguments that no result depends on: memory, the text for debuggers, an assertion that lengths agree."""


def _unnoticeable(tree: ast.AST) -> Iterator[ast.AST]:
    """What no test can notice: annotations, the parts of f-strings, `if TYPE_CHECKING`, lengths of -1 that `reshape`
    finds, and LOOKS_AND_CHECKS.
    """
    for node in ast.walk(tree):
        match node:
            case ast.AnnAssign(annotation=note) | ast.arg(annotation=note) | ast.FunctionDef(returns=note):
                if note is not None:
                    yield note
            case ast.JoinedStr():
                yield node
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield node.test
            case ast.Call(func=ast.Attribute(attr="reshape"), args=lengths):
                yield from (one for one in lengths if ast.unparse(one) == "-1")  # numpy takes any negative length
            case ast.Call(func=ast.Name(id=name), keywords=given):
                yield from (one.value for one in given if one.arg in LOOKS_AND_CHECKS.get(name, ()))
