"""Containers of videos become frames: pixels and times are those that were written into the file.

The reference of pixels is what went into a lossless codec, that of times the clock that the frames
were written by: neither is decoded again to compare.
"""

from __future__ import annotations

import io
import json
import re
import struct
import sys
import tracemalloc
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.engines import make_engine
from support.runs import find_differences, pack, run_batch
from support.shards import TINY_MODEL

from vlmpack.cli.app import app
from vlmpack.convert import ConvertSettings, VideoSettings, convert, open_records
from vlmpack.convert.videos import chosen_times
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.data.shards.samples import cook, group_members
from vlmpack.data.shards.tar import read_members
from vlmpack.encode import Encoder
from vlmpack.encode.sample import TextPart, VideoPart, VLMSample
from vlmpack.errors import CapabilityError, DataError, EmptyDataError, VlmpackError

av = pytest.importorskip("av", reason="PyAV (the extra `video`) is not installed")

SIZE = (64, 48)
LOSSLESS = {
    "mp4": ("libx264rgb", "rgb24", {"crf": "0", "bf": "2"}),
    "mkv": ("ffv1", "bgr0", {}),
    "avi": ("ffv1", "bgr0", {}),
}
ANSWER = {"role": "assistant", "content": "A."}
Clock = Sequence[Fraction | float]


def picture(number: int, size: tuple[int, int] = SIZE) -> np.ndarray:
    """A frame that no other frame is alike."""
    levels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3))
    return levels.astype(np.uint8)


def write_video(
    path: Path, clock: Clock, codec: tuple[str, str, dict[str, str]], size: tuple[int, int] = SIZE
) -> Path:
    """A video whose frame n is picture(n), shown at clock[n]."""
    name, pixels, options = codec
    with av.open(str(path), "w") as container:
        stream = container.add_stream(name, rate=30, options=options)
        stream.width, stream.height, stream.pix_fmt = *size, pixels
        stream.time_base = stream.codec_context.time_base = Fraction(1, 3000)
        for number, time in enumerate(clock):
            frame = av.VideoFrame.from_ndarray(picture(number, size), format="rgb24")
            frame.pts, frame.time_base = round(time * 3000), Fraction(1, 3000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def write_sound(path: Path) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), "s16", "mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
    return path


def even(count: int, fps: float = 30) -> list[float]:
    return [number / fps for number in range(count)]


def run(folder: Path, records: list[Any], **options: Any) -> list[VLMSample]:
    """What our reader makes of the shards of these records, whose files lie in `folder`."""
    source, out = folder / "chats.jsonl", folder / "out"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    bounds = {"fps": 5.0, "form": "png"} | options.pop("videos", {})
    settings = ConvertSettings(
        folder=out,
        image_root=folder,
        index_dir=folder / "index",
        videos=VideoSettings(**bounds),
        overwrite=True,
        **options,
    )
    convert(open_records(source), settings)
    return samples_in(out)


def samples_in(out: Path) -> list[VLMSample]:
    found = []
    for path in sorted(out.glob("*.tar")):
        with path.open("rb") as stream:
            members = read_members(
                stream, path.stat().st_size, shard=str(path), max_member_bytes=1 << 30
            )
            raws = group_members(members, shard=str(path), caps=SampleCaps())
            found += [cook(raw) for raw in raws]
    return found


def asking(name: str = "a.mp4", text: str = "What?") -> dict[str, Any]:
    parts = [{"type": "video", "video": name}, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": parts}, ANSWER]}


def pixels(sample: VLMSample) -> list[np.ndarray]:
    return [np.array(Image.open(io.BytesIO(data))) for data in sample.images]


def video_of(sample: VLMSample) -> VideoPart:
    (part,) = sample.shown
    assert isinstance(part, VideoPart)
    return part


@pytest.mark.parametrize("kind", LOSSLESS)
def test_frames_and_times_are_those_that_were_written(tmp_path: Path, kind: str) -> None:
    write_video(tmp_path / f"a.{kind}", even(50), LOSSLESS[kind])
    (sample,) = run(tmp_path, [asking(f"a.{kind}")])
    wanted = range(0, 50, 6)
    assert [np.array_equal(a, picture(n)) for a, n in zip(pixels(sample), wanted, strict=True)] == [
        True
    ] * 9
    tick = 1e-3 if kind == "mkv" else 1e-6
    assert video_of(sample).times == pytest.approx([n / 30 for n in wanted], abs=tick)


def test_lossy_codecs_and_jpeg_stay_near(tmp_path: Path) -> None:
    """WebM, by VP8, and JPEG frames: smooth pictures come back nearly as they were."""
    y, x = np.mgrid[:48, :64]
    with av.open(str(tmp_path / "a.webm"), "w") as container:
        stream = container.add_stream("libvpx", rate=10, options={"crf": "4", "b": "4M"})
        stream.width, stream.height, stream.pix_fmt = *SIZE, "yuv420p"
        smooth = [np.stack([4 * x, 5 * y, 0 * x + 12 * n], -1).astype(np.uint8) for n in range(20)]
        for one in smooth:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(one, format="rgb24")))
        container.mux(stream.encode())
    (sample,) = run(tmp_path, [asking("a.webm")], videos={"form": "jpeg"})
    assert video_of(sample).times == pytest.approx([n / 5 for n in range(10)], abs=1e-3)
    for one, wanted in zip(pixels(sample), smooth[::2], strict=True):
        assert np.abs(one.astype(int) - wanted).mean() < 4
    assert all(data.startswith(b"\xff\xd8") for data in sample.images)
    (coarse,) = run(tmp_path, [asking("a.webm")], videos={"form": "jpeg", "quality": 10})
    assert sum(map(len, coarse.images)) < 0.7 * sum(map(len, sample.images))


def test_uneven_frames_keep_their_own_times(tmp_path: Path) -> None:
    clock = [0, 0.1, 0.15, 0.5, 0.52, 0.9, 1.7, 1.71, 2.0]
    write_video(tmp_path / "a.mp4", clock, LOSSLESS["mp4"])
    (sample,) = run(tmp_path, [asking()], videos={"fps": 4.0})
    # Ticks at 0, 0.25, 0.5, ... : the first frame at or after each, and none twice.
    wanted = [0, 3, 5, 6, 8]
    assert video_of(sample).times == pytest.approx([clock[n] for n in wanted], abs=1e-5)
    assert all(np.array_equal(a, picture(n)) for a, n in zip(pixels(sample), wanted, strict=True))


def test_which_frames_are_chosen() -> None:
    """A plain loop over ticks finds the same."""
    draw = np.random.default_rng(0)
    for _ in range(300):
        steps = draw.uniform(0.01, 0.4, draw.integers(0, 60))
        shown = [0.0, *np.cumsum(steps).round(4).tolist()]
        settings = VideoSettings(
            fps=float(draw.uniform(0.3, 30)), max_frames=int(draw.integers(1, 70))
        )
        wanted: list[float] = []
        ticks = [n / settings.fps for n in range(10_000) if n / settings.fps <= shown[-1] + 1e-3]
        if min(len(ticks), len(shown)) > settings.max_frames:
            most = settings.max_frames
            ticks = [shown[-1] * n / max(most - 1, 1) for n in range(most)]
        for tick in ticks:
            at = next((time for time in shown if time >= tick - 1e-3), shown[-1])
            wanted += [at] if at not in wanted else []
        assert chosen_times(shown, settings) == wanted
        assert len(wanted) <= settings.max_frames
    # Of a long video: first and last frame, and evenly between them, as Qwen-VL has it.
    spread = chosen_times(even(901), VideoSettings(fps=2, max_frames=4))
    assert spread == pytest.approx([0, 10, 20, 30], abs=1 / 30)
    assert chosen_times(even(3, 1.0), VideoSettings(fps=30)) == [0, 1, 2]


def test_a_time_far_away_costs_no_more_than_a_near_one() -> None:
    tracemalloc.start()
    try:
        assert chosen_times([0.0, 0.5, 1e6], VideoSettings(fps=1000)) == [0.0, 0.5, 1e6]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_container_with_a_frame_beyond_the_longest_time_is_refused(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mkv", [0.0, 0.5, 1.5e6], LOSSLESS["mkv"])
    with pytest.raises(VlmpackError, match="1,500,000 seconds; expected times up to 1,000,000"):
        run(tmp_path, [asking("a.mkv")])


def test_a_long_video_is_spread_over_its_most_frames(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", even(61), LOSSLESS["mp4"])
    (sample,) = run(tmp_path, [asking()], videos={"fps": 30.0, "max_frames": 5})
    assert video_of(sample).times == pytest.approx([0, 0.5, 1, 1.5, 2], abs=1e-5)
    assert np.array_equal(pixels(sample)[-1], picture(60))


def test_a_lying_picture_of_a_phone_is_put_upright(tmp_path: Path) -> None:
    """The matrix of a track's header turns (right, down) into (down, left): with the clock."""
    path = write_video(tmp_path / "a.mp4", even(3), LOSSLESS["mp4"])
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 4 + 40
    one = 1 << 16
    assert struct.unpack(">9i", data[at : at + 36]) == (one, 0, 0, 0, one, 0, 0, 0, 1 << 30)
    data[at : at + 36] = struct.pack(">9i", 0, one, 0, -one, 0, 0, 0, 0, 1 << 30)
    path.write_bytes(data)
    (sample,) = run(tmp_path, [asking()])
    shown, stored = pixels(sample)[0], picture(0)
    assert shown.shape == (64, 48, 3)
    assert np.array_equal(shown[:, -1], stored[0])  # the upper edge is the right one now
    assert np.array_equal(shown[0, :], stored[::-1, 0])


def test_all_ways_to_name_a_video_are_one(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", even(13), LOSSLESS["mp4"])
    image, question = {"type": "image", "image": "i.png"}, {"type": "text", "text": "What?"}
    Image.fromarray(picture(99)).save(tmp_path / "i.png")
    human = {"from": "human", "value": "<video>What?"}
    gpt = {"from": "gpt", "value": "A."}

    def asked(content: Any, **beside: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": content}, ANSWER], **beside}

    records = [
        asking(),
        asked([{"type": "video", "path": "a.mp4"}, question]),
        asked([{"type": "video"}, question], videos=["a.mp4"]),
        asked("<video>What?", videos=["a.mp4"]),
        asked("What?", video="a.mp4"),
        {"conversations": [human, gpt], "videos": ["a.mp4"]},
        {"conversations": [human | {"value": "<image>What?"}, gpt], "video": {"path": "a.mp4"}},
        {"conversations": [human, gpt], "videos": ["a.mp4"], "video": "a.mp4"},
    ]  # fmt: skip
    found = run(tmp_path, records)
    assert {sample.messages for sample in found} == {found[0].messages}
    assert {sample.images for sample in found} == {found[0].images}
    assert video_of(found[0]).times == pytest.approx([0, 0.2, 0.4])

    both = [image, {"type": "video", "video": "a.mp4"}, question]
    records = [
        {"messages": [{"role": "user", "content": both}, ANSWER]},
        {"messages": [{"role": "user", "content": "<image><video>What?"}, ANSWER],
         "images": ["i.png"], "videos": ["a.mp4"]},
        {"conversations": [human | {"value": "<image><video>What?"}, gpt],
         "image": "i.png", "video": "a.mp4"},
    ]  # fmt: skip
    found = run(tmp_path, records)
    assert {(sample.messages, sample.images) for sample in found} == {
        (found[0].messages, found[0].images)
    }
    assert np.array_equal(pixels(found[0])[0], picture(99))
    two = run(tmp_path, [{"conversations": [human | {"value": "<video> or <video>"}, gpt],
                          "videos": ["a.mp4", "a.mp4"]}])[0]  # fmt: skip
    assert [type(part) for part in two.messages[0].parts] == [VideoPart, TextPart, VideoPart]


def fault(folder: Path, record: dict[str, Any], **options: Any) -> tuple[str, str]:
    """(class, reason) of the fault that ends a conversion; nothing may be left of it."""
    with pytest.raises(DataError) as error:
        run(folder, [record], **options)
    assert not [*(folder / "out").glob("*")]
    return error.value.error_class, error.value.reason


def test_what_cannot_be_decoded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write_video(tmp_path / "a.mp4", even(120), LOSSLESS["mp4"]).read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    matroska = write_video(tmp_path / "a.mkv", even(120), LOSSLESS["mkv"]).read_bytes()
    (tmp_path / "cut.mkv").write_bytes(matroska[: len(matroska) // 2])
    hole = bytearray(whole)
    hole[len(whole) // 2 : len(whole) // 2 + 30_000] = bytes(30_000)
    (tmp_path / "hole.mp4").write_bytes(hole)
    (tmp_path / "text.mp4").write_text("no video at all\n" * 20)
    (tmp_path / "list.mp4").write_text("ffconcat version 1.0\nfile a.mkv\n")
    monkeypatch.chdir(tmp_path)  # where ffmpeg would look for it
    write_sound(tmp_path / "sound.mkv")
    (tmp_path / "empty.mp4").write_bytes(b"")
    for name, words in {
        "cut.mp4": "Invalid data",
        "cut.mkv": r"it ends after \d\.\d of its 4.0 seconds",
        "hole.mp4": "damaged|Invalid data|cannot be decoded",
        "text.mp4": "Invalid data|Invalid argument",
        "list.mp4": "Invalid argument",
        "empty.mp4": "Invalid data|End of file|Invalid argument",
        "sound.mkv": r"no video stream \(1 stream of other kinds\)",
    }.items():
        kind, reason = fault(tmp_path, asking(name))
        assert kind == "decode" and f"the video '{name}' cannot be decoded" in reason
        assert re.search(words, reason), reason
        assert "chats.jsonl" in reason and "--skip-bad" in reason
    kind, reason = fault(tmp_path, asking(), caps=SampleCaps(max_image_pixels=3000))
    assert kind == "decode" and "64 x 48 pixels; the cap is 3000" in reason


def test_paths_stay_inside_the_root(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", even(4), LOSSLESS["mp4"])
    inner = tmp_path / "root"
    inner.mkdir()
    (inner / "link.mp4").symlink_to(tmp_path / "a.mp4")
    for name, words in {
        "../a.mp4": "the video '../a.mp4' lies outside the image root",
        "link.mp4": "the video 'link.mp4' lies outside",
        "https://example.org/a.mp4": "is a URL",
        "none.mp4": "the video 'none.mp4' cannot be read",
    }.items():
        kind, reason = fault(inner, asking(name))
        assert kind == "integrity" and words in reason


def test_names_and_places_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", even(31), LOSSLESS["mp4"])
    turns = [{"role": "user", "content": "<video>What?"}, ANSWER]
    llava = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "A."}]
    part = {"type": "video", "video": "a.mp4"}

    def asked(part: dict[str, Any]) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": [part]}, ANSWER]}

    for record, words in [
        ({"messages": turns, "videos": ["a.mp4"] * 2}, "1 <video> marker .*, but 2 videos"),
        ({"conversations": llava, "video": "a.mp4"}, "0 <video> markers .*, but 1 video"),
        ({"messages": turns, "videos": ["a.mp4"], "video": "b.mp4"}, "not the same ones"),
        (asking() | {"video": "a.mp4"}, "named by the parts and by the record"),
        (asked(part | {"fps": 3}), "the key 'fps'"),
        (asked(part | {"path": "a.mp4"}), "video and path"),
        (asking(["f0.png", "f1.png"]), "is a list; .* are 'frames'"),
    ]:
        kind, reason = fault(tmp_path, record)
        assert kind == "schema" and re.search(words, reason), reason
    kind, reason = fault(tmp_path, asking(), caps=SampleCaps(max_frames=5))
    assert kind == "schema" and "more than 5 frames; lower --fps or --max-frames" in reason
    small = SampleCaps(max_sample_bytes=40_000, max_json_bytes=10_000)
    kind, reason = fault(tmp_path, asking(), caps=small)
    assert kind == "schema" and "too much with its other files" in reason


def test_bad_records_are_left_out_and_listed(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", even(7), LOSSLESS["mp4"])
    (tmp_path / "b.mp4").write_bytes(b"no video")
    found = run(tmp_path, [asking(), asking("b.mp4"), asking("c.mp4"), asking()], skip_bad=True)
    assert [sample.key for sample in found] == ["000000000", "000000003"]
    manifest = json.loads((tmp_path / "out/train-manifest.json").read_text())
    assert [each["error_class"] for each in manifest["skipped"]] == ["decode", "integrity"]
    assert (manifest["videos"], manifest["frames"]) == (2, 4)
    with pytest.raises(EmptyDataError, match="none of 1 records"):
        run(tmp_path, [asking("b.mp4")], skip_bad=True)


def test_a_title_may_be_in_any_encoding(tmp_path: Path) -> None:
    """Cameras write them in their own, and the frames are what is read."""
    path = write_video(tmp_path / "a.mp4", even(13), LOSSLESS["mp4"])
    (plain,) = run(tmp_path, [asking()])
    data = path.read_bytes()
    assert data.count(b"Lavf") == 1, "guard: the file says what wrote it"
    path.write_bytes(data.replace(b"Lavf", b"\xbe\xe9\xff\xfe"))
    (odd,) = run(tmp_path, [asking()])
    assert all(map(np.array_equal, pixels(odd), pixels(plain))) and len(pixels(odd)) > 1


def test_without_pyav_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(CapabilityError, match=r"pip install 'av>=15.1' \(the extra `video`\)"):
        run(tmp_path, [asking()])
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_video(tmp_path / "a.mp4", even(13), LOSSLESS["mp4"])
    source = tmp_path / "chats.jsonl"
    source.write_text(json.dumps(asking()))
    index = ["--index-dir", str(tmp_path / "i")]

    def command(*options: str) -> str:
        asked = ["data", "convert", str(source), str(tmp_path / "out/train"), *index, *options]
        app(asked, standalone_mode=False)
        return capsys.readouterr().out

    for options, words in {
        (): "vlmpack data convert --video makes them of a container",
        ("--fps", "3"): "expected --video too",
        ("--video", "--fps", "0"): "--fps is 0.0; expected more than 0",
        ("--video", "--frame-format", "bmp"): "--frame-format is 'bmp'; expected jpeg or png",
    }.items():
        with pytest.raises(VlmpackError, match=re.escape(words)):
            command(*options)
    said = command("--video", "--fps", "10", "--frame-format", "png", "--max-frames", "4")
    assert "1 video with 4 frames" in said
    (sample,) = samples_in(tmp_path / "out")
    assert np.array_equal(pixels(sample)[-1], picture(12))


@pytest.mark.slow
def test_a_converted_video_is_trained(tmp_path: Path) -> None:
    """Its ids, positions and pixels are those of the same frames written by hand, and it learns."""
    size = (224, 112)
    write_video(tmp_path / "a.mp4", even(31), LOSSLESS["mp4"], size)
    encoder = Encoder(TINY_MODEL)
    (converted,) = run(tmp_path, [asking()], videos={"fps": 2.0}, encoder=encoder)
    names = []
    for number in (0, 15, 30):
        names.append(f"{number}.png")
        Image.fromarray(picture(number, size)).save(tmp_path / names[-1])
    part = {"type": "video", "frames": names, "fps": 2.0}
    parts = [part, {"type": "text", "text": "What?"}]
    (by_hand,) = run(tmp_path, [{"messages": [{"role": "user", "content": parts}, ANSWER]}])
    ours, wanted = encoder.encode(converted), encoder.encode(by_hand)
    assert ours.input_ids.tolist() == wanted.input_ids.tolist()
    assert ours.media.grid_thw == wanted.media.grid_thw == ((2, 8, 16),)
    assert (ours.media.pixel_values == wanted.media.pixel_values).all()
    vlm = make_engine(TINY_MODEL, encoder).vlm.train()
    ours, wanted = (run_batch(vlm, pack([each])) for each in (ours, wanted))
    assert find_differences(ours, wanted) == []
