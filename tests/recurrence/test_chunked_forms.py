"""Both chunked forms of each recurrence against the recurrence itself, segment by segment."""

from __future__ import annotations

import pytest
import torch
from recurrence.chunked_forms import DELTA_RULE, SCAN
from support.recurrences import LAYOUTS, Operators, with_gradients, worst

RULES = (DELTA_RULE, SCAN)
forms = pytest.mark.parametrize(
    ("rule", "form"),
    [
        pytest.param(rule, form, id=f"{rule.module}-{name}")
        for rule in RULES
        for name, form in rule.forms.items()
    ],
)


@pytest.mark.cases(quick=0.2, slow="*")
@forms
@pytest.mark.parametrize("lengths", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 5e-6)])
def test_values_and_gradients_are_those_of_each_segment_alone(rule, form, lengths, dtype, bound):
    got, want = rule.compared(form, lengths, rule.inputs(sum(lengths), dtype))
    assert worst(got, want) < bound


@pytest.mark.cases(quick=0.2, slow="*")
@forms
@pytest.mark.parametrize("size", [1, 16, 64, 500])
def test_any_size_of_chunks_gives_the_same(rule, form, size, monkeypatch):
    monkeypatch.setattr(f"vlmpack.recurrence.{rule.module}.chunk_size", lambda device: size)
    lengths = LAYOUTS["unequal"]
    got, want = rule.compared(form, lengths, rule.inputs(sum(lengths)))
    assert worst(got, want) < 1e-12


@pytest.mark.cases(quick=0.3, slow="*")
@forms
@pytest.mark.parametrize(
    ("told", "what"),
    [
        ((235,), "no reset at all"),
        ((20, 215), "state into the segment that fills the row"),
        ((20, 64, 64, 52, 35), "a reset at every chunk"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_resets_are_seen(rule, form, told, what):
    got, want = rule.compared(form, (20, 180, 35), rule.inputs(235, decay=0.02), told)
    assert worst(got[:1], want[:1]) > 0.01, what
    assert worst(got[1:], want[1:]) > 0.01, what


@forms
def test_memory_is_linear_in_the_row(rule, form):
    made = []
    for total in (512, 2048):
        leaves = rule.inputs(total, torch.float32)
        with Operators() as seen:
            with_gradients(rule.packed(form, leaves, (total,)), leaves)
        made.append(seen.bytes)
    assert made[1] < 4.1 * made[0]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.module)
def test_operators_of_the_fixed_form_are_the_same_whatever_the_segments(rule):
    streams = {}
    for name, form in rule.forms.items():
        for lengths in ((50, 90, 60), (200, 0, 0), (1, 1, 198)):
            leaves = rule.inputs(200)
            with Operators() as seen:
                with_gradients(rule.packed(form, leaves, lengths), leaves)
            streams.setdefault(name, []).append(seen.stream)
    assert len(streams["fixed"][0]) > 100
    assert streams["fixed"][0] == streams["fixed"][1] == streams["fixed"][2]
    assert streams["segments"][0] != streams["segments"][1]


@forms
def test_autocast_changes_nothing_inside(rule, form):
    leaves = [x.detach() for x in rule.inputs(70, torch.float32)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = rule.packed(form, leaves, (30, 40))
    assert torch.equal(inside, rule.packed(form, leaves, (30, 40)))


@forms
def test_a_tensor_of_another_row_is_refused(rule, form):
    with pytest.raises(ValueError, match="sum to 5 slots, the tensor has 6"):
        rule.packed(form, rule.inputs(6), (2, 3))
