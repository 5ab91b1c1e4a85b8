"""Which norms matrix products alone read: told by running blocks, and seen in whole models."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from support.engines import EVERYTHING, engine_of, single_rank
from support.families import FAMILIES, family_cases, tiny_family_folder
from support.shards import mixed_samples, text_samples
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vlmpack.backends.hf.fused_layers import norm_form
from vlmpack.backends.hf.load import load_model
from vlmpack.backends.hf.probes import read_by_products
from vlmpack.encode import Encoder
from vlmpack.packing import pack_batch_sequences
from vlmpack.recipe.schema import ModelSection, ParallelismSection


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.weight * x


class Router(nn.Module):
    """Its matrix is no `nn.Linear`'s, which autocast need not narrow."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8))

    def forward(self, x):
        return x @ self.weight.T


class Clipped(nn.Module):
    """As a tower of Gemma 4 has it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x.clamp(-1, 1))


class Attention(nn.Module):
    """What it is handed goes into one of its parts."""

    def __init__(self, part):
        super().__init__()
        self.q_proj = part

    def forward(self, x):
        return self.q_proj(x)


PARTS = {"a router": Router, "clips": lambda: Attention(Clipped())}


class Block(nn.Module):
    """A layer with a norm before its part, by the book or with a fault."""

    def __init__(self, fault=""):
        super().__init__()
        self.norm, self.fault = Norm(), fault
        self.part = PARTS.get(fault, lambda: Attention(nn.Linear(8, 8)))()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, hidden_states, positions, *, extra=None, **kwargs):
        x = self.norm(hidden_states)
        if self.fault == "its norm is the residual":  # as MiniMax has it
            return x + self.part(x)
        if self.fault == "added behind":  # as Gemma does
            return hidden_states + self.norm(self.part(hidden_states))
        if self.fault == "scaled on the way":
            return hidden_states + self.part(2 * x)
        if self.fault == "detached":
            return hidden_states + self.part(x) + x.detach()
        if self.fault == "a condition":
            return hidden_states + self.part(x) if extra.flag else hidden_states
        if self.fault == "unread":
            return hidden_states + self.part(hidden_states)
        return hidden_states + self.scale * self.part(x)


FAULTS = (
    "a router",
    "clips",
    "its norm is the residual",
    "added behind",
    "scaled on the way",
    "detached",
    "a condition",
    "unread",
)


def test_a_norm_before_products_is_told_from_others():
    assert read_by_products(Block(), "norm", 8)
    assert [fault for fault in FAULTS if read_by_products(Block(fault), "norm", 8)] == []


class Readers(TorchDispatchMode):
    """What reads the outputs of norms, by the norm's name: operators, with the dtype that a cast
    makes. Views are read on behalf of what they view."""

    def __init__(self, names):
        super().__init__()
        self.names, self.made, self.kept = names, {}, []
        self.readers = defaultdict(set)

    def note(self, module, _, out):
        """A hook of norms."""
        self.made[out.untyped_storage()._cdata] = self.names[module]
        self.kept.append(out)  # no other tensor gets its place

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        parts = out if isinstance(out, tuple | list) else [out]
        is_view = any(
            each.alias_info is not None and not each.alias_info.is_write
            for each in func._schema.returns
        )
        for x in args:
            name = isinstance(x, Tensor) and self.made.get(x.untyped_storage()._cdata)
            if name and not is_view:
                self.readers[name].add((func._schema.name, parts[0].dtype))
        return out


CAST = {("aten::_to_copy", torch.bfloat16)}
SANDWICHED = ("gemma3", "gemma4")


@pytest.mark.parametrize("family", family_cases(FAMILIES))
def test_stock_models_cast_what_such_norms_make_and_do_nothing_else_with_it(family, tmp_path):
    """Under autocast every operator that reads one is a cast to the dtype of products."""
    folder = tiny_family_folder(family, tmp_path)
    encoder = Encoder(folder)
    model = ModelSection(
        path=str(folder), dtype="bfloat16", attention="segments", fused_layers="none"
    )
    engine = engine_of(model, ParallelismSection(), encoder, single_rank(), EVERYTHING)
    names, told = {}, set()
    loaded = load_model(folder)  # blocks are asked before layers read working weights
    for place, block in engine.vlm.model.named_modules():
        for name, norm in block.named_children():
            if norm_form(norm) is not None:
                names[norm] = f"{place}.{name}"
                asked = loaded.get_submodule(place)
                if read_by_products(asked, name, norm.weight.numel()):
                    told.add(names[norm])
    raw = mixed_samples()[:3] if encoder.takes_images else text_samples()[:3]
    samples = [encoder.encode(sample.cooked()) for sample in raw]
    batch = pack_batch_sequences(samples, pad_to_multiple_of=1, pad_token_id=encoder.pad_token_id)
    readers = Readers(names)
    for norm in names:
        norm.register_forward_hook(readers.note)
    with engine._autocast(), torch.no_grad(), readers:
        engine.module(batch, batch.packed_seq_params())
    assert {name: readers.readers[name] for name in told} == dict.fromkeys(told, CAST)
    others = {name: found for name, found in readers.readers.items() if name not in told}
    if family.startswith(SANDWICHED):
        added = [name for name in others if name.endswith("post_attention_layernorm")]
        assert added and all(others[name] != CAST for name in added)
    if family in ("qwen2_5_vl", "qwen3_vl", "llama"):
        layers = [name for name in names.values() if name.endswith("layernorm")]
        assert layers and told >= set(layers)
