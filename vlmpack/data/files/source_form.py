"""How the files of a source are read, found from the recipe and the source's first records.

The first records are also searched for images that nobody would read. A column counts if its values
look like paths, addresses or bytes of images in more than half of these records. A column that says
which image a record is about (image_id) counts if no image is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from vlmpack.addresses import is_remote, record_kind, redacted
from vlmpack.data.columns.form import (
    AS_TURNS,
    RecordForm,
    find_form,
    is_read,
    prepared,
    read_columns,
)
from vlmpack.data.columns.image_columns import (
    NAMES,
    NEVER_IMAGES,
    file_names,
    identifies_an_image,
    is_image_column,
    looks_like_images,
    named_in_turns,
)
from vlmpack.data.columns.layouts import fitting, has_value
from vlmpack.data.files.form import FileForm, FormOptions
from vlmpack.data.files.records import open_file
from vlmpack.data.files.registered import Function, asked_function, rewritten
from vlmpack.data.files.shard_samples import DOCUMENTS, member_record, read_samples, shard_records
from vlmpack.data.files.tables import ChooseColumns, take_all
from vlmpack.data.shards.naming import JSON_FIELD, SampleCaps, is_image, is_missing, names_no_image
from vlmpack.errors import DataError, RecipeError
from vlmpack.storage.fetch import Fetcher, ShardStamp
from vlmpack.storage.sources import FoundShard

NUM_LOOKED_AT = 64
"""Records of a source that say how it is read."""
SAMPLES_LOOKED_AT = 8
"""As many samples do so of shards."""
SEARCHED_BYTES = 64 << 20
"""The most of a shard that is searched for images which nobody would read."""
FIRST_RECORDS = 1000
"""Records of a source that are searched for them."""
_SHOWN = 80
_NATIVE = frozenset({"messages", "llava"})


def find_forms(
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
                f"{options.key}: {' and '.join(kinds)} files in one source; expected shards "
                "alone, or none: name them as two sources"
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
        raise RecipeError(f"{options.key}: {which} no readable record{why}")
    where = f"{options.key} ({first})"
    form = find_form(records, columns, where, options.knob, options.ignored)

    def scan(choose: ChooseColumns) -> Iterator[Mapping[str, Any]]:
        return _values(stamps, fetcher, caps, [], function, take_all if function else choose)

    refuse_dropped_images(scan, records, form, where)
    text = FileForm(form, _absolute(options.image_root), made_by).to_text()
    return tuple(replace(stamp, form=text) for stamp in stamps)


def refuse_dropped_images(
    scan: Callable[[ChooseColumns], Iterator[Mapping[str, Any]]],
    first: Sequence[Mapping[str, Any]],
    form: RecordForm,
    where: str,
) -> None:
    """Raise RecipeError where the first records of a source have images that nobody would read."""

    def unused(names: Sequence[str]) -> list[str]:
        read = {*read_columns(form, names), *form.ignored}
        images = [name for name in names if name in NAMES or is_image_column(name)]
        if len(images) > 1:  # one of them is read, and which one the record says
            read -= {*images} - {*NAMES}
        return [name for name in names if name not in read]

    by_identifiers = not find_dropped(first, form).reads_some
    # Most tables have nothing of that kind, so the images that are read are decoded only then.
    for choose, alone in ((unused, True), (take_all, False)):
        dropped = find_dropped(
            scan(choose), form, unused_alone=alone, by_identifiers=by_identifiers
        )
        if not dropped.columns:
            return
    raise RecipeError(dropped.problem(where))


def find_shard_forms(
    shards: Sequence[FoundShard], options: FormOptions, fetcher: Fetcher, caps: SampleCaps
) -> list[FoundShard]:
    """As find_forms, for files of which not all were looked at. An unreachable shard fails when it
    is read.

    Raises:
        RecipeError, DataError: as find_forms.
    """
    if any(record_kind(shard.path) for shard in shards):
        stamps = find_forms([shard.seen(fetcher) for shard in shards], options, fetcher, caps)
        return [FoundShard(stamp.path, stamp, stamp.form) for stamp in stamps]
    # The first is looked at, where that is a look at a disk or somebody names columns.
    if not shards or (options.columns is None and is_remote(shards[0].path)):
        return list(shards)
    try:
        first = shards[0].seen(fetcher)
    except DataError:
        return list(shards)
    form = _shard_form(first, options, fetcher, caps)
    return [replace(shard, form=form) for shard in shards] if form else list(shards)


def _shard_form(stamp: ShardStamp, options: FormOptions, fetcher: Fetcher, caps: SampleCaps) -> str:
    """The form of a source's shards, by the first of them; empty for turns.

    Without columns in the recipe, the first samples of a local shard decide. A shard in a store is
    not read.
    """
    made_by, function = asked_function(options, fetcher)
    if options.columns is None and is_remote(stamp.path):
        return ""
    where = f"{options.key} ({redacted(stamp.path)})"
    first = islice(shard_records(fetcher, stamp, caps), SAMPLES_LOOKED_AT)
    form = _found_form(first, options, where, function)
    if function is None:
        records = _without_members(fetcher, stamp, caps)
        blank = replace(AS_TURNS, ignored=options.ignored)
        # Shards of turns are read as they are: no other name stands for their images.
        dropped = find_dropped(
            records, form or blank, unused_alone=form is None, by_identifiers=False
        )
        if dropped.columns:
            raise RecipeError(dropped.problem(where))
    return "" if form is None else FileForm(form, function=made_by).to_text()


def _found_form(
    first: Iterator[dict[str, Any]], options: FormOptions, where: str, function: Function | None
) -> RecordForm | None:
    """How the samples of a source's shards are read, by the first records; None for turns."""
    columns = options.columns
    if columns is not None:
        records = list(first)
        if not records:
            raise RecipeError(f"{where}: it holds no readable sample")
        if function is not None:
            return _form_behind(function, records, where, options.knob)
        return find_form(records, columns, where, options.knob, options.ignored)
    try:
        records = list(first)
    except DataError:  # the index tells, with its place
        return None
    keys = [{key for key, value in record.items() if has_value(value)} for record in records]
    if {layout.name for each in keys for layout in fitting(each)} <= _NATIVE:
        is_left_out = any(name in each for each in keys for name in options.ignored)
        return replace(AS_TURNS, ignored=options.ignored) if is_left_out else None
    return find_form(records, None, where, options.knob, options.ignored)


def _form_behind(
    function: Function, records: Sequence[dict[str, Any]], where: str, knob: str
) -> RecordForm:
    made, faults = [], []
    for record in records:
        try:
            made.append(function(record))
        except DataError as error:
            faults.append(error)
    if not made:
        raise RecipeError(f"{where}: {faults[0].reason}, and so with all that were looked at")
    return find_form(made, None, where, knob)


def _without_members(
    fetcher: Fetcher, stamp: ShardStamp, caps: SampleCaps
) -> Iterator[dict[str, Any]]:
    """The first records of a shard without image members. Members must all be shown, so none is
    lost."""
    with suppress(DataError):
        for raw in read_samples(fetcher, stamp, caps, DOCUMENTS):
            if raw.offset > SEARCHED_BYTES:
                return
            document = raw.member(JSON_FIELD)
            if raw.fault is not None or document is None or any(map(is_image, raw.fields)):
                yield {}
                continue
            with suppress(DataError):
                yield member_record(document.data, None, ())


def describe_forms(stamps: Sequence[ShardStamp]) -> str:
    """The form of a source in words, as "JSONL, read as messages"."""
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
    choose: ChooseColumns = take_all,
) -> Iterator[Mapping[str, Any]]:
    """The readable records of the files, in order. Faults of the others are added to `faults`."""
    for stamp in stamps:
        source = open_file(fetcher, stamp, caps, choose, is_bounded=False)
        with closing(source) as file, closing(file.scan()) as scan:
            for unit in scan:
                record = rewritten(unit, function)
                if record.value is not None:
                    yield record.value
                elif record.fault is not None:
                    faults.append(record.fault)


def _absolute(root: str | None) -> str:
    if root is None:
        return ""
    return root if is_remote(root) else str(Path(root).absolute())


@dataclass(slots=True)
class DroppedImages:
    """Columns of images that are not read.

    Args:
        counts: column -> those of them that have images there which are not read.
        examples: column -> the first of its values, in words.
    """

    total: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    reads_some: bool = False

    @property
    def columns(self) -> list[str]:
        """Those that are refused."""
        return [name for name, count in self.counts.items() if 2 * count > self.total]

    def problem(self, where: str) -> str:
        """Why the source is refused, and what can be done."""
        names = self.columns
        first, every = names[0], ", ".join(names)
        more = (
            "; several images of a record are a list under 'images'"
            if len(names) > 1 or self.reads_some
            else ""
        )
        return (
            f"{where}: nothing reads {' and '.join(map(repr, names))}, but {self.counts[first]:,} "
            f"of the first {self.total:,} records seem to have images there "
            f"({self.examples[first]}). Read them by --columns image={first} "
            f"(data.columns: {{image: {first}}}){more}. Or, if they are none, set "
            f"data.ignore_columns: [{every}] (--ignore-columns {','.join(names)})"
        )


def find_dropped(
    records: Iterable[Mapping[str, Any]],
    form: RecordForm,
    *,
    unused_alone: bool = False,
    by_identifiers: bool = True,
) -> DroppedImages:
    """Columns of the first records that hold images which the form does not read."""
    dropped = DroppedImages()
    for record in islice(records, FIRST_RECORDS):
        dropped.total += 1
        _add(dropped, record if unused_alone else prepared(record, form), form, by_identifiers)
        most = max(dropped.counts.values(), default=0)
        if 2 * most > FIRST_RECORDS or 2 * (dropped.total - most) >= FIRST_RECORDS:
            break  # whatever the others have
    return dropped


def _add(
    dropped: DroppedImages, record: Mapping[str, Any], form: RecordForm, by_identifiers: bool
) -> None:
    roles = dict(form.columns)
    images = [record.get(roles.get(name, name)) for name in NAMES]
    images = [value for value in images if not names_no_image(value)] + [*named_in_turns(record)]
    dropped.reads_some |= bool(images)
    shown = file_names(images)
    for name, value in record.items():
        if is_read(name, form) or name.lower() in NEVER_IMAGES or is_missing(value):
            continue
        is_one = looks_like_images(name, value, shown)
        if is_one or (by_identifiers and not images and identifies_an_image(name, value)):
            dropped.counts[name] += 1
            dropped.examples.setdefault(name, _words(value))


def _words(value: object) -> str:
    said = f"{len(value):,} bytes" if isinstance(value, bytes) else repr(value)
    return said if len(said) <= _SHOWN else said[: _SHOWN - 3] + "..."
