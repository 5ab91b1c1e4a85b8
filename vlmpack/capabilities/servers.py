"""What servers take of an export.

The facts are those of `tools/servers/facts.json`, which are read from the servers' loading code. A
test compares this table with them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from vlmpack.errors import CapabilityError

_NO_CLASS = "it has no class for this architecture"
_OWN_CONFIG = "it reads a config.json with other keys than transformers' class has"
_NO_DORA = "it computes no magnitudes"
_NO_MODULES = "it has no place for modules in full beside adapters"
_ONE_SCALE = "it scales every layer's by alpha / rank"
_TOWER = ((r"^(model\.)?vision_tower\.(?!vision_model\.)", r"\1vision_tower.vision_model."),)
"""SigLIP as published files name it. Folders that transformers 5 made have another form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server, as its loading code was read.

    Args:
        refused: model_type -> why it does not take an export.
        renamed: model_type -> patterns of names that it has no place for, each with what it looks
            for instead.
        refused_settings: keys of `trainable.lora` whose adapters it does not compute, each with
            why.
    """

    title: str
    refused: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    refused_settings: Mapping[str, str] = field(default_factory=dict)

    def check(
        self, model_type: str, adapted: Sequence[str] | None, settings: Collection[str] = ()
    ) -> None:
        """Check that it takes an export.

        Args:
            adapted: the components that an adapter folder has something of; None for the whole
                model.
            settings: keys of `trainable.lora` that are not as by default.

        Raises:
            CapabilityError: it does not.
        """
        if why := self.refused.get(model_type):
            raise CapabilityError(f"{self.title} does not load model_type {model_type}: {why}")
        if others := sorted(set(adapted or ()) - {"language"}):
            raise CapabilityError(
                f"{self.title} computes adapters on language layers alone, and these have some of "
                f"{' and '.join(others)}; add --merge for the whole model"
            )
        for key, why in self.refused_settings.items():
            if adapted is not None and key in settings:
                raise CapabilityError(
                    f"{self.title} does not take adapters with trainable.lora.{key}: {why}; add "
                    "--merge for the whole model"
                )

    def name(self, model_type: str, name: str) -> str:
        """The name that it looks for."""
        for pattern, other in self.renamed.get(model_type, ()):
            name = re.sub(pattern, other, name)
        return name


SERVERS: Mapping[str, Server] = {
    "vllm": Server(
        title="vLLM 0.33.0",
        refused={"nemotron_h_omni": _OWN_CONFIG},
        renamed={"gemma3": _TOWER, "llava_onevision": _TOWER},
        refused_settings={"dora": _NO_DORA, "modules_to_save": _NO_MODULES},
    ),
    "sglang": Server(
        title="SGLang 0.5.23",
        refused={
            "nemotron_h_omni": _OWN_CONFIG,
            **dict.fromkeys(("idefics3", "internvl", "llava_onevision", "smolvlm"), _NO_CLASS),
        },
        renamed={"gemma3": _TOWER},
        refused_settings={
            "dora": _NO_DORA,
            "modules_to_save": _NO_MODULES,
            **dict.fromkeys(("rslora", "rank_pattern", "alpha_pattern"), _ONE_SCALE),
        },
    ),
}
