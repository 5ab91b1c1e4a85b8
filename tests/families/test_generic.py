"""The generic family: what it asks of a class of transformers, against the class's own processor
and against the stock model, one sample at a time."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from tools.sweep import one
from tools.sweep.folder import write_folder
from tools.sweep.one import try_class
from vlmpack.backends.hf import model as hf_model
from vlmpack.backends.hf import whole_classes
from vlmpack.capabilities import refused
from vlmpack.capabilities.refused import Swept
from vlmpack.cli.app import app
from vlmpack.encode import Encoder, ImagePart, Message, TextPart, VLMSample
from vlmpack.errors import CapabilityError
from vlmpack.families import generic, generic_images
from vlmpack.families.registry import family_of
from vlmpack.model_folder.load import compose_processor
from vlmpack.recurrence import RowSegments

PARTS = {
    "glm4v": ("model.visual", (), "model.language_model"),
    "llava_next": (
        "model.vision_tower",
        ("model.multi_modal_projector", "model.image_newline"),
        "model.language_model",
    ),
    "janus": ("model.vision_model", ("model.aligner",), "model.language_model"),
}
"""Tower, projectors and decoder of classes whose names differ."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny folder of a class, made once."""
    made: dict[str, Path] = {}

    def make(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = write_folder(model_type, tmp_path_factory.mktemp(model_type))
        return made[model_type]

    return make


@pytest.fixture(autouse=True)
def no_words(monkeypatch):
    """Whatever an earlier sweep said."""
    monkeypatch.setattr(refused, "SWEPT", {})


def picture(draw: random.Random) -> Image.Image:
    """Noise of a random size."""
    width, height = draw.randint(32, 140), draw.randint(32, 140)
    return Image.frombytes("RGB", (width, height), draw.randbytes(3 * width * height))


@pytest.mark.parametrize("model_type", PARTS)
def test_parts_are_those_that_the_class_names(folder, model_type):
    paths = family_of(folder(model_type)).modules
    assert (paths.vision, paths.projectors, paths.language) == PARTS[model_type]
    assert paths.whole == "model"
    assert ("model.vqmodel" in paths.untouched) == (model_type == "janus")


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")
@pytest.mark.parametrize("model_type", PARTS)
def test_three_images_are_what_the_stock_processor_makes_of_all_at_once(
    folder, model_type, tmp_path
):
    draw = random.Random(2)
    images = [picture(draw) for _ in range(3)]
    family = family_of(folder(model_type))
    assert isinstance(family, generic.GenericVLM)
    processor = generic_images.open_processor(folder(model_type))
    marker = family.marker(None)
    theirs = processor(
        images=[images],
        text=[f"a{marker}b {marker}d{marker} c"],
        return_tensors="pt",
        add_special_tokens=False,
    )
    files = []
    for number, image in enumerate(images):
        image.save(tmp_path / f"{number}.png")
        files.append((tmp_path / f"{number}.png").read_bytes())
    texts = [TextPart(text) for text in ("a", "b ", "d", " c")]
    parts = (*(part for n in range(3) for part in (texts[n], ImagePart(n))), texts[3])
    messages = (Message("user", parts), Message("assistant", (TextPart("yes"),)))
    ours = Encoder(folder(model_type)).encode(
        VLMSample(key="k", url="u", messages=messages, images=tuple(files))
    )
    ids = theirs["input_ids"][0]
    found = ours.input_ids.unfold(0, len(ids), 1)
    assert (found == ids).all(1).any(), "the processor's ids stand in ours as they are"
    mine = family.rule.arguments(ours.media)
    assert torch.equal(mine["pixel_values"], theirs["pixel_values"])
    for name in ("image_grid_thw", "image_sizes"):
        if name in theirs:
            assert torch.equal(mine[name], torch.as_tensor(theirs[name]))


@pytest.mark.cases(slow="lfm2")
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llava_next", "lfm2"])
def test_packed_equals_stock_one_by_one(model_type):
    assert try_class(model_type) == Swept("proven")


@pytest.mark.slow
def test_a_state_that_runs_from_sample_to_sample_does_not_pass(monkeypatch):
    class InOne(RowSegments):
        @staticmethod
        def of(params, *, width):
            ends = params.cu_seqlens_physical[[0, -1]]
            return RowSegments((int(ends[-1]),), ends)

    monkeypatch.setattr(hf_model, "RowSegments", InOne)
    found = try_class("lfm2")
    assert found.word == "refused" and "(recurrent)" in found.reason
    assert "their state must be reset at every boundary" in found.reason


@pytest.mark.soak
@pytest.mark.parametrize(
    ("keeps", "said"),
    [
        pytest.param(False, "those of the model before training", marks=pytest.mark.soak),
        (True, "with other logits"),
    ],
)
def test_an_export_with_other_weights_does_not_pass(monkeypatch, keeps, said):
    load = one.load_model

    def other(folder):
        model = load(folder if keeps or folder.name != "export" else folder.parent / "model")
        if keeps:
            with torch.no_grad():
                next(iter(model.parameters())).mul_(1.001)
        return model

    monkeypatch.setattr(one, "load_model", other)
    found = try_class("lfm2")
    assert found.word == "refused" and said in found.reason


def test_a_language_model_is_asked_of_its_class(folder):
    family = family_of(folder("mamba2"))
    assert isinstance(family, generic.GenericLM) and family.proven_by_verify
    assert (family.modules.vision, family.modules.language) == (None, "backbone")
    costs = family.cost_model({})
    assert costs.per_squared_length == 0 < costs.per_token  # Mamba-2 looks at no pairs of tokens
    assert family_of(folder("lfm2")).cost_model({}).per_squared_length > 0
    alone = family_of(folder("mistral4"))  # registered with images that its class does not take
    assert isinstance(alone, generic.GenericLM) and alone.kind == "image-text-to-text"


@pytest.mark.soak
def test_positions_of_one_axis_do_not_pass_for_three(monkeypatch):
    def one_axis(self, num_tokens, media_starts, media):
        return torch.arange(num_tokens)[None].expand(3, -1)

    monkeypatch.setattr(generic.GenericVLM, "positions", one_axis)
    found = try_class("glm4v")
    assert found.word == "refused" and found.reason.startswith("verify: positions: ")


@pytest.mark.soak
def test_images_of_another_order_do_not_pass(monkeypatch):
    stock = generic_images.joined

    def swapped(values):
        return stock(values if len(values) < 5 else values[::-1])  # in rows, not in one sample

    monkeypatch.setattr(generic_images, "joined", swapped)
    found = try_class("llava_next")
    assert found.word == "refused" and found.reason.startswith("verify: ")


@pytest.mark.soak
def test_logits_that_are_not_scaled_as_the_class_does_do_not_pass(monkeypatch):
    monkeypatch.setattr(hf_model, "logit_scale", lambda model: 1.0)
    found = try_class("granite_docling")
    assert found.word == "refused" and "loss of each sample" in found.reason


def test_a_processor_that_writes_images_by_the_text_beside_them_is_refused(folder):
    family = family_of(folder("idefics2"))  # it puts a space before a letter
    with pytest.raises(CapabilityError, match="Idefics2Processor writes an image otherwise"):
        family.image_rule(folder("idefics2"), None)


@pytest.mark.parametrize(
    ("token", "said"),
    [
        (3, "its processor writes '.*' for an image"),
        (-5, "its tokenizer has no token of that id"),
        (10**7, "its tokenizer has no token of that id"),
        (10**12, "its tokenizer has no token of that id"),
    ],
)
def test_a_placeholder_that_the_processor_never_writes_is_refused(folder, tmp_path, token, said):
    path = tmp_path / "m"
    shutil.copytree(folder("llava_next"), path)
    config = json.loads((path / "config.json").read_text())
    keys = [key for key in generic.PLACEHOLDER_KEYS if key in config]
    assert family_of(path).image_rule(path, None).token
    (path / "config.json").write_text(json.dumps(config | dict.fromkeys(keys, token)))
    with pytest.raises(CapabilityError, match=said):
        family_of(path).image_rule(path, None)
    demo = str(Path(__file__).parents[2] / "recipes/digits-demo.yaml")
    told = CliRunner().invoke(app, ["recipe", "check", demo, f"model.path={path}"])
    assert isinstance(told.exception, CapabilityError) and re.search(said, str(told.exception))
    assert "OK" not in told.stdout


def test_a_class_without_a_tower_is_named():
    from transformers import LlamaConfig, LlamaForCausalLM

    small = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9
    )
    paths = generic.paths_of(LlamaForCausalLM(small))
    assert paths.vision is None and paths.language == paths.whole == "model"
    with pytest.raises(CapabilityError, match="torchvision alone"):
        write_folder("llama4", Path("unused"))


def test_a_processor_that_nobody_knows_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "glm4v"}')
    (tmp_path / "processor_config.json").write_text('{"processor_class": "Nobody"}')
    with pytest.raises(ValueError, match="names Nobody, which transformers has not"):
        compose_processor(tmp_path, None, None)


def test_a_window_that_only_masks_know_is_refused():
    from transformers import AutoModelForCausalLM, MixtralConfig, PhimoeConfig, Qwen2MoeConfig

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    window = {"sliding_window": 8, "max_window_layers": 1}

    def refuse(config):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        whole_classes.refuse_window_of_masks(model.get_decoder())

    for told in (
        PhimoeConfig(**sizes, sliding_window=8),
        Qwen2MoeConfig(**sizes, **window, use_sliding_window=True),
    ):
        with pytest.raises(CapabilityError, match="sliding_window of 8 tokens"):
            refuse(told)
    refuse(PhimoeConfig(**sizes))
    refuse(Qwen2MoeConfig(**sizes, **window))
    refuse(MixtralConfig(**sizes, sliding_window=8))  # hands it to its attention


def test_what_nobody_said_how_to_cut_is_refused_by_name():
    decoder, own = torch.nn.Identity(), torch.tensor([0, 3])
    given = {"inputs_embeds": torch.zeros(1, 4, 2), "own_slots": own, "position_ids": None}
    _, cut = whole_classes.cut_inputs(decoder, (), dict(given))
    assert cut["inputs_embeds"].shape == (1, 2, 2) and "own_slots" not in cut
    given |= {"per_layer_inputs": [torch.zeros(1, 4, 2)]}
    with pytest.raises(CapabilityError, match="Identity is given per_layer_inputs of a row by its"):
        whole_classes.cut_inputs(decoder, (), dict(given))
    with pytest.raises(CapabilityError, match="Identity is given argument 0 of a row"):
        whole_classes.cut_inputs(decoder, (torch.zeros(1, 4, 2),), {"own_slots": own})
