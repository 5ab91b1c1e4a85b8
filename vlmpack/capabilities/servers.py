"""What servers take of an export.

The facts are those of `tools/servers/facts.json`, which are read from the servers' loading code. A
test compares this table with them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vlmpack.errors import CapabilityError

_NO_CLASS = "it has no class for this architecture"
_OWN_CONFIG = "it reads a config.json with other keys than transformers' class has"
_TOWER = ((r"^(model\.)?vision_tower\.(?!vision_model\.)", r"\1vision_tower.vision_model."),)
"""SigLIP as published files name it. Folders that transformers 5 made have another form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server, as its loading code was read.

    Args:
        refused: model_type -> why it does not take an export.
        renamed: model_type -> patterns of names that it has no place for, each with what it looks
            for instead.
    """

    title: str
    refused: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)

    def check(self, model_type: str, adapted: Sequence[str] | None) -> None:
        """Check that it takes an export.

        Args:
            adapted: the components that an adapter folder has something of; None for the whole
                model.

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
    ),
    "sglang": Server(
        title="SGLang 0.5.23",
        refused={
            "nemotron_h_omni": _OWN_CONFIG,
            **dict.fromkeys(("idefics3", "internvl", "llava_onevision", "smolvlm"), _NO_CLASS),
        },
        renamed={"gemma3": _TOWER},
    ),
}
