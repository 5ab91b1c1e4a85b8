"""A step that is not finite: what is kept, what is skipped, what is written of it, when it ends a
run."""

from __future__ import annotations

import io
import json
import math
import tarfile
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import stored_tensors
from support.engines import engine_of
from support.forked import run_ranks
from support.pairs import raw_pairs, write_pairs
from support.planted import PLACES, leader_of, leads_with_image, planted
from support.recipes import changed, copy_samples, rows, run_settings, write_recipe
from support.shards import ROOT
from torch import Tensor, nn

from vlmpack import Callback, Event, finetune, replay
from vlmpack.activity import ACTIVITY
from vlmpack.api import resolve
from vlmpack.backends.hf.engine import HFEngine
from vlmpack.build.engine import policy_of
from vlmpack.build.look import open_recipe, open_train
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.loading.loader import GlobalStep
from vlmpack.distributed import Ranks
from vlmpack.errors import ExtensionError, NonFiniteError
from vlmpack.proof.audit import audit_run
from vlmpack.training.bad_steps import MOST_IN_A_ROW, WINDOW, BadSteps
from vlmpack.training.checkpoint import list_checkpoints
from vlmpack.training.metrics import read_rows
from vlmpack.training.objective import SFT
from vlmpack.training.run_dir import RunDir
from vlmpack.training.step import (
    MOST_ROWS,
    NonFiniteStep,
    Pass,
    Schedule,
    StepMemory,
    Stepper,
    StepSums,
)

PLANTED = ROOT / "tests/support/planted.py"
STEPS = 9
CLOSE = 2e-5
"""Of weights whose gradients were summed in another order; see `support.engines.make_stepper`."""
BAD = {2: "pixels", 4: "layer", 5: "objective", 8: "gradient"}
"""Step, counted from 1 -> the place of its fault; 4 and 5 are two in a row."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("bad")
    values = run_settings(
        root,
        training__max_steps=STEPS,
        training__micro_batch_size=2,
        training__on_non_finite="skip",
        checkpoint__interval_steps=3,
    )
    copy_samples(ROOT / "assets/digits/train-000000.tar", Path(values["data"]["train"]), 40)
    return values


@pytest.fixture(scope="module")
def steps(settings: dict[str, Any]) -> list[GlobalStep]:
    """The run's global batches, read apart from any run."""
    train, _ = open_recipe(resolve(settings, {}))
    return [*train.batches(train.start(), rank=0, dp=1, max_steps=STEPS)]


@pytest.fixture(scope="module")
def plants(steps: list[GlobalStep]) -> dict[str, str]:
    """Key -> place of the fault: of each bad step's first sample that leads its row with an
    image."""
    found = {leader_of(steps[step - 1]): place for step, place in BAD.items()}
    assert sorted(found.values()) == sorted(PLACES)
    others = [k for n, step in enumerate(steps, 1) if n not in BAD for k in keys_of(step)]
    assert not found.keys() & set(others), "guard: each fault is met once"
    return found


def keys_of(step: GlobalStep) -> list[str]:
    return [sample.key for micro in step.micro_batches for sample in micro.samples]


def literal_loop(
    settings: dict[str, Any], steps: Iterable[GlobalStep], bad: Collection[int] = BAD
) -> dict[str, Tensor]:
    """The weights after a loop that does not call the optimizer in bad steps."""
    recipe = resolve(settings, {})
    _, encoder = open_recipe(recipe)
    engine = engine_of(recipe.model, recipe.parallelism, encoder, Ranks(), policy_of(recipe))
    rate = Schedule(recipe.optim, recipe.training.max_steps or 0)
    for number, step in enumerate(steps, 1):
        if number in bad:
            continue
        batches = [micro.batch for micro in step.micro_batches]
        engine.zero_gradients()
        engine.forward_backward(SFT.step_with(), iter(batches), num_microbatches=len(batches))
        labels = torch.tensor(sum(b.num_label_tokens for b in batches), dtype=torch.float64)
        engine.finish_gradients(labels, recipe.optim.max_grad_norm)
        engine.step(rate(number - 1))
    return {name: p.detach().clone() for name, p in engine.parameters()}


def tensors_of(run_dir: Path) -> dict[str, Tensor]:
    return stored_tensors(list_checkpoints(run_dir / "checkpoints")[-1])


class Break(Callback):
    """Fails at a step, which is saved before the run ends."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, event: Event) -> None:
        if event.step == self.step:
            raise RuntimeError("broken off")


@pytest.mark.slow
def test_a_run_with_skipped_steps_is_a_loop_without_them_and_resumes(
    settings: dict[str, Any], steps: list[GlobalStep], plants: dict[str, str], tmp_path: Path
) -> None:
    """Bit for bit, whole or broken off between two bad steps in a row."""
    whole = changed(settings, run_dir=str(tmp_path / "whole"))
    finetune(whole, objective=planted(plants))
    expected, found = literal_loop(settings, steps), tensors_of(tmp_path / "whole")
    assert len(expected) > 50
    for name, weight in expected.items():
        assert torch.equal(found[f"model.{name}"], weight), name
    unskipped = literal_loop(settings, steps, bad=())
    off = max(float((unskipped[name] - expected[name]).abs().max()) for name in expected)
    assert off > 20 * CLOSE, "guard: the steps would have moved the weights"
    broken = changed(settings, run_dir=str(tmp_path / "broken"))
    with pytest.raises(ExtensionError, match="broken off"):
        finetune(broken, objective=planted(plants), callbacks=[Break(4)])
    finetune(broken, objective=planted(plants))
    resumed = tensors_of(tmp_path / "broken")
    assert found.keys() == resumed.keys()
    assert all(torch.equal(found[name], resumed[name]) for name in found)
    columns = ("step", "loss", "grad_norm", "learning_rate", "num_samples", "num_skipped")
    assert rows(tmp_path / "whole", *columns) == rows(tmp_path / "broken", *columns)
    for name in ("whole", "broken"):
        check_accounts(tmp_path / name, steps, plants)


def copies(shard: Path, count: int) -> None:
    """A shard of so many samples, each with a key of its own: those of the digits in turn."""
    with tarfile.open(ROOT / "assets/digits/train-000000.tar") as tar:
        members = [(entry.name, tar.extractfile(entry)) for entry in tar]
        parts = [(name.partition("."), file.read()) for name, file in members if file is not None]
    by_key: dict[str, list[tuple[str, bytes]]] = {}
    for (key, dot, ending), data in parts:
        by_key.setdefault(key, []).append((dot + ending, data))
    samples = [*by_key.values()]
    with tarfile.open(shard, "w") as out:
        for number in range(count):
            for ending, data in samples[number % len(samples)]:
                entry = tarfile.TarInfo(f"copy{number:06d}{ending}")
                entry.size = len(data)
                out.addfile(entry, io.BytesIO(data))


@pytest.mark.parametrize(
    ("length", "apart", "transient_each", "replayed"),
    [
        pytest.param(300, 50, 6, 0, marks=pytest.mark.slow, id="300"),
        pytest.param(10_000, 83, 6, 120, marks=pytest.mark.soak, id="10000"),
    ],
)
def test_a_long_run_ends_by_itself(
    tmp_path: Path, length: int, apart: int, transient_each: int, replayed: int
) -> None:
    """Faults in one step of `apart`, every sixth of them transient. The weights are those of a loop
    that leaves these steps out, bit for bit."""
    values = run_settings(
        tmp_path,
        training__max_steps=length,
        training__micro_batch_size=2,
        training__global_batch_size=2,
        training__on_non_finite="skip",
        training__max_skipped_steps=20,
        training__dump_pixels=True,
        checkpoint__interval_steps=500,
    )
    copies(Path(values["data"]["train"]), 2 * length)

    def batches() -> Iterator[GlobalStep]:
        train, _ = open_recipe(resolve(values, {}))
        return train.batches(train.start(), rank=0, dp=1, max_steps=length)

    plants, bad, transient = dict[str, str](), list[int](), list[str]()
    rows_of = dict[int, Any]()
    for number, step in enumerate(batches(), 1):
        row = step.micro_batches[0].batch
        if number % apart == apart // 2:
            place = PLACES[len(bad) % len(PLACES)]
            if not leads_with_image(row):
                place = "layer"  # its first sample has no image
            plants[row.keys[0]] = place
            bad.append(number)
            rows_of[number] = row
            transient += [row.keys[0]] if len(bad) % transient_each == 0 else []
    assert len(plants) == len(bad) == length // apart and transient
    finetune(values, objective=planted(plants, transient))
    run_dir = RunDir(Path(values["run_dir"]))
    skipped = [row["step"] for row in read_rows(run_dir.metrics) if "skipped" in row]
    assert skipped == bad
    expected, found = literal_loop(values, batches(), bad), tensors_of(run_dir.path)
    for name, weight in expected.items():
        assert torch.equal(found[f"model.{name}"], weight), name
    for step, key in zip(bad, plants, strict=True):
        dump = json.loads((run_dir.dumps / f"step-{step:08d}.json").read_text())
        assert dump["repeats"] is (key not in transient)
        pixels = load_file(run_dir.dumps / f"step-{step:08d}.rank-0.safetensors")
        assert torch.equal(pixels.pop("0.input_ids"), rows_of[step].input_ids)
        if rows_of[step].media is not None:
            assert torch.equal(pixels.pop("0.pixel_values"), rows_of[step].media.pixel_values)
        assert not pixels
    assert any(row.media is not None for row in rows_of.values())
    for step, key in [*zip(bad, plants, strict=True)][:replayed]:
        path = run_dir.dumps / f"step-{step:08d}.json"
        again = replay(path, objective=planted(plants, transient), at_checkpoint=True)
        if key in transient:
            continue  # it comes once in a process, and this is another one's first time
        assert again.outcome == "comes again" and again.first is not None
        assert [name.split()[0] for name in again.alone] == [key]


def check_accounts(folder: Path, steps: list[GlobalStep], plants: dict[str, str]) -> None:
    """metrics.jsonl, ledger, record, dumps and result tell of the skipped steps alike."""
    by_step = {row["step"]: row for row in read_rows(folder / "metrics.jsonl")}
    assert {step for step, row in by_step.items() if "skipped" in row} == set(BAD)
    for step, row in by_step.items():
        planned = len(keys_of(steps[step - 1]))
        bad = step in BAD
        assert (row["num_samples"], row["num_skipped"]) == ((0, planned) if bad else (planned, 0))
        assert (row["loss"] is None, row["grad_norm"] is None) == (bad, bad)
        assert row.get("skipped", False) is bad
    run_dir = RunDir(folder)
    lines = Ledger(run_dir.data_errors).lines()
    listed = [key for step in BAD for key in keys_of(steps[step - 1])]
    assert sorted(line["key"] for line in lines) == sorted(listed)
    assert {line["class"] for line in lines} == {"skipped_step"}
    audit = audit_run(run_dir, open_train(folder)[0])
    assert audit.problems == [] and sum(e.skipped for e in audit.epochs) == len(listed)
    for step in BAD:
        dump = json.loads((run_dir.dumps / f"step-{step:08d}.json").read_text())
        names = [key for one in dump["micro_batches"] for _, key in one["samples"]]
        assert (dump["step"], dump["repeats"]) == (step, True) and names == keys_of(steps[step - 1])
    result = json.loads(run_dir.result.read_text())
    assert result["skipped_samples"] == len(listed)
    assert result["skipped_steps"] == len(BAD)


def test_a_fault_that_does_not_come_again_is_said(
    settings: dict[str, Any], plants: dict[str, str], tmp_path: Path
) -> None:
    chosen = {key: place for key, place in plants.items() if place == "objective"}
    run = changed(settings, run_dir=str(tmp_path / "run"), training__on_non_finite="stop")
    with pytest.raises(NonFiniteError, match=r"step 5: loss sum nan.* in place, is finite: \d"):
        finetune(run, objective=planted(chosen, transient=chosen))
    dump = json.loads((tmp_path / "run/dumps/step-00000005.json").read_text())
    assert dump["repeats"] is False
    assert dump["first"]["loss_sum"] == "nan" and dump["again"]["loss_sum"] > 0


@pytest.mark.slow
def test_too_many_skipped_steps_end_a_run(
    settings: dict[str, Any], plants: dict[str, str], tmp_path: Path
) -> None:
    run = changed(settings, run_dir=str(tmp_path / "run"), training__max_skipped_steps=3)
    with pytest.raises(NonFiniteError, match=r"max_skipped_steps is 3 .*\(2, 4, 5\)"):
        finetune(run, objective=planted(plants))
    assert (tmp_path / "run/dumps/step-00000008.json").is_file()


LAYOUTS = {
    "ddp": {},
    "fsdp": {"parallelism.sharding": "fsdp"},
    "tp": {"model.backend": "mcore", "parallelism.tensor": 2},
    "pp": {"model.backend": "mcore", "parallelism.pipeline": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[pytest.mark.megatron] if "model.backend" in values else [])
        for name, values in LAYOUTS.items()
    ],
)
def test_all_ranks_skip_alike(
    settings: dict[str, Any],
    steps: list[GlobalStep],
    plants: dict[str, str],
    tmp_path: Path,
    layout: str,
) -> None:
    """The weights are those of the loop in one process, up to the order of sums."""
    values = changed(settings, run_dir=str(tmp_path / "run"))
    recipe = write_recipe(tmp_path / "recipe.json", values)
    chosen = {k: "pixels" if place == "layer" else place for k, place in plants.items()}
    words = [f"{key}={value}" for key, value in LAYOUTS[layout].items()]
    command = [str(PLANTED), str(recipe), json.dumps(chosen), *words]
    done = run_ranks(command, 2, timeout=300)
    assert done.codes == [0, 0], done.stderr[-3000:]
    check_accounts(tmp_path / "run", steps, plants)
    expected, found = literal_loop(settings, steps), tensors_of(tmp_path / "run")
    for name, weight in expected.items():
        torch.testing.assert_close(found[f"model.{name}"], weight, rtol=0, atol=CLOSE)


def budget(tmp_path: Path, most: int, *, skips: bool = True, writes: bool = False) -> Any:
    """What decides, without its files unless it `writes`."""
    ledger = Ledger(None)
    bad = BadSteps(ledger=ledger, ranks=Ranks(), folder=tmp_path, skips=skips, most=most, seed=0)
    if not writes:
        bad._write = lambda *args: None  # type: ignore[method-assign,misc]
    sums = StepSums(totals={"loss_sum": math.nan}, loss=math.nan, grad_norm=1.0, num_samples=2)
    found = NonFiniteStep("it", first=Pass(sums, ()), again=Pass(sums, ()), seconds=0.0)
    data = SimpleNamespace(micro_batches=(), epoch=0, batch=0)
    return lambda step: bad.judge(found, cast(Any, data), step)


def test_the_budget_is_of_the_last_thousand_steps(tmp_path: Path) -> None:
    judge = budget(tmp_path, most=2)
    for step in (1, WINDOW):
        assert judge(step).is_skipped
    assert judge(WINDOW + 1).is_skipped, "step 1 has left the window"
    with pytest.raises(NonFiniteError, match="max_skipped_steps is 2"):
        judge(WINDOW + 2)


def test_ten_in_a_row_always_end_a_run(tmp_path: Path) -> None:
    judge = budget(tmp_path, most=100)
    judge(3)
    for step in range(5, 5 + MOST_IN_A_ROW - 1):
        judge(step)
    with pytest.raises(NonFiniteError, match="10 steps in a row"):
        judge(5 + MOST_IN_A_ROW - 1)


@pytest.mark.parametrize("skips", [True, False])
def test_a_dump_that_cannot_be_written_hides_no_fault(tmp_path: Path, skips: bool) -> None:
    """A full or read-only disk: the run ends, and says what the step was first of all."""
    (tmp_path / "dumps").write_text("no folder")
    judge = budget(tmp_path / "dumps", most=5, skips=skips, writes=True)
    with pytest.raises(NonFiniteError, match=r"^it\. Stopped .* Its dump could not be written: "):
        judge(3)


def test_other_files_among_dumps_are_left_alone(tmp_path: Path) -> None:
    """Such as the output of a replay: a save must not fail over it."""
    bad = BadSteps(ledger=Ledger(None), ranks=Ranks(), folder=tmp_path, skips=True, most=5, seed=0)
    for name in ("step-00000012", "step-00000003", "step-00000003.found", "step-x"):
        (tmp_path / f"{name}.json").touch()
    assert bad.dumped() == [3, 12]


class OneIsIll(Ranks):
    """Another rank, whose own gradient norm alone is no number."""

    def sum_over_world(self, values: Tensor) -> Tensor:
        return values if values.dim() else values + math.nan

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]


def test_a_norm_that_is_no_number_on_one_rank_is_none_on_all(
    settings: dict[str, Any], steps: list[GlobalStep]
) -> None:
    """Under DDP each computes it itself. Others would take the step, and wait for it for ever."""
    recipe = resolve(settings, {})
    _, encoder = open_recipe(recipe)
    engine = engine_of(recipe.model, recipe.parallelism, encoder, Ranks(), policy_of(recipe))
    rate, batches = Schedule(recipe.optim, STEPS), [one.batch for one in steps[0].micro_batches]
    for ranks in (OneIsIll(world_size=2), Ranks()):
        stepper = Stepper(
            engine=engine, objective=SFT, schedule=rate, max_grad_norm=1.0, ranks=ranks
        )
        if isinstance(ranks, OneIsIll):
            with pytest.raises(NonFiniteStep, match="gradient norm nan"):
                stepper.train(0, batches, num_skipped=0, stop=False)
        else:
            assert stepper.train(0, batches, num_skipped=0, stop=False)[0].is_finite, "guard"


@pytest.mark.parametrize("rows", [MOST_ROWS, 1024])
def test_a_message_does_not_name_the_samples_of_a_thousand_rows(rows: int) -> None:
    """Where the gradient alone is not finite, any of them may be the cause."""
    sums = StepSums(totals={"loss_sum": 1.0}, loss=1.0, grad_norm=math.inf)
    made, names = Pass(sums, [{}] * rows), [[f"a{n}", f"b{n}"] for n in range(rows)]
    stepper = cast(Any, SimpleNamespace(ranks=Ranks()))
    said = Stepper._non_finite_words(stepper, 0, names, made, made)
    assert said.count("; ") == MOST_ROWS - 1 and "concerned: a0, b0; a1, b1; " in said
    assert said.endswith("a7, b7" if rows == MOST_ROWS else " 1016 more, which the dump has")


@pytest.fixture
def overflow(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes the gradient of one step NaN each time that it is computed."""
    original = HFEngine.finish_gradients

    def at(step: int) -> None:
        def finish(self: Any, divisor: Tensor, max_norm: float | None) -> Tensor:
            if ACTIVITY.step == step:
                for _, parameter in self.parameters():
                    parameter.grad.fill_(math.nan)
            return original(self, divisor, max_norm)

        monkeypatch.setattr(HFEngine, "finish_gradients", finish)

    return at


@pytest.mark.slow
def test_pairs_are_looked_at_in_the_first_step_that_counts(
    tmp_path: Path, overflow: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A skipped first step leaves the policy where its reference is."""
    shard = write_pairs(tmp_path / "pairs.tar", raw_pairs(0))
    values = run_settings(
        tmp_path,
        data__train=str(shard),
        objective__name="dpo",
        training__micro_batch_size=1,
        training__global_batch_size=2,
        training__on_non_finite="skip",
    )
    overflow(1)
    with caplog.at_level("INFO", "vlmpack"):
        finetune(values)
    first, second, third = rows(values["run_dir"], "loss")
    assert first == (None,)
    assert second[0] == pytest.approx(math.log(2), abs=1e-6) != third[0]
    said = [record.getMessage() for record in caplog.records]
    looked = [n for n, text in enumerate(said) if "policy and reference say the same" in text]
    skipped = [n for n, text in enumerate(said) if text.startswith("skipped")]
    assert len(looked) == len(skipped) == 1 and looked > skipped


@pytest.mark.slow
def test_a_captured_decoder_goes_on_after_a_skipped_step(
    tmp_path: Path, overflow: Callable[[int], None]
) -> None:
    values = run_settings(
        tmp_path,
        packing__mode="online",
        packing__max_tokens=512,
        training__micro_batch_size=1,
        training__global_batch_size=2,
        training__max_steps=5,
        training__on_non_finite="skip",
    )
    overflow(3)
    plain = finetune(changed(values, run_dir=str(tmp_path / "plain"))).run_dir
    captured = finetune(
        changed(values, run_dir=str(tmp_path / "captured"), training__cuda_graphs="decoder")
    ).run_dir
    for ours, theirs in zip(
        *(rows(of, "loss", "grad_norm") for of in (plain, captured)), strict=True
    ):
        assert ours == (None, None) == theirs or ours == pytest.approx(theirs, rel=1e-5)
    assert [row[0] is None for row in rows(plain, "loss")] == [False, False, True, False, False]


class Counting(nn.Module):
    """Writes into one buffer and replaces another; both are no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.register_buffer("none", None)

    def forward(self) -> Tensor:
        self.seen += 1
        self.scale = torch.rand(2)
        return self.seen


def test_buffers_and_generators_are_put_back() -> None:
    module = Counting()
    memory, seen = StepMemory(module), module.seen
    for _ in range(2):  # the second time into the copies that are there
        memory.keep()
        state = torch.get_rng_state()
        module()
        assert module.seen[0] == 1 and module.scale.shape == (2,)
        assert not torch.equal(state, torch.get_rng_state()), "guard"
        memory.put_back()
        assert module.seen is seen and module.seen.tolist() == [0, 0, 0]
        assert module.scale.shape == () and module.scale == 1
        assert torch.equal(state, torch.get_rng_state())


def test_moments_that_are_no_numbers_are_never_skipped_over(
    settings: dict[str, Any], plants: dict[str, str], tmp_path: Path, spoilt_moment: str
) -> None:
    run = changed(settings, run_dir=str(tmp_path / "run"))
    with pytest.raises(NonFiniteError, match=rf"exp_avg of {spoilt_moment} \(NaN\), since an"):
        finetune(run, objective=planted(plants))


@pytest.mark.parametrize("frozen", [True, False])
def test_no_rank_skips_over_a_weight_that_is_no_number(
    settings: dict[str, Any], steps: list[GlobalStep], frozen: bool
) -> None:
    """Frozen, or a copy of a weight that another rank saves. No buffer counts."""
    changes = {"trainable__vision": "frozen"} if frozen else {}
    recipe = resolve(changed(settings, **changes), {})
    _, encoder = open_recipe(recipe)
    engine: Any = engine_of(recipe.model, recipe.parallelism, encoder, Ranks(), policy_of(recipe))
    name, weight = next(
        (n, p) for n, p in engine.vlm.model.named_parameters() if p.requires_grad is not frozen
    )
    engine.owned_slices = lambda **_: iter(())  # the other rank's
    engine.module.register_buffer("bounds", torch.tensor([-math.inf, math.inf]))
    batches = [micro.batch for micro in steps[0].micro_batches]
    rate = Schedule(recipe.optim, STEPS)
    stepper = Stepper(
        engine=engine, objective=planted({batches[0].keys[0]: "objective"}), schedule=rate,
        max_grad_norm=1.0, ranks=Ranks(),
    )  # fmt: skip
    with pytest.raises(NonFiniteStep):
        stepper.train(0, batches, num_skipped=0, stop=False)
    weight.data.view(-1)[0] = math.nan
    with pytest.raises(NonFiniteError, match=rf"{name} \(NaN\), since an earlier step"):
        stepper.train(0, batches, num_skipped=0, stop=False)


@pytest.fixture
def spoilt_moment(monkeypatch: pytest.MonkeyPatch) -> str:
    """One value of a moment, spoilt after the first step; its weight stays as it is."""
    name, original = "model.language_model.norm.weight", Stepper.train

    def train(self: Any, step: int, *args: Any, **options: Any) -> Any:
        result = original(self, step, *args, **options)
        if step == 0:
            for kind, box, value in self.engine.owned_slices():
                if (kind, box.name) == ("exp_avg", name):
                    value.data[3] = math.nan
        return result

    monkeypatch.setattr(Stepper, "train", train)
    return name
