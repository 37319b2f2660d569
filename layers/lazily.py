"""What is made when somebody asks first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Lazily(Generic[T]):
    """A value that is made once, by whoever asks first. If that fails, it fails for all: who asks
    again shall not go on with what was made by half. One thread."""

    def __init__(self, make: Callable[[], T]) -> None:
        """`make` is called once, or never."""
        self._make: Callable[[], T] | None = make
        self._made: list[T] = []
        self._error: BaseException | None = None

    @property
    def is_made(self) -> bool:
        """Whether somebody asked, and it did not fail."""
        return bool(self._made)

    def __call__(self) -> T:
        """The value. Raises: what making it raised."""
        if self._make is not None:
            make, self._make = self._make, None
            try:
                self._made.append(make())
            except BaseException as error:
                self._error = error
                raise
        if self._error is not None:
            raise self._error
        return self._made[0]
