"""The directory of PipelineConnector's store of files, as its options say. Imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from interlace.connectors.pipeline.options import PipelineOptions
from interlace.connectors.slab_store.directory import Limits, SlabDirectory
from interlace.engine.errors import ConfigError


def prepare_directory(options: PipelineOptions) -> SlabDirectory:
    """Make it, or see whether it is one. Raises: `ConfigError` if it is something else, or cannot
    be used."""
    directory = _directory(options)
    with _usable(directory):
        directory.prepare()
    return directory


def check_directory(options: PipelineOptions) -> None:
    """Whether `prepare_directory` would do, as far as can be told: changes nothing. Raises: as
    that."""
    directory = _directory(options)
    with _usable(directory):
        directory.check()


def _directory(options: PipelineOptions) -> SlabDirectory:
    assert options.path is not None, "options say so"
    limits = Limits(capacity_bytes=options.capacity_bytes, min_free_bytes=options.min_free_bytes)
    return SlabDirectory(Path(options.path), limits)


@contextlib.contextmanager
def _usable(directory: SlabDirectory) -> Iterator[None]:
    """Raises: `ConfigError` for an `OSError`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the KV store cannot use {directory.root} ({error.strerror or error}): give it a"
            " directory that can be written to."
        ) from error
