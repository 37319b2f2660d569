"""The product in its transposed form is the product, for every number of rows and every layout."""

from __future__ import annotations

import pytest
import torch

from interlace.layers.linear import linear


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 15, 16, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_is_the_product(rows: int, dtype: torch.dtype, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((rows, 24), (40, 24), (40,))
    )
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double() * biased)
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-5
    for layout in (x, x.t().contiguous().t()):
        result = linear(layout, weight, bias if biased else None)
        assert (result.shape, result.dtype) == ((rows, 40), dtype)
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


def test_equal_input_gives_equal_bits() -> None:
    x, weight = torch.randn(5, 64), torch.randn(96, 64)
    assert torch.equal(linear(x, weight), linear(x.clone(), weight))


def test_input_and_weight_are_left_alone() -> None:
    x, weight, bias = torch.randn(1, 8), torch.randn(4, 8), torch.randn(4)
    before = [t.clone() for t in (x, weight, bias)]
    linear(x, weight, bias)
    assert all(torch.equal(a, b) for a, b in zip(before, (x, weight, bias), strict=True))
