"""What fields are made of: sections, sources of samples, and names of what a program hands over.

`data.train: shards/*.tar`, `data.train: {path: shards/*.tar}` and a list of either are the same
thing. All become a tuple of `Source`, so the rest of the package sees one form.

A recipe is data and never says where code lies. With `python:NAME` it names a value that
`vlmpack.finetune(recipe, sources=..., objective=..., metrics=...)` was called with. The command
line has no such values, and a launch says so before it reads anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from contextlib import suppress
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    WrapSerializer,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from vlmpack.addresses import registered_name

IN_WORDS = "in_words"
"""The kind of error whose own words say why a value is refused."""

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]

_SHARD_SUFFIX = re.compile(r"\.(tar|tgz|tar\.gz|jsonl|ndjson|json|csv|tsv|parquet|arrow)$")
_PATTERN_PART = re.compile(r"\{[^{}]*\}|\[[^\[\]]*\]|[*?]+")
_HOST_LOGIN = re.compile(r"^[A-Za-z0-9+.-]+://([^/@]*@)?")
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys, no coercion of types, no NaN or infinity."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )


class _Columns(dict[str, str]):
    """A mapping that can be hashed, as the sections of a recipe are."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))


Columns = Annotated[
    str | dict[str, str],
    AfterValidator(lambda given: _Columns(given) if isinstance(given, dict) else given),
]
"""The name of a layout, or role -> column."""


class Source(Section):
    """One set of shards, or of files of records, that is drawn from as a whole."""

    path: str = Field(min_length=1, examples=["data/train-{000..031}.tar"])
    """Path or address (`s3://`, `gs://`, `az://`, `https://`, `hf://datasets/`) of tar shards, or
    of files of records (.jsonl, .json, .csv, .tsv, .parquet). It may be a file, a glob (`*`, `?`,
    not for https and hf), or a brace list or range (`{a,b}`, `{000..031}`). It may also be a folder
    that `datasets.save_to_disk` wrote. Relative paths start at the current directory."""

    columns: Columns | None = Field(default=None, examples=["vqa"])
    """As `data.columns`, for this source alone."""

    image_root: str | None = Field(default=None, min_length=1, examples=["photos"])
    """As `data.image_root`, for this source alone."""

    weight: float | None = Field(default=None, gt=0)
    """Share of the draws, relative to the other sources' weights. If it is null in every source,
    nothing is blended, and an epoch sees every sample once."""

    name: str = Field(default="", pattern=r"^[A-Za-z0-9._-]+$")
    """Name in metrics and reports. By default it is the path's last folder and file name without
    patterns, such as `digits-train` for `assets/digits/train-*.tar`."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_name(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("name") is None:
            path = value.get("path")
            return {**value, "name": source_name(path if isinstance(path, str) else "")}
        return value


def source_name(path: str) -> str:
    """The default name of a source: last folder and file name of its path, without patterns."""
    bare = _HOST_LOGIN.sub("", _SHARD_SUFFIX.sub("", path))
    parts = _PATTERN_PART.sub("", bare).split("/")
    words = [_NOT_IN_A_NAME.sub("-", part).strip("-._") for part in parts[-2:]]
    return "-".join(word for word in words if word) or "data"


def as_tuple(value: object) -> object:
    """A YAML list as a tuple; anything else unchanged, for the strict validator to judge."""
    return tuple(value) if isinstance(value, list) else value


def _as_sources(value: object) -> object:
    """One path, one mapping or a list of either -> a tuple of mappings. An empty list stays a
    list, which the strict validator refuses; a minimum length would also count wrong items."""
    if value is None or value == [] or isinstance(value, tuple):
        return value
    items = value if isinstance(value, list) else [value]
    return tuple({"path": item} if isinstance(item, str) else item for item in items)


Sources = Annotated[
    tuple[Source, ...],
    Field(examples=["data/train-*.tar"]),
    BeforeValidator(
        _as_sources,
        json_schema_input_type=str | Source | Annotated[list[str | Source], Field(min_length=1)],
    ),
]
OptionalSources = Annotated[
    tuple[Source, ...] | None,
    BeforeValidator(
        _as_sources,
        json_schema_input_type=str
        | Source
        | Annotated[list[str | Source], Field(min_length=1)]
        | None,
    ),
]


_SHARE = re.compile(r"\s*[-+]?[0-9][0-9.,]*\s*%\s*")
_LARGEST_SHARE = 50.0


class Share(str):
    """A share of `data.train`, such as `2%`."""

    __slots__ = ()

    @property
    def fraction(self) -> float:
        """The share as a fraction of 1."""
        return float(self.removesuffix("%")) / 100


def as_share(value: object) -> Share:
    """The share that a text names.

    Raises:
        PydanticCustomError: (a ValueError) it names none, or one out of bounds.
    """
    text = str(value).replace(" ", "")
    with suppress(ValueError):
        percent = float(text.removesuffix("%"))
        if text.endswith("%") and 0 < percent <= _LARGEST_SHARE:
            return Share(f"{Decimal(str(percent)).normalize():f}%")
    raise PydanticCustomError(
        IN_WORDS,
        "expected a share of data.train above 0% and up to {most}%, such as 2%, or files; found "
        "{found}",
        {"found": text, "most": f"{_LARGEST_SHARE:g}"},
    )


def _share_or_sources(value: object, sources: ValidatorFunctionWrapHandler) -> object:
    """A share where the value is meant as one; else what the validator of sources makes of it."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number or (isinstance(value, str) and _SHARE.fullmatch(value)):
        return as_share(value)
    return sources(value)


if TYPE_CHECKING:
    SourcesOrShare = tuple[Source, ...] | Share | None
else:  # not a union, whose errors would name its alternatives as if they were keys
    SourcesOrShare = Annotated[
        OptionalSources,
        WrapValidator(_share_or_sources),
        WrapSerializer(lambda v, sources: str(v) if isinstance(v, Share) else sources(v)),
    ]


def one_of(known: Collection[str]) -> Callable[[str], str]:
    """A validator of a name: a known one, or `python:NAME`."""

    def check(name: str) -> str:
        if name not in known and registered_name(name) is None:
            raise PydanticCustomError("literal_error", "unknown name")
        return name

    return check
