"""Every family trains beside packed layers as beside dense ones of the unpacked weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import make_engine, make_stepper, policy
from support.families import FAMILIES, TEXT_FAMILIES, model_type_of, tiny_family_folder
from support.shards import mixed_samples, text_samples

from vlmpack.backends.hf.frozen import PackedLinear
from vlmpack.capabilities.served import SERVED
from vlmpack.encode import Encoder
from vlmpack.packing import PackCollator


def engine_of(folder: Path, name: str, quantize: str) -> Any:
    towers: dict[str, Any] = {} if name in TEXT_FAMILIES else {"vision": "lora"}
    chosen = policy(language="lora", projector="frozen", quantize=quantize, seed=1, **towers)
    return make_engine(folder, Encoder(folder), policy=chosen)


def losses(engine: Any, batch: Any) -> list[float]:
    stepper = make_stepper(engine)
    stepper.schedule = lambda step: 0.01
    taken = [stepper.train(step, [batch], num_skipped=0, stop=False)[0] for step in range(2)]
    return [value for sums in taken for value in (sums.loss, sums.grad_norm)]


@pytest.mark.cases(slow={"nemotron_h", "qwen3_vl_moe"})
@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if "LoRA" not in SERVED[model_type_of(name)].limits]
)
def test_a_packed_base_learns_what_a_dense_one_does(tmp_path: Path, name: str) -> None:
    folder = tiny_family_folder(name, tmp_path / "model")
    encoder = Encoder(folder)
    samples = text_samples() if name in TEXT_FAMILIES else mixed_samples()
    collate = PackCollator(
        pad_token_id=encoder.pad_token_id, num_position_axes=encoder.num_position_axes
    )
    batch = collate([encoder.encode(sample.cooked()) for sample in samples[:3]])
    ours = engine_of(folder, name, "int8")
    assert any(isinstance(module, PackedLinear) for module in ours.module.modules())
    ours.export(tmp_path / "dense", processor_from=folder, dtype=torch.float32)
    found = losses(ours, batch)
    assert found == pytest.approx(losses(engine_of(tmp_path / "dense", name, "none"), batch), 1e-5)
    plain = losses(engine_of(folder, name, "none"), batch)
    assert found != pytest.approx(plain, 1e-4), "guard: nothing was packed"
