"""Docstrings as Markdown, for the API pages: what is plain text in the source becomes a list or a code block.

A line `name: text`, where `name` is a parameter of the function, is an item of a list, with the indented lines after
it; those that begin with a choice and a colon, such as `"amax": text`, are a list within. A line that starts with a
name in backticks and a colon is a paragraph. Lines that start with `>>>`, and their output up to an empty line, are
code. The name of a page becomes a link to it. mkdocs.yml names this file as an extension of griffe, which reads the
source without importing it.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

try:
    import griffe  # type: ignore[import-not-found]
except ModuleNotFoundError:  # only the environment of the site has it; `as_markdown` needs nothing
    griffe = None

CHOICE = re.compile(r'    ("[^"]+"(, "[^"]+")*( or `[^`]+`)?|`hb\.[^`]+`): ')
"""An indented line that begins with values of a parameter."""


def as_markdown(text: str, parameters: Collection[str] = ()) -> str:
    """The docstring with its parameters as a list and its examples as code blocks."""
    lines: list[str] = []
    in_example = in_item = in_choices = False
    for line in text.splitlines():
        item = re.match(r"((\w+)(?:, \w+)*): (.*)", line)
        if in_example:
            if not line.strip():
                lines.append("```")
                in_example = False
        elif line.startswith(">>>"):
            lines += ["", "```pycon"]
            in_example, in_item = True, False
        elif item and item[2] in parameters:
            if not in_item:
                lines.append("")
            line, in_item, in_choices = f"- `{item[1]}`: {item[3]}", True, False
        elif re.match(r"`\w+`: ", line):
            lines.append("")
        elif in_item and CHOICE.match(line):
            lines += [""] * (not in_choices)
            line, in_choices = f"    - {line.strip()}", True
        elif in_item and not line.startswith(" "):
            lines.append("")
            in_item = False
        lines.append(line)
    whole = "\n".join(lines + ["```"] * in_example)
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", whole)


if griffe is not None:

    class Docstrings(griffe.Extension):  # type: ignore[misc]
        """Rewrites the docstring of every function and class that the pages show."""

        def on_function(self, *, func: Any, **kwargs: Any) -> None:
            if func.docstring:
                func.docstring.value = as_markdown(func.docstring.value, [one.name for one in func.parameters])

        def on_class(self, *, cls: Any, **kwargs: Any) -> None:
            if cls.docstring:
                cls.docstring.value = as_markdown(cls.docstring.value, list(cls.members))
