"""What the data layer asks of its neighbours: an encoder and a collator.

Both travel to worker processes by pickle, so they are cheap to send and load lazily what they
need. The family's encoder (vlmpack.families) and the packing collators (vlmpack.packing) fit these
shapes; tests use fakes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vlmpack.encode.sample import VLMSample
from vlmpack.packing.batch import EncodedSample, PackedBatch, PaddedBatch
from vlmpack.packing.row_layout import FixedShape

ImageSize = tuple[int, int]
"""(width, height) in pixels, as the image is seen: after its EXIF orientation."""


class SampleLength(Protocol):
    """How long a sample will be, known before a pixel is decoded."""

    @property
    def num_tokens(self) -> int:
        """All tokens of the sample."""

    @property
    def num_image_tokens(self) -> int:
        """Placeholder tokens among them."""

    @property
    def num_label_tokens(self) -> int:
        """Tokens that carry loss."""

    @property
    def num_patches(self) -> int:
        """Patches that the vision tower sees."""


class Encoder(Protocol):
    """Turns a cooked sample into token ids and pixels."""

    @property
    def fingerprint(self) -> str:
        """Changes with tokenizer, chat template, image processor and length rule."""

    @property
    def former_fingerprints(self) -> Sequence[str]:
        """Fingerprints of earlier versions of vlmpack that stand for the same ids and lengths."""

    @property
    def pad_token_id(self) -> int:
        """Fills the gaps of a row."""

    @property
    def num_position_axes(self) -> int:
        """A, the number of axes of the model's positions."""

    def length(self, sample: VLMSample, sizes: Sequence[ImageSize]) -> SampleLength:
        """The exact length from text and image sizes alone.

        Raises:
            DataError: class `schema`, for messages that cannot be rendered.
        """

    def encode(self, sample: VLMSample, sizes: Sequence[ImageSize] | None = None) -> EncodedSample:
        """Token ids, labels, positions and pixels; `sizes` are targets where the plan shrank.

        Raises:
            DataError: class `decode` or `schema`.
        """


class Collator(Protocol):
    """Puts the samples of one bin into one batch."""

    @property
    def pad_to_multiple_of(self) -> int:
        """What each sample's slots are a multiple of; of padded rows, their width."""

    @property
    def fixed(self) -> FixedShape | None:
        """The one shape of all its batches, where they have one."""

    def __call__(self, samples: Sequence[EncodedSample]) -> PackedBatch | PaddedBatch:
        """The samples as one batch, in their order."""

    def empty(self) -> PackedBatch | PaddedBatch:
        """A batch without samples and without loss, which still runs through the model."""
