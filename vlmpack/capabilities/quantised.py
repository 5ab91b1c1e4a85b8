"""Model folders whose weights are quantised: which can be trained, by their config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vlmpack.capabilities.prediction import language_config

TRAINED_BESIDE = "bitsandbytes"
"""The method whose layers pass gradients to adapters beside them, under engine hf."""
_KEYS = ("quantization_config", "compression_config")
"""What config.json calls the section; the second is that of earlier compressed-tensors."""


def quantised_refusal(config: Mapping[str, object]) -> str | None:
    """Why the weights of a folder cannot be trained; None for dense ones, and for those that
    bitsandbytes packed.

    Other methods hold integers, or floats of 8 bits with scales beside them. Their kernels are for
    inference: some return no gradient, and none takes an optimizer's step.

    Args:
        config: the content of its config.json.
    """
    for method in _methods(config):
        if method != TRAINED_BESIDE:
            return (
                f"its weights are quantised by {method} (quantization_config), and vlmpack trains "
                f"dense ones, or adapters beside those of {TRAINED_BESIDE}; expected the model "
                "that it was made from, often the same name without the suffix "
                "(trainable.lora.quantize: nf4 then holds frozen weights in 4 bits)"
            )
    return None


def _methods(config: Mapping[str, object]) -> Iterator[str]:
    for values in (config, language_config(config)):
        for key in _KEYS:
            section = values.get(key)
            if isinstance(section, Mapping):
                packed = section.get("load_in_4bit") or section.get("load_in_8bit")
                method = section.get("quant_method") or (TRAINED_BESIDE if packed else "")
                yield str(getattr(method, "value", method)) or "an unnamed method"
            elif section is not None:
                yield "an unnamed method"
