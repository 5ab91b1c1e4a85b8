"""What Gemma 4 without a tower has of its own: patches as large as a token, one dense layer, and a
class whose forward makes other masks than the model has.

Each is broken on purpose, and the comparison with transformers' own model has to notice.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from support.engines import make_engine, make_stepper
from support.families import TINY, tiny_family_folder, write_tiny
from support.images import file_of, one_image, picture
from support.played_torchvision import Played
from support.runs import find_differences, pack, relative_l2, run_batch
from support.stock import StockProcessor, load_stock, run_one_by_one
from support.tiny_gemma4 import MAX_TOKENS, PATCH, POOL
from support.tiny_gemma4_unified import GEMMA4_UNIFIED, VISION, config

from vlmpack.attention import BlockMasks
from vlmpack.backends.hf import model as hf_model
from vlmpack.encode import Encoder
from vlmpack.evaluation.generation import FIXED_CACHE
from vlmpack.families import gemma4_unified
from vlmpack.families.gemma4_unified import UnifiedImageRule
from vlmpack.recipe.data import ImagesSection

SIDE = PATCH * POOL
NAME = "Gemma4UnifiedImageProcessor"


class Case:
    """A tiny model twice, ours and transformers', with samples."""

    def __init__(self, folder, samples):
        processor = StockProcessor(folder)
        self.folder, self.encoder = folder, Encoder(folder)
        self.inputs = {sample.key: processor(sample) for sample in samples}
        self.with_images = {sample.key for sample in samples if sample.images}
        encoded = [self.encoder.encode(sample.cooked()) for sample in samples]
        self.vlm = make_engine(folder, self.encoder).vlm.train()
        self.stock = load_stock(folder).train()
        self.reference = run_one_by_one(self.stock, self.inputs)
        self.batch = pack(encoded, alignment=8)

    def differences(self, reference=None):
        """What our model computes otherwise than transformers'."""
        run = run_batch(self.vlm, self.batch)
        return find_differences(run, reference or self.reference)


def losses_found(differences):
    """Keys of the samples whose loss differs."""
    return {line.split()[2].rstrip(":") for line in differences if line.startswith("loss of")}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, mixed):
    """The tiny model of the suite."""
    return Case(tiny_family_folder("gemma4_unified", tmp_path_factory.mktemp("unified")), mixed)


# Masks


@pytest.mark.slow
def test_the_masks_of_the_class_s_own_forward_are_others(tiny):
    """Why those that it prepares are the reference. Where this finds no difference any more,
    transformers has corrected the class, and `class_arguments` can go."""
    by_itself = {
        key: replace(inputs, rules=replace(inputs.rules, prepared=lambda _, arguments: arguments))
        for key, inputs in tiny.inputs.items()
    }
    assert tiny.differences() == []
    found = tiny.differences(run_one_by_one(tiny.stock, by_itself))
    assert losses_found(found) == tiny.with_images


def test_blocks_of_another_kind_are_found(tiny, monkeypatch):
    """None at all, and in layers with full attention too."""
    for wrong in (
        lambda lengths, _, device, **how: BlockMasks(lengths, (), device, **how),
        lambda lengths, blocks, device, **_: BlockMasks(lengths, blocks, device),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(hf_model, "BlockMasks", wrong)
            assert losses_found(tiny.differences()) == tiny.with_images


def test_what_verify_calls_the_class_with(tiny):
    """The masks of the suite's reference, by the family."""
    inputs = next(inputs for inputs in tiny.inputs.values() if inputs.media)
    mask = {"attention_mask": torch.ones_like(inputs.input_ids)}
    ours = tiny.encoder.family.class_arguments(tiny.stock, {**inputs.arguments(), **mask})
    theirs = inputs.prepared(tiny.stock)
    assert ours.keys() == theirs.keys()
    for kind, value in theirs["attention_mask"].items():
        assert (value is None and ours["attention_mask"][kind] is None) or torch.equal(
            value, ours["attention_mask"][kind]
        )
    assert ours["attention_mask"]["sliding_attention"] is not None


def test_answers_have_the_masks_of_training(tiny):
    """With the family's settings alone: each new token's logits are those of a forward pass with
    the masks that it is trained with."""
    inputs = next(inputs for inputs in tiny.inputs.values() if inputs.media)
    mask = torch.ones_like(inputs.input_ids)

    def errors(**settings):
        with torch.no_grad():
            made = tiny.stock.generate(
                **inputs.arguments(),
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=3,
                min_new_tokens=3,
                output_logits=True,
                return_dict_in_generate=True,
                **settings,
            )
            new = made.sequences.shape[1] - mask.shape[1]
            kinds = torch.nn.functional.pad(inputs.is_image, (0, new))
            longer = replace(inputs, input_ids=made.sequences, is_image=kinds)
            logits = tiny.stock(**longer.prepared(tiny.stock)).logits[0, -new - 1 : -1]
        return [relative_l2(a[0], b) for a, b in zip(made.logits, logits, strict=True)]

    assert gemma4_unified.FAMILY.needs_fixed_cache
    assert max(errors(**FIXED_CACHE)) < 1e-5
    assert max(errors()) > 1e-4, "generate asks for these masks by itself"


# Patches and their places


def test_places_of_another_order_are_found(tiny, monkeypatch):
    original = gemma4_unified.places_of
    monkeypatch.setattr(gemma4_unified, "places_of", lambda h, w: original(h, w).flip(1))
    assert losses_found(tiny.differences()) == tiny.with_images


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_soft_tokens": 140}, {"do_normalize": True, "image_mean": [0.1, 0.2, 0.3]}],
    ids=str,
)
def test_pixels_are_the_stock_ones_whatever_the_settings(tmp_path, settings):
    """Bit for bit, with Pillow's resizing in both."""
    values = {**GEMMA4_UNIFIED.images, **settings}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values), encoding="utf-8")
    tokens = values["max_soft_tokens"]
    rule = UnifiedImageRule(tmp_path, patch=SIDE, pool=1, tokens=tokens)
    images = [picture(*size) for size in ((200, 90), (16, 300), (SIDE * 7, SIDE * 10))]
    theirs = Played(NAME, values)(images=images, return_tensors="pt")
    media = rule.preprocess(images)
    assert list(media.num_tokens) == list(theirs["num_soft_tokens_per_image"])
    for rows, padded in zip(
        media.pixel_values.split(media.num_tokens), theirs["pixel_values"], strict=True
    ):
        assert torch.equal(rows, padded[: len(rows)])
    (shown,) = rule.pictures(rule.preprocess(images[:1]))
    if not settings.get("do_normalize"):
        assert shown.tobytes() == images[0].resize(shown.size, 3).tobytes()


def test_a_budget_is_kept_and_exported(tmp_path):
    folder = write_tiny(
        replace(
            GEMMA4_UNIFIED,
            images={**GEMMA4_UNIFIED.images, "max_soft_tokens": 140},
            config=lambda: config(vision_config={**VISION, "mm_posemb_size": 140}),
        ),
        tmp_path,
    )
    assert Encoder(folder).image_rule.settings() == {"max_soft_tokens": 140}
    budget = ImagesSection(max_pixels=MAX_TOKENS * SIDE**2)
    rule = Encoder(folder).replace(budget=budget).image_rule
    assert rule.settings() == {"max_soft_tokens": MAX_TOKENS}
    assert rule.processor.max_soft_tokens == MAX_TOKENS


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"image_processor_type": "Gemma4ImageProcessor"}, f"it is a Gemma4.*expected {NAME}"),
        ({"patch_size": 8}, r"are \(8, 3\), but those of the model are \(6, 3\)"),
        ({"max_soft_tokens": 140}, "may be 140 tokens long, but the model knows the places of 80"),
        ({"do_resize": False}, "do_resize is false, expected true"),
    ],
    ids=str,
)
def test_another_processor_is_refused(tiny, tmp_path, values, message):
    shutil.copytree(tiny.folder, tmp_path / "model")
    path = tmp_path / "model" / "preprocessor_config.json"
    path.write_text(json.dumps({**GEMMA4_UNIFIED.images, **values}), encoding="utf-8")
    with pytest.raises(Exception, match=message):
        Encoder(tmp_path / "model").encode(one_image(file_of(picture(64, 64))))


# Sounds, and what it costs


@pytest.mark.slow
def test_what_projects_sounds_is_never_trained_and_exported_as_it_is(tmp_path, mixed):
    audio = {"audio_embed_dim": 20}
    one = replace(TINY["gemma4_unified"], config=lambda: config(audio_config=audio))
    (tmp_path / "model").mkdir()
    case = Case(write_tiny(one, tmp_path / "model"), mixed[:2])
    assert case.differences() == []
    engine = make_engine(case.folder, case.encoder)
    name = "model.embed_audio.embedding_projection.weight"
    before = engine.vlm.model.state_dict()[name].clone()
    assert name not in dict(engine.parameters())
    make_stepper(engine, check=True).train(0, [case.batch], num_skipped=0, stop=False)
    engine.export(tmp_path / "export", processor_from=case.folder, dtype=None)
    assert torch.equal(load_stock(tmp_path / "export").state_dict()[name], before)


def test_what_a_token_of_an_image_costs(tiny):
    values = json.loads((tiny.folder / "config.json").read_text(encoding="utf-8"))
    costs = gemma4_unified.FAMILY.cost_model(values)
    layers = [
        p.numel()
        for n, p in tiny.vlm.model.named_parameters()
        if n.endswith(("patch_dense.weight", "embedding_projection.weight"))
    ]
    assert len(layers) == 2
    assert costs.per_patch == 3 * 2 * sum(layers)
    assert costs.per_squared_patches == 0
