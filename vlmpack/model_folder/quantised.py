"""Quantised model folders as dense ones: codes and scales -> weights, in 16 bits as a rule.

    bitsandbytes         X.weight, X.weight.absmax, ...        4 bits, a scale for each block
                         X.weight, X.SCB                       8 bits, a scale for each row
    fp8                  X.weight, X.weight_scale_inv          8-bit floats, scales of squares
    compressed-tensors   X.weight_packed, X.weight_scale, ...  4 or 8 bits in words (pack-quantized)

Only operators of torch are used, which take tensors without values and deferred ones too. What a
scheme means is said by transformers (bitsandbytes, fp8) and by compressed-tensors 0.20.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vlmpack.capabilities.config import quantised_sections
from vlmpack.capabilities.folder import read_config
from vlmpack.errors import UNREADABLE, ModelError
from vlmpack.model_folder.safetensors_read import READABLE, StoredTensor, read_into
from vlmpack.model_folder.weights import stored_tensors, weight_files

Make = Callable[[StoredTensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How the bytes of a packed weight are read.

    Args:
        kind: `int8` has a scale for each row, `nf4` and `fp4` one for each block.
        blocksize: weights of a block.
        nested: whether the scales of blocks are codes of 8 bits, 256 of which share a scale.
        dtype: of the unpacked weight.
    """

    kind: Literal["nf4", "fp4", "int8"]
    blocksize: int = 64
    nested: bool = True
    dtype: torch.dtype = torch.float32

    def layout(self, shape: Sequence[int]) -> list[tuple[torch.dtype, int]]:
        """Type and number of codes, then of each kind of scales."""
        count = prod(shape)
        if self.kind == "int8":
            return [(torch.int8, count), (torch.float32, shape[0])]
        codes, blocks = (torch.uint8, -(-count // 2)), -(-count // self.blocksize)
        if not self.nested:
            return [codes, (torch.float32, blocks)]
        table, scales = (torch.float32, 256), (torch.float32, -(-blocks // 256))
        return [codes, (torch.uint8, blocks), scales, table, (torch.float32, 1)]

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of a packed weight."""
        return sum(aligned(dtype.itemsize * count) for dtype, count in self.layout(shape))


ROW_ORDER = 0
"""bitsandbytes' number for codes row by row. Early versions also saved the orders of kernels."""

ALIGNED = 16
"""Bytes at whose multiples each kind of codes or scales begins."""


def aligned(size: int) -> int:
    """The next multiple of `ALIGNED`."""
    return -(-size // ALIGNED) * ALIGNED


class HeldCodes(NamedTuple):
    """The codes and scales that a folder of bitsandbytes has of a weight.

    Args:
        shape: (out, in).
        parts: in the packing's order.
        table: what codes of 4 bits stand for.
    """

    packing: Packing
    shape: tuple[int, ...]
    parts: Sequence[Tensor]
    table: Tensor | None = None

    def dense(self) -> Tensor:
        """The weight, in the packing's dtype."""
        codes, scales, *inner = self.parts
        if self.table is None:
            return codes.float() * (scales / 127)[:, None]
        if inner:
            outer, table, offset = inner
            nested = table[scales.long()] * outer.repeat_interleave(256)[: len(scales)]
            scales = nested + offset
        count = prod(self.shape)
        nibbles = torch.stack((codes >> 4, codes & 15), -1).view(-1)[:count]
        wide = scales.repeat_interleave(self.packing.blocksize)[:count]
        return (self.table[nibbles.long()] * wide).view(self.shape).to(self.packing.dtype)


class DenseTensors(NamedTuple):
    """The tensors of a folder, dense, by the names of its weights; those of bitsandbytes again, as
    the folder has them."""

    tensors: Mapping[str, Tensor]
    held: Mapping[str, HeldCodes]


def dense_tensors(folder: Path, make: Make) -> DenseTensors:
    """The tensors of a folder that may be quantised.

    Args:
        make: a tensor of a file, with or without values.

    Raises:
        ModelError: files that are missing or damaged, or codes without what belongs to them.
    """
    stored = {each.name: each for path in weight_files(folder) for each in stored_tensors(path)}
    found = {name: make(each) for name, each in stored.items()}
    held: dict[str, HeldCodes] = {}
    try:
        for method, section in quantised_sections(read_config(folder)):
            if method == "bitsandbytes":
                held |= dict(_held(found, stored))
                found |= {name: codes.dense() for name, codes in held.items()}
            elif method == "fp8":
                found |= dict(_eight_bit_floats(found, section))
            elif method == "compressed-tensors":
                found |= dict(_words(found, stored, section))
    except (*UNREADABLE, RuntimeError) as error:
        raise ModelError(
            f"model.path: the quantised weights in {folder} cannot be read: "
            f"{type(error).__name__}: {error}"
        ) from error
    return DenseTensors(found, held)


def dense_headers(folder: Path) -> Mapping[str, Tensor]:
    """The tensors of a folder, dense and without values."""
    return dense_tensors(folder, without_values).tensors


def without_values(stored: StoredTensor) -> Tensor:
    """On the meta device; of another type where no dense weight has it."""
    return torch.empty(stored.shape, dtype=READABLE.get(stored.dtype), device="meta")


def is_quantised(folder: Path) -> bool:
    """Whether config.json says so."""
    return any(True for _ in quantised_sections(read_config(folder)))


def _ending(found: Mapping[str, Tensor], end: str) -> list[str]:
    """What stands before it in the names that end so."""
    return [name.removesuffix(end) for name in found if name.endswith(end)]


def _values(stored: StoredTensor) -> Tensor:
    whole = torch.empty(stored.shape, dtype=READABLE[stored.dtype])
    read_into(whole, stored, tuple(slice(0, length) for length in stored.shape))
    return whole


def _held(
    found: dict[str, Tensor], stored: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, HeldCodes]]:
    kinds: tuple[Literal["nf4", "fp4"], ...] = ("nf4", "fp4")
    for kind in kinds:
        end = f".quant_state.bitsandbytes__{kind}"
        for name in _ending(found, end):
            said = json.loads(bytes(_values(stored[name + end]).tolist()))
            codes, scales = found[name].reshape(-1), found.pop(f"{name}.absmax")
            del found[name + end]
            parts = [codes.view(torch.uint8), scales]
            if "nested_blocksize" in said:
                if said["nested_blocksize"] != 256:
                    raise ValueError(f"{name} has nested blocks of {said['nested_blocksize']}")
                offset = torch.tensor([float(said["nested_offset"])])
                table = found.pop(f"{name}.nested_quant_map")
                parts += [found.pop(f"{name}.nested_absmax"), table, offset.to(codes.device)]
            packing = Packing(
                kind=kind,
                blocksize=int(said["blocksize"]),
                nested=len(parts) > 2,
                dtype=getattr(torch, said["dtype"]),
            )
            table = found.pop(f"{name}.quant_map")
            yield name, HeldCodes(packing, tuple(said["shape"]), parts, table)
    for layer in _ending(found, ".SCB"):
        codes, scales = found[f"{layer}.weight"], found.pop(f"{layer}.SCB")
        if found.pop(f"{layer}.weight_format", None) is not None:
            order = int(_values(stored[f"{layer}.weight_format"]))
            if order != ROW_ORDER:
                raise ValueError(f"{layer} has its codes in order {order}, expected {ROW_ORDER}")
        held = HeldCodes(Packing(kind="int8"), tuple(codes.shape), [codes, scales])
        yield f"{layer}.weight", held


def _eight_bit_floats(
    found: dict[str, Tensor], section: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    rows, columns = section.get("weight_block_size") or (1, 1)
    for name in _ending(found, "_scale_inv"):
        codes, scales = found[name], found.pop(f"{name}_scale_inv").float()
        if scales.numel() > 1 and section.get("weight_block_size"):
            scales = scales.repeat_interleave(rows, -2)[..., : codes.shape[-2], :]
            scales = scales.repeat_interleave(columns, -1)[..., : codes.shape[-1]]
        yield name, (codes.float() * scales).to(torch.bfloat16)
    for end in (".input_scale", ".activation_scale"):
        for layer in _ending(found, end):
            del found[layer + end]


def _words(
    found: dict[str, Tensor], stored: Mapping[str, StoredTensor], section: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    groups: Any = section["config_groups"]
    bits = int(next(iter(groups.values()))["weights"]["num_bits"])
    for layer in _ending(found, ".weight_packed"):
        words, scales = found.pop(f"{layer}.weight_packed"), found.pop(f"{layer}.weight_scale")
        del found[f"{layer}.weight_shape"]
        rows, columns = _values(stored[f"{layer}.weight_shape"]).tolist()
        codes = _unpacked(words, bits)[:, :columns].float()
        size, uneven = divmod(columns, scales.shape[-1]) if scales.ndim == 2 else (1, 0)
        if uneven:
            raise ValueError(f"{layer} has {columns} columns in {scales.shape[-1]} groups")
        if f"{layer}.weight_zero_point" in found:
            packed = found.pop(f"{layer}.weight_zero_point")
            zeros = _unpacked(packed.t(), bits).t()[:rows].float()
            codes = codes - zeros.repeat_interleave(size, 1)[:, :columns]
        wide = scales.repeat_interleave(size, 1)[:, :columns] if scales.ndim == 2 else scales
        yield f"{layer}.weight", (codes * wide.float()).to(scales.dtype)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """(R, C) words of 32 bits -> (R, C * 32 / bits) codes around 0, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    codes = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return codes.reshape(words.shape[0], -1) - (1 << (bits - 1))
