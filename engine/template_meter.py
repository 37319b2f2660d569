"""What one rendering of a chat template may cost, and how a template is made to report it.

Loop rounds, calls and copied text are charged to a `Meter`; operations that can grow a value at
once are sized before they run. Knows nothing of messages.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, final

from jinja2 import nodes
from jinja2.exceptions import SecurityError

MAX_CHARS: Final = 4 * 2**20
"""Longest text or list that a template may make."""
MAX_COST: Final = 1_000_000
"""Loop rounds, calls and KiB of copied text of one rendering, together."""
MAX_WIDTH: Final = 10_000
"""Largest number that may be passed to a text method, such as `center`."""
_PERCENT_SPEC = re.compile(r"%([^a-zA-Z%]*)")
_WIDE = re.compile(r"\d{5}|[*{]")
"""In the specification of a format: a width of five digits, or one that is an argument."""


def size(value: object) -> int:
    """Characters or items of `value`; 0 for what has no length."""
    return len(value) if isinstance(value, str | Sequence | Mapping) else 0


@final
class Meter:
    """What one rendering may still cost. Every method raises `SecurityError` beyond the limit."""

    def __init__(self, limit: int = MAX_COST) -> None:
        self._left = limit

    def charge(self, cost: int = 1) -> None:
        """Add to the cost."""
        self._left -= cost
        if self._left < 0:
            raise SecurityError("the template does too much work")

    def charge_size(self, length: int) -> None:
        """Add the making of `length` characters or items."""
        if length > MAX_CHARS:
            raise SecurityError("the template makes a text or list that is too long")
        self.charge(1 + length // 1024)

    def charge_value(self, value: object) -> None:
        """Add the writing out of `value`. Items that a list holds twice count twice: a few
        lists nested into each other would otherwise print without end.
        """
        if isinstance(value, Mapping):
            value = [*value.keys(), *value.values()]
        self.charge_size(size(value))
        if isinstance(value, list | tuple):
            for item in value:
                self.charge_value(item)

    def charge_filter(self, value: object) -> None:
        """Add one pass over the input of a filter, which may make an item of each character."""
        self.charge(1 + size(value) // 64)

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items, each charged as it is taken."""
        for item in items:
            self.charge()
            yield item

    def charge_operation(self, operator: str, left: Any, right: Any) -> None:
        """Check `left operator right` before it is computed: one of `+ % * **`."""
        if operator == "+":
            self.charge_size(size(left) + size(right))
        elif operator == "*":
            self._charge_product(left, right)
        elif operator == "%":
            _check_specs(_PERCENT_SPEC.findall(left) if isinstance(left, str) else ())
        elif _bits(left) * (right if isinstance(right, int) else 1) > 1024:
            raise SecurityError("the template raises a number to too high a power")

    def _charge_product(self, left: Any, right: Any) -> None:
        if _bits(left) + _bits(right) > 1024:
            raise SecurityError("the template multiplies numbers that are too large")
        for items, times in ((left, right), (right, left)):
            if isinstance(items, Sequence) and isinstance(times, int):
                self.charge_size(len(items) * max(0, times))

    def charge_text_method(self, text: str, method: str, args: Sequence[Any]) -> None:
        """Check `text.method(*args)` before it is called."""
        self.charge_size(len(text))
        if any(isinstance(arg, int) and arg > MAX_WIDTH for arg in args):
            raise SecurityError(f"the template calls {method} with too large a number")
        if method in ("format", "format_map"):
            _check_specs(spec for _, _, spec, _ in string.Formatter().parse(text))
        if method == "replace" and len(args) > 1:
            self.charge_replace(text, str(args[0]), str(args[1]))
        if method == "join" and args and isinstance(args[0], Sequence):
            self.charge_join(text, args[0])

    def charge_replace(self, text: str, old: str, new: str) -> None:
        """Check the replacement of every `old` in `text` by `new`."""
        self.charge_size(len(text) + text.count(old) * max(0, len(new) - len(old)))

    def charge_join(self, glue: str, texts: Sequence[Any]) -> None:
        """Check the joining of `texts` by `glue`."""
        self.charge_size(sum(map(size, texts)) + len(glue) * len(texts))


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 64


def _check_specs(specs: Iterable[str | None]) -> None:
    if any(spec and _WIDE.search(spec) for spec in specs):
        raise SecurityError("the template pads a text too far")


def add_metering(tree: nodes.Node) -> None:
    """Rewrite the tree of a template so that it reports to the sandbox's metering filters.

    `_metered` is put around what a loop runs over, `_sized` around each value that the template
    itself makes (`a ~ b`, literals, captured blocks), `_passed` around what a filter is given.
    """
    for name, value in tree.iter_fields():
        if isinstance(value, nodes.Node):
            add_metering(value)
            setattr(tree, name, _wrapped_value(value))
        elif isinstance(value, list):
            for child in value:
                if isinstance(child, nodes.Node):
                    add_metering(child)
            setattr(tree, name, [_wrapped_value(child) for child in value])
    if isinstance(tree, nodes.For):
        tree.iter = _filtered(tree.iter, "_metered")
    elif isinstance(tree, nodes.AssignBlock) and tree.filter is None:
        tree.filter = _filtered(None, "_sized")
    elif isinstance(tree, nodes.Filter):
        # Without a node the filter's input is the block that it stands around.
        tree.node = _filtered(tree.node, "_passed")


def _wrapped_value(node: Any) -> Any:
    stored = isinstance(node, nodes.Tuple) and node.ctx != "load"  # `set a, b = ...`
    makes_value = isinstance(node, nodes.Concat | nodes.List | nodes.Dict | nodes.Tuple)
    return _filtered(node, "_sized") if makes_value and not stored else node


def _filtered(node: nodes.Node | None, name: str) -> nodes.Filter:
    assert node is None or isinstance(node, nodes.Expr)
    wrapped = nodes.Filter(node, name, [], [], None, None)
    wrapped.set_lineno(1 if node is None else node.lineno)
    return wrapped
