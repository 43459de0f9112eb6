"""The plain method: the block's largest magnitude meets the largest code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from halfbyte.methods.spec import Method


@dataclass(frozen=True)
class Amax(Method):
    """Scale each block so that its largest magnitude lands on the format's largest element."""

    name: ClassVar[str] = "amax"
    everywhere: ClassVar[bool] = True
