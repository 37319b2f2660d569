"""The sandbox that chat templates run in: Jinja's own, as Hugging Face sets it up, and metered.

A template comes with a model, so it is someone else's program. Jinja's sandbox keeps it from
Python's internals; the meter keeps it from working or growing without end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, final

import jinja2
from jinja2 import nodes, runtime
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from interlace.engine.template_meter import MAX_WIDTH, Meter, add_metering

METER_KEY: Final = "*meter*"
"""Where a rendering's `Meter` lies among its variables: not a name that a template can write."""

# Those of Jinja's filters that chat templates use and that cannot grow a text by themselves.
_FILTERS = frozenset(
    {"abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float"}
    | {"int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject"}
    | {"rejectattr", "reverse", "round", "safe", "select", "selectattr", "sort", "string"}
    | {"title", "trim", "unique", "upper"}
)
# Methods that grow a text by amounts that cannot be told beforehand.
_REFUSED_ATTRIBUTES = frozenset({"expandtabs", "translate", "to_bytes"})


def _meter(context: runtime.Context) -> Meter:
    # `parent` holds what was passed in; a template's own variables lie elsewhere.
    meter = context.parent[METER_KEY]
    assert isinstance(meter, Meter)
    return meter


@jinja2.pass_context
def _metered(context: runtime.Context, items: Iterable[Any]) -> Iterator[Any]:
    return _meter(context).each(items)


@jinja2.pass_context
def _sized(context: runtime.Context, value: Any) -> Any:
    _meter(context).charge_value(value)
    return value


@jinja2.pass_context
def _passed(context: runtime.Context, value: Any) -> Any:
    _meter(context).charge_filter(value)
    return value


@jinja2.pass_context
def _range(context: runtime.Context, *bounds: int) -> range:
    numbers = range(*bounds)
    _meter(context).charge(len(numbers))
    return numbers


@jinja2.pass_context
def _join(
    context: runtime.Context, items: Iterable[Any], d: str = "", attribute: str | None = None
) -> str:
    if attribute is not None:
        items = (context.environment.getitem(item, attribute) for item in items)
    texts = [str(item) for item in _meter(context).each(items)]
    _meter(context).charge_join(str(d), texts)
    return str(d).join(texts)


@jinja2.pass_context
def _replace(context: runtime.Context, text: Any, old: str, new: str, count: int = -1) -> str:
    _meter(context).charge_replace(str(text), str(old), str(new))
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


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


@final
class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment of one template. What it renders must be given a `Meter` as `METER_KEY`."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        self.filters = {name: self.filters[name] for name in _FILTERS} | {
            "_metered": _metered,
            "_sized": _sized,
            "_passed": _passed,
            "indent": _indent,
            "join": _join,
            "replace": _replace,
            "tojson": _tojson,
        }
        self.globals = {
            "dict": dict,
            "namespace": self.globals["namespace"],
            "range": _range,
        }

    def metered_template(self, source: str) -> jinja2.Template:
        """Compile `source` so that it reports what it does to its `Meter`.

        Raises: `jinja2.TemplateError` if it is not a template.
        """
        tree = self.parse(source)
        add_metering(tree)
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Refuse at once; Jinja's own way would print an empty string."""
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is not allowed")

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Also refuse the methods whose result cannot be sized beforehand."""
        return attr not in _REFUSED_ATTRIBUTES and super().is_safe_attribute(obj, attr, value)

    def call(
        self, context: runtime.Context, obj: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call `obj` from a template, charged before and after."""
        meter = _meter(context)
        meter.charge_value([*args, *kwargs.values()])
        method = getattr(obj, "__wrapped__", obj)  # jinja wraps str.format
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            meter.charge_text_method(text, method.__name__, [*args, *kwargs.values()])
        result = super().call(context, obj, *args, **kwargs)
        meter.charge_filter(result)
        if isinstance(result, str):
            meter.charge_size(len(result))
        return result

    def call_binop(self, context: runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right` once its size is known to be fair."""
        _meter(context).charge_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)
