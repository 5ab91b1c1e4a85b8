"""What an adapter folder's adapter_config.json says, in peft's words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmpack.errors import ModelError
from vlmpack.whole_file import read_json

NAME = "adapter_config.json"

_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations, peft's `init_lora_weights`, whose adapters do not fit the folder's weights."""

_SUBTRACTED = ("pissa", "olora")
"""Those of them that took s B A, as it started, out of the weights."""

_IN_NO_WEIGHT = {
    "alora_invocation_tokens": "some tokens switch them on (aLoRA)",
    "arrow_config": "a router chooses among them (Arrow)",
    "use_qalora": "they are those of quantised groups (QA-LoRA)",
    "layer_replication": "they repeat layers of the model",
    "megatron_config": "they are those of Megatron's parallel layers",
}
"""Settings of adapters that no weight can hold."""

_MAX_SCALE = 3.4e38
"""About the largest number of float32."""

_OF = "alpha_pattern of "

_UNKNOWN_HERE = {
    "lora_bias": "biases beside B, which a layer without a bias cannot take",
    "fan_in_fan_out": "weights that lie the other way round",
    "trainable_token_indices": "rows of embeddings",
    **dict.fromkeys(
        ("kasa_config", "monteclora_config", "use_bdlora", "velora_config"), "a variant of LoRA"
    ),
}


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The content of a folder's adapter_config.json, or why it cannot be read."""

    folder: Path
    values: Mapping[str, object]
    unreadable: str | None = None

    @classmethod
    def read(cls, folder: Path) -> AdapterConfig:
        """The adapter config of a folder.

        Raises:
            ModelError: it is missing or unreadable; the message has no key in front.
        """
        path = folder / NAME
        if not folder.is_dir():
            raise ModelError(f"{folder} is not a folder; expected adapters in peft's format")
        try:
            content = read_json(path, object, any_number=True)
        except FileNotFoundError:
            inner = folder / "adapter"
            hint = f" (a run's are in {inner})" if (inner / NAME).is_file() else ""
            raise ModelError(
                f"{folder} has no {NAME}; expected adapters in peft's format{hint}"
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(content, dict):
            raise ModelError(f"{path} holds no JSON object")
        return cls(folder, content)

    @property
    def refusal(self) -> str | None:
        """Why these are no adapters that can be gone on with or merged; None where they are."""
        values = self.values
        if values.get("peft_type") != "LORA":
            return f"its peft_type is {values.get('peft_type')!r}; expected LORA"
        if "swift_type" in values:
            return "it is in ms-swift's own format; expected peft's (swift export --to_peft_format)"
        init = values.get("init_lora_weights")
        changes = isinstance(init, str) and init.lower().startswith(_CHANGE_THE_BASE)
        if changes and not (self.start or self.residual):
            return (
                f"its adapters started as {init!r}, which changes the weights of the model. "
                "Convert them with peft's path_initial_model_for_weight_conversion"
            )
        if values.get("bias", "none") != "none":
            return f"it has trained biases (bias: {values['bias']!r}); expected none"
        for key, why in _IN_NO_WEIGHT.items():
            if values.get(key):
                return f"no weight can hold its adapters: {why}. Load them with the model by peft"
        for key, scale in self._scales().items():
            if not isinstance(scale, int | float) or not abs(scale) <= _MAX_SCALE:
                return f"its {key} is {str(scale)[:9]}; expected a finite number of float32"
        return None

    @property
    def start(self) -> Path | None:
        """The folder inside with the adapters as they started, as LLaMA-Factory's `pissa_init`.

        None where these did not start by PiSSA or OLoRA, or were saved without it.
        """
        return self._inside(f"*_init/{NAME}")

    @property
    def residual(self) -> Path | None:
        """The folder inside with the model that PiSSA or OLoRA left; None as for `start`."""
        return self._inside("*/config.json")

    def _inside(self, pattern: str) -> Path | None:
        init = str(self.values.get("init_lora_weights")).lower()
        found = sorted(self.folder.glob(pattern)) if init.startswith(_SUBTRACTED) else []
        return found[0].parent if len(found) == 1 else None

    @property
    def unknown_here(self) -> str | None:
        """What of them a recipe has no words for; None where it has them all."""
        patterns = self.values.get("rank_pattern"), self.values.get("alpha_pattern")
        if self.values.get("target_parameters") and any(patterns):
            return "ranks or scales that differ by layer beside adapters of parameters"
        return next((what for key, what in _UNKNOWN_HERE.items() if self.values.get(key)), None)

    def alpha_of(self, layer: str) -> float:
        """The alpha of a layer's adapter; the first pattern that its name ends in decides."""
        alpha, *others = self._scales().items()
        try:
            fits = (
                one for key, one in others if re.match(rf"(.*\.)?({key.removeprefix(_OF)})$", layer)
            )
            found: Any = next(fits, alpha[1])
        except re.error as error:
            raise ModelError(f"{self.folder}: its alpha_pattern cannot be read: {error}") from None
        return float(found) * self.growth("lora_alpha")

    def growth(self, key: str) -> int | float:
        """The factor of `r` or `lora_alpha` where the start of adapters is subtracted from them.

        Ranks double, and scales stay.
        """
        if self.start is None:
            return 1
        return 2**0.5 if key == "lora_alpha" and self.values.get("use_rslora") else 2

    def _scales(self) -> dict[str, object]:
        """What updates are multiplied by, each with its key; that of most layers comes first."""
        scales = {"lora_alpha": self.values.get("lora_alpha", 8)}
        differing = self.values.get("alpha_pattern")
        if isinstance(differing, Mapping):
            scales |= {_OF + layer: scale for layer, scale in differing.items()}
        return scales

    def settings(self) -> Iterator[tuple[str, object]]:
        """The fields and values that `trainable.lora` of a recipe must have."""
        for field, key in (("rank", "r"), ("alpha", "lora_alpha")):
            value = self.values.get(key)
            yield field, value * self.growth(key) if isinstance(value, int | float) else value
        for field, key in (("dora", "use_dora"), ("rslora", "use_rslora")):
            yield field, bool(self.values.get(key, False))
