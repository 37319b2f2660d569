"""The sandbox that chat templates run in, with a bound on what one rendering may cost.

A template comes with a model, so it is someone else's program. Jinja's sandbox keeps it from
Python's internals; the `Meter` keeps it from running or growing without end: loop rounds, calls
and copied text are charged, and operations that can grow a value at once are sized before they
run. Knows nothing of messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, final

import jinja2
from jinja2 import nodes, runtime
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARS: Final = 16 * 2**20
"""Longest text or list that a template may make."""
MAX_COST: Final = 2_000_000
"""Loop rounds, calls and KiB of copied text of one rendering, together."""
MAX_WIDTH: Final = 10_000
"""Largest number that may be passed to a text method, such as `center`."""
METER_KEY: Final = "*meter*"
"""Where a rendering's `Meter` lies among its variables: not a name that a template can write."""

_FILTERS = frozenset(
    {"abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float"}
    | {"int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject"}
    | {"rejectattr", "reverse", "round", "safe", "select", "selectattr", "sort", "string", "sum"}
    | {"title", "trim", "unique", "upper"}
)
_GLOBALS = ("dict", "namespace", "range")
_REFUSED_ATTRIBUTES = frozenset({"expandtabs", "translate", "to_bytes", "format_map"})
_WIDE_FORMAT = re.compile(r"\d{5}|\*|\{[^{}]*\{")


@final
class Meter:
    """What one rendering has cost so far."""

    def __init__(self, limit: int = MAX_COST) -> None:
        self._left = limit

    def charge(self, cost: int = 1) -> None:
        """Add to the cost. Raises: `SecurityError` beyond the limit."""
        self._left -= cost
        if self._left < 0:
            raise SecurityError("the template does too much work")

    def charge_size(self, size: int) -> None:
        """Add the making of `size` characters or items. Raises: `SecurityError` if too many."""
        if size > MAX_CHARS:
            raise SecurityError("the template makes a text or list that is too long")
        self.charge(1 + size // 1024)

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items, each charged as it is taken."""
        for item in items:
            self.charge()
            yield item


def _meter(context: runtime.Context) -> Meter:
    # `parent` holds what was passed in; a template's own variables lie elsewhere.
    meter = context.parent[METER_KEY]
    assert isinstance(meter, Meter)
    return meter


def _size(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


@jinja2.pass_context
def _metered(context: runtime.Context, items: Iterable[Any]) -> Iterator[Any]:
    return _meter(context).each(items)


@jinja2.pass_context
def _sized(context: runtime.Context, value: Any) -> Any:
    _meter(context).charge_size(_size(value))
    return value


@jinja2.pass_context
def _join(
    context: runtime.Context, items: Iterable[Any], d: str = "", attribute: str | None = None
) -> str:
    if attribute is not None:
        items = (context.environment.getitem(item, attribute) for item in items)
    texts = [str(item) for item in _meter(context).each(items)]
    _meter(context).charge_size(_joined_size(str(d), texts))
    return str(d).join(texts)


@jinja2.pass_context
def _replace(context: runtime.Context, text: Any, old: str, new: str, count: int = -1) -> str:
    _meter(context).charge_size(_replaced_size(str(text), str(old), str(new)))
    return str(text).replace(str(old), str(new), count)


@jinja2.pass_context
def _indent(context: runtime.Context, text: Any, width: int | str = 4, first: bool = False) -> str:
    pad = width if isinstance(width, str) else " " * min(width, MAX_WIDTH)
    lines = str(text).splitlines(keepends=True)
    _meter(context).charge_size(len(str(text)) + len(pad) * len(lines))
    padded = [pad + line if line.strip() and (first or i) else line for i, line in enumerate(lines)]
    return "".join(padded)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Hugging Face has it: without Jinja's HTML escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=None if indent is None else min(indent, 16),
        separators=separators,
        sort_keys=sort_keys,
    )


def _joined_size(glue: str, texts: list[Any]) -> int:
    return sum(_size(text) for text in texts) + len(glue) * len(texts)


def _replaced_size(text: str, old: str, new: str) -> int:
    return len(text) + text.count(old) * max(0, len(new) - len(old))


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


@final
class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja as Hugging Face sets it up for chat templates, and metered."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        self.filters = {name: self.filters[name] for name in _FILTERS} | {
            "_metered": _metered,
            "_sized": _sized,
            "indent": _indent,
            "join": _join,
            "replace": _replace,
            "tojson": _tojson,
        }
        self.globals = {name: self.globals[name] for name in _GLOBALS}

    def metered_template(self, source: str) -> jinja2.Template:
        """Compile `source` so that its loops and `~` are charged to the `Meter` it is given.

        Raises: `jinja2.TemplateError` if it is not a template.
        """
        tree = self.parse(source)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _filtered(loop.iter, "_metered")
        _size_concatenations(tree)
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Refuse at once; Jinja's own way would print an empty string."""
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is not allowed")

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Also refuse methods that grow a text by amounts that cannot be told beforehand."""
        return attr not in _REFUSED_ATTRIBUTES and super().is_safe_attribute(obj, attr, value)

    def call(
        self, context: runtime.Context, obj: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call `obj` from a template, charged; text methods that grow are sized beforehand."""
        meter = _meter(context)
        meter.charge()
        text = getattr(obj, "__self__", None)
        if isinstance(text, str):
            meter.charge_size(len(text))
            _check_text_method(meter, text, getattr(obj, "__name__", ""), args)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right` once its size is known to be fair."""
        meter = _meter(context)
        if operator == "+":
            meter.charge_size(_size(left) + _size(right))
        elif operator == "%":
            if isinstance(left, str) and _WIDE_FORMAT.search(left):
                raise SecurityError("the template pads a text too far")
        elif operator == "*":
            _check_product(meter, left, right)
        elif _bits(left) * abs(int(right)) > 1024:
            raise SecurityError("the template raises a number to too high a power")
        return super().call_binop(context, operator, left, right)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    wrapped = nodes.Filter(node, name, [], [], None, None)
    wrapped.set_lineno(node.lineno)
    return wrapped


def _size_concatenations(tree: nodes.Node) -> None:
    """Wrap every `a ~ b` below `tree`, innermost first."""
    for name, value in tree.iter_fields():
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, nodes.Node):
                _size_concatenations(child)
        wrapped = [
            _filtered(child, "_sized") if isinstance(child, nodes.Concat) else child
            for child in children
        ]
        setattr(tree, name, wrapped if isinstance(value, list) else wrapped[0])


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 64


def _check_product(meter: Meter, left: Any, right: Any) -> None:
    if _bits(left) + _bits(right) > 1024:
        raise SecurityError("the template multiplies numbers that are too large")
    for items, times in ((left, right), (right, left)):
        if isinstance(items, str | list | tuple) and isinstance(times, int):
            meter.charge_size(len(items) * max(0, times))


def _check_text_method(meter: Meter, text: str, method: str, args: tuple[Any, ...]) -> None:
    if any(isinstance(arg, int) and arg > MAX_WIDTH for arg in args):
        raise SecurityError(f"the template calls {method} with too large a number")
    if method == "format" and _WIDE_FORMAT.search(text):
        raise SecurityError("the template pads a text too far")
    if method == "replace" and len(args) > 1:
        meter.charge_size(_replaced_size(text, str(args[0]), str(args[1])))
    if method == "join" and args and isinstance(args[0], list | tuple):
        meter.charge_size(_joined_size(text, list(args[0])))
