"""A hybrid decoder for the tests alone: LFM2, whose short convolutions have to be reset.

No family of vlmpack serves it; here one does, so that `vlmpack verify` has something to find.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from support.families import tiny_family_folder
from support.tiny_family import PLAIN_ROPE, TEXT

from vlmpack.backends.hf import model as packed
from vlmpack.capabilities.served import ServedModel
from vlmpack.families import registry
from vlmpack.families.base import ModulePaths
from vlmpack.families.text_lm import TextLM

NAME = "hybrid_of_the_tests"


def serve_hybrid(monkeypatch: Any) -> None:
    """Put the family into the registry, and silence what refuses it elsewhere."""
    home = ModuleType(f"vlmpack.families.{NAME}")
    home.FAMILY = TextLM(
        name=NAME,
        model_types=("lfm2",),
        modules=ModulePaths(vision=None, projectors=(), language="model"),
    )
    monkeypatch.setitem(sys.modules, home.__name__, home)
    monkeypatch.setitem(registry.SERVED, "lfm2", ServedModel(title="LFM2", family=NAME))
    refusing = registry.served_model_type

    def served(folder: Path) -> str:
        is_hybrid = '"lfm2"' in (folder / "config.json").read_text(encoding="utf-8")
        return "lfm2" if is_hybrid else refusing(folder)

    monkeypatch.setattr(registry, "served_model_type", served)
    monkeypatch.setattr(packed, "refusal", lambda config: None)


def hybrid_folder(tmp: Path) -> Path:
    """Two convolutions around one attention layer, seeded random weights."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        **TEXT,
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        conv_L_cache=3,
        block_auto_adjust_ff_dim=False,
        rope_parameters=PLAIN_ROPE,
    )
    tiny_family_folder("qwen3", tmp)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Lfm2ForCausalLM(config).save_pretrained(str(tmp))
    return tmp
