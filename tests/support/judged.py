"""Models and samples for `vlmpack.judge`, with what a right collator of ms-swift's form makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.families import TEXT_FAMILIES, tiny_family_folder
from support.foreign import Feature, broken, features, load, packing
from torch import Tensor

from vlmpack.encode import Encoder
from vlmpack.proof.judge import Judgement, judge
from vlmpack.proof.judge.reference import token_losses

Collate = Callable[[Sequence[Feature]], Feature]


class Case:
    """A tiny model and samples of six lengths, with 0 to 3 images where it takes some."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = tiny_family_folder(name, folder)
        self.encoder = Encoder(self.folder)
        self.has_images = name not in TEXT_FAMILIES
        self.samples = features(self.encoder, images=self.has_images)[:6]

    def model(self, *, packed: bool = True) -> Any:
        """The stock model, with a stand-in for a varlen kernel where rows are packed."""
        return load(self.folder, self.encoder, packed=packed)

    def judge(
        self,
        fault: str = "",
        samples: Sequence[Feature] | None = None,
        collate: Collate | None = None,
        **options: Any,
    ) -> Judgement:
        """The packing collator, or another one, with one fault."""
        model = self.model()
        collate = collate or packing(model)
        given = self.samples if samples is None else samples
        return judge(model, broken(collate, fault) if fault else collate, given, **options)


def statuses(found: Judgement) -> dict[str, str]:
    """Check -> whether it passed, failed, or could not be seen."""
    return {one.check.name: one.check.status for one in found.findings}


def losses_of(model: Any, batch: Mapping[str, Any]) -> Tensor:
    """A `losses=` of somebody's, which does what is done without one."""
    given = {name: value for name, value in batch.items() if name != "labels"}
    return token_losses(model(**given, use_cache=False).logits, batch["labels"])
