"""The base of option records: unknown fields and bad values are refused by name."""

from __future__ import annotations

import dataclasses
import math

import pytest

from interlace.engine.errors import ConfigError, SamplingError
from interlace.engine.options import Options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Toy(Options):
    width: int = 1
    height: float = 1.0
    colour: str = "red"

    def __post_init__(self) -> None:
        self.require_int("width", 1, 9)
        self.require_number("height", 0.0)
        self.require_choice("colour", ("red", "blue"))


class SamplingToy(Toy):
    error = SamplingError


def test_a_misspelt_field_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"Toy has no field 'widht'. Did you mean 'width'"):
        Toy(widht=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["cls", "self", "args"])
def test_a_field_named_like_an_argument_of_our_own_is_refused_like_any_other(name: str) -> None:
    with pytest.raises(ConfigError, match=f"no field '{name}'"):
        Toy(**{name: 1})  # type: ignore[arg-type]


def test_a_foreign_field_gets_the_list_of_known_ones() -> None:
    with pytest.raises(ConfigError, match="Known: width, height, colour"):
        Toy(zzz=3)  # type: ignore[call-arg]


def test_a_subclass_raises_its_own_error() -> None:
    with pytest.raises(SamplingError, match="SamplingToy: width must be a whole number from 1"):
        SamplingToy(width=10)


def test_a_copy_is_checked_like_the_original() -> None:
    with pytest.raises(ConfigError, match="width"):
        dataclasses.replace(Toy(), width=0)
    with pytest.raises(ConfigError, match="no field 'depth'"):
        dataclasses.replace(Toy(), depth=0)  # type: ignore[call-arg,misc,unused-ignore]


@pytest.mark.parametrize("width", [0, 10, 2.0, True, "3", None, math.nan, 10**400])
def test_whole_numbers(width: object) -> None:
    with pytest.raises(ConfigError, match="width must be a whole number from 1 to 9"):
        Toy(width=width)  # type: ignore[arg-type]


@pytest.mark.parametrize("height", [-0.1, math.nan, math.inf, -math.inf, True, "3", None])
def test_numbers_are_finite_and_in_range(height: object) -> None:
    with pytest.raises(ConfigError, match="height must be a number at least 0"):
        Toy(height=height)  # type: ignore[arg-type]


def test_bounds_themselves_are_allowed() -> None:
    assert Toy(width=9, height=0).width == 9
    assert Toy(width=1, height=10**400).height == 10**400, "an int beyond float is a number too"


@pytest.mark.parametrize("colour", ["green", None, ["red"], {}])
def test_choices(colour: object) -> None:
    with pytest.raises(ConfigError, match="colour must be one of 'red', 'blue'"):
        Toy(colour=colour)  # type: ignore[arg-type]
