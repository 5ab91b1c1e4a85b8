"""The tiny model in double, where transformers rounds to float32 on the way: norms and rotations.

Those float32 steps make differences of 5e-8 out of none; patched, equal computations agree to
1e-13.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from support.shards import TINY_MODEL
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as modeling

from vlmpack.families.base import stock_arguments
from vlmpack.packing import EncodedSample
from vlmpack.packing.pairs import sequences_of


def use_double(patch: Callable[..., None]) -> None:
    """Norms and the tower's rotation in the model's own type.

    Args:
        patch: pytest's monkeypatch.setattr.
    """

    def norm(self: Any, hidden: Tensor) -> Tensor:
        scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (hidden * scale)

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(-2).to(q.dtype), sin.unsqueeze(-2).to(q.dtype)
        turn = modeling.rotate_half
        return q * cos + turn(q) * sin, k * cos + turn(k) * sin

    patch(modeling.Qwen2_5_VLRMSNorm, "forward", norm)
    patch(modeling, "apply_rotary_pos_emb_vision", rotated)


def stock_double() -> Any:
    """transformers' own model of the committed folder, in double."""
    model = AutoModelForImageTextToText.from_pretrained(TINY_MODEL, attn_implementation="sdpa")
    return model.double().eval()


def stock_log_p(model: Any, encoder: Any, pairs: Sequence[EncodedSample]) -> Tensor:
    """(2 N,) log p of each answer: one sequence at a time, each with its own run of the tower."""
    found = []
    for part in (part for pair in pairs for part in sequences_of(pair)):
        arguments = stock_arguments(encoder.family, part, placeholder_id=encoder.placeholder_id)
        logits = model(use_cache=False, **arguments).logits[0]
        learnt = part.labels != -100
        log_p = F.log_softmax(logits[learnt], dim=-1)
        found.append(log_p.gather(1, part.labels[learnt][:, None]).sum())
    return torch.stack(found)


def stock_loss(log_p: Tensor, reference: Tensor, tokens: Tensor, knobs: Any) -> Tensor:
    """The whole loss in plain torch, by the formulas of the papers.

    Args:
        log_p, reference: (2 N,), chosen and rejected in turn.
        tokens: (2 N,) label tokens.
        knobs: the recipe's section.
    """
    terms = []
    for w in range(0, len(log_p), 2):
        ratio = [log_p[w + k] - reference[w + k] for k in (0, 1)]
        h = knobs.beta * (ratio[0] - ratio[1])
        if knobs.loss == "hinge":
            terms.append((1 - h).clamp(min=0))
        elif knobs.loss == "ipo":
            mean = ratio[0] / tokens[w] - ratio[1] / tokens[w + 1]
            terms.append((mean - 0.5 / knobs.beta) ** 2)
        else:
            e = knobs.label_smoothing
            p = 1 / (1 + torch.exp(-h))
            terms.append(-(1 - e) * torch.log(p) - e * torch.log(1 - p))
    whole = torch.stack(terms).mean()
    if knobs.sft_weight:
        whole = whole - knobs.sft_weight * log_p[0::2].sum() / tokens[0::2].sum()
    assert math.isfinite(float(whole.detach()))
    return whole
