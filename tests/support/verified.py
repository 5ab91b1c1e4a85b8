"""The checks of `vlmpack verify` on samples that tests choose, without a data split."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from support.engines import single_rank
from support.shards import SHARD, RawSample

from vlmpack.build.engine import engine_spec
from vlmpack.encode import Encoder
from vlmpack.packing import EncodedSample, PackCollator
from vlmpack.proof.verify import Check
from vlmpack.proof.verify.numbers import StockRuns
from vlmpack.proof.verify.packed import as_it_was, verified_spec
from vlmpack.proof.verify.run import verify_layout
from vlmpack.proof.verify.samples import make_row
from vlmpack.recipe import Recipe, load_recipe
from vlmpack.recipe.derived import multiples


def recipe_for(folder: Path, **overrides: Any) -> Recipe:
    """A recipe on a model folder; `trainable__vision="frozen"` sets a field."""
    settings = {
        "model": {"path": str(folder), "attention": "segments"},
        "data": {"train": str(SHARD), "num_workers": 0},
        "packing": {"mode": "in_batch"},
        "training": {
            "micro_batch_size": 2,
            "global_batch_size": 2,
            "seq_length": 2048,
            "max_steps": 1,
        },
        "optim": {"lr": 1e-4},
        "run_dir": "unused",
    }
    recipe = load_recipe(settings)
    return load_recipe(recipe, {name.replace("__", "."): v for name, v in overrides.items()})


@dataclass
class Subject:
    """A model folder and some samples; `recipe_folder` where recipes refuse that folder."""

    folder: Path
    raw: list[RawSample]
    dtype: torch.dtype = torch.float32
    recipe_folder: Path | None = None

    @cached_property
    def encoder(self) -> Encoder:
        """Assistant-only labels."""
        return Encoder(self.folder)

    @cached_property
    def samples(self) -> list[EncodedSample]:
        """Encoded by vlmpack."""
        return [self.encoder.encode(sample.cooked()) for sample in self.raw]

    @cached_property
    def stock(self) -> StockRuns:
        """The stock model's runs."""
        with as_it_was():
            return StockRuns.make(
                self.encoder,
                self.samples,
                torch.device("cpu"),
                dtype=self.dtype,
                half_weights=False,
            )

    def collator(self, alignment: int = 8) -> PackCollator:
        """As a recipe's, with gaps."""
        return PackCollator(
            pad_token_id=self.encoder.pad_token_id,
            num_position_axes=self.encoder.num_position_axes,
            pad_to_multiple_of=alignment,
            total_multiple_of=alignment,
        )

    def checks(self, collator: Any = None, **overrides: Any) -> dict[str, Check]:
        """Of all samples in one row, by name."""
        collator = collator if collator is not None else self.collator()
        recipe = recipe_for(self.recipe_folder or self.folder, **overrides)
        spec = verified_spec(engine_spec(recipe, self.encoder, single_rank()), self.dtype)
        wanted = multiples(recipe.parallelism).row
        row = make_row(
            collator, self.samples, range(len(self.samples)), self.encoder, row_multiple=wanted
        )
        with as_it_was():
            found, _ = verify_layout(spec, collator, [row], self.stock)
        assert len({check.name for check in found}) == len(found)
        return {check.name: check for check in found}


def failed(checks: dict[str, Check]) -> set[str]:
    """Names of those that fail."""
    return {name for name, check in checks.items() if check.fails}
