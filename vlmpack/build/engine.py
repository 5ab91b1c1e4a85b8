"""A recipe's engine: its value, the checks before it is built, and the engine itself.

`auto` for dtype and attention is resolved here, for the device at hand. Adapters that training
continues from are checked before data are read, and loaded into the engine later.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vlmpack.attention import AttentionChoice, choose_attention, segment_attention
from vlmpack.backends.adapter_folder import AdapterFolder
from vlmpack.backends.engine import Compute, Engine
from vlmpack.backends.policy import ComponentCount, TrainingPolicy, component_of
from vlmpack.backends.skeleton import folder_skeleton, model_skeleton
from vlmpack.capabilities.served import SERVED
from vlmpack.distributed import Ranks
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError, ModelError
from vlmpack.families.registry import family_of
from vlmpack.model_folder.weights import first
from vlmpack.recipe import Recipe, load_recipe
from vlmpack.recipe.schema import ModelSection, ParallelismSection
from vlmpack.recipe.trainable import LoraSection

COLUMNS = ("component", "mode", "parameters", "trained", "share", "peak lr", "weight decay")


logger = logging.getLogger("vlmpack")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """All that an engine is made from.

    Args:
        captures: whether the decoder is recorded (`training.cuda_graphs`).
    """

    model: ModelSection
    parallelism: ParallelismSection
    policy: TrainingPolicy
    encoder: Encoder
    ranks: Ranks
    captures: bool = False


def engine_spec(recipe: Recipe, encoder: Encoder, ranks: Ranks) -> EngineSpec:
    """Raises as `with_adapter_layers`."""
    recipe = with_adapter_layers(recipe)
    return EngineSpec(
        model=recipe.model,
        parallelism=recipe.parallelism,
        policy=policy_of(recipe),
        encoder=encoder,
        ranks=ranks,
        captures=recipe.training.cuda_graphs == "decoder",
    )


def policy_of(recipe: Recipe) -> TrainingPolicy:
    return TrainingPolicy(trainable=recipe.trainable, optim=recipe.optim, seed=recipe.training.seed)


def with_adapter_layers(recipe: Recipe) -> Recipe:
    """The recipe with the layers that `model.adapter` has in place of `targets: adapter`.

    Ranks and scales that differ there by layer are written down too, and modules in full.

    Raises:
        ModelError: the folder cannot be read, or has adapters where this recipe can have none.
    """
    from vlmpack.backends.hf.adapted_experts import expert_targets, expert_wrapper
    from vlmpack.backends.hf.adapters import adapter_targets

    lora, folder = recipe.trainable.lora, recipe.model.adapter
    if folder is None or lora.targets != "adapter" or not recipe.trainable.uses("lora"):
        return recipe
    model = folder_skeleton(Path(recipe.model.path))
    paths = family_of(Path(recipe.model.path)).modules
    every = recipe.trainable.model_copy(update={"lora": LoraSection()})
    policy = TrainingPolicy(trainable=every, optim=recipe.optim)
    linear = adapter_targets(model, paths, policy)
    stored = _adapters_for(Path(folder), model)
    wrappers = {expert_wrapper(model, name) for name in expert_targets(model, paths, policy)}
    experts = wrappers if wrappers <= stored.layers.keys() else set()  # of all tensors, or none
    layers = stored.layers.keys() - experts
    if others := sorted(layers - set(linear)):
        component = component_of(others[0], paths)
        raise ModelError(
            f"model.adapter: {folder} has adapters of {first(others)}, which is no linear layer of "
            f"a component with mode lora that gets one (trainable.{component} is "
            f"{policy.mode(component)}). Use lora there, or merge them first: vlmpack merge"
        )
    modules = set(stored.in_full)
    for pair in model.all_tied_weights_keys.items():
        both = {name.rpartition(".")[0] for name in pair}
        modules |= both if both & modules else set()
    rest = [name for name in linear if name not in stored.layers]
    targets = _ends(sorted(layers), rest) if rest else ["all-linear"]
    changes = {
        "targets": [*targets, "experts"] if experts else targets if rest else "all-linear",
        "rank_pattern": {
            name: rank for name in sorted(layers) if (rank := stored.rank(name)) != lora.rank
        },
        "alpha_pattern": {
            name: alpha for name in sorted(layers) if (alpha := stored.alpha(name)) != lora.alpha
        },
        "modules_to_save": sorted(
            name for name in modules if policy.mode(component_of(name, paths)) == "lora"
        ),
    }
    return load_recipe(recipe, {f"trainable.lora.{key}": value for key, value in changes.items()})


def _ends(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """The shortest ends that some names have and others have not."""
    ends: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        starts = (at for at in reversed(range(len(parts))) if not parts[at].isdigit())
        tails = (".".join(parts[start:]) for start in starts)
        taken = (end for end in tails if not any(f".{each}".endswith(f".{end}") for each in others))
        ends[next(taken)] = None
    return sorted(ends)


def check_model(folder: Path, ranks: Ranks) -> str:
    """Check that the weights fit config.json, from the headers of the weight files. Collective.

    Returns:
        The tensors that training does not read, in words; empty where it reads all.

    Raises:
        ModelError: they do not.
    """
    from vlmpack.backends.hf.load import check_weights

    def check() -> tuple[str, tuple[str, ...]]:
        loaded = check_weights(folder)
        return loaded.unused_words, loaded.notes

    unused, notes = ranks.on_main(check)
    for note in notes:
        logger.warning("note: %s", note)
    return unused


def check_policy(spec: EngineSpec) -> None:
    """Check that this machine can train the model with the policy, without reading a weight.

    Raises:
        CapabilityError: adapters without a layer to adapt, or 4-bit weights without their package.
        ModelError: a config.json that transformers does not know, or adapters to continue from that
            differ from the policy's.
    """
    policy, encoder, adapter = spec.policy, spec.encoder, spec.model.adapter
    if policy.lora is None:
        return
    from vlmpack.backends.hf.adapters import adapter_targets
    from vlmpack.backends.hf.frozen import check_quantization
    from vlmpack.backends.skeleton import model_skeleton

    if policy.lora.quantize != "none":
        check_quantization(policy.lora.quantize)
    if adapter is not None:
        open_adapter(Path(adapter), policy, encoder)
        return
    family = encoder.family
    skeleton = model_skeleton(family.auto_class(), encoder.folder)
    adapter_targets(skeleton, family.modules, policy)


def build_engine(spec: EngineSpec) -> Engine:
    """The engine, with the weights that training begins with. Collective.

    Raises:
        CapabilityError: it cannot run here.
        ModelError: the model folder or its adapters cannot be loaded.
    """
    engine, adapter = _engine_of(spec), spec.model.adapter
    if adapter is not None:
        stored = open_adapter(Path(adapter), spec.policy, spec.encoder)
        go_on_with(engine, stored, spec.ranks)
    return engine


def _engine_of(spec: EngineSpec) -> Engine:
    model, split, encoder, ranks = spec.model, spec.parallelism, spec.encoder, spec.ranks
    compute = resolved_compute(model, split, encoder, ranks.device, captures=spec.captures)
    parts = (model, split, encoder, ranks, spec.policy, compute)
    if model.backend == "mcore":
        from vlmpack.backends.mcore.engine import MegatronEngine  # megatron-core is an extra

        return MegatronEngine(*parts)
    from vlmpack.backends.hf.engine import HFEngine

    return HFEngine(*parts)


def resolved_model(model: ModelSection, device: torch.device) -> ModelSection:
    """The section with its dtype: auto is bfloat16 on CUDA and float32 elsewhere."""
    return model.resolved("bfloat16" if device.type == "cuda" else "float32")


def compute_dtype(model: ModelSection, device: torch.device) -> torch.dtype:
    return torch.bfloat16 if resolved_model(model, device).dtype == "bfloat16" else torch.float32


def resolved_compute(
    model: ModelSection,
    split: ParallelismSection,
    encoder: Encoder,
    device: torch.device,
    *,
    captures: bool = False,
) -> Compute:
    """The dtype and attention of an engine on `device`.

    Raises:
        CapabilityError: that attention cannot run here, or knows no context parallelism.
    """
    dtype, family = compute_dtype(model, device), encoder.family
    if model.attention == "transformer_engine":
        from vlmpack.backends.mcore.te_versions import require_transformer_engine

        require_transformer_engine(device)
        return Compute(dtype, None)
    stateful = any(SERVED[name].layers for name in family.model_types if name in SERVED)
    if model.backend == "mcore" and model.attention == "auto" and not (captures or stateful):
        from vlmpack.backends.mcore.te_versions import passed_transformer_engine

        version = passed_transformer_engine(device, dtype)
        if version is not None:
            return Compute(dtype, None, f"tests/gpu has passed with {version}")
    rings = split.context > 1 and model.backend == "mcore" and not captures
    if rings and model.attention == "auto":
        why = "with context parallelism; or transformer_engine"
        return Compute(dtype, AttentionChoice("segments", segment_attention, why))
    choice = choose_attention(
        model.attention,
        device=device,
        dtype=dtype,
        image_blocks=family.modules.image_blocks,
        largest_head=family.largest_head,
        fixed_shape=captures,
    )
    if rings and choice.name != "segments":
        raise CapabilityError(
            f"model.attention: {choice.name} knows no context parallelism (parallelism.context is "
            f"{split.context}); use segments or transformer_engine"
        )
    return Compute(dtype, choice, captures=captures)


def open_adapter(folder: Path, policy: TrainingPolicy, encoder: Encoder) -> AdapterFolder:
    """The adapters of `model.adapter`, whose tensors are those that the policy trains.

    Raises:
        ModelError: they cannot be read, or are those of other layers, shapes or components.
        CapabilityError: the policy has adapters without a layer to go to.
    """
    from vlmpack.backends.hf.adapters import adapter_shapes, adapter_targets

    paths = encoder.family.modules
    model = model_skeleton(encoder.family.auto_class(), encoder.folder)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    if policy.lora is not None:
        targets = adapter_targets(model, paths, policy)
        shapes |= adapter_shapes(model, targets, policy.lora)
    trained = {
        name: shape for name, shape in shapes.items() if policy.trains_parameter(name, paths)
    }
    stored = _adapters_for(folder, model)
    try:
        stored.check(trained, policy, paths)
    except ModelError as error:
        raise ModelError(f"model.adapter: {error}") from error
    return stored


def _adapters_for(folder: Path, model: Any) -> AdapterFolder:
    """The adapters of `model.adapter` for a model; raises ModelError."""
    from vlmpack.backends.hf.adapters import peft_config

    try:
        stored = AdapterFolder.open(folder, model)
        stored.check_ties()
        peft_config(stored)
    except ModelError as error:
        raise ModelError(f"model.adapter: {error}") from error
    return stored


def go_on_with(engine: Engine, stored: AdapterFolder, ranks: Ranks) -> None:
    """Load adapters, and parameters that were trained in full with them. Collective.

    Raises:
        ModelError: on every rank, if any cannot read them.
    """
    with ranks.raised_by_all(ModelError):
        try:
            engine.load_slices(stored.read, optimizer_steps=0)
        except ModelError as error:
            raise ModelError(f"model.adapter: {error}") from error
    engine.description["goes on with"] = f"{len(stored.tensors):,} tensors of {stored.folder}"


def policy_rows(counts: Sequence[ComponentCount], policy: TrainingPolicy) -> list[dict[str, Any]]:
    """The table's rows, as figures; written to `trainable.json`."""
    optim, lora = policy.optim, policy.trainable.lora
    return [
        {
            "component": count.component,
            "mode": count.mode,
            "parameters": count.parameters,
            "trained": count.trained,
            "trained_tensors": count.tensors,
            "peak_lr": optim.peak(count.component) if count.trained else None,
            "weight_decay": optim.weight_decay if count.trained else None,
            "decayed": count.decayed,
            "lora": lora.model_dump(mode="json") if count.mode == "lora" else None,
        }
        for count in counts
    ]


def policy_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of text, aligned: one a component, and the sum."""
    cells = [list(COLUMNS)]
    for row in rows:
        trained, total = row["trained"], row["parameters"]
        cells.append(
            [
                row["component"],
                _mode(row),
                f"{total:,}",
                f"{trained:,}",
                f"{trained / max(1, total):.2%}",
                f"{row['peak_lr']:.3g}" if trained else "-",
                _decay(row),
            ]
        )
    trained, total = (sum(row[key] for row in rows) for key in ("trained", "parameters"))
    share = f"{trained / max(1, total):.2%}"
    cells.append(["all", "", f"{total:,}", f"{trained:,}", share, "", ""])
    widths = [max(len(row[column]) for row in cells) for column in range(len(COLUMNS))]
    return [
        "  ".join(
            text.ljust(width) if column < 2 or column == 6 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def _mode(row: dict[str, Any]) -> str:
    lora = row["lora"]
    if lora is None:
        return str(row["mode"])
    extra = "".join(f" {name}" for name in ("dora", "rslora") if lora[name])
    bits = "" if lora["quantize"] == "none" else f" {lora['quantize']}"
    return f"lora r={lora['rank']} alpha={lora['alpha']:g}{extra}{bits}"


def _decay(row: dict[str, Any]) -> str:
    if not row["trained"]:
        return "-"
    if not row["weight_decay"]:
        return "0"
    return f"{row['weight_decay']:g} on {row['decayed']:,}"
