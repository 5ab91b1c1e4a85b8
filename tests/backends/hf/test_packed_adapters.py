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
from vlmpack.backends.hf.frozen import quantize_layers, unpacked_weights
from vlmpack.recipe.trainable import LoraSection


def layers(dtype: torch.dtype, **lora: Any) -> list[nn.Module]:
    """peft's own and ours, of one weight, for products in a dtype."""
    made = []
    for fuse in (lambda model: None, fuse_adapters):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96))
        quantize_layers(model, ["0"], device=torch.device("cpu"), compute_dtype=dtype)
        packed: Any = model[0]
        packed.support_avx512bf16_for_cpu = False  # which packs it anew in eval mode
        with patch.object(adapters, "fuse_adapters", fuse):
            inject_adapters(model, ["0"], LoraSection(rank=4, alpha=8.0, **lora))
        draw = torch.Generator().manual_seed(1)
        layer: Any = model[0]
        b = layer.lora_B["default"].weight
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


def compared(**lora: Any) -> dict[str, Any]:
    import bitsandbytes as bnb

    theirs, ours = layers(torch.float32, **lora)
    right = passed(theirs)
    unpack = bnb.functional.dequantize_4bit
    with patch.object(bnb.functional, "dequantize_4bit", side_effect=unpack) as unpacks:
        found = passed(ours)
    with torch.no_grad():
        x = torch.randn(3, 64)
        same = torch.equal(ours.eval()(x), theirs.eval()(x))
    ours.train(), theirs.train()
    with torch.autocast("cpu", torch.bfloat16):
        half = [passed(model) for model in reversed(layers(torch.bfloat16, **lora))]
    (read,) = unpacked_weights(ours).values()
    torch.manual_seed(0)
    whole = nn.Linear(64, 96).weight.detach()
    return {
        "class": type(ours[0]).__name__,
        "errors": {name: relative_l2(found[name], value) for name, value in right.items()},
        "half": [{n: relative_l2(h[n], v) for n, v in right.items()} for h in half],
        "unpacks": unpacks.call_count,
        "same without a gradient": same,
        "lost": relative_l2(read(), whole),
    }


def main() -> None:
    kinds: list[dict[str, Any]] = [{}, {"dropout": 0.2}, {"dora": True}]
    print(json.dumps([compared(**kind) for kind in kinds]))


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
    for found in json.loads(ran.stdout.splitlines()[-1]):
        assert found["class"] == "FusedLinear4bit"
        assert max(found["errors"].values()) < 1e-5, found
        assert len(found["errors"]) >= 4
        ours, theirs = (sum(each.values()) for each in found["half"])
        print(f"{ours:.2e} peft {theirs:.2e}")
        assert 1e-3 < ours < theirs, found
        assert found["unpacks"] == 2
        assert found["same without a gradient"]
        assert 0.01 < found["lost"] < 0.2, "guard: nothing is packed"


if __name__ == "__main__":
    main()
