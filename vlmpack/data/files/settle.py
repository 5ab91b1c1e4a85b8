"""How the files of a source are read, settled from the recipe and the source's first records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from vlmpack.addresses import is_remote, record_kind, redacted
from vlmpack.data.columns.dropped_images import find_dropped
from vlmpack.data.columns.form import RecordForm, find_form, read_columns
from vlmpack.data.columns.image_columns import NAMES, is_image_column
from vlmpack.data.files.form import FileForm, FormOptions
from vlmpack.data.files.parquet_rows import ChooseColumns
from vlmpack.data.files.readers import open_file
from vlmpack.data.files.registered import Function, asked_function, rewritten
from vlmpack.data.files.shard_form import find_shard_form
from vlmpack.data.shards.caps import SampleCaps
from vlmpack.errors import DataError, RecipeError
from vlmpack.storage.fetch import Fetcher, ShardStamp
from vlmpack.storage.sources import FoundShard

NUM_LOOKED_AT = 64
"""Records of a source that say how it is read."""


def settle_forms(
    stamps: Sequence[ShardStamp], options: FormOptions, fetcher: Fetcher, caps: SampleCaps
) -> tuple[ShardStamp, ...]:
    """The files of one source, each with its form; shards of turns as they are.

    Raises:
        RecipeError: shards and other files in one source, or records whose layout nobody can tell.
        DataError: a file that cannot be read.
    """
    kinds = sorted({record_kind(stamp.path) or "tar" for stamp in stamps})
    if "tar" in kinds:
        if len(kinds) > 1:
            raise RecipeError(
                [
                    f"{options.key}: {' and '.join(kinds)} files in one source; expected shards "
                    "alone, or none: name them as two sources"
                ]
            )
        found = _shard_form(stamps[0], options, fetcher, caps)
        return tuple(replace(stamp, form=found) for stamp in stamps) if found else tuple(stamps)
    first = redacted(stamps[0].path)
    faults: list[DataError] = []
    made_by, function = asked_function(options, fetcher)
    columns = None if made_by else options.columns
    records = list(islice(_values(stamps, fetcher, caps, faults, function), NUM_LOOKED_AT))
    if not records:
        which = f"{first} and what follows it hold" if len(stamps) > 1 else f"{first} holds"
        why = f"; the first: {faults[0].reason}" if faults else ""
        raise RecipeError([f"{options.key}: {which} no readable record{why}"])
    where = f"{options.key} ({first})"
    form = find_form(records, columns, where, options.knob, options.ignored)

    def scan(choose: ChooseColumns) -> Iterator[Mapping[str, Any]]:
        return _values(stamps, fetcher, caps, [], function, _all if function else choose)

    refuse_dropped_images(scan, records, form, where)
    text = FileForm(form, _absolute(options.image_root), made_by).to_text()
    return tuple(replace(stamp, form=text) for stamp in stamps)


def refuse_dropped_images(
    scan: Callable[[ChooseColumns], Iterator[Mapping[str, Any]]],
    first: Sequence[Mapping[str, Any]],
    form: RecordForm,
    where: str,
) -> None:
    """Raise RecipeError where the first records of a source have images that nobody would read.

    Args:
        scan: the records of the source from its first one on, with those columns of a table that
            are chosen.
        first: the first of them, with every column.
        form: how they are read.
        where: the source, for messages.
    """

    def unread(names: Sequence[str]) -> list[str]:
        read = {*read_columns(form, names), *form.ignored}
        images = [name for name in names if name in NAMES or is_image_column(name)]
        if len(images) > 1:  # one of them is read, and which one the record says
            read -= {*images} - {*NAMES}
        return [name for name in names if name not in read]

    by_identifiers = not find_dropped(first, form).reads_some
    # Most tables have nothing of that kind, so the images that are read are decoded only then.
    for choose, alone in ((unread, True), (_all, False)):
        found = find_dropped(scan(choose), form, unread_alone=alone, by_identifiers=by_identifiers)
        if not found.columns:
            return
    raise RecipeError([found.problem(where)])


def _all(names: Sequence[str]) -> Sequence[str]:
    return names


def found_forms(
    found: Sequence[FoundShard], options: FormOptions, fetcher: Fetcher, caps: SampleCaps
) -> list[FoundShard]:
    """As settle_forms, of files that were found and not all looked at. A shard that cannot be
    reached is its own fault, told where it is read.

    Raises:
        RecipeError, DataError: as settle_forms.
    """
    if not any(record_kind(shard.path) for shard in found):
        return _found_shards(found, options, fetcher, caps)
    stamps = settle_forms([shard.seen(fetcher) for shard in found], options, fetcher, caps)
    return [FoundShard(stamp.path, stamp, stamp.form) for stamp in stamps]


def _found_shards(
    found: Sequence[FoundShard], options: FormOptions, fetcher: Fetcher, caps: SampleCaps
) -> list[FoundShard]:
    """The first is looked at, where that is a look at a disk or somebody names columns."""
    if not found or (options.columns is None and is_remote(found[0].path)):
        return list(found)
    try:
        first = found[0].seen(fetcher)
    except DataError:
        return list(found)
    form = _shard_form(first, options, fetcher, caps)
    return [replace(shard, form=form) for shard in found] if form else list(found)


def _shard_form(stamp: ShardStamp, options: FormOptions, fetcher: Fetcher, caps: SampleCaps) -> str:
    """The form of a source's shards, by the first of them; empty for turns."""
    made_by, function = asked_function(options, fetcher)
    form = find_shard_form(stamp, options, fetcher, caps, function)
    return "" if form is None else FileForm(form, function=made_by).to_text()


def describe_forms(stamps: Sequence[ShardStamp]) -> str:
    """What a source was found to be: JSONL, read as messages."""
    kinds = sorted({record_kind(stamp.path) or "tar" for stamp in stamps})
    if not stamps or not stamps[0].form:
        return ", ".join(kinds)
    form = FileForm.from_text(stamps[0].form)
    root = f", images below {redacted(form.image_root)}" if form.image_root else ""
    made = f", by python:{form.function.partition('@')[0]}" if form.function else ""
    return f"{', '.join(kinds)}{made}, read as {form.record.words}{root}"


def _values(
    stamps: Sequence[ShardStamp],
    fetcher: Fetcher,
    caps: SampleCaps,
    faults: list[DataError],
    function: Function | None = None,
    choose: ChooseColumns = _all,
) -> Iterator[Mapping[str, Any]]:
    """The readable records of the files, one after the other; what the others have is put into
    `faults`."""
    for stamp in stamps:
        file = open_file(fetcher, stamp, caps, choose, is_bounded=False)
        scan = file.scan()
        try:
            with closing(scan):  # type: ignore[type-var]
                for found in scan:
                    record = rewritten(found, function)
                    if record.value is not None:
                        yield record.value
                    elif record.fault is not None:
                        faults.append(record.fault)
        finally:
            file.close()


def _absolute(root: str | None) -> str:
    if root is None:
        return ""
    return root if is_remote(root) else str(Path(root).absolute())
