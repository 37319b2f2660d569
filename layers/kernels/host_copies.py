"""Small copies between a GPU and pinned host memory by kernels: they go by large ones."""

from __future__ import annotations

from torch import Tensor

from interlace.layers.kernels.toolchain import Pointer, Scalar, constexpr, jit, tl, triton

BLOCK = 1024


@jit("num_words")
def read_words_kernel(
    source: Pointer, target: Pointer, num_words: Scalar, block: constexpr
) -> None:
    """`target` becomes `source`. Grid: (words / block,)."""
    place = tl.program_id(0) * block + tl.arange(0, block)
    inside = place < num_words
    tl.store(target + place, tl.load(source + place, mask=inside), mask=inside)


@jit("num_words")
def write_words_kernel(
    source: Pointer, target: Pointer, num_words: Scalar, block: constexpr
) -> None:
    """As `read_words_kernel`, by another name: profiles tell what goes up from what goes down."""
    place = tl.program_id(0) * block + tl.arange(0, block)
    inside = place < num_words
    tl.store(target + place, tl.load(source + place, mask=inside), mask=inside)


def read_words(source: Tensor, target: Tensor, num_words: int) -> None:
    """Queue a copy of the first `num_words` int32 of `source`, which may be pinned host memory, to
    those of `target` on a GPU.

    A copy engine takes copies in turn, whatever streams they are on: one of 35 KB waited 20 ms for
    a load of a GB that was queued before, and small ones often do. A kernel goes by.
    """
    read_words_kernel[(triton.cdiv(num_words, BLOCK),)](source, target, num_words, block=BLOCK)


def write_words(source: Tensor, target: Tensor, num_words: int) -> None:
    """Likewise from `source` on a GPU to `target`, which may be pinned host memory."""
    write_words_kernel[(triton.cdiv(num_words, BLOCK),)](source, target, num_words, block=BLOCK)
