"""A run's reference model: the model that it begins with, whose log-probabilities are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmpack.backends.engine import Engine
from vlmpack.build.compute import settled_compute
from vlmpack.build.data import build_encoder, open_split
from vlmpack.build.date import settle_date
from vlmpack.build.engine import build_engine, check_model
from vlmpack.build.setup import Setup
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.pipeline import TrainData
from vlmpack.distributed import Ranks
from vlmpack.errors import RecipeError
from vlmpack.recipe import Recipe
from vlmpack.training.model_watch import ModelWatch, watched_model
from vlmpack.training.reference import make_reference
from vlmpack.training.reference_file import ReferenceFile
from vlmpack.training.run_dir import RunDir
from vlmpack.training.start_check import FLOORS, Noise, StartCheck, measured_noise

RULE = "log-probabilities 1"
"""Changes whenever the same model would be given other numbers."""


@dataclass(frozen=True, slots=True)
class ReferencePass:
    """What a pass over one split came to.

    Args:
        split: `train` or `validation`.
        folder: where the numbers lie.
        num_pairs: of the split.
        num_computed: in this pass; the others were there.
    """

    split: str
    folder: Path
    num_pairs: int
    num_computed: int


def reference_folder(recipe: Recipe) -> Path:
    """Where a recipe's reference lies."""
    given = recipe.objective.reference_dir
    return Path(given) if given is not None else RunDir(Path(recipe.run_dir)).reference


def reference_facts(setup: Setup, model: Mapping[str, str], split: TrainData) -> dict[str, str]:
    """What decides the numbers, by name: model, tokens and pixels, way to compute, and pairs.

    Args:
        setup: of the run.
        model: digests of the model folder's weights and config, and of the run's first adapters.
        split: whose pairs they are of.
    """
    recipe, encoder = setup.recipe, setup.encoder
    compute = settled_compute(recipe.model, recipe.parallelism, encoder, setup.ranks.device)
    parts = {k: v for k, v in encoder.fingerprint_parts.items() if k != "made_with"}
    attention = compute.attention.name if compute.attention is not None else "transformer_engine"
    data = {
        name: str(value)
        for name, value in split.identity.items()
        if name.startswith(split.config.key)
    }
    facts = {
        "rule": RULE,
        "weights": model["weights"],
        "config": model["config"],
        **({"adapter": model["adapter"]} if "adapter" in model else {}),
        **parts,
        "dtype": str(compute.dtype).removeprefix("torch."),
        "attention": attention,
        "engine": recipe.model.backend,
        "quantize": recipe.trainable.lora.quantize if recipe.trainable.uses("lora") else "none",
        **data,
    }
    if recipe.data.over_long == "shrink_images":
        facts["shrunk to"] = str(recipe.training.seq_length)
    return facts


def attach_reference(
    setup: Setup, engine: Engine, model: Mapping[str, str], split: TrainData | None
) -> ReferencePass | None:
    """Give a split its reference, computed where it is not there yet; None where nobody asks for
    one. Collective; the engine has the weights of the model folder.

    Raises:
        ReferenceCacheError: a folder of another reference, or one that cannot be written.
    """
    if split is None or not setup.recipe.objective.keeps_reference:
        return None
    file = _file(setup, model, split)
    split.reference, computed = make_reference(engine, split, setup.ranks, file)
    return ReferencePass(file.folder.name, file.folder, int(split.fitted.eligible.sum()), computed)


def _file(setup: Setup, model: Mapping[str, str], split: TrainData) -> ReferenceFile:
    """Where the numbers of a split lie; its folder is named after the split."""
    return ReferenceFile(
        reference_folder(setup.recipe) / split.config.key.removeprefix("data."),
        reference_facts(setup, model, split),
        split.fitted.table.num_samples,
    )


def refuse_other_reference(
    setup: Setup, model: ModelWatch, splits: Sequence[TrainData | None]
) -> Mapping[str, str] | None:
    """See that numbers which are there already are this run's, before the engine is built: the
    weights' digests are waited for then. Collective.

    Returns:
        The model's digests; None where there are no numbers, and none were waited for.

    Raises:
        ReferenceCacheError: a folder of another reference.
        RunIdentityError, ModelError: as `ModelWatch.settle`.
    """
    if not setup.recipe.objective.keeps_reference:
        return None
    of_pairs, ranks = [split for split in splits if split is not None], setup.ranks
    unknown = {"weights": "", "config": ""}
    if not ranks.on_main(lambda: any(_file(setup, unknown, s).is_there for s in of_pairs)):
        return None
    digests = model.settle()

    def compare() -> None:
        for split in of_pairs:
            file = _file(setup, digests, split)
            if file.is_there:
                file.refuse_other()

    ranks.on_main(compare)
    return digests


def start_check(setup: Setup, engine: Engine, train: TrainData) -> StartCheck | None:
    """What looks at the first step of a new run; None without a reference. Collective; the engine
    has the weights of the model folder.

    Raises:
        DataError: a bad sample whose class is not skipped.
    """
    recipe = setup.recipe
    if not recipe.objective.learns_pairs:
        return None
    ranks = setup.ranks
    dtype = settled_compute(recipe.model, recipe.parallelism, setup.encoder, ranks.device).dtype
    if not recipe.objective.keeps_reference:
        noise = Noise(FLOORS[dtype])
        return StartCheck(
            engine=engine, noise=noise, cause="adapters that do not begin without effect"
        )
    noise = measured_noise(engine, train, ranks, dtype)
    cause = (
        f"the numbers in {reference_folder(recipe)} are of another model, or of other pairs; "
        "set objective.reference_dir to another folder to have them made anew"
    )
    return StartCheck(engine=engine, noise=noise, cause=cause)


def make_references(recipe: Recipe, ranks: Ranks) -> list[ReferencePass]:
    """The reference of a recipe's pairs, before any run. Collective.

    Raises:
        RecipeError: an objective without a reference model, or one that keeps no numbers.
        VlmpackError: what is wrong with model folder, data or the reference's folder.
    """
    if not recipe.objective.learns_pairs:
        raise RecipeError(
            [
                f"objective.name: '{recipe.objective.name}' has no reference model; "
                "`vlmpack reference` is for objective.name: dpo"
            ]
        )
    if not recipe.objective.keeps_reference:
        raise RecipeError(
            [
                f"objective.reference: '{recipe.objective.reference}' keeps no numbers: each step "
                "makes its own; `vlmpack reference` is for reference: cached"
            ]
        )
    recipe = settle_date(recipe, ranks)
    setup = Setup(recipe=recipe, ranks=ranks, encoder=build_encoder(recipe))
    folder = setup.encoder.folder
    check_model(folder, ranks)
    splits = [open_split(setup, key, Ledger(None)) for key in ("data.train", "data.validation")]
    try:
        run_dir, adapter = RunDir(Path(recipe.run_dir)), recipe.model.adapter
        with watched_model(folder, ranks, run_dir, adapter) as model:
            known = refuse_other_reference(setup, model, splits)
            engine = build_engine(setup)
            digests = known or model.settle()
        passes = [attach_reference(setup, engine, digests, split) for split in splits]
    finally:
        for split in splits:
            if split is not None:
                split.split.close()
    return [found for found in passes if found is not None]
