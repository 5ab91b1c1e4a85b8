"""Working weights in bfloat16: what is learned beside them is what autocast learns, bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from sys import modules
from typing import Any

import pytest
import torch
from support.engines import EVERYTHING, engine_of, make_stepper, policy, single_rank
from support.families import FAMILIES as SERVED
from support.families import TEXT_FAMILIES, tiny_family_folder
from support.shards import mixed_samples, text_samples
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    Gemma3nTextConfig,
    JambaConfig,
    JambaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAltUp

from vlmpack.backends.hf import engine as engine_module
from vlmpack.backends.hf import working_weights
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
    assert len(ours.working.weights) >= 10 and not stock.working.weights, "guard"
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
            self.seen["together"] += args[0][0].dtype is torch.bfloat16  # buffers are copied too
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


def gradients(model: Any, run: Callable[[Any], Tensor], working: type) -> dict[str, Tensor]:
    """Of two micro-batches of a copy."""
    model = deepcopy(model)
    held = working(model, nn.Identity(), torch.bfloat16, dora=False)
    assert held.weights or working is AutocastAlone
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(model)
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def differing(model: Any, run: Callable[[Any], Tensor]) -> list[str]:
    """Names of the parameters whose gradients are not those of autocast, bit for bit."""
    ours, stock = (gradients(model, run, kind) for kind in (WorkingWeights, AutocastAlone))
    assert ours.keys() == stock.keys() and all(value.any() for value in stock.values())
    return [name for name, value in ours.items() if not torch.equal(value, stock[name])]


SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
READING: dict[str, Callable[[], Any]] = {
    "mamba": lambda: MambaForCausalLM(MambaConfig(**SIZES, state_size=8)),
    "falcon_mamba": lambda: FalconMambaForCausalLM(FalconMambaConfig(**SIZES, state_size=8)),
    "jamba": lambda: JambaForCausalLM(
        JambaConfig(
            **SIZES, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
            mamba_d_state=8, num_experts=1, use_mamba_kernels=False, attn_layer_offset=1,
            attn_layer_period=2, expert_layer_period=1, expert_layer_offset=0,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", READING)
def test_weights_that_a_parent_reads_are_left_to_autocast(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a scan that takes its bias in float32, as that of mamba_ssm. torch's narrows it."""
    torch.manual_seed(0)
    model = READING[family]()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "A_log" not in name:  # else hardly anything depends on them
            parameter.data.normal_(0, parameter.shape[1] ** -0.5)
        if "dt_proj.bias" in name:
            parameter.data.uniform_(-1, 1)
    modeling = modules[type(model).__module__]
    scan = modeling.mamba_selective_scan
    calls = []

    def wide(x: Tensor, dt: Tensor, *rest: Any, **named: Any) -> Any:
        calls.append(named["delta_bias"])
        return scan(x, dt.float(), *rest, **named)

    monkeypatch.setattr(modeling, "mamba_selective_scan", wide)
    ids = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(1))
    assert differing(model, lambda own: own(ids, labels=ids).loss) == [] and calls


def test_weights_that_a_parent_changes_are_left_to_autocast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gemma 3n limits the weight of a layer that it calls, and reads that of another."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "altup_num_inputs": 4, "altup_coef_clip": 0.1}
    model = Gemma3nTextAltUp(Gemma3nTextConfig(**sizes)).train()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.5)
    x = torch.randn(4, 2, 6, 16)

    def run(own: Any) -> Tensor:
        return own.correct(own.predict(x), x[0]).square().mean()

    assert differing(model, run) == []
    monkeypatch.setattr(working_weights, "read_by_parents", lambda model: set())
    assert "prediction_coefs.weight" in differing(model, run), "the control"


class Sharing(nn.Module):
    """Two layers of one weight, and an embedding that a third layer shares."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(48, 32)
        self.one, self.other, self.last = (nn.Linear(32, n, bias=n == 32) for n in (32, 32, 48))
        self.other.weight = self.one.weight
        self.last.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.last(x + self.other(torch.tanh(self.one(x))))


def test_a_weight_that_layers_share_is_cast_once() -> None:
    ids = torch.randint(0, 48, (64,), generator=torch.Generator().manual_seed(1))
    model = Sharing()
    assert differing(model, lambda own: own(ids).float().square().mean()) == []
    held = WorkingWeights(model, nn.Identity(), torch.bfloat16, dora=False)
    assert [p.shape for p in held.parameters] == [(32, 32), (32,), (32,)]


def test_a_parameter_stays_what_its_layer_has() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32))
    before = deepcopy(model)
    held = WorkingWeights(model, nn.Identity(), torch.bfloat16, dora=False)
    weight, x = model[0].weight, torch.randn(4, 32)
    assert isinstance(weight, nn.Parameter) and weight is model.get_parameter("0.weight")
    assert weight.dtype is torch.float32 and model.state_dict().keys() == {"0.weight", "0.bias"}
    assert torch.equal(model(x), before(x)), "without autocast"
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), before(x))
        held.weights[0].data.zero_()
        assert not torch.equal(model(x), before(x)), "the control: that is what products read"


def test_a_copy_learns_its_own_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32))
    held = WorkingWeights(model, nn.Identity(), torch.bfloat16, dora=False)
    own, x = deepcopy(model), torch.randn(4, 32)
    with torch.no_grad():
        own[0].weight.add_(1)
    with torch.autocast("cpu", torch.bfloat16):
        output = own(x)
        assert not torch.equal(output, model(x)), "it reads its own weight"
    output.float().sum().backward()
    assert all(parameter.grad is not None for parameter in own.parameters())
    assert all(weight.grad is None for weight in (*held.weights, *held.parameters))


def test_a_parameter_that_is_frozen_later_gets_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    held = WorkingWeights(model, nn.Identity(), torch.bfloat16, dora=False)
    seen = []
    for trains in (False, True):
        dict(model.named_parameters())["0.weight"].requires_grad_(trains)
        held.refresh()
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(4, 32)).float().sum().backward()
        seen.append([parameter.grad is not None for parameter in model.parameters()])
    assert seen == [[False, True], [True, True]]
