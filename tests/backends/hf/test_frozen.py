"""Frozen matrices in bfloat16: losses and gradients of float32 ones bit for bit, in fewer bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import engine_of, make_stepper, policy, single_rank
from support.families import FAMILIES, TEXT_FAMILIES, tiny_family_folder
from support.shards import mixed_samples, text_samples
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionPatchEmbed

from vlmpack.backends.hf import engine as engine_module
from vlmpack.backends.hf.adapted_experts import expert_weights
from vlmpack.backends.hf.engine import HFEngine
from vlmpack.backends.hf.frozen import frozen_matrices, hold_narrow, quantize_layers, read_by_dtype
from vlmpack.encode import Encoder
from vlmpack.forecast.trained import trained_sizes
from vlmpack.packing import PackCollator
from vlmpack.recipe.schema import ModelSection, ParallelismSection


def stored_narrow(folder: Path) -> Path:
    """The folder with its matrices as bfloat16 has them."""
    for path in folder.glob("*.safetensors"):
        tensors = {name: value.to(torch.bfloat16) for name, value in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


def narrow_engine(folder: Path, encoder: Encoder, alone: bool, **changes: Any) -> HFEngine:
    model = ModelSection(path=str(folder), dtype="bfloat16", attention="segments")
    modes: dict[str, Any] = {} if alone else {"vision": "frozen", "projector": "frozen"}
    chosen = policy(**(modes | {"language": "lora"} | changes))
    return engine_of(model, ParallelismSection(), encoder, single_rank(), chosen)


def losses_and_weights(engine: HFEngine, batch: Any) -> tuple[list[Any], dict[str, torch.Tensor]]:
    stepper = make_stepper(engine)
    stepper.schedule = lambda step: 0.01
    losses = []
    for step in range(3):
        sums, _ = stepper.train(step, [batch], num_skipped=0, stop=False)
        losses.append((sums.loss, sums.grad_norm))
    return losses, {name: value.detach().clone() for name, value in engine.parameters()}


WITH_EXPERTS = ("deepseek_v3", "nemotron_h", "nemotron_h_omni")


@pytest.mark.cases(slow=["gemma3", "qwen3_vl_moe", "deepseek_v3@experts"])
@pytest.mark.parametrize("case", [*FAMILIES, "qwen3_vl_moe@experts", "deepseek_v3@experts"])
def test_training_beside_them_is_that_beside_float32(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, adapted = case.partition("@")
    targets = ("attention", adapted) if adapted else "all-linear"
    source = tiny_family_folder(name, tmp_path / "model")
    folder = tmp_path / "narrow"
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    stored_narrow(folder)
    encoder, alone = Encoder(folder), name in TEXT_FAMILIES
    samples = text_samples() if alone else mixed_samples()
    collate = PackCollator(
        pad_token_id=encoder.pad_token_id, num_position_axes=encoder.num_position_axes
    )
    batch = collate([encoder.encode(sample.cooked()) for sample in samples])
    ours = narrow_engine(folder, encoder, alone, targets=targets)
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "hold_narrow", lambda model: 0)
        wide = narrow_engine(folder, encoder, alone, targets=targets)
    experts = expert_weights(ours.vlm.model)
    assert bool(experts) == ("moe" in name or "mixture" in name or name in WITH_EXPERTS)
    assert all(weight.dtype is torch.bfloat16 for weight in experts)
    narrow = sum(p.numel() for p in ours.vlm.model.parameters() if p.dtype is torch.bfloat16)
    assert narrow > 0.3 * sum(p.numel() for p in ours.vlm.model.parameters()), "guard"
    assert not [p for p in wide.vlm.model.parameters() if p.dtype is torch.bfloat16], "guard"
    assert f"{narrow:,} weights in bfloat16" in ours.description["frozen"]
    planned = trained_sizes(ours.policy, encoder)
    assert planned.narrow == narrow, "what plan counts"
    assert planned.narrow_experts == sum(weight.numel() for weight in experts)
    assert losses_and_weights(ours, batch)[0] == losses_and_weights(wide, batch)[0]
    for (name_a, a), (name_b, b) in zip(ours.parameters(), wide.parameters(), strict=True):
        assert name_a == name_b and torch.equal(a, b)
    for engine, at in ((ours, tmp_path / "a"), (wide, tmp_path / "b")):
        engine.export(at, processor_from=folder, dtype=torch.float32)
    one, two = (load_file(tmp_path / at / "model.safetensors") for at in "ab")
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


@pytest.mark.slow
def test_plan_counts_a_folder_of_two_dtypes_as_the_engine_holds_it(
    tmp_path: Path, tiny_folder: Path
) -> None:
    """One table in float32 beside matrices in bfloat16."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    for path in tiny_folder.iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    stored_narrow(folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    (table,) = [name for name in tensors if name.endswith("embed_tokens.weight")]
    tensors[table] = tensors[table].float() * (1 + 2**-12)
    save_file(tensors, file, metadata={"format": "pt"})
    encoder = Encoder(folder)
    engine = narrow_engine(folder, encoder, alone=False)
    held = sum(p.numel() for p in engine.vlm.model.parameters() if p.dtype is torch.bfloat16)
    whole = sum(p.numel() for p in engine.vlm.model.parameters())
    assert 0.3 * whole < held < whole - tensors[table].numel()
    assert trained_sizes(engine.policy, encoder).narrow == held


def test_what_loses_something_stays() -> None:
    """Weights that bfloat16 has not, vectors, and what is trained."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(4, 8)
            self.exact, self.fine = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
            self.trained, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)

        def get_input_embeddings(self) -> torch.nn.Module:
            return self.table

    model = Model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("trained"))
        if not name.startswith("fine"):
            parameter.data = parameter.data.bfloat16().float()
    assert len(list(frozen_matrices(model))) == 3
    assert hold_narrow(model) == 4 * 8 + 8 * 8
    kept = {n: p.dtype for n, p in model.named_parameters()}
    assert {n for n, dtype in kept.items() if dtype is torch.bfloat16} == {
        "table.weight",
        "exact.weight",
    }
    assert model.table(torch.tensor([1])).dtype is torch.float32


def test_a_class_made_for_fused_layers_asks_as_the_one_behind_it() -> None:
    def made(own: type) -> torch.nn.Module:
        derived: Any = type(f"Fused{own.__name__}", (own,), {"__module__": own.__module__})
        module: torch.nn.Module = derived.__new__(derived)
        torch.nn.Module.__init__(module)
        module.proj = torch.nn.Linear(2, 2)
        return module

    assert not read_by_dtype(made(Qwen2MLP))
    asking = made(Qwen2_5_VisionPatchEmbed)
    assert read_by_dtype(asking) == {id(asking.proj)}, "the control"


@pytest.mark.slow
def test_float32_and_trained_weights_are_as_they_were(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    source = tiny_family_folder("qwen2_5_vl", tmp_path / "unused")
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    stored_narrow(folder)
    encoder = Encoder(folder)
    full = narrow_engine(folder, encoder, False, language="full", vision="full", projector="full")
    assert {p.dtype for p in full.vlm.model.parameters()} == {torch.float32}
    model = ModelSection(path=str(folder), dtype="float32", attention="segments")
    modes = policy("frozen", "frozen", "lora")
    plain = engine_of(model, ParallelismSection(), encoder, single_rank(), modes)
    assert {p.dtype for p in plain.vlm.model.parameters()} == {torch.float32}
    assert "frozen" not in plain.description and json.dumps(full.description)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_layer_keeps_no_unpacked_weight_for_its_gradient(dtype):
    """Without an adapter of its own it lies between others, as under `targets: attention`."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    quantize_layers(model, ["0"], "int8", device=torch.device("cpu"))
    packed, kept = model[0], []
    x = torch.randn(3, 64, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        output = packed(x)
    drawn = torch.randn_like(output)
    output.backward(drawn)
    weight = packed.unpacked().to(dtype)
    other = x.detach().requires_grad_()
    expected = torch.nn.functional.linear(other, weight, packed.bias.to(dtype))
    expected.backward(drawn)
    assert torch.equal(output, expected) and torch.equal(x.grad, other.grad)
    assert max(kept, default=0) < weight.numel()
