"""A run's reference model: the model that it starts with, whose log-probabilities are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vlmpack.backends.engine import Compute, Engine
from vlmpack.build.data import build_encoder, data_spec, open_split
from vlmpack.build.engine import (
    EngineSpec,
    build_engine,
    check_model,
    engine_spec,
    resolved_compute,
)
from vlmpack.build.objective import ObjectiveSpec, objective_spec
from vlmpack.build.run import resolve_date
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.pipeline import TrainData
from vlmpack.distributed import Ranks
from vlmpack.errors import RecipeError
from vlmpack.recipe import Recipe
from vlmpack.training.model_watch import ModelWatch, watched_model
from vlmpack.training.reference import (
    FLOORS,
    Noise,
    ReferenceFile,
    StartCheck,
    make_reference,
    measured_noise,
)
from vlmpack.training.run_dir import RunDir

RULE = "log-probabilities 1"
"""Changes whenever the same model would be given other numbers."""


@dataclass(frozen=True, slots=True)
class ReferencePass:
    """What a pass over one split came to.

    Args:
        split: `train` or `validation`.
        num_samples: of the split.
        num_computed: in this pass; the others were there.
    """

    split: str
    folder: Path
    num_samples: int
    num_computed: int


@dataclass(frozen=True, slots=True)
class Reference:
    """The reference model of a run, of whose answers numbers are kept.

    Args:
        spec: the engine that computes them, with the weights of the model folder.
        splits: whose pairs they are of, the training split first.
    """

    spec: EngineSpec
    objective: ObjectiveSpec
    splits: tuple[TrainData | None, ...]

    def refuse_other(self, model: ModelWatch) -> Mapping[str, str] | None:
        """Check that existing numbers are this run's, before the engine is built. Collective.

        Only then are the weights' digests waited for.

        Returns:
            The model's digests; None where there are no numbers, and none were waited for.

        Raises:
            ReferenceCacheError: a folder of another reference.
            RunIdentityError, ModelError: as `ModelWatch.compare_all`.
        """
        unknown, on_main = {"weights": "", "config": ""}, self.spec.ranks.on_main
        if not on_main(lambda: any(file.is_there for _, file in self._files(unknown))):
            return None
        digests = model.compare_all()

        def compare() -> None:
            for _, file in self._files(digests):
                if file.is_there:
                    file.refuse_other()

        on_main(compare)
        return digests

    def attach(
        self, engine: Engine, model: Mapping[str, str], total_steps: int | None = None
    ) -> list[ReferencePass]:
        """Give each split its reference, computed where it is not there yet. Collective.

        Before its first step the model is the old policy of rollouts too.

        Args:
            total_steps: see `ObjectiveSection.kept_columns`.

        Raises:
            ReferenceCacheError: a folder of another reference, or one that cannot be written.
        """
        passes, columns = [], self.objective.section.kept_columns(total_steps)
        for split, file in self._files(model) if columns else ():
            table, computed = make_reference(engine, split, self.spec.ranks, file)
            split.kept |= dict.fromkeys(columns, table)
            count = int(split.fitted.eligible.sum())
            passes.append(ReferencePass(file.folder.name, file.folder, count, computed))
        return passes

    def start_check(self, engine: Engine) -> StartCheck | None:
        """What looks at the first step of a new run; None without a reference. Collective.

        Raises:
            DataError: a bad sample whose class is not skipped.
        """
        section, train = self.objective.section, self.splits[0]
        if not section.learns_pairs or train is None:
            return None
        dtype = self._compute().dtype
        if not section.keeps_reference:
            cause = "adapters that do not begin without effect"
            return StartCheck(engine=engine, noise=Noise(FLOORS[dtype]), cause=cause)
        noise = measured_noise(engine, train, self.spec.ranks, dtype)
        cause = (
            f"the numbers in {self.objective.reference_folder} are of another model, or of other "
            "pairs. Set objective.reference_dir to another folder to have them made anew"
        )
        return StartCheck(engine=engine, noise=noise, cause=cause)

    def _files(self, model: Mapping[str, str]) -> list[tuple[TrainData, ReferenceFile]]:
        """Files of each split's numbers; empty if the objective keeps none."""
        section = self.objective.section
        if not section.kept_columns():
            return []
        return [
            (
                split,
                ReferenceFile(
                    self.objective.reference_folder / split.config.key.removeprefix("data."),
                    self._facts(split, model),
                    split.fitted.table.num_samples,
                    of_tokens=section.learns_rollouts,
                ),
            )
            for split in self.splits
            if split is not None
        ]

    def _facts(self, split: TrainData, model: Mapping[str, str]) -> dict[str, str]:
        """What decides the numbers, by name: model, tokens and pixels, computation, and pairs."""
        spec, compute, lora = self.spec, self._compute(), self.spec.policy.lora
        parts = {k: v for k, v in spec.encoder.fingerprint_parts.items() if k != "made_with"}
        attention = (
            compute.attention.name if compute.attention is not None else "transformer_engine"
        )
        data = {
            name: str(value)
            for name, value in split.identity.items()
            if name.startswith(split.config.key) or name == "objects"
        }
        facts = {
            "rule": RULE,
            "weights": model["weights"],
            "config": model["config"],
            **({"adapter": model["adapter"]} if "adapter" in model else {}),
            **parts,
            "dtype": str(compute.dtype).removeprefix("torch."),
            "attention": attention,
            "engine": spec.model.backend,
            "quantize": "none" if lora is None else lora.quantize,
            **data,
        }
        if self.objective.section.learns_rollouts:
            facts["numbers"] = "of tokens, at the temperatures of their draws"
        if split.config.data.over_long == "shrink_images":
            facts["shrunk to"] = str(split.config.training.seq_length)
        return facts

    def _compute(self) -> Compute:
        spec = self.spec
        return resolved_compute(spec.model, spec.parallelism, spec.encoder, spec.ranks.device)


def make_references(recipe: Recipe, ranks: Ranks) -> list[ReferencePass]:
    """The reference of a recipe's answers, before any run. Collective.

    Raises:
        RecipeError: an objective without a reference model, or one that keeps no numbers.
        VlmpackError: what is wrong with model folder, data or the reference's folder.
    """
    objective = recipe.objective
    if not (objective.has_reference or objective.kept_columns()):
        raise RecipeError(
            f"objective.name: '{objective.name}' has no reference model here; `vlmpack reference` "
            "is for objective.name: dpo, and for policy with kl_weight or old: recomputed"
        )
    if not objective.kept_columns():
        raise RecipeError(
            f"objective.reference: '{objective.reference}' keeps no numbers, since each "
            "step makes its own. `vlmpack reference` is for reference: cached"
        )
    recipe = resolve_date(recipe, ranks)
    encoder = build_encoder(recipe)
    data, spec = data_spec(recipe, encoder, ranks), engine_spec(recipe, encoder, ranks)
    check_model(encoder.folder, ranks)
    splits = [open_split(data, key, Ledger(None)) for key in ("data.train", "data.validation")]
    reference = Reference(spec, objective_spec(recipe), tuple(splits))
    try:
        run_dir, adapter = RunDir(Path(recipe.run_dir)), recipe.model.adapter
        with watched_model(encoder.folder, ranks, run_dir, adapter) as model:
            known = reference.refuse_other(model)
            engine = build_engine(spec)
            digests = known or model.compare_all()
        return reference.attach(engine, digests)
    finally:
        for split in splits:
            if split is not None:
                split.split.close()
