"""Hybrid decoders in model folders, for the tests alone: layers whose state has to be reset.

Where no family of vlmpack serves one, one does here, so that `vlmpack verify` has something to
find.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from support.families import tiny_family_folder
from support.hybrids import MILD, hybrid

from vlmpack.backends.hf import model as packed
from vlmpack.capabilities.served import ServedModel
from vlmpack.families import registry
from vlmpack.families.base import ModulePaths
from vlmpack.families.text_lm import TextLM

NAME = "hybrid_of_the_tests"


def serve_hybrid(monkeypatch: Any, model_type: str = "lfm2") -> None:
    """Put a family into the registry where there is none, and silence what refuses it elsewhere."""
    if model_type in registry.SERVED:
        return
    home = ModuleType(f"vlmpack.families.{NAME}")
    home.FAMILY = TextLM(
        name=NAME,
        model_types=(model_type,),
        modules=ModulePaths(vision=None, projectors=(), language="model"),
    )
    monkeypatch.setitem(sys.modules, home.__name__, home)
    line = ServedModel(title=model_type, family=NAME)
    monkeypatch.setitem(registry.SERVED, model_type, line)
    refusing = registry.served_model_type

    def served(folder: Path) -> str:
        config = (folder / "config.json").read_text(encoding="utf-8")
        return model_type if f'"{model_type}"' in config else refusing(folder)

    monkeypatch.setattr(registry, "served_model_type", served)
    monkeypatch.setattr(packed, "refusal", lambda config: None)


def hybrid_folder(
    tmp: Path,
    model_type: str = "lfm2",
    *,
    decays: tuple[float, float] = MILD,
    padding: float = 0.05,
) -> Path:
    """A tiny model of `support.hybrids`, seeded random weights, beside a tokenizer.

    Args:
        padding: every number of the padding token's embedding. It is zero where a model is fresh,
            and so is then all that the token asks of a state.
    """
    tiny_family_folder("qwen3", tmp)
    model = hybrid(model_type, decays)
    with torch.no_grad():
        model.get_input_embeddings().weight[model.config.pad_token_id].fill_(padding)
    model.save_pretrained(str(tmp))
    return tmp
