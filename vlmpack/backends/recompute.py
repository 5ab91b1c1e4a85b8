"""Activation checkpointing, the same for transformers' layers and Megatron's.

    value of `model.activation_checkpointing` -> which layers run inside torch's checkpoint, and
    what such a layer keeps:

    none        no layer does
    selective   every layer; outputs of matrix products and of attention kernels are kept, norms,
                activations, rotations and the like are computed again
    n           every n-th layer of a stack; it keeps its input alone
    full        every layer; likewise

Values and gradients are those of `none` bit for bit wherever kernels are deterministic. `selective`
recognises what it keeps at torch's dispatcher, so kernels that do not go through it (Transformer
Engine's) are recomputed. Kept tensors must not be overwritten. torch notices when its own operators
do that, but not when a collective (`recipe.engine_rules.why_not_selective`) or a kernel does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from vlmpack.backends.offload import Offload
from vlmpack.errors import CapabilityError
from vlmpack.recipe.schema import Recomputed, is_recomputed

KEPT = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::addmm_",
        "aten::_scaled_mm",
        "aten::_grouped_mm",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "torch_attn::_varlen_attn",
        "flash_attn::_flash_attn_varlen_forward",
        "vlmpack::wide_attention",
    }
)
"""Operators whose outputs `selective` keeps. Batched products (`bmm`) are those of scores and of
recurrences, which are large and cheap, so they are made again."""


_keeps_products = True


@contextmanager
def keep_no_products() -> Iterator[None]:
    """While it is open, `selective` keeps no output of an operator."""
    global _keeps_products
    before, _keeps_products = _keeps_products, False
    try:
        yield
    finally:
        _keeps_products = before


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saves = _keeps_products and operator.name().partition(".")[0] in KEPT
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


Run = Callable[..., Any]
"""Calls its first argument with the others, and computes it again in the backward pass."""


def _run(value: Recomputed, *, draws: bool) -> Run:
    arguments: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws}
    if value == "selective":
        arguments["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    return partial(checkpoint, **arguments)


def recompute_layers(
    model: Any, value: Recomputed, *, draws: bool, offloaded_from: torch.device | None = None
) -> None:
    """Activation checkpointing of a transformers model, of its towers too.

    transformers' own switch also makes the output of every embedding, patches included, ask for a
    gradient, and warns where it finds none. Reentrant checkpoints need that, but ours are not
    reentrant. A frozen tower would be recomputed for nothing, since its blocks record no graph as
    long as no input asks for a gradient. So only the flags are set.

    Args:
        draws: whether layers draw random numbers, which recomputation must repeat.
        offloaded_from: the device whose memory inputs of these layers leave; None if they stay.

    Raises:
        CapabilityError: transformers does not do it for the model's class, or as `Offload`.
    """
    if value == "none":
        return
    if not model.supports_gradient_checkpointing:
        raise CapabilityError(
            f"model.activation_checkpointing: transformers computes no layer of "
            f"{type(model).__name__} again; set it to none"
        )
    run = _run(value, draws=draws)
    if offloaded_from is not None:
        run = Offload(run, offloaded_from)
    model._set_gradient_checkpointing(gradient_checkpointing_func=run)
    for place, layer in stacked_layers(model):
        layer.gradient_checkpointing = is_recomputed(place, value)


def stacked_layers(model: nn.Module) -> Iterator[tuple[int, Any]]:
    """Every layer that transformers checkpoints, with its place in its stack."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for stack in model.modules():
        if isinstance(stack, nn.ModuleList):
            layers = [layer for layer in stack if isinstance(layer, GradientCheckpointingLayer)]
            yield from enumerate(layers)


def recompute_modules(layers: Mapping[int, nn.Module], value: Recomputed) -> None:
    """Activation checkpointing of layers that are called with tensors by name, such as Megatron's.

    They draw no random numbers. Hooks of a layer are not recomputed.

    Args:
        layers: of one stack, or of a pipeline stage, by their places in the whole stack.
    """
    run = _run(value, draws=False)
    for place, layer in layers.items():
        if is_recomputed(place, value):
            vars(layer)["forward"] = _again(layer, layer.forward, run)


def _again(layer: nn.Module, forward: Run, run: Run) -> Run:
    def computed(*args: Any, **kwargs: Any) -> Any:
        return run(forward, *args, **kwargs) if layer.training else forward(*args, **kwargs)

    return computed


def draws_random_numbers(model: Any, *, adapter_dropout: float) -> bool:
    """Whether training draws random numbers inside layers, for dropout or for jitter of routers.

    Entries of config.json count whether the class reads them or not.
    """
    if adapter_dropout > 0:
        return True
    rates = (getattr(m, name, 0) for m in model.modules() for name in ("p", "drop_prob"))
    config = model.config.to_dict()
    return any(isinstance(rate, float) and rate > 0 for rate in (*rates, *_rates(config)))


def _rates(config: Mapping[str, Any]) -> Iterator[Any]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _rates(value)
        elif "drop" in str(key) or "jitter" in str(key):
            yield value
