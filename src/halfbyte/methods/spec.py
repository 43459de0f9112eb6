"""The parent class of all methods."""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from halfbyte.errors import InputError, refuse_array


@dataclass(frozen=True, eq=False)
class Method:
    """A way to choose block scales, with its options. It contains no arithmetic and knows no backend.

    Methods with plain options compare by value. A method that holds arrays is equal only to itself, because backends
    cache what they derive from the arrays under the method as key.
    """

    name: ClassVar[str]
    everywhere: ClassVar[bool] = False
    """True: every contract has the method, because it uses nothing but the contract's own formulas. False: a contract
    has to define it."""
    one_row: ClassVar[bool] = False
    """True: it chooses scales for blocks of one row, so a tile cannot span several."""
    needs: ClassVar[str] = ""
    """What the caller has to give, if the method cannot be asked for by name alone."""
    variants: ClassVar[tuple[str, ...]] = ()
    """Spellings beside the name that a list of methods should show."""

    @property
    def spelling(self) -> str:
        """The method as a text that `quantize(method=…)` and `--method` take; arrays are left out.

        Options of a method that a contract defines are all named, because a name alone means the contract's own.
        """
        words, in_order = [self.name], True
        for option in plain_options(type(self)):
            value = getattr(self, option.name)
            if value == option.default and (self.everywhere or isinstance(value, bool)):
                in_order = in_order and isinstance(value, bool)
            elif value is True:
                words.append(option.name)
            elif (
                isinstance(value, str | int)
                and not isinstance(value, bool)
                and in_order
                and not (self.everywhere and isinstance(value, int))
            ):
                words.append(str(value))
            else:
                words.append(f"{option.name}={_text(value)}")
        return ":".join(words)

    def check_width(self, width: int, block: int) -> None:
        """Raise if the method's arrays do not belong to operands of that width. A method without arrays has no say."""
        return


def _text(value: object) -> str:
    """An option's value in a spelling: several numbers with commas between them, whole ones without a point."""
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    return f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value)


def is_tensor(values: object) -> bool:
    """Whether something is a torch tensor. Methods know nothing of torch, so they go by what only a tensor has."""
    return hasattr(values, "detach") and hasattr(values, "numpy")


def numbers(values: Any, dtype: type[np.floating[Any]], what: str) -> npt.NDArray[Any]:
    """Real values as a numpy array of that dtype. A torch tensor is copied from its device."""
    given = type(values).__name__
    if "complex" in str(getattr(values, "dtype", "")):
        raise InputError(f"{what} must be an array of real numbers, not of dtype {values.dtype}")
    try:
        if is_tensor(values):
            values = values.detach().cpu().double().numpy()
        return _array(values, dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"{what} must be an array of numbers, not {given}: {error}") from error


def _array(values: Any, dtype: type[np.floating[Any]]) -> npt.NDArray[Any]:
    try:
        return np.asarray(values, dtype=dtype)
    except (TypeError, ValueError, RuntimeError):
        if not (hasattr(values, "__dlpack__") and hasattr(values, "tolist")):
            raise
        return np.asarray(values.tolist(), dtype=dtype)  # bfloat16 of mlx, which numpy does not read


def frozen_copy(array: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """A read-only copy, so that everything derived from it stays valid."""
    copy = np.array(array)
    copy.setflags(write=False)
    return copy


def refuse_arrays(method: Method) -> None:
    """Raise if an option that is a name, a number or a truth value was given an array."""
    for option in plain_options(type(method)):
        refuse_array(f"{option.name} of {type(method).__name__}", getattr(method, option.name))


def plain_options(kind: type[Method]) -> list[Field[Any]]:
    """The options of a method that a text can give: all but arrays, in their order."""
    return [option for option in fields(kind) if option.type != "object" and option.default is not MISSING]
