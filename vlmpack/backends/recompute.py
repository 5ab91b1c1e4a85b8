"""Activation checkpointing of a transformers model."""

from __future__ import annotations

import warnings
from typing import Any


def recompute_layers(model: Any, *, preserve_rng_state: bool = True) -> None:
    """Recompute each layer in the backward pass.

    transformers then makes the output of every embedding, that of patches too, ask for a gradient,
    which reentrant checkpoints need. Ours are not, and a frozen tower would be recomputed for
    nothing: its blocks record no graph as long as nothing in front of them asks for a gradient.

    Args:
        model: of transformers.
        preserve_rng_state: whether a layer draws the same random numbers again, for which their
            state is read on the host: needed where something drops, and nothing for a CUDA graph.
    """
    with warnings.catch_warnings():
        # transformers 5.17 has this name alone; newer ones rename it and keep it until 6.
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(
            {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
        )
    if getattr(model, "_require_grads_hook", None) is not None:
        model.disable_input_require_grads()
