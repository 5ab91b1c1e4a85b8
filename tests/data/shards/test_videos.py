"""Videos in records: lists of frames, with a rate or a time for each."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vlmpack.data.shards.naming import SampleCaps
from vlmpack.data.shards.samples import CookedText, cook_texts
from vlmpack.encode import ImagePart, TextPart, VideoPart
from vlmpack.errors import DataError

FRAMES = ["f0.jpg", "f1.jpg", "f2.jpg"]


def record(*parts: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": "Look."},
            {"role": role, "content": [*parts, {"type": "text", "text": "?"}]},
            {"role": "assistant", "content": "A."},
        ]
    }


def video(**said: Any) -> dict[str, Any]:
    return {"type": "video", "frames": FRAMES, **said}


def cooked(document: dict[str, Any], fields: list[str]) -> CookedText:
    (text,) = cook_texts("000", "a.tar", json.dumps(document).encode(), ("json", *fields))
    return text


def test_frames_are_images_in_token_order_beside_images_without_a_name() -> None:
    parts = ({"type": "image"}, video(fps=2), {"type": "image"})
    found = cooked(record(*parts), [*FRAMES, "0.jpg", "1.jpg"])
    assert found.image_fields == ("0.jpg", *FRAMES, "1.jpg")
    assert found.sample.messages[1].parts == (
        ImagePart(0),
        VideoPart(1, (0.0, 0.5, 1.0), 2.0),
        ImagePart(4),
        TextPart("?"),
    )
    assert found.sample.num_images == 5
    assert found.sample.has_video


def test_images_named_beside_the_turns_are_those_of_image_parts() -> None:
    document = {**record(video(times=[0, 0.25, 2]), {"type": "image"}), "images": ["x.png"]}
    found = cooked(document, ["x.png", *FRAMES])
    assert found.image_fields == (*FRAMES, "x.png")
    assert found.sample.messages[1].parts[0] == VideoPart(0, (0.0, 0.25, 2.0))
    document["images"] = ["x.png", "y.png"]
    with pytest.raises(DataError, match="1 image part in the conversation, but 2 images named"):
        cooked(document, ["x.png", "y.png", *FRAMES])


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (video(), "a video with neither of 'fps' and 'times'"),
        (video(fps=2, times=[0, 1, 2]), "a video with both of 'fps' and 'times'"),
        (video(fps=0), r"fps is 0; expected more than 0"),
        (video(fps=1e-9), r"fps is 1e-09, so that its last frame is at 2,000,000,000 seconds"),
        (video(fps=True), "fps is a bool; expected a number"),
        (video(fps="2"), "fps is a string; expected a number"),
        (video(fps=-1), "fps is -1; expected 0 to 1,000,000"),
        (video(times=[0, 1]), "times is 2 numbers; expected 3, one for each frame"),
        (video(times=[0, 1, 1]), r"times\[2\] is 1.0, after 1.0; expected times that increase"),
        (video(times=[0, None, 1]), r"times\[1\] is missing; expected a number"),
        ({"type": "video", "frames": [], "fps": 1}, "frames is an empty list"),
        ({"type": "video", "frames": "f0.jpg", "fps": 1}, "frames is a string"),
        ({"type": "video", "frames": [5], "fps": 1}, r"frames\[0\] is an int; expected a member"),
        (video(fps=2, video="a.mp4"), r"names a video \('a.mp4'\)"),
        (video(fps=2, start=3), "has the key 'start', which would be lost"),
        (video(fps=2) | {"frames": ["f0.jpg", "f9.jpg"]}, "the image 'f9.jpg' is no member"),
    ],
)
def test_what_is_no_list_of_timed_frames_is_refused(part: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason) as caught:
        cooked(record(part), FRAMES)
    assert caught.value.error_class == "schema"


def test_a_video_stands_in_a_user_s_turn() -> None:
    with pytest.raises(DataError, match=r"messages\[1\] is the assistant's and shows a video"):
        cooked(record(video(fps=1), role="assistant"), FRAMES)


def test_a_frame_that_nobody_shows_is_refused() -> None:
    with pytest.raises(DataError, match="3 image placeholders in the conversation, but 4 image"):
        cooked(record(video(fps=1)), [*FRAMES, "f3.jpg"])


def test_frames_have_a_cap_of_their_own() -> None:
    shown = cooked(record({"type": "image"}, video(fps=1)), [*FRAMES, "x.png"]).sample.shown
    SampleCaps(max_images=1, max_frames=3).check_images(shown)
    with pytest.raises(DataError, match="3 frames of videos; at most 2 are allowed"):
        SampleCaps(max_frames=2).check_images(shown)
    with pytest.raises(DataError, match="1 images; at most 0 are allowed"):
        SampleCaps(max_images=0).check_images(shown)
