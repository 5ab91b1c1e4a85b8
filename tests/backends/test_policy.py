"""Which component a parameter belongs to, and what a policy makes of it."""

from __future__ import annotations

import pytest
import torch
from support.engines import policy
from support.families import VISION_FAMILIES, tiny_family_folder

from vlmpack.backends.policy import (
    component_of,
    count_components,
    describe_counts,
)
from vlmpack.backends.skeleton import model_skeleton
from vlmpack.errors import ModelError
from vlmpack.families.base import ModulePaths
from vlmpack.families.registry import family_of

INSIDE = ModulePaths(
    vision="model.visual",
    projectors=("model.visual.merger", "model.visual.deepstack_merger_list"),
    language="model.language_model",
)
NAMING_KEYS = ModulePaths(
    vision="model.vision_tower",
    projectors=("model.projector", "model.image_newline"),
    language="model.language_model",
)
ALONE = ModulePaths(vision=None, projectors=(), language="model")


@pytest.mark.parametrize(
    ("name", "paths", "component"),
    [
        ("model.visual.blocks.0.attn.qkv.weight", INSIDE, "vision"),
        ("model.visual.merger.mlp.0.weight", INSIDE, "projector"),
        ("model.visual.deepstack_merger_list.1.norm.bias", INSIDE, "projector"),
        ("model.visual.merger_norm.weight", INSIDE, "vision"),
        ("model.visual.blocks.0.merger.weight", INSIDE, "vision"),
        ("model.visual.merger.mlp.0.lora_A.default.weight", INSIDE, "projector"),
        ("model.language_model.layers.0.mlp.up_proj.base_layer.weight", INSIDE, "language"),
        ("model.language_model.embed_tokens.weight", INSIDE, "language"),
        ("lm_head.weight", INSIDE, "language"),
        ("model.projector.weight", NAMING_KEYS, "projector"),
        ("model.image_newline", NAMING_KEYS, "projector"),
        ("model.vision_tower.projector.weight", NAMING_KEYS, "vision"),
        ("model.layers.0.mlp.up_proj.weight", ALONE, "language"),
        ("lm_head.weight", ALONE, "language"),
    ],
)
def test_the_component_of_a_name(name, paths, component):
    assert component_of(name, paths) == component


@pytest.mark.cases(quick=("qwen2_5_vl", "internvl", "llava", "gemma3"), slow="nemotron_h_omni")
@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_components_are_the_modules_that_the_family_names(name, tmp_path):
    folder = tiny_family_folder(name, tmp_path)
    family = family_of(folder)
    model = model_skeleton(family.auto_class(), folder)
    named = dict(model.named_parameters()) | dict(model.named_modules())

    def ids(path):
        part = named[path]
        return (
            {id(part)} if isinstance(part, torch.nn.Parameter) else set(map(id, part.parameters()))
        )

    paths = family.modules
    projector = set().union(*map(ids, paths.projectors))
    vision = ids(paths.vision) - projector
    found = {
        component: {
            id(p) for n, p in model.named_parameters() if component_of(n, paths) == component
        }
        for component in ("vision", "projector", "language")
    }
    assert found["projector"] == projector
    assert found["vision"] == vision
    assert found["language"] >= ids(paths.language) | {id(paths.head_of(model).weight)}
    assert all(found.values())


@pytest.mark.parametrize(
    ("name", "ndim", "trains", "decays"),
    [
        ("model.language_model.layers.0.mlp.up_proj.base_layer.weight", 2, False, True),
        ("model.language_model.layers.0.mlp.up_proj.lora_A.default.weight", 2, True, True),
        ("model.language_model.layers.0.mlp.up_proj.lora_B.default.weight", 2, True, True),
        (
            "model.language_model.layers.0.mlp.up_proj.lora_magnitude_vector.default.weight",
            1,
            True,
            False,
        ),
        ("model.language_model.norm.weight", 1, False, False),
        ("model.visual.merger.mlp.0.weight", 2, True, True),
        ("model.visual.merger.mlp.0.bias", 1, True, False),
        ("model.visual.patch_embed.proj.weight", 5, False, True),
    ],
)
def test_what_is_said_of_a_parameter(name, ndim, trains, decays):
    said = policy("frozen", "full", "lora").of_parameter(name, ndim, INSIDE)
    assert (said.trains, said.decays) == (trains, decays)


def test_counts_are_those_of_the_shapes():
    shapes = {
        "model.visual.blocks.0.weight": (3, 5),
        "model.visual.blocks.0.bias": (3,),
        "model.visual.merger.weight": (7, 3),
        "model.language_model.layers.0.q.base_layer.weight": (11, 7),
        "model.language_model.layers.0.q.lora_A.default.weight": (2, 7),
        "model.language_model.layers.0.q.lora_B.default.weight": (11, 2),
        "lm_head.weight": (13, 7),
    }
    counts = count_components(shapes.items(), policy("full", "frozen", "lora"), INSIDE)
    assert [(c.component, c.parameters, c.trained, c.tensors, c.decayed) for c in counts] == [
        ("vision", 18, 18, 2, 15),
        ("projector", 21, 0, 0, 0),
        ("language", 77 + 14 + 22 + 91, 36, 2, 36),
    ]
    assert describe_counts(counts) == (
        "vision full, projector frozen, language lora; 54 of 243 parameters (22.22%)"
    )
    alone = count_components([("lm_head.weight", (2, 3))], policy(), ALONE)
    assert [count.component for count in alone] == ["language"]


def test_a_folder_without_a_model_is_named(tmp_path, encoder):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ModelError, match="cannot be built"):
        model_skeleton(encoder.family.auto_class(), tmp_path)
