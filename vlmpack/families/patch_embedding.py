"""A vision tower's patches as one matrix product, on CUDA.

The Qwen line's towers get each patch as a row of numbers and hand it to a Conv3d whose kernel is
the whole patch: a matrix product, for which several versions of cuDNN take kernels that are 4 to
50,000 times as slow in bfloat16 (pytorch#166122, pytorch#174051, transformers#45750). Parameters
and their names stay. On a CPU the convolution stays, too: it rounds float32 worse than the
product does, so that with trained weights the two are 2e-6 apart, and there a run is compared
with stock in float32.
"""

from __future__ import annotations

from torch import Tensor, nn


class PatchProduct(nn.Conv3d):
    """A Conv3d that is a matrix product on CUDA, where its input is as large as its kernel."""

    def forward(self, input: Tensor) -> Tensor:
        """(P, C, T, Y, X) patches -> (P, out, 1, 1, 1)."""
        whole = input.shape[2:] == self.kernel_size and not any(self.padding)
        return self.product(input) if whole and input.is_cuda else super().forward(input)

    def product(self, input: Tensor) -> Tensor:
        """What a convolution of inputs as large as the kernel comes to."""
        found = nn.functional.linear(input.flatten(1), self.weight.flatten(1), self.bias)
        return found[:, :, None, None, None]


def use_patch_products(embedding: nn.Module) -> None:
    """For good: the Conv3d of a module that embeds patches becomes a matrix product.

    Args:
        embedding: transformers' module, maybe with adapters.
    """
    for module in embedding.modules():
        # Not of a subclass: somebody else's forward would be lost.
        if type(module) is nn.Conv3d and module.groups == 1:
            module.__class__ = PatchProduct
