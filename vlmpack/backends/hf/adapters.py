"""Adapters by peft: where they go, what of them is saved, and weights with their update merged.

peft freezes a whole model when it adds adapters, so `apply_policy` then decides for every parameter
whether it is trained. The model keeps its class and its attribute paths. An adapted linear layer
`x` becomes `x.base_layer` with `x.lora_A.default` and `x.lora_B.default`.

`merge_adapter` merges the adapters of a folder into the weights of its base model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlmpack.backends.adapter_folder import ADAPTER, PREFIX, WEIGHTS, AdapterFolder, weights_file
from vlmpack.backends.finite import refuse_non_finite_adapters, refuse_non_finite_state
from vlmpack.backends.hf.adapted_experts import (
    describe_targets,
    expert_modules,
    expert_shapes,
    expert_targets,
    fuse_experts,
    is_attentions,
    is_expert_tensor,
    merged_tensor,
    refuse_unreadable,
    taken_for_experts,
    write_matrices,
)
from vlmpack.backends.hf.adapted_linear import fuse_adapters
from vlmpack.backends.hf.deferred import held_codes
from vlmpack.backends.hf.frozen import (
    BASE,
    PackedLinear,
    quantize_layers,
    read_by_dtype,
    read_by_parents,
)
from vlmpack.backends.hf.recurrence import uncalled_layers
from vlmpack.backends.policy import TrainingPolicy, component_of, is_adapter, is_untouched
from vlmpack.backends.ties import FLAG, is_tied, write_ties
from vlmpack.errors import CapabilityError, ModelError, as_model_error
from vlmpack.families.base import ModulePaths
from vlmpack.model_folder.quantised import HeldCodes
from vlmpack.model_folder.weights import first
from vlmpack.recipe.trainable import COMPONENTS, TARGETS, LoraSection
from vlmpack.whole_file import share_as
from vlmpack.words import counted, some_of


def apply_policy(
    model: Any,
    paths: ModulePaths,
    policy: TrainingPolicy,
    *,
    device: torch.device,
) -> str:
    """Add adapters to a model, and set for each of its parameters whether it is trained.

    Args:
        device: the device of packed weights.

    Returns:
        What has adapters, counted; empty without any.

    Raises:
        CapabilityError: a target that no linear layer answers to, or a component without any.
    """
    added = ""
    if policy.lora is not None:
        added = describe_targets(model, adapter_targets(model, paths, policy), paths, policy)
        add_adapters(model, paths, policy, device=device)
    set_trainable(model, paths, policy)  # last: peft has frozen everything
    return added


def set_trainable(model: nn.Module, paths: ModulePaths, policy: TrainingPolicy) -> None:
    """`requires_grad` of every parameter."""
    for name, parameter in model.named_parameters():
        trains = policy.trains_parameter(name, paths)
        if parameter.is_floating_point():  # packed weights are bytes
            parameter.requires_grad_(trains)
        else:
            assert not trains


def add_adapters(
    model: Any,
    paths: ModulePaths,
    policy: TrainingPolicy,
    *,
    device: torch.device,
) -> None:
    """Put peft's layers into a model; raises as `apply_policy`."""
    lora = policy.lora
    assert lora is not None
    targets = adapter_targets(model, paths, policy)
    if lora.quantize != "none":
        layers = [name for name in targets if not is_expert_tensor(model, name)]
        quantize_layers(model, layers, lora.quantize, device=device)
    with torch.random.fork_rng(devices=[]):  # they are drawn on CPU; more than one GPU is a warning
        torch.manual_seed(policy.seed)  # ranks that shard must start with equal values
        inject_adapters(model, targets, lora)


def inject_adapters(
    model: nn.Module,
    targets: Sequence[str],
    lora: LoraSection,
    *,
    prefix: str = "",
    empty: bool = False,
) -> None:
    """Add peft's layers to linear layers and tensors of experts of a model.

    Args:
        prefix: what stands before the targets in the names of the whole model's layers.
        empty: without values, on the meta device; else with what torch's generator draws.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    ranks = {name: lora.rank_of(prefix + name) for name in targets}
    scales = {name: lora.alpha_of(prefix + name) for name in targets}
    tensors = [name for name in targets if is_expert_tensor(model, name)]
    config = LoraConfig(
        r=lora.rank,
        rank_pattern={name: rank for name, rank in ranks.items() if rank != lora.rank},
        alpha_pattern={name: alpha for name, alpha in scales.items() if alpha != lora.alpha},
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft only divides it
        lora_dropout=lora.dropout,
        target_modules=[name for name in targets if name not in tensors],
        target_parameters=tensors or None,
        use_dora=lora.dora,
        use_rslora=lora.rslora,
        bias="none",
    )
    # By the config of some mixtures peft takes layers of shared experts for routed ones.
    own = vars(model).pop("config", None)
    try:
        inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=empty)
    finally:
        vars(model).update({} if own is None else {"config": own})
    wrapped = sum(isinstance(module, LoraLayer) for module in model.modules())
    assert wrapped == len(targets), f"peft added {wrapped} adapters for {len(targets)} targets"
    fuse_adapters(model)
    fuse_experts(model)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """A context in which adapted layers compute without their adapters.

    peft's own switch also marks adapters as not trained, and afterwards all of them as trained.

    Raises:
        CapabilityError: it has none, or anything but adapters is trained.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    others = [name for name in trained if not is_adapter(name)]
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    if others or not layers:
        reason = f"{some_of(others, 3)} are trained too" if others else "it has none"
        raise CapabilityError(
            "objective.reference: adapters_off takes the model without its adapters for the "
            f"reference, but {reason}; use reference: cached"
        )
    for layer in layers:
        vars(layer)["_disable_adapters"] = True
    try:
        yield
    finally:
        for layer in layers:
            vars(layer)["_disable_adapters"] = False


def adapter_targets(model: Any, paths: ModulePaths, policy: TrainingPolicy) -> list[str]:
    """Names of the linear layers that get adapters.

    The head gets none: its weight goes into the cross entropy without a call of its layer.

    Raises:
        CapabilityError: as `apply_policy`.
    """
    lora = policy.lora
    assert lora is not None
    linear = [
        name
        for name in called_layers(model, paths)
        if policy.mode(component_of(name, paths)) == "lora"
    ]
    words = {*lora.words}
    ends = words - {*TARGETS}
    chosen = [
        name
        for name in linear
        if "all-linear" in words
        or ("attention" in words and is_attentions(model, name))
        or _ends_in(name, ends)
    ]
    for target in sorted(ends):
        if not any(_ends_in(name, (target,)) for name in linear):
            known = sorted({name.rpartition(".")[2] for name in linear})
            raise CapabilityError(
                f"trainable.lora.targets: no linear layer with mode lora ends in {target!r}; "
                f"there are {', '.join(known) or 'none'}"
            )
    if "experts" in words:
        if not (tensors := expert_targets(model, paths, policy)):
            raise CapabilityError(
                "trainable.lora.targets: 'experts', but no component with mode lora has routed "
                "experts without biases and norms in tensors (experts, out, in); leave it out"
            )
        chosen += tensors
    for component in COMPONENTS:
        if policy.mode(component) == "lora" and not any(
            component_of(name, paths) == component for name in chosen
        ):
            raise CapabilityError(
                f"trainable.{component}: 'lora', but no linear layer of the {component} "
                f"{'is there' if words == {'all-linear'} else 'is among trainable.lora.targets'}; "
                f"use full or frozen for it"
            )
    _check_patterns(chosen, lora)
    _check_in_full(model, paths, policy)
    refuse_unreadable(model, chosen, lora)
    return chosen


def _check_patterns(targets: Sequence[str], lora: LoraSection) -> None:
    """Raise CapabilityError where a rank or scale is for no layer that gets an adapter."""
    for knob, ends in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        for end in ends:
            if not any(_ends_in(name, (end,)) for name in targets):
                known = sorted({name.rpartition(".")[2] for name in targets})
                raise CapabilityError(
                    f"trainable.lora.{knob}: nothing that gets an adapter ends in {end!r}; there "
                    f"are {', '.join(known)}"
                )


def called_layers(model: Any, paths: ModulePaths) -> list[str]:
    """Names of the linear layers that are called, and whose weights nothing else reads."""
    head = paths.head_of(model)
    # Layers of a derived class are read by their owners without a call (that of
    # nn.MultiheadAttention is). An adapter of them would never be called.
    uncalled = uncalled_layers(model)
    return [
        name
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, PackedLinear) and module is not head
        if not is_untouched(name, paths) and name not in uncalled
    ]


def held_layers(model: Any, paths: ModulePaths, policy: TrainingPolicy) -> dict[str, HeldCodes]:
    """The frozen linear layers whose codes and scales a quantised folder has, with these.

    Args:
        model: of `deferred_model`.
    """
    read, found = read_by_dtype(model) | read_by_parents(model), dict[str, HeldCodes]()
    for name in called_layers(model, paths):
        layer = model.get_submodule(name)
        held = held_codes(layer.weight)
        if held is None or id(layer) in read:
            continue
        if not policy.trains_parameter(f"{name}.weight", paths):
            found[name] = held
    return found


def _check_in_full(model: Any, paths: ModulePaths, policy: TrainingPolicy) -> None:
    """Raise CapabilityError where `modules_to_save` names nothing, or one of two tied weights."""
    lora, where = policy.lora, "trainable.lora.modules_to_save"
    assert lora is not None
    saved = {
        name
        for name, _ in model.named_parameters(remove_duplicate=False)
        if lora.saves(name) and policy.trains_parameter(name, paths)
    }
    for module in lora.modules_to_save:
        if not any(f".{module}." in f".{name}" for name in saved):
            raise CapabilityError(
                f"{where}: no weight of a component with mode lora lies in a {module!r}; expected "
                "the end of a module's name, such as embed_tokens"
            )
    for one, other in model.all_tied_weights_keys.items():
        if len({one, other} & saved) == 1:
            raise CapabilityError(
                f"{where}: the model ties {one} to {other}, and {', '.join(lora.modules_to_save)} "
                "holds one of them alone; name the modules of both"
            )


def adapter_shapes(
    model: nn.Module, targets: Iterable[str], lora: LoraSection
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the parameters that adapters add to a model."""
    for target in targets:
        if is_expert_tensor(model, target):
            yield from expert_shapes(model, target, lora.rank_of(target))
            continue
        linear: Any = model.get_submodule(target)
        (rows, columns), rank = linear.weight.shape, lora.rank_of(target)
        yield f"{target}.lora_A.{ADAPTER}.weight", (rank, columns)
        yield f"{target}.lora_B.{ADAPTER}.weight", (rows, rank)
        if lora.dora:
            yield f"{target}.lora_magnitude_vector.{ADAPTER}.weight", (rows,)


def _ends_in(name: str, targets: Iterable[str]) -> bool:
    return any(name == target or name.endswith("." + target) for target in targets)


def merged_weight(
    weight: Tensor, a: Tensor, b: Tensor, scaling: float, magnitude: Tensor | None
) -> Tensor:
    """A linear layer's weight with its adapter inside.

    Args:
        weight: (out, in).
        a: (rank, in).
        b: (out, rank).
        magnitude: (out,) of DoRA, which each row's length becomes (2402.09353, equation 5).
    """
    merged = weight + scaling * (b @ a)
    if magnitude is None:
        return merged
    length: Tensor = merged.norm(dim=1)
    return merged * (magnitude / length)[:, None]


def merged_layer(
    weight: Tensor, layer: str, part: Callable[[str], Tensor], lora: LoraSection
) -> Tensor:
    """The weight of a layer by its name, with the adapter that `part` has by its names inside."""
    a, b = (part(f"{layer}.lora_{kind}.{ADAPTER}.weight") for kind in "AB")
    magnitude = part(f"{layer}.lora_magnitude_vector.{ADAPTER}.weight") if lora.dora else None
    return merged_weight(weight, a, b, lora.scaling_of(layer), magnitude)


def merged_state(
    model: nn.Module, state: Mapping[str, Tensor], lora: LoraSection | None
) -> dict[str, Tensor]:
    """Whole tensors under transformers' names, from those of a model with adapters inside.

    Args:
        lora: None where there are no adapters.
    """
    if lora is None:
        return dict(state)
    experts = {name: module for name, module in expert_modules(model) if BASE in name + "."}
    merged: dict[str, Tensor] = {}

    def part(name: str) -> Tensor:
        return state[name].float()

    for name, value in state.items():
        path, _, own = name.rpartition(".")
        if is_adapter(name):
            continue
        if path in experts:
            outer = path.partition(BASE)[0]
            target, inner = f"{outer}.{own}", experts[path]
            whole = merged_tensor(value.float(), inner, target, part, lora.scaling_of(target))
            merged[target] = whole.to(value.dtype)
            continue
        layer, base, kind = name.partition(BASE)
        if base and kind == "weight":
            value = merged_layer(value.float(), layer, part, lora).to(value.dtype)
        merged[f"{layer}.{kind}" if base else name] = value
    return merged


def save_adapter(
    model: Any,
    state: Mapping[str, Tensor],
    folder: Path,
    *,
    in_full: Sequence[str],
    base: str,
    lora: LoraSection,
) -> None:
    """Write adapter_config.json and adapter_model.safetensors, as peft reads them.

    Components that were trained in full are saved as peft's `modules_to_save`.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    config = copy(model.peft_config[ADAPTER])
    tensors = get_peft_model_state_dict(
        model, state_dict=dict(state), adapter_name=ADAPTER, save_embedding_layers=False
    )
    for module in in_full:
        tensors |= {name: v for name, v in state.items() if name.startswith(module + ".")}
    refuse_non_finite_state(tensors, model, "these are no adapters that can be used")
    written = {PREFIX + name: value.contiguous().clone() for name, value in tensors.items()}
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.modules_to_save = list(in_full) or None
    moved = taken_for_experts(model, config)
    config.target_modules = sorted({*config.target_modules} - moved)  # a set has no order
    tensors_of = [f"{name}.weight" for name in moved]  # peft reads a layer's name as an expert's
    config.target_parameters = sorted([*(config.target_parameters or ()), *tensors_of]) or None
    if lora.on_experts and lora.expert_form == "matrices":
        write_matrices(model, config, written)
    config.auto_mapping = {
        "base_model_class": type(model).__name__,
        "parent_library": type(model).__module__,
    }
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    save_file(written, str(folder / WEIGHTS), metadata={"format": "pt"})
    share_as(folder / "adapter_config.json", "*.safetensors")


def modules_in_full(model: nn.Module, paths: ModulePaths, policy: TrainingPolicy) -> list[str]:
    """The largest modules that hold parameters trained in full and no adapter.

    Raises:
        CapabilityError: one module has such a parameter and an adapter, for which peft's format has
            no place.
    """
    trained = {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if ".lora_" not in name and policy.trains_parameter(name, paths)
    }
    names: list[str] = []

    def visit(prefix: str, module: nn.Module) -> None:
        own = {prefix + name for name, _ in module.named_parameters()}
        if not own & trained:
            return
        holds_adapter = any(".lora_" in name for name in own)
        can_wrap = not isinstance(module, (nn.ModuleList, nn.ModuleDict)) and prefix
        if can_wrap and not holds_adapter and own <= trained:
            names.append(prefix.removesuffix("."))
            return
        for name, _ in module.named_parameters(recurse=False):
            if prefix + name in trained:
                raise CapabilityError(
                    f"{prefix}{name} was trained together with adapters of the same module, which "
                    "peft's adapter format cannot hold. The merged model can: vlmpack export "
                    "--merge"
                )
        for name, child in module.named_children():
            visit(f"{prefix}{name}.", child)

    visit("", model)
    return names


def merge_adapter(model: Any, folder: Path) -> Any:
    """Merge the adapters of a folder into a model's weights, and put in what was trained in full.

    Args:
        model: transformers', in float32 on CPU. The model that is returned holds its weights. Its
            config says whether head and embedding are still one tensor.
        folder: in peft's format; any LoRA that peft can load.

    Raises:
        ModelError: the folder cannot be read, is of another model, or cannot be merged.
    """
    was_tied = bool(getattr(model.config, FLAG, False))
    adapted = _adapted(model, folder)
    if without := _without_bias(adapted):
        raise ModelError(
            f"{folder}: its adapters cannot be merged: they have biases (lora_bias), and "
            f"{counted(len(without), 'layer')} that they are beside none ({first(without)})"
        )
    untie(adapted)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that they are untied, corrected below
            merged = adapted.merge_and_unload()
    except Exception as error:
        raise ModelError(f"{folder}: its adapters cannot be merged: {_said(error)}") from error
    unmerged = [name for name, _ in merged.named_parameters() if ".lora_" in name]
    if unmerged:
        raise ModelError(
            f"{folder}: its adapters cannot be merged: {counted(len(unmerged), 'tensor')} of "
            f"adapters inside of modules that were trained in full ({first(unmerged)})"
        )
    if was_tied:
        write_ties(merged.config, tied=True)  # peft clears the flag of equal tensors too
        write_ties(merged.config, tied=is_tied(merged, merged.state_dict()))
        merged.tie_weights()  # as the config says, for adapters added later
    return merged


def untie(model: nn.Module) -> None:
    """Give each use of a shared weight a tensor of its own.

    An adapter of one use is then merged into that one alone.
    """
    seen: set[int] = set()
    for module in model.modules():
        for name, value in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if value.data_ptr() in seen:
                setattr(module, name, nn.Parameter(value.detach().clone(), requires_grad=False))
            seen.add(value.data_ptr())


def _adapted(model: Any, folder: Path) -> Any:
    """peft's model with the adapters of a folder; raises ModelError."""
    from peft import PeftModel, set_peft_model_state_dict
    from safetensors.torch import load_file

    stored, path = AdapterFolder.open(folder, model), weights_file(folder)
    with as_model_error(f"{path} cannot be read", OSError):
        refuse_non_finite_adapters(path)
    integers = {
        PREFIX + name for name, value in model.named_buffers() if not value.is_floating_point()
    }
    settings = peft_config(stored)
    try:
        tensors = stored.peft_tensors(load_file(str(path)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of missing names, which are reported below
            adapted = PeftModel(model, settings)
            loaded: Any = set_peft_model_state_dict(adapted, tensors)
    except Exception as error:  # of anything: settings and tensors are whatever the folder says
        raise _misfit(folder, error) from error
    misfits = {
        "without a place in the model": sorted(loaded.unexpected_keys),
        "without a tensor in the folder": sorted(n for n in loaded.missing_keys if ".lora_" in n),
        "of whole numbers": sorted(
            n for n, value in tensors.items() if not value.is_floating_point() and n not in integers
        ),
    }
    if listed := [
        f"{len(names)} {what} ({first(names)})" for what, names in misfits.items() if names
    ]:
        raise ModelError(f"{folder}: its adapters do not fit the model: {'; '.join(listed)}")
    return adapted


def peft_config(stored: AdapterFolder) -> Any:
    """peft's config of an adapter folder.

    Raises:
        ModelError: a setting or a value that the installed peft does not know.
    """
    from peft import PeftConfig

    made: Any = PeftConfig
    try:
        with warnings.catch_warnings():
            # A setting that this version does not know must not be dropped.
            warnings.filterwarnings("error", "Unexpected keyword arguments", UserWarning)
            return made.from_peft_type(**stored.peft_settings())
    except Exception as error:
        raise _misfit(stored.folder, error) from error


def _misfit(folder: Path, error: Exception) -> ModelError:
    return ModelError(f"{folder}: its adapters do not fit the model: {_said(error)}")


def _without_bias(adapted: Any) -> list[str]:
    """Names of layers without a bias whose adapters have one."""
    from peft.tuners.lora import LoraLayer

    return [
        name.removeprefix(PREFIX)
        for name, layer in adapted.named_modules()
        if isinstance(layer, LoraLayer) and any(layer.lora_bias.values())
        if getattr(layer.get_base_layer(), "bias", None) is None
    ]


def _said(error: Exception) -> str:
    """The first line of what an exception says, with its class where that says little."""
    lines = str(error).strip().splitlines() or [""]
    return lines[0] if " " in lines[0] else f"{type(error).__name__}: {lines[0]}"
