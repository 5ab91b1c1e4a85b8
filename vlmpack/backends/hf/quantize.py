"""QLoRA (2305.14314): the frozen weights of adapted layers in 4 bits, by bitsandbytes.

Only layers that get an adapter are quantised; the rest of the model stays as it was. A weight that
was unpacked again is what training saw, so that is what an adapter is merged into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vlmpack.backends.hf.optimizer import require_bitsandbytes
from vlmpack.errors import CapabilityError


def check_quantization(device: torch.device) -> None:
    """Raise CapabilityError where 4-bit weights cannot be trained beside."""
    if device.type != "cuda":
        raise CapabilityError(
            f"trainable.lora.quantize: 'nf4' needs a CUDA GPU, this run is on {device}; use none"
        )
    require_bitsandbytes("trainable.lora.quantize: 'nf4'", "none")


def quantize_layers(
    model: Any, names: Iterable[str], *, device: torch.device, compute_dtype: torch.dtype
) -> None:
    """Replace linear layers by 4-bit ones, one by one.

    Args:
        model: transformers', in float32 on CPU.
        names: of the layers.
        device: a GPU, where the packed weights go; the rest of the model stays.
        compute_dtype: that weights are unpacked to.
    """
    import bitsandbytes as bnb

    for name in names:
        parent, _, leaf = name.rpartition(".")
        linear = model.get_submodule(name)
        packed = bnb.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            compute_dtype=compute_dtype,
            compress_statistics=True,  # double quantisation: about 0.4 bits a weight less
            quant_type="nf4",
            device="meta",
        )
        packed.weight = bnb.nn.Params4bit(
            linear.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4"
        )
        packed.bias = linear.bias
        setattr(model.get_submodule(parent), leaf, packed.to(device))  # packs it
    model.is_loaded_in_4bit = True  # what peft looks at


def unpacked_weights(model: Any) -> dict[str, Callable[[], Tensor]]:
    """By the name of each 4-bit weight, a call that makes it (out, in) in float32 again."""
    if not getattr(model, "is_loaded_in_4bit", False):
        return {}
    import bitsandbytes as bnb

    def unpack(weight: Any) -> Tensor:
        whole: Tensor = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
        return whole.float()

    return {
        f"{name}.weight": partial(unpack, module.weight)
        for name, module in model.named_modules()
        if isinstance(module, bnb.nn.Linear4bit)
    }
