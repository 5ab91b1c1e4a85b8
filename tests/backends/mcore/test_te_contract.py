"""What Transformer Engine is handed, held against its signatures and its own rule, by version.

It runs on GPUs alone. What this shows without one: Megatron's wrapper binds to each version's
signature with our arguments; every query sees the keys of its own sample that come before it, and
no other real one, by the rule of that version (`te_ring`); nothing is read on the host; and
its layers, played in torch, take our weights and train as ours do.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from backends.mcore.played_te import VERSIONS, numbers, signature
from backends.mcore.te_ring import gaps_of, kept_slots, ring
from backends.mcore.te_rows import ROWS, SIZES
from packaging.requirements import Requirement
from support.layouts import TESTS

from vlmpack.backends.mcore import te_versions
from vlmpack.build.engine import resolved_compute
from vlmpack.capabilities.versions import (
    RANGES,
    TRANSFORMER_ENGINE,
    TRANSFORMER_ENGINES,
    release,
    transformer_engines,
    version_limit,
)
from vlmpack.errors import CapabilityError
from vlmpack.packing.context import zigzag_index
from vlmpack.recipe.schema import ModelSection, ParallelismSection

MINOR, WANTED = transformer_engines()
IN_RANGE = [v for v in VERSIONS if numbers(v) < numbers(WANTED.below)]
RELEASED_AGAINST = {"0.17": "2.14.1", "0.18": "2.16.0", "0.19": "2.17.1"}
"""Transformer Engine in the lock files of core_v0.17.1, core_v0.18.2 and core_v0.19.0."""
CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the worker found: Megatron is imported there beside the stand-in."""
    path = tmp_path_factory.mktemp("te") / "found"
    command = [sys.executable, "-W", "ignore", "-m", "backends.mcore.te_worker", str(path)]
    paths = os.pathsep.join(map(str, (TESTS, TESTS.parent)))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment)
    return pickle.loads(path.read_bytes())


def wanted(row):
    """(T, T) bool of real tokens' queries and keys, and which slots are real."""
    starts = [sum(row.segment_lengths[:n]) for n in range(len(row.segment_lengths))]
    total = sum(row.segment_lengths)
    pairs, real = torch.zeros(total, total, dtype=torch.bool), torch.zeros(total, dtype=torch.bool)
    for start, length in zip(starts, row.lengths, strict=False):
        pairs[start : start + length, start : start + length] = True
        real[start : start + length] = True
    return pairs.tril(), real


def wrong(call, arguments, version=None):
    """What is wrong with a row's attention, by backend; empty where nothing is."""
    version = version or call.version
    pairs, real = wanted(ROWS[call.row](call.size))
    problems = []
    gaps, reads = gaps_of(version, arguments)
    if reads:
        problems.append("host")
    if gaps:
        problems.append("no FlashAttention")
    for flash in (False,) if gaps else (False, True):
        try:
            seen = ring(version, arguments, call.slots, flash=flash)
        except AssertionError:
            problems.append("refused")
            continue
        both = real[:, None] & real[None]
        if not torch.equal(seen.pairs & both, pairs):
            problems.append("keys")
        if bool((seen.pairs & real[:, None] & ~real[None]).any()):
            problems.append("gaps are seen")
    return problems


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_each_query_sees_the_keys_of_its_own_sample(found, version):
    calls = [call for call in found["calls"] if call.version == version]
    assert {(call.row, call.size) for call in calls} == {(r, s) for r in ROWS for s in SIZES}
    for call in calls:
        assert wrong(call, call.arguments) == [], (call.row, call.size)
        assert (call.bounds, call.objects) == (4, 1), "one tensor for all four"
        assert call.arguments["pad_between_seqs"] is False
        assert isinstance(call.arguments["max_seqlen_q"], int)


@pytest.mark.slow
def test_ranks_hold_the_slots_that_it_takes_them_to_hold(found):
    several = [call for call in found["calls"] if call.size > 1]
    for call in several:
        bounds = call.arguments["cu_seqlens_q_padded"].tolist()
        for rank, slots in enumerate(call.slots):
            assert slots == kept_slots(bounds, rank, call.size)
            lengths = [b - a for a, b in pairwise(bounds)]
            assert slots == zigzag_index(lengths, rank=rank, size=call.size).tolist()
    assert len(several) == len(VERSIONS) * len(ROWS) * 2


def broken(row):
    """Ways to hand boundaries over wrongly, by name."""
    logical = row.cu_seqlens
    padded = row.packed_seq_params().cu_seqlens_physical

    def four(plain, apart, **others):
        names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        return dict(zip(names, (plain, plain, apart, apart), strict=True)) | others

    return {
        "logical": four(logical, padded, pad_between_seqs=False),
        "logical, gaps looked for": four(logical, padded, pad_between_seqs=None),
        "no padded ones": four(logical, None, pad_between_seqs=None),
        "other objects": four(padded, padded.clone(), pad_between_seqs=None),
    }


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("how", ["logical", "logical, gaps looked for", "no padded ones"])
def test_boundaries_that_are_handed_over_wrongly_are_found(found, version, how):
    """Each way, at CP 2 and 4, in the rows that it breaks; the rest of the rows are fine."""
    by_row = {}
    for call in found["calls"]:
        if call.version == version and call.size > 1:
            arguments = call.arguments | broken(ROWS[call.row](call.size))[how]
            by_row.setdefault(call.row, set()).update(wrong(call, arguments))
    rows_with_gaps = {"one odd sample", "last odd", "odd ones between", "fixed shape"}
    if how == "no padded ones":
        assert all("refused" in problems for problems in by_row.values())
    elif how == "logical":
        assert {row for row, problems in by_row.items() if problems} == rows_with_gaps
        assert all("keys" in by_row[row] for row in rows_with_gaps)
    elif numbers(version) < (2, 18):
        assert {row for row, problems in by_row.items() if "host" in problems} == set(by_row)
        assert {row for row, problems in by_row.items() if "keys" in problems} == {
            "one odd sample",
            "last odd",
        }, "the row's only gap is behind its last sample (TransformerEngine#3331)"
    else:
        slow = {row for row, problems in by_row.items() if problems}
        assert slow == rows_with_gaps, "the others' boundaries are one tensor"
        assert all(by_row[row] == {"no FlashAttention"} for row in slow)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_equal_boundaries_in_other_objects_cost_time(found, version):
    for call in found["calls"]:
        if call.version != version or call.size == 1:
            continue
        arguments = call.arguments | broken(ROWS[call.row](call.size))["other objects"]
        cost = "host" if numbers(version) < (2, 18) else "no FlashAttention"
        assert wrong(call, arguments) == [cost]
        assert wrong(call, call.arguments | {"pad_between_seqs": None}) == (
            ["host"] if cost == "host" else []
        ), "one object is enough from 2.18 on; before, the argument is what counts"


@pytest.mark.slow
def test_the_published_case(found):
    """698 tokens at CP 2: 349 keys on both ranks, where 350 and 348 are right."""
    (call,) = (
        c for c in found["calls"] if (c.version, c.size, c.row) == ("2.11.0", 2, "one odd sample")
    )
    slots = [kept_slots([0, 700], rank, 2) for rank in (0, 1)]
    assert [sum(slot < 698 for slot in each) for each in slots] == [348, 350]
    bounds = torch.tensor([0, 700], dtype=torch.int32)
    row = replace(call, slots=slots)
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    right = dict.fromkeys(names, bounds) | {"pad_between_seqs": False}
    real = torch.ones(698, 698, dtype=torch.bool).tril()
    assert torch.equal(ring("2.11.0", right, row.slots, flash=True).pairs[:698, :698], real)
    logical = torch.tensor([0, 698], dtype=torch.int32)
    old = right | {"cu_seqlens_q": logical, "cu_seqlens_kv": logical, "pad_between_seqs": None}
    seen = ring("2.11.0", old, row.slots, flash=False)
    assert not seen.gaps and seen.host_reads == 2
    assert not seen.pairs[slots[1][349]].any(), "a real query that sees nothing"


@pytest.mark.slow
def test_its_layers_take_our_weights_and_train_as_ours(found):
    (ours, weights), (theirs, others) = found["ours"], found["theirs"]
    assert theirs == pytest.approx(ours, rel=1e-6)
    assert weights.keys() == others.keys() and len(weights) > 20
    worst = max((weights[name] - others[name]).abs().max().item() for name in weights)
    assert worst < 1e-7  # of gradients 5e-5, whose norm is 9.5


@pytest.mark.slow
def test_our_rotation_serves_its_attention(found):
    numbers, weights = found["fused"]["step"]
    plain, others = found["theirs"]
    assert numbers == pytest.approx(plain, rel=1e-5)
    assert max((weights[n] - others[n]).abs().max().item() for n in weights) < 1e-7
    said = "norms: Transformer Engine's; rotations: triton (as the recipe asks; "
    assert found["fused"]["said"].startswith(said)
    calls = found["fused"]["calls"]
    assert calls and all(queries[1] == keys[1] and queries != keys for queries, keys in calls)


def test_arguments_that_a_version_does_not_know_are_refused():
    """The control of the fixture: 2.9 has no `num_splits`, 2.11 none of 2.12."""
    for version, unknown in (("2.9.0", "num_splits"), ("2.11.0", "bottom_right_diagonal")):
        forward = signature("DotProductAttention.forward", version)
        assert "pad_between_seqs" in forward.parameters
        with pytest.raises(TypeError, match=unknown):
            forward.bind(1, 2, 3, **{unknown: 1})


def test_the_range_is_the_one_that_megatron_names():
    """Its pre-releases count as the version that they lead to. From 0.17 on it names none."""
    asked = map(Requirement, metadata.requires("megatron-core"))
    theirs = [r.specifier for r in asked if r.name == TRANSFORMER_ENGINE and r.specifier]
    assert metadata.version("megatron-core").startswith(f"{MINOR}.")
    assert bool(theirs) == (MINOR == "0.16")
    for each in theirs:
        assert {str(part) for part in each} == {f">={WANTED.lowest}.0a0", f"<{WANTED.below}.0"}
        assert [WANTED.lowest, "2.11"] == [IN_RANGE[0][:3], IN_RANGE[-1][:4]], "both ends are there"


def test_each_minor_version_has_a_range_with_what_it_was_released_against():
    first, last = (release(version)[:2] for version in (RANGES["megatron-core"].lowest, "0.19"))
    minors = [f"0.{minor}" for minor in range(first[1], last[1] + 1)]
    assert list(TRANSFORMER_ENGINES) == minors == ["0.16", *RELEASED_AGAINST]
    assert release(RANGES["megatron-core"].below) == (0, last[1] + 1)
    for minor, against in RELEASED_AGAINST.items():
        ours = TRANSFORMER_ENGINES[minor]
        newest = VERSIONS[-1] if minor == "0.19" else against  # whose signatures are held below
        major, its_minor = numbers(newest)[:2]
        assert numbers(ours.lowest) <= numbers(against) < numbers(ours.below)
        assert numbers(ours.below) == (major, its_minor + 1)


@pytest.mark.parametrize(
    ("megatron", "fits", "too_new"),
    [
        ("0.16.1", "2.11.0", "2.12.0"),
        ("0.18.2", "2.16.0", "2.17.1"),
        ("0.19.2", "2.20.2", "2.21.0"),
    ],
)
def test_the_range_follows_the_megatron_core_that_is_here(monkeypatch, megatron, fits, too_new):
    monkeypatch.setattr(metadata, "version", {"megatron-core": megatron}.__getitem__)
    assert version_limit(TRANSFORMER_ENGINE, fits) is None
    assert f"found {too_new}" in version_limit(TRANSFORMER_ENGINE, too_new).reason


def pretend(monkeypatch, version, passed=(), importable=True):
    real = metadata.version
    monkeypatch.setattr(
        metadata,
        "version",
        lambda name: version if name == TRANSFORMER_ENGINE and version else real(name),
    )
    monkeypatch.setattr(te_versions, "PASSED_ON_GPU", passed)
    if importable:
        monkeypatch.setattr(te_versions.importlib, "import_module", lambda _: None)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "needs transformer-engine, which is not installed"),
        ("2.21.0", f"needs transformer-engine >= 2.9 and < {WANTED.below}, found 2.21.0"),
        ("2.8.0", f"needs transformer-engine >= 2.9 and < {WANTED.below}, found 2.8.0"),
        ("2.11.0+cu13", "cannot be imported"),
    ],
)
def test_the_refusal_names_what_was_found_and_what_to_install(monkeypatch, version, said):
    pretend(monkeypatch, version, importable=False)
    with pytest.raises(CapabilityError) as caught:
        te_versions.require_transformer_engine(CUDA)
    command = (
        f"pip install --no-build-isolation '{TRANSFORMER_ENGINE}[pytorch]>=2.9,<{WANTED.below}'"
    )
    assert said in str(caught.value) and command in str(caught.value)


def chosen(dtype="bfloat16", **model):
    family = SimpleNamespace(
        modules=SimpleNamespace(image_blocks=False), largest_head=0, model_types=()
    )
    section = ModelSection(path="a", backend="mcore", dtype=dtype, **model)
    split = ParallelismSection(context=2)
    compute = resolved_compute(section, split, SimpleNamespace(family=family), CUDA)
    return compute.described()["attention"]


def test_auto_takes_only_what_has_passed_on_a_gpu(monkeypatch):
    megatron = metadata.version("megatron-core")
    assert te_versions.PASSED_ON_GPU == (), "then say in the docs and the README which they are"
    pretend(monkeypatch, "2.11.0")
    assert chosen().startswith("segments (with context parallelism; or transformer_engine")
    assert chosen(attention="transformer_engine") == "transformer_engine (as the recipe asks)"
    pretend(monkeypatch, "2.11.0", passed=[(megatron, "2.11.0")])
    assert chosen() == "transformer_engine (tests/gpu has passed with 2.11.0)"
    assert chosen(dtype="float32").startswith("segments")
    assert chosen(attention="segments").startswith("segments (as the recipe asks)")
    for version, passed in (("2.10.0", megatron), ("2.11.0", "0.15.0")):
        pretend(monkeypatch, version, passed=[(passed, "2.11.0")])
        assert chosen().startswith("segments"), (version, passed)
