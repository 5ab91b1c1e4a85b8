"""Where megatron-core 0.16 to 0.19 differ in what is used here: no other module tells them apart.

Each function takes what it is handed as it is, so that a version in between needs no number here.
The versions themselves, and Transformer Engine's for each, are in `capabilities.versions`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor


def with_parts(spec: Any, **parts: Any) -> Any:
    """A spec of Megatron's with some of its submodules replaced.

    Args:
        spec: a ModuleSpec; from 0.18 on a partial of what builds it, for MLPs and experts.
        parts: fields of its submodules.
    """
    if isinstance(spec, ModuleSpec):
        return replace(spec, submodules=replace(spec.submodules, **parts))
    given: dict[str, Any] = spec.keywords
    submodules = replace(given["submodules"], **parts)
    return partial(spec.func, *spec.args, **given | {"submodules": submodules})


def gradients_for_norm(optimizer: Any) -> list[Tensor]:
    """The main gradients whose squares this rank adds to the norm: each parameter once.

    Args:
        optimizer: of one kind of parameter; from 0.19 on it keeps norms by group, and everything
            here is in the one that has no name.
    """
    named = getattr(optimizer, "get_grads_for_grad_norm", None)
    gradients: list[Tensor] = (named or optimizer.get_main_grads_for_grad_norm)()
    return gradients


def routers_need_no_transformer_engine() -> None:
    """Let routers compute without Transformer Engine: 0.16 asks whether one of its functions is
    None, and has set that only where the package is installed."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
