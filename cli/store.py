"""`interlace store`: what a directory of KV slabs holds, whether it is sound, and how to thin it.

The commands; `store_arguments.py` parses and `store_text.py` prints for them, and
`interlace.connectors.slab_store.inspection` does the rest. Safe beside engines that use the
directory. Imports no torch.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from interlace.cli.progress import NotedProgress, progress_for
from interlace.cli.screen import is_terminal
from interlace.cli.store_arguments import (
    All,
    AsJson,
    Capacity,
    Directory,
    Drop,
    DryRun,
    FirstHash,
    Limit,
    MinFree,
    ModelName,
    OlderThan,
    WordsOf,
    Yes,
    parse_size,
    selector,
)
from interlace.cli.store_text import (
    choices_line,
    collected_lines,
    count,
    listing_fields,
    listing_lines,
    print_json,
    print_lines,
    removal_fields,
    removal_lines,
    report_fields,
    safe,
    size_text,
    statistics_lines,
    verification_fields,
    verification_lines,
)
from interlace.cli.store_words import Words
from interlace.engine.errors import ConfigError, InterlaceError

if TYPE_CHECKING:
    from interlace.connectors.slab_store.inspection.reports import Selection
    from interlace.connectors.slab_store.inspection.survey import Survey
    from interlace.engine.ports import Progress

app = typer.Typer(
    name="store",
    help="Look after a directory of KV slabs, also while engines use it.",
    no_args_is_help=True,
)


@app.command("ls")
def list_(
    context: typer.Context,
    directory: Directory,
    limit: Limit = 50,
    tokenizer: WordsOf = None,
    as_json: AsJson = False,
) -> None:
    """List stored prefixes: chains of blocks that begin with the same block.

    TOKENS are those of the longest chain, CHAINS end in blocks that no other follows. AGE is that
    of the oldest block. USED: when one of its slabs was last written to, or read. HITS: loads from
    these files, of the last tens of thousands. BEGINS: first words, where a tokenizer is at hand.
    """
    from interlace.connectors.slab_store.inspection.chains import list_prefixes

    now_ns = _clock(context)()
    listing = list_prefixes(_survey(directory, now_ns), limit)
    words = Words(tokenizer)
    if as_json:
        print_json(**listing_fields(listing, words))
    else:
        print_lines(listing_lines(listing, now_ns, words))


@app.command("stat")
def stat(context: typer.Context, directory: Directory, as_json: AsJson = False) -> None:
    """Count slabs, records and bytes, for each kind of KV and in all."""
    from interlace.connectors.slab_store.inspection.statistics import statistics

    now_ns = _clock(context)()
    store = statistics(_survey(directory, now_ns))
    if as_json:
        print_json(spaces=store.spaces, total=store.total)
        return
    for one in (*store.spaces, store.total):
        print_lines(statistics_lines(one, now_ns))


@app.command("verify")
def verify(directory: Directory, drop: Drop = False, as_json: AsJson = False) -> None:
    """Read all records and check them against their checksums. Exit code 1 if any is bad, or
    cannot be read.

    Slabs are never changed, so --drop removes whole ones, but for those that a process writes to.
    What is wrong is read twice, and what cannot be read is not dropped.
    """
    from interlace.connectors.slab_store.inspection import removal, survey, verification

    with _errors():
        store = survey.open_store(directory)
        found = verification.verify(store, progress_for())
        damaged = [one for one in found.flawed if one.is_damaged]
        done = removal.remove(store, [one.file for one in damaged] if drop else [])
    gone = {file.name for file in done.removed}
    num_good = sum(one.num_good for one in damaged if one.file.name in gone)
    if as_json:
        removed = {**removal_fields(done), "num_good_records": num_good}
        print_json(**verification_fields(found), dropped=removed)
    else:
        print_lines(verification_lines(found))
        if drop:
            print_lines(removal_lines(done, f", and with them {count(num_good, 'good record')}"))
    if found.flawed:
        raise typer.Exit(1)


@app.command("gc")
def gc(
    context: typer.Context,
    directory: Directory,
    capacity: Capacity = None,
    min_free: MinFree = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Remove slabs until limits are kept, the least recently used first, and leftovers.

    Without limits only leftovers go: slabs that were being made by a process that is gone.
    """
    from interlace.connectors.slab_store.directory import Limits
    from interlace.connectors.slab_store.inspection.limits import collect, plan_collection
    from interlace.connectors.slab_store.inspection.survey import open_store

    limits = Limits(
        capacity_bytes=None if capacity is None else parse_size("--capacity", capacity),
        min_free_bytes=0 if min_free is None else parse_size("--min-free", min_free),
    )
    now_ns = _clock(context)
    with _errors():
        store = open_store(directory, limits, now_ns)
        done = plan_collection(store) if dry_run else collect(store)
    if as_json:
        print_json(dry_run=dry_run, **report_fields(done), num_bytes=done.num_bytes)
    else:
        print_lines(collected_lines(done, now_ns(), dry_run=dry_run))
    if done.shortfall is not None:
        raise InterlaceError(f"the limits are not kept: {done.shortfall}.")


@app.command("rm")
def remove(
    context: typer.Context,
    directory: Directory,
    model: ModelName = None,
    prefix: FirstHash = None,
    older_than: OlderThan = None,
    everything: All = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove whole slabs, but for those that a process writes to. Asks first.

    A slab holds blocks of many prompts: what else goes is told before it is asked. Where nothing
    is chosen, what there is to choose from is told.
    """
    from interlace.connectors.slab_store.inspection import removal, survey
    from interlace.connectors.slab_store.inspection.reports import FileReport

    now_ns = _clock(context)()
    select = selector(now_ns, model, prefix, older_than, everything=everything)
    found = _survey(directory, now_ns)
    selection = select(found)
    there = None if selection.files else removal.choices(found, model)
    if selection.files and not yes:
        _confirm(selection, directory)
    with _errors():
        store = survey.open_store(directory)
        done = removal.remove(store, map(FileReport.of, selection.files))
    if as_json:
        print_json(**removal_fields(done), choices=there)
    else:
        print_lines(removal_lines(done, ""))
        if there is not None:
            line = choices_line(there, now_ns, model=model, prefix=prefix, older_than=older_than)
            print_lines([line] if line else [])
    if done.failed:
        raise typer.Exit(1)


def _clock(context: typer.Context) -> Callable[[], int]:
    """Nanoseconds since the epoch. Tests hand in their own as the context's object."""
    return context.obj if callable(context.obj) else time.time_ns


def _confirm(selection: Selection, directory: Path) -> None:
    """Raises: `typer.BadParameter` if nobody can be asked; `typer.Abort` if the answer is no."""
    if not is_terminal(sys.stdin) or not is_terminal(sys.stderr):
        raise typer.BadParameter("nobody can be asked here, for this is no terminal: add --yes.")
    others = selection.num_other_records
    text = (
        f"Remove {count(len(selection.files), 'slab')} of {directory} with"
        f" {count(selection.num_records, 'record')}"
        f"{f', {others} of them of other prefixes' if others else ''},"
        f" {size_text(selection.num_bytes)}?"
    )
    typer.confirm(safe(text), abort=True, err=True)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Raises: `typer.BadParameter` for what is no store; `InterlaceError` if it cannot be read."""
    try:
        yield
    except ConfigError as error:
        message = safe(" ".join(str(error).split()))
        raise typer.BadParameter(message, param_hint="DIR") from error
    except OSError as error:
        raise InterlaceError(
            f"{error.filename or 'the store'} cannot be read or changed"
            f" ({error.strerror or error}): run this as the user whose engines use the store."
        ) from error


def _survey(directory: Path, now_ns: int) -> Survey:
    """Raises: as `_errors`."""
    from interlace.connectors.slab_store.inspection.survey import open_store, survey

    with _errors():
        return survey(open_store(directory, now_ns=lambda: now_ns), _quiet_progress())


def _quiet_progress() -> Progress:
    """A bar on a terminal, for stores of thousands of slabs; else nothing."""
    return progress_for() if is_terminal(sys.stderr) else NotedProgress(None)
