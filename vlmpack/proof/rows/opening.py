"""Recipe -> the requested row, planned and loaded as in training.

A `ShownRow` has what a reader sees of the row, and a `Row` for its checks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vlmpack.build.data import build_cost_model
from vlmpack.build.look import (
    check_batch,
    last_state,
    open_recipe,
    planned_batch,
    read_recipe,
    run_folder,
)
from vlmpack.data.files.samples import record_number_key
from vlmpack.data.index.table import SampleRef
from vlmpack.data.loading.loader import BinRequest, MicroBatch
from vlmpack.data.loading.read import SkippedSample
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.packers import Bin
from vlmpack.data.splits.split import first_epoch
from vlmpack.encode import Encoder, Message, VLMSample
from vlmpack.errors import DataError, ModelError, RecipeError, VlmpackError, writing
from vlmpack.evaluation.predictions import Shapes, grounding_of
from vlmpack.families.base import positions_of
from vlmpack.packing import CostModel, EncodedSample, PackedBatch
from vlmpack.packing.pairs import sequences_of
from vlmpack.proof.rows.row import Row, RowRules, cut_row
from vlmpack.proof.rows.view import RowView, SampleView, view_samples
from vlmpack.recipe import Recipe
from vlmpack.recipe.packing_rules import alignment_splits_over_context, rows_hold_a_sample
from vlmpack.training.run_dir import RunDir


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the row: a sample with its alignment gap, or the tail, which holds no sample.

    Args:
        length: slots of the sample; 0 for a tail.
        slots: `length` and the gap behind it.
        logical: (begin, end) in `cu_seqlens`.
    """

    number: int
    start: int
    length: int
    slots: int
    logical: tuple[int, int]
    sample: SampleView | None

    @property
    def end(self) -> int:
        return self.start + self.slots

    @property
    def name(self) -> str:
        """The sample's key; for a shared prefix, the first key and the number of others."""
        if self.sample is None:
            return "tail"
        return self.sample.name if self.sample.shared_by else self.sample.key


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRow(Row):
    """A row for the reader.

    Args:
        cost: FLOPs of the model at hand; None where its config.json leaves a size out.
    """

    shown: RowView
    mode: str
    cost: CostModel | None

    @property
    def segments(self) -> list[Segment]:
        """In row order, without empty segments."""
        logical = self.flat.cu_seqlens.tolist()
        segments = []
        for number, (start, end) in enumerate(pairwise(self.boundaries)):
            sample = self.shown.samples[number] if number < len(self.shown.samples) else None
            if end <= start and sample is None:
                continue
            segments.append(
                Segment(
                    number=number,
                    start=start,
                    length=sample.num_tokens if sample is not None else 0,
                    slots=end - start,
                    logical=(logical[number], logical[number + 1]),
                    sample=sample,
                )
            )
        return segments

    def flops(self) -> tuple[float, float] | None:
        """FLOPs of a training step on this row (language model, vision tower), padding included.

        None if config.json lacks a size.
        """
        if self.cost is None:
            return None
        batch = self.flat
        grids = batch.media.grid_thw if batch.media is not None else ()
        patches = [t * h * w for t, h, w in grids]
        flops = self.cost(
            np.array([batch.num_slots]),
            np.array([sum(_squares(batch))]),
            np.array([sum(patches)]),
            patch_squares=np.array([sum(count**2 for count in patches)]),
            labels=np.array([batch.num_label_tokens]),
        )
        return float(flops[0, 0]), float(flops[0, 1])

    def position_range(self, segment: Segment) -> list[tuple[int, int]]:
        """(least, largest) position of a segment's sample, by axis; empty for a tail."""
        end = segment.start + segment.length
        part = self.batch.position_ids.flatten(1)[:, segment.start : end]
        if not part.numel():
            return []
        return list(zip(part.amin(1).tolist(), part.amax(1).tolist(), strict=True))

    def ranks(self) -> list[int] | None:
        """For each slot, the context-parallel rank that holds it, or -1.

        None if the row is whole or cannot be cut.
        """
        if isinstance(self.slices, str) or self.rules.context == 1:
            return None
        owner = [-1] * self.num_slots
        for part in self.slices:
            for slot in part.row_index.tolist():
                if 0 <= slot < len(owner):
                    owner[slot] = part.rank
        return owner


def load_row(
    train: TrainData, encoder: Encoder, samples: Sequence[SampleRef], title: str, context: int
) -> ShownRow:
    """Load a row as training does, and encode its samples again, each alone.

    Raises:
        DataError: a bad sample whose class is not skipped.
    """
    loaded, read = load_bin(train, samples)
    whole = [train.dataset.encode(*pair) for pair in zip(_refs(loaded, samples), read, strict=True)]
    alone = [part for sample in whole for part in sequences_of(sample)]
    mode = train.config.mode
    rules = RowRules(
        context=context,
        multiples=mode.multiples,
        placeholder_ids=encoder.placeholder_ids,
        pad_token_id=encoder.pad_token_id,
        budget=mode.budget if mode.facts.plans_rows else None,
    )
    return ShownRow(
        batch=loaded.batch,
        alone=tuple(alone),
        rules=rules,
        planned=tuple(ref.key for ref in samples),
        left_out=tuple(hole.key for hole in loaded.skipped),
        positions=tuple(_own_positions(encoder, item) for item in alone),
        slices=cut_row(loaded.batch, rules.context),
        sequences=2 if encoder.settings.pairs else 1,
        shown=view_row(loaded, read, encoder, title),
        mode=mode.name,
        cost=_cost_model(encoder),
    )


def _cost_model(encoder: Encoder) -> CostModel | None:
    try:
        return build_cost_model(encoder)
    except ModelError:
        return None


def load_bin(train: TrainData, samples: Sequence[SampleRef]) -> tuple[MicroBatch, list[Any]]:
    """A micro-batch as the training loader makes it, and what was read of the samples in it: a
    VLMSample each, or tokens where packs were saved.

    Raises:
        DataError: a bad sample whose class is not skipped, or that cannot be read any more.
    """
    loaded = train.dataset[BinRequest(tuple(samples))]
    if isinstance(loaded, SkippedSample):
        raise loaded.to_error()
    read = train.dataset.read(BinRequest(tuple(_refs(loaded, samples))))
    for item in read:
        if isinstance(item, DataError):
            raise item
    return loaded, list(read)


def _refs(loaded: MicroBatch, samples: Sequence[SampleRef]) -> list[SampleRef]:
    refs = {(ref.shard, ref.number): ref for ref in samples}
    return [refs[name.shard, name.number] for name in loaded.samples]


def view_row(loaded: MicroBatch, read: Sequence[Any], encoder: Encoder, title: str) -> RowView:
    """The contents of a micro-batch, with its images."""
    samples = []
    each = 2 if encoder.settings.pairs else 1
    for view in view_samples(loaded.batch, encoder):
        place = view.sequence
        name, item = loaded.samples[place // each], read[place // each]
        is_cooked = isinstance(item, VLMSample) and not view.shared_by
        messages = item.conversations[place % each] if is_cooked else ()
        images = encoder.image_rule.pictures(view.media) if view.media is not None else []
        roles = tuple(message.role for message in messages)
        shown = replace(view, shard=name.shard, roles=roles, images=tuple(images))
        if is_cooked and images:
            shown = _with_shapes(shown, encoder, item, messages)
        samples.append(shown)
    rows, columns = loaded.batch.input_ids.shape
    return RowView(title, tuple(samples), loaded.skipped, rows, columns)


def save_pictures(view: RowView, folder: Path) -> Iterator[Path]:
    """Write the images of a row, and yield their files.

    Raises:
        VlmpackError: the folder cannot be written.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for place, sample in enumerate(view.samples):
            for number, image in enumerate(sample.images):
                name = re.sub(r"[^\w.-]", "_", sample.name)[:80]
                path = folder / f"{place}-{name}-{number}.png"
                image.save(path)
                yield path


def _with_shapes(
    view: SampleView, encoder: Encoder, sample: VLMSample, messages: Sequence[Message]
) -> SampleView:
    """The view with the shapes that the sample's tokens say on its images; as it is without
    objects. Where its pictures are not whole images, they are replaced by the originals."""
    if sample.objects is None or encoder.coordinates is None:
        return view
    named = "".join(message.text for message in messages)
    grounding = grounding_of(encoder, sample, named)
    if len(view.images) != len(grounding.originals):
        return view
    whole = encoder.image_rule.pictures_are_whole
    if whole or encoder.coordinates.space == "shown":  # what was shrunk is shown smaller
        grounding = replace(grounding, shown=tuple(image.size for image in view.images))
    text = "".join(run.text for run in view.runs if run.kind != "image")
    shapes = Shapes.of(grounding, text, "")
    if whole:
        drawn = [shapes.drawn(number, image) for number, image in enumerate(view.images)]
        return replace(view, images=tuple(drawn))
    drawn = [shapes.on(number, data) for number, data in enumerate(sample.images)]
    runs = [
        replace(run, text=f"{run.text}, drawn on the original") if run.kind == "image" else run
        for run in view.runs
    ]
    return replace(view, images=tuple(drawn), runs=tuple(runs))


def _squares(batch: PackedBatch) -> Iterator[int]:
    """Squared lengths of segments; one that continues others attends to them as well."""
    for number, length in enumerate(batch.segment_lengths):
        path = () if batch.prefix_tree is None else batch.prefix_tree.path(number)
        seen = sum(batch.segment_lengths[place] for place in path)
        yield length**2 + 2 * length * seen


def _own_positions(encoder: Encoder, item: EncodedSample) -> Tensor:
    """(A, s) positions of a sample, from its length and its images alone."""
    return positions_of(encoder.family, item.length, item.media_positions.tolist(), item.media)


MAX_CANDIDATES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which row: exactly one of `row` (alone or within `batch`) and `key`.

    Args:
        row: counted from 0 over the first epoch; within `batch` where that is given.
        batch: a global batch, counted from 0 since the run's start.
        key: of a sample; the first epoch's row that holds it.
        shard: a part of the path of that sample's shard.
    """

    row: int | None = None
    batch: int | None = None
    key: str | None = None
    shard: str | None = None

    def __post_init__(self) -> None:
        if (self.row is None) == (self.key is None):
            raise VlmpackError("expected one of --row N and --key KEY")
        if self.batch is not None and self.row is None:
            raise VlmpackError("--batch goes with --row")
        if self.shard is not None and self.key is None:
            raise VlmpackError("--shard goes with --key")


@dataclass(frozen=True, slots=True)
class FoundRow:
    batch: int
    samples: tuple[SampleRef, ...]
    title: str
    stem: str


def open_row(
    recipe: Path, choice: Wanted, *, overrides: Sequence[str] = (), context: int | None = None
) -> tuple[ShownRow, FoundRow, Encoder]:
    """The row that training would get.

    Args:
        context: CP, in place of the recipe's; the plan is then that of a run with it.

    Raises:
        VlmpackError: what is wrong with the recipe, the model folder or the data, no such row, or
            a run that trained other rows than can be planned now.
    """
    run_dir = run_folder(recipe)
    values = read_recipe(recipe, overrides)
    if context is not None:
        values = _with_context(values, context)
    train, encoder = open_recipe(values, state=last_state(run_dir))
    try:
        if choice.batch is not None:
            check_batch(values, train, choice.batch, run_dir)
        place = find_row(train, choice, run_dir)
        row = load_row(train, encoder, place.samples, place.title, values.parallelism.context)
    finally:
        train.split.close()
    return row, place, encoder


def _with_context(recipe: Recipe, context: int) -> Recipe:
    parallelism = recipe.parallelism.model_copy(update={"context": context})
    problems = [
        *alignment_splits_over_context(recipe.packing, parallelism),
        *rows_hold_a_sample(recipe.packing, recipe.training, parallelism),
    ]
    if problems:
        raise RecipeError(
            [f"--cp {context}: {'.'.join(map(str, p.path))}: {p.message}" for p in problems]
        )
    return recipe.model_copy(update={"parallelism": parallelism})


def find_row(train: TrainData, choice: Wanted, run_dir: RunDir | None) -> FoundRow:
    """Find the requested row in the plan.

    Raises:
        VlmpackError: no such row (the message lists what there is), or the run did not plan it.
    """
    if choice.batch is None:
        place = _in_first_epoch(train, choice)
        _check_planned(train, place, run_dir)
        return place
    return rows_of_batch(train, choice.batch, choice.row, run_dir)[0]


def rows_of_batch(
    train: TrainData, batch: int, row: int | None, run_dir: RunDir | None
) -> list[FoundRow]:
    """The rows of a global batch.

    Args:
        batch: counted from 0 since the run's start.
        row: the only one that is wanted; None for all.

    Raises:
        VlmpackError: it has no such row, or the run did not plan the batch.
    """
    planned = planned_batch(train, batch, run_dir)
    if row is not None and row >= len(planned.bins):
        raise VlmpackError(
            f"--row {row}: batch {batch} has {len(planned.bins)} rows, counted from 0"
        )
    return [
        FoundRow(
            batch,
            train.split.refs(samples),
            f"row {number} of global batch {batch}, epoch {planned.position.epoch}",
            f"batch-{batch}-row-{number}",
        )
        for number, samples in enumerate(planned.bins)
        if row in (None, number)
    ]


def _check_planned(train: TrainData, place: FoundRow, run_dir: RunDir | None) -> None:
    """Refuse a row of the first epoch that the run planned differently."""
    if run_dir is None:
        return
    planned = planned_batch(train, place.batch, run_dir)
    if place.samples not in [train.split.refs(samples) for samples in planned.bins]:
        raise VlmpackError(
            f"{run_dir.path}: {place.title}, is not what the run planned there: its data changed "
            "on the way. Choose with --batch N --row N instead, counted from the run's start"
        )


def _in_first_epoch(train: TrainData, choice: Wanted) -> FoundRow:
    if choice.key is not None:
        return _holding(train, choice.key, choice.shard)
    number = -1
    for number, (batch, samples) in enumerate(_first_rows(train)):
        if number == choice.row:
            return _of_first_epoch(train, number, batch, samples)
    raise VlmpackError(
        f"--row {choice.row}: the first epoch has {number + 1:,} rows, counted from 0"
    )


def _first_rows(train: TrainData) -> Iterator[tuple[int, Bin]]:
    """(global batch, samples) of every row."""
    planned = enumerate(first_epoch(train.split))
    return ((batch, samples) for batch, step in planned for samples in step.bins)


def _of_first_epoch(train: TrainData, number: int, batch: int, samples: Bin) -> FoundRow:
    title = f"row {number} of the first epoch, in global batch {batch}"
    return FoundRow(batch, train.split.refs(samples), title, f"row-{number}")


def _holding(train: TrainData, key: str, shard: str | None) -> FoundRow:
    matches = find_samples(train, key, shard)
    shards = sorted({ref.shard for ref in matches})
    if len(shards) > 1:
        raise VlmpackError(
            f"--key {key}: {len(shards)} shards have it: {', '.join(shards[:6])}; choose one with "
            "--shard TEXT, a part of its path"
        )
    places = {(ref.shard, ref.key) for ref in matches}  # rows of a table share their offsets
    for number, (batch, samples) in enumerate(_first_rows(train)):
        row = _of_first_epoch(train, number, batch, samples)
        if any((ref.shard, ref.key) in places for ref in row.samples):
            return row
    numbers = {ref.number for ref in matches}
    why = [item.reason for item in train.fitted.dropped if item.number in numbers]
    if not why and not train.fitted.eligible[list(numbers)].any():
        why = [f"it is held back for validation (data.validation: {train.config.share})"]
    raise VlmpackError(
        f"--key {key}: the sample is in {shards[0]}, but in no row of the first epoch"
        + (f": {why[0]}" if why else "")
    )


def find_samples(train: TrainData, key: str, shard: str | None = None) -> list[SampleRef]:
    """The samples with this key; shards that are not indexed yet are indexed first.

    Args:
        key: as the index has it; of a file of records the number of the record will do.
        shard: part of the shard's path, where several shards have the key.

    Raises:
        VlmpackError: there is none.
    """
    table = train.fitted.table

    def keyed(name: str) -> list[SampleRef]:
        refs = [table.ref(number) for number in table.keys.find(name)]
        return [ref for ref in refs if shard is None or shard in ref.shard]

    samples = keyed(key)
    if not samples and key.isdecimal():
        samples = [ref for ref in keyed(record_number_key(int(key))) if ref.stamp.holds_records]
    if not samples:
        where = f" in a shard like {shard!r}" if shard is not None else ""
        some = ", ".join(table.key(n) for n in range(min(MAX_CANDIDATES, table.num_samples)))
        raise VlmpackError(
            f"no sample {key!r}{where} in {train.config.key}; keys begin with {some}"
        )
    return samples
