"""What `verify` and `judge` need from a transformers model: losses, gradients, positions.

Packed rows are compared with these, so a model whose results are not finite is refused first. NaN
equals nothing, and the comparison would blame packing. The message names the first tensor or module
with such values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmpack.backends.finite import non_finite_state
from vlmpack.errors import CapabilityError, NonFiniteError, VlmpackError
from vlmpack.model_folder.finite import non_finite_tensors, non_finite_words
from vlmpack.packing import IGNORE_INDEX
from vlmpack.words import raised


def token_losses(logits: Tensor, labels: Tensor, *, shifted: bool = False) -> Tensor:
    """(L,) losses of the label tokens of a batch, row by row.

    Args:
        logits: (B, S, V).
        labels: (B, S), -100 where nothing is taught; on any device.
        shifted: whether a label stands where it is predicted; else one slot later.
    """
    if not shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    labels = labels.to(logits.device)
    at = labels != IGNORE_INDEX
    return F.cross_entropy(logits[at].float(), labels[at], reduction="none")


def take_gradients(model: nn.Module) -> dict[str, Tensor]:
    """All gradients in float32 on CPU, zeros where there is none; the model's own are dropped."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        gradients[name] = (
            torch.zeros(parameter.shape)
            if gradient is None
            else gradient.detach().float().cpu()  # on CPU the same memory: dropped just below
        )
        parameter.grad = None
    return gradients


def position_counter(model: nn.Module) -> Any:
    """The module whose class counts positions on several axes; None for one axis."""
    counters = [module for module in model.modules() if hasattr(module, "get_rope_index")]
    return counters[-1] if counters else None


def counted_positions(counter: Any, arguments: Mapping[str, Any]) -> Tensor:
    """(A, s) of one sample, as its class counts them.

    Args:
        arguments: the forward's, for the sample alone.

    Raises:
        VlmpackError: the class needs an argument that is not among them.
    """
    takes = inspect.signature(counter.get_rope_index).parameters
    named = (each for each in takes.values() if each.kind is not each.VAR_KEYWORD)
    needed = {each.name for each in named if each.default is each.empty}
    if missing := sorted(needed - arguments.keys()):
        raise VlmpackError(
            f"{type(counter).__name__} counts positions by {', '.join(missing)} too, and the "
            f"sample has {', '.join(sorted(arguments))}; give what its processor returns"
        )
    positions, _ = counter.get_rope_index(**{k: v for k, v in arguments.items() if k in takes})
    counted: Tensor = positions[:, 0].cpu()
    return counted


@contextmanager
def computing(model: nn.Module, width: int) -> Iterator[None]:
    """A forward pass of a stock model, whose failure is a CapabilityError.

    Raises:
        CapabilityError: the model raised; with config.json's limit of tokens, if exceeded.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError) as error:
        raise CapabilityError(
            f"verify: the stock model cannot compute a sample of {width:,} tokens, it "
            f"{raised(error)}{_too_long(model, width)}"
        ) from error


def _too_long(model: Any, width: int) -> str:
    """What config.json says of samples longer than a model's table of positions; else empty."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "max_seq_len", "n_positions"):
        most = getattr(config, name, None)
        if isinstance(most, int) and most < width:
            return f"; {name} of config.json is {most:,}: lower training.seq_length to that"
    return ""


def require_finite_model(name: str, model: nn.Module) -> None:
    """Refuse weights and buffers that are not finite, except buffers that are infinite by design.

    Raises:
        NonFiniteError: with the tensors' names.
    """
    named = chain(model.named_parameters(), model.named_buffers())
    if non_finite := non_finite_state(dict(named), model):
        raise NonFiniteError(f"{name}: {non_finite_words(non_finite)}; expected finite ones")


def require_finite_losses(
    name: str, model: nn.Module, values: Iterable[Tensor], forward: Callable[[], Any]
) -> None:
    """Refuse losses or logits that are not finite, and name the first module that computes some.

    Raises:
        NonFiniteError: with the module's path.
    """
    if not _non_finite_kinds(values):
        return
    with first_non_finite(model) as layers, torch.no_grad():
        forward()
    where = layers[0] if layers else "the cross entropy of finite logits"
    raise NonFiniteError(
        f"{name}: the model's own losses are not finite, so there is nothing to compare with. The "
        f"first of them: {where}. Expected a model that computes finite losses in this dtype"
    )


def require_finite_gradients(name: str, gradients: Mapping[str, Tensor]) -> None:
    """Refuse gradients that are not finite although the losses are.

    Raises:
        NonFiniteError: with the parameters' names.
    """
    if non_finite := non_finite_tensors(gradients.items()):
        raise NonFiniteError(
            f"{name}: the model's own losses are finite and its gradients are not, so there is "
            f"nothing to compare with: {non_finite_words(non_finite)}"
        )


@contextmanager
def first_non_finite(model: nn.Module) -> Iterator[list[str]]:
    """The first module with values that are no numbers, in its input or its output.

    If there is none in the forward pass, it is the first gradient of an output in the backward
    pass.
    """
    layers: list[str] = []

    def note(words: str, path: str, values: Iterable[Tensor]) -> None:
        if not layers and (seen := _non_finite_kinds(values)):
            layers.append(f"{words} of {path or type(model).__name__} ({', '.join(seen)})")

    def look(kind: str, path: str, module: nn.Module, *values: Any) -> None:
        tensors = [*_tensors(values if kind == "input" else values[-1])]
        note(f"the {kind}", path, tensors)
        # The model itself gives losses, whose gradient is the objective's.
        where = ("the gradient of the output", path) if path else ("the gradient", "losses")
        for tensor in tensors if kind == "output" else ():
            if tensor.requires_grad and not layers:
                tensor.register_hook(lambda gradient: note(*where, [gradient]))

    handles = []
    for path, module in model.named_modules():
        handles.append(
            module.register_forward_pre_hook(partial(look, "input", path), with_kwargs=True)
        )
        handles.append(module.register_forward_hook(partial(look, "output", path)))
    try:
        yield layers
    finally:
        for handle in handles:
            handle.remove()


def _non_finite_kinds(values: Iterable[Tensor]) -> list[str]:
    """Which of `NaN`, `inf` and `-inf` there are; nothing for -inf alone, which masks use."""
    non_finite = non_finite_tensors((str(number), value) for number, value in enumerate(values))
    seen = sorted(set().union(*non_finite.values()))
    return [] if seen == ["-inf"] else seen


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(_tensors, value.values()))
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(_tensors, value))
