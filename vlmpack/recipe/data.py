"""Which samples a run reads, and how: the recipe's sections `data` and `images`."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, JsonValue, WithJsonSchema
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from vlmpack.addresses import credential_problem, endpoint_problem, same_host
from vlmpack.errors import ErrorClass
from vlmpack.limits import MAX_IMAGE_PIXELS
from vlmpack.recipe.problems import Problem
from vlmpack.recipe.sources import (
    IN_WORDS,
    Columns,
    Count,
    CountOrZero,
    OptionalSources,
    Section,
    Share,
    Source,
    Sources,
    SourcesOrShare,
    as_tuple,
)

OnError = Literal["raise", "skip"]

MOST_WORKERS = 8
"""`num_workers: auto` takes at most so many, since each holds rows of images in memory."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class OnErrorSection:
    """What happens to a sample that cannot be used, by class of error. A skipped one is counted and
    listed in `data-errors.jsonl`. Too many of them stop the run."""

    # A dataclass, not a Section: pydantic's models reserve the name `schema`.

    transport: OnError = Field(default="raise", description="The shard's bytes cannot be read.")
    integrity: OnError = Field(
        default="skip",
        description="The bytes are not what the index recorded (truncated, damaged).",
    )
    decode: OnError = Field(default="skip", description="An image cannot be decoded.")
    schema: OnError = Field(
        default="raise",
        description="The sample's form is not one we know, or its images and placeholders differ "
        "in number.",
    )

    def skips(self, error_class: ErrorClass) -> bool:
        """Whether a sample with such an error is left out, instead of ending the run. Over-long
        samples have a rule of their own."""
        return error_class != "too_long" and getattr(self, error_class) == "skip"


Host = Annotated[str, Field(min_length=1, max_length=253), AfterValidator(same_host)]
"""A name or an address, without scheme and port."""


class CacheSection(Section):
    """Pieces of remote shards, kept on a local disk once they were fetched, and checked on every
    use. Local shards are never copied."""

    directory: str | None = Field(default=None, min_length=1)
    """Folder on a local disk, which runs may share. If null, `blocks` in `$VLMPACK_CACHE`, or in
    `~/.cache/vlmpack`."""

    max_bytes: int = Field(default=16 << 30, ge=0)
    """Most bytes that it may hold. What was used longest ago goes first. At 0 there is no cache, so
    a shard is fetched once for its index and again for its samples."""


class CredentialsSection(Section):
    """Names of environment variables, as `${env:NAME}`, and never a secret itself. Null means the
    cloud's usual places."""

    access_key_id: str | None = Field(default=None, examples=["${env:MINIO_USER}"])
    """For S3, the name of a key."""

    secret_access_key: str | None = Field(default=None, examples=["${env:MINIO_PASSWORD}"])
    """For S3, the key itself."""

    session_token: str | None = Field(default=None, examples=["${env:MY_SESSION_TOKEN}"])
    """For S3, with temporary credentials."""

    service_account_key: str | None = Field(default=None, examples=["${env:MY_SERVICE_ACCOUNT}"])
    """For GCS, the JSON text of the key."""

    bearer_token: str | None = Field(default=None, examples=["${env:MY_TOKEN}"])
    """For GCS and Azure."""

    account_name: str | None = Field(default=None, examples=["myaccount"])
    """For Azure, the storage account. It is no secret, so it may be written out."""

    account_key: str | None = Field(default=None, examples=["${env:MY_AZURE_KEY}"])
    """For Azure, a key of the account."""

    sas_token: str | None = Field(default=None, examples=["${env:MY_SAS_TOKEN}"])
    """For Azure, a shared access signature."""

    hf_token: str | None = Field(default=None, examples=["${env:MY_HF_TOKEN}"])
    """For hf:// data sets. If null, HF_TOKEN, or the token of `hf auth login`."""


class StorageSection(Section):
    """How stores and servers are reached. Credentials come from the cloud's usual places, which are
    the environment, ~/.aws (with boto3 installed) and the machine's role."""

    endpoint: str | None = Field(default=None, examples=["https://minio.example.org:9000"])
    """Address of an S3-compatible server, or another address of GCS or Azure. If null, the
    cloud's."""

    region: str | None = Field(default=None, examples=["eu-central-1"])
    """Region of S3 buckets. If null, AWS_REGION, else us-east-1."""

    anonymous: bool = False
    """Do not sign requests, for public buckets."""

    allow_private: Annotated[bool | tuple[Host, ...], BeforeValidator(as_tuple)] = False
    """Allow private and loopback addresses, and endpoints without TLS, such as a MinIO of your own.
    True allows the hosts that the recipe names, but none that a server redirects to. A list of
    hosts allows these, redirected to or not. Link-local addresses are never allowed."""

    credentials: CredentialsSection = CredentialsSection()
    """Credentials from other environment variables than the usual ones."""

    connect_timeout_seconds: float = Field(default=5.0, gt=0, le=3600)
    """Longest wait for a connection."""

    read_timeout_seconds: float = Field(default=30.0, gt=0, le=3600)
    """Longest wait for the next bytes."""

    total_timeout_seconds: float = Field(default=600.0, gt=0, le=86400)
    """Longest time of one request. What is missing then is asked for again."""

    max_tries: int = Field(default=10, ge=1)
    """Tries of one request, the first included."""

    retry_seconds: float = Field(default=180.0, gt=0, le=86400)
    """Time without progress after which no new try begins. It counts from the first fault since
    bytes came."""

    def allows_private(self, host: str, *, is_named: bool = True) -> bool:
        """Whether a host may have a private address.

        Args:
            is_named: the endpoint or a shard's own address names it; a redirect does not.
        """
        if isinstance(self.allow_private, bool):
            return self.allow_private and is_named
        return same_host(host) in self.allow_private


def unsafe_storage(storage: StorageSection) -> list[Problem]:
    """An endpoint that is none or has no TLS, and credentials that are written out."""
    problems = []
    if storage.endpoint is not None:
        problem = endpoint_problem(storage.endpoint, allow_private=storage.allows_private)
        problems += [Problem(("data", "storage", "endpoint"), problem)] if problem else []
    problems += [
        Problem(("data", "storage", "credentials", name), problem)
        for name, value in storage.credentials
        if value is not None and (problem := credential_problem(name, value))
    ]
    return problems


def _iso_date(text: str) -> str:
    """A date as ISO 8601 has it, dashes included."""
    if datetime.date.fromisoformat(text).isoformat() != text:
        raise ValueError(text)
    return text


IsoDate = Annotated[
    str, AfterValidator(_iso_date), WithJsonSchema({"type": "string", "format": "date"})
]


class _Variables(dict[str, JsonValue]):
    """Variables by name, which nobody changes: recipes are hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True))


def _set(variables: Mapping[str, JsonValue]) -> _Variables:
    """Those with a value: an override takes one out with null."""
    return _Variables({name: value for name, value in variables.items() if value is not None})


TemplateVariables = Annotated[
    dict[str, JsonValue],
    AfterValidator(_set),
    WithJsonSchema({"type": "object", "additionalProperties": True}),
]
"""Name -> value; which values may be is a rule (`data_rules.py`), which names the template says."""


def _form(*names: str) -> Any:
    """A template of numbers: it has each of these names, no others, and something between them."""

    wanted = ", ".join(f"{{{name}}}" for name in names)

    def check(text: str | None) -> str | None:
        if text is None:
            return None
        fault = None
        try:
            parts = [part for part in Formatter().parse(text) if part[1] is not None]
        except ValueError as error:
            fault = f"expected a text with {wanted}: {error}"
        else:
            if sorted(part[1:] for part in parts) != sorted((name, "", None) for name in names):
                fault = f"expected each of {wanted} once, and no other; write {{{{ for {{"
            elif not all(between for between, *_ in parts[1:]):
                fault = f"expected a text between {wanted}, where numbers would touch"
        if fault is not None:
            raise PydanticCustomError(
                IN_WORDS, "{fault}; found {found}", {"fault": fault, "found": repr(text)}
            )
        return text

    return Annotated[str | None, AfterValidator(check)]


class CoordinatesSection(Section):
    """How boxes, points and polygons of records (`objects`) are written, in place of the family's
    rule."""

    space: Literal["norm", "shown", "pixels"]
    """Space of the numbers. `norm` counts `grid` steps along each side of the original image.
    `shown` counts pixels of the image that the model sees, `pixels` those of the original."""

    grid: int = Field(default=1000, ge=1, le=1_000_000)
    """Steps along a side in the space `norm`."""

    order: Literal["xy", "yx"] = "xy"
    """Which number comes first where `box` and `point` are not given."""

    rounding: Literal["round", "floor"] = "round"
    """How a number is rounded; `round` takes halves to the even one, as Python does."""

    decimals: int = Field(default=0, ge=0, le=6)
    """Digits behind the point."""

    box: _form("x1", "y1", "x2", "y2") = Field(  # type: ignore[valid-type]
        default=None, examples=["<box>({x1},{y1}),({x2},{y2})</box>"]
    )
    """Text of a box. If null, `[{x1}, {y1}, {x2}, {y2}]`, by `order`."""

    point: _form("x", "y") = Field(  # type: ignore[valid-type]
        default=None, examples=["({x},{y})"]
    )
    """Text of a point, and of each corner of a polygon. If null, `[{x}, {y}]`, by `order`."""

    polygon: _form("corners") = Field(  # type: ignore[valid-type]
        default=None, examples=["[{corners}]"]
    )
    """Text of a polygon, whose corners are joined by a comma and a space."""


BoxesInText = Literal["keep", "refuse", "pixels_of_original"]

SpecialTokens = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    BeforeValidator(as_tuple),
    AfterValidator(lambda named: tuple(sorted(set(named)))),
]
"""In any order, once each; which they may be is the tokenizer's and the template's to say."""


class DataSection(Section):
    """Which samples are read, in which order, and what happens to the bad ones."""

    train: Sources
    """Training shards, or files of records. Give a path (file, glob, brace range), or a list of
    sources with `path`, `weight`, `name`, `columns` and `image_root`."""

    validation: SourcesOrShare = Field(default=None, examples=["data/val-*.tar", "2%"])
    """Shards or files for the validation loss, or a share of `data.train`, such as `2%`, which is
    held back and never trained. What a record asks decides whether it is held back. That is its
    images, or without images its words up to the first answer. No seed does. If null, there is
    none."""

    test: OptionalSources = None
    """Shards or files for the generation-based evaluation before and after training. If null, there
    is none."""

    columns: Columns | None = Field(default=None, examples=[{"question": "q", "answer": "a"}])
    """How the records of files are read. Give the name of a layout (docs/layouts.md), or which
    column plays which part in one. If null, the first records of a source decide, if they have one
    layout."""

    ignore_columns: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(as_tuple)
    ] = Field(default=(), examples=[["thumbnail"]])
    """Columns of the records of files to leave out, as if they were not there. What they hold is
    neither read nor counted nor refused. Otherwise a column that holds images and is not read is
    refused."""

    image_root: str | None = Field(default=None, min_length=1, examples=["photos"])
    """Folder, or address of one, that image paths in records start at and must stay in. If null,
    the folder of the file that names them."""

    shuffle: Literal["auto", "global", "window"] = "auto"
    """`global` shuffles all samples. `window` takes a shuffle window of the stream at a time, and
    needs no index beforehand. `auto` is `window` if a shard is remote, or if more than 32 GiB of
    local shards are not indexed yet. Else it is `global`, as it always is with rollouts. The choice
    is made once, at the run's first launch."""

    over_long: Literal["error", "drop", "shrink_images"] = "error"
    """What to do with a sample longer than `training.seq_length`. `error` stops, `drop` leaves it
    out, and `shrink_images` resizes its images until it fits. An image is never cut."""

    on_error: OnErrorSection = OnErrorSection()
    """Policy for bad samples, by class of error."""

    unknown_keys: Literal["report", "refuse"] = "report"
    """What to do with keys of records that are not read, such as a source or a score. `report`
    names them once with their counts. `refuse` stops. Those that other trainers give a meaning, and
    those of turns, are always refused."""

    weights: Literal["samples", "tokens"] = "samples"
    """What the weights of `data.train` are shares of, an epoch's samples or its tokens. `tokens`
    needs every shard indexed (`vlmpack index`) where `data.shuffle` is `window`."""

    epoch_size: Count | None = None
    """Samples drawn per epoch when sources have weights. If null, the sum of the sources."""

    max_image_pixels: Count = MAX_IMAGE_PIXELS
    """Images with more pixels (width x height) are decode errors, before they are decoded."""

    group_by: Literal["none", "image", "group"] | None = None
    """What stands together in the order of an epoch. `image` keeps records of one source together
    that show the same images, byte for byte. `group` does so with the answers of one group of
    rollouts. Where `shuffle` is `window`, they do so within a shuffle window. If null, `group`
    where the objective learns from rollouts, else `none`."""

    learn: Literal["all_turns", "last_turn", "each_answer"] = "all_turns"
    """Which of the assistant's turns are learnt, except those that the data exclude. `all_turns`
    learns all of them, in one sample. `last_turn` learns only the last one of each conversation,
    with the tool calls that led to it. `each_answer` makes each answer a sample, with the
    conversation up to it as the template writes it there. It is for templates that drop the
    thoughts of earlier turns."""

    date: IsoDate | None = Field(default=None, examples=["2026-11-22"])
    """Date in every conversation, for chat templates that write the current one (`strftime_now`, as
    in Llama 3.2 and Mistral Small 3.1). If null, the date of the packs, else that of the run's
    first launch. Other templates have none."""

    chat_template_kwargs: TemplateVariables = Field(
        default={}, examples=[{"enable_thinking": False}]
    )
    """Variables of the chat template in every conversation, such as `enable_thinking` or
    `reasoning_effort`. Records may have `chat_template_kwargs` too, and their values go before
    these."""

    special_tokens: SpecialTokens = Field(default=(), examples=[["<|box_start|>", "<|box_end|>"]])
    """Special tokens of the tokenizer that questions and answers may spell. They are prompted and
    learnt as those tokens. A text that spells another one is refused. Turn markers, the places of
    images, and what begins, ends or pads a sequence cannot be named here."""

    coordinates: CoordinatesSection | None = Field(
        default=None, examples=[{"space": "norm", "grid": 1000, "order": "yx"}]
    )
    """How boxes and points of records with `objects` are written. If null, as the model's family
    writes them (docs/grounding.md). A family without a published rule needs it."""

    boxes_in_text: BoxesInText = "keep"
    """What becomes of boxes in texts of records without `objects`. `keep` learns them as they are,
    and a note counts those whose numbers do not fit the model. `refuse` makes these schema errors.
    `pixels_of_original` moves boxes and points that stand in the family's own form from pixels of
    the original image to the numbers of the model. A box in another form is refused then."""

    num_workers: CountOrZero | Literal["auto"] = "auto"
    """Loader processes per rank. `auto` takes one fewer than the cores that a rank has, from 1 to
    8. At 0 the training process reads."""

    prefetch_batches: Count = 2
    """Micro-batches that each worker prepares ahead."""

    pixels: Literal["float32", "levels"] = "float32"
    """Type of pixels on their way from the workers to the device. `levels` sends them as uint8, a
    quarter of the bytes in workers, queues and pinned memory. The device looks them up, and gets
    the same numbers bit for bit. It costs the workers some time. A row whose pixels are no levels
    of an image (cut from a floating-point resize, say) travels as float32."""

    index_dir: str | None = Field(default=None, min_length=1)
    """Folder for the shard index. If null, a default folder, printed at the start of a run."""

    cache: CacheSection = CacheSection()
    """What is kept of remote shards."""

    storage: StorageSection = StorageSection()
    """How remote shards are reached."""

    @property
    def source_names(self) -> tuple[str, ...]:
        """The names of the sources that are reported by themselves, each once: those of `train`
        and of `validation`, where it has several."""
        several = (each for each in (self.train, self.splits()["validation"]) if len(each) > 1)
        return tuple(dict.fromkeys(source.name for each in several for source in each))

    def places_of(self, sources: Sequence[Source]) -> list[int]:
        """The place of each source of a split among `source_names`.

        It is empty if the split has one source, whose figures are the split's. It is also empty for
        a test split, of which no objective reports anything.
        """
        places = {name: place for place, name in enumerate(self.source_names)}
        if len(sources) < 2 or any(source.name not in places for source in sources):
            return []
        return [places[source.name] for source in sources]

    @property
    def workers(self) -> int:
        """The loader processes of this rank; `auto` by its cores."""
        if self.num_workers != "auto":
            return self.num_workers
        return min(MOST_WORKERS, max(1, self.cores - 1))

    @property
    def cores(self) -> int:
        """How many cores this rank may use. Ranks of a machine share its cores evenly."""
        return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def splits(self) -> dict[str, tuple[Source, ...]]:
        """Every split by name, with its sources: none where the recipe has no such split, or where
        it is a share of `train`."""
        validation = () if isinstance(self.validation, Share) else self.validation or ()
        return {"train": self.train, "validation": validation, "test": self.test or ()}


class ImagesSection(Section):
    """Bounds on the size that images are resized to, in place of the processor's own. A bound that
    is not set stays as the model folder says. The family decides which of them a model has."""

    min_pixels: int | None = Field(default=None, ge=1, examples=[3136])
    """Smallest area of a resized image, width x height in pixels. Smaller ones are enlarged."""

    max_pixels: int | None = Field(default=None, ge=1, examples=[1003520])
    """Largest area of a resized image, width x height in pixels. Larger ones are shrunk. The cap on
    image files is `data.max_image_pixels`."""

    max_tiles: int | None = Field(default=None, ge=1, examples=[4])
    """Most tiles that an image is cut into, for families that cut images into tiles of one size."""

    def set_values(self) -> dict[str, int]:
        """The bounds that are set, by name."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in values.items() if value is not None}
