"""What the engine builds: types, weights, moments, and what it refuses to leave out."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import layouts
from support.engines import EVERYTHING, engine_of, make_stepper, single_rank
from support.families import tiny_family_folder
from support.shards import TINY_MODEL
from transformers import modeling_utils

from vlmpack.backends.mcore.engine import MegatronEngine
from vlmpack.backends.mcore.groups import megatron_on_cpu
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError
from vlmpack.recipe.schema import ModelSection, ParallelismSection

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.distributed.*is deprecated:FutureWarning",
    r"ignore:The \.grad attribute of a Tensor that is not a leaf",
)


def build(folder: Any, *, distributed_optimizer: bool = True, **model: Any) -> MegatronEngine:
    """One process."""
    section = ModelSection(path=str(folder), backend="mcore", attention="segments", **model)
    split = ParallelismSection(distributed_optimizer=distributed_optimizer)
    return engine_of(section, split, Encoder(folder), single_rank(), EVERYTHING)


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory):
    return tiny_family_folder("qwen3_vl_moe", tmp_path_factory.mktemp("moe"))


@pytest.mark.parametrize("distributed", [True, False])
def test_bfloat16_keeps_rotary_frequencies_and_main_weights_in_float32(distributed):
    engine = build(TINY_MODEL, dtype="bfloat16", distributed_optimizer=distributed)
    buffers = {n: b.dtype for n, b in engine.model.named_buffers() if b.is_floating_point()}
    assert any("rotary" in name for name in buffers)
    assert set(buffers.values()) == {torch.float32}
    assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16}
    stored = load_file(str(TINY_MODEL / "model.safetensors"))
    for kind, box, values in engine.owned_slices():
        assert kind == "model" and values.dtype is torch.float32
        name = box.name.replace("model.visual.", "visual.").replace(
            "model.language_model.", "model."
        )
        assert torch.equal(values, stored[name][box.index].float()), name


def test_activation_checkpointing_reaches_the_tower(monkeypatch):
    """And transformers does not warn of embeddings that reentrant checkpoints would need."""
    said = []
    monkeypatch.setattr(modeling_utils.logger, "warning_once", said.append)
    for asked in ("none", "full"):
        engine = build(TINY_MODEL, dtype="float32", activation_checkpointing=asked)
        found = [
            module.gradient_checkpointing
            for module in engine.model.vision.modules()
            if hasattr(module, "gradient_checkpointing")
        ]
        assert found and set(found) == {asked == "full"}
    assert not said


def test_a_weight_that_nobody_builds_is_refused(tmp_path):
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder = tiny_family_folder("qwen3_vl", tmp_path)
    config = AutoConfig.from_pretrained(str(folder))
    config.text_config.attention_bias = True
    AutoModelForImageTextToText.from_config(config).save_pretrained(str(folder))
    assert json.loads((folder / "config.json").read_text())["text_config"]["attention_bias"]
    with pytest.raises(
        CapabilityError, match=r"no place for 16 tensors.*k_proj\.bias.*backend: hf"
    ):
        build(folder, dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [True, False])
def test_moments_of_experts_come_back(moe_folder, distributed):
    engine = build(moe_folder, dtype="float32", distributed_optimizer=distributed)
    layouts.train(make_stepper(engine), layouts.LAYOUTS["one"], 2, moe_folder)
    whole = {}
    for kind, box, values in engine.owned_slices():
        tensor = whole.setdefault((kind, box.name), torch.zeros(box.shape))
        tensor[box.index] = values
    assert len(whole) == 3 * len(engine.parameter_shapes())
    other = build(moe_folder, dtype="float32", distributed_optimizer=not distributed)
    other.load_slices(lambda kind, box: whole[kind, box.name][box.index].clone(), optimizer_steps=2)
    for kind, box, values in other.owned_slices():
        assert torch.equal(values, whole[kind, box.name][box.index]), (kind, box.name)
    rows = [
        layouts.train(make_stepper(e), layouts.LAYOUTS["one"], 1, moe_folder)
        for e in (engine, other)
    ]
    assert rows[0][0] == pytest.approx(rows[1][0], rel=1e-6)


@pytest.mark.cases(quick="True-selective", slow=("False-none", "True-full"))
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("experts", [False, True])
def test_nothing_outlives_its_engine(moe_folder, recompute, experts):
    """megatron-core's layers keep scores of routers, and what 0.19 computed when torch stopped."""
    folder = moe_folder if experts else TINY_MODEL

    def trained():
        engine = build(folder, activation_checkpointing=recompute)
        layouts.train(make_stepper(engine), layouts.LAYOUTS["one"], 1, folder)
        return weakref.ref(engine), weakref.ref(engine.model)

    engine, model = trained()
    gc.collect()
    assert (engine(), model()) == (None, None)


def test_a_tower_that_makes_too_few_features_is_named():
    engine = build(TINY_MODEL, dtype="float32")
    (row, *_) = layouts.batches_of(layouts.LAYOUTS["one"])
    row = engine.prepare(row)
    fewer = replace(row, media_positions=row.media_positions[:-1])
    with megatron_on_cpu(), pytest.raises(CapabilityError, match=r"made \d+ features for \d+"):
        engine.model.merge(fewer)
