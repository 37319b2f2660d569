"""What is made when somebody asks first."""

from __future__ import annotations

import pytest

from interlace.layers.lazily import Lazily


def test_it_is_made_once_when_somebody_asks() -> None:
    made: list[str] = []

    def make() -> int:
        made.append("made")
        return len(made)

    value = Lazily(make)
    assert made == []
    assert not value.is_made
    assert [value(), value()] == [1, 1]
    assert value.is_made


def test_what_failed_once_has_failed() -> None:
    made: list[str] = []

    def fail() -> int:
        made.append("tried")
        raise OSError("no")

    value = Lazily(fail)
    for _ in range(2):
        with pytest.raises(OSError, match="no"):
            value()
    assert made == ["tried"]
    assert not value.is_made
