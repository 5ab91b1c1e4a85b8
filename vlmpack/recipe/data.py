"""Which samples a run reads, and how: the recipe's `data` section."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from vlmpack.limits import MAX_IMAGE_PIXELS
from vlmpack.recipe.on_error import OnErrorSection
from vlmpack.recipe.sources import (
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
from vlmpack.recipe.storage import CacheSection, StorageSection
from vlmpack.recipe.template import IsoDate, SpecialTokens, TemplateVariables


class DataSection(Section):
    """Which samples are read, in which order, and what happens to the bad ones."""

    train: Sources
    """Training shards, or files of records: a path (file, glob, brace range), or a list of sources
    with `path`, `weight`, `name`, `columns`, `image_root`."""

    validation: SourcesOrShare = Field(default=None, examples=["data/val-*.tar", "2%"])
    """Shards or files for the validation loss; or a share of `data.train`, such as `2%`, which is
    held back and never trained. What a record asks decides: its images, or without images its words
    up to the first answer; no seed does. Null: none."""

    test: OptionalSources = None
    """Shards or files for the generation-based evaluation before and after training. Null: none."""

    columns: Columns | None = Field(default=None, examples=[{"question": "q", "answer": "a"}])
    """How the records of files are read: the name of a layout (docs/layouts.md), or which column
    plays which part in one. Null: what the first records of a source say, if that is one layout."""

    ignore_columns: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(as_tuple)
    ] = Field(default=(), examples=[["thumbnail"]])
    """Columns of the records of files that are left out, as if they were not there: what they hold
    is neither read nor counted nor refused. A column that holds images and is not read is refused
    otherwise."""

    image_root: str | None = Field(default=None, min_length=1, examples=["photos"])
    """Folder, or address of one, that image paths in records start at and must stay in. Null: the
    folder of the file that names them."""

    shuffle: Literal["auto", "global", "window"] = "auto"
    """Scope of the shuffle: all samples, or a shuffle window of the stream at a time, which needs
    no index beforehand. `auto`: `window` when a shard is remote, or when more than 32 GiB of local
    shards are not indexed yet; else global. Settled once, at the run's first launch."""

    over_long: Literal["error", "drop", "shrink_images"] = "error"
    """For a sample longer than `training.seq_length`: stop, leave it out, or resize its images
    until it fits. An image is never cut."""

    on_error: OnErrorSection = OnErrorSection()
    """Policy for bad samples, by class of error."""

    unknown_keys: Literal["report", "refuse"] = "report"
    """For keys of records that are not read (a source, a score): name them once with their counts,
    or stop. Those that other trainers give a meaning, and those of turns, are always refused."""

    weights: Literal["samples", "tokens"] = "samples"
    """What the weights of `data.train` are shares of: an epoch's samples, or its tokens. `tokens`
    needs every shard indexed (`vlmpack index`) where `data.shuffle` is `window`."""

    epoch_size: Count | None = None
    """Samples drawn per epoch when sources have weights. Null: the sum of the sources."""

    max_image_pixels: Count = MAX_IMAGE_PIXELS
    """Images with more pixels (width x height) are decode errors, before they are decoded."""

    group_by: Annotated[
        Literal["none", "image"], BeforeValidator(lambda given: "none" if given is None else given)
    ] = "none"
    """What stands together in the order of an epoch. `image`: the records that show the same
    images, byte for byte, of one source; within a shuffle window where `shuffle` is `window`.
    Null: `none`."""

    learn: Literal["all_turns", "last_turn", "each_answer"] = "all_turns"
    """Which of the assistant's turns are learnt, beside what the data exclude. `all_turns`: all of
    them, in one sample. `last_turn`: the last of each conversation alone, with the calls of tools
    that led to it. `each_answer`: each is a sample, the conversation up to it, as the template
    writes it there: for templates that drop the thoughts of earlier turns."""

    date: IsoDate | None = Field(default=None, examples=["2026-11-22"])
    """What a chat template that writes the current date (`strftime_now`: Llama 3.2, Mistral Small
    3.1) writes in every conversation. Null: the date of the packs, else that of the run's first
    launch. Other templates have none."""

    chat_template_kwargs: TemplateVariables = Field(
        default={}, examples=[{"enable_thinking": False}]
    )
    """Variables of the chat template in every conversation, such as `enable_thinking` or
    `reasoning_effort`, which records may have as `chat_template_kwargs` too: a record's own value
    goes before this one."""

    special_tokens: SpecialTokens = Field(default=(), examples=[["<|box_start|>", "<|box_end|>"]])
    """Special tokens of the tokenizer that questions and answers may spell: they are prompted and
    learnt as those tokens. Others are refused where a text spells them. Turn markers, the places of
    images, and what begins, ends or pads a sequence can not be named."""

    num_workers: CountOrZero = 2
    """Loader processes per rank. 0: read in the training process."""

    prefetch_batches: Count = 2
    """Micro-batches that each worker prepares ahead."""

    pixels: Literal["float32", "levels"] = "float32"
    """What pixels travel as from the workers to the device. `levels`: as uint8, a quarter of the
    bytes in workers, queues and pinned memory, and looked up on the device: the same numbers bit
    for bit. It costs the workers some time. A row whose pixels are no levels of an image (cut from
    a floating-point resize, say) travels as float32."""

    index_dir: str | None = Field(default=None, min_length=1)
    """Folder for the shard index. Null: a default place, printed at the start of a run."""

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
        """The place of each source of a split among `source_names`; empty where it has one, whose
        figures are the split's, and for a test split, of which no objective reports anything."""
        places = {name: place for place, name in enumerate(self.source_names)}
        if len(sources) < 2 or any(source.name not in places for source in sources):
            return []
        return [places[source.name] for source in sources]

    def splits(self) -> dict[str, tuple[Source, ...]]:
        """Every split by name, with its sources: none where the recipe has no such split, or where
        it is a share of `train`."""
        validation = () if isinstance(self.validation, Share) else self.validation or ()
        return {"train": self.train, "validation": validation, "test": self.test or ()}
