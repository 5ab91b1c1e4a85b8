"""LoRA in the hf engine: where adapters go, what is trained, and what is written.

The references are peft's own: its merge for the formula, its PeftModel for the adapter folder.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import save_engine, stored_tensors
from support.engines import make_engine, make_stepper, policy, single_rank
from support.peft_models import peft_model
from support.runs import GRADIENT_TOLERANCE, relative_l2
from support.stock import StockProcessor
from torch import nn

from vlmpack.backends.hf import adapters
from vlmpack.backends.hf import engine as engine_module
from vlmpack.backends.hf.adapters import (
    adapter_targets,
    merged_weight,
    modules_in_full,
)
from vlmpack.backends.skeleton import model_skeleton
from vlmpack.errors import CapabilityError, TrainabilityError
from vlmpack.packing import PackCollator, pack_batch_sequences
from vlmpack.recipe.trainable import LoraSection
from vlmpack.training.checkpoint import load_checkpoint

COLLATE = PackCollator(pad_token_id=561, num_position_axes=3, pad_to_multiple_of=8)


def take_steps(stepper, encoded, count=2, start=0):
    """(loss, gradient norm) by step."""
    rows = []
    for step in range(start, start + count):
        sums, _ = stepper.train(step, [COLLATE(encoded)], num_skipped=0, stop=False)
        rows.append((sums.loss, sums.grad_norm))
    return rows


def weights(engine):
    return {name: p.detach().clone() for name, p in engine.vlm.model.named_parameters()}


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("dora", [False, True])
def test_the_merged_weight_is_that_of_peft(dora, rslora):
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20))
    config = LoraConfig(
        r=3, lora_alpha=5, target_modules=["0"], use_dora=dora, use_rslora=rslora,
        init_lora_weights=False,
    )  # fmt: skip
    inject_adapter_in_model(config, model)
    layer = model[0]
    magnitude = None
    if dora:
        magnitude = layer.lora_magnitude_vector["default"].weight
        magnitude.data.mul_(torch.linspace(0.5, 2.0, 20))
    settings = LoraSection(rank=3, alpha=5.0, rslora=rslora, dora=dora)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    before = layer.base_layer.weight.detach().clone()
    ours = merged_weight(before, a, b, settings.scaling_of("0"), magnitude)
    layer.merge()
    theirs = layer.base_layer.weight
    ours, theirs = ours.detach(), theirs.detach()
    assert relative_l2(ours, theirs) < 1e-6
    assert relative_l2(ours, before) > 0.1, "an adapter that does nothing"


def skeleton(folder, encoder):
    return model_skeleton(encoder.family.auto_class(), folder), encoder.family.modules


def test_targets_are_the_linear_layers_of_the_components(tiny_folder, encoder):
    model, paths = skeleton(tiny_folder, encoder)
    language = adapter_targets(model, paths, policy(language="lora"))
    assert len(language) == 7 * 4
    assert all(name.startswith("model.language_model.layers.") for name in language)
    projector = adapter_targets(model, paths, policy(projector="lora"))
    assert projector == ["model.visual.merger.mlp.0", "model.visual.merger.mlp.2"]
    vision = adapter_targets(model, paths, policy(vision="lora"))
    assert vision and all(name.startswith("model.visual.blocks.") for name in vision)
    named = adapter_targets(
        model, paths, policy(vision="lora", language="lora", targets=("q_proj", "attn.qkv"))
    )
    assert {name.rpartition(".")[2] for name in named} == {"q_proj", "qkv"}


@pytest.mark.parametrize(
    ("modes", "message"),
    [
        (
            {"vision": "frozen", "language": "lora", "modules_to_save": ("norm1",)},
            "modules_to_save: no weight of a component with mode lora lies in a 'norm1'",
        ),
        ({"language": "lora", "targets": ("q_poj",)}, r"ends in 'q_poj'; there are .*q_proj"),
        ({"language": "lora", "targets": ("lm_head",)}, r"ends in 'lm_head'; there are"),
        ({"language": "lora", "targets": ("proj",)}, "ends in 'proj'"),
        (
            {"language": "lora", "targets": ("q_proj",), "rank_pattern": {"v_proj": 2}},
            r"lora\.rank_pattern: nothing that gets an adapter ends in 'v_proj'; there are q_proj",
        ),
        (
            {"language": "lora", "alpha_pattern": {"q_proj": 2.0, "q_poj": 3.0}},
            r"lora\.alpha_pattern: .* ends in 'q_poj'; there are .*q_proj",
        ),
        (
            {"vision": "lora", "language": "lora", "targets": ("q_proj",)},
            "trainable.vision: 'lora', but no linear layer of the vision is among",
        ),
    ],
)
def test_targets_that_are_nowhere_are_named(tiny_folder, encoder, modes, message):
    model, paths = skeleton(tiny_folder, encoder)
    with pytest.raises(CapabilityError, match=message):
        adapter_targets(model, paths, policy(**modes))


def test_lora_on_the_language_model_and_full_vision_train_both(tiny_folder, encoder, encoded):
    engine = make_engine(tiny_folder, encoder, policy=policy(language="lora"))
    before = weights(engine)
    take_steps(make_stepper(engine, check=True), encoded[:3])
    moved = {n for n, value in weights(engine).items() if not torch.equal(value, before[n])}
    vision = {name for name in before if name.startswith("model.visual.")}
    adapters_ = {name for name in before if ".lora_" in name}
    assert moved == vision | adapters_
    assert len(vision) > 50
    assert len(adapters_) == 2 * 28


def test_the_wrong_order_of_freezing_is_found(tiny_folder, encoder, encoded, monkeypatch):
    """What peft does when it comes last: the tower would not be trained (MB#5991)."""

    def wrong(model, paths, policy, **options):
        adapters.set_trainable(model, paths, policy)
        adapters.add_adapters(model, paths, policy, **options)

    monkeypatch.setattr(engine_module, "apply_policy", wrong)
    engine = make_engine(tiny_folder, encoder, policy=policy(language="lora"))
    before = weights(engine)
    with pytest.raises(TrainabilityError, match=r"trainable\.vision is full, but .*gradient of ze"):
        take_steps(make_stepper(engine, check=True), encoded)
    assert all(torch.equal(value, before[name]) for name, value in weights(engine).items())


@pytest.mark.slow
def test_a_frozen_tower_records_no_graph(tiny_folder, encoder, encoded):
    """It costs its forward pass alone, although its projector, which is inside, is trained."""
    engine = make_engine(
        tiny_folder,
        encoder,
        policy=policy("frozen", "full", "frozen"),
        activation_checkpointing="full",
    )
    outputs = []
    blocks = engine.vlm.vision.blocks
    blocks[-1].register_forward_hook(lambda module, inputs, output: outputs.append(output))
    take_steps(make_stepper(engine, check=True), encoded, count=1)
    assert [output.requires_grad for output in outputs] == [False], "one pass, not recomputed"


@pytest.mark.slow
def test_recomputed_layers_have_gradients_beside_frozen_embeddings(tiny_folder, encoder, encoded):
    """Nothing that enters the first decoder layer needs a gradient here."""
    grads = []
    for recompute in ("none", "full"):
        engine = make_engine(
            tiny_folder,
            encoder,
            policy=policy("frozen", "frozen", "lora"),
            activation_checkpointing=recompute,
        )
        samples = encoded[:3]
        take_steps(make_stepper(engine, check=True, max_grad_norm=None), samples, count=1)
        grads.append({name: p.grad.clone() for name, p in engine.parameters()})
    plain, recomputed = grads
    assert plain.keys() == recomputed.keys()
    first = [name for name in plain if ".layers.0." in name and ".lora_B." in name]
    assert first and all(bool(plain[name].any()) for name in first)
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


EXPORTED = [
    pytest.param({"language": "lora"}, id="language"),
    pytest.param(
        {"vision": "frozen", "language": "lora", "dora": True}, id="dora", marks=pytest.mark.soak
    ),
    pytest.param(
        {"vision": "lora", "projector": "lora", "language": "lora", "rslora": True, "dora": True},
        id="all-rslora-dora",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        {"vision": "lora", "projector": "full", "language": "frozen"},
        id="projector inside vision",
        marks=pytest.mark.slow,
    ),
    pytest.param({"projector": "lora"}, id="projector alone", marks=pytest.mark.soak),
    pytest.param(
        {"language": "lora", "targets": ("q_proj", "o_proj")}, id="targets", marks=pytest.mark.soak
    ),
    pytest.param(
        {
            "vision": "frozen",
            "projector": "frozen",
            "language": "lora",
            "rslora": True,
            "rank_pattern": {"layers.1.self_attn.v_proj": 6, "v_proj": 2},
            "alpha_pattern": {"self_attn.o_proj": 3.0},
            "modules_to_save": ("embed_tokens", "lm_head", "input_layernorm"),
        },
        id="patterns and modules in full",
    ),
]


def test_an_evaluation_before_the_first_step_drops_nothing(tiny_folder, encoder, encoded):
    """peft adds its layers in training mode to a model that is not."""
    chosen = policy(language="lora", dropout=0.5)
    engine = make_engine(tiny_folder, encoder, policy=chosen)
    with torch.no_grad():  # an adapter that says something
        for name, parameter in engine.parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    assert {module.training for module in engine.vlm.model.modules()} == {False}
    stepper = make_stepper(engine)
    batch = pack_batch_sequences(encoded[:2], pad_token_id=0)
    first, second = (stepper.evaluate([batch]).loss for _ in range(2))
    assert first == second
    engine.module.train()
    engine.vlm.model.training = False  # the fault: the root says so alone
    assert stepper.evaluate([batch]).loss != first


@pytest.mark.slow
@pytest.mark.parametrize("modes", EXPORTED)
def test_adapter_folder_and_merged_folder_are_the_trained_model(
    tiny_folder, encoder, encoded, mixed, tmp_path, modes
):
    from transformers import AutoModelForImageTextToText

    engine = make_engine(tiny_folder, encoder, policy=policy(**modes))
    stepper = make_stepper(engine, check=True)
    stepper.schedule = lambda step: 0.01
    take_steps(stepper, encoded, count=3)
    engine.export(tmp_path / "merged", processor_from=tiny_folder, dtype=None)
    engine.export_adapter(tmp_path / "adapter", base=str(tiny_folder))
    merged = AutoModelForImageTextToText.from_pretrained(
        str(tmp_path / "merged"), dtype=torch.float32
    ).eval()
    stock = AutoModelForImageTextToText.from_pretrained(str(tiny_folder), dtype=torch.float32)
    with_adapter = peft_model(tiny_folder, tmp_path / "adapter")
    processor = StockProcessor(tiny_folder)
    assert {len(sample.images) for sample in mixed[:3]} > {0}
    for sample in mixed[:3]:
        arguments = processor(sample).arguments()
        with torch.no_grad(), engine.generation() as trained:
            ours = trained(**arguments).logits
            assert relative_l2(merged(**arguments).logits, ours) < GRADIENT_TOLERANCE
            assert relative_l2(with_adapter(**arguments).logits, ours) < GRADIENT_TOLERANCE
            if sample.images or modes.get("language", "full") != "frozen":
                assert relative_l2(stock.eval()(**arguments).logits, ours) > 1e-3, "no lesson"
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert config["base_model_name_or_path"] == str(tiny_folder)
    held = load_file(str(tmp_path / "adapter" / "adapter_model.safetensors"))
    # A tied head is a tensor of its own there, since peft wraps modules, not weights.
    elements = sum(v.numel() for name, v in held.items() if not name.endswith("lm_head.weight"))
    assert elements == sum(p.numel() for _, p in engine.parameters()), "the frozen base is in it"


@pytest.mark.slow
def test_a_tied_head_beside_adapters(tiny_folder, encoder, encoded, mixed, tmp_path):
    """The head's weight is the embedding's: both are in the adapter folder, and equal."""
    engine = make_engine(tiny_folder, encoder, policy=policy("lora", "frozen", "full"))
    names = [name for name, _ in engine.parameters()]
    assert "model.language_model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    modules = modules_in_full(engine.vlm.model, engine.paths, engine.policy)
    assert {"model.language_model", "lm_head"} <= set(modules)
    before = weights(engine)["model.language_model.embed_tokens.weight"]
    take_steps(make_stepper(engine, check=True), encoded, count=1)
    engine.export_adapter(tmp_path, base=str(tiny_folder))
    held = load_file(str(tmp_path / "adapter_model.safetensors"))
    head, embedding = (
        held[f"base_model.model.{name}.weight"]
        for name in ("lm_head", "model.language_model.embed_tokens")
    )
    assert torch.equal(head, embedding) and not torch.equal(head, before)
    arguments = StockProcessor(tiny_folder)(mixed[0]).arguments()
    with_adapter = peft_model(tiny_folder, tmp_path)
    with torch.no_grad(), engine.generation() as trained:
        ours, theirs = trained(**arguments).logits, with_adapter(**arguments).logits
    assert relative_l2(theirs, ours) < GRADIENT_TOLERANCE


def test_a_parameter_beside_adapters_has_no_place_in_an_adapter_folder():
    from peft import LoraConfig, inject_adapter_in_model

    from vlmpack.families.base import ModulePaths

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.newline = nn.Parameter(torch.zeros(3))

    model = Mixed()
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["layer"]), model)
    paths = ModulePaths(vision="vision", projectors=("newline",), language="layer")
    with pytest.raises(
        CapabilityError, match=r"newline was trained together with adapters.*--merge"
    ):
        modules_in_full(model, paths, policy("frozen", "full", "lora"))


@pytest.mark.slow
def test_a_checkpoint_holds_what_is_trained_and_resumes_bit_by_bit(
    tiny_folder, encoder, encoded, tmp_path
):
    """With dropout, whose seed is each step's own."""
    chosen = policy("frozen", "full", "lora", dropout=0.2)

    def fresh():
        stepper = make_stepper(make_engine(tiny_folder, encoder, policy=chosen), check=True)
        stepper.dropout_seed = 7
        return stepper

    stepper = fresh()
    take_steps(stepper, encoded)
    folder = save_engine(tmp_path, 2, stepper.engine, keep=1)
    stored = stored_tensors(folder)
    trained = {name for name, _ in stepper.engine.parameters()}
    kinds = ("model", "exp_avg", "exp_avg_sq")
    assert stored.keys() == {f"{kind}.{name}" for kind in kinds for name in trained}
    assert {name for name in trained if ".lora_" in name}
    assert all(".lora_" in name or "merger" in name for name in trained)
    rows = take_steps(stepper, encoded, start=2)

    again = fresh()
    load_checkpoint(folder, again.engine, single_rank())
    torch.manual_seed(1)
    assert take_steps(again, encoded, start=2) == rows
    assert rows[0] != rows[1]
    after, expected = weights(again.engine), weights(stepper.engine)
    assert all(torch.equal(after[name], value) for name, value in expected.items())
    load_checkpoint(folder, again.engine, single_rank())
    again.dropout_seed = 8
    assert take_steps(again, encoded, count=1, start=2) != rows[:1], "nothing was dropped"


@pytest.mark.slow
def test_ranks_of_a_row_drop_other_numbers_than_each_other_and_than_replicas(
    tiny_folder, encoder, encoded
):
    """Two ranks of each row, and two replicas of those."""
    stepper = make_stepper(
        make_engine(tiny_folder, encoder, policy=policy("frozen", "frozen", "lora", dropout=0.2))
    )
    stepper.dropout_seed, alone, drawn = 7, stepper.ranks, []
    for replica, own in itertools.product(range(2), range(2)):
        stepper.ranks = replace(alone, dp_rank=replica, dp_size=2, replica_rank=own)
        take_steps(stepper, encoded, count=1)
        drawn.append(torch.initial_seed())
    assert len({*drawn}) == 4


def test_adapters_begin_the_same_whatever_was_drawn_before(tiny_folder, encoder):
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        engine = make_engine(tiny_folder, encoder, policy=policy(language="lora", seed=5))
        drawn.append({n: p for n, p in engine.parameters() if ".lora_A." in n})
    other = make_engine(tiny_folder, encoder, policy=policy(language="lora", seed=6))
    assert drawn[0] and all(torch.equal(drawn[0][n], drawn[1][n]) for n in drawn[0])
    assert not any(torch.equal(p, drawn[0][n]) for n, p in other.parameters() if n in drawn[0])


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is there")
def test_four_bits_need_their_package(tiny_folder, encoder):
    with pytest.raises(CapabilityError, match=r"'nf4' needs bitsandbytes 0\.50 or newer"):
        make_engine(tiny_folder, encoder, policy=policy(language="lora", quantize="nf4"))
