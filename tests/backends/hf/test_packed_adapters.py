"""Adapters beside weights in 4 bits, against peft's own forward, in a process with bitsandbytes.

python -m backends.hf.test_packed_adapters      (prints what it found, in JSON)
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.references import path_of
from support.runs import relative_l2
from torch import Tensor, nn

from vlmpack.backends.hf import adapters
from vlmpack.backends.hf.adapted_linear import fuse_adapters
from vlmpack.backends.hf.adapters import inject_adapters
from vlmpack.backends.hf.frozen import PackedLinear, quantize_layers
from vlmpack.recipe.trainable import LoraSection


def linear() -> nn.Linear:
    """Its weight is one that float16 has, as bitsandbytes rounds to it before 8 bits."""
    torch.manual_seed(0)
    made = nn.Linear(64, 96)
    made.weight.data = made.weight.data.half().float()
    return made


def their_layer(kind: str) -> Any:
    """A layer of bitsandbytes; one of 8 bits as dense as it unpacks for training on a CPU."""
    import bitsandbytes as bnb

    plain: Any = linear().requires_grad_(requires_grad=False)
    if kind == "int8":
        codes, scales, _ = bnb.functional.int8_vectorwise_quant(plain.weight.half())
        plain.weight.data = bnb.functional.int8_vectorwise_dequant(codes, scales)
        return plain
    made: Any = bnb.nn.Linear4bit(64, 96, quant_type="nf4", compress_statistics=True)
    made.support_avx512bf16_for_cpu = False  # which packs it anew in eval mode
    made.weight = bnb.nn.Params4bit(
        plain.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4"
    )
    made.bias = plain.bias
    return made.to("cpu")


def layers(kind: Any, **lora: Any) -> list[nn.Module]:
    """Theirs under peft's own forward, and ours, of one weight."""
    made = []
    for ours in (False, True):
        model: Any = nn.Sequential(linear() if ours else their_layer(kind))
        if ours:
            quantize_layers(model, ["0"], kind, device=torch.device("cpu"))
        else:
            model.is_loaded_in_4bit = kind == "nf4"  # what peft looks at
        fuse = fuse_adapters if ours else lambda model: None
        torch.manual_seed(5)
        with patch.object(adapters, "fuse_adapters", fuse):
            inject_adapters(model, ["0"], LoraSection(rank=4, alpha=8.0, **lora))
        draw = torch.Generator().manual_seed(1)
        b = model[0].lora_B["default"].weight
        b.data = 0.1 * torch.randn(b.shape, generator=draw)
        made.append(model)
    return made


def passed(model: nn.Module) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(2, 24, 64, generator=draw).requires_grad_()
    torch.manual_seed(3)
    output = model(x)
    if torch.is_autocast_enabled("cpu"):  # as the next product reads it; peft's is float32 still
        output = output.bfloat16()
    output.float().square().sum().backward()
    assert x.grad is not None
    found = {"output": output.detach().float(), "input": x.grad}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name], parameter.grad = parameter.grad, None
    return found


def compared(kind: str, **lora: Any) -> dict[str, Any]:
    theirs, ours = layers(kind, **lora)
    right = passed(theirs)
    unpack = PackedLinear.unpacked
    with patch.object(PackedLinear, "unpacked", autospec=True, side_effect=unpack) as unpacks:
        found = passed(ours)
    x = torch.randn(3, 64)
    with torch.no_grad():
        answers = ours.eval()(x)
        expected = theirs.eval()(x)
    base: Any = ours[0]
    base = base.base_layer
    before = base.weight.clone()
    ours.train(), theirs.train()
    again = passed(ours)  # what it said in eval mode leaves no trace
    with torch.autocast("cpu", torch.bfloat16):
        half = [passed(model) for model in reversed(layers(kind, **lora))]
    return {
        "class": type(ours[0]).__name__,
        "errors": {name: relative_l2(found[name], value) for name, value in right.items()},
        "again": all(torch.equal(again[name], value) for name, value in found.items()),
        "half": [{n: relative_l2(h[n], v) for n, v in right.items()} for h in half],
        "unpacks": unpacks.call_count,
        "answers": relative_l2(answers, expected),
        "weight": torch.equal(base.weight, before),
        "lost": relative_l2(base.unpacked(), linear().weight.detach()),
        "bytes": base.weight.numel(),
    }


def main() -> None:
    kinds: list[dict[str, Any]] = [{}, {"dropout": 0.2}, {"dora": True}]
    found = {kind: [compared(kind, **lora) for lora in kinds] for kind in ("nf4", "int8")}
    print(json.dumps(found))


@pytest.mark.slow
def test_adapters_beside_packed_weights_are_those_of_peft(tmp_path: Any) -> None:
    """And a weight is unpacked once forward and once backward."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "backends.hf.test_packed_adapters"],
        env=path_of("bitsandbytes", tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    results = json.loads(ran.stdout.splitlines()[-1])
    for kind, found in [(kind, each) for kind, many in results.items() for each in many]:
        assert found["class"] == "FusedLinear"
        assert max(found["errors"].values()) < 1e-5, (kind, found)
        assert len(found["errors"]) >= 4
        ours, theirs = (sum(each.values()) for each in found["half"])
        print(f"{kind} {ours:.2e} peft {theirs:.2e}")
        assert 1e-3 < ours < 1.05 * theirs, (kind, found)
        assert found["unpacks"] == 2, (kind, found)
        assert found["answers"] < 1e-5, (kind, found)
        assert found["again"] and found["weight"]
        bounds = {"nf4": (0.01, 0.2), "int8": (1e-4, 0.02)}[kind]
        assert bounds[0] < found["lost"] < bounds[1], "guard: nothing is packed"
        assert found["bytes"] < 96 * 64 * (1.0 if kind == "nf4" else 1.1)


if __name__ == "__main__":
    main()
