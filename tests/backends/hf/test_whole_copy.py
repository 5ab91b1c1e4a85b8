"""The whole copy of a model in shards answers as the model itself, with buffers and adapters."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support import whole_answers
from support.engines import single_rank
from support.families import FAMILIES, TEXT_FAMILIES, model_type_of
from support.forked import check_ranks
from support.runs import relative_l2
from support.whole_answers import logits, make, saved_buffers, take_step, write_family

from vlmpack.backends.hf.parameter_boxes import whole_state
from vlmpack.backends.hf.whole_copy import shared_names
from vlmpack.capabilities.served import SERVED
from vlmpack.encode import Encoder
from vlmpack.forecast.parameters import read_sizes
from vlmpack.forecast.trained import copy_bytes, trained_sizes
from vlmpack.recipe.schema import ModelSection, ParallelismSection

CASES = [
    (family, way)
    for family in FAMILIES
    for way in whole_answers.WAYS
    if way == "full"
    or (way == "frozen" and family not in TEXT_FAMILIES)
    or (way in ("lora", "dora") and "LoRA" not in SERVED[model_type_of(family)].limits)
]


@pytest.mark.cases(
    quick=("qwen2_5_vl-dora-float32", "nemotron_h-full-float32"),
    slow=(
        "qwen2_5_vl-full-bfloat16",
        "qwen3_vl_moe-dora-bfloat16",
        "gemma4-lora-float32",
        "smolvlm-frozen-bfloat16",
    ),
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "way"), CASES)
def test_a_copy_computes_what_its_model_does(
    family: str, way: str, dtype: str, tmp_path: Path
) -> None:
    """Bit for bit, after a step, which lets the tower's config name the attention of rows."""
    folder = write_family(family, tmp_path)
    engine = make(folder, single_rank(), way, dtype)
    take_step(engine, folder)
    source = engine.vlm.model
    with engine.generation() as model:
        expected = logits(model, folder)
        copy = engine._whole_copy(model)
        found = logits(copy, folder)
        saved = saved_buffers(folder, whole_state(copy, keep=True))
        for name in saved:
            copy.get_buffer(name).zero_()
        spoilt = logits(copy, folder)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert shared_names(copy) == shared_names(source)
    assert not any(parameter.requires_grad for parameter in copy.parameters())
    if family == "nemotron_h":
        assert saved, "no buffer to lose"
        assert max(map(relative_l2, spoilt, expected)) > 1e-3, "a lost buffer is not seen"
    held = sum(parameter.nbytes for parameter in copy.parameters())
    section = ModelSection(path=str(folder), dtype=dtype)
    sizes, trained = read_sizes(folder), trained_sizes(engine.policy, Encoder(folder))
    assert sizes is not None
    planned = copy_bytes(sizes, section, ParallelismSection(sharding="fsdp"), 2, trained)
    embedding = copy.get_input_embeddings().weight
    wide = [p for p in copy.parameters() if p.dtype is torch.float32 and p is not embedding]
    # The plan takes a first convolution, tables and routers for matrices: little in a real model.
    uncounted = 0 if dtype == "float32" or way == "dora" else sum(p.numel() * 2 for p in wide)
    assert held <= planned + uncounted
    assert uncounted < 0.25 * planned, "matrices of the decoder lie in float32"
    assert held > 0.8 * planned or way == "dora", "which is counted as if no weight were narrow"


@cache
def one_process(folder: Path, way: str) -> dict[str, Any]:
    return whole_answers.asked(folder, single_rank(), way)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A family's folder, written once."""

    @cache
    def write(family: str) -> Path:
        root = tmp_path_factory.mktemp("families") / family
        root.mkdir()
        made = write_family(family, root)
        if made != root:
            root.rmdir()
            root.symlink_to(made)
        return root

    return write


@pytest.mark.cases(slow=("fsdp-qwen2_5_vl-lora", "fsdp-nemotron_h-full"))
@pytest.mark.parametrize(("family", "way"), CASES)
@pytest.mark.parametrize("sharding", ["fsdp", "none"])
def test_answers_of_two_processes_are_those_of_one(
    sharding: str, family: str, way: str, folder_of: Any
) -> None:
    folder = folder_of(family)
    check_ranks([whole_answers.__file__, folder.parent, family, way, sharding], 2)
    stem = folder.parent / f"{family}-{way}-{sharding}"
    alone = one_process(folder, way)
    for rank in (0, 1):
        found = torch.load(f"{stem}-{rank}.pt")
        assert found["sharded"] == (sharding == "fsdp")
        for when, bound in (("before", 1e-6), ("after", 1e-5)):
            theirs, ours = alone[when], found[when]
            assert ours["answers"] == theirs["answers"]
            assert max(map(relative_l2, ours["logits"], theirs["logits"])) < bound
            assert ours["buffers"].keys() == theirs["buffers"].keys()
            assert all(torch.equal(b, theirs["buffers"][n]) for n, b in ours["buffers"].items())
    assert len(set(alone["after"]["answers"])) > 1, "equal answers could not be mixed up"
    moved = map(relative_l2, alone["after"]["logits"], alone["before"]["logits"])
    assert max(moved) > 1e-3, "nothing was learnt"
