"""Patches that a Conv3d of their own size embeds, as a matrix product."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vlmpack.families.qwen_vl import PatchProduct, use_patch_products


def embedding(**options):
    torch.manual_seed(0)
    kernel = (2, 5, 5)
    options = {"kernel_size": kernel, "stride": kernel, **options}
    return nn.Sequential(nn.Conv3d(3, 7, **options)).double()


@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_the_convolution(bias):
    """Value and gradients, in double."""
    module = embedding(bias=bias)
    patches = torch.randn(11, 3, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    wanted = module(patches)
    wrt = (patches, *module.parameters())
    pattern = torch.randn_like(wanted)
    gradients = torch.autograd.grad(wanted, wrt, pattern)
    use_patch_products(module)
    found = module[0].product(patches)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    again = torch.autograd.grad(found, wrt, pattern)
    torch.testing.assert_close(again, gradients, rtol=1e-12, atol=1e-12)
    assert torch.equal(module(patches), wanted), "a CPU keeps the convolution"


@pytest.mark.parametrize(
    ("options", "shape"),
    [({}, (1, 3, 4, 10, 10)), ({"padding": 1}, (2, 3, 2, 5, 5))],
    ids=["a larger input", "padding"],
)
def test_other_inputs_are_convolved(options, shape, monkeypatch):
    module = embedding(**options)
    use_patch_products(module)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(PatchProduct, "product", None)
    inputs = torch.randn(shape, dtype=torch.float64)
    assert torch.equal(module(inputs), nn.Conv3d.forward(module[0], inputs))


def test_somebody_elses_convolution_is_left_alone():
    class Theirs(nn.Conv3d):
        pass

    module = nn.Sequential(Theirs(3, 7, (2, 5, 5)), nn.Conv3d(6, 6, (2, 5, 5), groups=2))
    use_patch_products(module)
    assert [type(one) for one in module] == [Theirs, nn.Conv3d]
