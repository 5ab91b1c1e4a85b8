"""Which parameters are trained, and how: one policy by component, resolved once from names.

A model has three components. The projector may lie inside the vision tower's module, so its paths
are checked first. Input embeddings, head and everything else belong to the language model. Modules
that the class loads but no sample reaches (`ModulePaths.untouched`) are counted there and never
trained.

An engine asks for every parameter by its name and number of dimensions. A parameter of a component
that gets adapters (`lora`) is trained where it is an adapter's own, and frozen otherwise.

Weights with two or more dimensions decay, in every component. Biases, norms and other vectors do
not. A LoRA matrix is such a weight. Its decay shrinks the update B A, so it pulls the merged weight
towards the pretrained one, where decay of a full weight pulls towards zero. DoRA's magnitudes are
vectors, as large as the weights themselves, and do not decay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from vlmpack.families.base import ModulePaths
from vlmpack.recipe.trainable import (
    COMPONENTS,
    Component,
    LoraSection,
    Mode,
    OptimSection,
    TrainableSection,
)

ADAPTER_MARKS = (".lora_A.", ".lora_B.", ".lora_magnitude_vector.")
"""What peft puts into the names of the parameters that it adds."""


def component_of(name: str, paths: ModulePaths) -> Component:
    """The component of a parameter or module. With adapters of peft inside, the name is peft's."""
    if any(_is_under(name, path) for path in paths.projectors):
        return "projector"
    if paths.vision is not None and _is_under(name, paths.vision):
        return "vision"
    return "language"


def is_untouched(name: str, paths: ModulePaths) -> bool:
    """Whether no sample reaches a parameter (or module). It is never trained."""
    return any(_is_under(name, path) for path in paths.untouched)


def _is_under(name: str, path: str) -> bool:
    return name == path or name.startswith(path + ".")


def is_adapter(name: str) -> bool:
    """Whether a parameter was added by peft."""
    return any(mark in name for mark in ADAPTER_MARKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPolicy:
    """Whether and how one parameter is trained.

    Args:
        lr_scale: its learning rate over that of the schedule.
    """

    component: Component
    trains: bool
    decays: bool
    lr_scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPolicy:
    """The trained components, and how each is trained.

    Args:
        seed: of the adapters' first weights; the same on every rank.
    """

    trainable: TrainableSection
    optim: OptimSection
    seed: int = 0

    @property
    def lora(self) -> LoraSection | None:
        """The adapters of the components that have some. None if no component has."""
        return self.trainable.lora if self.trainable.uses("lora") else None

    @property
    def has_dora(self) -> bool:
        """Whether the adapters are DoRA's."""
        return self.lora is not None and self.lora.dora

    def mode(self, component: Component) -> Mode:
        """How a component is trained."""
        mode: Mode = getattr(self.trainable, component)
        return mode

    def lr_scale(self, component: Component) -> float:
        """A component's learning rate over that of the schedule, at every step."""
        return self.optim.peak(component) / self.optim.lr

    def trains(self, component: Component) -> bool:
        """Whether anything of a component is updated."""
        return self.mode(component) != "frozen"

    def trains_parameter(self, name: str, paths: ModulePaths) -> bool:
        """Whether a parameter is updated; arguments as in `of_parameter`."""
        mode, adapter = self.mode(component_of(name, paths)), is_adapter(name)
        in_full = mode == "full" or (mode == "lora" and self.trainable.lora.saves(name))
        return (mode == "lora" if adapter else in_full) and not is_untouched(name, paths)

    def of_parameter(self, name: str, ndim: int, paths: ModulePaths) -> ParameterPolicy:
        """The policy of a parameter with this name and number of dimensions."""
        component = component_of(name, paths)
        return ParameterPolicy(
            component=component,
            trains=self.trains_parameter(name, paths),
            decays=ndim >= 2 and ".lora_magnitude_vector." not in name,
            lr_scale=self.lr_scale(component),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentCount:
    """What a policy does in one component of a model.

    Args:
        parameters: elements, those of adapters included.
        trained: those of them that are updated.
        tensors: number of updated parameters.
        decayed: those of the updated elements that decay.
    """

    component: Component
    mode: Mode
    parameters: int
    trained: int
    tensors: int
    decayed: int


def count_components(
    shapes: Iterable[tuple[str, tuple[int, ...]]], policy: TrainingPolicy, paths: ModulePaths
) -> list[ComponentCount]:
    """One entry for each component that the model has.

    Args:
        shapes: names and whole shapes of all parameters, each once, adapters included.
    """
    held: dict[Component, list[tuple[ParameterPolicy, int]]] = {}
    for name, shape in shapes:
        said = policy.of_parameter(name, len(shape), paths)
        held.setdefault(said.component, []).append((said, prod(shape)))
    return [
        ComponentCount(
            component=component,
            mode=policy.mode(component),
            parameters=sum(size for _, size in held[component]),
            trained=sum(size for said, size in held[component] if said.trains),
            tensors=sum(said.trains for said, _ in held[component]),
            decayed=sum(size for said, size in held[component] if said.trains and said.decays),
        )
        for component in COMPONENTS
        if component in held
    ]


def describe_counts(counts: Iterable[ComponentCount]) -> str:
    """One line: `vision frozen, projector full, language lora (r 16); 1,234 of 5,678 trained`."""
    counts = list(counts)
    modes = ", ".join(f"{count.component} {count.mode}" for count in counts)
    trained = sum(count.trained for count in counts)
    total = sum(count.parameters for count in counts)
    return f"{modes}; {trained:,} of {total:,} parameters ({trained / max(1, total):.2%})"
