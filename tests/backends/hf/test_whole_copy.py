"""The whole copy of a model in shards answers as the model itself, with buffers and adapters.

Run in ranks: answers of a model before and after a step, however its weights lie.

    torchrun --nproc-per-node 2 test_whole_copy.py FOLDER FAMILY WAY SHARDING

FOLDER/FAMILY is a model folder. Writes FOLDER/<family>-<way>-<sharding>-<rank>.pt, what `asked`
found there.
"""

from __future__ import annotations

import sys
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import engine_of, make_stepper, policy, single_rank
from support.families import FAMILIES, ROUTED, TEXT_FAMILIES, tiny_family_folder
from support.forked import check_ranks
from support.layouts import BINS, SGD_LR, use_sgd
from support.runs import relative_l2
from support.shards import mixed_samples, text_samples
from torch import Tensor

from vlmpack.backends.boxes import Kind, TensorSlice
from vlmpack.backends.hf.sharding import whole_state
from vlmpack.backends.hf.whole_copy import shared_names
from vlmpack.backends.policy import is_adapter
from vlmpack.backends.skeleton import model_skeleton
from vlmpack.distributed import Ranks, start_process_group, stop_process_group
from vlmpack.encode import Encoder
from vlmpack.evaluation.generation import answer_over_ranks
from vlmpack.evaluation.predictions import Question
from vlmpack.families.base import stock_arguments
from vlmpack.families.registry import family_of
from vlmpack.forecast.parameters import read_sizes
from vlmpack.forecast.trained import copy_bytes, trained_sizes
from vlmpack.packing import PackCollator
from vlmpack.recipe.schema import ModelSection, ParallelismSection

NUM_NEW = 6
ADAPTERS = {"vision": "frozen", "projector": "frozen", "language": "lora"}
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "frozen": {"vision": "frozen"},
    "lora": ADAPTERS,
    "dora": {**ADAPTERS, "dora": True},
    "experts": {**ADAPTERS, "targets": ("attention", "experts")},
}
"""What is trained."""


def write_family(family: str, folder: Path) -> Path:
    """A tiny model, in an empty folder, whose saved buffers are others than its class makes."""
    made = tiny_family_folder(family, folder)
    if made == folder:
        weights = load_file(str(made / "model.safetensors"))
        draw = torch.Generator().manual_seed(0)
        for name in saved_buffers(made, weights):
            weights[name] = weights[name] + 0.3 * torch.rand(weights[name].shape, generator=draw)
        save_file(weights, str(made / "model.safetensors"), metadata={"format": "pt"})
    return made


def saved_buffers(folder: Path, weights: dict[str, Tensor]) -> list[str]:
    """Names in a folder's file, which may have other prefixes than the model."""
    model = model_skeleton(family_of(folder).auto_class(), folder)
    kept = {name for name, _ in model.named_buffers()} & model.state_dict().keys()
    ends = {name.rpartition(".")[2] for name in kept}
    return [name for name in weights if name.rpartition(".")[2] in ends]


def _some_training(kind: Kind, box: TensorSlice) -> Tensor | None:
    """Values of B, which is zero at first, so that adapters that are lost are seen."""
    if kind != "model" or not is_adapter(box.name) or ".lora_B." not in box.name:
        return None
    draw = torch.Generator().manual_seed(zlib.crc32(box.name.encode()))
    return 0.2 * torch.randn(box.shape, generator=draw)[box.index]


def make(folder: Path, ranks: Ranks, way: str, dtype: str = "float32", **split: Any) -> Any:
    """An engine, with adapters that say something."""
    model: Any = {"path": str(folder), "dtype": dtype, "attention": "segments"}
    parts = (ModelSection(**model), ParallelismSection(**split), Encoder(folder), ranks)
    engine = engine_of(*parts, policy(**WAYS[way]))
    engine.load_slices(_some_training, optimizer_steps=0)
    return engine


def take_step(engine: Any, folder: Path) -> None:
    """A large one, by SGD."""
    encoder, ranks = Encoder(folder), engine.ranks
    encoded = [encoder.encode(sample) for sample in cooked(encoder)]
    stepper = make_stepper(engine, max_grad_norm=None)
    use_sgd(engine)
    stepper.schedule = lambda step: 10 * SGD_LR
    collate = PackCollator(
        pad_token_id=encoder.pad_token_id, num_position_axes=encoder.num_position_axes
    )
    mine = BINS[ranks.dp_rank :: ranks.dp_size]
    batches = [collate([encoded[index] for index in bin_]) for bin_ in mine]
    stepper.train(0, batches, num_skipped=0, stop=False)


def cooked(encoder: Encoder) -> list[Any]:
    """Six samples."""
    raw = mixed_samples() if encoder.takes_images else text_samples()
    return [sample.cooked() for sample in raw]


def logits(model: Any, folder: Path) -> list[Tensor]:
    """Of two samples, by the class's own forward pass."""
    encoder = Encoder(folder)
    given = [
        stock_arguments(encoder.family, encoder.encode(sample), **encoder.placeholders)
        for sample in cooked(encoder)[:2]
    ]
    with torch.no_grad():
        return [model(use_cache=False, **each).logits.float() for each in given]


def asked(folder: Path, ranks: Ranks, way: str, **split: Any) -> dict[str, Any]:
    """Answers and logits before and after a step."""
    engine, encoder = make(folder, ranks, way, **split), Encoder(folder)
    questions = [Question.from_sample(sample) for sample in cooked(encoder)]
    found: dict[str, Any] = {"sharded": engine.sharded}
    for when in ("before", "after"):
        if when == "after":
            take_step(engine, folder)
        answers = answer_over_ranks(
            engine, encoder, questions, ranks=ranks, batch_size=2, max_new_tokens=NUM_NEW
        )
        with engine.generation() as model:
            found[when] = {"answers": answers, "logits": logits(model, folder)}
            found[when]["buffers"] = {name: b.clone() for name, b in model.named_buffers()}
    return found


def main(folder: Path, family: str, way: str, sharding: str) -> None:
    """One case."""
    ranks = start_process_group()
    found = asked(folder / family, ranks, way, sharding=sharding)
    torch.save(found, folder / f"{family}-{way}-{sharding}-{ranks.rank}.pt")
    stop_process_group()


CASES = [
    (family, way)
    for family in FAMILIES
    for way in WAYS
    if way == "full"
    or (way == "frozen" and family not in TEXT_FAMILIES)
    or way == "lora"
    or (way == "dora" and family not in ("glm4_moe", "glm4_moe_lite", "deepseek_v3"))
    or (way == "experts" and family in ROUTED)
]


@pytest.mark.cases(
    quick="nemotron_h-full-float32",
    slow=(
        "qwen2_5_vl-dora-float32",
        "qwen2_5_vl-full-bfloat16",
        "qwen3_vl_moe-dora-bfloat16",
        "gemma4-lora-float32",
        "qwen3_vl_moe-experts-float32",
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
    # A copy begins at multiples of 64 bytes, what a file held does not; and some CPUs' products
    # add in another order then.
    for parameter in source.parameters():
        parameter.data = parameter.data.clone()
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
    return asked(folder, single_rank(), way)


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
    check_ranks([__file__, folder.parent, family, way, sharding], 2)
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
