"""Each sample alone, as the model itself computes it, and where its tokens lie in a batch.

A batch is compared with these samples on the CPU. Code of others gets copies where the model is.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vlmpack.errors import VlmpackError
from vlmpack.families.qwen_video import behind_videos
from vlmpack.packing import IGNORE_INDEX
from vlmpack.proof.stock import (
    counted_positions,
    position_counter,
    require_finite_gradients,
    require_finite_losses,
    require_finite_model,
    take_gradients,
    token_losses,
)
from vlmpack.words import some_of, what_is

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
        positions: (A, s) as the class counts them or as given; None if it has no counter.
        media: pixels and grids, by the name of the argument.
        behind: positions with text after each video's time; None if that is the same.
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
    """Refuse values that are no model, as a folder's path, and models with values that are not
    finite.

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
        VlmpackError: the sample is no such mapping; the message explains `alone=`.
    """
    if not isinstance(sample, Mapping) or not {"input_ids", "labels"} <= sample.keys():
        found = sorted(sample) if isinstance(sample, Mapping) else what_is(sample)
        raise VlmpackError(
            f"judge: a sample is {found}. Expected a mapping with input_ids (s,) and labels (s,), "
            "not shifted. Or give alone=, a function from a sample to the model's own arguments"
        )
    length = len(sample["input_ids"])
    made: dict[str, Any] = {}
    for name, value in sample.items():
        tensor = torch.as_tensor(value)
        is_row = tensor.dim() == 1 and len(tensor) == length and name != "image_sizes"
        made[name] = tensor[None] if is_row else tensor
    return made


def compute_alone(
    model: Any, stock: Any, samples: Sequence[Any], alone: Alone
) -> tuple[list[Sample], dict[str, Tensor]]:
    """Each sample alone, and the gradients of the mean loss over all label tokens.

    Only gradients of parameters that both models train are kept.

    Args:
        stock: the model that computes the samples. With None it is `model`.

    Raises:
        VlmpackError: no sample has a label token, `stock` has other weights, or what it
            computes are no numbers.
    """
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    if stock is not None:
        _require_same_weights(model, stock)
        trained &= {name for name, one in stock.named_parameters() if one.requires_grad}
        model = stock.eval()
    given = [copied(on(dict(alone(copied(sample))), CPU)) for sample in samples]
    total = sum(int((one["labels"][:, 1:] != IGNORE_INDEX).sum()) for one in given)
    if not total:
        raise VlmpackError("judge: no sample has a label token (labels other than -100)")
    model.zero_grad(set_to_none=True)
    device = device_of(model)
    computed = []
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
        computed.append(Sample(*row, taken, positions, media, behind, whole))
    gradients = take_gradients(model)
    require_finite_gradients("judge: the samples alone", gradients)
    return computed, {name: gradients[name] for name in gradients if name in trained}


def _require_same_weights(model: nn.Module, stock: nn.Module) -> None:
    ours, theirs = dict(model.named_parameters()), dict(stock.named_parameters())
    names = sorted(ours.keys() ^ theirs.keys())
    what = "parameters"
    if not names:
        what = "weights"
        names = [n for n, one in ours.items() if not torch.equal(*_on_cpu(one, theirs[n]))]
    if names:
        raise VlmpackError(
            f"judge: stock= has other {what} than model: {some_of(names)}; expected the same "
            "class, loaded from the same folder"
        )


def _on_cpu(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    return one.detach().cpu(), other.detach().cpu().to(one.dtype)


def own_positions(model: nn.Module, arguments: Mapping[str, Any]) -> Tensor | None:
    """(A, s) positions as given or as the class counts them; None if it has no counter."""
    counter = position_counter(model)
    given = arguments.get("position_ids")
    if counter is None or given is None:
        return None if counter is None else counted_positions(counter, arguments)
    positions: Tensor = given.reshape(-1, given.shape[-1])[-3:].cpu()
    return positions


def _behind_videos(positions: Tensor | None, arguments: Mapping[str, Any]) -> Tensor | None:
    kinds = arguments.get("mm_token_type_ids")
    if positions is None or kinds is None or "video_grid_thw" not in arguments:
        return None
    moved = behind_videos(positions[:, None], kinds)[:, 0]
    return None if torch.equal(moved, positions) else moved


def is_media(name: str, value: Any, ids: Tensor) -> bool:
    """Whether an argument belongs to images, since it is no tensor of a row's tokens."""
    return isinstance(value, Tensor) and value.shape[:2] != ids.shape and "mask" not in name


@dataclass(frozen=True, slots=True)
class Place:
    """A sample's tokens in a batch: the row, the first slot there, and the slot after the last."""

    row: int
    start: int
    stop: int


def locate(
    batch: Mapping[str, Any], samples: Sequence[Sample], *, shifted: bool
) -> list[Place | None]:
    """Where each sample lies; None if its tokens are not in the batch as they are alone.

    Samples of the same ids are distinguished by labels, and by images in token order.

    Args:
        batch: with `input_ids` (B, S), `labels` (B, S), and images as the model takes them.
        shifted: whether a label stands where it is predicted.
    """
    places = find_places(batch["input_ids"], samples)
    where = {number: at for number, at in enumerate(places) if at is not None}
    if len(where) < len(places):
        return places
    rest = list(where)
    before: Counter[str] = Counter()
    for at in sorted(where.values(), key=lambda at: (at.row, at.start)):
        ids = batch["input_ids"][at.row, at.start : at.stop]
        twins = [n for n in rest if torch.equal(samples[n].ids, ids)]
        given = own_labels(batch["labels"], at, shifted=shifted)

        def likeness(n: int, given: Tensor = given) -> tuple[bool, bool]:
            same = torch.equal(given[1:], samples[n].labels[1:])
            return same, _has_media(batch, samples[n].media, before)

        number = twins[0] if len(twins) == 1 else max(twins, key=likeness)
        places[number] = at
        rest.remove(number)
        before.update({name: len(part) for name, part in samples[number].media.items()})
    return places


def _has_media(
    batch: Mapping[str, Any], media: Mapping[str, Tensor], before: Mapping[str, int]
) -> bool:
    """Whether a sample's images follow those of the samples before it."""
    for name, part in media.items():
        whole = batch.get(name)
        if not isinstance(whole, Tensor):
            return False
        given = whole[before[name] : before[name] + len(part)]
        if given.shape != part.shape or not torch.equal(given.to(part.dtype), part):
            return False
    return True


def own_labels(labels: Tensor, at: Place, *, shifted: bool) -> Tensor:
    """(s,) the labels of a sample's tokens as transformers has them; of the first one -100."""
    given = labels[at.row, at.start : at.stop]
    given = given.roll(1) if shifted else given.clone()
    given[0] = IGNORE_INDEX
    return given


def find_places(ids: Tensor, samples: Sequence[Sample]) -> list[Place | None]:
    """Where each sample lies, in any order; None if its tokens are not there as they are alone.

    The longest samples come first, since another may begin with a shorter one. A sample whose
    tokens are taken is placed first in another attempt.
    """
    order = sorted(range(len(samples)), key=lambda n: -len(samples[n].ids))
    best: dict[int, Place] = {}
    for _ in samples:
        places = _in_turn(ids, samples, order)
        best = max(best, places, key=len)
        lost = [n for n in order if n not in places]
        if not lost or lost[0] == order[0]:  # that one is nowhere
            break
        order = [*lost, *(n for n in order if n in places)]
    return [best.get(n) for n in range(len(samples))]


def _in_turn(ids: Tensor, samples: Sequence[Sample], order: Sequence[int]) -> dict[int, Place]:
    """Each sample at the first place that earlier ones left; samples without one are left out."""
    free = torch.ones_like(ids, dtype=torch.bool)
    places = {}
    for number in order:
        at = _first(ids, samples[number].ids, free)
        if at is not None:
            free[at.row, at.start : at.stop] = False
            places[number] = at
    return places


def longest_start(ids: Tensor, own_ids: Tensor, where: Sequence[Place | None]) -> int:
    """How many tokens of a sample lie in a row, from its first one on, outside other samples.

    For a sample that was cut, this is what is left of it.

    Args:
        ids: (B, S).
        own_ids: (s,) of the sample.
        where: the other samples; None for one that is not there.
    """
    free = torch.ones_like(ids, dtype=torch.bool)
    for at in where:
        if at is not None:
            free[at.row, at.start : at.stop] = False
    lengths = range(1, len(own_ids) + 1)
    return bisect_left(lengths, True, key=lambda n: _first(ids, own_ids[:n], free) is None)


def _first(ids: Tensor, own_ids: Tensor, free: Tensor) -> Place | None:
    length = len(own_ids)
    if length > ids.shape[1]:
        return None
    for row in range(ids.shape[0]):
        windows = ids[row].unfold(0, length, 1)
        same = (windows == own_ids).all(1) & free[row].unfold(0, length, 1).all(1)
        starts = same.nonzero()[:, 0]
        if len(starts):
            return Place(row, int(starts[0]), int(starts[0]) + length)
    return None


CPU = torch.device("cpu")


def device_of(model: nn.Module) -> torch.device:
    """Where a model takes its batches: its first parameter's device."""
    first = next(model.parameters(), None)
    return CPU if first is None else first.device


def copied(value: Any) -> Any:
    """A copy for code that may write into it. What cannot be copied stays as it is."""
    if type(value) is list:
        return [copied(each) for each in value]
    if type(value) is dict:
        return {name: copied(each) for name, each in value.items()}
    try:
        return copy.deepcopy(value)
    except Exception:  # it is somebody's: a lock, an open file, a tensor with a graph
        return value


def on(value: Any, device: torch.device) -> Any:
    """The value with its tensors on a device, in mappings, lists and tuples at any depth."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        moved = {name: on(each, device) for name, each in value.items()}
        return value if all(moved[name] is each for name, each in value.items()) else moved
    if isinstance(value, list | tuple):
        parts = [on(each, device) for each in value]
        if all(one is other for one, other in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
