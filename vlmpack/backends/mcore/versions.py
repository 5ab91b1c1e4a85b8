"""Where megatron-core 0.16 to 0.19 differ in what is used here. No other module distinguishes
versions.

Each function inspects its argument, so that a version in between needs no number here. The versions
themselves, and Transformer Engine's for each, are in `capabilities.versions`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn


def with_parts(spec: Any, **parts: Any) -> Any:
    """A spec of Megatron's with some of its submodules replaced.

    The spec is a ModuleSpec, or from 0.18 on, for MLPs and experts, a partial of what builds it.
    """
    if isinstance(spec, ModuleSpec):
        return replace(spec, submodules=replace(spec.submodules, **parts))
    given: dict[str, Any] = spec.keywords
    submodules = replace(given["submodules"], **parts)
    return partial(spec.func, *spec.args, **given | {"submodules": submodules})


def gradients_for_norm(optimizer: Any) -> list[Tensor]:
    """The main gradients whose squares this rank adds to the norm: each parameter once.

    From 0.19 on the optimizer keeps norms by group; here everything is in the group without a name.
    """
    named = getattr(optimizer, "get_grads_for_grad_norm", None)
    gradients: list[Tensor] = (named or optimizer.get_main_grads_for_grad_norm)()
    return gradients


def let_go_after_forward(model: nn.Module) -> None:
    """Make layers keep nothing that they computed, since its graph would keep the model alive.

    A dispatcher of experts has the routers' scores in an attribute. From 0.19 on a layer has its
    hidden states in one until its MLP is done. Recomputation stops before that, once torch has what
    it needs.

    Args:
        model: before `recompute_modules` wraps its layers.
    """
    for module in model.modules():
        holder, name = getattr(module, "token_dispatcher", None), "probs"
        if hasattr(module, "mlp_norm_manager"):
            holder, name = module, "mlp_norm_manager"
        if holder is not None:
            vars(module)["forward"] = partial(_letting_go, holder, name, module.forward)


def _letting_go(
    holder: Any, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    try:
        return forward(*args, **kwargs)
    finally:
        setattr(holder, name, None)


def routers_need_no_transformer_engine() -> None:
    """Let routers compute without Transformer Engine.

    0.16 asks whether one of its functions is None, but sets that name only if the package is
    installed.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


_NEEDS_NOTHING = {
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: "
    "full_param_layout not provided",
}
"""Loggers, and how the lines of theirs begin that ask the user for what is ours to do."""


def hide_advice_to_us() -> None:
    """Keep two lines of 0.18 and 0.19 out of a run's log. All others stay.

    One says that GPTModel gets only fixes, the other that DistributedDataParallel works out the
    layout of its buffers by itself.
    """
    for name, start in _NEEDS_NOTHING.items():
        logging.getLogger(name).addFilter(_Without(start))


@dataclass(frozen=True)
class _Without(logging.Filter):
    """All records but those that begin so. Two of them are equal, so that a logger takes one."""

    start: str

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self.start)
