"""Rules about what the model's family can do, from its config.json and the capability table.

What an engine cannot do for any model is said by the other rules (`engine_rules.py`,
`trainable_rules.py`), in the table's own words. A folder that is missing, or is no transformers
model, breaks no rule here: the code that loads the model reports it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vlmpack.capabilities.limits import MCORE_FEATURES, Feature, Limit
from vlmpack.capabilities.refused import refusal
from vlmpack.capabilities.served import GENERIC, ServedModel
from vlmpack.capabilities.versions import installed_versions, version_limit
from vlmpack.recipe.data import DataSection, ImagesSection
from vlmpack.recipe.engine_rules import ModelConfig, used_splits
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.recipe.problems import KeyPath, Problem
from vlmpack.recipe.schema import ModelSection, PackingSection, ParallelismSection, TrainingSection
from vlmpack.recipe.trainable import TrainableSection


def model_is_served(config: ModelConfig) -> list[Problem]:
    """Some family trains it."""
    if not isinstance(config.content.get("model_type"), str):
        return []  # no transformers model: whoever loads it says so
    why = refusal(config.content)
    return [] if why is None else [Problem(("model", "path"), f"{config.folder}: {why}")]


def engine_runs_the_family(model: ModelSection, served: ServedModel) -> list[Problem]:
    """The engine has the family's layers."""
    if model.backend in served.engines:
        return []
    message = f"{model.backend!r}, but {served.title} {served.not_on_mcore}"
    return [Problem(("model", "backend"), message)]


def attention_runs_the_family(model: ModelSection, served: ServedModel) -> list[Problem]:
    """The attention that is asked for by name can run the family."""
    only = served.attention
    if only is None or model.attention == "auto" or model.attention in only.names:
        return []
    message = (
        f"{model.attention!r} cannot run {served.title}: {only.reason}; use auto or "
        f"{' or '.join(only.names)}"
    )
    return [Problem(("model", "attention"), message)]


def transformer_engine_has_the_layers(model: ModelSection, served: ServedModel) -> list[Problem]:
    """Layers beside attention are Megatron's local ones."""
    if model.attention != "transformer_engine" or model.backend != "mcore" or not served.layers:
        return []
    message = (
        f"'transformer_engine' replaces Megatron's layers, and has none for those of "
        f"{served.title} that carry state; use auto, segments, torch_varlen or flash_attn"
    )
    return [Problem(("model", "attention"), message)]


def family_has_the_features(
    model: ModelSection, served: ServedModel, sections: Mapping[str, object]
) -> list[Problem]:
    """The family has every feature that is asked for."""
    limits: dict[Feature, Limit] = dict(served.limits)
    if model.backend == "hf" and "mcore" not in served.engines:
        limits = dict.fromkeys(MCORE_FEATURES, served.only_on_mcore) | limits
    return [
        Problem(key, f"{value!r}, but {served.title} cannot: {limits[feature]}")
        for key, value, feature in _asked(sections)
        if feature in limits
    ]


def router_loss_of_a_family_of_ours(model: ModelSection, served: ServedModel) -> list[Problem]:
    """The loss of a mixture's router is added where a family says what its routers give."""
    if not model.router_aux_loss_coef or served.family != GENERIC:
        return []
    message = (
        f"{model.router_aux_loss_coef}, but no family of ours serves {served.title}, and the "
        f"generic one trains without the loss of its router. Leave it out"
    )
    return [Problem(("model", "router_aux_loss_coef"), message)]


def images_cost_less_when_shrunk(data: DataSection, served: ServedModel) -> list[Problem]:
    """Over-long samples are not given smaller images where these would cost as much."""
    if data.over_long != "shrink_images" or not served.whole_tiles:
        return []
    message = (
        f"'shrink_images', but {served.title} enlarges images to whole tiles or to a budget, so "
        "smaller ones have as many tokens. Use drop or error. Or use images.max_tiles where the "
        "model cuts images, and images.max_pixels where it has a budget"
    )
    return [Problem(("data", "over_long"), message)]


def image_bounds_are_the_familys(images: ImagesSection, served: ServedModel) -> list[Problem]:
    """Images are bounded by what the family's image processor has."""
    knobs = " and ".join(f"images.{name}" for name in served.pixel_knobs)
    instead = f"which has {knobs}" if knobs else "which has no bounds on images; leave it out"
    return [
        Problem(("images", name), f"{value}, but the model is {served.title}, {instead}")
        for name, value in images.set_values().items()
        if name not in served.pixel_knobs
    ]


def peft_is_installed(trainable: TrainableSection) -> list[Problem]:
    """Adapters have their package."""
    limit = version_limit("peft", installed_versions()["peft"])
    if limit is None:
        return []
    return [Problem(("trainable", name), f"'lora' {limit}") for name in trainable.uses("lora")]


def _asked(sections: Mapping[str, object]) -> Iterator[tuple[KeyPath, object, Feature]]:
    """(key, value, feature) of what a recipe asks for beyond one process and padded rows."""
    packing, split = sections.get("packing"), sections.get("parallelism")
    trainable, objective = sections.get("trainable"), sections.get("objective")
    if isinstance(packing, PackingSection) and packing.facts.feature is not None:
        yield ("packing", "mode"), packing.mode, packing.facts.feature
    if isinstance(split, ParallelismSection):
        for name, feature in used_splits(split).items():
            yield ("parallelism", name), getattr(split, name), feature
    if isinstance(objective, ObjectiveSection) and objective.learns_pairs:
        yield ("objective", "name"), objective.name, "DPO"
    training = sections.get("training")
    if isinstance(training, TrainingSection) and training.cuda_graphs != "none":
        yield ("training", "cuda_graphs"), training.cuda_graphs, "CUDA graphs"
    if isinstance(trainable, TrainableSection):
        yield from ((("trainable", name), "lora", "LoRA") for name in trainable.uses("lora"))
