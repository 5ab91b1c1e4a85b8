"""What Nemotron Omni has of its own: a tower for images of any shape, the order of the patches of a
token, a head below the top of the class, and parts that no sample reaches.

Each is broken on purpose, and the comparison with transformers' own model has to notice.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import make_engine, make_stepper, policy
from support.families import TINY, tiny_family_folder, write_tiny
from support.runs import find_differences, loss_errors, pack, run_batch
from support.stock import StockProcessor, load_stock, run_one_by_one
from support.tiny_nemotron_omni import AUDIO, config
from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import (
    NemotronH_Omni_Reasoning_V3PreTrainedModel,
)

from vlmpack.backends.hf.adapters import adapter_targets
from vlmpack.backends.hf.load import check_weights, load_model
from vlmpack.capabilities.refused import refusal
from vlmpack.encode import Encoder
from vlmpack.errors import ModelError
from vlmpack.families import nemotron_omni
from vlmpack.families.registry import family_of

MAKES_THE_NORM_UP = bool(
    getattr(NemotronH_Omni_Reasoning_V3PreTrainedModel, "_keys_to_ignore_on_load_missing", None)
)


class Case:
    """A tiny model twice, ours and transformers', with samples."""

    def __init__(self, folder, samples):
        processor = StockProcessor(folder)
        inputs = {sample.key: processor(sample) for sample in samples}
        self.folder, self.encoder = folder, Encoder(folder)
        encoded = [self.encoder.encode(sample.cooked()) for sample in samples]
        self.with_images = {sample.key for sample in samples if sample.images}
        self.vlm = make_engine(folder, self.encoder).vlm.train()
        self.reference = run_one_by_one(load_stock(folder).train(), inputs)
        self.batch = pack(encoded, alignment=8)

    def differences(self):
        """What our model computes otherwise than transformers'."""
        return find_differences(run_batch(self.vlm, self.batch), self.reference)


def losses_found(differences):
    """Keys of the samples whose loss differs."""
    return {line.split()[2].rstrip(":") for line in differences if line.startswith("loss of")}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, mixed):
    """The tiny model of the suite."""
    return Case(tiny_family_folder("nemotron_h_omni", tmp_path_factory.mktemp("omni")), mixed)


@pytest.fixture(scope="module")
def with_more(tmp_path_factory, mixed):
    """One whose class has a tower for sounds and, for the sake of multi-token prediction, a norm
    behind the tower; its weights lie under other names than those of the tiny one."""

    def whole():
        made = config(audio_config=AUDIO)
        made.text_config.num_nextn_predict_layers = 1
        return made

    one = replace(TINY["nemotron_h_omni"], config=whole)
    return Case(write_tiny(one, tmp_path_factory.mktemp("more")), mixed[:3])


# The tower


def test_patches_of_a_token_in_another_order_are_found(tiny, monkeypatch):
    assert tiny.differences() == []
    monkeypatch.setattr(
        nemotron_omni,
        "merge_order",
        lambda grids, prefix: torch.cat(
            [
                prefix + torch.arange(rows * columns) + start
                for start, (_, rows, columns) in zip(starts(grids, prefix), grids, strict=True)
            ]
        ),
    )
    assert losses_found(tiny.differences()) == tiny.with_images


def starts(grids, prefix):
    """Of each image among the tower's outputs."""
    found = [0]
    for _, rows, columns in grids:
        found.append(found[-1] + prefix + rows * columns)
    return found[:-1]


def test_the_patches_of_a_token_lie_row_by_row():
    order = nemotron_omni.merge_order(((1, 2, 4), (1, 2, 2)), 3).tolist()
    assert order == [3, 4, 7, 8, 5, 6, 9, 10, 14, 15, 16, 17]


def test_attention_between_images_is_found(tiny, monkeypatch):
    encoder = tiny.vlm.vision.encoder
    original = type(encoder).forward
    monkeypatch.setattr(
        type(encoder),
        "forward",
        lambda self, hidden, cu_seqlens=None, **others: original(self, hidden, **others),
    )
    assert losses_found(tiny.differences()) == tiny.with_images


def test_the_head_lies_below_the_top_of_the_class(tiny):
    assert tiny.vlm.model.get_output_embeddings() is None
    assert tiny.vlm.head is tiny.vlm.model.language_model.lm_head
    targets = adapter_targets(
        load_model(tiny.folder), tiny.vlm.paths, policy(language="lora", vision="lora")
    )
    assert any(name.startswith("vision_model.encoder") for name in targets)
    assert any(name.startswith("language_model.model") for name in targets)
    assert not any(
        name.endswith(("lm_head", "out_proj", "video_patch_projection")) for name in targets
    )


# What reaches other samples


def test_without_experts_nothing_of_another_sample_moves_a_bit(tmp_path, mixed):
    """With experts samples share matmuls, whose last bits follow how many rows they have."""
    layers = ["linear_attention", "mlp", "full_attention", "linear_attention"]

    def dense():
        made = config()
        made.text_config = type(made.text_config)(
            **{**made.text_config.to_dict(), "layers_block_type": layers}
        )
        return made

    folder = write_tiny(replace(TINY["nemotron_h_omni"], config=dense), tmp_path)
    encoder = Encoder(folder)
    vlm = make_engine(folder, encoder).vlm.train()
    assert not any("experts" in name for name, _ in vlm.model.named_parameters())
    samples = [encoder.encode(sample.cooked()) for sample in mixed]
    number = next(n for n, sample in enumerate(samples) if sample.media is not None)
    other = replace(
        samples[number],
        input_ids=samples[number].input_ids.roll(1),
        media=replace(
            samples[number].media, pixel_values=samples[number].media.pixel_values.flip(0)
        ),
    )

    def logits(row):
        batch = pack(row, alignment=8)
        with torch.no_grad():
            hidden = vlm.hidden_states(batch, batch.packed_seq_params())
            return vlm.logits(hidden).split(batch.segment_lengths)[: len(row)]

    before = logits(samples)
    after = logits([*samples[:number], other, *samples[number + 1 :]])
    for place, (mine, theirs) in enumerate(zip(after, before, strict=True)):
        assert torch.equal(mine, theirs) == (place != number)


# What no sample reaches


@pytest.mark.slow
def test_the_rest_of_the_model_is_never_trained_and_exported_as_it_is(with_more, tmp_path):
    rest = ("audio_tower.", "embed_audio.", "vision_final_layernorm.", "video_patch_projection.")
    engine = make_engine(with_more.folder, with_more.encoder)
    before = {
        name: tensor.clone()
        for name, tensor in engine.vlm.model.state_dict().items()
        if any(part in f"{name}." for part in rest)
    }
    assert {part for part in rest if any(part in f"{name}." for name in before)} == set(rest)
    assert not any(part in f"{name}." for name, _ in engine.parameters() for part in rest)
    make_stepper(engine, check=True).train(0, [with_more.batch], num_skipped=0, stop=False)
    engine.export(tmp_path, processor_from=with_more.folder, dtype=None)
    exported = load_stock(tmp_path).state_dict()
    for name, tensor in before.items():
        assert torch.equal(exported[name], tensor), name


def test_a_norm_behind_the_tower_changes_what_the_projector_sees(with_more, monkeypatch):
    """All is as in transformers' model but its gradient, which nobody asks for."""
    assert with_more.vlm.model.vision_final_layernorm is not None
    found = with_more.differences()
    assert {line.split()[2] for line in found} == {
        "vision_final_layernorm.weight",
        "vision_final_layernorm.bias",
    }
    monkeypatch.setattr(with_more.vlm.model, "vision_final_layernorm", None)
    errors = loss_errors(run_batch(with_more.vlm, with_more.batch), with_more.reference)
    assert {key for key, error in errors.items() if error > 1e-4} == with_more.with_images


def test_files_without_that_norm_and_with_prediction_layers(with_more, tmp_path):
    """Prediction layers are kept. The class of transformers 5.23 makes the norm up, later ones read
    it from the files, under the name that published ones have for it."""
    folder, out = tmp_path / "model", tmp_path / "export"
    folder.mkdir()
    for path in with_more.folder.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(with_more.folder / "model.safetensors")
    held = {name: t for name, t in tensors.items() if "vision_final_layernorm" not in name}
    assert len(tensors) - len(held) == 2
    unread = {"language_model.mtp.layers.0.norm.weight": torch.randn(64)}
    save_file(held | unread, folder / "model.safetensors", metadata={"format": "pt"})
    if not MAKES_THE_NORM_UP:
        with pytest.raises(ModelError, match=r"missing keys: vision_final_layernorm\.bias"):
            check_weights(folder)
        return
    assert [tensor.name for tensor in check_weights(folder).unused] == [*unread]
    engine = make_engine(folder, Encoder(folder))
    assert engine.vlm.model.vision_final_layernorm.weight.eq(1).all()
    engine.export(out, processor_from=folder, dtype=None)
    exported = {k: v for file in out.glob("*.safetensors") for k, v in load_file(file).items()}
    assert torch.equal(exported[next(iter(unread))], unread[next(iter(unread))])


# Config files


FORMER = {
    "text_config": "llm_config",
    "image_token_id": "img_context_token_id",
    "vision_hidden_size": "vit_hidden_size",
    "audio_config": "sound_config",
}


def test_published_files_have_other_names(tiny, tmp_path):
    """transformers reads them; so do lengths, costs and refusals."""
    values = json.loads((tiny.folder / "config.json").read_text(encoding="utf-8"))
    former = {FORMER.get(key, key): value for key, value in values.items()}
    assert former.keys() != values.keys()
    (tmp_path / "config.json").write_text(json.dumps(former), encoding="utf-8")
    assert refusal(former) is None
    family = family_of(tmp_path)
    assert family.cost_model(former) == family.cost_model(values)
    former["llm_config"]["layers_block_type"][0] = "conv"
    assert "of kind conv" in (refusal(former) or "")


def test_another_language_model_is_refused(tiny):
    values = json.loads((tiny.folder / "config.json").read_text(encoding="utf-8"))
    values["text_config"]["model_type"] = "qwen3"
    assert "with nemotron_h it is" in (refusal(values) or "")


def test_what_a_token_and_a_patch_cost(tiny):
    values = json.loads((tiny.folder / "config.json").read_text(encoding="utf-8"))
    costs = nemotron_omni.FAMILY.cost_model(values)
    named = dict(tiny.vlm.model.named_parameters())
    tower = sum(
        p.numel() for n, p in named.items() if n.startswith("vision_model.encoder") and p.ndim == 2
    )
    tower += named["vision_model.embeddings.patch_projection.weight"].numel()
    projector = sum(
        p.numel() for n, p in named.items() if n.startswith("multi_modal") and p.ndim == 2
    )
    assert costs.per_patch == 3 * 2 * (tower + projector / 4)
    assert costs.per_squared_patches == 3 * 4 * 48 * 2
    assert costs.per_squared_length == 3 * 2 * 4 * 24
