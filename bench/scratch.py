"""Folders for the files of a benchmark, which go with it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from interlace.engine.errors import ConfigError
from interlace.engine.file_access import reason_of


@contextmanager
def scratch_folder(parent: str | None, option: str) -> Iterator[Path]:
    """A new empty folder in `parent`, or where temporary files go; removed at the end. Blocks.

    `option` is where a user names `parent`. Raises: `ConfigError` if none can be made there.
    """
    if parent is not None and not parent.strip():
        raise ConfigError(f"the name of the folder is empty: name one that exists, by {option}.")
    try:
        scratch = tempfile.TemporaryDirectory(
            prefix="interlace-bench-", dir=parent, ignore_cleanup_errors=True
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no files can be kept in {parent or tempfile.gettempdir()} ({reason_of(error)}); name"
            f" a folder that exists and can be written, by {option}."
        ) from error
    with scratch as folder:
        yield Path(folder)
