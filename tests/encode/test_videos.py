"""Videos as frames: what is refused by name, and what follows from sizes and times alone.

Ids, pixels, losses and gradients are compared with transformers in tests/families/test_video.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from io import BytesIO

import pytest
import torch
from PIL import Image
from support.families import tiny_family_folder
from support.videos import Shot, Told

from vlmpack.data.packs.spans import SavedSample
from vlmpack.encode import Encoder
from vlmpack.encode.encoder import refuse_videos
from vlmpack.errors import CapabilityError, DataError
from vlmpack.families.base import NO_TOKEN, Clip, positions_of
from vlmpack.families.qwen_video import rate_of
from vlmpack.packing.image_owners import RowOwners, SampleOwners

SAMPLE = Told(
    "one", ((112, 112), "x", Shot((112, 112), 5, fps=1.5), Shot((112, 56), 2, fps=1.0)), "abc"
)


def test_each_patch_along_time_holds_two_frames(encoder):
    """One after the other, the last one twice where their number is odd."""
    encoded = encoder.encode(SAMPLE.cooked())
    assert encoded.media.grid_thw == ((1, 8, 8), (3, 8, 8), (1, 4, 8))
    assert encoded.media.seconds == (None, 2 / 1.5, 2.0)
    video = encoded.media.pixel_values[64:256].reshape(192, 3, 2, 14, 14)
    rule = encoder.video_rule
    frames = [Image.open(BytesIO(data)) for data in SAMPLE.cooked().images[1:6]]
    for number, frame in enumerate(frames):
        time, half = divmod(number, 2)
        # (row, column, row in it, column in it, channel, y, x)
        own = video[64 * time : 64 * (time + 1), :, half].reshape(4, 4, 2, 2, 3, 14, 14)
        shown = own.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, 112, 112)
        levels = torch.tensor(list(frame.tobytes())).reshape(112, 112, 3).permute(2, 0, 1)
        assert torch.equal(shown, rule.pixels.normalized(levels))
    assert torch.equal(video[128:, :, 0], video[128:, :, 1])
    assert not torch.equal(video[:64, :, 0], video[:64, :, 1])


@pytest.mark.parametrize("bare", [False, True])
def test_times_stand_in_place_of_what_the_template_writes(tmp_path, bare):
    """Also where a template writes the token alone; nothing is left around the times."""
    folder = tiny_family_folder("qwen3_vl", tmp_path)
    template = folder / "chat_template.jinja"
    text = template.read_text()
    written = "<|vision_start|><|video_pad|><|vision_end|>"
    assert written in text
    if bare:
        template.write_text(text.replace(written, "<|video_pad|>"))
    encoder = Encoder(folder)
    sample = Told("one", ("a", Shot((64, 64), 4, fps=1.0), "b"), "abc").cooked()
    encoded = encoder.encode(sample)
    block = f"<|vision_start|>{'<|video_pad|>' * 4}<|vision_end|>"
    told = encoder.tokenizer.decode(encoded.input_ids)
    assert f"user\na<0.5 seconds>{block}<2.5 seconds>{block}b<|im_end|>" in told
    assert encoder.length(replace(sample, images=()), [(64, 64)] * 4).num_tokens == encoded.length


def test_positions_have_the_times_of_the_video(encoder):
    """2 positions a second in the tiny model: 2 frames of 1.5 a second are 2.67, cut off."""
    encoded = encoder.encode(SAMPLE.cooked())
    assert encoder.family.tokens_per_second == 2
    places = encoded.media_positions[16 : 16 + 48]
    times = encoded.position_ids[0, places]
    assert (times - times[0]).unique().tolist() == [0, 2, 5]
    still = positions_of(
        encoder.family,
        encoded.length,
        encoded.media_positions.tolist(),
        replace(encoded.media, seconds=None),
    )
    assert not torch.equal(still, encoded.position_ids)
    again = positions_of(
        encoder.family, encoded.length, encoded.media_positions.tolist(), encoded.media
    )
    assert torch.equal(again, encoded.position_ids)


def test_the_length_is_known_from_sizes(encoder):
    sample = SAMPLE.cooked()
    sizes = [(112, 112)] * 6 + [(112, 56)] * 2
    length = encoder.length(replace(sample, images=()), sizes)
    encoded = encoder.encode(sample)
    assert encoded.length == length.num_tokens
    assert length.num_image_tokens == len(encoded.media_positions) == 16 + 48 + 8
    assert length.num_patches == encoded.media.pixel_values.shape[0]


def test_smaller_frames_are_those_that_the_plan_shrank(encoder):
    sizes = [(56, 56)] * 6 + [(56, 28)] * 2
    encoded = encoder.encode(SAMPLE.cooked(), sizes)
    assert encoded.media.grid_thw == ((1, 4, 4), (3, 4, 4), (1, 2, 4))
    assert encoded.length == encoder.length(SAMPLE.cooked(), sizes).num_tokens


@pytest.mark.parametrize("size", [2, 3])
def test_each_process_of_a_replica_makes_whole_videos(encoder, size):
    """Together they make what one process makes alone, and each video is one's."""
    alone = encoder.encode(SAMPLE.cooked()).media
    made = []
    for rank in range(size):
        share = SampleOwners(RowOwners(rank, size), before=0, total=64 + 192 + 32)
        media = encoder.encode(SAMPLE.cooked(), owners=share).media
        assert (media.grid_thw, media.seconds) == (alone.grid_thw, alone.seconds)
        rows = media.pixel_values.split(media.patches_here)
        made.append([rows[n] for n in range(3) if media.owners.mine[n]])
    whole = torch.cat(list(itertools.chain.from_iterable(made)))
    assert torch.equal(whole, alone.pixel_values)
    assert sum(bool(each) for each in made) > 1


def test_families_without_videos_say_so(tmp_path):
    encoder = Encoder(tiny_family_folder("gemma3", tmp_path))
    sample = SAMPLE.cooked()
    sizes = [Image.open(BytesIO(data)).size for data in sample.images]
    with pytest.raises(DataError, match="videos of the family gemma3 are not made ready here"):
        encoder.length(sample, sizes)


def test_what_does_not_carry_videos_says_so(encoder):
    sample = SAMPLE.cooked()
    with pytest.raises(DataError, match=r"packing.share_prefix: true do not carry"):
        encoder.replace(share_prefix=True).encode(sample)
    pair = replace(sample, answers=(sample.messages[-1:], sample.messages[-1:]))
    with pytest.raises(
        DataError, match=r"pair of answers about a video, which objective.name: dpo"
    ):
        refuse_videos(pair, encoder.family, encoder.video_id, share_prefix=False)
    with pytest.raises(DataError, match=r"the model's tokenizer has no token <\|video_pad\|>"):
        refuse_videos(sample, encoder.family, NO_TOKEN, share_prefix=False)
    with pytest.raises(DataError, match="hold only still images"):
        SavedSample.of(encoder.encode(sample))


def test_another_video_processor_is_refused_and_images_train(tmp_path):
    folder = tiny_family_folder("qwen3_vl", tmp_path)
    path = folder / "video_preprocessor_config.json"
    path.write_text('{"video_processor_type": "LlavaOnevisionVideoProcessor"}', encoding="utf-8")
    encoder = Encoder(folder)
    assert encoder.encode(Told("image", ((64, 64), "?"), "abc").cooked()).media is not None
    with pytest.raises(
        CapabilityError, match="is a LlavaOnevisionVideoProcessor, expected Qwen3VL"
    ):
        encoder.encode(SAMPLE.cooked())


def test_one_frame_alone_is_refused_by_the_family_that_counts_pairs(tmp_path, encoder):
    lone = Told("lone", (Shot((112, 112), 1, fps=2.0), "?"), "abc").cooked()
    with pytest.raises(DataError, match=r"video from frame 0 \('f0.png'\): a video of 1 frame"):
        Encoder(tiny_family_folder("qwen3_vl", tmp_path)).encode(lone)
    assert encoder.encode(lone).media.grid_thw == ((1, 8, 8),)


def test_the_rate_of_times():
    assert rate_of(Clip((0.0, 0.5, 1.0))) == 2.0
    assert rate_of(Clip((0.0, 0.4, 1.0))) == 2.0  # picked from frames that are 0.2 apart
    assert rate_of(Clip((0.0, 9.0), fps=4.0)) == 4.0
    with pytest.raises(ValueError, match=r"frames 0.1 seconds apart among others 0.5"):
        rate_of(Clip((0.0, 0.1, 1.0)))
