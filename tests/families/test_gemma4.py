"""What Gemma 4 has beyond the other families: per-layer inputs, keys and values that layers share,
image blocks in layers with a window alone, bent logits, and a tower for audio that stays as it is.

Each is broken on purpose, and the comparison with transformers' own model has to notice.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import EVERYTHING, engine_of, make_engine, make_stepper, policy
from support.families import TINY, tiny_family_folder, write_tiny
from support.recorders import HostReads
from support.runs import find_differences, pack, run_batch
from support.shards import text_samples
from support.stock import StockProcessor, load_stock, run_one_by_one
from support.tiny_gemma3 import text as gemma3_text
from support.tiny_gemma4 import PER_LAYER, config, tiny

from vlmpack.attention import AttentionChoice, BlockMasks, segment_attention, varlen
from vlmpack.backends.hf import attention as hf_attention
from vlmpack.backends.hf import model as hf_model
from vlmpack.backends.hf.adapters import adapter_targets
from vlmpack.backends.hf.load import check_weights
from vlmpack.backends.skeleton import model_skeleton
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError
from vlmpack.families.gemma4 import Gemma4
from vlmpack.families.registry import family_of
from vlmpack.packing import PackedSeqParams, pad_batch_sequences
from vlmpack.recipe.schema import ModelSection, ParallelismSection

AUDIO = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "subsampling_conv_channels": [4, 4],
    "output_proj_dims": 24,
}


class Case:
    """A tiny model twice, ours and transformers', with samples."""

    def __init__(self, folder, samples):
        processor = StockProcessor(folder)
        inputs = {sample.key: processor(sample) for sample in samples}
        self.folder, self.encoder = folder, Encoder(folder)
        self.encoded = [self.encoder.encode(sample.cooked()) for sample in samples]
        self.keys = {sample.key for sample in samples}
        self.with_images = {sample.key for sample in samples if sample.images}
        self.vlm = make_engine(folder, self.encoder).vlm.train()
        self.reference = run_one_by_one(load_stock(folder).train(), inputs)
        self.batch = pack(self.encoded, alignment=8)

    def differences(self, batch=None):
        """What our model computes otherwise than transformers'."""
        run = run_batch(self.vlm, self.batch if batch is None else batch)
        return find_differences(run, self.reference)


def losses_found(differences):
    """Keys of the samples whose loss differs."""
    return {line.split()[2].rstrip(":") for line in differences if line.startswith("loss of")}


def gradients_found(differences, part):
    """Whether a gradient of such a parameter differs."""
    return any(line.startswith("gradient of") and part in line for line in differences)


@pytest.fixture(scope="module")
def series_e(tmp_path_factory, mixed):
    """Per-layer inputs, shared keys and values, causal images."""
    return Case(tiny_family_folder("gemma4", tmp_path_factory.mktemp("e")), mixed)


@pytest.fixture(scope="module")
def dense(tmp_path_factory, mixed):
    """Image blocks."""
    return Case(tiny_family_folder("gemma4-dense", tmp_path_factory.mktemp("dense")), mixed)


# Image blocks


@pytest.mark.cases(slow="packed")
@pytest.mark.parametrize("mode", ["packed", "none"])
def test_blocks_of_another_kind_are_found(dense, monkeypatch, mode):
    """None at all, and in layers with full attention too."""
    batch = None
    if mode == "none":
        batch = pad_batch_sequences(dense.encoded, pad_token_id=dense.encoder.pad_token_id)
    assert dense.differences(batch) == []
    assert len(dense.batch.image_blocks) == 7
    for wrong in (
        lambda lengths, _, device, **how: BlockMasks(lengths, (), device, **how),
        lambda lengths, blocks, device, **_: BlockMasks(lengths, blocks, device),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(hf_model, "BlockMasks", wrong)
            found = dense.differences(batch)
        assert losses_found(found) == dense.with_images
        assert gradients_found(found, "model.vision_tower.")


@pytest.mark.parametrize("kind", ["series_e", "dense"])
def test_layers_with_full_attention_take_the_kernel_of_wide_heads(request, monkeypatch, kind):
    """Played by its formula, and with fewer channels. Layers with a window have narrower heads."""
    case, widths = request.getfixturevalue(kind), []
    wide, language = varlen.wide_attention, case.vlm.language

    def seen(query, key, value, cu_seqlens, **how):
        widths.append(query.shape[-1])
        return wide(query, key, value, cu_seqlens, **how)

    function, blocks = varlen.with_wide_heads(segment_attention), kind == "dense"
    choice = AttentionChoice("segments", function, "", blocks, wide_heads=True)
    before = language.config._attn_implementation
    monkeypatch.setattr(varlen, "LARGEST_HEAD", 32)
    monkeypatch.setattr(varlen, "wide_attention", seen)
    language.set_attn_implementation(hf_attention.register_attention(choice))
    try:
        assert case.differences() == []
        full = language.config.layer_types.count("full_attention")
        assert widths == [40] * full and full < len(language.layers)

        def mixed(query, key, value, cu_seqlens, **how):
            return wide(query, key, value, cu_seqlens[[0, -1]], **how)

        monkeypatch.setattr(varlen, "wide_attention", mixed)
        assert len(losses_found(case.differences())) >= len(case.keys) - 1, "control: one segment"
    finally:
        language.set_attn_implementation(before)


@pytest.mark.slow
def test_images_are_causal_where_the_config_says_nothing(series_e, dense):
    assert series_e.batch.image_blocks == ()
    assert not series_e.encoder.family.modules.image_blocks
    assert dense.encoder.family.modules.image_blocks
    assert dense.encoder.family.modules.blocks_in_windows


# Per-layer inputs


@pytest.mark.slow
def test_per_layer_inputs_of_another_sample_are_found(series_e, monkeypatch):
    assert series_e.differences() == []
    original, shift = Gemma4.decoder_arguments, series_e.batch.lengths[0]
    monkeypatch.setattr(
        Gemma4,
        "decoder_arguments",
        lambda family, model, ids, places: original(family, model, ids.roll(shift, 1), places),
    )
    found = series_e.differences()
    assert losses_found(found) == series_e.keys
    assert gradients_found(found, "embed_tokens_per_layer")


@pytest.mark.slow
def test_placeholders_that_are_looked_up_by_their_own_id_are_found(series_e, monkeypatch):
    """Theirs is the padding token's: transformers sees to it before it looks."""
    original = Gemma4.decoder_arguments
    monkeypatch.setattr(
        Gemma4,
        "decoder_arguments",
        lambda family, model, ids, places: original(family, model, ids, places[:0]),
    )
    assert losses_found(series_e.differences()) == series_e.with_images


def test_embeddings_alone_are_not_enough(series_e):
    """transformers would look for the ids of embeddings that images have no ids of."""
    batch, vlm = series_e.batch, series_e.vlm
    merged = vlm.merge(batch)
    with pytest.raises(RuntimeError, match="reverse the embedding"):
        vlm.language(
            inputs_embeds=merged.embeds[None],
            position_ids=batch.position_ids[0],
            use_cache=False,
        )


# Keys and values that layers share


@pytest.mark.slow
def test_shared_keys_and_values_of_other_samples_are_found(series_e, monkeypatch):
    """Layers that reuse an earlier one's attend over the whole row, the others inside samples."""
    one_segment = series_e.batch.num_slots
    original, called = hf_attention._attend, []

    def leaking(choice, module, *tensors, **options):
        called.append(module.is_kv_shared_layer)
        if module.is_kv_shared_layer:
            cu = torch.tensor([0, one_segment], dtype=torch.int32)
            options["packed_seq_params"] = PackedSeqParams(
                cu_seqlens_q=cu,
                cu_seqlens_kv=cu,
                max_seqlen_q=one_segment,
                max_seqlen_kv=one_segment,
                segment_lengths=(one_segment,),
            )
        return original(choice, module, *tensors, **options)

    monkeypatch.setattr(hf_attention, "_attend", leaking)
    case = replaced_engine(series_e)
    found = case.differences()
    assert sum(called) == PER_LAYER["num_kv_shared_layers"] < len(called)
    first = series_e.batch.keys[0]
    assert losses_found(found) == series_e.keys - {first}, "nothing is before the first"


def replaced_engine(case):
    """The same case on an engine that is built now."""
    other = object.__new__(Case)
    other.__dict__ |= case.__dict__
    other.vlm = make_engine(case.folder, case.encoder).vlm.train()
    return other


# Logits


@pytest.mark.slow
def test_logits_that_are_left_unbent_are_found(series_e, monkeypatch):
    assert series_e.vlm.logit_cap == 3.0
    monkeypatch.setattr(series_e.vlm, "logit_cap", None)
    assert losses_found(series_e.differences()) == series_e.keys


@pytest.mark.slow
def test_gemma3_alone_bends_its_logits_too(tmp_path):
    from transformers import Gemma3TextConfig

    values = gemma3_text(tie_word_embeddings=False, final_logit_softcapping=3.0)
    one = replace(TINY["gemma3_text"], config=lambda: Gemma3TextConfig(**values))
    case = Case(write_tiny(one, tmp_path), text_samples())
    assert case.vlm.logit_cap == 3.0
    assert case.differences() == []
    case.vlm.logit_cap = None
    assert losses_found(case.differences()) == case.keys


# What is stored beside parameters


@pytest.mark.slow
def test_buffers_of_a_checkpoint_are_used_and_exported(series_e, tmp_path, mixed):
    """Scales of layers and bounds of clipped layers: ones and infinities in a fresh model."""
    stock = load_stock(series_e.folder)
    with torch.no_grad():
        for name, buffer in stock.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.7)
            elif name.endswith(("input_min", "output_min")):
                buffer.fill_(-0.3)
            elif name.endswith(("input_max", "output_max")):
                buffer.fill_(0.2)
    folder = tmp_path / "model"
    shutil.copytree(series_e.folder, folder)
    stock.save_pretrained(str(folder))
    case = Case(folder, mixed[:2])
    assert case.differences() == []
    assert losses_found(find_differences(run_batch(series_e.vlm, case.batch), case.reference))
    engine = make_engine(folder, case.encoder)
    engine.export(tmp_path / "export", processor_from=folder, dtype=None)
    held = dict(load_stock(tmp_path / "export").named_buffers())
    kept = {name: b for name, b in stock.named_buffers() if name in stock.state_dict()}
    assert len(kept) > 6 + 4 * 14 - 1
    for name, buffer in kept.items():
        assert torch.equal(held[name], buffer), name


@pytest.fixture(scope="module")
def with_audio(tmp_path_factory):
    """A folder whose model has an audio tower as well."""
    one = replace(TINY["gemma4"], config=lambda: config(PER_LAYER, {}, audio_config=AUDIO))
    return write_tiny(one, tmp_path_factory.mktemp("audio"))


@pytest.mark.slow
def test_an_audio_tower_is_never_trained_and_exported_as_it_is(with_audio, mixed, tmp_path):
    encoder = Encoder(with_audio)
    engine = make_engine(with_audio, encoder)
    before = {n: t.clone() for n, t in engine.vlm.model.state_dict().items() if "audio" in n}
    assert any(n.startswith("model.audio_tower.") for n in before)
    assert any(n.startswith("model.embed_audio.") for n in before)
    assert not any("audio" in name for name, _ in engine.parameters())
    assert {n for n in before if n in engine.frozen_digests()[0]} == {
        n for n, _ in engine.vlm.model.named_parameters() if "audio" in n
    }
    batch = pack([encoder.encode(sample.cooked()) for sample in mixed[:2]])
    make_stepper(engine, check=True).train(0, [batch], num_skipped=0, stop=False)
    engine.export(tmp_path, processor_from=with_audio, dtype=None)
    exported = load_file(tmp_path / "model.safetensors")
    for name, tensor in before.items():
        assert torch.equal(exported[name], tensor), name


def test_an_audio_tower_gets_no_adapters(with_audio):
    family = family_of(with_audio)
    model = model_skeleton(family.auto_class(), with_audio)
    everywhere = policy(language="lora", vision="lora", projector="lora")
    targets = adapter_targets(model, family.modules, everywhere)
    assert any(".language_model." in name for name in targets)
    assert not any("audio" in name for name in targets)
    trained = {
        name
        for name, p in model.named_parameters()
        if EVERYTHING.trains_parameter(name, family.modules)
    }
    assert {n for n, _ in model.named_parameters()} - trained == {
        n for n, _ in model.named_parameters() if "audio" in n
    }


@pytest.mark.slow
def test_keys_that_published_files_hold_for_layers_without_any_are_kept(series_e, tmp_path):
    """transformers passes over them on load; an export has them as the source has."""
    folder, out = tmp_path / "model", tmp_path / "export"
    shutil.copytree(series_e.folder, folder)
    path = folder / "model.safetensors"
    layers = "model.language_model.layers"
    unread = {f"{layers}.{n}.self_attn.k_proj.weight": torch.randn(48, 64) for n in (3, 4, 5)}
    unread |= {f"{layers}.{n}.self_attn.k_norm.weight": torch.randn(24) for n in (3, 4, 5)}
    save_file(load_file(path) | unread, path, metadata={"format": "pt"})
    check_weights(folder)
    engine = make_engine(folder, Encoder(folder))
    engine.export(out, processor_from=folder, dtype=None)
    exported = {k: v for file in out.glob("*.safetensors") for k, v in load_file(file).items()}
    for name, tensor in unread.items():
        assert torch.equal(exported[name], tensor), name
    assert load_stock(out).state_dict().keys() == load_stock(series_e.folder).state_dict().keys()


# Host reads, attention, refusals


def test_the_tower_alone_reads_back(dense):
    with HostReads() as reads:
        dense.vlm(dense.batch, dense.batch.packed_seq_params()).sum().backward()
    assert reads.ours == []
    assert len(reads.of_the_tower) <= 2, reads.of_the_tower


@pytest.mark.parametrize("name", ["torch_varlen", "flash_attn"])
def test_kernels_with_narrower_heads_are_refused_when_the_engine_is_built(
    series_e, one_rank, monkeypatch, name
):
    model = ModelSection(path=str(series_e.folder), dtype="bfloat16", attention=name)
    family = replace(series_e.encoder.family, largest_head=513)
    monkeypatch.setattr(series_e.encoder, "family", family)
    cuda, asked = torch.device("cuda"), varlen.why_unavailable
    monkeypatch.setattr(
        varlen, "why_unavailable", lambda name, _, *rest, **how: asked(name, cuda, *rest, **how)
    )
    with pytest.raises(
        CapabilityError, match=r"heads of at most 256 channels, and .* of at most 512, .* has 513"
    ):
        engine_of(model, ParallelismSection(), series_e.encoder, one_rank, EVERYTHING)


def changed_config(folder: Path, tmp_path: Path, section: str | None, **values: object) -> Path:
    content = json.loads((folder / "config.json").read_text())
    (content if section is None else content[section]).update(values)
    (tmp_path / "config.json").write_text(json.dumps(content))
    return tmp_path


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (None, {"vision_config": None}, r"tower of model_type None is not served"),
        ("text_config", {"use_bidirectional_attention": "all"}, "attends in both directions"),
        ("text_config", {"attn_logit_softcapping": 50.0}, "it caps logits .attn_logit_soft"),
        ("text_config", {"model_type": "llama"}, "model_type 'llama' is not served"),
        ("vision_config", {"model_type": "siglip_vision_model"}, "tower of model_type 'siglip"),
    ],
)
def test_what_is_not_gemma_4_is_refused_by_name(series_e, tmp_path, section, values, message):
    with pytest.raises(CapabilityError, match=message):
        family_of(changed_config(series_e.folder, tmp_path, section, **values))


def test_a_class_that_leaves_logits_alone_may_not_be_asked_to_bend_them(tiny_folder, tmp_path):
    folder = changed_config(tiny_folder, tmp_path, None, final_logit_softcapping=30.0)
    with pytest.raises(CapabilityError, match="which vlmpack does not for this model_type"):
        family_of(folder)


@pytest.mark.slow
def test_a_window_as_wide_as_a_sample_leaves_its_blocks(tmp_path, mixed):
    """The window then hides nothing, and image tokens still see what is ahead of them."""
    shape = TINY["gemma4-dense"].config().text_config.to_dict()
    wide = tiny({**shape, "sliding_window": 4096}, standardize=True)
    case = Case(write_tiny(wide, tmp_path), mixed[:2])
    assert case.differences() == []
