"""Tensors of one or several safetensors files, through memory mappings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from interlace.engine.errors import ModelError


class SafetensorsSource:
    """A `TensorSource` over the files that `file_of` names (tensor -> file)."""

    def __init__(self, where: str, file_of: Mapping[str, Path]) -> None:
        self.where = where
        self._file_of = file_of
        self._mappings: dict[Path, safe_open] = {}

    @property
    def names(self) -> frozenset[str]:
        """All tensors that are there."""
        return frozenset(self._file_of)

    def read(self, name: str) -> torch.Tensor:
        """A view of a mapping of its own: dropping the tensor unmaps the pages it touched."""
        return _tensor(_open(self._file(name)), self._file(name), name)

    def keep(self, name: str) -> torch.Tensor:
        """A view of the one lasting mapping of its file."""
        file = self._file(name)
        if file not in self._mappings:
            self._mappings[file] = _open(file)
        return _tensor(self._mappings[file], file, name)

    def _file(self, name: str) -> Path:
        if name not in self._file_of:
            raise ModelError(f"{self.where}: tensor {name} is missing.")
        return self._file_of[name]


def tensor_names(file: Path) -> list[str]:
    """Names in one safetensors file. Raises: `ModelError` if it is damaged or foreign."""
    names: list[str] = _open(file).keys()  # type: ignore[no-untyped-call]
    return names


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ModelError(f"{file} is truncated or not a safetensors file: {error}.") from error
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}.") from error


def _tensor(mapping: safe_open, file: Path, name: str) -> torch.Tensor:
    try:
        tensor: torch.Tensor = mapping.get_tensor(name)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise ModelError(f"{file}: tensor {name} cannot be read: {error}.") from error
    return tensor
