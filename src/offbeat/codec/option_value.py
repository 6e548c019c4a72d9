"""Objects that a user puts into a strategy's options."""

from __future__ import annotations


class OptionValue:
    """An object that stands for the values it holds: two of one class are equal if their attributes
    are.

    Its description holds no address, because all ranks compare descriptions of their options.
    """

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in sorted(vars(self).items()))
        return f"{type(self).__qualname__}({values})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(repr(self))
