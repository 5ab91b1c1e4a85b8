"""Frozen matrices in fewer bytes: bfloat16 where nothing is lost by it, or 4 or 8 bits (QLoRA).

Under autocast a float32 matrix is copied to bfloat16 for its product. A frozen matrix whose values
bfloat16 holds exactly, as in most published folders, can be stored in bfloat16. That takes 2 bytes
a weight instead of 6, and products are bit for bit the same.

QLoRA (2305.14314) keeps the frozen weights of adapted layers in 4 or 8 bits. The codes of 4 bits
are those of bitsandbytes. Only layers with an adapter are quantised. A folder that is quantised
already keeps its own codes. Training uses the unpacked weight, so an adapter is merged into that.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from sys import modules
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vlmpack.backends.hf.adapted_experts import expert_weights
from vlmpack.backends.hf.deferred import Deferred, read_whole
from vlmpack.backends.hf.optimizer import require_bitsandbytes
from vlmpack.model_folder.quantised import HeldCodes, Packing, aligned

BASE = ".base_layer."
"""What stands before the name of a parameter of an adapted layer."""
MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers that autocast runs in bfloat16; classes derived from them may do something else."""


def frozen_matrices(model: Any) -> Iterator[nn.Module]:
    """The layers whose `weight` is a matrix that is not trained; a shared one comes once."""
    children = read_by_dtype(model)
    embedding = model.get_input_embeddings()
    is_plain = type(embedding) is nn.Embedding
    # A head may share the weight of a table of a class of its own, which scales what it looks up.
    seen = set() if embedding is None or is_plain else {id(embedding.weight)}
    for module in model.modules():
        plain = type(module) in MATRICES or (module is embedding and is_plain)
        if not plain or id(module) in children:
            continue
        if module.weight.requires_grad or id(module.weight) in seen:
            continue
        seen.add(id(module.weight))
        yield module


def read_by_dtype(model: Any) -> set[int]:
    """Layers whose parent computes by the dtype of a child's weight, by id."""
    owners = (module for module in model.modules() if ".weight.dtype" in _source(module.__class__))
    return {id(child) for module in owners for child in module.children()}


def read_by_parents(model: Any) -> set[int]:
    """Layers whose weight or bias a parent reads itself, by id."""
    return {
        id(child)
        for module in model.modules()
        for name, child in module.named_children()
        if re.search(rf"\b{name}\.(weight|bias)\b", _source(module.__class__))
    }


@cache
def _source(of: type[nn.Module]) -> str:
    """The text of a class of transformers'."""
    if not of.__module__.startswith("transformers."):
        return ""
    # A class that was made for fused layers has no source, and reads what the one behind it does.
    defined = vars(modules[of.__module__])
    try:
        return inspect.getsource(
            next(one for one in of.__mro__ if defined.get(one.__name__) is one)
        )
    except (OSError, TypeError):
        return ".weight.dtype"  # without a source, it may ask for that


def frozen_weights(model: Any) -> Iterator[nn.Parameter]:
    """The weights of those layers, then the matrices of routed experts that are not trained."""
    for module in frozen_matrices(model):
        yield module.weight  # type: ignore[misc]
    yield from (weight for weight in expert_weights(model) if not weight.requires_grad)


def hold_narrow(model: Any) -> int:
    """Store the frozen matrices of a float32 model in bfloat16, where that loses nothing; how many
    weights.
    """
    held, embedding = 0, model.get_input_embeddings()
    embeddings = None if embedding is None else embedding.weight
    for weight in frozen_weights(model):
        narrow = weight.data.to(torch.bfloat16)
        if not torch.equal(narrow.float(), weight.data):
            continue
        if weight is embeddings:
            embedding.register_forward_hook(widened)
        weight.data = narrow
        held += weight.numel()
    return held


def widened(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    """A hook of embeddings in bfloat16: what layers add to is float32."""
    return output.float()


class PackedLinear(nn.Linear):
    """A frozen linear layer that unpacks its weight for each product.

    Its weight is one flat tensor of bytes: codes, then their scales. FSDP2 shards it as any other.
    The layers of bitsandbytes are not used. On a CPU with avx512_bf16 their first answer packs a
    weight anew, and no later step has a gradient for their input.
    """

    def __init__(
        self,
        shape: Sequence[int],
        packing: Packing,
        parts: Sequence[Tensor] | None = None,
        bias: Any = None,
    ) -> None:
        """Hold codes and scales in the packing's order; without them, none on the meta device."""
        super().__init__(shape[1], shape[0], bias=False, device="meta")
        self.packing = packing
        if parts is None:
            data = torch.empty(packing.nbytes(shape), dtype=torch.uint8, device="meta")
        else:
            assert [(part.dtype, part.numel()) for part in parts] == packing.layout(shape)
            flat = [part.contiguous().view(-1).view(torch.uint8) for part in parts]
            data = torch.cat([nn.functional.pad(x, (0, aligned(len(x)) - len(x))) for x in flat])
        self.weight = nn.Parameter(data, requires_grad=False)
        self.bias = bias

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in), that of the unpacked weight."""
        return self.out_features, self.in_features

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if torch.is_grad_enabled() or self.packing.kind == "int8":
            output: Tensor = _PackedProduct.apply(x, self)  # type: ignore[no-untyped-call]
            return output
        import bitsandbytes as bnb

        codes, state = self._state(self.weight)
        product: Tensor = bnb.matmul_4bit(x, codes.t(), quant_state=state, bias=self.bias_for(x))
        return product

    def bias_for(self, x: Tensor) -> Tensor | None:
        """The bias in the dtype of an input."""
        return None if self.bias is None else self.bias.to(x.dtype)

    def unpacked(self, data: Tensor | None = None) -> Tensor:
        """The weight (out, in) in the packing's dtype; of these bytes if they are given."""
        data = self.weight if data is None else data
        if self.packing.kind == "int8":
            codes, scales = self._parts(data)
            whole = codes.view(self.shape) * (scales / 127)[:, None]
            return whole.to(self.packing.dtype)
        import bitsandbytes as bnb

        four: Tensor = bnb.functional.dequantize_4bit(*self._state(data))
        return four

    dequantize = unpacked

    @property
    def W_q(self) -> Tensor:  # noqa: N802
        """By this name peft knows a layer whose `dequantize` gives its weight."""
        return self.weight

    def _parts(self, data: Tensor) -> list[Tensor]:
        parts, start = [], 0
        for dtype, count in self.packing.layout(self.shape):
            size = dtype.itemsize * count
            parts.append(data[start : start + size].view(dtype))
            start += aligned(size)
        return parts

    def _state(self, data: Tensor) -> tuple[Tensor, Any]:
        """Codes and scales as bitsandbytes takes them."""
        from bitsandbytes.functional import QuantState

        packing, (codes, absmax, *nested) = self.packing, self._parts(data)
        given: dict[str, Any] = {}
        if packing.nested:
            scales, table, offset = nested
            inner = QuantState(scales, code=table, blocksize=256, dtype=torch.float32)
            given = {"offset": offset, "state2": inner}
        state = QuantState(
            absmax,
            shape=torch.Size(self.shape),
            blocksize=packing.blocksize,
            quant_type=packing.kind,
            dtype=packing.dtype,
            **given,
        )
        return codes.view(-1, 1), state


class _PackedProduct(torch.autograd.Function):
    """x W^T + b of frozen ones. Its backward pass unpacks W again, which autograd would keep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PackedLinear) -> Tensor:
        ctx.layer = layer
        return nn.functional.linear(x, layer.unpacked().to(x.dtype), layer.bias_for(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (gradient,) = grads
        return gradient @ ctx.layer.unpacked().to(gradient.dtype), None


def check_quantization(quantize: str) -> None:
    """Raise CapabilityError where frozen weights cannot be packed."""
    if quantize == "nf4":
        require_bitsandbytes("trainable.lora.quantize: 'nf4'", "int8, or none")


def quantize_layers(
    model: Any, names: Iterable[str], kind: Literal["nf4", "int8"], *, device: torch.device
) -> None:
    """Replace linear layers by packed ones, one by one.

    Args:
        device: of the packed weights; the rest of the model stays where it is.
    """
    for name in names:
        linear = model.get_submodule(name)
        weight = read_whole(linear.weight.detach()).to(device, torch.float32)
        parts = _four_bits(weight) if kind == "nf4" else _eight_bits(weight)
        if isinstance(linear.weight, Deferred):  # a device has room for its shard alone
            parts = [part.cpu() for part in parts]
        bias = linear.bias
        if bias is not None:
            bias = nn.Parameter(bias.detach().to(device), requires_grad=False)
        replace_layer(model, name, PackedLinear(weight.shape, Packing(kind=kind), parts, bias))


def keep_packed(
    model: nn.Module,
    held: Mapping[str, HeldCodes],
    read: Callable[[Tensor], Tensor],
) -> None:
    """Replace linear layers by packed ones with the codes and scales of a folder.

    Args:
        read: gives the values of a tensor that may be in its file.

    Raises:
        CapabilityError: they are of 4 bits, and bitsandbytes is not installed.
    """
    if any(codes.packing.kind != "int8" for codes in held.values()):
        require_bitsandbytes("model.path: the folder's weights in 4 bits", "a dense model")
    for name, codes in held.items():
        plain: Any = model.get_submodule(name)
        parts = [read(part) for part in codes.parts]
        replace_layer(model, name, PackedLinear(codes.shape, codes.packing, parts, plain.bias))


def replace_layer(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Put another layer in a layer's place."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, layer)


def pack_as(model: nn.Module, other: nn.Module) -> None:
    """Replace linear layers of a model without values as another one's are packed."""
    for name, layer in packed_layers(other).items():
        own = name.replace(BASE, ".").removesuffix(".weight")
        plain: Any = model.get_submodule(own)
        replace_layer(model, own, PackedLinear(layer.shape, layer.packing, bias=plain.bias))


def packing_error(model: nn.Module, plain: nn.Module) -> float:
    """How much packed weights differ from those of the same model as it was, in relative L2.

    Args:
        plain: its weights may be in their files.
    """
    return relative_error(
        (read_whole(plain.get_parameter(name.replace(BASE, "."))), layer.unpacked().cpu())
        for name, layer in packed_layers(model).items()
    )


@torch.no_grad()
def relative_error(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The L2 of differences over that of the first tensors."""
    lost = whole = 0.0
    for one, other in pairs:
        whole += float(one.double().square().sum())
        lost += float((one.double() - other.double()).square().sum())
    return (lost / whole) ** 0.5 if whole else 0.0


def _four_bits(weight: Tensor) -> list[Tensor]:
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    inner = state.state2
    return [codes, state.absmax, inner.absmax, inner.code, state.offset.view(1)]


def _eight_bits(weight: Tensor) -> list[Tensor]:
    """Codes and the largest absolute value of each row, as LLM.int8() has them (2208.07339)."""
    scales = weight.abs().amax(1)
    factors = torch.where(scales > 0, 127 / scales, 0)
    return [(weight * factors[:, None]).round().to(torch.int8), scales]


def is_packed(layer: nn.Module) -> bool:
    """Whether a layer's weight is in fewer bits than it computes with."""
    return isinstance(layer, PackedLinear)


def unpacked(layer: nn.Linear) -> Tensor:
    """A layer's weight (out, in)."""
    return layer.unpacked() if isinstance(layer, PackedLinear) else layer.weight


def packed_layers(model: nn.Module) -> dict[str, PackedLinear]:
    """The packed layers of a model, by the names of their weights."""
    named = model.named_modules()
    return {f"{name}.weight": one for name, one in named if isinstance(one, PackedLinear)}
