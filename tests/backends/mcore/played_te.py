"""A stand-in for Transformer Engine: its names and signatures, by version, over plain torch.

`te_signatures.json` has the names and defaults of what Megatron calls, read from the published
sources of these versions. Each call is bound to them, so an argument that a version does not know
is a TypeError, as there. The modules compute what theirs are documented to, on any device; under
context parallelism attention only keeps what it was handed (`te_ring` says what it would do).
One process alone, no tensor parallelism.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import nullcontext
from functools import cache
from inspect import BoundArguments, Parameter, Signature
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

FIXTURE = json.loads(Path(__file__).with_name("te_signatures.json").read_text(encoding="utf-8"))
VERSIONS: tuple[str, ...] = tuple(FIXTURE["versions"])

CURRENT = SimpleNamespace(version=VERSIONS[0], calls=[])
"""The version that is played, and what attention was handed since `calls` was cleared."""


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


@cache
def signature(name: str, version: str) -> Signature:
    """Of a class or method, as that version has it."""
    known = FIXTURE["signatures"][name]
    since = max((v for v in known if numbers(v) <= numbers(version)), key=numbers)
    parameters = []
    for part in re.split(r", (?=[a-z_*]+(?:=|,|$))", known[since]):
        word, given, default = part.partition("=")
        kind = Parameter.VAR_KEYWORD if word.startswith("**") else Parameter.POSITIONAL_OR_KEYWORD
        value = default if given else Parameter.empty
        parameters.append(Parameter(word.lstrip("*"), kind, default=value))
    return Signature(parameters)


def bound(name: str, *args: Any, **arguments: Any) -> BoundArguments:
    return signature(name, CURRENT.version).bind(*args, **arguments)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, *args: Any, **arguments: Any) -> None:
        super().__init__()
        given = bound("RMSNorm", *args, **arguments).arguments
        assert not given["zero_centered_gamma"]
        self.eps = given["eps"]
        # The second is the name of old, which Megatron used up to 0.16.
        (width,) = {given[name] for name in ("normalized_shape", "hidden_size") if name in given}
        self.weight = nn.Parameter(torch.ones(width, dtype=given["params_dtype"]))
        self.weight.sequence_parallel = given["sequence_parallel"]

    def forward(self, x: Tensor) -> Tensor:
        return _rms(x, self.weight, self.eps)


class Linear(nn.Module):
    name = "Linear"

    def __init__(self, *args: Any, **arguments: Any) -> None:
        super().__init__()
        self.given = given = bound(self.name, *args, **arguments).arguments
        assert given["tp_size"] == 1
        self.in_features, self.out_features = given["in_features"], given["out_features"]
        options = {"dtype": given["params_dtype"], "device": given["device"]}
        self.weight = nn.Parameter(torch.zeros(self.out_features, self.in_features, **options))
        self.bias = nn.Parameter(torch.zeros(self.out_features, **options))
        if not given["bias"]:
            self.bias = None

    def forward(self, *args: Any, **arguments: Any) -> Any:
        given = bound(f"{self.name}.forward", *args, **arguments).arguments
        late = self.given.get("return_bias", False)
        out = linear(self.entering(given["inp"]), self.weight, None if late else self.bias)
        return (out, self.bias) if late else out

    def entering(self, x: Tensor) -> Tensor:
        return x


class LayerNormLinear(Linear):
    name = "LayerNormLinear"

    def __init__(self, *args: Any, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        assert self.given["normalization"] == "RMSNorm" and not self.given["zero_centered_gamma"]
        ones = torch.ones(self.in_features, dtype=self.weight.dtype, device=self.weight.device)
        self.layer_norm_weight = nn.Parameter(ones)

    def entering(self, x: Tensor) -> Tensor:
        return _rms(x, self.layer_norm_weight, self.given["eps"])


class DotProductAttention(nn.Module):
    def __init__(self, *args: Any, **arguments: Any) -> None:
        super().__init__()
        self.given = bound("DotProductAttention", *args, **arguments).arguments

    def forward(self, *args: Any, **arguments: Any) -> Tensor:
        given = bound("DotProductAttention.forward", *args, **arguments).arguments
        assert given["qkv_format"] == "thd" and given["attn_mask_type"] == "padding_causal"
        assert given["attention_mask"] is None
        CURRENT.calls.append({k: v for k, v in given.items() if not k.endswith("_layer")})
        parts = [given[f"{which}_layer"] for which in ("query", "key", "value")]
        assert all(part.ndim == 3 for part in parts)
        if self.given.get("cp_group") is not None:
            return torch.zeros_like(parts[0]).flatten(1)
        bounds = given["cu_seqlens_q_padded"]
        bounds = given["cu_seqlens_q"] if bounds is None else bounds
        outputs = [
            scaled_dot_product_attention(
                *(part[start:stop].transpose(0, 1) for part in parts),
                is_causal=True,
                scale=self.given["softmax_scale"],
                enable_gqa=True,
            ).transpose(0, 1)
            for start, stop in pairwise(bounds.tolist())
            if stop > start
        ]
        return torch.cat(outputs).flatten(1)


class _NotPlayed(nn.Module):
    """A class that Megatron derives from and that no dense layer here is made of."""


def play(version: str) -> None:
    """From now on this is the version that is installed."""
    CURRENT.version = version
    te = sys.modules.get("transformer_engine")
    if te is None:
        te = _install()
    te.__version__ = version
    megatron = sys.modules.get("megatron.core.utils")
    if megatron is not None:
        megatron._te_version = None  # remembered there


def _install() -> Any:
    def module(name: str, **members: Any) -> Any:
        made = ModuleType(name)
        made.__dict__.update(members)
        sys.modules[name] = made
        return made

    fp8 = module(
        "transformer_engine.pytorch.fp8",
        FP8GlobalStateManager=SimpleNamespace(is_fp8_enabled=lambda: False),
        fp8_autocast=lambda *_, **__: nullcontext(),
        fp8_model_init=lambda *_, **__: nullcontext(),  # megatron-core 0.18 imports it, too
    )
    router = dict.fromkeys(
        (
            "fused_compute_score_for_moe_aux_loss",
            "fused_moe_aux_loss",
            "fused_topk_with_score_function",
        )
    )
    module("transformer_engine.pytorch.router", **router)
    module("transformer_engine.pytorch.tensor", QuantizedTensor=_NotPlayed)
    ops = SimpleNamespace(Sequential=_NotPlayed, FusibleOperation=_NotPlayed)
    pytorch = module(
        "transformer_engine.pytorch",
        RMSNorm=RMSNorm,
        LayerNorm=_NotPlayed,
        Linear=Linear,
        LayerNormLinear=LayerNormLinear,
        GroupedLinear=_NotPlayed,
        DotProductAttention=DotProductAttention,
        distributed=SimpleNamespace(CudaRNGStatesTracker=object),
        ops=ops,
        fp8=fp8,
        __path__=[],
    )
    common = SimpleNamespace(recipe=SimpleNamespace(DelayedScaling=object))
    return module("transformer_engine", pytorch=pytorch, common=common, __path__=[])
