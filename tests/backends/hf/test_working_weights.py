"""Working weights in bfloat16: what is learned beside them is what autocast learns, bit for bit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import EVERYTHING, engine_of, make_stepper, policy, single_rank
from support.families import FAMILIES as SERVED
from support.families import TEXT_FAMILIES, tiny_family_folder
from support.shards import mixed_samples, text_samples
from torch.utils._python_dispatch import TorchDispatchMode

from vlmpack.backends.hf import engine as engine_module
from vlmpack.backends.hf.working_weights import WorkingWeights
from vlmpack.encode import Encoder
from vlmpack.packing import PackCollator
from vlmpack.recipe.schema import ModelSection, ParallelismSection

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "internvl")
OTHERS = sorted({*SERVED, *TEXT_FAMILIES} - {"qwen2_5_vl"})
STEPS, SEEDS = 30, 3
ADAPTERS = policy(vision="frozen", projector="full", language="lora")
DORA = policy(vision="frozen", projector="full", language="lora", dora=True)


class AutocastAlone:
    """In the place of working weights: autocast casts each weight in each micro-batch."""

    weights = ()

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def refresh(self) -> None: ...


def built(folder: Path, working: Any, patch: pytest.MonkeyPatch, **given: Any) -> Any:
    patch.setattr(engine_module, "WorkingWeights", working)
    model = ModelSection(
        path=str(folder),
        dtype=given.pop("dtype", "bfloat16"),
        attention="segments",
        activation_checkpointing=given.pop("recompute", "none"),
    )
    chosen = given.pop("policy", EVERYTHING)
    return engine_of(model, ParallelismSection(), Encoder(folder), single_rank(), chosen, **given)


def batches_of(folder: Path, seed: int, steps: int) -> list[list[Any]]:
    """Two rows for each step."""
    encoder, draw = Encoder(folder), torch.Generator().manual_seed(seed)
    raw = mixed_samples() if encoder.takes_images else text_samples()
    samples = [encoder.encode(sample.cooked()) for sample in raw]
    collate = PackCollator(
        pad_token_id=encoder.pad_token_id, num_position_axes=encoder.num_position_axes
    )

    def row() -> Any:
        some = torch.randperm(len(samples), generator=draw)[:3].tolist()
        return collate([samples[place] for place in some])

    return [[row(), row()] for _ in range(steps)]


def trained(engine: Any, steps: list[list[Any]]) -> list[tuple[Any, ...]]:
    stepper, found = make_stepper(engine), []
    stepper.schedule = lambda step: 1e-3
    for number, rows in enumerate(steps):
        sums, _ = stepper.train(number, rows, num_skipped=0, stop=False)
        found.append((sums.loss, sums.grad_norm))
    return found


def state(engine: Any) -> dict[tuple[str, str], torch.Tensor]:
    return {(kind, box.name): value.clone() for kind, box, value in engine.owned_slices()}


def assert_alike(folder: Path, seed: int, steps: int, patch: Any, **given: Any) -> Any:
    ours = built(folder, WorkingWeights, patch, **given)
    stock = built(folder, AutocastAlone, patch, **given)
    assert len(ours.working.weights) > 10 and not stock.working.weights, "guard"
    rows = batches_of(folder, seed, steps)
    losses = trained(ours, rows)
    assert losses == trained(stock, rows) and len(set(losses)) == steps
    held, expected = state(ours), state(stock)
    assert held.keys() == expected.keys()
    for key, value in held.items():
        assert value.dtype is torch.float32 and torch.equal(value, expected[key]), key
    return ours


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_learns_what_autocast_learns(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_family_folder(family, tmp_path)
    for seed in range(SEEDS):
        assert_alike(folder, seed, STEPS, monkeypatch)


@pytest.mark.parametrize(
    "family", ["qwen2_5_vl", *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS)]
)
def test_a_few_steps_are_those_of_autocast(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, norms, weights and moments have the very bits, and only the parameter is saved."""
    assert_alike(tiny_family_folder(family, tmp_path), 0, 2, monkeypatch)


@pytest.mark.slow
def test_so_are_those_with_layers_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_family_folder("qwen3_5", tmp_path)
    for recompute in ("selective", "full"):
        assert_alike(folder, 0, 2, monkeypatch, recompute=recompute)


def test_adapters_are_those_of_autocast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_family_folder("qwen2_5_vl", tmp_path)
    ours = assert_alike(folder, 0, 3, monkeypatch, policy=ADAPTERS)
    assert adapters_beside(ours) > 10


@pytest.mark.slow
def test_adapters_of_dora_stay_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms are taken of them."""
    ours = built(
        tiny_family_folder("qwen2_5_vl", tmp_path), WorkingWeights, monkeypatch, policy=DORA
    )
    assert ours.working.weights and not adapters_beside(ours)


def adapters_beside(engine: Any) -> int:
    """How many parameters of adapters have a working weight."""
    adapters = {id(p) for name, p in engine.parameters() if ".lora_" in name}
    assert len(adapters) > 10
    return sum(id(p) in adapters for p in engine.working.parameters)


class Casts(TorchDispatchMode):
    """Counts casts of large float32 tensors to bfloat16."""

    def __init__(self, shapes: set[tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes, self.seen = shapes, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._foreach_copy_.default:
            self.seen["together"] += 1
        if func is torch.ops.aten._to_copy.default and tuple(made.shape) in self.shapes:
            self.seen[str(made.dtype)] += made.dtype is torch.bfloat16
        return made


def test_weights_are_cast_once_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_family_folder("qwen2_5_vl", tmp_path)
    seen = {}
    for working in (WorkingWeights, AutocastAlone):
        engine = built(folder, working, monkeypatch)
        shapes = {tuple(p.shape) for n, p in engine.parameters() if "mlp" in n and p.ndim == 2}
        with Casts(shapes) as casts:
            trained(engine, batches_of(folder, 0, 1))
        seen[working] = casts.seen
    ours, stock = seen[WorkingWeights], seen[AutocastAlone]
    assert ours["together"] == 1 and not ours["torch.bfloat16"]
    assert stock["together"] == 0 and stock["torch.bfloat16"] >= 2 * 8, "the control: every row"


def test_a_step_reads_weights_that_were_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of float32 goes on in bfloat16, and the other way round."""
    folder = tiny_family_folder("qwen2_5_vl", tmp_path)
    rows = batches_of(folder, 0, 4)
    one, other, stock = (
        built(folder, kind, monkeypatch) for kind in (WorkingWeights, WorkingWeights, AutocastAlone)
    )
    trained(one, rows[:2])
    saved = state(one)
    for engine in (other, stock):
        engine.load_slices(lambda kind, box: saved[kind, box.name], optimizer_steps=2)
    assert trained(other, rows[2:]) == trained(one, rows[2:]) == trained(stock, rows[2:])


def test_stale_weights_and_lost_gradients_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controls."""
    folder = tiny_family_folder("qwen2_5_vl", tmp_path)

    class Stale(WorkingWeights):
        def refresh(self) -> None:
            if not getattr(self, "cast", False):
                super().refresh()
            self.cast = True

    class Losing(WorkingWeights):
        def refresh(self) -> None:
            super().refresh()
            self.weights[0].requires_grad_(False)

    for wrong in (Stale, Losing):
        monkeypatch.setitem(assert_alike.__globals__, "WorkingWeights", wrong)
        with pytest.raises(AssertionError):
            assert_alike(folder, 0, 3, monkeypatch)


def test_an_engine_in_float32_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_family_folder("qwen2_5_vl", tmp_path)
    assert built(folder, WorkingWeights, monkeypatch).working is not None
    assert built(folder, WorkingWeights, monkeypatch, dtype="float32").working is None
