"""Towers that are told where images and windows end: what they compute, and that they read nothing.

The reference is the stock class, whose tower loops over images and windows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from support.engines import make_engine
from support.families import tiny_family_folder
from support.images import picture
from support.runs import GRADIENT_TOLERANCE, LOSS_TOLERANCE, relative_l2
from support.stock import load_stock
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from vlmpack.attention import segment_attention
from vlmpack.backends.recompute import recompute_layers
from vlmpack.data.loading.loader import BinDataset, BinRequest
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError
from vlmpack.families import tower_attention as module_under_test
from vlmpack.families.tower_attention import inputs_of, tower_attention
from vlmpack.packing import PackCollator, PadCollator, deal_media, move_batch
from vlmpack.packing.batch import TowerInputs, TowerSegments
from vlmpack.packing.media import tell_tower
from vlmpack.recipe.data import OnErrorSection

QUICK = ("qwen2_5_vl", "mistral3")
SLOW = ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "llava")
FAMILIES = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]

MIXED = [(120, 64), (40, 24), (200, 150), (64, 120), (9, 9)]
"""Windows of 8 x 8 patches divide none of them but by accident."""
ROWS = {
    "mixed": MIXED,
    "one image": [(150, 90)],
    "16 images": [*MIXED, *[(56, 56)] * 6, (120, 64), (70, 60), (30, 90), (200, 150), (56, 58)],
}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """model_type -> (encoder, packed model, stock model), each made once."""

    @cache
    def make(name):
        folder = tiny_family_folder(name, tmp_path_factory.mktemp(name))
        encoder = Encoder(folder)
        return encoder, make_engine(folder, encoder).vlm.train(), load_stock(folder).train()

    return make


@pytest.fixture(params=FAMILIES)
def case(request, model_of):
    """One family: encoder, packed model, stock model."""
    return model_of(request.param)


@cache
def media_of(rule, sizes):
    return rule.preprocess([picture(*size, seed=seed) for seed, size in enumerate(sizes)])


def told(encoder, sizes):
    """Images as a worker hands them over."""
    media = media_of(encoder.image_rule, tuple(sizes))
    return replace(media, tower=encoder.family.tower_rule_of(encoder.folder)(media.grid_thw))


def stock_features(family, stock, media):
    """All features, deep ones beside them, (M, D x n)."""
    output = stock.model.get_image_features(**family.image_arguments(media))
    pooled = output.pooler_output
    features = pooled if isinstance(pooled, torch.Tensor) else torch.cat(list(pooled))
    deep = output.deepstack_features if family.modules.deep_features else ()
    deep = [one if isinstance(one, torch.Tensor) else torch.cat(list(one)) for one in deep]
    return torch.cat((features, *deep), dim=1)


def our_features(family, model, media):
    images = family.image_features(model, media)
    return torch.cat((images.features, *images.deep), dim=1)


def gradients(model, features, pattern):
    """Of all parameters that a sum of squares of rippled features has one of."""
    used = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    loss = (features * pattern).square().sum()
    found = torch.autograd.grad(loss, [p for _, p in used], allow_unused=True)
    return {name: g for (name, _), g in zip(used, found, strict=True) if g is not None}


@pytest.mark.cases(
    quick=tuple(f"{name}-one image" for name in QUICK),
    slow=("qwen2_5_vl-mixed", *(f"{name}-one image" for name in SLOW)),
)
@pytest.mark.parametrize("row", ROWS)
def test_features_and_gradients_are_those_of_the_stock_tower(case, row):
    encoder, vlm, stock = case
    media = told(encoder, ROWS[row])
    ours = our_features(encoder.family, vlm.model, media)
    theirs = stock_features(encoder.family, stock, media)
    assert ours.shape == theirs.shape
    assert relative_l2(ours.detach(), theirs.detach()) < LOSS_TOLERANCE
    pattern = torch.linspace(0.5, 1.5, ours.numel()).view_as(ours)
    mine, wanted = (
        gradients(*each, pattern) for each in ((vlm.model, ours), (stock, theirs.to(ours.dtype)))
    )
    assert mine.keys() == wanted.keys()
    assert len(mine) > 10
    errors = {name: relative_l2(mine[name], wanted[name]) for name in mine}
    assert max(errors.values()) < GRADIENT_TOLERANCE, max(errors, key=errors.get)


def test_what_is_told_is_what_the_stock_tower_is_called_with(case):
    """A batch that nobody told anything is told it when the tower is called."""
    encoder, vlm, _ = case
    media = told(encoder, MIXED)
    again = inputs_of(encoder.family.tower_rule, vlm.vision, replace(media, tower=None))
    assert again.images.lengths == media.tower.images.lengths
    assert torch.equal(again.position_ids, media.tower.position_ids)
    assert (again.windows is None) == (media.tower.windows is None)
    moved = move_batch(media, torch.device("meta")).tower
    assert moved.images.cu_seqlens.is_meta
    assert moved.position_ids.is_meta


def test_one_call_a_block_inside_images_or_windows(case, monkeypatch):
    encoder, vlm, _ = case
    seen = []

    def recording(query, key, value, params, **options):
        assert options["causal"] is False
        seen.append(params.segment_lengths)
        return segment_attention(query, key, value, params, **options)

    monkeypatch.setattr(module_under_test, "_best_attention", lambda *_: recording)
    media = told(encoder, ROWS["16 images"])
    with torch.no_grad():
        encoder.family.image_features(vlm.model, media)
    inputs, config = media.tower, vlm.vision.config
    depth = getattr(config, "depth", None) or config.num_hidden_layers
    full = getattr(config, "fullatt_block_indexes", range(depth))
    assert seen == [
        (inputs.images if block in full else inputs.windows).lengths for block in range(depth)
    ]


# Nothing is read on the host


class Features(nn.Module):
    """A model whose parameters may be replaced for one call."""

    def __init__(self, family, model):
        super().__init__()
        self.family, self.model = family, model

    def forward(self, media):
        return our_features(self.family, self.model, media)


def run_on_fake_tensors(encoder, model, media):
    """Forward and backward without values: what needs one to go on stops."""
    call = Features(encoder.family, model)
    with FakeTensorMode() as mode:
        named = {**dict(call.named_parameters()), **dict(call.named_buffers())}
        fakes = {name: mode.from_tensor(tensor) for name, tensor in named.items()}
        features = torch.func.functional_call(call, fakes, (fake_media(mode, media),))
        features.sum().backward()
    return [name for name, fake in fakes.items() if fake.grad is not None]


def fake_media(mode, media):
    faked = {
        name: mode.from_tensor(value)
        for name in TowerInputs.__dataclass_fields__
        if isinstance(value := getattr(media.tower, name), torch.Tensor)
    }
    for name in ("images", "windows"):
        segments = getattr(media.tower, name)
        if segments is not None:
            faked[name] = replace(segments, cu_seqlens=mode.from_tensor(segments.cu_seqlens))
    tower = replace(media.tower, **faked)
    return replace(media, pixel_values=mode.from_tensor(media.pixel_values), tower=tower)


@pytest.mark.cases(slow="qwen2_5_vl")
def test_the_tower_needs_no_value_on_the_host(case, monkeypatch):
    encoder, vlm, _ = case
    media = told(encoder, MIXED)
    assert len(run_on_fake_tensors(encoder, vlm.model, media)) > 10
    norm = next(m for name, m in vlm.vision.named_modules() if name.endswith(("norm1", "ln_pre")))
    forward = norm.forward
    monkeypatch.setattr(norm, "forward", lambda x: forward(x) * (1 + 0 * x.sum().item()))
    with pytest.raises(DataDependentOutputException):
        run_on_fake_tensors(encoder, vlm.model, media)
    monkeypatch.setattr(norm, "forward", lambda x: forward(x).index_add(0, x[:, 0].nonzero(), x))
    with pytest.raises((DynamicOutputShapeException, DataDependentOutputException)):
        run_on_fake_tensors(encoder, vlm.model, media)


def test_the_stock_tower_does(model_of):
    """The control: grids alone."""
    encoder, _, stock = model_of("qwen2_5_vl")
    media = told(encoder, MIXED)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        grids = mode.from_tensor(torch.tensor(media.grid_thw))
        with pytest.raises(DataDependentOutputException):
            stock.model.visual(mode.from_tensor(media.pixel_values), grid_thw=grids)


# The text's boundaries stay apart


def test_text_and_tower_refuse_the_boundaries_of_the_other(model_of, encoded):
    encoder, vlm, _ = model_of("qwen2_5_vl")
    text = PackCollator(pad_token_id=0, num_position_axes=3)(encoded).packed_seq_params()
    media = told(encoder, MIXED)
    qkv = [torch.zeros(1, 4, media.pixel_values.shape[0], 8)] * 3
    with pytest.raises(CapabilityError, match=r"called with packed_seq_params, where the text's"):
        tower_attention(vlm, *qkv, None, tower_inputs=media.tower, packed_seq_params=text)
    from transformers import AttentionInterface

    ours = AttentionInterface()[vlm.language.config._attn_implementation]
    assert ours is not tower_attention
    with pytest.raises(CapabilityError, match="called with tower_inputs, where images end"):
        ours(vlm, *qkv, None, packed_seq_params=text, tower_inputs=media.tower)
    other = media.tower.images.cu_seqlens.clone()
    with pytest.raises(CapabilityError, match="other boundaries than those of the batch's images"):
        tower_attention(vlm, *qkv, None, tower_inputs=media.tower, cu_seq_lens_q=other)


def test_a_tower_that_attends_inside_other_boundaries_is_found(model_of):
    """The control that mixes them: images end where sequences of a text of that many tokens do."""
    encoder, vlm, stock = model_of("qwen2_5_vl")
    media = told(encoder, MIXED)
    patches = media.pixel_values.shape[0]
    mixed = TowerSegments.of([patches // 3, patches - patches // 3])
    wrong = replace(media, tower=replace(media.tower, images=mixed))
    with torch.no_grad():
        theirs = stock_features(encoder.family, stock, media)
        assert relative_l2(our_features(encoder.family, vlm.model, wrong), theirs) > 1e-2


# Who tells it


class Bins(BinDataset):
    """Requests whose samples are already encoded."""

    def read(self, request):
        return [ref.sample for ref in request.samples]

    def encode(self, ref, reading, owners=None):
        return reading


@dataclass(frozen=True)
class Ref:
    """A sample of a bin, as the plan has it."""

    sample: Any
    number: int = 0
    shard: str = "shard"

    @property
    def key(self):
        return self.sample.key

    @property
    def num_tokens(self):
        return self.sample.length


@pytest.mark.parametrize("collator", [PackCollator, PadCollator])
def test_the_worker_that_makes_a_row_tells_the_tower(model_of, encoded, collator):
    encoder, _, _ = model_of("qwen2_5_vl")
    bins = Bins(None, encoder, collator(pad_token_id=0, num_position_axes=3), OnErrorSection())
    media = bins[BinRequest(tuple(map(Ref, encoded)))].batch.media
    assert media.num_images == 7
    assert media.tower.images.lengths == tuple(t * h * w for t, h, w in media.grid_thw)
    text = [sample for sample in encoded if sample.media is None]
    assert bins[BinRequest(tuple(map(Ref, text)))].batch.media is None
    assert bins[BinRequest(())].batch.media is None


# What else calls the tower


def test_the_class_itself_goes_on_working(case):
    """Generation calls it after training has told the tower where images end."""
    encoder, vlm, stock = case
    media = told(encoder, MIXED)
    with torch.no_grad():
        our_features(encoder.family, vlm.model, media)
        again, theirs = (stock_features(encoder.family, m, media) for m in (vlm.model, stock))
    assert vlm.vision.config._attn_implementation.startswith("vlmpack")
    assert relative_l2(again, theirs) < LOSS_TOLERANCE


def test_blocks_that_are_computed_again_find_what_was_told(tmp_path):
    folder = tiny_family_folder("qwen2_5_vl", tmp_path)
    encoder = Encoder(folder)
    vlm, media = make_engine(folder, encoder).vlm.train(), told(encoder, MIXED)

    def run():
        features = our_features(encoder.family, vlm.model, media)
        return gradients(vlm.model, features, torch.ones(()))

    kept = run()
    recompute_layers(vlm.model, "full", draws=False)
    again = run()
    assert len(kept) > 10
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_a_rank_with_some_of_the_images_is_told_of_these(model_of, encoded):
    encoder, vlm, _ = model_of("qwen2_5_vl")
    rule = encoder.family.tower_rule_of(encoder.folder)
    row = tell_tower(PackCollator(pad_token_id=0, num_position_axes=3)(encoded), rule)
    mine = deal_media(row, rank=0, size=2)
    assert 0 < mine.media.num_images < row.media.num_images
    assert mine.media.tower is None, "of all images, not of these"
    assert tell_tower(mine, rule).media.tower.images.lengths == tuple(
        t * h * w for t, h, w in mine.media.grid_thw
    )
    assert vlm.blank.tower.images.lengths == (4,)
