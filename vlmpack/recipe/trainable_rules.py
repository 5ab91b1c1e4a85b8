"""Rules about what is trained, and about adapters that training continues from.

Packages are looked up and never imported, because a recipe is also checked on machines that cannot
run it. Adapters are checked by adapter_config.json alone. A folder that is not there breaks no
rule: the code that loads the adapters reports it. `rules.py` says what a rule is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from importlib import util
from pathlib import Path

from vlmpack.capabilities.adapter_config import AdapterConfig
from vlmpack.capabilities.config import quantised_sections
from vlmpack.errors import ModelError
from vlmpack.recipe.engine_rules import ModelConfig
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.recipe.problems import Problem, listed_twice
from vlmpack.recipe.schema import ModelSection, ParallelismSection, TrainingSection
from vlmpack.recipe.trainable import (
    BITSANDBYTES,
    COMPONENTS,
    LoraSection,
    OptimSection,
    TrainableSection,
)

_SHARED_GATE = "shared_expert_gate"

MEGATRONS_NAMES: Mapping[str, str] = {
    "linear_fc1": "gate_proj, up_proj",
    "linear_fc1_gate": "gate_proj",
    "linear_fc1_up": "up_proj",
    "linear_fc2": "down_proj",
    "linear_k": "k_proj",
    "linear_proj": "o_proj",
    "linear_q": "q_proj",
    "linear_qkv": "q_proj, k_proj, v_proj",
    "linear_v": "v_proj",
}
"""Layers of a decoder by Megatron's names, and by transformers'."""

_ALSO_IN_TOWERS = ("linear_fc1", "linear_fc2")
"""What Qwen3-VL's tower calls its layers in transformers."""


def something_is_trained(trainable: TrainableSection) -> list[Problem]:
    """A run without a trained weight is none."""
    if len(trainable.uses("frozen")) < len(COMPONENTS):
        return []
    message = "vision, projector and language are all frozen; set at least one to full or lora"
    return [Problem(("trainable",), message)]


def lora_settings_are_used(trainable: TrainableSection) -> list[Problem]:
    """Adapters are described for components that get some; defaults alone count as none."""
    lora, default = trainable.lora, LoraSection()
    names = [name for name in LoraSection.model_fields if name in lora.model_fields_set]
    if trainable.uses("lora") or (lora == default and names in ([], [*LoraSection.model_fields])):
        return []
    key = next((n for n in names if getattr(lora, n) != getattr(default, n)), names[0])
    message = (
        f"{getattr(lora, key)!r}, but no component has mode lora (vision: {trainable.vision}, "
        f"projector: {trainable.projector}, language: {trainable.language}). Set one, or leave "
        "trainable.lora out"
    )
    return [Problem(("trainable", "lora", key), message)]


def targets_are_named(model: ModelSection, trainable: TrainableSection) -> list[Problem]:
    """A list of targets has some, each once; those of an adapter have one."""
    targets, where = trainable.lora.targets, ("trainable", "lora", "targets")
    if targets == "adapter" and model.adapter is None:
        return [Problem(where, "'adapter' is the layers of model.adapter, which is not set")]
    if isinstance(targets, str):
        return []
    if not targets:
        return [Problem(where, "an empty list; name the layers, or use all-linear")]
    foreign = [Problem(where, message) for message in _megatrons(targets, trainable)]
    return listed_twice(where, targets) + foreign


def longer_ends_come_first(trainable: TrainableSection) -> list[Problem]:
    """The first end that fits counts, as in peft, so one behind its own end would never count.

    Where each longer end comes first, no other order of the same ends has another meaning. A run's
    identity can then leave the order out.
    """
    lora = trainable.lora
    return [
        Problem(
            ("trainable", "lora", knob),
            f"{end!r} never counts, as {first!r} comes first and fits the same layers; put "
            f"{end!r} first, or leave one out",
        )
        for knob, ends in (
            ("rank_pattern", [*lora.rank_pattern]),
            ("alpha_pattern", [*lora.alpha_pattern]),
        )
        for index, end in enumerate(ends)
        for first in ends[:index]
        if end.endswith(f".{first}")
    ]


def adapters_of_experts_are_plain(trainable: TrainableSection) -> list[Problem]:
    """peft has nothing but B A for a tensor of experts."""
    lora = trainable.lora
    if not trainable.uses("lora") or lora.targets == "adapter":
        return []
    if not lora.on_experts:
        where = ("trainable", "lora", "expert_form")
        message = "'matrices', but trainable.lora.targets has no experts; leave it out"
        return [Problem(where, message)] if lora.expert_form == "matrices" else []
    message = "{}, which peft has no form of for experts; use {}, or targets without experts"
    wrong = {"dora": (lora.dora, False), "dropout": (lora.dropout, 0)}
    return [
        Problem(("trainable", "lora", name), message.format(str(found).lower(), str(use).lower()))
        for name, (found, use) in wrong.items()
        if found
    ]


def _megatrons(targets: Iterable[str], trainable: TrainableSection) -> Iterator[str]:
    """Names of Megatron's layers; towers of transformers have some of them, too."""
    sees = {trainable.vision, trainable.projector} & {"lora"}
    for target in targets:
        last = target.rpartition(".")[2]
        if last in MEGATRONS_NAMES and not (sees and last in _ALSO_IN_TOWERS):
            yield (
                f"{target!r} is Megatron's name; layers are named as in transformers on both "
                f"engines: {MEGATRONS_NAMES[last]}"
            )


def adapters_fit_megatron(model: ModelSection, trainable: TrainableSection) -> list[Problem]:
    """Adapters on Megatron's layers have no dropout, no packed weights, and no norm inside."""
    if model.backend != "mcore" or not trainable.uses("lora"):
        return []
    lora, problems = trainable.lora, []
    if trainable.drops():
        message = (
            f"{lora.dropout}, which each layout would draw otherwise with model.backend: mcore; "
            "set it to 0, or use model.backend: hf"
        )
        problems.append(Problem(("trainable", "lora", "dropout"), message))
    if lora.quantize != "none":
        message = f"{lora.quantize!r} needs model.backend: hf; use none"
        problems.append(Problem(("trainable", "lora", "quantize"), message))
    if lora.modules_to_save:
        message = f"{list(lora.modules_to_save)} needs model.backend: hf"
        problems.append(Problem(("trainable", "lora", "modules_to_save"), message))
    if model.attention == "transformer_engine":
        message = (
            "'transformer_engine' has norms inside of its linear layers, where adapters do not see "
            "them; with trainable.* lora use auto or segments"
        )
        problems.append(Problem(("model", "attention"), message))
    return problems


def adapters_have_a_layer(
    config: ModelConfig, model: ModelSection, trainable: TrainableSection
) -> list[Problem]:
    """Megatron's gate of a shared expert is a weight of that expert, and no layer."""
    shared = config.size("shared_expert_intermediate_size")
    if model.backend != "mcore" or not shared or trainable.language != "lora":
        return []
    targets = trainable.lora.targets
    if not {"all-linear", _SHARED_GATE} & {*trainable.lora.words}:
        return []
    message = (
        f"{targets!r}, but model.backend: mcore puts no adapters on {_SHARED_GATE}. Name the "
        "others, such as q_proj, k_proj, v_proj, o_proj, in_proj_qkv, in_proj_z, out_proj"
    )
    return [Problem(("trainable", "lora", "targets"), message)]


BNB = "bitsandbytes"
"""The method of folders whose frozen weights stay packed."""


def has_bitsandbytes() -> bool:
    """Whether it is installed."""
    return util.find_spec("bitsandbytes") is not None


def four_bits_have_their_package(model: ModelSection, trainable: TrainableSection) -> list[Problem]:
    """QLoRA is an extra, of the engine that has it."""
    if model.backend == "mcore" or not _uses_four_bits(trainable) or has_bitsandbytes():
        return []
    message = (
        f"'nf4' needs bitsandbytes, which is not installed; pip install '{BITSANDBYTES}', or use "
        "int8, or none"
    )
    return [Problem(("trainable", "lora", "quantize"), message)]


def packed_folders_are_packed_once(
    config: ModelConfig, model: ModelSection, trainable: TrainableSection
) -> list[Problem]:
    """The hf engine keeps frozen weights of bitsandbytes as the folder has them, with its
    package."""
    packed = [said for method, said in quantised_sections(config.content) if method == BNB]
    if not packed or model.backend != "hf" or len(trainable.uses("full")) == len(COMPONENTS):
        return []
    if trainable.uses("lora") and trainable.lora.quantize != "none":
        message = (
            f"{trainable.lora.quantize!r}, but the folder has its weights in few bits already "
            f"({BNB}), and frozen ones stay so; use none"
        )
        return [Problem(("trainable", "lora", "quantize"), message)]
    if has_bitsandbytes() or not any(said.get("load_in_4bit") for said in packed):
        return []
    message = (
        f"{model.path} has its weights in 4 bits, which needs bitsandbytes, and that is not "
        f"installed; pip install '{BITSANDBYTES}', or use a dense model"
    )
    return [Problem(("model", "path"), message)]


def optimizers_have_their_package(optim: OptimSection, model: ModelSection) -> list[Problem]:
    """What torch has not is bitsandbytes'."""
    if optim.facts.is_torchs or model.backend == "mcore" or has_bitsandbytes():
        return []
    message = (
        f"'{optim.name}' needs bitsandbytes, which is not installed; pip install '{BITSANDBYTES}', "
        "or use adamw"
    )
    return [Problem(("optim", "name"), message)]


def optimizers_are_whole(
    optim: OptimSection, model: ModelSection, parallelism: ParallelismSection
) -> list[Problem]:
    """Megatron has optimizers of its own, and sharded moments are torch's."""
    if optim.facts.is_torchs:
        return []
    if model.backend == "mcore":
        message = (
            f"'{optim.name}' needs model.backend: hf; use adamw, whose state "
            "parallelism.distributed_optimizer shards"
        )
    elif parallelism.sharding != "none":
        message = (
            f"'{optim.name}' cannot be sharded, but parallelism.sharding is "
            f"{parallelism.sharding}; use adamw, whose moments it shards, or sharding: none"
        )
    else:
        return []
    return [Problem(("optim", "name"), message)]


def rounded_weights_are_whole(
    optim: OptimSection,
    model: ModelSection,
    parallelism: ParallelismSection,
    training: TrainingSection,
) -> list[Problem]:
    """torch's AdamW alone is rounded, on one process, beside eager layers."""
    broken = (
        (model.backend == "mcore", "needs model.backend: hf"),
        (parallelism.sharding != "none", "needs parallelism.sharding: none"),
        (optim.name != "adamw", "needs optim.name: adamw"),
        (model.dtype == "float32", "needs model.dtype: bfloat16"),
        (training.cuda_graphs != "none", "needs training.cuda_graphs: none"),
    )
    return [
        Problem(("optim", "master"), f"'{optim.master}' {what}; or use float32")
        for is_so, what in broken
        if optim.rounds and is_so
    ]


def _uses_four_bits(trainable: TrainableSection) -> bool:
    return trainable.lora.quantize == "nf4" and bool(trainable.uses("lora"))


def learning_rates_are_used(optim: OptimSection, trainable: TrainableSection) -> list[Problem]:
    """A component with a learning rate of its own is trained."""
    return [
        Problem(
            ("optim", f"{name}_lr"),
            f"{getattr(optim, f'{name}_lr')}, but trainable.{name} is frozen; leave it out, or "
            f"train the {name}",
        )
        for name in trainable.uses("frozen")
        if getattr(optim, f"{name}_lr") is not None
    ]


def components_are_there(config: ModelConfig, trainable: TrainableSection) -> list[Problem]:
    """A language model alone has neither tower nor projector."""
    if "vision_config" in config.values:
        return []
    problems = [
        Problem(("trainable", name), f"'{mode}', but {_alone(config)}; leave it out")
        for name, mode in (("vision", trainable.vision), ("projector", trainable.projector))
        if mode != "full"
    ]
    if trainable.language == "frozen" and not problems:
        message = f"'frozen', but {_alone(config)}, so nothing would be trained; use full or lora"
        problems.append(Problem(("trainable", "language"), message))
    return problems


def learning_rates_have_components(config: ModelConfig, optim: OptimSection) -> list[Problem]:
    """Nor does it have learning rates for them."""
    if "vision_config" in config.values:
        return []
    return [
        Problem(("optim", name), f"{getattr(optim, name)}, but {_alone(config)}; leave it out")
        for name in ("vision_lr", "projector_lr")
        if getattr(optim, name) is not None
    ]


def _alone(config: ModelConfig) -> str:
    return f"{config.folder} is a language model alone (its config.json has no vision_config)"


_ADAPTER = ("model", "adapter")


def read_adapter_config(
    folder: str, base_dir: str | os.PathLike[str] | None = None
) -> AdapterConfig | None:
    """That of `model.adapter`; None where the folder is not there.

    Args:
        base_dir: folder that a relative one starts at. None: the current directory.
    """
    path = Path(base_dir or "", folder)
    try:
        return AdapterConfig.read(path)
    except ModelError as error:
        return AdapterConfig(path, {}, str(error)) if path.is_dir() else None


def adapters_have_components(
    adapter: AdapterConfig | None, model: ModelSection, trainable: TrainableSection
) -> list[Problem]:
    """What training goes on with is trained."""
    is_refused = adapter is not None and adapter.refusal is not None  # by a problem of its own
    if trainable.uses("lora") or is_refused:
        return []
    message = (
        f"{model.adapter}, but no component has mode lora. Set trainable.language: lora to go on "
        "with these adapters, or merge them first: vlmpack merge"
    )
    return [Problem(_ADAPTER, message)]


def adapters_are_as_the_recipe_says(
    adapter: AdapterConfig | None, model: ModelSection, trainable: TrainableSection
) -> list[Problem]:
    """`trainable.lora` says what the adapters of the folder are."""
    if adapter is None:  # a launch names the folder
        return []
    if adapter.unreadable is not None:
        return [Problem(_ADAPTER, adapter.unreadable)]
    why = adapter.refusal
    if why is None and (what := adapter.unknown_here):
        why = f"it has {what}, which a recipe cannot say; merge them first: vlmpack merge"
    if why is not None:
        return [Problem(_ADAPTER, f"{model.adapter}: {why}")]
    if not trainable.uses("lora"):
        return []
    return [
        Problem(
            ("trainable", "lora", field),
            f"{getattr(trainable.lora, field)}, but model.adapter {model.adapter} has {value}; "
            f"use {str(value).lower()} to go on with it",
        )
        for field, value in adapter.settings()
        if getattr(trainable.lora, field) != value
    ]


def adapters_start_without_effect(
    model: ModelSection, objective: ObjectiveSection
) -> list[Problem]:
    """With its adapters off a model is the one that the run began with only if they began so."""
    if model.adapter is None or objective.reference != "adapters_off":
        return []
    message = (
        f"'adapters_off', but the run begins with the adapters of {model.adapter}, so without them "
        "the model is not the one that it began with. Use reference: cached"
    )
    return [Problem(("objective", "reference"), message)]
