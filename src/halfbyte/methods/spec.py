"""The common shape of a method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Method:
    """A way to choose block scales, with its options. Knows no arithmetic and no backend."""

    name: ClassVar[str]
