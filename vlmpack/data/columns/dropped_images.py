"""Images that records have and nobody would read, found in the first records of a source.

A column counts where its values look like paths, addresses or bytes of images in more than half of
these records, or where it says which image a record is about (image_id) and no image is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from vlmpack.data.columns.form import RecordForm, is_read, prepared
from vlmpack.data.columns.image_columns import (
    NAMES,
    NEVER_IMAGES,
    file_names,
    identifies_an_image,
    looks_like_images,
    named_in_turns,
)
from vlmpack.data.shards.keys import is_absent, names_no_image

FIRST_RECORDS = 1000
"""Records of a source that are looked at."""
_SHOWN = 80


@dataclass(slots=True)
class DroppedImages:
    """What was found.

    Args:
        total: records that were looked at.
        counts: column -> those of them that have images there which are not read.
        examples: column -> the first of its values, in words.
        reads_some: whether any record has images that are read.
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
        """Why the source is refused, and what can be done.

        Args:
            where: the source.
        """
        names = self.columns
        first, every = names[0], ", ".join(names)
        more = (
            "; several images of a record are a list under 'images'"
            if len(names) > 1 or self.reads_some
            else ""
        )
        return (
            f"{where}: nothing reads {' and '.join(map(repr, names))}, where "
            f"{self.counts[first]:,} of the first {self.total:,} records have what looks like "
            f"images ({self.examples[first]}), so they would be trained without. If it is one, "
            f"read it by --columns image={first} (data.columns: {{image: {first}}}){more}; if it "
            f"is none, say so by data.ignore_columns: [{every}] (--ignore-columns "
            f"{','.join(names)})"
        )


def find_dropped(
    records: Iterable[Mapping[str, Any]],
    form: RecordForm,
    *,
    unread_alone: bool = False,
    by_identifiers: bool = True,
) -> DroppedImages:
    """Columns of the first records that hold images which the form does not read.

    Args:
        records: of one source, in order.
        form: how they are read.
        unread_alone: whether the records lack the columns that are read.
        by_identifiers: whether a column counts that says which image a record is about.
    """
    found = DroppedImages()
    for record in islice(records, FIRST_RECORDS):
        found.total += 1
        _add(found, record if unread_alone else prepared(record, form), form, by_identifiers)
        most = max(found.counts.values(), default=0)
        if 2 * most > FIRST_RECORDS or 2 * (found.total - most) >= FIRST_RECORDS:
            break  # whatever the others have
    return found


def _add(
    found: DroppedImages, record: Mapping[str, Any], form: RecordForm, by_identifiers: bool
) -> None:
    roles = dict(form.columns)
    images = [record.get(roles.get(name, name)) for name in NAMES]
    images = [value for value in images if not names_no_image(value)] + [*named_in_turns(record)]
    found.reads_some |= bool(images)
    shown = file_names(images)
    for name, value in record.items():
        if is_read(name, form) or name.lower() in NEVER_IMAGES or is_absent(value):
            continue
        is_one = looks_like_images(name, value, shown)
        if is_one or (by_identifiers and not images and identifies_an_image(name, value)):
            found.counts[name] += 1
            found.examples.setdefault(name, _words(value))


def _words(value: object) -> str:
    said = f"{len(value):,} bytes" if isinstance(value, bytes) else repr(value)
    return said if len(said) <= _SHOWN else said[: _SHOWN - 3] + "..."
