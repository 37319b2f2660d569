"""A grid file's text as arms, or a refusal that says what to change. Reads no file, loads no model.

    title = "What this is about"      # optional, as are the next two
    repeats = 5                       # measured rounds; one more before them warms up
    seed = 0                          # of the prompts, and of the order of the arms in each round

    [grid]                            # see axes.py; a list is an axis, and the arms are the product
    connector = ["none", "PipelineConnector"]
    load_mode = ["recompute", "bulk", "layerwise"]
    prefix = [256, 512]

    [connectors.mine]                 # optional: a KV-transfer config by a name of your own
    kv_connector = "ExampleConnector"
    kv_role = "kv_both"
    kv_connector_extra_config = { shared_storage_path = "{scratch}" }

    [[exclude]]                       # optional: arms to leave out of the product
    load_mode = "bulk"
    prefix = [256]

    [[points]]                        # optional: arms beside the product; the rest as in [grid]
    load_mode = "auto"
    prefix = 1024

A grid without lists is no arm of its own where there are points. `{scratch}` is a new folder,
removed at the end. Arms that are the same, since what they differ in does not matter to them, are
one.
"""

from __future__ import annotations

import dataclasses
import itertools
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

from interlace.bench.grid.axes import (
    AXES,
    NONE,
    PIPELINE,
    TRANSFORMERS,
    Value,
    did_you_mean,
    text,
    whole,
)
from interlace.bench.grid.points import Point, settled
from interlace.connectors.factory import KVConnectorFactory
from interlace.engine.config import KVTransferConfig
from interlace.engine.errors import ConfigError

MAX_ARMS: Final = 256
_TOP: Final = {
    "title": "what the experiment is about, for tables and pictures",
    "repeats": "measured rounds; one more before them warms up",
    "seed": "of the prompts, and of the order of the arms",
    "grid": "a table with the keys that are held or varied",
    "connectors": "tables [connectors.NAME], a KV-transfer config each",
    "exclude": "tables [[exclude]]: arms to leave out of the product",
    "points": "tables [[points]]: arms beside the product",
}
_BY_AXES: Final = ("store", "load_mode", "group_size")
"""Options of PipelineConnector that keys of the grid stand for."""
_BY_FILES: Final = ("path", "tiers")

Raw = Mapping[str, Value]


@dataclasses.dataclass(frozen=True, slots=True)
class GridSpec:
    """What a file asks for."""

    title: str
    repeats: int
    seed: int
    points: tuple[Point, ...]
    """The arms, different ones."""
    base: Raw
    """The first value of each key, for what does not matter to an arm."""
    connectors: Mapping[str, Mapping[str, Any]]
    """Fields of `KVTransferConfig` by the names that arms know; none for "none"."""
    grid: Mapping[str, Any]
    """As the file says it, for the record."""

    def has_load_modes(self, connector: str | None) -> bool:
        """Whether arms of that connector take one of PipelineConnector's load modes."""
        return _has_load_modes(self.connectors, connector)


def parse_grid(content: bytes, name: str) -> GridSpec:
    """The grid in the content of a file that messages call `name`.

    Raises: `ConfigError` for what is not TOML, unknown keys and values out of range: it names the
    key, says what it means and what to give.
    """
    return _Parser(name).parse(content)


class _Parser:
    """Knows what messages call the file."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._connectors: dict[str, Mapping[str, Any]] = {}

    def parse(self, content: bytes) -> GridSpec:
        """See `parse_grid`."""
        found = self._toml(content)
        self._check_keys("", found, _TOP)
        self._connectors = {
            PIPELINE: {"kv_connector": PIPELINE, "kv_role": "kv_both"},
            **dict(self._named_connectors(found.get("connectors", {}))),
        }
        grid = self._table("grid", found.get("grid", {}))
        lists = {key: self._values(f"grid.{key}", key, value) for key, value in grid.items()}
        base = {key: lists[key][0] if key in lists else axis.default for key, axis in AXES.items()}
        points = list(self._points(found.get("points", []), grid, base))
        has_axes = any(len(values) > 1 for values in lists.values())
        if has_axes or not points:
            points = [*self._product(lists, base, found.get("exclude", [])), *points]
        elif "exclude" in found:
            self._refuse("exclude", _TOP["exclude"], "there is no product: leave it out")
        arms = tuple(dict.fromkeys(self._settled(point) for point in points))
        if not 0 < len(arms) <= MAX_ARMS:
            self._refuse(
                "grid", f"it comes to {len(arms):,} arms", f"choose values for 1 to {MAX_ARMS}"
            )
        return GridSpec(
            title=self._scalar(found, "title", self._name, text),
            repeats=self._scalar(found, "repeats", 5, whole(1, 1000)),
            seed=self._scalar(found, "seed", 0, whole(0, 2**63 - 1)),
            points=arms,
            base=base,
            connectors=self._connectors,
            grid=found,
        )

    def _toml(self, content: bytes) -> dict[str, Any]:
        try:
            return tomllib.loads(content.decode("utf-8"))
        except (ValueError, RecursionError) as error:  # what is no UTF-8 is a ValueError too
            raise ConfigError(
                f"{self._name} is not TOML ({error}): mend it; `interlace bench run --help` shows"
                " an example."
            ) from error

    def _points(
        self, tables: object, grid: Mapping[str, object], base: Raw
    ) -> Iterator[dict[str, Value]]:
        for place, table in self._tables("points", tables):
            values = {}
            for key, value in table.items():
                if isinstance(value, list):
                    meaning = AXES[key].meaning
                    self._refuse(f"{place}.{key} = {value!r}", meaning, "give one value in a point")
                (values[key],) = self._values(f"{place}.{key}", key, value)
            for key, value in grid.items():
                if key not in values and isinstance(value, list) and len(value) > 1:
                    self._refuse(
                        f"{place}.{key}",
                        AXES[key].meaning,
                        "say it in the point, since [grid] has several values",
                    )
            yield {**base, **values}

    def _product(
        self, lists: Mapping[str, Sequence[Value]], base: Raw, excluded: object
    ) -> Iterator[dict[str, Value]]:
        rules = [
            (place, {key: self._values(f"{place}.{key}", key, value) for key, value in t.items()})
            for place, t in self._tables("exclude", excluded)
        ]
        size = 1
        for values in lists.values():
            size *= len(values)
        if size > 64 * MAX_ARMS:
            self._refuse("grid", f"it comes to {size:,} arms", f"choose values for {MAX_ARMS}")
        useless = dict(rules)
        for values_of_one in itertools.product(*lists.values()):
            point = {**base, **dict(zip(lists, values_of_one, strict=True))}
            matching = [
                place
                for place, rule in rules
                if all(point[key] in values for key, values in rule.items())
            ]
            for place in matching:
                useless.pop(place, None)
            if not matching:
                yield point
        for place in useless:
            self._refuse(place, _TOP["exclude"], "no arm is so: mend its values, or leave it out")

    def _settled(self, values: Raw) -> Point:
        connector = values["connector"]
        if values["engine"] == TRANSFORMERS and values["batch"] != 1:
            self._refuse(
                f"grid.batch = {values['batch']!r}",
                f"{AXES['batch'].meaning}; transformers is run with one",
                'leave such arms out by [[exclude]] with engine = "transformers", batch = '
                f"{values['batch']}",
            )
        assert connector is None or isinstance(connector, str), "it was checked"
        return settled(values, _has_load_modes(self._connectors, connector))

    def _values(self, place: str, key: str, value: object) -> list[Value]:
        """One value as a list of one; different ones."""
        axis = AXES[key]
        values: list[Any] = value if isinstance(value, list) else [value]
        if not values:
            self._refuse(f"{place} = []", axis.meaning, "give one value at least")
        for number, one in enumerate(values):
            shown = f"{place} = {one!r}"
            remedy = axis.check(one)
            if remedy is None and key == "connector":
                remedy = self._about_connector(one)
            if remedy is not None:
                self._refuse(shown, axis.meaning, remedy)
            if one in values[:number]:
                self._refuse(shown, axis.meaning, "it stands there twice: leave one out")
        return values

    def _about_connector(self, name: str) -> str | None:
        known = (NONE, *self._connectors)
        if name in known:
            return None
        if name in KVConnectorFactory().known_names:
            return (
                f"describe it in a table [connectors.{name}] with kv_connector = {name!r} and"
                " kv_role"
            )
        return f"{did_you_mean(name, known)}choose of {', '.join(known)}"

    def _named_connectors(self, tables: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for name, fields in self._table("connectors", tables, known=None).items():
            place = f"connectors.{name}"
            if name == NONE:
                self._refuse(place, "it means that there is no connector", "choose another name")
            config = self._table(place, fields, known=None)
            try:
                transfer = KVTransferConfig(**config)
            except ConfigError as error:
                raise ConfigError(f"{self._name}: {place}: {error}") from error
            if transfer.kv_connector is None:
                self._refuse(
                    f"{place}.kv_connector",
                    "the connector's class",
                    'give a name, as in kv_connector = "ExampleConnector"',
                )
            if _is_pipeline(config):
                self._check_pipeline(place, transfer.kv_connector_extra_config)
            yield name, config

    def _check_pipeline(self, place: str, options: Mapping[str, object]) -> None:
        for key in options:
            shown = f"{place}.kv_connector_extra_config.{key}"
            if key in _BY_AXES:
                self._refuse(shown, "it is a key of the grid", f"say {key} in [grid]")
            if key in _BY_FILES:
                self._refuse(
                    shown,
                    "files lie in a new folder, removed at the end",
                    'say store = "file" in [grid], and --path DIR for where that is',
                )

    def _table(
        self, place: str, found: object, known: Iterable[str] | None = tuple(AXES)
    ) -> dict[str, Any]:
        """A table, with known keys of the grid unless `known` is None."""
        if not isinstance(found, dict):
            self._refuse(
                f"{place} = {found!r}", _TOP.get(place, "a table"), f"write it as [{place}]"
            )
        if known is not None:
            self._check_keys(place, found, known)
        return found

    def _tables(self, key: str, found: object) -> Iterator[tuple[str, dict[str, Any]]]:
        if not isinstance(found, list):
            self._refuse(f"{key} = {found!r}", _TOP[key], f"write each as [[{key}]]")
        for number, table in enumerate(found, start=1):
            place = f"{key}[{number}]"
            if not self._table(place, table):
                self._refuse(place, _TOP[key], "it is empty: give it a key, or leave it out")
            yield place, table

    def _check_keys(self, place: str, table: Mapping[str, object], known: Iterable[str]) -> None:
        known = tuple(known)
        for key in table:
            if key in known:
                continue
            where = f"{place}.{key}" if place else key
            if not place and key in AXES:
                self._refuse(where, AXES[key].meaning, "move it below [grid]")
            self._refuse(
                where,
                "there is no such key",
                did_you_mean(key, known) + f"known: {', '.join(known)}",
            )

    def _scalar(self, found: Mapping[str, Any], key: str, default: Any, check: Any) -> Any:
        value = found.get(key, default)
        remedy = check(value)
        if remedy is not None:
            self._refuse(f"{key} = {value!r}", _TOP[key], remedy)
        return value

    def _refuse(self, what: str, meaning: str, remedy: str) -> NoReturn:
        raise ConfigError(f"{self._name}: {what}: {meaning}; {remedy}.")


def _is_pipeline(config: Mapping[str, Any] | None) -> bool:
    return (
        config is not None
        and config.get("kv_connector") == PIPELINE
        and config.get("kv_connector_module_path") is None
    )


def _has_load_modes(connectors: Mapping[str, Mapping[str, Any]], connector: str | None) -> bool:
    return connector is not None and _is_pipeline(connectors.get(connector))
