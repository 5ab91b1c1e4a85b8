"""What Gemma 3 has beyond the other families: attention in both directions inside an image, under a
sliding window too, with masks that are made from lengths alone."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from support.engines import EVERYTHING, engine_of, make_engine
from support.families import TINY, model_type_of, tiny_family_folder
from support.recorders import HostReads
from support.runs import find_differences, pack, run_batch, starts_of
from support.shards import text_samples
from support.stock import StockProcessor, load_stock, run_one_by_one
from support.tiny_gemma3 import TILE_TOKENS, WINDOW
from transformers import masking_utils

from vlmpack.attention import BlockMasks
from vlmpack.backends.hf import model as hf_model
from vlmpack.backends.hf.model import MergedInputs
from vlmpack.capabilities.served import SERVED
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError, ModelError
from vlmpack.families.registry import family_of
from vlmpack.packing import pad_batch_sequences
from vlmpack.recipe.schema import ModelSection, ParallelismSection


class Case:
    """A tiny model twice, ours and transformers', with samples."""

    def __init__(self, folder, samples):
        processor = StockProcessor(folder)
        inputs = {sample.key: processor(sample) for sample in samples}
        self.folder, self.encoder = folder, Encoder(folder)
        self.encoded = [self.encoder.encode(sample.cooked()) for sample in samples]
        self.with_images = {sample.key for sample in samples if sample.images}
        self.vlm = make_engine(folder, self.encoder).vlm.train()
        self.reference = run_one_by_one(load_stock(folder).train(), inputs)
        self.batch = pack(self.encoded, alignment=8)

    def differences(self, batch=None):
        """What our model computes otherwise than transformers'."""
        return find_differences(
            run_batch(self.vlm, self.batch if batch is None else batch), self.reference
        )


@pytest.fixture(scope="module")
def gemma(tmp_path_factory, mixed):
    return Case(tiny_family_folder("gemma3", tmp_path_factory.mktemp("gemma3")), mixed)


@pytest.fixture(scope="module")
def gemma_text(tmp_path_factory):
    folder = tiny_family_folder("gemma3_text", tmp_path_factory.mktemp("gemma3_text"))
    return Case(folder, text_samples())


def losses_found(differences):
    """Keys of the samples whose loss differs."""
    return {line.split()[2].rstrip(":") for line in differences if line.startswith("loss of")}


# Both directions


@pytest.mark.slow
def test_a_token_of_an_image_sees_all_of_it_and_nothing_behind(gemma):
    """By gradients through all layers, which reach back through the layer with full attention."""
    vlm, batch = gemma.vlm, gemma.batch
    merged = vlm.merge(batch)
    embeds = merged.embeds.detach().requires_grad_()
    hidden = vlm.decode(batch, batch.packed_seq_params(), MergedInputs(embeds))
    starts = starts_of(batch)
    assert len(batch.image_blocks) == 7
    for start, stop in batch.image_blocks:
        assert stop - start == TILE_TOKENS > WINDOW
        own = max(s for s in starts if s <= start)
        for slot in (start, stop - 1):
            (gradient,) = torch.autograd.grad(hidden[slot].sum(), embeds, retain_graph=True)
            reached = gradient.any(dim=1).nonzero().squeeze(1)
            assert reached.tolist() == list(range(own, stop)), (start, slot)
    before = batch.image_blocks[0][0] - 1
    (gradient,) = torch.autograd.grad(hidden[before].sum(), embeds)
    assert not gradient[before + 1 :].any(), "text is causal"


@pytest.mark.parametrize("mode", ["packed", "none"])
def test_causal_attention_alone_is_found(gemma, monkeypatch, mode):
    batch = None
    if mode == "none":
        batch = pad_batch_sequences(gemma.encoded, pad_token_id=gemma.encoder.pad_token_id)
    assert gemma.differences(batch) == []
    monkeypatch.setattr(
        hf_model, "BlockMasks", lambda lengths, _, device, **how: BlockMasks(lengths, (), device)
    )
    found = gemma.differences(batch)
    assert losses_found(found) == gemma.with_images
    assert any(line.startswith("gradient of model.vision_tower.") for line in found)


def test_blocks_that_swallow_the_text_between_two_images_are_found(gemma, monkeypatch):
    batch = gemma.batch
    (first, end), (second, stop), *others = batch.image_blocks
    assert (first, second) < (end, starts_of(batch)[1]), "of the first sample, which has two"
    wrong = replace(batch, image_blocks=((first, stop), *others))
    monkeypatch.setattr(hf_model, "block_masks", unchecked)
    assert losses_found(gemma.differences(wrong)) == {batch.keys[0]}


def unchecked(batch, params, **_):
    """The masks of a batch whose blocks do not sum to its image tokens."""
    lengths, device = params.segment_lengths, batch.input_ids.device
    return {"image_masks": BlockMasks(lengths, batch.image_blocks, device)}


# The sliding window


def test_a_window_that_is_left_out_is_found(gemma, monkeypatch):
    assert min(sample.length for sample in gemma.encoded) > WINDOW
    made = BlockMasks.mask

    def without(self, length, blocks, window):
        return made(self, length, blocks, None)

    monkeypatch.setattr(BlockMasks, "mask", without)
    assert losses_found(gemma.differences()) == {sample.key for sample in gemma.encoded}


def test_a_window_that_spares_the_image_is_found(gemma, monkeypatch):
    """OR(block, AND(window, causal)) in place of AND(window, OR(block, causal))."""
    made = BlockMasks.mask

    def spared(self, length, blocks, window):
        mask = made(self, length, blocks, window)
        if mask is not None and blocks:
            mask = mask.clone()
            for start, stop in blocks:
                mask[start:stop, start:stop] = True
        return mask

    monkeypatch.setattr(BlockMasks, "mask", spared)
    assert losses_found(gemma.differences()) == gemma.with_images


@pytest.mark.slow
def test_the_text_model_has_its_window_and_both_rotary_bases(gemma_text):
    vlm = gemma_text.vlm
    layers = vlm.language.layers
    assert {layer.self_attn.sliding_window for layer in layers} == {WINDOW, None}
    assert gemma_text.differences() == []
    everybody = {sample.key for sample in gemma_text.encoded if sample.length > WINDOW}
    assert everybody
    saved = [layer.self_attn.sliding_window for layer in layers]
    try:
        for layer in layers:
            layer.self_attn.sliding_window = None
        assert losses_found(gemma_text.differences()) == everybody
    finally:
        for layer, window in zip(layers, saved, strict=True):
            layer.self_attn.sliding_window = window
    rope = vlm.language.rotary_emb
    assert not torch.equal(rope.full_attention_inv_freq, rope.sliding_attention_inv_freq)


# How masks are made


def test_transformers_makes_no_mask(gemma, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a mask was made from positions or token types")

    for name in ("find_packed_sequence_indices", "sdpa_mask", "eager_mask", "blockwise_overlay"):
        assert hasattr(masking_utils, name)
        monkeypatch.setattr(masking_utils, name, refuse)
    for name in ("get_block_sequence_ids_for_mask", "create_masks_for_vision_model"):
        monkeypatch.setattr(f"transformers.models.gemma3.modeling_gemma3.{name}", refuse)
    assert gemma.differences() == []


def test_masks_are_shared_by_layers_and_nothing_is_read_back(gemma, monkeypatch):
    made = []

    class Recorded(BlockMasks):
        def __init__(self, *args, **how):
            super().__init__(*args, **how)
            made.append(self)

    monkeypatch.setattr(hf_model, "BlockMasks", Recorded)
    with HostReads() as reads:
        gemma.vlm(gemma.batch, gemma.batch.packed_seq_params()).sum().backward()
    assert reads.ours == reads.of_the_tower == []
    (masks,) = made
    # Two masks for a segment with images; one for a text longer than the window.
    expected = {
        (length, blocks, window)
        for length, blocks in zip(masks.lengths, masks.of_segment, strict=True)
        for window in ((None, WINDOW) if blocks else (WINDOW,))
    }
    assert masks._made.keys() == expected
    assert any(not blocks for _, blocks, _ in expected)


# Refusals


@pytest.mark.parametrize("name", ["torch_varlen", "flash_attn"])
def test_other_attention_is_refused_when_the_engine_is_built(gemma, one_rank, name):
    model = ModelSection(path=str(gemma.folder), dtype="bfloat16", attention=name)
    with pytest.raises(CapabilityError, match=rf"model\.attention: {name} cannot run"):
        engine_of(model, ParallelismSection(), gemma.encoder, one_rank, EVERYTHING)


def test_auto_is_segments(gemma, one_rank, monkeypatch):
    from vlmpack.build import engine

    seen = []
    original = engine.choose_attention

    def spy(*args, **options):
        seen.append(options["image_blocks"])
        return original(*args, **options)

    monkeypatch.setattr(engine, "choose_attention", spy)
    built = make_engine(gemma.folder, gemma.encoder)
    assert seen == [True]
    assert built.vlm.language.config._attn_implementation == "vlmpack_segments_image_blocks"
    assert built.vlm.vision.config._attn_implementation == "sdpa"


def test_the_table_and_the_families_agree_on_who_needs_masks(tmp_path):
    """Those whose image tokens attend in both directions. Gemma 4 has models of both kinds, so its
    line says nothing, and the launch looks at the model."""
    with_blocks = set()
    for name, tiny in TINY.items():
        tiny.config().save_pretrained(str(tmp_path / name))
        if family_of(tmp_path / name).modules.image_blocks:
            with_blocks.add(name)
    assert with_blocks == {"gemma3", "gemma4-dense", "gemma4-mixture", "gemma4_unified"}
    types = {model_type_of(name) for name in with_blocks}
    assert {SERVED[name].engines for name in types} == {("hf",)}
    alone = {name: served.attention for name, served in SERVED.items() if served.attention}
    assert alone.keys() == types - {"gemma4"}
    assert {only.names for only in alone.values()} == {("segments",)}


def test_a_batch_that_says_nothing_of_its_blocks_is_refused(gemma):
    batch = replace(gemma.batch, image_blocks=())
    with pytest.raises(CapabilityError, match="says of 0 of its 112 image tokens"):
        gemma.vlm(batch, batch.packed_seq_params())


def test_attention_without_masks_is_refused(gemma):
    embeds = torch.zeros(1, 8, gemma.vlm.language.config.hidden_size)
    params = gemma.batch.packed_seq_params()
    with pytest.raises(CapabilityError, match=r"Gemma3Attention called .* without image_masks"):
        gemma.vlm.language(inputs_embeds=embeds, use_cache=False, packed_seq_params=params)


@pytest.fixture
def copied(gemma, tmp_path):
    """Writes the folder anew with other values in its text_config or at the top of config.json."""

    def copy(section, **values):
        folder = tmp_path / "model"
        shutil.copytree(gemma.folder, folder)
        path = folder / "config.json"
        config = json.loads(path.read_text())
        (config[section] if section else config).update(values)
        path.write_text(json.dumps(config))
        return folder

    return copy


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attn_logit_softcapping", 50.0, "it caps logits .attn_logit_softcapping 50.0"),
        ("final_logit_softcapping", 30.0, "it caps logits .final_logit_softcapping 30.0"),
        ("use_bidirectional_attention", True, "its text attends in both directions"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(copied, key, value, message):
    folder = copied("text_config", **{key: value})
    with pytest.raises(CapabilityError, match=message):
        family_of(folder)


def test_a_rotary_rule_of_one_kind_of_layers_is_looked_at_too(copied, gemma):
    rope = TINY["gemma3"].config().text_config.rope_parameters
    rope = {**rope, "full_attention": {**rope["full_attention"], "rope_type": "dynamic"}}
    folder = copied("text_config", rope_parameters=rope)
    with pytest.raises(CapabilityError, match="rope_type 'dynamic'"):
        make_engine(folder, gemma.encoder)


def test_another_decoder_is_refused(copied):
    with pytest.raises(CapabilityError, match="model_type 'llama' is not served"):
        family_of(copied("text_config", model_type="llama"))


def test_a_tokenizer_without_the_image_tokens_is_named(gemma, tiny_folder, tmp_path):
    shutil.copytree(gemma.folder, tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny_folder / name, tmp_path / "model" / name)
    with pytest.raises(ModelError, match="<end_of_image>, <image_soft_token>, <start_of_image>"):
        _ = Encoder(tmp_path / "model").placeholder_id


# Sizes

PUBLISHED_4B = {
    "model_type": "gemma3",
    "mm_tokens_per_image": 256,
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
"""Gemma 3 4B as it is published: heads and vocabulary are the class's defaults."""


def test_the_cost_of_the_published_4b_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_4B))
    model = family_of(tmp_path).cost_model(PUBLISHED_4B)
    attention, mlp = 2 * 2560 * 256 * (8 + 4), 3 * 2560 * 10240
    assert model.per_token == 6 * 34 * (attention + mlp)
    assert model.per_label_token == 6 * 2560 * 262208
    block, pixels = 4 * 1152**2 + 2 * 1152 * 4304, 3 * 14**2 * 1152
    pairs, projector = 4 * 1152 * 27 * 64**2, 2 * 1152 * 2560 / 16
    assert model.per_patch == 3 * (2 * (27 * block + pixels) + pairs + projector)
    assert model.per_squared_patches == 0, "every tile has as many patches"
    text = {**PUBLISHED_4B["text_config"], "architectures": ["Gemma3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert family_of(tmp_path).cost_model(text).per_token == model.per_token
    with pytest.raises(ModelError, match=r"config\.json: .*hidden_size"):
        family_of(tmp_path).cost_model({**text, "hidden_size": "wide"})


def test_memory_is_estimated_from_the_folder(gemma):
    from vlmpack.forecast.parameters import read_sizes

    sizes = read_sizes(gemma.folder)
    count = sum(p.numel() for p in gemma.vlm.model.parameters())
    assert sizes.parameters == count
    assert sizes.tower == sum(p.numel() for p in gemma.vlm.vision.parameters())
    assert (sizes.vision.blocks, sizes.vision.gated) == (2, False)
    assert {(layer.query, layer.key) for layer in sizes.decoder} == {(4 * 24, 2 * 24)}
