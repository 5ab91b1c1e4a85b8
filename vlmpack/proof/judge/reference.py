"""Each sample alone, by the model itself: what a batch of them is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vlmpack.errors import VlmpackError
from vlmpack.families.behind_videos import behind_videos
from vlmpack.packing import IGNORE_INDEX
from vlmpack.proof.judge.devices import CPU, copied, device_of, on
from vlmpack.proof.measure import names_of
from vlmpack.proof.stock import (
    counted_positions,
    position_counter,
    require_finite_gradients,
    require_finite_losses,
    require_finite_model,
    take_gradients,
    token_losses,
)
from vlmpack.words import what_is

Alone = Callable[[Any], Mapping[str, Any]]
"""A sample -> the keyword arguments of the model's own forward for it, as a batch of one, with
`input_ids` (1, s) and `labels` (1, s) where transformers has them: not shifted, -100 where nothing
is taught."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample alone, on the CPU.

    Args:
        ids: (s,).
        labels: (s,), not shifted.
        losses: (l,) of its label tokens, in order.
        positions: (A, s) as the model's class counts them, or as given; None where it has no
            counter.
        media: pixels and grids, by the name of the argument.
        behind: the positions with text behind the time of each video; None where that is the same.
        given: the arguments and `labels` that it is computed from.
    """

    ids: Tensor
    labels: Tensor
    losses: Tensor
    positions: Tensor | None
    media: Mapping[str, Tensor]
    behind: Tensor | None = None
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def taught(self) -> Tensor:
        """(l,) places of the label tokens, of which the first is 1 or more."""
        return (self.labels[1:] != IGNORE_INDEX).nonzero()[:, 0] + 1


def require_model(name: str, model: Any) -> None:
    """Refuses what is no model, such as the folder of one, or no numbers.

    Raises:
        VlmpackError: it is none, or has a tensor with values that are no numbers.
    """
    if not isinstance(model, nn.Module):
        raise VlmpackError(
            f"judge: {name} is {what_is(model)}; expected a transformers model, as "
            "AutoModelForImageTextToText.from_pretrained(folder) returns it (of a language model "
            "AutoModelForCausalLM)"
        )
    require_finite_model(f"judge: {name}", model)


def alone_of(sample: Any) -> dict[str, Any]:
    """A mapping of unbatched values, as transformers' collators take it, as a batch of one.

    Raises:
        VlmpackError: it is none; `alone=` says how.
    """
    if not isinstance(sample, Mapping) or not {"input_ids", "labels"} <= sample.keys():
        found = sorted(sample) if isinstance(sample, Mapping) else what_is(sample)
        raise VlmpackError(
            f"judge: a sample is {found}; expected a mapping with input_ids (s,) and labels (s,), "
            "not shifted; or give alone=, a function from a sample to the model's own arguments"
        )
    length = len(sample["input_ids"])
    made: dict[str, Any] = {}
    for name, value in sample.items():
        tensor = torch.as_tensor(value)
        is_row = tensor.dim() == 1 and len(tensor) == length and name != "image_sizes"
        made[name] = tensor[None] if is_row else tensor
    return made


def references(
    model: Any, reference: Any, samples: Sequence[Any], alone: Alone
) -> tuple[list[Sample], dict[str, Tensor]]:
    """Each sample by itself, and the gradients of the mean loss over all label tokens, of what both
    models train.

    Args:
        model: whose batches are judged.
        reference: what computes the samples; None: `model`.

    Raises:
        VlmpackError: no sample has a label token, `reference` has other weights, or what it
            computes are no numbers.
    """
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    if reference is not None:
        _require_same_weights(model, reference)
        trained &= {name for name, one in reference.named_parameters() if one.requires_grad}
        model = reference.eval()
    given = [copied(on(dict(alone(copied(sample))), CPU)) for sample in samples]
    total = sum(int((one["labels"][:, 1:] != IGNORE_INDEX).sum()) for one in given)
    if not total:
        raise VlmpackError("judge: no sample has a label token (labels other than -100)")
    model.zero_grad(set_to_none=True)
    device = device_of(model)
    found = []
    for number, one in enumerate(given):
        labels = one.pop("labels")

        def forward(one: Any = one) -> Any:
            return model(**on(one, device), use_cache=False).logits

        losses = token_losses(forward(), labels)
        require_finite_losses(f"judge: sample {number} alone", model, [losses], forward)
        if losses.requires_grad:
            (losses.sum() / total).backward()
        media = {n: v for n, v in one.items() if is_media(n, v, one["input_ids"])}
        positions = own_positions(model, one)
        behind = _behind_videos(positions, one)
        taken = losses.detach().cpu()
        whole = {**one, "labels": labels}
        row = one["input_ids"][0], labels[0]
        found.append(Sample(*row, taken, positions, media, behind, whole))
    gradients = take_gradients(model)
    require_finite_gradients("judge: the samples alone", gradients)
    return found, {name: gradients[name] for name in gradients if name in trained}


def _require_same_weights(model: nn.Module, reference: nn.Module) -> None:
    ours, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
    names = sorted(ours.keys() ^ theirs.keys())
    what = "parameters"
    if not names:
        what = "weights"
        names = [n for n, one in ours.items() if not torch.equal(*_on_cpu(one, theirs[n]))]
    if names:
        raise VlmpackError(
            f"judge: reference= has other {what} than model: {names_of(names)}; expected the same "
            "class, loaded from the same folder"
        )


def _on_cpu(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the dtype of the first one."""
    return one.detach().cpu(), other.detach().cpu().to(one.dtype)


def own_positions(model: nn.Module, arguments: Mapping[str, Any]) -> Tensor | None:
    """(A, s) as they are given or the class counts them; None for a class that has no counter of
    its own."""
    counter = position_counter(model)
    given = arguments.get("position_ids")
    if counter is None or given is None:
        return None if counter is None else counted_positions(counter, arguments)
    found: Tensor = given.reshape(-1, given.shape[-1])[-3:].cpu()
    return found


def _behind_videos(positions: Tensor | None, arguments: Mapping[str, Any]) -> Tensor | None:
    kinds = arguments.get("mm_token_type_ids")
    if positions is None or kinds is None or "video_grid_thw" not in arguments:
        return None
    moved = behind_videos(positions[:, None], kinds)[:, 0]
    return None if torch.equal(moved, positions) else moved


def is_media(name: str, value: Any, ids: Tensor) -> bool:
    """Whether an argument is of images: no tensor of a row's tokens."""
    return isinstance(value, Tensor) and value.shape[:2] != ids.shape and "mask" not in name
