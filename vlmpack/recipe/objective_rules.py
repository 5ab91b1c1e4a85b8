"""Rules about the objective. `rules.py` says what a rule is."""

from __future__ import annotations

from vlmpack.addresses import registered_name
from vlmpack.recipe.data import DataSection
from vlmpack.recipe.derived import longest_sample, plan_alignment
from vlmpack.recipe.engine_rules import ModelConfig
from vlmpack.recipe.objective import KNOBS, ObjectiveSection
from vlmpack.recipe.problems import Problem
from vlmpack.recipe.schema import ModelSection, PackingSection, ParallelismSection, TrainingSection
from vlmpack.recipe.trainable import COMPONENTS, TrainableSection


def knobs_belong_to_an_objective(objective: ObjectiveSection) -> list[Problem]:
    """A knob says nothing beside an objective that does not have it."""
    plain, problems = ObjectiveSection(), []
    for name in ObjectiveSection.model_fields:
        owners = [owner for owner, knobs in KNOBS.items() if name in knobs]
        value = getattr(objective, name)
        if owners and objective.name not in owners and value != getattr(plain, name):
            message = (
                f"{value}, but objective.name '{objective.name}' has no such knob; use "
                f"objective.name: {' or '.join(owners)}, or leave it out"
            )
            problems.append(Problem(("objective", name), message))
    return problems


def fingerprints_are_of_programs(objective: ObjectiveSection) -> list[Problem]:
    """Objectives of this package are told apart by its version."""
    if objective.fingerprint is None or registered_name(objective.name) is not None:
        return []
    message = (
        f"'{objective.fingerprint}', but objective.name '{objective.name}' is no program's; leave "
        "it out"
    )
    return [Problem(("objective", "fingerprint"), message)]


def smoothing_needs_probabilities(objective: ObjectiveSection) -> list[Problem]:
    """Only the sigmoid loss has a chance that a pair is the wrong way round."""
    if objective.loss == "sigmoid" or not objective.label_smoothing:
        return []
    message = (
        f"{objective.label_smoothing}, but objective.loss '{objective.loss}' has no probabilities "
        "to smooth; use sigmoid, or leave it out"
    )
    return [Problem(("objective", "label_smoothing"), message)]


def pairs_are_counted(objective: ObjectiveSection, packing: PackingSection) -> list[Problem]:
    """A step trains `training.global_batch_size` pairs, in rows of any number."""
    if not objective.learns_pairs or not packing.facts.plans_rows:
        return []
    problems = []
    if packing.scope != "batch":
        message = (
            f"{packing.scope} counts rows, but objective.name '{objective.name}' trains "
            "training.global_batch_size pairs in every step; use batch"
        )
        problems.append(Problem(("packing", "scope"), message))
    for name in ("pad_to_max_length", "pad_cu_seqlens"):
        if getattr(packing, name):
            message = (
                "true, but rows of pairs have no fixed shape yet; leave it out with objective.name "
                f"'{objective.name}'"
            )
            problems.append(Problem(("packing", name), message))
    return problems


def rollouts_keep_their_images(objective: ObjectiveSection, data: DataSection) -> list[Problem]:
    """A policy is trained on what its sampler saw."""
    if not objective.learns_rollouts or data.over_long != "shrink_images":
        return []
    message = (
        f"shrink_images, but objective.name '{objective.name}' trains on answers to the images "
        "that their sampler saw. Use drop or error, and bound images by images.* in both"
    )
    return [Problem(("data", "over_long"), message)]


def groups_are_of_rollouts(objective: ObjectiveSection, data: DataSection) -> list[Problem]:
    """Other samples have no group."""
    if data.group_by != "group" or objective.learns_rollouts:
        return []
    message = (
        f"group, but objective.name '{objective.name}' learns from no rollouts; use image or none"
    )
    return [Problem(("data", "group_by"), message)]


def pairs_have_one_answer_each(objective: ObjectiveSection, data: DataSection) -> list[Problem]:
    """A pair is one sample, whose prompt is not learnt, and so is a rollout."""
    if data.learn != "each_answer" or not (objective.learns_pairs or objective.learns_rollouts):
        return []
    what = "the two answers of a pair" if objective.learns_pairs else "the answer of a rollout"
    message = (
        f"each_answer, but objective.name '{objective.name}' learns {what} alone, in one sample; "
        "leave it out"
    )
    return [Problem(("data", "learn"), message)]


def rows_hold_a_pair(
    objective: ObjectiveSection,
    packing: PackingSection,
    training: TrainingSection,
    parallelism: ParallelismSection,
) -> list[Problem]:
    """The longest pair, each sequence rounded up, fits a row."""
    if not objective.learns_pairs or not packing.facts.plans_rows or packing.max_tokens is None:
        return []
    alignment = plan_alignment(packing, parallelism)
    longest = longest_sample(training, alignment, pairs=True)
    if packing.max_tokens >= longest:
        return []
    message = (
        f"{packing.max_tokens}, but the longest pair takes up to {longest} tokens "
        f"(training.seq_length {training.seq_length} for both, each rounded up to "
        f"packing.alignment {alignment}). Use {longest} or more, or lower training.seq_length"
    )
    return [Problem(("packing", "max_tokens"), message)]


def pairs_are_averaged_alone(objective: ObjectiveSection, model: ModelSection) -> list[Problem]:
    """A loss over all tokens of a row has no place beside one that is averaged over answers."""
    answers = objective.learns_pairs or objective.learns_rollouts
    if not answers or not model.router_aux_loss_coef:
        return []
    what = "pairs" if objective.learns_pairs else "answers"
    message = (
        f"{model.router_aux_loss_coef}: the balancing loss looks across all tokens of a row, and "
        f"objective.name '{objective.name}' averages over {what}, whatever row they are in. Use 0"
    )
    return [Problem(("model", "router_aux_loss_coef"), message)]


def adapters_alone_are_trained(
    objective: ObjectiveSection, trainable: TrainableSection, config: ModelConfig
) -> list[Problem]:
    """With its adapters off a model is the reference where all its other weights stay."""
    if not objective.has_reference or objective.reference != "adapters_off":
        return []
    parts = COMPONENTS if "vision_config" in config.values else ("language",)
    full = [f"trainable.{name}: full" for name in parts if getattr(trainable, name) == "full"]
    full += ["trainable.lora.modules_to_save"] * bool(trainable.lora.modules_to_save)
    if not full and trainable.uses("lora"):
        return []
    where = ("objective", "reference")
    if not full:
        message = "'adapters_off', but no component has adapters; use lora, or reference: cached"
        return [Problem(where, message)]
    message = (
        f"'adapters_off', but weights that are no adapters are trained too ({', '.join(full)}), so "
        "without its adapters the model is not the one that the run began with. Use frozen or lora "
        "there, or reference: cached"
    )
    return [Problem(where, message)]


def adapters_are_switched_off_on_hf(
    objective: ObjectiveSection, model: ModelSection
) -> list[Problem]:
    """The processes of a Megatron replica do not all have the reference's numbers."""
    if objective.reference != "adapters_off" or model.backend == "hf":
        return []
    message = "'adapters_off' needs model.backend: hf; with 'mcore' use cached"
    return [Problem(("objective", "reference"), message)]


def a_reference_is_kept_where_there_is_one(objective: ObjectiveSection) -> list[Problem]:
    """Nothing is written where each step makes its own."""
    if objective.keeps_reference or not objective.has_reference or objective.reference_dir is None:
        return []
    message = (
        f"{objective.reference_dir}, but objective.reference '{objective.reference}' keeps no "
        "numbers; leave it out, or use reference: cached"
    )
    return [Problem(("objective", "reference_dir"), message)]


def tokens_are_averaged_by_a_constant(objective: ObjectiveSection) -> list[Problem]:
    """A constant is needed where sums are divided by it, and says nothing elsewhere."""
    is_needed = objective.learns_rollouts and objective.average == "constant"
    if is_needed == (objective.average_tokens is not None) or not objective.learns_rollouts:
        return []
    if is_needed:
        message = (
            "missing, but objective.average 'constant' divides the sum of an answer by it. Give "
            "the most tokens that an answer may have"
        )
    else:
        message = (
            f"{objective.average_tokens}, but objective.average '{objective.average}' divides by "
            "what it counts; use average: constant, or leave it out"
        )
    return [Problem(("objective", "average_tokens"), message)]


def corrections_compare_two_policies(objective: ObjectiveSection) -> list[Problem]:
    """A correction is the old policy over the sampler's."""
    if objective.correction == "none":
        limit = ObjectiveSection().correction_limit
        if not objective.learns_rollouts or objective.correction_limit == limit:
            return []
        message = f"{objective.correction_limit}, but objective.correction is none; leave it out"
        return [Problem(("objective", "correction_limit"), message)]
    if objective.old == "recomputed":
        return []
    message = (
        f"'{objective.correction}' weighs by old policy over sampler, which is 1 with "
        "objective.old 'sampler'. Use old: recomputed, or correction: none"
    )
    return [Problem(("objective", "correction"), message)]


def a_divergence_has_a_weight(objective: ObjectiveSection) -> list[Problem]:
    """Without a weight there is no reference model."""
    if not objective.learns_rollouts or objective.kl_weight:
        return []
    plain, problems = ObjectiveSection(), []
    for name in ("kl", "reference", "reference_dir"):
        value = getattr(objective, name)
        if value != getattr(plain, name):
            message = f"{value}, but objective.kl_weight is 0; give a weight, or leave it out"
            problems.append(Problem(("objective", name), message))
    return problems
