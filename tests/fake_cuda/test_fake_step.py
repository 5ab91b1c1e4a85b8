"""The optimizer step of every family on the GPU that a CPU plays: every branch for CUDA is taken in
bfloat16, it learns what the step on CPU learns, and the host waits where it is known to."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache
from typing import Any

import pytest
from fake_cuda.families import Case, Seen
from fake_cuda.guard import run_under_guard, why_not
from fake_cuda.plants import PLANTS
from fake_cuda.waits import BACKWARD, THIRD_PARTY, unknown_waits
from support.families import FAMILIES, VISION_FAMILIES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

LOSS_TOLERANCE = 2e-2
"""Relative, of bfloat16 to float32: five roundings of 8 bits, as in tests/gpu."""
NORM_TOLERANCE = 5e-2
"""Of the gradient's norm: a dozen roundings. Where experts are chosen, too: of these samples no
rounded score has chosen another one that would matter (1.5% at most in 28 cases)."""

HYBRIDS = ("qwen3_5", "nemotron_h")
PACKAGES = (
    "flash_attn",
    "causal_conv1d",
    "fla.ops.gated_delta_rule",
    "mamba_ssm.ops.triton.ssd_combined",
    "liger_kernel.ops.swiglu",
    "liger_kernel.ops.geglu",
)
RECOMPUTED = Case(
    family="qwen2_5_vl",
    vision="full",
    language="full",
    recompute="selective",
    packages=PACKAGES,
)
"""Matrix products of the forward pass are handed out again in the backward pass."""
ON_PACKAGES = [
    Case(family="qwen2_5_vl", packages=PACKAGES),
    RECOMPUTED,
    *(Case(family=name, packages=PACKAGES, recurrence="kernels") for name in HYBRIDS),
]
RECOMPUTED_SEGMENTS = Case(family="deepseek_v3", attention="segments", recompute="full")
"""Without grouped queries: what autograd computes again is torch's flash attention, too."""
WIDE_HEADS = Case(family="gemma4", recompute="selective", widest=32)
"""Its layers with full attention have heads of 40 channels, the others of 24."""
LEVELS = Case(family="qwen2_5_vl", levels=True)
IN_CI = (
    *(Case(family=name) for name in ("qwen2_5_vl", "nemotron_h")),
    RECOMPUTED,
    RECOMPUTED_SEGMENTS,
    WIDE_HEADS,
    LEVELS,
)
IN_SOAK = [
    *(Case(family=name) for name in FAMILIES if Case(family=name) not in IN_CI),
    *(case for case in ON_PACKAGES if case not in IN_CI),
    replace(WIDE_HEADS, family="gemma4-dense", recompute="none"),
]
"""With images where there is a tower, LoRA beside a frozen part."""
BY_INDEX = "a row by its index"
PLANTED = {name: Case(family="qwen2_5_vl", plant=name) for name in PLANTS}
FOUND_IN_CI = ("a read in the loss", "no autocast", BY_INDEX)
GROUPS = (
    (*IN_CI, *(PLANTED[name] for name in FOUND_IN_CI)),
    tuple(IN_SOAK[::2]),
    tuple(IN_SOAK[1::2]),
    tuple(case for name, case in PLANTED.items() if name not in FOUND_IN_CI),
)
"""What one process runs: loading torch and transformers takes as long as seven families."""
UNREAD = {"llava_onevision": ("post_layernorm.weight", "post_layernorm.bias")}
"""By family, what of a tower no feature comes from: its last layer's states are the features."""
OF_QWENS_LINE = {name for name in VISION_FAMILIES if name.startswith("qwen")}


@cache
def _ran(cases: tuple[Case, ...]) -> dict[Case, Seen]:
    """These, in one process."""
    answers: list[dict[str, Any]] = run_under_guard(
        "fake_cuda.families", [asdict(case) for case in cases]
    )
    return dict(zip(cases, (Seen(**answer) for answer in answers), strict=True))


def _seen(case: Case) -> Seen:
    return next(_ran(group)[case] for group in GROUPS if case in group)


def _require(case: Case, seen: Seen) -> None:
    """What any step must show."""
    assert seen.error == ""
    assert seen.elsewhere == []
    assert seen.trained
    unread = UNREAD.get(case.family, ()) if case.vision == "full" and case.images else ()
    assert seen.without_gradient == [name for name in seen.trained if name.endswith(unread)]
    assert seen.frozen_with_gradient == []
    assert seen.unmoved == []
    assert seen.loss == pytest.approx(seen.cpu_loss, rel=LOSS_TOLERANCE)
    assert seen.grad_norm == pytest.approx(seen.cpu_grad_norm, rel=NORM_TOLERANCE)
    trains = case.vision != "frozen"
    assert unknown_waits(case.family, seen.waits, tower_trains=trains) == []
    if case.images:  # without, a tower that trains gets a small image
        assert (seen.patch_products > 0) == (case.family in OF_QWENS_LINE)


@pytest.mark.parametrize(
    "case",
    [*IN_CI, *(pytest.param(case, marks=pytest.mark.soak) for case in IN_SOAK)],
    ids=lambda case: case.name,
)
def test_a_step_on_the_gpu_is_that_on_the_cpu(case: Case) -> None:
    seen = _seen(case)
    _require(case, seen)
    if case.packages:
        assert seen.attention.startswith("flash_attn")
        assert seen.fused.startswith("triton (first choice; gated activations: liger 0.8.5): ")
    else:
        assert seen.fused.startswith("triton (first choice; no gated activations: ")
    is_wide = case.widest == WIDE_HEADS.widest
    assert seen.attention.endswith("by vlmpack's Triton kernel)") == is_wide
    kernels = [seen.operators.get(f"vlmpack::wide_attention{way}", 0) for way in ("", "_backward")]
    assert kernels[0] == kernels[1] and (kernels[0] > 0) == is_wide
    norms = seen.operators["vlmpack::rms_norm"]
    assert norms >= 2 * int(seen.fused.rpartition(" norms")[0].rpartition(" ")[2]) > 0


def test_every_plant_is_expected_somewhere() -> None:
    assert {*EXPECTED, BY_INDEX} == PLANTS.keys()


@pytest.mark.soak
def test_the_list_of_waits_has_no_line_too_many() -> None:
    """Each is of some family, and most are of those that CI leaves out."""
    ran = [seen for group in GROUPS for seen in _ran(group).values()]
    places = {place for seen in ran for _, place in seen.waits}
    assert set(THIRD_PARTY) - places == set()


def test_backward_waits_where_it_is_known_to() -> None:
    for case in IN_CI:
        found = {what for what, place in _seen(case).waits if place == "backward"}
        assert found == set(BACKWARD.get(case.family, ())), case.name


EXPECTED = {
    "a read in the loss": ("one number", "vlmpack/backends/hf/model.py"),
    "a read in the tower": ("one number", "transformers/models/qwen2_5_vl/"),
    "a copy of the batch that waits": ("a copy to the device", "vlmpack/packing/media.py"),
    "positions on the CPU": "on the same device",
    "no autocast": "must have the same dtype",
}
"""By plant: the wait that is found, or what is said."""


ZERO_FILLS = ("aten::select_backward", "aten::slice_backward")
"""What the backward pass of an index runs: it fills a tensor of the whole with zeros. That of a
view writes nothing."""
OF_OTHERS = {
    "nemotron_h": dict.fromkeys(ZERO_FILLS, 8),
    "deepseek_v3": {"aten::slice_backward": 30},
    "gemma4": {"aten::select_backward": 12},
}
"""By family: the scan in torch's operators takes the last row of each chunk's decays. DeepSeek's
own rotation slices, and its values are narrower than its queries. Each of Gemma 4's layers takes
its own of all per-layer inputs by an index."""


@pytest.mark.parametrize("case", IN_CI, ids=lambda case: case.name)
def test_no_gradient_is_written_into_zeros(case: Case) -> None:
    found = {name: count for name in ZERO_FILLS if (count := _seen(case).operators.get(name))}
    assert found == OF_OTHERS.get(case.family, {})


def test_an_index_is_found() -> None:
    found = _seen(PLANTED[BY_INDEX]).operators
    assert found.get("aten::select_backward", 0) > 0


@pytest.mark.cases(slow=tuple(name for name in FOUND_IN_CI if name != BY_INDEX))
@pytest.mark.parametrize("plant", EXPECTED)
def test_a_fault_is_found(plant: str) -> None:
    case, expected = PLANTED[plant], EXPECTED[plant]
    seen = _seen(case)
    if isinstance(expected, str):
        assert expected in seen.error
        return
    assert seen.error == ""
    unknown = unknown_waits(case.family, seen.waits)
    assert unknown
    assert all(what == expected[0] and place.startswith(expected[1]) for what, place in unknown)


PRODUCT = [
    Case(family=name, images=images, vision=vision, language=language, **how)
    for name in FAMILIES
    for images in ((True, False) if name in VISION_FAMILIES else (False,))
    for vision, language in (
        ("frozen", "lora"),
        ("full", "full"),
        ("lora", "lora"),
        ("full", "frozen"),
    )
    if name in VISION_FAMILIES or language != "frozen"
    for how in ({}, {"packages": PACKAGES}, {"attention": "segments", "recompute": "full"})
]


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_to_train_a_family(family: str) -> None:
    cases = tuple(case for case in PRODUCT if case.family == family)
    assert len(cases) >= 6
    for start in range(0, len(cases), 8):  # that many end within the time of one process
        for case, seen in _ran(cases[start : start + 8]).items():
            _require(case, seen)
