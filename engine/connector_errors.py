"""What a connector's code raises, as an error that names the connector and the hook. Any thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from interlace.engine.errors import ConfigError, ConnectorError


@contextlib.contextmanager
def blaming(owner: object, hook: str) -> Iterator[None]:
    """Turn what is raised inside into a `ConnectorError`: "Class.hook raised ...".

    `owner` is the object, or the class, whose `hook` is called; its own traceback is chained.
    A `ConfigError` comes out as it is: it is raised on purpose, and says what to change. A
    `SystemExit` is an error like any other: a connector does not end the process.
    """
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        name = (owner if isinstance(owner, type) else type(owner)).__name__
        raise ConnectorError(f"{name}.{hook} raised {type(error).__name__}: {error}") from error


def call_hook(connector: object, hook: str, *args: object) -> Any:
    """Call a hook by its name, since a decorated method may be called something else.

    Raises: as `blaming`, which is not entered before something was raised: that takes longer than
    most hooks do.
    """
    try:
        return getattr(connector, hook)(*args)
    except (Exception, SystemExit):
        with blaming(connector, hook):
            raise
