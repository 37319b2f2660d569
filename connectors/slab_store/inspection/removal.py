"""`rm`: which slabs are meant, and removing them, but for those that a process writes to."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterable
from pathlib import Path

from interlace.connectors.slab_store import hits
from interlace.connectors.slab_store.directory import SlabDirectory, SlabFile, has_writer
from interlace.connectors.slab_store.inspection.chains import Chains, list_prefixes
from interlace.connectors.slab_store.inspection.reports import (
    Choices,
    Failure,
    FileReport,
    Removal,
    Selection,
    StoredModel,
)
from interlace.connectors.slab_store.inspection.survey import Survey, by_folder
from interlace.connectors.slab_store.slab import SUFFIX

DIGEST_DIGITS = 8
"""So many of a model's digest name it: fewer may be a name with a slip in it."""
MOST_CHOICES = 5
"""So many models, and prefixes, are named to who chose nothing that is stored."""


def remove(directory: SlabDirectory, files: Iterable[FileReport]) -> Removal:
    """Remove these, but for those that a living process writes to."""
    removed: list[FileReport] = []
    written: list[FileReport] = []
    failed: list[Failure] = []
    for file in files:
        path = directory.root / file.name
        try:
            if has_writer(path):
                written.append(file)
                continue
            path.unlink()
        except FileNotFoundError:
            pass
        except OSError as error:
            failed.append(Failure(file=file, reason=error.strerror or str(error)))
            continue
        removed.append(file)
    for folder in {(directory.root / file.name).parent for file in removed}:
        _forget_hits(folder)
    return Removal(removed=tuple(removed), written=tuple(written), failed=tuple(failed))


def _forget_hits(folder: Path) -> None:
    """Of a space in which nothing is left."""
    with contextlib.suppress(OSError):
        if not any(folder.glob(f"*{SUFFIX}")):
            hits.remove(folder)


def select_all(found: Survey) -> Selection:
    """Every slab and leftover. Pure, as all that select."""
    return _selection(found, lambda file: True)


def select_older(found: Survey, before_ns: int) -> Selection:
    """Slabs and leftovers that were not used since."""
    return _selection(found, lambda file: file.used_ns < before_ns)


def select_model(found: Survey, model: str) -> Selection:
    """Slabs of the model of that name; if there is none, of digests that begin so.

    A name may be short, a digest has at least `DIGEST_DIGITS`.
    """
    slabs = [slab for slab in found.slabs if slab.space.model_name == model]
    if not slabs and len(model) >= DIGEST_DIGITS:
        digits = model.lower()
        slabs = [slab for slab in found.slabs if slab.space.identity.model.startswith(digits)]
    paths = {slab.file.path for slab in slabs}
    return _selection(found, lambda file: file.path in paths)


def select_prefix(found: Survey, digits: str) -> Selection:
    """Slabs that hold blocks of chains whose first block's hash begins with these hex digits."""
    paths: set[Path] = set()
    num_asked = 0
    for slabs in by_folder(found.slabs).values():
        chains = Chains(slabs)
        hashes = _first_hashes(chains).items()
        first = [one for one, text in hashes if text.startswith(digits.lower())]
        for slab, num_held in zip(slabs, chains.num_held(first), strict=True):
            num_asked += num_held
            if num_held:
                paths.add(slab.file.path)
    return _selection(found, lambda file: file.path in paths, num_asked)


def choices(found: Survey, model: str | None = None) -> Choices:
    """What could have been chosen instead of nothing; `model` is what was asked for. Pure."""
    wanted = (model or "").lower()
    named = {(slab.space.model_name, slab.space.identity.model) for slab in found.slabs}
    nearest = sorted(named, key=lambda one: (-_likeness(wanted, one[0].lower()), one))
    spaces = by_folder(found.slabs).values()
    # Spaces of one model, those of its ranks for instance, have hashes in common.
    hashes = {text for slabs in spaces for text in _first_hashes(Chains(slabs)).values()}
    recent = (prefix.first_hash for prefix in list_prefixes(found, MOST_CHOICES).prefixes)
    return Choices(
        models=tuple(StoredModel(name=name, digest=it) for name, it in nearest[:MOST_CHOICES]),
        num_models=len(named),
        first_hashes=tuple(dict.fromkeys(recent)),
        num_first_hashes=len(hashes),
        used_ns=min((file.used_ns for file in found.files), default=None),
    )


def _first_hashes(chains: Chains) -> dict[int, str]:
    """Block without a parent -> its hash, hex."""
    return {one: chains.hash_of(one).hex() for one in chains.first.tolist()}


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _selection(
    found: Survey, is_meant: Callable[[SlabFile], bool], num_asked: int | None = None
) -> Selection:
    files = tuple(file for file in found.files if is_meant(file))
    num_records = sum(len(slab.blocks) for slab in found.slabs if is_meant(slab.file))
    num_other = 0 if num_asked is None else num_records - num_asked
    return Selection(files=files, num_records=num_records, num_other_records=num_other)
