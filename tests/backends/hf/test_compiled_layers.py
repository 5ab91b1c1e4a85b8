"""Layers compiled by torch.compile have the losses and gradients of eager ones, and no row compiles
them again.

Run in ranks: two steps of compiled layers under FSDP2 and DDP, and of eager ones.

    torchrun --nproc-per-node 2 test_compiled_layers.py FOLDER
"""

from __future__ import annotations

import json
import random
import re
import sys
from inspect import unwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from backends.hf.replicas import encoded_samples
from backends.hf.test_as_near_as_stock import off, step_of
from support.engines import EVERYTHING, engine_of, make_stepper, policy, single_rank
from support.families import tiny_family_folder
from support.forked import check_ranks
from support.runs import relative_l2
from support.shards import TINY_MODEL, mixed_samples

from vlmpack.attention.eager import as_plain
from vlmpack.backends.hf import attention, compiled_layers
from vlmpack.backends.hf.sharding import local_part, local_slice
from vlmpack.distributed import Ranks, start_process_group, stop_process_group
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError
from vlmpack.packing import PackCollator
from vlmpack.recipe.schema import ModelSection, ParallelismSection

LORA = policy("frozen", "frozen", "lora")
"""Frozen embeddings, so the first layer's input needs no gradient."""

pytestmark = pytest.mark.skipif(
    compiled_layers.why_not_compiled() is not None, reason=str(compiled_layers.why_not_compiled())
)


def built(
    folder: Path,
    trained: Any = EVERYTHING,
    ranks: Ranks | None = None,
    sharding: Any = "none",
    **model: Any,
) -> Any:
    """An engine; adapters have an effect from the start."""
    settings = {"dtype": "float32", "attention": "segments", "compile": "layers", **model}
    split = ParallelismSection(sharding=sharding)
    section = ModelSection(path=str(folder), **settings)
    engine = engine_of(section, split, Encoder(folder), ranks or single_rank(), trained)
    for name, value in engine.parameters():
        if "lora_B" in name:
            whole = 0.1 * torch.arange(value.numel()).sin().view(value.shape)
            local_part(value).copy_(whole[local_slice(name, value).index])
    return engine


def rows_of(folder: Path, count: int) -> list[Any]:
    """Random rows of one to six samples, some without an image."""
    encoder, draw = Encoder(folder), random.Random(0)
    samples = [encoder.encode(sample.cooked()) for sample in mixed_samples()]
    collate = PackCollator(
        pad_token_id=encoder.pad_token_id, num_position_axes=encoder.num_position_axes
    )
    return [collate(draw.choices(samples, k=draw.randint(1, 6))) for _ in range(count)]


def check_equal(found: Any, expected: Any, bound: float) -> None:
    assert found[0] == pytest.approx(expected[0], rel=bound)
    assert found[1].keys() == expected[1].keys()
    for name, theirs in expected[1].items():
        assert relative_l2(found[1][name], theirs) <= bound, name


def graphs_of(engine: Any) -> list[int]:
    """How many graphs ran of each kind."""
    return [len(ran) for kind in engine.compiled.kinds for ran in kind.graphs.values()]


CASES: dict[str, tuple[str, Any, dict[str, Any], list[int]]] = {
    "everything": ("qwen2_5_vl", EVERYTHING, {"activation_checkpointing": "full"}, [2, 2]),
    "half": ("qwen2_5_vl", EVERYTHING, {"dtype": "bfloat16"}, [2, 2]),
    "lora": ("qwen2_5_vl", LORA, {"activation_checkpointing": 2}, [2, 2, 2]),
    "hybrid": ("qwen3_5", EVERYTHING, {"activation_checkpointing": "selective"}, [2, 3, 2]),
    "gemma3": ("gemma3", EVERYTHING, {}, [1, 1, 2, 2]),
    "internvl": ("internvl", EVERYTHING, {}, [3, 3, 2]),
    "mixture": ("qwen3_vl_moe", EVERYTHING, {}, [2, 2, 2]),
}


@pytest.mark.cases(slow=("lora", "hybrid"))
@pytest.mark.parametrize("case", CASES)
def test_200_random_rows_compile_each_kind_of_layer_once(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, trained, settings, graphs = CASES[case]
    folder = tiny_family_folder(family, tmp_path)
    monkeypatch.setattr(compiled_layers, "BACKEND", "eager")
    engine, plain = (built(folder, trained, **settings, compile=on) for on in ("layers", False))
    rows = rows_of(folder, 200)
    for number, row in enumerate(rows):
        found = step_of(engine, row)
        if number % 50 == 1:
            check_equal(found, step_of(plain, row), 1e-5)
    assert graphs_of(engine) == graphs
    assert len({row.input_ids.shape[1] for row in rows}) > 50, "guard"
    said = engine.description["compiled layers"]
    assert re.search(rf"DecoderLayer \([\d +]*{graphs[-1]} graphs\)", said), "of the first step"


@pytest.mark.slow
def test_boundaries_as_numbers_compile_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where attention is a part of the graph, whose loop has a row's lengths as a list."""
    monkeypatch.setattr(compiled_layers, "BACKEND", "eager")
    monkeypatch.setattr("vlmpack.backends.hf.attention._attend", unwrap(attention._attend))
    engine = built(TINY_MODEL)
    for row in rows_of(TINY_MODEL, 12):
        step_of(engine, row)
    tower, language = graphs_of(engine)
    assert tower <= 3 < language


def test_inputs_of_a_compiled_layer_are_no_views() -> None:
    whole = torch.arange(12.0, requires_grad=True)
    (plain, same), none = as_plain((whole.view(3, 4), whole)), as_plain(None)
    assert same is whole and none is None and not plain._is_view() and whole.view(3, 4)._is_view()
    plain[1].sum().backward()
    assert whole.grad is not None and whole.grad.tolist() == [0.0] * 4 + [1.0] * 4 + [0.0] * 4


def why_no_compiler() -> str | None:
    """Why inductor cannot run on this machine's CPU; None where it can."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return None if get_cpp_compiler() else "inductor has no C++ compiler here"
    except InvalidCxxCompiler as error:
        return f"inductor needs a C++ compiler here: {error}"


INDUCTOR: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "gemma3": ("gemma3", policy("frozen", "frozen", "full"), {}),
    "images": ("qwen2_5_vl", EVERYTHING, {"activation_checkpointing": "full"}),
    "lora": ("qwen2_5_vl", LORA, {"activation_checkpointing": "selective"}),
    "hybrid": ("qwen3_5", EVERYTHING, {"activation_checkpointing": 2}),
}


@pytest.mark.cases(slow="lora-float32")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", INDUCTOR)
def test_what_inductor_makes_is_as_near_float32_as_eager_layers(
    case: str, dtype: str, tmp_path: Path
) -> None:
    """In float32 they agree. In bfloat16 fused operators round less often than eager ones."""
    if why := why_no_compiler():
        pytest.skip(why)
    family, trained, settings = INDUCTOR[case]
    folder = tiny_family_folder(family, tmp_path)
    engine = built(folder, trained, **settings, dtype=dtype)
    plain = built(folder, trained, compile=False, dtype=dtype)
    exact = built(folder, trained, compile=False)
    distances = []
    for row in rows_of(folder, 6):
        found, expected = step_of(engine, row), step_of(exact, row)
        if dtype == "float32":
            check_equal(found, expected, 2e-5)
        distances.append((off(found, expected)[1], off(step_of(plain, row), expected)[1]))
    assert all(kind.why_eager is None for kind in engine.compiled.kinds)
    assert all(0 < count <= 3 for count in graphs_of(engine))
    ours, theirs = torch.tensor(distances).log().mean(0).exp().tolist()
    assert ours > 0 and (dtype == "float32" or ours < 1.1 * theirs)


def test_a_kind_that_cannot_be_compiled_runs_eager_and_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(graph: Any, examples: Any) -> Any:
        raise OSError("no compiler here")

    monkeypatch.setattr("torch._dynamo.backends.registry.lookup_backend", lambda _: broken)
    engine, plain = built(TINY_MODEL), built(TINY_MODEL, compile=False)
    assert engine.description["compiled layers"] == "counted in the first step"
    for row in rows_of(TINY_MODEL, 2):
        check_equal(step_of(engine, row), step_of(plain, row), 1e-6)
    said = engine.description["compiled layers"]
    assert "4 Qwen2_5_VLDecoderLayer eager (BackendCompilerFailed" in said and "graphs" not in said


def test_what_no_compiler_sees_through_runs_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_layers, "BACKEND", "eager")
    engine = built(TINY_MODEL, policy("frozen", "frozen", "lora", dora=True))
    assert engine.compiled.kinds[1].why_eager.startswith("adapters of DoRA")
    assert engine.compiled.kinds[0].why_eager is None
    with pytest.raises(CapabilityError, match=r"dropout or jitter above 0.*model.compile to false"):
        built(TINY_MODEL, policy("frozen", "frozen", "lora", dropout=0.1))
    monkeypatch.setattr(compiled_layers, "why_not_compiled", lambda: "torch is too old")
    with pytest.raises(CapabilityError, match="torch is too old; set it to false"):
        built(TINY_MODEL)


def steps(compile: Any, ranks: Ranks, sharding: str) -> list[list[float]]:
    """Loss and gradient norm of two steps, of three samples on each of two ranks."""
    trained = policy("full", "full", "lora")
    settings = {"compile": compile, "activation_checkpointing": "full"}
    engine = built(TINY_MODEL, trained, ranks, sharding, **settings)
    stepper = make_stepper(engine)
    mine = encoded_samples()[ranks.rank * 3 : ranks.rank * 3 + 3]
    batches = [PackCollator(pad_token_id=561, num_position_axes=3)(mine)]
    taken = [stepper.train(step, batches, num_skipped=0, stop=False)[0] for step in range(2)]
    assert not compile or all(0 < count <= 3 for count in graphs_of(engine))
    return [[sums.loss, sums.grad_norm] for sums in taken]


def main(folder: Path) -> None:
    """Compiled and eager."""
    compiled_layers.BACKEND = "aot_eager"
    ranks = start_process_group()
    found = [
        steps(compile, ranks, sharding)
        for compile, sharding in (("layers", "fsdp"), ("layers", "none"), (False, "fsdp"))
    ]
    if ranks.is_main:
        (folder / "steps.json").write_text(json.dumps(found))
    stop_process_group()


@pytest.mark.slow
def test_layers_of_replicas_compile_inside_their_units(tmp_path: Path) -> None:
    check_ranks([__file__, tmp_path], 2)
    sharded, replicated, eager = json.loads((tmp_path / "steps.json").read_text())
    assert eager[0] != eager[1]
    for steps in zip(sharded, replicated, eager, strict=True):
        assert steps[0] == pytest.approx(steps[2], rel=1e-5)
        assert steps[1] == pytest.approx(steps[2], rel=1e-5)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
