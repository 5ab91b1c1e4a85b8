"""VeOmni's MainCollator on transformers' models.

Its trainer has model classes of its own, which transpose positions and take `image_mask`. What is
judged is the collator with transformers' classes, with positions counted as its data transforms
count them.
"""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers.modeling_outputs import ModelOutput

from benchmarks.conformance.subject import LANGUAGE, VISION, Case, model
from vlmpack.proof.judge.alone import own_positions

PACKAGES = ("veomni",)
ABSENT: list[str] = []
"""Outputs of classes that this transformers has under other names; the collator uses none."""


def stand_for_absent_outputs():
    home = Path(find_spec("veomni").submodule_search_locations[0])
    source = (home / "utils" / "model_outputs.py").read_text(encoding="utf-8")
    for path, name in re.findall(r"from (transformers\.models\.\S+) import (\w+)", source):
        module = import_module(path)
        if not hasattr(module, name):
            ABSENT.append(name)
            setattr(module, name, type(name, (ModelOutput,), {}))


stand_for_absent_outputs()
from veomni.data.data_collator import MainCollator  # noqa: E402


def rows(samples, counter):
    found = []
    for one in samples:
        row = {k: v.clone() for k, v in one.items()}
        row["attention_mask"] = torch.ones_like(row["input_ids"])
        if counter is not None:
            given = {k: v[None] if v.ndim == 1 else v for k, v in row.items() if k != "labels"}
            row["position_ids"] = own_positions(counter, given)
        found.append(row)
    return found


def batch_of(made):
    """What transformers' classes take: axes first, and text's positions before MRoPE's."""
    found = dict(made)
    positions = found["position_ids"]
    if positions.ndim == 3:
        found["position_ids"] = positions.transpose(0, 1)
    return {k: v for k, v in found.items() if v is not None and k != "linear_attn_cu_seq_lens_q"}


def cases():
    counter = model(VISION, "sdpa")
    collator = MainCollator()
    for attention in ("sdpa", "flash"):
        for name in (LANGUAGE, VISION):
            yield Case(
                what="MainCollator",
                model=name,
                attention=attention,
                collate=lambda s, n=name: batch_of(
                    dict(collator(rows(s, counter if n == VISION else None)))
                ),
                note="on transformers' class, with the mask of ones that its data transform adds"
                + ("; positions with the axes first" if name == VISION else ""),
            )
