"""The packed model around transformers' parts: isolation of the tower, memory, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from support.engines import make_engine
from support.recorders import MadeTensors
from support.runs import pack
from support.samples import text_sample
from support.shards import TINY_MODEL
from transformers import AttentionInterface

from vlmpack.attention import AttentionChoice, segment_attention
from vlmpack.attention.varlen import AttentionName
from vlmpack.backends import cross_entropy
from vlmpack.backends.hf.attention import register_attention
from vlmpack.backends.hf.model import transformers_spelling
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError
from vlmpack.packing import PackCollator, pad_batch_sequences

TEXT_BOUNDARIES = {
    "packed_seq_params",
    "padded_rows",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
}


@pytest.mark.parametrize("name", get_args(AttentionName))
def test_transformers_takes_each_implementation_by_the_name_it_gets(vlm, name):
    """With "flash" in a name it looks for a kernel of that name on the hub, and stops."""
    before = vlm.language.config._attn_implementation
    try:
        registered = register_attention(AttentionChoice(name, segment_attention, ""))
        vlm.language.set_attn_implementation(registered)
        assert vlm.language.config._attn_implementation == registered
        AttentionInterface.register("vlmpack_flash_attn", segment_attention)
        with pytest.raises(ValueError, match="vlmpack_flash_attn"):
            vlm.language.set_attn_implementation("vlmpack_flash_attn")
    finally:
        vlm.language.config._attn_implementation = before


# The tower and the text's boundaries never mix


def test_the_tower_gets_pixels_and_what_is_told_of_images_alone(vlm, encoded):
    calls, options = [], []
    attention = [m for m in vlm.vision.modules() if type(m).__name__.endswith("VisionAttention")]
    assert len(attention) == 4
    hooks = [
        vlm.vision.register_forward_pre_hook(
            lambda _, args, kwargs: calls.append((len(args), set(kwargs))), with_kwargs=True
        ),
        *(
            module.register_forward_pre_hook(
                lambda _, args, kwargs: options.append(set(kwargs)), with_kwargs=True
            )
            for module in attention
        ),
    ]
    try:
        batch = pack(encoded, alignment=8)
        assert batch.media.num_images == 7
        vlm(batch, batch.packed_seq_params())
    finally:
        for hook in hooks:
            hook.remove()
    assert [count for count, _ in calls] == [1], "one call for all images of the micro-batch"
    assert calls[0][1] >= {"grid_thw", "tower_inputs", "cu_seqlens", "window_index"}
    assert not calls[0][1] & TEXT_BOUNDARIES
    assert len(options) == 4
    assert not any(names & TEXT_BOUNDARIES for names in options)


def test_tower_and_decoder_have_attention_of_their_own(vlm, encoded):
    batch = pack(encoded, alignment=8)
    vlm(batch, batch.packed_seq_params())
    assert vlm.vision.config._attn_implementation == "vlmpack_flash_images"
    assert vlm.language.config._attn_implementation == "vlmpack_segments"


def test_the_decoder_gets_the_boundaries(vlm, encoded):
    seen = []
    hook = vlm.language.layers[0].self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    batch = pack(encoded, alignment=8)
    params = batch.packed_seq_params()
    try:
        vlm(batch, params)
    finally:
        hook.remove()
    assert seen[0]["packed_seq_params"] is params
    assert seen[0]["cu_seq_lens_q"] is params.cu_seqlens_q_padded
    assert seen[0]["max_length_q"] == batch.max_seqlen
    assert seen[0]["attention_mask"] is None


def test_transformers_spelling_is_physical():
    batch = pack([text_sample("a", range(5)), text_sample("b", range(3))], alignment=4)
    spelled = transformers_spelling(batch.packed_seq_params())
    assert spelled["cu_seq_lens_q"].tolist() == spelled["cu_seq_lens_k"].tolist() == [0, 8, 12]
    assert spelled["max_length_q"] == spelled["max_length_k"] == 8


# Memory


@pytest.fixture(scope="module")
def label_heavy(mixed):
    """A row with a label on nearly every text token, made long by repetition."""
    encoder = Encoder(TINY_MODEL).replace(loss_on="all")
    samples = [encoder.encode(sample.cooked()) for sample in mixed]
    again = [replace(s, key=f"{s.key}-{i}") for i in range(2) for s in samples]
    return pack(again, alignment=1, total=61 * 16)


@pytest.mark.slow
def test_no_tensor_of_row_times_vocabulary_is_made(vlm, label_heavy, monkeypatch):
    vocabulary, rows = 576, 24
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 4 * rows * vocabulary)
    assert label_heavy.num_label_tokens > 10 * rows
    with MadeTensors() as tensors:
        losses = vlm(label_heavy, label_heavy.packed_seq_params())
        losses.sum().backward()

    def is_logits(made):
        return made.shape[-1:] == (vocabulary,) and made.shape[0] != 128  # (D, V) is the head

    logits = tensors.where(is_logits)
    assert max(made.shape[0] for made in logits) == rows
    assert sum(made.operator.startswith("aten.mm") for made in logits) >= 2 * 10, (
        "forward, backward"
    )

    with MadeTensors() as tensors:  # the recorder sees whole logits where there are some
        hidden = vlm.hidden_states(label_heavy, label_heavy.packed_seq_params())
        (hidden @ vlm.model.get_output_embeddings().weight.T).sum().backward()
    assert max(made.shape[0] for made in tensors.where(is_logits)) == label_heavy.num_slots


def test_no_tensor_of_row_times_row_is_made(vlm, label_heavy):
    slots = label_heavy.num_slots
    assert slots == 976, "a number that no other dimension has"

    def is_square(made):
        return sum(size >= slots for size in made.shape) >= 2

    with MadeTensors() as tensors:
        vlm(label_heavy, label_heavy.packed_seq_params()).sum().backward()
    assert len(tensors.made) > 1000
    assert any(slots in made.shape for made in tensors.made)
    assert tensors.where(is_square) == []

    same = torch.zeros(slots, slots, dtype=torch.bool)
    with MadeTensors() as tensors:
        query = torch.zeros(1, 1, slots, 8)
        torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=~same)
    assert tensors.where(is_square), "the recorder would have missed a mask"


# Batches without images


def test_a_text_batch_gives_zero_gradients_to_the_tower(vlm, encoded):
    text = [sample for sample in encoded if sample.media is None]
    batch = pack(text, alignment=8)
    calls = []
    hook = vlm.vision.register_forward_pre_hook(lambda _, args: calls.append(args[0].shape))
    try:
        vlm(batch, batch.packed_seq_params()).sum().backward()
    finally:
        hook.remove()
    assert calls == [(4, 1176)], "the smallest image keeps the tower in every collective"
    for name, parameter in vlm.model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.any()) == (not name.startswith("model.visual.")), name


def test_the_blank_image_is_not_in_the_token_stream(vlm, encoded):
    text = pack([sample for sample in encoded if sample.media is None])
    params = text.packed_seq_params()
    with torch.no_grad():
        embeds = vlm.model.get_input_embeddings()(text.input_ids)[0]
        assert torch.equal(vlm.merge(text).embeds, embeds)
        before = vlm(text, params)
        blank, vlm.blank = (
            vlm.blank,
            replace(vlm.blank, pixel_values=torch.randn_like(vlm.blank.pixel_values)),
        )
        try:
            assert torch.equal(vlm(text, params), before)
        finally:
            vlm.blank = blank


@pytest.mark.parametrize("with_backward", [True, False])
def test_an_empty_bin_has_no_loss_and_enters_everything(vlm, with_backward):
    batch = PackCollator(pad_token_id=561, num_position_axes=3, pad_to_multiple_of=8).empty()
    with torch.set_grad_enabled(with_backward):
        losses = vlm(batch, batch.packed_seq_params())
    assert losses.shape == (0,)
    if with_backward:
        losses.sum().backward()
        for name, parameter in vlm.model.named_parameters():
            assert parameter.grad is not None, name
            assert not parameter.grad.any(), name


# Refusals


def test_a_packed_row_without_boundaries_is_refused(vlm, encoded):
    with pytest.raises(CapabilityError, match="samples would mix"):
        vlm(pack(encoded), None)


def test_a_padded_batch_with_boundaries_is_refused(vlm, encoded):
    padded = pad_batch_sequences(encoded, pad_token_id=561)
    with pytest.raises(CapabilityError, match="no segments"):
        vlm(padded, pack(encoded).packed_seq_params())


def test_features_that_do_not_fit_the_placeholders_are_refused(vlm, encoded):
    batch = pack(encoded)
    cut = replace(batch, media_positions=batch.media_positions[:-1])
    expected = batch.media_positions.shape[0]
    with pytest.raises(
        CapabilityError, match=f"{expected} features for {expected - 1} placeholder"
    ):
        vlm(cut, batch.packed_seq_params())


def attention_inputs(**options):
    """Arguments of a registered attention function."""
    draw = torch.randn(1, 2, 6, 8)
    return {
        "module": torch.nn.Identity(),
        "query": draw,
        "key": draw,
        "value": draw,
        "attention_mask": None,
        "packed_seq_params": pack([text_sample("a", range(6))]).packed_seq_params(),
        **options,
    }


@pytest.fixture(scope="module")
def registered():
    from transformers import AttentionInterface

    name = register_attention(AttentionChoice("segments", segment_attention, "test"))
    assert name == "vlmpack_segments"
    return AttentionInterface()[name]


def test_the_registered_function_attends(registered):
    output, weights = registered(**attention_inputs())
    assert output.shape == (1, 6, 2, 8)
    assert weights is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_mask": torch.ones(1, 1, 6, 6)}, "boundaries, not an attention mask"),
        ({"dropout": 0.1}, "attention_dropout to 0"),
        ({"packed_seq_params": None}, "Identity called vlmpack attention without boundaries"),
        ({"packed_seq_params": None, "padded_rows": False}, "would mix samples"),
        ({"softcap": 30.0}, "softcap"),
        ({"s_aux": torch.ones(2)}, "sinks"),
    ],
    ids=["mask", "dropout", "nothing", "padded_rows=False", "softcap", "sinks"],
)
def test_the_registered_function_refuses(registered, options, message):
    with pytest.raises(CapabilityError, match=message):
        registered(**attention_inputs(**options))


def test_the_decoder_called_without_boundaries_is_refused(vlm):
    with pytest.raises(CapabilityError, match="without boundaries"):
        vlm.model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)


@pytest.mark.parametrize("window", [None, 1, 3, 6, 50])
def test_padded_rows_and_segments_agree_under_a_sliding_window(registered, window):
    length = 7
    draw = torch.randn(2, 4, length, 8)
    grouped = torch.randn(2, 2, length, 8)
    options = {"attention_mask": None, "sliding_window": window}
    module = torch.nn.Identity()
    padded, _ = registered(module, draw, grouped, grouped, padded_rows=True, **options)
    samples = [text_sample(name, range(length)) for name in "ab"]
    rows = [part.transpose(0, 1).reshape(1, -1, 2 * length, 8) for part in (draw, grouped)]
    packed, _ = registered(
        module,
        rows[0],
        rows[1],
        rows[1],
        packed_seq_params=pack(samples).packed_seq_params(),
        **options,
    )
    assert (packed.reshape(padded.shape) - padded).abs().max() < 1e-6  # a few roundings


def test_a_head_with_a_bias_is_refused(vlm):
    from vlmpack.backends.hf.model import PackedVLM

    class Biased(torch.nn.Module):
        def get_output_embeddings(self):
            return torch.nn.Linear(2, 2, bias=True)

    with pytest.raises(CapabilityError, match="bias"):
        PackedVLM(Biased(), vlm.family, vlm.blank)


def test_varlen_kernels_get_one_dtype_under_autocast(tiny_folder, encoder, encoded):
    """Rotary leaves q and k in float32 there; flash-attn and torch's varlen kernel take no mix."""
    engine = make_engine(tiny_folder, encoder)
    seen = set()

    def spy(query, key, value, params, **options):
        seen.add((query.dtype, key.dtype, value.dtype))
        return segment_attention(query, key, value, params, **options)

    name = register_attention(AttentionChoice("segments", spy, "a spy"))
    engine.vlm.language.set_attn_implementation(name)
    batch = pack(encoded, alignment=8)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            engine.vlm(batch, batch.packed_seq_params())
    finally:
        register_attention(AttentionChoice("segments", segment_attention, "as it was"))
    assert seen == {(torch.bfloat16,) * 3}
