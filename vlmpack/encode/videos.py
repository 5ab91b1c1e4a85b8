"""What cannot be done with videos yet, said of a sample that has one."""

from __future__ import annotations

from vlmpack.encode.sample import VLMSample
from vlmpack.errors import schema_error
from vlmpack.families.base import NO_TOKEN, Family

_INSTEAD = "its frames as images would do, or leave such samples out (data.on_error.schema: skip)"


def refuse_videos(sample: VLMSample, family: Family, video_id: int, *, share_prefix: bool) -> None:
    """Raise DataError (schema) for a sample with a video that cannot be encoded.

    Args:
        sample: to be encoded.
        family: of the model.
        video_id: of the token of a video's features in its tokenizer.
        share_prefix: whether rows share what their samples begin with.
    """
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
            "the sample has a video, which rows that share what their samples begin with do not "
            "carry yet: set packing.share_prefix: false, or leave such samples out "
            "(data.on_error.schema: skip)"
        )
