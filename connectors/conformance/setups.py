"""How a connector is set up for one run of a scenario after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interlace.connectors.base import CheckSetup
from interlace.connectors.conformance.engine_shape import EngineShape
from interlace.connectors.conformance.subject import Subject, engine_config
from interlace.engine.errors import ConfigError


class Setups:
    """Each run gets a folder of its own, so that no store grows with the check, and what goes wrong
    in one run is not met again in the next.

    What was given is used in all runs; what was not is asked of the class's `check_setup`.
    """

    def __init__(
        self,
        subject: Subject,
        scratch: Path,
        extra_config: Mapping[str, Any] | None,
        engine_options: Mapping[str, Any] | None,
    ) -> None:
        """`subject` says all but these two; folders are made in `scratch`."""
        self._subject = subject
        self._scratch = scratch
        self._extra_config = extra_config
        self._engine_options = engine_options
        self._num_runs = 0

    def next(self) -> Subject:
        """The subject of the next run. Raises: `ConfigError`."""
        setup = self._setup()
        subject = dataclasses.replace(
            self._subject, extra_config=setup.extra_config, engine_options=setup.engine_options
        )
        engine_config(subject, EngineShape().options(), "recompute")  # refuses what does not fit
        return subject

    def _setup(self) -> CheckSetup:
        extra, options = self._extra_config, self._engine_options
        own = CheckSetup() if extra is not None and options is not None else self._ask()
        return CheckSetup(
            own.extra_config if extra is None else dict(extra),
            own.engine_options if options is None else dict(options),
        )

    def _ask(self) -> CheckSetup:
        self._num_runs += 1
        folder = self._scratch / str(self._num_runs)
        folder.mkdir()
        name = self._subject.name
        try:
            setup: object = self._subject.cls.check_setup(folder)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{name}.check_setup raised {type(error).__name__}: {error}"
            ) from error
        if not isinstance(setup, CheckSetup):
            raise ConfigError(f"{name}.check_setup answered {setup!r}: return a CheckSetup.")
        if not isinstance(setup.engine_options, Mapping):
            raise ConfigError(f"{name}.check_setup: engine_options must be a dict.")
        return setup
