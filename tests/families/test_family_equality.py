"""Every family: a packed row computes what each sample would have computed alone.

The reference is the family's stock transformers model, one sample at a time (support/stock.py). A
new family joins with one entry in support/families.py.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import make_engine, make_stepper
from support.families import (
    FAMILIES,
    ROUTED,
    TEXT_FAMILIES,
    TINY,
    VISION_FAMILIES,
    family_cases,
    model_type_of,
    stock_rules,
    tiny_family_folder,
)
from support.images import conversation, file_of, picture
from support.runs import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    NO_GRADIENT,
    Run,
    find_differences,
    gradient_errors,
    loss_errors,
    pack,
    relative_l2,
    run_batch,
    starts_of,
)
from support.shards import RawSample, text_samples
from support.stock import (
    StockInputs,
    StockProcessor,
    load_stock,
    positions_of,
    run_one_by_one,
    run_padded,
)

from vlmpack.backends.hf.model import MergedInputs
from vlmpack.backends.policy import is_untouched
from vlmpack.capabilities.served import model_types
from vlmpack.encode import Encoder
from vlmpack.families.registry import family_of
from vlmpack.packing import IGNORE_INDEX, PackCollator, pad_batch_sequences

SHARED_MATMUL_TOLERANCE = 1e-5
"""Relative L2 of logits where other rows of a matmul may be blocked differently."""


@dataclass
class Case:
    """One family: its model twice, ours and transformers', and the mixed samples."""

    name: str
    folder: Path
    mixed: list[RawSample]

    @cached_property
    def encoder(self) -> Encoder:
        """Assistant-only labels."""
        return Encoder(self.folder)

    @cached_property
    def encoded(self) -> list[Any]:
        """The mixed samples, encoded by vlmpack."""
        return [self.encoder.encode(sample.cooked()) for sample in self.mixed]

    @cached_property
    def vlm(self) -> Any:
        """The packed model in training mode; its weights must not be changed."""
        return make_engine(self.folder, self.encoder).vlm.train()

    @cached_property
    def stock(self) -> Any:
        """transformers' own model."""
        return load_stock(self.folder).train()

    @cached_property
    def inputs(self) -> dict[str, StockInputs]:
        """The mixed samples, encoded by transformers."""
        processor = StockProcessor(self.folder)
        return {sample.key: processor(sample) for sample in self.mixed}

    @cached_property
    def reference(self) -> Run:
        """The mixed samples, one by one, through the stock model."""
        return run_one_by_one(self.stock, self.inputs)

    def is_vision(self, name: str) -> bool:
        """Whether a parameter belongs to the tower or the projector."""
        paths = self.vlm.paths
        return f"{name}.".startswith(tuple(f"{p}." for p in (paths.vision, *paths.projectors)))

    def is_used(self, name: str) -> bool:
        """Whether anything that the class returns depends on a parameter."""
        tiny = TINY.get(self.name)
        return tiny is None or not any(part in name for part in tiny.unused)


@pytest.fixture(scope="module")
def case_of(tmp_path_factory, mixed):
    """The case of a family, made once."""

    @cache
    def make(name):
        samples = text_samples() if name in TEXT_FAMILIES else mixed
        return Case(name, tiny_family_folder(name, tmp_path_factory.mktemp(name)), samples)

    return make


@pytest.fixture(scope="module", params=family_cases(FAMILIES))
def case(request, case_of):
    """One family at a time."""
    return case_of(request.param)


@pytest.fixture(scope="module", params=family_cases(VISION_FAMILIES))
def vision_case(request, case_of):
    """One family with a vision tower at a time."""
    return case_of(request.param)


@pytest.fixture(scope="module")
def table():
    """Rows of (run, largest loss error, largest gradient error); `pytest -s` prints them."""
    rows = {}
    yield rows
    print(f"\n{'run':<52}{'loss':>12}{'gradient':>12}")
    print(f"{'(bound)':<52}{LOSS_TOLERANCE:>12.1e}{GRADIENT_TOLERANCE:>12.1e}")
    for name, (loss, gradient) in rows.items():
        print(f"{name:<52}{loss:>12.1e}{gradient:>12.1e}")


def check(table, case, name, run):
    """Record the errors of a run and find no difference."""
    errors = (loss_errors(run, case.reference), gradient_errors(run, case.reference))
    table[f"{case.name}: {name}"] = tuple(max(values.values()) for values in errors)
    assert find_differences(run, case.reference) == []


def test_every_registered_family_is_tested():
    assert set(map(model_type_of, FAMILIES)) == set(model_types())


def test_the_family_knows_its_model(case):
    family = family_of(case.folder)
    assert case.stock.config.model_type == model_type_of(case.name)
    assert model_type_of(case.name) in family.model_types
    modules = family.modules
    assert (modules.vision is None) == (case.name in TEXT_FAMILIES)
    for path in filter(None, (modules.vision, *modules.projectors, modules.language)):
        named = [name for name, _ in case.stock.named_parameters()]
        assert any(f"{name}.".startswith(f"{path}.") for name in named), path


# Packed equals unpacked


def test_the_reference_moves_every_parameter(case):
    """A gradient of zero, or of rounding alone, would be compared with nothing."""
    counts = {0, 1, 2, 3} if case.encoder.takes_images else {0}
    assert {len(sample.images) for sample in case.mixed} == counts
    assert len({sample.length for sample in case.encoded}) == 6
    for name, gradient in case.reference.gradients.items():
        if case.is_used(name):
            assert NO_GRADIENT.search(name) or float(gradient.norm()) > 1e-4, name
        else:
            assert not gradient.any(), name


def test_the_unpacked_run_has_noise_of_its_own(case, table):
    run = run_padded(case.stock, case.inputs, pad_token_id=case.encoder.pad_token_id)
    check(table, case, "unpacked, padded against one by one", run)
    assert max(gradient_errors(run, case.reference).values()) > 0


@pytest.mark.parametrize(
    ("alignment", "total"), [(1, 1), (8, 1), (16, 128)], ids=["close", "aligned", "aligned-tail"]
)
def test_packed_equals_unpacked(case, table, alignment, total):
    batch = pack(case.encoded, alignment=alignment, total=total)
    check(table, case, f"packed, alignment {alignment}, total {total}", run_batch(case.vlm, batch))


def test_order_in_the_row_changes_nothing(case, table):
    batch = pack(case.encoded[::-1], alignment=4)
    check(table, case, "packed, reversed", run_batch(case.vlm, batch))


def test_padded_mode_equals_unpacked(case, table):
    batch = pad_batch_sequences(
        case.encoded, pad_token_id=case.encoder.pad_token_id, pad_to_multiple_of=8
    )
    check(table, case, "mode none (padded rows)", run_batch(case.vlm, batch))


def test_activation_checkpointing_changes_nothing(case, table):
    engine = make_engine(case.folder, case.encoder, activation_checkpointing="full")
    run = run_batch(engine.vlm.train(), pack(case.encoded, alignment=8))
    check(table, case, "packed, activation checkpointing", run)


def test_bfloat16_packing_stays_within_bfloat16_noise(case):
    """Autocast rounds to 8 bits: 2e-2 is five of its roundings."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run = run_batch(case.vlm, pack(case.encoded, alignment=8))
    errors = loss_errors(run, case.reference)
    assert 0 < max(errors.values()) < 2e-2


# Nothing leaks


def logits_by_sample(vlm, batch):
    """Each sample's (s, V) logits in a packed row."""
    with torch.no_grad():
        hidden = vlm.hidden_states(batch, batch.packed_seq_params())
        logits = vlm.logits(hidden)
    spans = zip(batch.keys, starts_of(batch), batch.lengths, strict=True)
    return {key: logits[start : start + length] for key, start, length in spans}


def changed(sample):
    """Other ids and other pixels at unchanged lengths."""
    ids = sample.input_ids.clone()
    is_text = torch.ones_like(ids, dtype=torch.bool)
    is_text[sample.media_positions] = False
    ids[is_text] = (ids[is_text] + 7) % 500
    media = sample.media
    if media is not None:
        media = replace(media, pixel_values=media.pixel_values.flip(0, 1))
    return replace(sample, input_ids=ids, media=media)


@pytest.mark.parametrize("index", range(6))
def test_other_samples_logits_stay(case, index):
    """Bit for bit, but for the last bit where samples share the experts' matmuls."""
    before = logits_by_sample(case.vlm, pack(case.encoded, alignment=8))
    sample = case.encoded[index]
    row = [*case.encoded[:index], changed(sample), *case.encoded[index + 1 :]]
    after = logits_by_sample(case.vlm, pack(row, alignment=8))
    assert relative_l2(after[sample.key], before[sample.key]) > 0.1, "the change had no effect"
    for key in before.keys() - {sample.key}:
        if case.name in ROUTED:
            assert relative_l2(after[key], before[key]) < SHARED_MATMUL_TOLERANCE, key
        else:
            assert torch.equal(after[key], before[key]), key


@pytest.mark.parametrize("index", range(6))
def test_the_loss_of_a_sample_has_no_gradient_at_another(case, index):
    """Exactly none, also in a mixture of experts: nothing of it was computed from the others."""
    vlm, batch = case.vlm, pack(case.encoded, alignment=8)
    merged = vlm.merge(batch)
    inputs = [part.detach().requires_grad_() for part in (merged.embeds, *merged.deep)]
    hidden = vlm.decode(batch, batch.packed_seq_params(), MergedInputs(inputs[0], (*inputs[1:],)))
    start = starts_of(batch)[index]
    own = slice(start, start + batch.lengths[index])
    gradients = torch.autograd.grad(hidden[own].square().sum(), inputs)
    inside = torch.zeros(batch.num_slots, dtype=torch.bool)
    inside[own] = True
    for gradient in gradients:
        assert not gradient[~inside].any()
        assert gradient[inside].any()


# Rows without images


@pytest.mark.parametrize("rows", ["text", "empty"])
def test_a_row_without_images_keeps_the_whole_tower_in_the_graph(vision_case, rows):
    vlm = vision_case.vlm
    if rows == "text":
        batch = pack([sample for sample in vision_case.encoded if sample.media is None])
    else:
        axes = vision_case.encoder.num_position_axes
        batch = PackCollator(pad_token_id=561, num_position_axes=axes).empty()
    vlm.zero_grad(set_to_none=True)
    vlm(batch, batch.packed_seq_params()).sum().backward()
    for name, parameter in vlm.model.named_parameters():
        if is_untouched(name, vlm.paths):
            continue
        assert parameter.grad is not None, name
        if vision_case.is_vision(name):
            assert not parameter.grad.any(), name
    assert bool(vlm.model.get_input_embeddings().weight.grad.any()) == (rows == "text")


def test_the_blank_image_is_seen_by_nobody(vision_case):
    vlm = vision_case.vlm
    batch = pack([sample for sample in vision_case.encoded if sample.media is None])
    before = logits_by_sample(vlm, batch)
    noise = torch.randn_like(vlm.blank.pixel_values)
    blank, vlm.blank = vlm.blank, replace(vlm.blank, pixel_values=noise)
    try:
        after = logits_by_sample(vlm, batch)
    finally:
        vlm.blank = blank
    for key, logits in before.items():
        assert torch.equal(after[key], logits)


# Tokens, lengths, positions


def test_ids_labels_and_pixels_are_those_of_the_stock_processor(case):
    for ours, theirs in zip(case.encoded, case.inputs.values(), strict=True):
        assert torch.equal(ours.input_ids, theirs.input_ids[0])
        assert torch.equal(ours.labels[:-1], theirs.labels[0, 1:])
        assert torch.equal(ours.media_positions, theirs.is_image[0].nonzero()[:, 0])
        assert (ours.media is None) == (not theirs.media)
        if ours.media is None:
            continue
        arguments, expected = (
            case.encoder.family.image_arguments(ours.media),
            theirs.rules.seen(theirs.media),
        )
        assert arguments.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(torch.as_tensor(arguments[name]), torch.as_tensor(value)), name


@pytest.mark.cases(slow=("qwen2_5_vl", "internvl"))
@pytest.mark.slow
def test_the_predicted_length_is_the_actual_one_for_200_image_sizes(vision_case):
    draw = random.Random(0)
    sizes = [(8, 1600), (1600, 8), (1, 200), (200, 1), (1, 1), (16, 16), (1200, 900), (513, 511)]
    while len(sizes) < 200:
        sizes.append(tuple(round(8 * 2 ** draw.uniform(0, 6)) for _ in range(2)))
    token_counts = set()
    alone, together = [[size] for size in sizes[:8]], range(0, 200, 4)
    for some in [*alone, *(sizes[start : start + 4] for start in together)]:
        sample = conversation(
            ("user", ["Compare", *[None] * (len(some) // 2), "with", *[None] * -(-len(some) // 2)]),
            ("assistant", ["same"]),
            images=tuple(file_of(picture(*size), compress_level=1) for size in some),
        )
        actual, predicted = (
            vision_case.encoder.encode(sample),
            vision_case.encoder.length(sample, some),
        )
        assert predicted.num_tokens == actual.length, some
        assert predicted.num_image_tokens == len(actual.media_positions) > 0, some
        assert predicted.num_label_tokens == int((actual.labels != IGNORE_INDEX).sum())
        assert predicted.num_patches == actual.media.pixel_values.shape[0], some
        token_counts.update(actual.media.num_tokens)
    tiny = TINY.get(vision_case.name)
    least = tiny.token_counts if tiny is not None else 20
    assert len(token_counts) > least, "the sizes were all alike"


@pytest.mark.parametrize(
    "parts",
    [["text"], [None, "after"], ["before", None], ["a", None, "b", None, "c"], [None, None, None]],
    ids=str,
)
def test_positions_are_those_of_the_stock_model(vision_case, parts):
    sizes = [(64, 32), (32, 96), (160, 96)][: parts.count(None)]
    sample = conversation(
        ("user", parts),
        ("assistant", ["one"]),
        ("user", ["and now?"]),
        ("assistant", ["two"]),
        images=tuple(file_of(picture(*size)) for size in sizes),
    )
    encoded = vision_case.encoder.encode(sample)
    is_image = encoded.input_ids == vision_case.encoder.placeholder_id
    inputs = StockInputs(
        input_ids=encoded.input_ids[None],
        labels=encoded.labels[None],
        is_image=is_image[None],
        media=vision_case.encoder.family.image_arguments(encoded.media) if sizes else {},
        rules=stock_rules(vision_case.folder),
    )
    assert torch.equal(encoded.position_ids, positions_of(vision_case.stock, inputs))
    if vision_case.encoder.num_position_axes > 1:
        assert bool((encoded.position_ids != encoded.position_ids[:1]).any()) == bool(sizes)


# Training


@pytest.mark.cases(slow=("qwen2_5_vl", "gemma4", "nemotron_h_omni", "qwen3_5_moe"))
@pytest.mark.slow
def test_a_trained_model_learns_and_exports_what_it_computes(case, tmp_path):
    engine = make_engine(case.folder, case.encoder)
    batch = pack(case.encoded, alignment=8)
    stepper = make_stepper(engine)

    def loss():
        with torch.no_grad():
            return float(engine.vlm(batch, batch.packed_seq_params()).mean())

    before = loss()
    stepper.train(0, [batch], num_skipped=0, stop=False)
    assert loss() < before

    engine.export(tmp_path, processor_from=case.folder, dtype=None)
    exported = load_stock(tmp_path)
    ours = logits_by_sample(engine.vlm, batch)
    with torch.no_grad():
        for key, inputs in case.inputs.items():
            theirs = exported(**inputs.prepared(exported)).logits[0]
            assert relative_l2(ours[key], theirs) < GRADIENT_TOLERANCE, key
    assert Encoder(tmp_path).fingerprint == case.encoder.fingerprint
