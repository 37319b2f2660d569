"""Weighted sums of what lies in pages: a checksum of each block over all layers, in one pass."""

from __future__ import annotations

from interlace.layers.kernels.toolchain import Pointer, Scalar, constexpr, jit, tl

COLUMNS = 1024
"""Words of a row."""


@jit("page_words")
def page_sums_kernel(
    pages: Pointer,
    places: Pointer,
    blocks: Pointer,
    row_weights: Pointer,
    column_weights: Pointer,
    sums: Pointer,
    page_words: Scalar,
    page_stride: constexpr,
    whole_rows: constexpr,
    columns: constexpr,
) -> None:
    """Add to `sums` of each block what one layer comes to, modulo 2^64. Grid: (blocks, layers).

    The words of a block, 32 bits each, layer by layer, are seen in rows of `columns`; a word weighs
    what its row and its column do together. The pages of layer i lie `places[i]` words behind
    `pages`. `whole_rows`: a page is made of whole rows.
    """
    layer = tl.program_id(1).to(tl.int64)
    block = tl.load(blocks + tl.program_id(0)).to(tl.int64)
    page = pages + tl.multiple_of(tl.load(places + layer), 2) + block * page_stride
    first = layer * page_words
    column = tl.arange(0, columns)
    total = tl.zeros((columns,), tl.int64)
    if whole_rows:
        of_column = tl.load(column_weights + column)
        row = row_weights + first // columns
        for at in range(0, page_words, columns):
            word = tl.load(page + at + column).to(tl.uint32, bitcast=True).to(tl.int64)
            total += word * (of_column + tl.load(row + at // columns))
    else:
        for at in range(0, page_words, columns):
            inside = at + column < page_words
            word = tl.load(page + at + column, mask=inside, other=0)
            place = first + at + column
            weight = tl.load(column_weights + place % columns)
            weight += tl.load(row_weights + place // columns, mask=inside, other=0)
            total += word.to(tl.uint32, bitcast=True).to(tl.int64) * weight
    tl.atomic_add(sums + tl.program_id(0), tl.sum(total))
