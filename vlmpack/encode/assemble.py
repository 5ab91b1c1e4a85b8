"""Token ids with one placeholder for each run of an image -> the sample as it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from vlmpack.encode.chat import ChatTokens
from vlmpack.encode.settings import EncoderSettings
from vlmpack.errors import schema_error
from vlmpack.families.base import NO_TOKEN, Family, ImageLayout, positions_of
from vlmpack.packing import IGNORE_INDEX, EncodedSample, Media


class Tokens(NamedTuple):
    """A conversation's tokens.

    Args:
        ids: one placeholder for each run of an image.
        supervised: for each, whether it is a target.
        placeholder_id: the token that one image feature replaces.
        video_id: the token that a video's feature replaces, if it is another; otherwise no token.
    """

    ids: Sequence[int]
    supervised: Sequence[bool]
    placeholder_id: int
    video_id: int = NO_TOKEN

    def is_placeholder(self, token: int) -> bool:
        """Whether a feature replaces it."""
        return token in (self.placeholder_id, self.video_id)


def tokens_of(
    said: ChatTokens,
    layouts: Sequence[ImageLayout],
    settings: EncoderSettings,
    *,
    placeholder_id: int,
    video_id: int,
) -> Tokens:
    """A conversation's tokens, and which of them are targets.

    Raises:
        DataError: (schema) placeholders that do not fit the images, or nothing to learn.
    """
    ids = said.input_ids
    if all(layout.seconds is None for layout in layouts):
        video_id = NO_TOKEN
    count = sum(map(ids.count, {placeholder_id, video_id}))
    num_runs = sum(len(each.runs) for each in layouts)
    if count != num_runs:
        raise schema_error(
            f"the text holds {count} image placeholders, the sample's {len(layouts)} images "
            f"are written with {num_runs}",
        )
    if settings.loss_on == "all":
        unlearnt = zip(said.from_image, said.excluded, strict=True)
        supervised = [not any(why) for why in unlearnt]
    else:
        supervised = said.from_assistant
    if not any(supervised[1:]):
        hint = " (data.learn: last_turn leaves out all but the last)"
        raise schema_error(
            "no token to learn: the assistant says nothing, or its turns are excluded"
            + (hint if settings.learn == "last_turn" else ""),
        )
    return Tokens(ids, supervised, placeholder_id, video_id)


def assemble(
    family: Family,
    key: str,
    tokens: Tokens,
    layouts: Sequence[ImageLayout],
    media: Media | None,
) -> EncodedSample:
    """Expand placeholders, shift labels inside the sample, add positions."""
    runs = iter([run for layout in layouts for run in layout.runs])
    expanded: list[int] = []
    targets: list[int] = []
    media_positions: list[int] = []
    for token, is_target in zip(tokens.ids, tokens.supervised, strict=True):
        if tokens.is_placeholder(token):
            count = next(runs)
            media_positions.extend(range(len(expanded), len(expanded) + count))
            expanded.extend([token] * count)
            targets.extend([IGNORE_INDEX] * count)
        else:
            expanded.append(token)
            targets.append(token if is_target else IGNORE_INDEX)
    return EncodedSample(
        key=key,
        input_ids=torch.tensor(expanded),
        labels=torch.tensor([*targets[1:], IGNORE_INDEX]),
        position_ids=positions_of(family, len(expanded), media_positions, media),
        media=media,
        media_positions=torch.tensor(media_positions, dtype=torch.int64),
    )
