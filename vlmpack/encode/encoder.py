"""VLMSample -> EncodedSample, and its exact length before any pixel is decoded.

It is cheap to pickle. Workers get the folder and load tokenizer and image processor on first use.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from vlmpack.activity import ACTIVITY
from vlmpack.encode.assemble import Tokens, assemble, tokens_of
from vlmpack.encode.chat import ChatEncoder
from vlmpack.encode.coordinates import WritesObjects, no_rule
from vlmpack.encode.drawn import DrawnTokens, drawn_answer, rollout_in
from vlmpack.encode.fingerprint import EncoderFacts, image_sizes
from vlmpack.encode.images import (
    Rules,
    SampleImages,
    Sizes,
    image_rule_of,
    layouts_of,
    open_images,
    refuse_budget,
    video_rule_of,
    write_bounds,
)
from vlmpack.encode.prefixes import image_digest, prefixes_of, with_probe
from vlmpack.encode.sample import (
    PAIR_NAMES,
    Message,
    SampleLength,
    Shown,
    TemplateInputs,
    VLMSample,
    refuse_other_form,
    shows_video,
)
from vlmpack.encode.settings import (
    COORDINATES_NOTE,
    DATE_NOTE,
    TOKENS_NOTE,
    VARIABLES_NOTE,
    EncoderSettings,
)
from vlmpack.encode.special_tokens import (
    check_ids,
    embedding_rows,
    image_texts,
    special_tokens,
)
from vlmpack.encode.template import no_vision_tower
from vlmpack.encode.turns import last_turn_alone, refuse_several
from vlmpack.errors import CapabilityError, DataError, ModelError, VlmpackError, schema_error
from vlmpack.families.base import (
    NO_TOKEN,
    Family,
    ImageLayout,
    ImageRule,
    VideoRule,
)
from vlmpack.families.configs import processor_setting
from vlmpack.families.registry import family_of
from vlmpack.model_folder.load import load_tokenizer, made_with
from vlmpack.model_folder.mistral_split import is_corrected, may_be_wrong
from vlmpack.packing import EncodedSample, Media, Prefix
from vlmpack.packing.image_owners import SampleOwners
from vlmpack.packing.pairs import join_pair


def open_tokenizer(folder: Path, *, takes_images: bool) -> Any:
    """transformers' fast tokenizer, with the chat template of the folder's processor.

    Raises:
        ModelError: the folder has no usable one.
    """
    if not (folder / "tokenizer.json").is_file():
        # transformers would make one without a vocabulary from config.json alone.
        raise ModelError(f"model.path: {folder} has no usable tokenizer: tokenizer.json is missing")
    try:
        tokenizer = load_tokenizer(folder)
        template = _processor_template(folder) if takes_images else None
    except VlmpackError:
        raise
    except Exception as error:  # an edited tokenizer raises anything in its reader
        raise ModelError(
            f"model.path: {folder} has no usable tokenizer: {type(error).__name__}: {error}"
        ) from error
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def _processor_template(folder: Path) -> str | None:
    """The chat template of a folder's processor class, where it is kept apart from the tokenizer's.

    Older folders of vision-language models have it in chat_template.json. Their
    tokenizer_config.json has that of the language model alone, which writes no images.
    transformers' processors prefer chat_template.json to chat_template.jinja, and its tokenizers do
    not know it.

    Raises:
        ValueError: a file that holds no JSON object, or no text.
    """
    for file in ("processor_config.json", "chat_template.json"):
        template = processor_setting(folder, "chat_template", None, file=file)
        if isinstance(template, str):
            return template
        if template is not None:
            kind = type(template).__name__
            raise ValueError(f"its processor's chat_template is a {kind}, expected a text")
    return None


_INSTEAD = "its frames as images would do, or leave such samples out (data.on_error.schema: skip)"


def refuse_videos(sample: VLMSample, family: Family, video_id: int, *, share_prefix: bool) -> None:
    """Raise DataError (schema) for a sample with a video that cannot be encoded."""
    if not sample.has_video:
        return
    if not family.video_token:
        raise schema_error(
            f"the sample has a video, and videos of the family {family.name} are not made ready "
            f"here: {_INSTEAD}"
        )
    if video_id == NO_TOKEN and not family.frames_as_images:
        raise schema_error(
            f"the sample has a video, and the model's tokenizer has no token {family.video_token}, "
            f"which {family.name} writes for one: {_INSTEAD}"
        )
    if sample.answers:
        raise schema_error(
            f"the sample is a pair of answers about a video, which objective.name: dpo does not "
            f"compare yet: {_INSTEAD}"
        )
    if share_prefix:
        raise schema_error(
            "the sample has a video, and rows with packing.share_prefix: true do not carry "
            "videos yet. Set it to false, or leave samples with videos out "
            "(data.on_error.schema: skip)"
        )


ENCODER_VERSION = 1
"""Raise it when the shared encoding changes lengths, labels or positions."""

DEFAULTS = EncoderSettings()


class Encoder(WritesObjects):
    """The processor of one model folder, with some settings."""

    def __init__(self, folder: Path, settings: EncoderSettings = DEFAULTS) -> None:
        self.folder = Path(folder)
        self.family: Family = family_of(self.folder)
        self.date = settings.date_for(self.folder)
        self.chat_template_kwargs = settings.variables_for(self.folder)
        self.special_tokens = settings.tokens_for(self.folder)
        self.settings = replace(
            settings,
            date=self.date,
            chat_template_kwargs=self.chat_template_kwargs,
            special_tokens=self.special_tokens,
            coordinates=settings.coordinates_for(self.folder),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Encoder, (self.folder, self.settings)

    def replace(self, **changes: Any) -> Encoder:
        """An encoder of the same folder with other settings."""
        return Encoder(self.folder, replace(self.settings, **changes))

    @cached_property
    def tokenizer(self) -> Any:
        """transformers' fast tokenizer, with the chat template of the folder's processor."""
        return open_tokenizer(self.folder, takes_images=self.takes_images)

    @cached_property
    def chat(self) -> ChatEncoder:
        """The chat template with its tokenizer."""
        marker, named = self.family.marker(self.tokenizer), self.special_tokens
        given = self.chat_template_kwargs
        videos = tuple(filter(None, (self.family.video_wrapped, self.family.video_token)))
        texts = image_texts(self.image_rule) if named and self.takes_images else ()
        about = (marker, self.date, given, videos, named, texts, embedding_rows(self.folder))
        return ChatEncoder(self.tokenizer, self.takes_images, *about)

    @property
    def takes_images(self) -> bool:
        """Whether the model has a vision tower."""
        return self.family.modules.vision is not None

    @property
    def images_made_with(self) -> str | None:
        """The software that makes pixels of images, for the log and the report. None without a
        vision tower."""
        return made_with() if self.takes_images else None

    def load(self) -> None:
        """Load what is otherwise loaded on first use.

        Raises:
            ModelError: the folder has no usable tokenizer, chat template or image processor.
            CapabilityError: a budget that the family cannot keep, or boxes of texts without a rule.
        """
        self.chat.refuse_without_images()
        self.chat.refuse_other_ids()
        refuse_budget(self.settings.budget, self.family, self.folder)
        if (policy := self.settings.boxes_in_text) != "keep" and self.coordinates is None:
            said = f"data.boxes_in_text: {policy}"
            raise CapabilityError(no_rule(self.family.name, said, "or leave it at keep"))
        rule = self.image_rule if self.takes_images else None
        images = () if rule is None or self.family.proven_by_verify else image_texts(rule)
        check_ids(self.folder, self.chat, images, **self.placeholders)

    @cached_property
    def image_rule(self) -> ImageRule:
        """The family's rule with this folder's sizes, or the budget's.

        Raises:
            CapabilityError: the model has no vision tower; or a budget it cannot keep.
            ModelError: the folder has no usable image processor.
        """
        return image_rule_of(self.family, self.folder, self.settings.budget)

    @cached_property
    def video_rule(self) -> VideoRule | None:
        """The family's rule for videos; None where it takes none.

        Raises:
            CapabilityError: the folder's video processor is none that the family's rule follows.
        """
        return video_rule_of(self.family, self.folder, self.image_rule, self.settings.budget)

    def write_settings(self, folder: Path, data: Collection[str] = ()) -> None:
        """Note in an exported folder, a copy of the model's, what inference must know.

        The processor's files get the bounds of images. Notes get the template's date, variables and
        special tokens, and `data.coordinates`. Files without a setting stay equal byte for byte.

        Args:
            data: the names in the identity of the data. With objects, the tokens of their form are
                special tokens that are noted.
        """
        if self.settings.budget.set_values():
            write_bounds(self.image_rule.settings(), folder)
        DATE_NOTE.write(folder, None if self.date is None else self.date.isoformat())
        VARIABLES_NOTE.write(folder, self.chat_template_kwargs)
        given = self.settings.coordinates
        COORDINATES_NOTE.write(folder, None if given is None else given.model_dump())
        with_objects = "objects" in data
        spelt = self.chat_for(objects=True).spelt if with_objects else self.special_tokens
        TOKENS_NOTE.write(folder, spelt)

    @cached_property
    def placeholder_id(self) -> int:
        """Id of the image placeholder; NO_TOKEN where the model has no vision tower."""
        return self.family.placeholder(self.tokenizer)

    @cached_property
    def video_id(self) -> int:
        """Id of the placeholder in videos; NO_TOKEN where the family takes none."""
        return self.family.video_placeholder(self.tokenizer)

    @property
    def placeholders(self) -> dict[str, int]:
        """Both, as `families.base.kinds_of` takes them."""
        return {"placeholder_id": self.placeholder_id, "video_id": self.video_id}

    @cached_property
    def placeholder_ids(self) -> frozenset[int]:
        """The ids that features replace."""
        return frozenset(self.placeholders.values()) - {NO_TOKEN}

    @cached_property
    def pad_token_id(self) -> int:
        """Id that fills gaps; only ever a filler."""
        known, rows = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id), self.chat.rows
        return next((x for x in known if x is not None and (rows is None or x < rows)), 0)

    @property
    def num_position_axes(self) -> int:
        """A, the number of axes of the model's positions."""
        return self.family.num_position_axes

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all that decides ids, labels, lengths, positions and pixels."""
        return self._facts.fingerprint(ENCODER_VERSION)

    @cached_property
    def fingerprint_parts(self) -> dict[str, str]:
        """The fingerprint taken apart, so that a difference can be named."""
        return self._facts.parts(ENCODER_VERSION)

    @cached_property
    def _facts(self) -> EncoderFacts:
        return EncoderFacts(
            folder=self.folder,
            family=f"{self.family.name}/{self.family.rule_version}",
            settings=self.settings,
            image_sizes=image_sizes(self.family, self.folder),
            coordinates="" if self.coordinates is None else self.coordinates.said,
            corrected=may_be_wrong(self.folder) and is_corrected(self.tokenizer),
        )

    def length(
        self, sample: VLMSample, sizes: Sizes, originals: Sizes | None = None
    ) -> SampleLength:
        """Exact length from the messages and the image sizes alone.

        Args:
            sample: its image bytes are not needed.
            sizes: (width, height) in pixels per image, in token order, EXIF orientation applied.
            originals: the same before a plan shrank them; None where it did not.

        Raises:
            DataError: (schema) as `encode`.
        """
        refuse_other_form(sample, pairs=self.settings.pairs)
        return self.measure(sample, sizes, originals)

    def measure(
        self, sample: VLMSample, sizes: Sizes, originals: Sizes | None = None
    ) -> SampleLength:
        """As `length`, of a pair as of another sample."""
        sample = self.written(sample, sizes, originals)
        self._refuse_images(max(sample.num_images, len(sizes)))
        refuse_videos(sample, self.family, self.video_id, share_prefix=self.settings.share_prefix)
        layouts = self.layouts(sizes, sample.image_names, sample.shown)
        num_image_tokens = sum(layout.num_tokens for layout in layouts)
        grown = num_image_tokens - sum(len(layout.runs) for layout in layouts)
        tokens = self._tokens(sample, layouts)
        lengths = [len(each.ids) + grown for each in tokens]
        return SampleLength(
            num_tokens=sum(lengths),
            num_image_tokens=num_image_tokens * len(tokens),
            num_label_tokens=sum(sum(each.supervised[1:]) for each in tokens),
            num_patches=sum(math.prod(layout.grid) for layout in layouts),
            num_chosen_tokens=lengths[0] if sample.answers else 0,
        )

    def encode(
        self, sample: VLMSample, sizes: Sizes | None = None, owners: SampleOwners | None = None
    ) -> EncodedSample:
        """Token ids, shifted labels, positions and pixels of one sample.

        Args:
            sizes: (width, height) to resize each image to first, where the plan shrank them.
            owners: who makes the pixels of which image; None if this process makes all.

        Raises:
            DataError: (decode) an image cannot be read or is too large. (schema) Images and
                placeholders do not match, or a model without vision tower gets images. The text has
                a special token, or there is nothing to learn.
        """
        ACTIVITY.worked()
        refuse_other_form(sample, pairs=self.settings.pairs)
        sample = self.written(sample, sizes)
        self._refuse_images(max(sample.num_images, len(sample.images)))
        if len(sample.images) != sample.num_images:
            number = f"but {len(sample.images)} images"
            raise schema_error(f"{sample.num_images} image placeholders in the messages, {number}")
        refuse_videos(sample, self.family, self.video_id, share_prefix=self.settings.share_prefix)
        images = self._images(sample.images, sample.image_names, sizes, owners, shown=sample.shown)
        layouts = self.layouts(images.sizes, sample.image_names, sample.shown)
        tokens = self._tokens(sample, layouts)
        media = images.media(self._rules(sample.shown), layouts) if layouts else None
        sequences = [assemble(self.family, sample.key, each, layouts, media) for each in tokens]
        whole = join_pair(*sequences) if sample.answers else sequences[0]
        if self.settings.rollouts:
            whole = replace(whole, drawn=drawn_answer(rollout_in(sample)))
        if not self.settings.share_prefix:
            return whole
        digests = [image_digest(data) for data in sample.images]
        every = with_probe(sample, tokens, partial(self._tokens, layouts=layouts))
        prefixes = prefixes_of(every, layouts, digests, images.sizes, self._goes_on(sample))
        return replace(whole, prefixes=prefixes)

    def prefixes(
        self,
        sample: VLMSample,
        sizes: Sizes,
        digests: Sequence[bytes],
        originals: Sizes | None = None,
    ) -> tuple[Prefix, ...]:
        """The prefixes that `encode` gives a sample where `share_prefix` is set."""
        sample = self.written(sample, sizes, originals)
        layouts = self.layouts(sizes, sample.image_names, sample.shown)
        encode = partial(self._tokens, layouts=layouts)
        every = with_probe(sample, encode(sample), encode)
        return prefixes_of(every, layouts, digests, sizes, self._goes_on(sample))

    def pixels(
        self,
        files: Sequence[bytes],
        sizes: Sizes | None = None,
        owners: SampleOwners | None = None,
        shown: Sequence[Shown] = (),
    ) -> Media | None:
        """The images of a sample as `encode` makes them, without its text; None for none.

        Args:
            sizes, owners: as of `encode`.
            shown: the images and videos of its messages; empty where all files are still images.

        Raises:
            DataError: (decode) an image that cannot be read or is too large; (schema) images for a
                model without vision tower.
        """
        self._refuse_images(len(files))
        images = self._images(files, (), sizes, owners, shown=shown)
        layouts = self.layouts(images.sizes, shown=shown)
        return images.media(self._rules(shown), layouts) if layouts else None

    @cached_property
    def drawn_tokens(self) -> DrawnTokens:
        """What checks and reads answers that a policy has drawn."""
        return DrawnTokens(self.folder, self.chat, **self.placeholders)

    def _goes_on(self, sample: VLMSample) -> bool:
        """Whether other samples may continue after the question of this one's first answer."""
        return sample.is_continued or self.settings.rollouts

    def chat_for(self, *, objects: bool) -> ChatEncoder:
        """The chat of samples with objects, which may spell the special tokens of their form, or
        that of others."""
        return self._chat_of_objects if objects else self.chat

    @cached_property
    def _chat_of_objects(self) -> ChatEncoder:
        texts = "" if self.coordinates is None else "".join(self.coordinates.texts)
        # <|LOC_228|> is one of the tokens of <|LOC_{x1}|>.
        special = special_tokens(self.tokenizer)
        own = {token for token in special if re.sub(r"\d+", "0", token) in texts}
        if own <= {*self.special_tokens}:
            return self.chat
        spelt = tuple(sorted({*self.special_tokens, *own}))
        images = image_texts(self.image_rule) if self.takes_images else ()
        return replace(self.chat, spelt=spelt, image_texts=images)

    def _rules(self, shown: Sequence[Shown]) -> Rules:
        return Rules(self.image_rule, self.video_rule if shows_video(shown) else None)

    def _images(self, files: Sequence[bytes], *how: Any, shown: Sequence[Shown]) -> SampleImages:
        rules, most = self._rules(shown) if files else None, self.settings.max_image_pixels
        return open_images(files, *how, rules=rules, max_pixels=most, shown=shown)

    def _refuse_images(self, count: int) -> None:
        if count and not self.takes_images:
            raise no_vision_tower()

    def _tokens(self, sample: VLMSample, layouts: Sequence[ImageLayout]) -> list[Tokens]:
        """The tokens of each of a sample's sequences, the chosen answer's of a pair first."""
        if self.settings.rollouts:
            chat = self.chat_for(objects=sample.objects is not None)
            return [self.drawn_tokens.of(sample, layouts, chat)]
        tokens = []
        for messages, name in zip(sample.conversations, PAIR_NAMES, strict=False):
            try:
                chat = self.chat_for(objects=sample.objects is not None)
                tokens.append(self._conversation_tokens(chat, messages, sample.inputs, layouts))
            except DataError as error:
                if sample.answers:
                    reason = f"with the {name} answer: {error.reason}"
                    raise DataError(reason, error_class=error.error_class) from None
                raise
        return tokens

    def _conversation_tokens(
        self,
        chat: ChatEncoder,
        messages: tuple[Message, ...],
        inputs: TemplateInputs,
        layouts: Sequence[ImageLayout],
    ) -> Tokens:
        """Ids with one placeholder for each run of an image, and which of them are targets."""
        written, alone = [each.text for each in layouts], self.each_answer
        said = chat.encode(self.taught(messages), written, inputs, last_alone=alone)
        return tokens_of(said, layouts, self.settings, **self.placeholders)

    @property
    def each_answer(self) -> bool:
        """Whether each answer of a record is a sample, which ends with it."""
        return self.settings.learn == "each_answer" and not self.settings.pairs

    def taught(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """The turns, with those excluded from the loss by this encoder as well as by the data."""
        if self.each_answer:
            refuse_several(messages, self.settings.loss_on)
        return last_turn_alone(messages) if self.settings.learn == "last_turn" else messages

    def layouts(
        self, sizes: Sizes, names: Sequence[str] = (), shown: Sequence[Shown] = ()
    ) -> list[ImageLayout]:
        """What the images and videos of a sample become.

        Args:
            sizes: (width, height) in pixels of all of its image files.
            shown: the images and videos of its messages; empty where all files are still images.

        Raises:
            DataError: (decode) a size that the family refuses.
        """
        return layouts_of(self._rules(shown), sizes, names, shown) if sizes else []
