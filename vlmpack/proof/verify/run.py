"""All checks of a recipe in order, on one process or under torchrun.

The main rank alone runs the reference, then lets go of it; every rank runs the engine. The verdict
is the same on all ranks.
"""

from __future__ import annotations

import gc
import logging
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import accelerate
import torch

from vlmpack.activity import ACTIVITY
from vlmpack.build.compute import compute_dtype
from vlmpack.build.data import build_encoder, open_split
from vlmpack.build.date import settle_date
from vlmpack.build.engine import check_model
from vlmpack.build.setup import Setup
from vlmpack.capabilities.versions import installed_versions
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.pipeline import TrainData
from vlmpack.data.protocols import Collator
from vlmpack.distributed import Ranks
from vlmpack.proof.measure import Check
from vlmpack.proof.rows.checks import check_rows
from vlmpack.proof.verify.answers import check_answers, check_ids
from vlmpack.proof.verify.engine import (
    Dtype,
    as_it_was,
    build_verified_engine,
    verified_setup,
)
from vlmpack.proof.verify.layouts import group_samples, layouts, rows_in_words
from vlmpack.proof.verify.memory import on_every_rank, require_memory
from vlmpack.proof.verify.numbers import StockRuns, verify_rows
from vlmpack.proof.verify.samples import (
    LABELS_IN_BFLOAT16,
    Chosen,
    VerifiedRow,
    choose_samples,
    make_row,
)
from vlmpack.proof.verify.tiny import tiny_model
from vlmpack.recipe import Recipe
from vlmpack.recipe.derived import multiples
from vlmpack.version import __version__

logger = logging.getLogger("vlmpack")

RANDOM_WEIGHTS = "random weights, the folder's weights were not read"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """What is verified.

    Args:
        num_samples: samples in the row.
        dtype: float32, or the recipe's.
        tiny: verify a tiny model of the same architecture.
        scratch: folder in which the tiny model has one of its own for a while, on a file system
            that all ranks see.
    """

    num_samples: int = 8
    dtype: Dtype = "float32"
    tiny: bool = False
    scratch: Path = Path("verify")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was found.

    Args:
        checks: the table, in order.
        facts: what it was found on: model, samples, dtype, device, versions.
    """

    checks: tuple[Check, ...]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.fails)

    @property
    def passes(self) -> bool:
        """Whether packed equals unpacked."""
        return not self.failed


def verify_recipe(recipe: Recipe, ranks: Ranks, options: VerifyOptions) -> Verification:
    """Open a recipe as a run does, and verify it. Collective.

    Raises:
        VlmpackError: what is wrong with model folder or data, or a model that does not fit.
    """
    recipe = settle_date(recipe, ranks)
    model = recipe.model.path
    if not options.tiny:
        check_model(Path(model), ranks)
        return _verify_opened(recipe, ranks, options)
    with tiny_model(Path(model), options.scratch, ranks) as folder:
        tiny = recipe.model.model_copy(update={"path": str(folder)})
        found = _verify_opened(recipe.model_copy(update={"model": tiny}), ranks, options)
    return Verification(checks=found.checks, facts=found.facts | {"model": model})


def _verify_opened(recipe: Recipe, ranks: Ranks, options: VerifyOptions) -> Verification:
    """Open encoder and data, and verify. Collective."""
    setup = Setup(recipe=recipe, ranks=ranks, encoder=build_encoder(recipe))
    train = open_split(setup, "data.train", Ledger(None))
    assert train is not None  # data.train is required
    try:
        return verify_split(setup, train, options)
    finally:
        train.split.close()


def verify_split(setup: Setup, train: TrainData, options: VerifyOptions) -> Verification:
    """Verify a recipe whose data are open. Collective; nothing of the run changes.

    Raises:
        VlmpackError: a model that does not fit, or too few samples.
    """
    started = time.perf_counter()
    ACTIVITY.enter_alone("comparing packed with unpacked")
    recipe, ranks, encoder = setup.recipe, setup.ranks, setup.encoder
    own = compute_dtype(recipe.model, ranks.device)
    dtype = torch.float32 if options.dtype == "float32" else own
    parallel = recipe.parallelism
    split = parallel.tensor * parallel.pipeline
    if parallel.sharding == "fsdp":
        split *= ranks.dp_size
    on_every_rank(
        ranks,
        lambda: require_memory(
            encoder.folder, encoder.family.modules, setup.policy, ranks.device, split=split
        ),
    )
    chosen = ranks.on_main(
        lambda: choose_samples(
            train,
            options.num_samples,
            min_labels=0 if dtype is torch.float32 else LABELS_IN_BFLOAT16,
        )
    )
    with as_it_was():
        checks, engine_facts = _all_checks(setup, train, chosen, options.num_samples, dtype)
    facts = {
        "model": recipe.model.path,
        "tiny": options.tiny,
        "weights": RANDOM_WEIGHTS if options.tiny else "the folder's",
        "mode": train.config.mode.name,
        "objective": recipe.objective.name,
        "dtype": str(dtype).removeprefix("torch."),
        "engine": engine_facts,
        "samples_wanted": options.num_samples,
        "samples": [
            {
                "key": each.sample.key,
                "shard": each.ref.shard,
                "tokens": each.sample.length,
                "labels": each.num_labels,
                "images": each.num_images,
            }
            for each in chosen
        ],
        "versions": _versions(),
        "seconds": round(time.perf_counter() - started, 1),
    }
    return Verification(checks=tuple(checks), facts=facts)


def _all_checks(
    setup: Setup, train: TrainData, chosen: Sequence[Chosen], num_samples: int, dtype: torch.dtype
) -> tuple[list[Check], dict[str, str]]:
    """The checks of every way to lay the samples out, and the engine's description.

    Args:
        num_samples: of a row.
        dtype: that the engine computes in.
    """
    samples = [each.sample for each in chosen]
    ranks, encoder, context = setup.ranks, setup.encoder, setup.recipe.parallelism.context
    changed = verified_setup(setup, dtype)
    held: list[StockRuns] = []  # on the main rank alone: too large to send around

    def run_reference() -> None:
        logger.info("%-14s %d samples, unpacked, one by one", "stock", len(samples))
        held.append(
            StockRuns.make(
                encoder,
                samples,
                ranks.device,
                dtype=dtype,
                half_weights=setup.recipe.model.backend == "mcore",
                objective=setup.recipe.objective,
            )
        )

    ranks.on_main(run_reference)
    gc.collect()  # models are cycles; memory is needed for the next one now
    messages = [each.messages for each in chosen]
    of_texts = ranks.on_main(
        lambda: [check(encoder, samples, messages) for check in (check_ids, check_answers)]
    )
    checks = [check for check in of_texts if check is not None]
    facts: dict[str, str] = {}
    wanted = multiples(setup.recipe.parallelism).row
    for prefix, collator in layouts(setup, train):
        groups = group_samples(
            samples,
            num_samples,
            collator,
            budget=train.config.mode.budget if train.config.mode.facts.plans_rows else None,
        )
        rows = [
            make_row(collator, samples, numbers, encoder, row_multiple=wanted, context=context)
            for numbers in groups
        ]
        logger.info("%-14s %s", "engine", rows_in_words(len(rows), padded=rows[0].is_padded))
        found, facts = verify_layout(changed, collator, rows, held[0] if ranks.is_main else None)
        gc.collect()
        checks += [replace(check, name=prefix + check.name) for check in found]
    stock = ranks.broadcast_object(held[0].description if ranks.is_main else "")
    return checks, facts | {"stock": stock}


def verify_layout(
    setup: Setup, collator: Collator, rows: Sequence[VerifiedRow], reference: StockRuns | None
) -> tuple[list[Check], dict[str, str]]:
    """Everything about some rows, on an engine that is built for them. Collective.

    Args:
        setup: of the engine, see `verified_setup`.
        collator: that made the rows.
        reference: on the main rank.

    Returns:
        The checks, and the engine's description; on every rank the same.
    """

    encoder = setup.encoder

    def without_model() -> list[Check]:
        assert reference is not None
        own, counted_by = reference.positions, reference.positions_of
        return check_rows(
            [
                replace(row, positions=tuple(own[n] for n in row.numbers), counted_by=counted_by)
                for row in rows
            ]
        )

    found = setup.ranks.on_main(without_model)
    engine = build_verified_engine(setup)
    found += verify_rows(
        engine, setup.ranks, rows, collator, reference, encoder=encoder, optim=setup.recipe.optim
    )
    return found, dict(engine.description)


def _versions() -> dict[str, str]:
    own = {
        "vlmpack": __version__,
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
    }
    others = {name: found for name, found in installed_versions().items() if found is not None}
    return {"python": platform.python_version()} | own | others
