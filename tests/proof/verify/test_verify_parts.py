"""The pieces of `vlmpack verify`: bounds, cut configurations, perturbation, grouping, words."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.engines import EVERYTHING, policy, single_rank
from support.shards import TINY_MODEL, mixed_samples

from vlmpack.alignment import Alignment
from vlmpack.cli import verify as verify_command
from vlmpack.distributed import Ranks
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError
from vlmpack.families.registry import family_of
from vlmpack.packing import FixedShape, Media, PackCollator
from vlmpack.packing.budget import RowBudget
from vlmpack.proof.measure import ordinary_ids
from vlmpack.proof.rows.checks import check_row
from vlmpack.proof.verify import Check, Verification, memory
from vlmpack.proof.verify import samples as chosen
from vlmpack.proof.verify.compare import Compared, check_log_probabilities
from vlmpack.proof.verify.leak import check_leaks, perturbed
from vlmpack.proof.verify.packed import Packed
from vlmpack.proof.verify.run import as_json, conclusion
from vlmpack.proof.verify.samples import group_samples, make_row, rows_in_words
from vlmpack.proof.verify.unpacked import (
    FEWEST_SLOTS,
    KEPT_NUMBERS,
    Unpacked,
    _own_rows,
    in_token_order,
    kept_slots,
)
from vlmpack.report.verify import head, table_rows
from vlmpack.terminal import open_console


@pytest.fixture(scope="module")
def samples():
    encoder = Encoder(TINY_MODEL)
    return [encoder.encode(sample.cooked()) for sample in mixed_samples()]


# bfloat16


def bfloat16(errors, noise, samples):
    """A comparison over as many label tokens as there are errors, split over two rows."""
    count = len(errors)
    collator = PackCollator(pad_token_id=0, num_position_axes=3)
    row = make_row(collator, samples, [0], Encoder(TINY_MODEL), row_multiple=1)
    wide = replace(row, alone=(replace(samples[0], input_ids=torch.zeros(count)),))
    none = Unpacked([torch.zeros(count)], [], [], {})
    compared = Compared(samples[:1], [wide], none, Unpacked([noise], [], [], {}), exact=False)
    return check_log_probabilities(compared, {0: dict(enumerate(errors.tolist()))})


def test_bfloat16_is_held_to_the_unpacked_errors(samples):
    noise = torch.full((1000,), 0.01)
    assert bfloat16(1.05 * noise, noise, samples).status == "pass"
    worse = bfloat16(1.15 * noise, noise, samples)
    assert worse.status == "fail"
    assert worse.measured == pytest.approx(1.15, rel=1e-4)


def test_few_labels_are_said_and_not_judged(samples):
    noise = torch.full((999,), 0.01)
    check = bfloat16(3 * noise, noise, samples)
    assert check.status == "too few"
    assert "999 label tokens" in check.detail
    assert "1,000" in check.detail


def test_rows_that_pad_images_are_not_compared():
    value = torch.arange(12.0).view(2, 3, 2)
    assert torch.equal(_own_rows(value, [1, 3]), torch.cat([value[0, :1], value[1]]))
    for patches in ([3, 3], [2, 4], [1, 3, 3], []):  # alike, no such padding, other images, none
        assert torch.equal(_own_rows(value, patches), value.flatten(0, 1))


def test_too_little_memory_names_both_numbers_and_tiny(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 1 << 20)
    with pytest.raises(CapabilityError, match=r"has 1\.0 MiB free. `vlmpack verify --tiny`"):
        required()
    monkeypatch.setattr(memory, "available_bytes", lambda: 1 << 40)
    required()


def required(trained=EVERYTHING):
    memory.require_memory(
        TINY_MODEL, family_of(TINY_MODEL).modules, trained, torch.device("cpu"), split=1
    )


def test_frozen_weights_need_no_moments(monkeypatch):
    frozen = policy("frozen", "frozen", "frozen")
    parameters = 2_002_304
    monkeypatch.setattr(memory, "available_bytes", lambda: 15 * parameters)
    required(frozen)
    with pytest.raises(CapabilityError, match="verify compares 2,002,304 parameters"):
        required()


def test_a_problem_of_another_rank_is_raised_here(monkeypatch):
    """Otherwise this rank would wait for it in the next collective."""
    other = CapabilityError("cuda:1 has too little")
    monkeypatch.setattr(Ranks, "gather_objects", lambda self, mine: [mine, other])
    with pytest.raises(CapabilityError, match="cuda:1"):
        memory.on_every_rank(single_rank(), lambda: None)


# Leak test


class Slots:
    """An engine of its own: a row's losses are its ids at label slots, times `factor` in turn."""

    def __init__(self, hidden=None):
        self.calls = 0
        self.hidden = hidden

    def run(self, rows, *, backward):
        """What the rows compute."""
        batch = rows[0].batch
        values = batch.input_ids.flatten().double()
        self.calls += 1
        if self.hidden is not None:
            values = values[:, None] * (1 + self.hidden * self.calls)
            return Packed({0: {}}, [], [values])
        return Packed({0: {int(s): float(values[s]) for s in batch.label_positions}}, [], [])


def leaks(run, samples, **options):
    encoder = Encoder(TINY_MODEL)
    collator = PackCollator(pad_token_id=0, num_position_axes=3)
    row = make_row(collator, samples, range(len(samples)), encoder, row_multiple=1)
    ordinary = ordinary_ids((each.input_ids for each in samples), [encoder.placeholder_id])
    return check_leaks(run, collator, [row], ordinary, **options)


def test_a_sample_without_labels_shows_nothing_where_losses_alone_are_known(samples):
    shown = replace(samples[1], labels=samples[1].input_ids.clone())
    shown.labels[-1] = -100
    silent = replace(samples[0], labels=torch.full_like(samples[0].labels, -100))
    assert leaks(Slots(), [shown, silent], shared_matmuls=False).status == "pass"


def test_a_value_that_is_nan_is_not_said_to_stay(samples):
    def ones(rows, *, backward):
        return Packed({0: {}}, [], [torch.ones(rows[0].batch.num_slots, 1)])

    def found(run):
        check = leaks(run, samples[:2], shared_matmuls=False)
        assert check.status == "fail"
        return check.detail

    assert found(Slots(hidden=math.nan)).startswith(f"{samples[0].key} moves {samples[1].key}")
    assert "changed nothing of its own" in found(SimpleNamespace(run=ones))


def test_experts_in_bfloat16_have_no_last_bit_to_keep(samples):
    def check(exact):
        return leaks(Slots(hidden=0.004), samples[:2], shared_matmuls=True, exact=exact)

    assert check(True).status == "fail"
    assert check(False).status == "shown"
    assert check(False).measured > 0.001


# Samples


def test_a_perturbed_sample_differs_in_ordinary_tokens_and_pixels_alone(samples):
    encoder = Encoder(TINY_MODEL)
    special = [*encoder.tokenizer.all_special_ids, encoder.placeholder_id]
    ordinary = ordinary_ids((each.input_ids for each in samples), special)
    for sample in samples:
        changed = perturbed(sample, ordinary)
        differs = changed.input_ids != sample.input_ids
        assert differs.any()
        is_special = torch.isin(sample.input_ids, torch.tensor(special))
        assert torch.equal(differs, ~is_special)
        assert not torch.isin(changed.input_ids[differs], torch.tensor(special)).any()
        assert torch.equal(changed.labels, sample.labels)
        if sample.media is not None:
            assert changed.media.grid_thw == sample.media.grid_thw
            assert not torch.equal(changed.media.pixel_values, sample.media.pixel_values)


def test_samples_are_grouped_by_count_and_by_room(samples):
    collator = PackCollator(pad_token_id=0, num_position_axes=3, pad_to_multiple_of=8)
    assert group_samples(samples, 4, collator, budget=None) == [[0, 1, 2, 3], [4, 5]]
    two = -(-samples[0].length // 8) * 8 + -(-samples[1].length // 8) * 8
    groups = group_samples(samples, 6, collator, budget=RowBudget(max_tokens=two))
    assert groups[0] == [0, 1]
    assert [number for group in groups for number in group] == list(range(6))
    fixed = PackCollator(
        pad_token_id=0,
        num_position_axes=3,
        fixed=FixedShape(row_tokens=4096, max_sequences=2),
    )
    assert group_samples(samples, 6, fixed, budget=RowBudget(max_tokens=4096)) == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]


def test_more_labels_come_from_other_samples_and_a_drawn_twice_stays(samples, monkeypatch):
    """A blend may draw a sample twice in an epoch; rows of a table have one offset."""
    texts = [replace(sample, media=None) for sample in samples]
    places: list[Any] = [SimpleNamespace(shard="a", offset=0, key=str(n)) for n in range(4)]
    order = [chosen.Chosen(places[at], texts[at], None) for at in (0, 0, 0, 1, 1, 2, 3)]
    monkeypatch.setattr(chosen, "_in_order", lambda train: iter(order))
    encoder = SimpleNamespace(takes_images=False)
    split: Any = SimpleNamespace(dataset=SimpleNamespace(encoder=encoder))
    first = chosen.choose_samples(split, 2)
    assert len(first) == 2 and first[0].ref == first[1].ref
    labels = sum(each.num_labels for each in (*first, order[3]))
    assert order[3].num_labels and order[5].num_labels
    more = chosen.choose_samples(split, 2, min_labels=labels)
    assert more == [*first, order[3]]
    assert chosen.choose_samples(split, 2, min_labels=labels + 1) == [*more, order[5]]


def test_images_that_come_late_are_looked_for_by_the_index(samples, monkeypatch):
    text = replace(samples[0], media=None)
    late = next(sample for sample in samples if sample.media is not None)
    encoded = [*[text] * 6, late]
    monkeypatch.setattr(chosen, "LOOKED_AT", 1)
    encoder = SimpleNamespace(takes_images=True)
    plan = SimpleNamespace(
        position=SimpleNamespace(epoch=0), bins=tuple((number,) for number in range(7))
    )
    split: Any = SimpleNamespace(
        start=lambda: None,
        planned=lambda state, steps: iter([plan]),
        split=SimpleNamespace(sizes=lambda numbers: (numbers, numbers // 6)),
        request=lambda taken: SimpleNamespace(
            samples=[SimpleNamespace(shard="a.tar", offset=number) for number in taken]
        ),
        dataset=SimpleNamespace(
            encoder=encoder,
            read=lambda request: [None] * len(request.samples),
            encode=lambda ref, read: encoded[ref.offset],
        ),
    )
    assert [each.sample for each in chosen.choose_samples(split, 3)] == [text, late, text]
    encoder.takes_images = False
    assert all(each.sample is text for each in chosen.choose_samples(split, 3))


def test_few_slots_are_kept_of_a_large_model(samples):
    everything = kept_slots(samples, 10)
    assert [len(slots) for slots in everything] == [sample.length for sample in samples]
    few = kept_slots(samples, KEPT_NUMBERS)
    assert {len(slots) for slots in few} == {FEWEST_SLOTS}
    for slots, sample in zip(few, samples, strict=True):
        assert (slots[0], slots[-1]) == (0, sample.length - 1)


# Words


def test_the_last_line_says_what_to_look_at():
    passing = Check(name="positions", status="pass")
    failing = Check(
        name="leak test", status="fail", measured=math.inf, detail="a moves b", look_at="attention"
    )
    assert conclusion(Verification(checks=(passing,))) == "packed equals unpacked"
    few = Check(name="leak test", status="too few", detail="one sample a row")
    assert conclusion(Verification(checks=(passing, few))) == (
        "packed equals unpacked in what was judged; too few data for leak test (one sample a row)"
    )
    tiny = Verification(checks=(passing,), facts={"tiny": True})
    assert conclusion(tiny) == "packed equals unpacked (of the tiny model)"
    found = Verification(checks=(passing, failing))
    assert not found.passes
    assert conclusion(found) == (
        "packed differs from unpacked in 1 check: leak test (a moves b; look at attention)"
    )
    written = json.loads(json.dumps(as_json(found), allow_nan=False))
    assert written["checks"][1]["measured"] == "inf"
    assert [row[0] for row in table_rows(found)] == ["pass", "FAIL"]


def test_a_terminal_shows_colours_and_no_escapes(monkeypatch, capfd, tmp_path):
    console = partial(open_console, force_terminal=True, color_system="standard")
    monkeypatch.setattr(verify_command, "open_console", console)
    failing = Check(name="leak test", status="fail", measured=math.inf, detail="a\x1b[2Jmoves b")
    verify_command._print(verification_of(failing), tmp_path / "v.json")
    shown = capfd.readouterr().out
    assert "\x1b[1;31mFAIL" in shown
    assert "\\x1b[1;31m" not in shown and "\\x1b[0m" not in shown
    assert "a\\x1b[2Jmoves b" in shown


def verification_of(*checks):
    sample = {"tokens": 7, "labels": 3, "images": 1}
    engine = {"stock": "M", "engine": "hf", "attention": "a", "device": "cpu", "processes": "1"}
    facts = {"model": "M", "samples": [sample], "samples_wanted": 1, "engine": engine}
    facts |= {"mode": "none", "dtype": "float32", "seconds": 1.0}
    return Verification(checks=checks, facts=facts)


def test_what_was_found_stands_below_its_check_where_there_is_no_room(monkeypatch, capfd, tmp_path):
    detail = "49 parameters, worst model.visual.blocks.3.attn.qkv.weight 2.9e-06"
    check = Check(name="gradients: tower", status="pass", measured=1e-6, bound=1e-5, detail=detail)
    found = verification_of(check, Check(name="leak test", status="pass", detail="none"))
    figures = "pass  gradients: tower  1.0e-06  1e-05"
    said = "49 parameters, worst blocks.3.attn.qkv.weight 2.9e-06"
    for columns, expected in ((None, [rf"{figures} +{said}"]), (80, [figures, f"      {said}"])):
        if columns is not None:
            monkeypatch.setenv("COLUMNS", str(columns))
        verify_command._print(found, tmp_path / "v.json")
        lines = capfd.readouterr().out.splitlines()
        at = next(place for place, line in enumerate(lines) if "gradients" in line)
        for line, pattern in zip(lines[at:], expected, strict=False):
            assert re.fullmatch(pattern, line), lines
        assert columns is None or max(map(len, lines[:-2])) <= columns


def head_of(**facts):
    sample = {"tokens": 7, "labels": 3, "images": 1}
    engine = {"stock": "M", "engine": "hf", "attention": "a", "device": "cpu"}
    engine["processes"] = facts.pop("processes", "1 (no replicas)")
    common = {"model": "m", "mode": "none", "dtype": "bfloat16", "seconds": 1, "engine": engine}
    defaults = {"samples": [sample], "samples_wanted": 3}
    return "\n".join(head(Verification(checks=(), facts=common | defaults | facts)))


def test_the_head_says_why_there_are_more_samples_than_asked_for():
    sample = {"tokens": 7, "labels": 3, "images": 0}
    assert "--samples" not in head_of(samples=[sample] * 3)
    assert "more than the 3 of --samples" in head_of(samples=[sample] * 4)
    assert "until they have so many" in head_of(samples=[sample] * 4)


def test_the_head_counts_processes_in_words():
    assert "hf, 1 process, attention" in head_of()
    assert "hf, 2 processes (DDP), attention" in head_of(processes="2 (DDP)")


def test_rows_are_counted_in_words():
    assert [rows_in_words(count, padded=False) for count in (1, 2)] == [
        "1 packed row",
        "2 packed rows",
    ]
    assert [rows_in_words(count, padded=True) for count in (1, 2)] == [
        "1 batch of padded rows",
        "2 batches of padded rows",
    ]


def test_the_multiples_of_rows_are_the_layouts_not_the_collators(samples):
    """A collator that pads nothing is found where the layout needs rows of 4."""
    collator = PackCollator(pad_token_id=0, num_position_axes=3)
    chosen = next(n for n, sample in enumerate(samples) if sample.length % 4)
    row = make_row(collator, samples, [chosen], Encoder(TINY_MODEL), row_multiple=1)
    row = replace(row, positions=(samples[chosen].position_ids,))
    rules = replace(row.rules, multiples=Alignment(1, 4))
    for wanted, fails in ((row.rules, []), (rules, ["boundaries"])):
        found = check_row(replace(row, rules=wanted))
        assert [check.name for check in found if check.fails] == fails
    other = make_row(collator, samples, [chosen], Encoder(TINY_MODEL), row_multiple=4)
    assert other.rules == rules


def test_a_tower_s_rows_are_put_into_the_order_of_the_samples():
    """transformers runs still images first, then videos. Rows are as many for each patch; those of
    anything else stay."""
    still, video = {"num_tokens": (1,)}, {"num_tokens": (1,), "seconds": (2.0,)}
    mixed = Media(
        pixel_values=torch.zeros(6, 1),
        grid_thw=((1, 1, 2), (2, 1, 2)),
        num_tokens=(1, 1),
        seconds=(0.5, None),
    )
    first = Media(pixel_values=torch.zeros(2, 1), grid_thw=((1, 1, 2),), **still)
    last = Media(pixel_values=torch.zeros(4, 1), grid_thw=((2, 1, 2),), **video)
    # In the samples' order patches are 0 1 | 2 3, 4 5 6 7 | 8 9 10 11.
    run = torch.tensor([0, 1, 4, 5, 6, 7, 2, 3, 8, 9, 10, 11])[:, None]
    found = in_token_order(run, [first, None, mixed, last])
    assert found[:, 0].tolist() == list(range(12))
    merged = in_token_order(run[::2], [first, mixed, last])
    assert merged[:, 0].tolist() == [0, 2, 4, 6, 8, 10]
    assert in_token_order(run[:7], [first, mixed, last]).equal(run[:7])
    assert in_token_order(run[:2], [first, None]).equal(run[:2])
