"""vlmpack: finetune vision-language models on packed sequences.

Attributes are resolved on first use, so that `import vlmpack` stays cheap and free of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlmpack.version import __version__ as __version__

if TYPE_CHECKING:
    from vlmpack.api import FinetuneResult as FinetuneResult
    from vlmpack.api import finetune as finetune
    from vlmpack.api import replay as replay
    from vlmpack.api import sample as sample
    from vlmpack.encode import Encoder as Encoder
    from vlmpack.errors import ExtensionError as ExtensionError
    from vlmpack.errors import VlmpackError as VlmpackError
    from vlmpack.own_loop import encode_sample as encode_sample
    from vlmpack.own_loop import packed_model as packed_model
    from vlmpack.own_loop import vlm_step as vlm_step
    from vlmpack.packing import pack_batch_sequences as pack_batch_sequences
    from vlmpack.packing import pack_padded_batch as pack_padded_batch
    from vlmpack.proof.judge import judge as judge
    from vlmpack.recipe import Recipe as Recipe
    from vlmpack.recipe import load_recipe as load_recipe
    from vlmpack.run.sample import Drawing as Drawing
    from vlmpack.training.callbacks import STOP as STOP
    from vlmpack.training.callbacks import Callback as Callback
    from vlmpack.training.callbacks import Event as Event
    from vlmpack.training.objective import Objective as Objective

_NAMES = {
    "vlmpack.api": ("FinetuneResult", "finetune", "replay", "sample"),
    "vlmpack.encode": ("Encoder",),
    "vlmpack.errors": ("ExtensionError", "VlmpackError"),
    "vlmpack.own_loop": ("encode_sample", "packed_model", "vlm_step"),
    "vlmpack.packing": ("pack_batch_sequences", "pack_padded_batch"),
    "vlmpack.proof.judge": ("judge",),
    "vlmpack.recipe": ("Recipe", "load_recipe"),
    "vlmpack.run.sample": ("Drawing",),
    "vlmpack.training.callbacks": ("STOP", "Callback", "Event"),
    "vlmpack.training.objective": ("Objective",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'vlmpack' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
