"""The vision tower of the first stage: transformers' own, with its projector.

Of most families that is one module. Of others the projector lies beside the tower: then it is a
module that has both under the names that they have in the transformers model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from vlmpack.backends.mcore.model import VisionTower
from vlmpack.backends.recompute import draws_random_numbers, recompute_layers
from vlmpack.backends.skeleton import model_skeleton
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError
from vlmpack.families.base import Family
from vlmpack.model_folder.load import build_part
from vlmpack.recipe.schema import Recomputed


class TowerParts(nn.Module):
    """Parts of a transformers model, under their names there.

    Args:
        whole: the model, without storage; its parts move here.
        names: where they are; what the model has not is None here, too.
    """

    def __init__(self, whole: Any, names: Sequence[str]) -> None:
        super().__init__()
        parts = dict(whole.named_children())
        for name in names:
            self.register_module(name, parts.get(name))
        saved = self.state_dict().keys()
        unsaved = [name for name, _ in self.named_buffers() if name not in saved]
        if unsaved:
            raise CapabilityError(
                f"the mcore engine cannot make the buffer {unsaved[0]} of the vision tower; use "
                f"model.backend: hf"
            )
        self.to_empty(device="cpu")


def tower_prefix(family: Family) -> str:
    """In front of a tower's own names in the transformers model."""
    names = family.tower_modules()
    return f"{names[0]}." if len(names) == 1 else ""


def vision_tower(
    config: TransformerConfig,
    skeleton: nn.Module,
    encoder: Encoder,
    recomputed: Recomputed,
    folder: Path,
) -> VisionTower | None:
    """The vision tower with its projector, weights still to be read; None where the model has none,
    and on all stages but the first.

    Args:
        config: Megatron's configuration.
        skeleton: the transformers model without weights.
        encoder: the model folder's processor.
        recomputed: what is computed again in the backward pass.
        folder: the model folder.
    """
    family = encoder.family
    path, names = family.modules.vision, family.tower_modules()
    if path is None or not parallel_state.is_pipeline_first_stage():
        return None
    tower: Any
    if len(names) == 1:
        tower = stack = build_part(skeleton.get_submodule(path))
    else:  # another skeleton: adapters may be in this one
        tower = TowerParts(model_skeleton(family.auto_class(), folder), names)
        stack = tower.get_submodule(path)
    for parameter in tower.parameters():  # buffers stay float32: rotary frequencies
        parameter.data = parameter.data.to(config.params_dtype)
    draws = draws_random_numbers(stack, adapter_dropout=0.0)
    recompute_layers(stack, recomputed, draws=draws)
    blank = encoder.image_rule.smallest()
    rule = family.tower_rule(stack.config.to_dict())
    if rule is not None:
        blank = replace(blank, tower=rule(blank.grid_thw))
    return VisionTower(tower, blank, family.tower_features, rule)
