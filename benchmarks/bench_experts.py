"""The experts of a mixture, forward and backward: each form of transformers against its loop.

In CPU seconds: what an idle core takes. `tests/backends/hf/test_experts.py` compares their values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from timing import processor_medians
from torch import Tensor, nn

from vlmpack.backends.hf.router_loss import grouped_experts

TOKENS, WIDTH, INNER, EXPERTS, TOP_K = 1024, 256, 96, 32, 4


def bench_experts(rounds: int) -> dict[str, object]:
    """One layer of a Qwen3-VL-MoE, untrained, over a row; in float32 and under autocast."""
    from transformers import Qwen3VLMoeTextConfig
    from transformers.integrations.moe import batched_mm_experts_forward
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextExperts

    config = Qwen3VLMoeTextConfig(
        hidden_size=WIDTH,
        moe_intermediate_size=INNER,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
    )
    config._experts_implementation_internal = "eager"
    torch.manual_seed(0)
    experts = Qwen3VLMoeTextExperts(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.05)
    index = torch.rand(TOKENS, EXPERTS).topk(TOP_K, dim=-1).indices
    weights = torch.rand(TOKENS, TOP_K)
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)

    def step(form: Callable[..., Tensor], low: bool = False) -> Callable[[], None]:
        def run() -> None:
            experts.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
                output = form(experts, hidden, index, weights)
            output.float().square().mean().backward()

        return run

    loop = type(experts).forward
    seconds = processor_medians(
        {
            "loop": step(loop),
            "grouped": step(grouped_experts),
            "loop, bfloat16": step(loop, low=True),
            "grouped, bfloat16": step(grouped_experts, low=True),
        },
        rounds=rounds,
    )
    batched = processor_medians({"batched": step(batched_mm_experts_forward)}, rounds=1)["batched"]
    return {
        "tokens": TOKENS,
        "experts": f"{TOP_K} of {EXPERTS}, {WIDTH} x {INNER}",
        "loop_over_grouped_mm": seconds["loop"] / seconds["grouped"],
        "loop_over_batched_mm": seconds["loop"] / batched,
        "loop_over_grouped_mm_bfloat16": seconds["loop, bfloat16"] / seconds["grouped, bfloat16"],
    }
