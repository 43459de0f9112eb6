"""Empty modules in place of compiled packages that need a GPU, so that the Python code around them can be imported.

Whatever is asked of such a module is an empty class: it can be subclassed, called, indexed or used as a decorator, and
does nothing. Code that computes with one gets nonsense at once, so nothing is passed off as a result.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class Blank(type):
    """The class of empty classes: any attribute is another one."""

    def __getattr__(cls, name: str) -> Blank:
        if name.startswith("__"):
            raise AttributeError(name)
        return blank(name)

    def __getitem__(cls, key: object) -> Blank:
        return cls


class Nothing(metaclass=Blank):
    """An empty object. Called with a function it gives the function back, as a decorator would."""

    def __init__(self, *arguments: object, **named: object) -> None:
        pass

    def __call__(self, *arguments: object, **named: object) -> object:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else self

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> dict[str, str]:
        """A field of this type takes anything."""
        return {"type": "any"}

    def __iter__(self) -> Iterator[object]:
        return iter(())

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()


def blank(name: str) -> Blank:
    return Blank(name, (Nothing,), {})


class EmptyModule(ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Blank:
        if name.startswith("__"):
            raise AttributeError(name)
        return blank(name)


class Finder(MetaPathFinder, Loader):
    """Finds the listed packages, and all that is under them, when no real one does."""

    def __init__(self, packages: Iterable[str]) -> None:
        self.packages = frozenset(packages)

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] in self.packages:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = EmptyModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def install(packages: Iterable[str]) -> None:
    """Stand in for packages that are not installed."""
    sys.meta_path.append(Finder(packages))
