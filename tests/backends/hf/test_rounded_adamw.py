"""AdamW whose steps are rounded at random to bfloat16: its mean is AdamW's, and it resumes bit for
bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import save_engine
from support.engines import ADAMW, EVERYTHING, engine_of, make_stepper, policy, single_rank
from support.families import tiny_family_folder
from support.plans import mode_of
from support.shards import TINY_MODEL, mixed_samples

from vlmpack.backends.hf.rounded_adamw import RoundedAdamW, rounded
from vlmpack.distributed import Ranks
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError
from vlmpack.forecast.memory import memory_figures
from vlmpack.forecast.parameters import read_sizes
from vlmpack.forecast.trained import trained_sizes
from vlmpack.packing import PackCollator
from vlmpack.recipe.schema import ModelSection, ParallelismSection
from vlmpack.training.checkpoint import load_checkpoint, step_folder

LR = 2e-5
ROUNDED = replace(
    EVERYTHING, optim=ADAMW.model_copy(update={"master": "bfloat16_stochastic"}), seed=7
)


def built(chosen: Any = ROUNDED, dtype: str = "bfloat16", folder: Path = TINY_MODEL) -> Any:
    model = ModelSection(path=str(folder), dtype=dtype, attention="segments")
    return engine_of(model, ParallelismSection(), Encoder(folder), single_rank(), chosen)


def row() -> Any:
    encoder = Encoder(TINY_MODEL)
    collate = PackCollator(
        pad_token_id=encoder.pad_token_id, num_position_axes=encoder.num_position_axes
    )
    return collate([encoder.encode(sample.cooked()) for sample in mixed_samples()])


def trained(engine: Any, steps: range) -> list[Any]:
    stepper, found = make_stepper(engine), []
    stepper.schedule = lambda step: 1e-3
    for step in steps:
        found.append(stepper.train(step, [row(), row()], num_skipped=0, stop=False)[0].loss)
    return found


def state(engine: Any) -> dict[tuple[str, str], torch.Tensor]:
    return {(kind, box.name): value.clone() for kind, box, value in engine.owned_slices()}


def weights(seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return 0.02 + 0.03 * torch.rand(4096, generator=draw)


def stepped(start: torch.Tensor, gradients: list[torch.Tensor], seed: int) -> torch.Tensor:
    """The weights after one step for each gradient."""
    parameter, taken = torch.nn.Parameter(start.clone()), [0]
    optimizer = RoundedAdamW(
        [{"params": [parameter]}],
        seed=seed,
        taken=lambda: taken[0],
        lr=LR,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=True,
    )
    for gradient in gradients:
        parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
        taken[0] += 1
    return parameter.detach()


def test_the_mean_of_rounded_numbers_is_exact() -> None:
    exact = torch.cat([weights(0), -weights(1), torch.tensor([0.0, 1.0, -2.0, 3.0e-39])])
    draws = torch.Generator().manual_seed(0)
    many = torch.stack([rounded(exact, draws) for _ in range(2000)])
    assert torch.equal(many.bfloat16().float(), many), "bfloat16 holds them"
    spacing = exact.abs() * 2**-7
    assert ((many - exact).abs() <= spacing + 1e-40).all()
    off = (many.double().mean(0) - exact.double()).abs()
    assert (off <= 5 * spacing.double() / 2000**0.5 / 2 + 1e-40).all()
    assert many[:, :4096].std(0).gt(0).float().mean() > 0.99, "guard"
    nearest = exact.bfloat16().double() - exact.double()
    assert (nearest.abs() > 5 * spacing.double() / 2000**0.5 / 2).float().mean() > 0.5, "control"


def test_what_is_no_number_stays_so() -> None:
    """Every NaN, also those whose bits a sum would make those of infinity or of zero."""
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000, -1, -(0x7FFFFF)], dtype=torch.int64)
    nans = bits.to(torch.int32).view(torch.float32)
    ends = torch.tensor([torch.inf, -torch.inf])
    assert nans.isnan().all(), "guard"
    for seed in range(20):
        draws = torch.Generator().manual_seed(seed)
        assert rounded(nans, draws).isnan().all()
        assert torch.equal(rounded(ends, draws), ends)


@pytest.mark.parametrize("chunk", [1 << 24, 100])
def test_weights_that_lie_column_by_column_are_updated(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those that lie row by row, in the mean of many seeds; a chunk is some rows of them."""
    monkeypatch.setattr("vlmpack.backends.hf.rounded_adamw.CHUNK", chunk)
    start = weights(0).bfloat16().view(64, 64)
    gradient = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    apart = start.t().contiguous().t()
    assert not apart.is_contiguous() and torch.equal(apart, start)
    ways = [
        torch.stack([stepped(each, [gradient], seed) for seed in range(32)]).double().mean(0)
        - start.double()
        for each in (apart, start)
    ]
    towards = [(way * -gradient.sign()).mean() / LR for way in ways]
    assert towards == pytest.approx([1, 1], abs=0.1)
    scalar = stepped(torch.tensor(0.5).bfloat16(), [torch.tensor(1.0)] * 300, 0)
    assert 0 < 0.5 - scalar.item() < 0.05


def test_plain_rounding_moves_no_weight_and_random_rounding_their_mean() -> None:
    """4,096 weights between 0.02 and 0.05, one step of AdamW, the sign of the gradient."""
    start = weights(0).bfloat16()
    gradient = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    plain = torch.nn.Parameter(start.clone())
    plain.grad = gradient.bfloat16()
    torch.optim.AdamW([plain], lr=LR).step()
    assert torch.equal(plain.detach(), start)
    moved = stepped(start, [gradient], 0).float() - start.float()
    assert 100 < moved.ne(0).sum() < 2000
    towards = (moved * -gradient.bfloat16().float().sign()).double()
    assert abs(towards.mean() / LR - 1) < 5 * towards.std() / 64 / LR and towards.std() > LR


def test_many_runs_have_the_mean_of_adamw_in_float64() -> None:
    """An independent computation of ten steps, by the formula of 1711.05101."""
    start = weights(0).bfloat16()
    draw = torch.Generator().manual_seed(1)
    gradients = [torch.randn(4096, generator=draw).bfloat16() for _ in range(10)]
    w, m, v = start.double(), torch.zeros(4096).double(), torch.zeros(4096).double()
    for t, g in enumerate(gradients, 1):
        m, v = 0.9 * m + 0.1 * g.double(), 0.95 * v + 0.05 * g.double() ** 2
        step = (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        w = w * (1 - LR * 0.1) - LR * step
    runs = torch.stack([stepped(start, gradients, seed) for seed in range(64)]).double()
    way, expected = runs.mean(0) - start.double(), w - start.double()
    along = (way @ expected / expected.dot(expected)).item()
    assert along == pytest.approx(1, abs=0.03)
    assert not torch.equal(runs[0], runs[1])
    short = torch.stack([stepped(start, gradients[:9], seed) for seed in range(64)]).double()
    way = short.mean(0) - start.double()
    assert way @ expected / expected.dot(expected) < 0.97, "the control: a step is missing"


def test_a_resumed_run_has_the_bits_of_the_unbroken_one(tmp_path: Path) -> None:
    whole, half = built(), built()
    losses = trained(whole, range(4))
    assert trained(half, range(2)) == losses[:2]
    save_engine(tmp_path, 2, half, keep=1)
    resumed, other = built(), built(replace(ROUNDED, seed=8))
    for engine in (resumed, other):
        load_checkpoint(step_folder(tmp_path, 2), engine, single_rank())
        assert engine.optimizer_steps == 2
    assert trained(resumed, range(2, 4)) == losses[2:]
    expected, found = state(whole), state(resumed)
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert {value.dtype for value in found.values()} == {torch.float32, torch.bfloat16}
    trained(other, range(2, 4))
    differ = [key for key, value in state(other).items() if not torch.equal(value, expected[key])]
    assert len(differ) > 50, "the control: another seed rounds otherwise"


def test_it_goes_on_from_float32_and_float32_from_it() -> None:
    one, plain = built(), built(EVERYTHING)
    trained(one, range(2))
    trained(plain, range(2))
    for source, target in ((one, built(EVERYTHING)), (plain, built())):
        saved = state(source)
        target.load_slices(lambda kind, box, saved=saved: saved[kind, box.name], optimizer_steps=2)
        for (kind, name), value in state(target).items():
            expected = saved[kind, name].to(value.dtype)
            assert torch.equal(value, expected), (kind, name)
        (after,) = trained(target, range(2, 3))
        assert after == pytest.approx(trained(source, range(2, 3))[0], rel=0.02)


def test_what_it_learns_is_near_what_float32_learns() -> None:
    exact, ours = trained(built(EVERYTHING, "float32"), range(8)), trained(built(), range(8))
    assert exact[-1] < 0.8 * exact[0]
    assert ours[-1] == pytest.approx(exact[-1], rel=0.1)


@pytest.mark.parametrize("language", ["full", "lora"])
def test_plan_counts_what_it_holds(language: Any, tmp_path: Path) -> None:
    folder = tiny_family_folder("qwen2_5_vl", tmp_path)
    chosen = replace(
        policy(vision="full" if language == "full" else "frozen", language=language),
        optim=ROUNDED.optim,
    )
    engine = built(chosen, folder=folder)
    trained(engine, range(1))
    held = {"gradients": [p.grad for _, p in engine.parameters() if p.grad is not None]}
    states = engine.optimizer.state.values()
    held["optimizer"] = [x for each in states for x in each.values() if x.ndim]
    sizes = trained_sizes(engine.policy, Encoder(folder))
    narrow = sum(p.numel() for _, p in engine.parameters() if p.dtype is torch.bfloat16)
    assert sizes.rounded == narrow > 0
    assert f"{narrow:,} weights in bfloat16" in engine.description["rounded"]
    figures = memory_figures(
        ModelSection(path=str(folder), dtype="bfloat16"),
        ParallelismSection(),
        read_sizes(folder),
        mode_of(max_row_slots=64, max_row_patches=64),
        global_batch_size=16,
        world_size=1,
        trained=sizes,
    )
    for what in ("gradients", "optimizer"):
        counted = sum(x.numel() * x.element_size() for x in held[what])
        assert getattr(figures, what) == pytest.approx(counted, rel=0.05), what
    if language == "full":  # what is left in float32 has a copy for autocast
        counted = sum(p.numel() * p.element_size() for p in engine.vlm.model.parameters())
        others = sum(p.numel() for _, p in engine.parameters() if p.dtype is torch.float32)
        assert figures.weights == pytest.approx(counted + 2 * others, rel=0.05)


def test_what_cannot_be_rounded_is_refused() -> None:
    with pytest.raises(CapabilityError, match="one process that computes in bfloat16"):
        built(dtype="float32")
    model = ModelSection(path=str(TINY_MODEL), dtype="bfloat16", attention="segments")
    two = Ranks(world_size=2, dp_size=2)
    with pytest.raises(CapabilityError, match="here are 2"):
        engine_of(model, ParallelismSection(), Encoder(TINY_MODEL), two, ROUNDED)
