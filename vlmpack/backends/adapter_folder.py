"""Adapters in peft's format: what training goes on with, and what is merged.

They are read box by box as a checkpoint is. Each process reads only what it holds, whatever engine
and layout a run has. Modules that were trained in full are read too (peft's `modules_to_save`). A
pickle is never read.

Layers may have the names of a model's older classes. They are renamed as the weights of a model
folder are.

PiSSA (2404.02948) and OLoRA (2406.01775) train beside W - s B0 A0. What they learn beside W is
s (B A - B0 A0), adapters of twice the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmpack.backends.boxes import Kind, TensorSlice
from vlmpack.backends.policy import TrainingPolicy, component_of, is_adapter
from vlmpack.capabilities.adapter_config import AdapterConfig
from vlmpack.errors import ModelError, as_model_error
from vlmpack.families.base import ModulePaths
from vlmpack.model_folder.safetensors_read import DTYPES, StoredTensor, read_into, tensors_of
from vlmpack.model_folder.weights import first
from vlmpack.words import counted, twice

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""In front of every name in an adapter's file: peft's wrapper around a model."""
ADAPTER = "default"
"""peft's name for the one adapter of a run."""
_OF_A_RESIDUAL = ("pissa_init", "pissa_backup")
"""Folders of LLaMA-Factory's whose adapters do not say how they started."""
_ENDS = {
    f".lora_{kind}{end}": f".lora_{kind}.{ADAPTER}.weight"
    for kind in ("A", "B", "magnitude_vector")
    for end in ("", ".weight", f".{ADAPTER}.weight")
}
"""Ends of names in the file, and of the parameters that they are."""


def weights_file(folder: Path) -> Path:
    """The file of an adapter folder's tensors.

    Raises:
        ModelError: it is not there; the message has no key in front.
    """
    path = folder / WEIGHTS
    if path.is_file():
        return path
    pickled = folder / "adapter_model.bin"
    hint = f", and {pickled.name} is a pickle, which is never read" if pickled.is_file() else ""
    raise ModelError(f"{folder} has no {WEIGHTS}{hint}; expected adapters in peft's format")


def adapted_layers(folder: Path) -> set[str]:
    """The layers that a folder has adapters of, by their names in the model."""
    return {
        _layer(tensor.name).removeprefix(PREFIX)
        for tensor in tensors_of(folder / WEIGHTS)
        if is_adapter(tensor.name)
    }


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """The tensors of an adapter folder.

    Args:
        tensors: by the names of their parameters, those of peft's layers included.
        layers: adapted layers by their names, each with its name in the file.
        start: of PiSSA and OLoRA, as `tensors`; empty where nothing is subtracted.
        tied: second names of the model's shared parameters, each with the name of the parameter
            that it shares.
    """

    config: AdapterConfig
    tensors: Mapping[str, StoredTensor]
    layers: Mapping[str, str]
    start: Mapping[str, StoredTensor]
    tied: Mapping[str, str]

    @classmethod
    def open(cls, folder: Path, model: Any) -> AdapterFolder:
        """Read the config, and the header of the tensors' file.

        Args:
            model: transformers', of which names and the folder are read.

        Raises:
            ModelError: one is missing or damaged, these are no adapters that can be gone on with
                or merged, or a tensor has a dtype that is not read.
        """
        config = AdapterConfig.read(folder)
        if config.refusal is not None:
            raise ModelError(f"{folder}: {config.refusal}")
        _check_base(config, Path(model.config.name_or_path))
        newer = _newer_names(model)
        tensors = cls._stored(folder, newer)
        layers = {
            _layer(name): _layer(tensor.name.removeprefix(PREFIX))
            for name, tensor in tensors.items()
            if ".lora_" in name
        }
        start = {} if config.start is None else cls._stored(config.start, newer)
        shapes = ({n: each[n].shape for n in each if ".lora_" in n} for each in (start, tensors))
        if start and next(shapes) != next(shapes):
            raise ModelError(
                f"{config.start} has other adapters than {folder}; expected these as they started"
            )
        return cls(config, tensors, layers, start, model.all_tied_weights_keys)

    @staticmethod
    def _stored(folder: Path, newer: Callable[[str], str]) -> dict[str, StoredTensor]:
        try:
            stored = tensors_of(weights_file(folder))
        except ValueError as error:
            raise ModelError(str(error)) from error
        for tensor in stored:
            if tensor.dtype not in DTYPES:
                raise ModelError(
                    f"{tensor.file} has {tensor.name} as {tensor.dtype}; expected one of "
                    f"{', '.join(DTYPES)}"
                )
        names = [_parameter(tensor.name, newer) for tensor in stored]
        if shared := sorted(twice(names)):
            raise ModelError(
                f"{folder}: its adapters do not fit the model: {WEIGHTS} has "
                f"{counted(len(names), 'tensor')} for {len({*names})} of the model's; expected one "
                f"for each ({first(shared)})"
            )
        return dict(zip(names, stored, strict=True))

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return self.config.folder

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter as it is read."""
        shape, dim = self.tensors[name].shape, _rank_dim(name)
        if not self.start or dim is None:
            return shape
        return tuple(2 * size if at == dim % len(shape) else size for at, size in enumerate(shape))

    def rank(self, layer: str) -> int:
        """The rank of a layer's adapter."""
        ends = (f".lora_A.{ADAPTER}.weight", ".lora_embedding_A")
        ranks = (self.shape(layer + end)[0] for end in ends if layer + end in self.tensors)
        return next(ranks, 1)  # a layer without is refused by `check`

    def alpha(self, layer: str) -> float:
        """The alpha of a layer's adapter; its config's, by the layer's name in the file."""
        return self.config.alpha_of(self.layers[layer])

    @property
    def in_full(self) -> list[str]:
        """Modules that were trained in full, by the names of those that hold the parameters."""
        full = (name.rpartition(".")[0] for name in self.tensors if ".lora_" not in name)
        return list(dict.fromkeys(full))

    def peft_tensors(self, loaded: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What peft takes for the content of the file, of which all is loaded."""
        tensors = {}
        for name, stored in self.tensors.items():
            _, mark, rest = stored.name.partition(".lora_")
            today = PREFIX + _layer(name) if mark else PREFIX + name
            value = loaded[stored.name]
            tensors[today + mark + rest] = self.whole(name) if self.start else value
        return tensors

    def peft_settings(self) -> Mapping[str, Any]:
        """The config, with each layer by its name where it has another one or rank in the file.

        So it is where the layers are guessed from the file, as Megatron-Bridge does: other modules
        may have the same ends.
        """
        values = dict(self.config.values)
        if self.config.residual is not None:
            values["init_lora_weights"] = True
        same = not self.start and all(one == other for one, other in self.layers.items())
        if values.get("target_parameters") or (same and "layers_to_transform" in values):
            return values
        return {
            **values,
            "init_lora_weights": True,
            "target_modules": list(self.layers),
            "modules_to_save": self.in_full or None,
            "rank_pattern": {layer: self.rank(layer) for layer in self.layers},
            "alpha_pattern": {layer: self.alpha(layer) for layer in self.layers},
            **dict.fromkeys(("exclude_modules", "layers_to_transform", "layers_pattern")),
        }

    def check(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        policy: TrainingPolicy,
        paths: ModulePaths,
    ) -> None:
        """Check that each tensor has its trained parameter, and each adapter its tensors.

        Raises:
            ModelError: they do not fit. The message says what differs and what to set.
        """
        own = {name for name in self.tensors if self.tied.get(name) not in shapes}
        missing = sorted(name for name in shapes if is_adapter(name) and name not in own)
        unexpected = sorted(own - shapes.keys())
        if full := [name for name in unexpected if not is_adapter(name)]:
            component = component_of(full[0], paths)
            raise ModelError(
                f"{self.folder} has weights of the {component} that were trained in full "
                f"({first(full)}), but trainable.{component} is {policy.mode(component)}. Use "
                "full there, or merge the adapters first: vlmpack merge"
            )
        if partly := [name for name in missing if _layer(name) in self.layers]:
            raise ModelError(f"{self.folder} has adapters without a tensor: {first(partly)}")
        if missing or unexpected:
            found = sorted({_layer(name).rpartition(".")[2] for name in own if is_adapter(name)})
            only = [
                f"{counted(len(layers), 'layer')} of {where} alone ({first(layers)})"
                for where, names in (("the folder", unexpected), ("the recipe", missing))
                if (layers := sorted({_layer(name) for name in names}))
            ]
            raise ModelError(
                f"the adapters in {self.folder} are not those of the recipe: "
                f"{' and '.join(only)}. Expected the same layers. The folder's are named "
                f"{', '.join(found) or 'nothing'} (trainable.lora.targets)"
            )
        for name in own:
            if self.shape(name) != shapes[name]:
                raise ModelError(
                    f"{self.folder} has {name} with shape {self.shape(name)}, the model that the "
                    f"recipe names {shapes[name]}; expected adapters of that model and rank"
                )
        for layer in self.layers:
            alpha, said = self.alpha(layer), policy.trainable.lora.alpha_of(layer)
            if alpha != said:
                raise ModelError(
                    f"{self.folder} has alpha {alpha} at {layer}, and trainable.lora says {said}; "
                    "use that of the folder in trainable.lora.alpha_pattern"
                )

    def check_ties(self) -> None:
        """Raise ModelError if weights that the model ties are not the same here."""
        if self.config.values.get("ensure_weight_tying"):
            return
        for one, other in self.tied.items():
            held = [self.tensors[name] for name in (one, other) if name in self.tensors]
            if held and not (len(held) == 2 and torch.equal(*map(_whole, held))):
                raise ModelError(
                    f"{self.folder} holds {held[0].name} no longer tied, and the model ties {one} "
                    f"to {other}. Merge the adapters first: vlmpack merge"
                )

    def read(self, kind: Kind, box: TensorSlice) -> Tensor | None:
        """Read a box of a parameter on CPU, as `vlmpack.backends.boxes.ReadSlice`. None where the
        folder has no such tensor.

        Raises:
            ModelError: the file cannot be read.
        """
        stored = self.tensors.get(box.name)
        if kind != "model" or stored is None:
            return None
        if self.start and _rank_dim(box.name) is not None:
            return self.whole(box.name)[box.index]
        return _read(stored, box.index)

    def whole(self, name: str) -> Tensor:
        """A parameter; raises ModelError as `read`."""
        value, dim = _whole(self.tensors[name]), _rank_dim(name)
        if not self.start or dim is None:
            return value
        started = _whole(self.start[name]).float()
        return torch.cat([value.float(), -started if ".lora_B." in name else started], dim)


def _check_base(config: AdapterConfig, base: Path) -> None:
    """Raise ModelError if adapters that changed their model are beside another one."""
    if config.folder.name in _OF_A_RESIDUAL and base.resolve() != config.folder.parent.resolve():
        raise ModelError(
            f"{config.folder} of LLaMA-Factory fits the model that PiSSA left, and its config does "
            "not say so; use the folder that it lies in, or pissa_converted"
        )
    inside = base.resolve().is_relative_to(config.folder.resolve())
    kind, residual = config.values.get("init_lora_weights"), config.residual
    if config.start is not None and inside:
        raise ModelError(
            f"{config.folder}: its adapters started as {kind!r}, and what they learnt fits the "
            f"model from before; found the one that it left, {base}"
        )
    if config.start is None and residual is not None and not inside:
        raise ModelError(
            f"{config.folder}: its adapters started as {kind!r} and fit the model that this left, "
            f"{residual}; found {base}. Take that one as the model"
        )


def _newer_names(model: Any) -> Callable[[str], str]:
    """What renames a module or parameter of a model's older classes to the model's own."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    known = {name for name, _ in model.named_modules()}
    known |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    mapping = get_model_conversion_mapping(model)
    older = [entry for entry in mapping if isinstance(entry, WeightRenaming)]

    def newer(name: str) -> str:
        renamed: str = name if name in known else rename_source_key(name, older, [])[0]
        return renamed if renamed in known else name

    return newer


def _parameter(name: str, newer: Callable[[str], str]) -> str:
    """The parameter that a tensor of the file is."""
    layer, mark, rest = name.removeprefix(PREFIX).partition(".lora_")
    name = newer(layer) + mark + rest
    for end, parameter in _ENDS.items():
        if name.endswith(end):
            return name.removesuffix(end) + parameter
    return name


def _rank_dim(name: str) -> int | None:
    """The dimension of an adapter's matrix that is its rank."""
    return 0 if ".lora_A." in name else -1 if ".lora_B." in name else None


def _read(stored: StoredTensor, index: tuple[slice, ...]) -> Tensor:
    value = torch.empty([part.stop - part.start for part in index], dtype=DTYPES[stored.dtype])
    with as_model_error(f"{stored.file} cannot be read", OSError, ValueError):
        read_into(value, stored, index)
    return value


def _whole(stored: StoredTensor) -> Tensor:
    return _read(stored, tuple(slice(0, size) for size in stored.shape))


def _layer(name: str) -> str:
    """The layer that an adapter's parameter belongs to."""
    return name.partition(".lora_")[0]
