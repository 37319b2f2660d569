"""For all tests: nothing may block the event loop, the default model is loaded once, and how often
those run that look for what is rare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from blockbuster import BlockBuster, blockbuster_ctx
from hypothesis import settings

if TYPE_CHECKING:
    from interlace.layers.checkpoint import LoadedModel

# The same cases on every machine and every day; `--hypothesis-profile=default` searches anew.
settings.register_profile("fixed", derandomize=True, database=None)
settings.load_profile("fixed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak", action="store_true", help="run tests marked soak as often as that asks for"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`@pytest.mark.soak(quick=3, full=100)`: a test is run for so many values of `seed`, or gets
    the number as `num_runs`; the second one with --soak."""
    mark = metafunc.definition.get_closest_marker("soak")
    if mark is None:
        return
    count = mark.kwargs["full" if metafunc.config.getoption("soak") else "quick"]
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(count))
    else:
        metafunc.parametrize("num_runs", [count])


@pytest.fixture(autouse=True)
def _the_loop_never_blocks() -> Iterator[BlockBuster]:
    """Fail any test in which our code makes a blocking call on the event loop."""
    with blockbuster_ctx("interlace") as blockbuster:
        yield blockbuster


@pytest.fixture(scope="session")
def default_model() -> LoadedModel:
    """The default model, fetched and converted on the first run ever. Engines may share it."""
    from interlace.layers.checkpoint import load_checkpoint

    return load_checkpoint("smollm2-135m")
