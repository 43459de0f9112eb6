"""The plain method: the largest magnitude of a block gets the largest code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from halfbyte.methods.spec import Method


@dataclass(frozen=True)
class Amax(Method):
    """Scale each block so that its largest magnitude becomes the format's largest element."""

    name: ClassVar[str] = "amax"
    everywhere: ClassVar[bool] = True
