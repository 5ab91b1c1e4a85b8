"""Adapters of routed experts: peft's own forward and files are the references."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from support.engines import make_engine, make_stepper, policy, single_rank
from support.families import TINY, tiny_family_folder
from support.peft_models import peft_model
from support.runs import relative_l2
from support.shards import mixed_samples, text_samples
from support.stock import StockProcessor, load_stock
from support.verified import Subject, failed
from torch import nn

from vlmpack.backends.hf import adapted_experts, adapters
from vlmpack.backends.hf import engine as engine_module
from vlmpack.backends.hf.adapters import inject_adapters, merge_adapter, merged_state
from vlmpack.backends.hf.sharding import whole_state
from vlmpack.build.engine import go_on_with, open_adapter
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError, ModelError, TrainabilityError
from vlmpack.forecast.trained import trained_sizes
from vlmpack.packing import PackCollator
from vlmpack.recipe.trainable import LoraSection

EXACT = {torch.float32: 1e-5, torch.float64: 1e-12}
FOUND = 1e-2


def loop(x, weight, *, offs):
    """One product after another, in any dtype."""
    ends = [0, *offs.tolist()]
    rows = [x[a:b] @ w for a, b, w in zip(ends, ends[1:], weight, strict=False)]
    return torch.cat(rows)


class Transposed(nn.Module):
    """A module of experts whose weights are (E, in, out)."""

    def __init__(self, experts):
        super().__init__()
        for name, value in experts.named_parameters():
            self.register_parameter(name, nn.Parameter(value.detach().mT.contiguous()))
        self.own, self.num_experts = [experts], experts.num_experts
        self.is_transposed, self._is_expert_parallel = True, False
        self.has_gate, self.has_bias, self.has_post_expert_norm = True, False, False
        self.config, self._apply_gate = experts.config, experts._apply_gate

    def forward(self, hidden, index, scores):
        output = torch.zeros_like(hidden)
        for place in range(index.shape[1]):
            for token, expert in enumerate(index[:, place].tolist()):
                inner = self._apply_gate(hidden[token] @ self.gate_up_proj[expert])
                output[token] += scores[token, place] * (inner @ self.down_proj[expert])
        return output


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    """The first module of experts of a family, and one whose weights lie the other way round."""
    found = {}
    for name in ("qwen3_vl_moe", "nemotron_h"):
        model = load_stock(tiny_family_folder(name, tmp_path_factory.mktemp(name) / "model"))
        model.config.get_text_config()._experts_implementation_internal = "eager"
        found[name] = next(p for p in model.modules() if hasattr(p, "_is_expert_parallel"))
    return found | {"transposed": Transposed(found["qwen3_vl_moe"])}


def routes(dtype):
    """Hidden states, two experts of four for each token, of which one is never chosen."""
    draw = torch.Generator().manual_seed(0)
    index = torch.rand(37, 3, generator=draw).topk(2, dim=-1).indices
    scores = torch.rand(37, 2, generator=draw, dtype=dtype)
    return torch.randn(37, 64, generator=draw, dtype=dtype), index, scores


def outcome(experts, dtype, rank, fused, **lora):
    """The output, and gradients by name, of experts with adapters that do something."""
    holder = nn.ModuleDict({"experts": copy.deepcopy(experts)}).to(dtype)
    targets = [f"experts.{name}" for name, _ in holder.experts.named_parameters()]
    with pytest.MonkeyPatch.context() as patch:
        if not fused:
            patch.setattr(adapters, "fuse_experts", lambda model: None)
        inject_adapters(holder, targets, LoraSection(rank=rank, alpha=5.0, **lora))
    draw = torch.Generator().manual_seed(1)
    for _, value in sorted(holder.named_parameters()):
        if value.requires_grad:
            value.data.copy_(torch.randn(value.shape, generator=draw, dtype=dtype) / 8)
    hidden, index, scores = routes(dtype)
    hidden.requires_grad_(), scores.requires_grad_()
    output = holder.experts(hidden, index, scores)
    (output * torch.linspace(-1, 1, output.numel(), dtype=dtype).view_as(output)).sum().backward()
    trained = {name: p.grad for name, p in holder.named_parameters() if p.requires_grad}
    assert len(trained) == 4
    assert all(bool(gradient.any()) for gradient in trained.values())
    return {"output": output.detach(), "x": hidden.grad, "scores": scores.grad, **trained}


def largest(found, expected):
    assert found.keys() == expected.keys()
    return max(relative_l2(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("rank", [1, 3, 4])
@pytest.mark.parametrize("name", ["qwen3_vl_moe", "nemotron_h", "transposed"])
def test_output_and_gradients_are_those_of_peft(layers, name, rank, dtype, monkeypatch):
    if dtype is torch.float64:  # torch has no grouped product of doubles
        monkeypatch.setattr(nn.functional, "grouped_mm", loop)
    expected = outcome(layers[name], dtype, rank, fused=False, rslora=rank == 3)
    found = outcome(layers[name], dtype, rank, fused=True, rslora=rank == 3)
    assert largest(found, expected) < EXACT[dtype]


def test_the_low_rank_part_is_grouped_too(layers, monkeypatch):
    """Three grouped products a tensor, and no other product."""
    counted, real = [], nn.functional.grouped_mm
    monkeypatch.setattr(
        nn.functional, "grouped_mm", lambda *a, **k: counted.append(a) or real(*a, **k)
    )
    monkeypatch.setattr(torch, "baddbmm", None)
    outcome(layers["qwen3_vl_moe"], torch.float32, 4, fused=True)
    assert len(counted) == 2 * 3


def in_order(a, b, experts):
    """Wrong: B's columns lie expert after expert, as A's rows do."""
    down = a.view(experts, -1, a.shape[1])
    return down, b.view(b.shape[0], experts, -1).permute(1, 0, 2)


def test_a_wrong_order_of_experts_and_a_wrong_scale_are_found(layers, monkeypatch):
    experts = layers["qwen3_vl_moe"]
    expected = outcome(experts, torch.float32, 4, fused=False)
    with monkeypatch.context() as patch:
        patch.setattr(adapted_experts, "by_expert", in_order)
        assert largest(outcome(experts, torch.float32, 4, fused=True), expected) > FOUND
    assert largest(outcome(experts, torch.float32, 4, fused=True, rslora=True), expected) > FOUND


def test_in_bfloat16_it_is_as_near_as_peft(layers):
    experts = layers["qwen3_vl_moe"]
    exact = outcome(experts, torch.float32, 4, fused=False)
    errors = []
    for fused in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            errors.append(largest(outcome(experts, torch.float32, 4, fused=fused), exact))
    assert 1e-4 < errors[0] < 1.5 * errors[1]


def trained_engine(folder, targets, samples, count=2):
    encoder = Encoder(folder)
    modes = ("full",) * 2 if encoder.family.modules.vision is None else ("frozen",) * 2
    engine = make_engine(folder, encoder, policy=policy(*modes, "lora", targets=targets))
    before = {n: p.detach().clone() for n, p in engine.vlm.model.named_parameters()}
    stepper = make_stepper(engine, check=True)
    stepper.schedule = lambda step: 0.01
    collate = PackCollator(
        pad_token_id=encoder.pad_token_id, num_position_axes=encoder.num_position_axes
    )
    batch = collate([encoder.encode(sample.cooked()) for sample in samples])
    for step in range(count):
        stepper.train(step, [batch], num_skipped=0, stop=False)
    after = engine.vlm.model.named_parameters()
    return engine, {n for n, p in after if not torch.equal(p, before[n])}


def logits(model, folder, samples):
    processor = StockProcessor(folder)
    with torch.no_grad():
        return [model(**processor(sample).arguments()).logits for sample in samples[:2]]


CASES = {
    "qwen3_vl_moe": ("all-linear", "experts"),
    "nemotron_h": "experts",
    "gemma4-mixture": ("attention", "experts"),
    "glm4_moe": "all-linear",
    "deepseek_v3": ("all-linear", "experts"),
}
"""Of the last two peft would move adapters of shared experts to routed ones."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_peft_loads_what_was_trained_and_merges_it(name, mixed, tmp_path):
    """Unmerged by peft, merged by us and merged by peft: the same answers."""
    folder = tiny_family_folder(name, tmp_path / "model")
    samples = mixed if TINY[name].images else text_samples()
    engine, moved = trained_engine(folder, CASES[name], samples)
    kinds = {kind for kind in ("experts", "shared_experts") if any(f".{kind}." in n for n in moved)}
    routed = {"experts"} if "experts" in CASES[name] else set()
    assert kinds == routed | ({"shared_experts"} if name in ("glm4_moe", "deepseek_v3") else set())
    sizes = trained_sizes(engine.policy, Encoder(folder))
    assert list(sizes.counts) == list(engine.components), "what vlmpack plan counts"
    assert all(".lora_" in n and "router" not in n and ".gate." not in n for n in moved)
    assert ("no router" in engine.description["adapters"]) == bool(routed)
    assert ("would train" in engine.description["adapters"]) == (not routed)
    engine.export_adapter(tmp_path / "adapter", base=str(folder))
    engine.export(tmp_path / "merged", processor_from=folder, dtype=None)
    auto = engine.vlm.family.auto_class()

    def stock(path):
        return auto.from_pretrained(str(path), dtype=torch.float32).eval()

    with torch.no_grad(), engine.generation() as trained:
        ours = logits(trained, folder, samples)
    base = logits(stock(folder), folder, samples)
    others = {
        "peft": logits(peft_model(folder, tmp_path / "adapter"), folder, samples),
        "merged": logits(stock(tmp_path / "merged"), folder, samples),
        "merge": logits(merge_adapter(stock(folder), tmp_path / "adapter"), folder, samples),
    }
    for found in others.values():
        assert max(map(relative_l2, found, ours)) < 1e-5
    assert min(map(relative_l2, base, ours)) > 1e-3, "guard"


def test_experts_that_are_not_there_are_refused(tmp_path):
    folder = tiny_family_folder("llama", tmp_path / "model")
    with pytest.raises(CapabilityError, match="'experts', but no component with mode lora has"):
        make_engine(folder, Encoder(folder), policy=policy(language="lora", targets="experts"))


def matrices_of(folder, name, tmp_path, targets):
    """An engine with adapters that do something, and what it writes of them as matrices."""
    encoder = Encoder(folder)
    modes = ("frozen", "frozen") if TINY[name].images else ()
    asked = policy(*modes, language="lora", targets=targets, expert_form="matrices")
    engine = make_engine(folder, encoder, policy=asked)
    draw = torch.Generator().manual_seed(3)
    for _, value in engine.parameters():
        value.data.copy_(torch.randn(value.shape, generator=draw) / 8)
    engine.export_adapter(tmp_path / "adapter", base=str(folder))
    return engine, load_file(str(tmp_path / "adapter" / "adapter_model.safetensors"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_peft_reads_adapters_of_each_matrix(name, tmp_path):
    """It makes tensors of them for a class whose folders have a file's name for each expert."""
    folder = tiny_family_folder(name, tmp_path / "model")
    engine, written = matrices_of(folder, name, tmp_path, ("all-linear", "experts"))
    assert any(".mlp.experts.3.up_proj.lora_B" in name for name in written)
    assert not any("experts.base_layer" in name or "experts.lora" in name for name in written)
    with torch.no_grad(), engine.generation() as trained:
        ours = logits(trained, folder, text_samples())
    theirs = logits(peft_model(folder, tmp_path / "adapter"), folder, text_samples())
    merged = merge_adapter(load_stock(folder), tmp_path / "adapter")
    assert max(map(relative_l2, theirs, ours)) < 1e-5
    assert max(map(relative_l2, logits(merged, folder, text_samples()), ours)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_vl_moe", "nemotron_h"])
def test_each_matrix_has_the_update_that_its_tensor_has(name, tmp_path):
    """B A of each expert, from the files and a loop, against the merged tensors."""
    folder = tiny_family_folder(name, tmp_path / "model")
    engine, written = matrices_of(folder, name, tmp_path, "experts")
    state = whole_state(engine.vlm.model, keep=True)
    after = merged_state(engine.vlm.model, state, engine.policy.lora)
    before, seen = load_stock(folder).state_dict(), 0
    for name, value in after.items():
        if ".experts." not in name:
            continue
        path, _, own = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if own == "gate_up_proj" else (own,)
        for expert in range(len(value)):
            stems = [f"base_model.model.{path}.{expert}.{part}.lora_" for part in parts]
            update = [written[s + "B.weight"] @ written[s + "A.weight"] for s in stems]
            seen += len(stems)
            assert relative_l2(before[name][expert] + 2.0 * torch.cat(update), value[expert]) < 1e-6
    assert 2 * seen == len(written)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_parameters"] is None
    assert len(config["target_modules"]) == seen


@pytest.mark.slow
def test_a_router_that_is_trained_by_mistake_is_found(tmp_path, monkeypatch):
    """The run's own check of frozen bits, and that of what moved above."""
    folder, apply = tiny_family_folder("qwen3_vl_moe", tmp_path), engine_module.apply_policy

    def wrong(model, *args, **options):
        apply(model, *args, **options)
        for name, value in model.named_parameters():
            value.requires_grad_(value.requires_grad or ".mlp.gate." in name)

    monkeypatch.setattr(engine_module, "apply_policy", wrong)
    with pytest.raises(TrainabilityError, match=r"frozen parameters of language moved .*mlp\.gate"):
        trained_engine(folder, "experts", mixed_samples(), count=1)


@pytest.mark.slow
def test_verify_holds_packed_rows_and_gradients_against_the_stock_model(tmp_path, monkeypatch):
    """A row equals its samples alone; the control swaps the experts of B."""
    subject = Subject(tiny_family_folder("qwen3_vl_moe", tmp_path), mixed_samples()[:4])
    asked = {"trainable__language": "lora", "trainable__lora__targets": ["experts", "q_proj"]}
    checks = subject.checks(**asked)
    assert failed(checks) == set()
    assert {"loss of each sample", "gradients: adapters"} <= checks.keys()
    assert checks["gradients: adapters"].measured > 0
    monkeypatch.setattr(adapted_experts, "by_expert", in_order)
    assert "gradients: adapters" in failed(subject.checks(**asked))


@pytest.mark.slow
def test_training_goes_on_with_them(tmp_path):
    folder, samples = tiny_family_folder("nemotron_h", tmp_path / "model"), text_samples()
    engine, _ = trained_engine(folder, "experts", samples)
    engine.export_adapter(tmp_path / "adapter", base=str(folder))
    encoder = Encoder(folder)
    asked = policy(language="lora", targets="experts")
    again = make_engine(folder, encoder, policy=asked)
    stored = open_adapter(tmp_path / "adapter", asked, encoder)
    go_on_with(again, stored, single_rank())
    kept = dict(again.parameters())
    assert kept.keys() == dict(engine.parameters()).keys()
    assert all(torch.equal(kept[name], value) for name, value in engine.parameters())
    with pytest.raises(ModelError, match="are not those of the recipe"):
        open_adapter(tmp_path / "adapter", policy(language="lora"), encoder)


def test_shared_experts_that_peft_reads_as_tensors_have_neither_dora_nor_dropout(tmp_path):
    folder = tiny_family_folder("glm4_moe", tmp_path / "model")
    for knob, value in (("dora", True), ("dropout", 0.1)):
        asked = policy(language="lora", **{knob: value})
        with pytest.raises(CapabilityError, match=rf"lora\.{knob}: peft reads adapters of .*_proj"):
            make_engine(folder, Encoder(folder), policy=asked)
        asked = policy(language="lora", targets="attention", **{knob: value})
        make_engine(folder, Encoder(folder), policy=asked)
