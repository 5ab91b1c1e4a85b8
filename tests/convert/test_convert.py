"""Conversions: every format becomes samples that our reader accepts, the same bytes each time."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset as wds
from support.shard_fakes import image_bytes

from vlmpack.cli.app import app
from vlmpack.convert import ConvertReport, ConvertSettings, convert, open_records
from vlmpack.data.files.images import ImageRoot
from vlmpack.data.index.parts import part_for
from vlmpack.data.index.shard_index import IndexBuilder
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.data.shards.samples import cook, group_members
from vlmpack.data.shards.tar import read_members
from vlmpack.encode import Encoder
from vlmpack.encode.sample import VLMSample
from vlmpack.errors import DataError, EmptyDataError, RecipeError, VlmpackError
from vlmpack.storage.fetch import LocalFetcher

CAPS = SampleCaps()
TURNS = [
    {"from": "human", "value": "<image>\nWhat is left, <image> or right?"},
    {"from": "gpt", "value": "Left."},
    {"from": "human", "value": "Sure?"},
    {"from": "gpt", "value": "Yes."},
]
LLAVA = [
    {"id": "one", "image": ["a.png", "sub/b.jpg"], "conversations": TURNS},
    {"id": "two", "image": "a.png", "conversations": [
        {"from": "human", "value": "Look: <image>"}, {"from": "gpt", "value": "A."}]},
    {"id": 3, "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
]  # fmt: skip


@pytest.fixture
def images(tmp_path: Path) -> Path:
    root = tmp_path / "images"
    (root / "sub").mkdir(parents=True)
    (root / "a.png").write_bytes(image_bytes(20, 10, seed=1))
    (root / "sub/b.jpg").write_bytes(image_bytes(30, 12, seed=2, kind="JPEG"))
    return root


def run(source: Path, out: Path, images: Path, form: str = "auto", **options: Any) -> ConvertReport:
    split = options.pop("split", None)
    settings = ConvertSettings(folder=out, image_root=images, index_dir=out / "index", **options)
    return convert(open_records(source, form, split), settings)


def cooked(out: Path) -> list[VLMSample]:
    """What our reader makes of the shards."""
    found = []
    for path in sorted(out.glob("*.tar")):
        with path.open("rb") as stream:
            size = path.stat().st_size
            members = read_members(stream, size, shard=str(path), max_member_bytes=1 << 30)
            found += [cook(raw) for raw in group_members(members, shard=str(path), caps=CAPS)]
    return found


def direct(records: Iterable[dict[str, Any]], images: Path, folder: Path) -> list[VLMSample]:
    """The same LLaVA records put into a shard by hand, as the reader's own schema takes them."""
    folder.mkdir()
    with wds.TarWriter(str(folder / "hand.tar")) as writer:
        for number, record in enumerate(records):
            names = record.get("image", [])
            names = [names] if isinstance(names, str) else names
            members = {
                f"{place}.{name[-3:]}": (images / name).read_bytes()
                for place, name in enumerate(names)
            }
            document = {"conversations": record["conversations"]}
            writer.write(
                {"__key__": f"{number:09d}", "json": json.dumps(document).encode()} | members
            )
    return cooked(folder)


def same(found: list[VLMSample], wanted: list[VLMSample]) -> bool:
    assert wanted
    return [(s.key, s.messages, s.images) for s in found] == [
        (s.key, s.messages, s.images) for s in wanted
    ]


def test_llava_json_reads_as_the_same_conversation(tmp_path: Path, images: Path) -> None:
    source = tmp_path / "llava.json"
    source.write_text(json.dumps(LLAVA))
    report = run(source, tmp_path / "out", images)
    assert (report.records, report.samples, report.skipped) == (3, 3, [])
    found = cooked(tmp_path / "out")
    assert same(found, direct(LLAVA, images, tmp_path / "hand"))
    assert [len(sample.images) for sample in found] == [2, 1, 0]


def test_jsonl_takes_messages_in_all_its_forms(tmp_path: Path, images: Path) -> None:
    text = {"type": "text", "text": "What?"}
    answer = {"role": "assistant", "content": "A."}
    user = [
        {"content": [{"type": "image", "image": "a.png"}, text]},
        {"content": [{"type": "image_url", "image_url": {"url": "a.png"}}, text]},
        {"content": "<image>What?", "images": ["a.png"]},
        {"content": [{"type": "image"}, text], "image": "a.png"},
        {"content": [{"type": "image", "path": str(images / "a.png")}, text]},
    ]
    lines = []
    for turn in user:
        named = {key: turn[key] for key in ("image", "images") if key in turn}
        messages = [{"role": "user", "content": turn["content"]}, answer]
        lines.append(json.dumps({"messages": messages, "task": "t", **named}))
    plain = [{"role": "user", "content": "a literal <image> here"}, answer]
    lines += ["", json.dumps({"messages": plain})]
    source = tmp_path / "chat.jsonl"
    source.write_text("\n".join(lines))
    run(source, tmp_path / "out", images)
    *shown, last = cooked(tmp_path / "out")
    assert len(shown) == len(user)
    assert {(sample.messages, sample.images, sample.task) for sample in shown} == {
        (shown[0].messages, ((images / "a.png").read_bytes(),), "t")
    }
    assert last.num_images == 0 and last.messages[0].text == "a literal <image> here"


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_what_means_something_elsewhere_is_no_less_refused_in_a_column(
    tmp_path: Path, images: Path, form: str
) -> None:
    turns = LLAVA[2]["conversations"]
    rows: list[dict[str, Any]] = [
        {"conversations": turns, "kto_tag": None, "source": "web"},
        {"conversations": turns, "kto_tag": True, "source": "web"},
    ]
    source = tmp_path / f"pairs.{form}"
    if form == "jsonl":
        source.write_text("\n".join(map(json.dumps, rows)))
    else:
        pq.write_table(pa.Table.from_pylist(rows), source)
    report = run(source, tmp_path / "out", images, skip_bad=True)
    [skipped] = report.skipped
    assert "the record has 'kto_tag': an answer with a reward" in skipped.reason
    assert report.samples == 1


@pytest.mark.parametrize("markers", [0, 1, 2])
@pytest.mark.parametrize("form", ["auto", "llava"])
def test_a_marker_in_conversations_without_an_image_is_refused(
    tmp_path: Path, images: Path, form: str, markers: int
) -> None:
    """In `conversations` it marks an image whatever the record names; in `messages` it is text."""
    turns = [{"from": "human", "value": "<image>" * markers + "Q"}, {"from": "gpt", "value": "A"}]
    source = tmp_path / ("chat.json" if form == "llava" else "chat.jsonl")
    record = {"conversations": turns}
    source.write_text(json.dumps([record] if form == "llava" else record))
    if not markers:
        assert run(source, tmp_path / "out", images, form).samples == 1
        return
    with pytest.raises(DataError, match=rf"{markers} places? for images .*without a name, nor"):
        run(source, tmp_path / "out", images, form)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image", "image": "a.png", "path": "b.jpg"}, "image by image and path; expected"),
        ({"type": "image", "imge": "a.png"}, "did you mean 'image'"),
        ({"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}}, "key 'detail'"),
        ({"type": "image", "image": {"path": "a.png", "crop": [1, 2]}}, "the key 'crop'"),
        ({"type": "text", "text": "Q", "image": "a.png"}, "the key 'image'"),
    ],
)
def test_parts_that_say_more_than_is_read(
    tmp_path: Path, images: Path, part: dict[str, Any], reason: str
) -> None:
    turns = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "A"}]
    source = tmp_path / "chat.jsonl"
    source.write_text(json.dumps({"messages": turns}))
    with pytest.raises(DataError, match=reason):
        run(source, tmp_path / "out", images)


@pytest.mark.parametrize("with_model", [False, True])
def test_what_training_refuses_is_left_out(
    tmp_path: Path, images: Path, encoder: Encoder, with_model: bool
) -> None:
    """A cut JPEG and a first turn of the assistant for every model; with one, also what its image
    processor and its template refuse. What is left is encoded as training encodes it."""
    whole = image_bytes(200, 200, kind="JPEG")
    (images / "cut.jpg").write_bytes(whole[: len(whole) * 9 // 10])
    (images / "flat.png").write_bytes(image_bytes(4000, 8))
    asked = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
    shown = [{"from": "human", "value": "<image>Q"}, {"from": "gpt", "value": "A"}]
    records = [
        {"conversations": asked},
        {"conversations": shown, "image": "cut.jpg"},
        {"conversations": [{"from": "gpt", "value": "Hello"}, *asked]},
        {"conversations": shown, "image": "flat.png"},
        {"conversations": [{"from": "human", "value": "<|im_end|>"}, asked[1]]},
        {"conversations": shown, "image": "a.png"},
    ]
    source = tmp_path / "chat.jsonl"
    source.write_text("\n".join(map(json.dumps, records)))
    model = encoder if with_model else None
    report = run(source, tmp_path / "out", images, skip_bad=True, encoder=model)
    reasons = {int(item.place.rpartition(" ")[2]): item.reason for item in report.skipped}
    assert sorted(reasons) == ([2, 3, 4, 5] if with_model else [2, 3])
    assert "image 'cut.jpg' cannot be decoded: image file is trunc" in reasons[2]
    assert "starts with the assistant" in reasons[3]
    classes = [item.error_class for item in report.skipped]
    assert classes == ["decode", "schema", "decode", "schema"][: len(reasons)]
    if with_model:
        assert "image 0 ('flat.png'): an image of" in reasons[4]
        assert "more than 200 times longer" in reasons[4] and "special token" in reasons[5]
        assert len([encoder.encode(sample) for sample in cooked(tmp_path / "out")]) == 2


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_excluded_answers_and_a_system_beside_the_turns_are_kept(
    tmp_path: Path, images: Path, form: str
) -> None:
    """Parquet fills the flags of the other turns with nulls."""
    turns = [
        {"role": "user", "content": "Q", "weight": None},
        {"role": "assistant", "content": "draft", "weight": 0},
        {"role": "user", "content": "R", "weight": None},
        {"role": "assistant", "content": "A", "weight": 1},
    ]
    rows: list[dict[str, Any]] = [{"messages": turns, "system": "S"}]
    source = tmp_path / f"chat.{form}"
    if form == "jsonl":
        source.write_text(json.dumps(rows[0]))
    else:
        pq.write_table(pa.Table.from_pylist(rows), source)
    run(source, tmp_path / "out", images)
    [sample] = cooked(tmp_path / "out")
    said = [(message.role, message.text, message.learn) for message in sample.messages]
    assert said == [
        ("system", "S", True),
        ("user", "Q", True),
        ("assistant", "draft", False),
        ("user", "R", True),
        ("assistant", "A", True),
    ]


def test_a_hugging_face_folder_gives_the_same_samples(tmp_path: Path, images: Path) -> None:
    """Images as {bytes, path}: bytes here, a path there; structs with nulls; two files."""

    def image(name: str, *, as_bytes: bool) -> dict[str, Any]:
        data = (images / name).read_bytes()
        return {"bytes": data, "path": None} if as_bytes else {"bytes": None, "path": name}

    rows = []
    for place, record in enumerate(LLAVA):
        names = record.get("image", [])
        names = [names] if isinstance(names, str) else names
        rows.append(
            {
                "images": [image(name, as_bytes=place == 0) for name in names] or None,
                "conversations": record["conversations"],
                "other": place,
            }
        )
    (tmp_path / "hf/data").mkdir(parents=True)
    for number, part in enumerate((rows[:1], rows[1:])):
        name = f"hf/data/train-{number:05d}-of-00002.parquet"
        pq.write_table(pa.Table.from_pylist(part, schema=_schema()), tmp_path / name)
    pq.write_table(
        pa.Table.from_pylist(rows[:1], schema=_schema()),
        tmp_path / "hf/data/test-00000-of-00001.parquet",
    )
    with pytest.raises(VlmpackError, match="holds the splits test, train; choose one by --split"):
        run(tmp_path / "hf", tmp_path / "no", images)
    run(tmp_path / "hf", tmp_path / "out", images, split="train")
    assert same(cooked(tmp_path / "out"), direct(LLAVA, images, tmp_path / "hand"))


def _schema() -> Any:
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    turn = pa.struct([("from", pa.string()), ("value", pa.string())])
    return pa.schema(
        [("images", pa.list_(image)), ("conversations", pa.list_(turn)), ("other", pa.int64())]
    )


def test_the_same_input_gives_the_same_bytes_and_an_index(tmp_path: Path, images: Path) -> None:
    source = tmp_path / "llava.json"
    source.write_text(json.dumps(LLAVA * 3))
    names = []
    for out in (tmp_path / "one", tmp_path / "two"):
        report = run(source, out, images, max_shard_samples=4)
        assert [shard.samples for shard in report.shards] == [4, 4, 1]
        names.append({path.name: path.read_bytes() for path in out.iterdir() if path.is_file()})
    assert names[0] == names[1]
    assert sorted(names[0]) == [*(f"train-00000{n}.tar" for n in range(3)), "train-manifest.json"]
    shard = str(tmp_path / "one/train-000001.tar")
    rule = IndexBuilder(LocalFetcher()).rule
    part = part_for(tmp_path / "one/index", LocalFetcher().head(shard), rule)
    assert Path(part.path).is_file(), "training would index it again"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../secret.png", "lies outside the image root"),
        ("../missing.png", "lies outside the image root"),
        ("sub/../../secret.png", "lies outside the image root"),
        ("/etc/hostname", "lies outside the image root"),
        ("link.png", "lies outside the image root"),
        ("missing.png", "No such file or directory; data.image_root of a recipe, or --images DIR"),
        ("pipe.png", "is no regular file"),
        ("sub", "is no regular file"),
        ("http://127.0.0.1/a.png", "is a URL"),
        ("file:///etc/hostname", "is a URL"),
        ("a\0.png", "cannot be read"),
        ("text.png", "no readable JPEG, PNG, WebP, GIF, BMP or TIFF header"),
        ("bomb.png", "pixels; the cap is"),
    ],
)
def test_images_that_are_refused(tmp_path: Path, images: Path, name: str, reason: str) -> None:
    (tmp_path / "secret.png").write_bytes(image_bytes(8, 8))
    (images / "link.png").symlink_to(tmp_path / "secret.png")
    os.mkfifo(images / "pipe.png")
    (images / "text.png").write_text("no picture")
    bomb = bytearray(image_bytes(8, 8))
    bomb[16:24] = (10_000).to_bytes(4, "big") * 2
    bomb[29:33] = zlib.crc32(bomb[12:29]).to_bytes(4, "big")
    (images / "bomb.png").write_bytes(bomb)
    bad = {"image": name, "conversations": [*LLAVA[1]["conversations"]]}
    source = tmp_path / "llava.json"
    source.write_text(json.dumps([LLAVA[1], bad, LLAVA[2]]))
    with pytest.raises(DataError, match=r"llava\.json, item 1: ") as caught:
        run(source, tmp_path / "out", images)
    assert reason in str(caught.value)
    assert not list((tmp_path / "out").glob("*.tar")), "a shard of a conversion that stopped"
    report = run(source, tmp_path / "skip", images, skip_bad=True)
    assert [(item.place[-6:], reason in item.reason) for item in report.skipped] == [
        ("item 1", True)
    ]
    assert [sample.key for sample in cooked(tmp_path / "skip")] == ["000000000", "000000002"]
    manifest = json.loads((tmp_path / "skip/train-manifest.json").read_text())
    assert manifest["samples"] == 2 and len(manifest["skipped"]) == 1


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ("no json", "is no JSON"),
        ("[1]", "is a list; expected an object"),
        ({"messages": []}, "'messages' is an empty list"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "has the role 'critic'"),
        (
            {"messages": [{"role": "user", "content": "x"}]},
            "none of the 1 turns is the assistant's",
        ),
        ({"conversations": TURNS, "image": "a.png"}, "2 <image> markers in the conversation"),
        (
            {"conversations": TURNS, "image": "a.png", "images": None},
            "markers in the conversation, but 1 image named",
        ),
        (
            {"conversations": [{"from": "human", "value": "<video> q"}, *TURNS[1:]]},
            "conversations[0] marks a video (<video>); this version trains on images, frames",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "<image><video> q"},
                    {"role": "assistant", "content": "A"},
                ],
                "images": ["a.png"],
            },
            "A literal <video> is text beside image parts",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "without a name, nor does the record",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "frames is missing"),
        (
            '{"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "draft", '
            '"value": "A"}]}',
            "the key 'value' stands twice in one object",
        ),
        (
            {"conversations": TURNS[1:], "videos": ["a.mp4"]},
            "the record has 'videos'; this version",
        ),
        ({"conversations": [{"from": "gpt", "value": "\ud800"}]}, "half of a surrogate pair"),
    ],
)
def test_records_that_are_refused(tmp_path: Path, images: Path, record: Any, reason: str) -> None:
    line = record if isinstance(record, str) else json.dumps(record)
    source = tmp_path / "bad.jsonl"
    source.write_text(line + "\n")
    with pytest.raises(DataError, match=r"bad\.jsonl, line 1: ") as caught:
        run(source, tmp_path / "out", images)
    assert reason in str(caught.value)
    with pytest.raises(EmptyDataError, match="none of 1 records can be used"):
        run(source, tmp_path / "out", images, skip_bad=True)


def test_a_source_of_no_layout_or_of_two_is_refused_before_anything_is_written(
    tmp_path: Path, images: Path
) -> None:
    source, out = tmp_path / "odd.jsonl", tmp_path / "out"
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    for record, reason in (
        ({"text": "x"}, r"odd\.jsonl, line 1 on: no layout fits .* the keys 'text'. Expected mess"),
        ({"messages": turns, "query": "Q", "response": "A"}, "--columns: messages or --columns: q"),
    ):
        source.write_text(json.dumps(record) + "\n")
        with pytest.raises(VlmpackError, match=reason) as caught:
            run(source, out, images, skip_bad=True)
        assert not isinstance(caught.value, RecipeError) and not out.exists()
    report = run(source, out, images, layout="query-response")
    assert report.layout == "query-response (ms-swift)" and report.unknown_keys == {"messages": 1}


@pytest.mark.parametrize("named", [False, True])
def test_a_table_of_another_layout(
    tmp_path: Path, images: Path, named: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its columns, or by those that the command names."""
    data = (images / "a.png").read_bytes()
    rows = [{"question": "Q", "answer": answer, "image": {"bytes": data, "path": None}, "width": 3}
            for answer in ("A", "B")]  # fmt: skip
    options = []
    if named:
        rows = [{"q": row.pop("question"), "messages": "x", **row} for row in rows]
        options = ["--columns", "question=q,layout=vqa"]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "vqa.parquet")
    command = ["data", "convert", str(tmp_path / "vqa.parquet"), str(tmp_path / "out/train")]
    app([*command, "--index-dir", str(tmp_path / "i"), *options], standalone_mode=False)
    samples = cooked(tmp_path / "out")
    assert [[turn.text for turn in sample.messages] for sample in samples] == [
        ["Q", "A"],
        ["Q", "B"],
    ]
    assert {sample.images for sample in samples} == {(data,)}
    said = capsys.readouterr()
    assert "read as vqa (VQA)" in said.out
    assert "'width' (2 records)" in said.err and ("'messages' (2 records" in said.err) == named


def test_a_conversion_that_stops_leaves_whole_shards_and_no_manifest(
    tmp_path: Path, images: Path
) -> None:
    source = tmp_path / "llava.json"
    bad = {"image": "no.png", "conversations": LLAVA[1]["conversations"]}
    source.write_text(json.dumps([*LLAVA, bad]))
    out = tmp_path / "out"
    with pytest.raises(DataError):
        run(source, out, images, max_shard_samples=2)
    assert [path.name for path in out.iterdir() if path.is_file()] == ["train-000000.tar"]
    assert len(cooked(out)) == 2
    with pytest.raises(VlmpackError, match="unfinished conversion"):
        run(source, out, images)
    source.write_text(json.dumps(LLAVA))
    run(source, out, images, overwrite=True)
    assert len(cooked(out)) == 3 and (out / "train-manifest.json").is_file()


def test_a_manifest_of_others_is_not_written_over(tmp_path: Path, images: Path) -> None:
    source, out = tmp_path / "llava.json", tmp_path / "out"
    source.write_text(json.dumps(LLAVA))
    out.mkdir()
    (out / "train-manifest.json").write_text("mine")
    with pytest.raises(VlmpackError, match="holds 1 file named train-"):
        run(source, out, images)
    assert (out / "train-manifest.json").read_text() == "mine"


def test_overwriting_leaves_the_files_of_others(tmp_path: Path, images: Path) -> None:
    source, out = tmp_path / "llava.json", tmp_path / "out"
    source.write_text(json.dumps(LLAVA))
    out.mkdir()
    others = ["train-2024-backup.tar", "train-2-000000.tar", "train-00001.tar", "old-000000.tar",
              ".train-2-000000.tar.partial", "train-000000.tar.bak"]  # fmt: skip
    ours = ["train-000007.tar", "train-1000000.tar", ".train-000008.tar.partial"]
    for name in (*others, *ours):
        (out / name).write_text(name)
    with pytest.raises(VlmpackError, match="holds 3 files named train-"):
        run(source, out, images)
    run(source, out, images, overwrite=True)
    assert {name: (out / name).read_text() for name in others} == {n: n for n in others}
    left = {path.name for path in out.iterdir() if path.is_file()} - set(others)
    assert left == {"train-000000.tar", "train-manifest.json"}


def test_a_refused_url_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root of a source in the working folder was said to be `.`."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        ImageRoot(str(Path())).load("http://127.0.0.1/a.png")
    assert f"is a URL; only files below {tmp_path.resolve()} are read" in caught.value.reason


def test_shards_are_byte_for_byte_webdatasets(tmp_path: Path, images: Path) -> None:
    source = tmp_path / "llava.json"
    source.write_text(json.dumps(LLAVA))
    report = run(source, tmp_path / "out", images, max_shard_samples=2)
    assert [shard.samples for shard in report.shards] == [2, 1]
    fixed = {"mtime": 0, "user": "", "group": "", "mode": 0o644, "encoder": False}
    for shard in report.shards:
        ours = tmp_path / "out" / shard.name
        with ours.open("rb") as stream:
            size = ours.stat().st_size
            found = read_members(stream, size, shard=str(ours), max_member_bytes=1 << 30)
            samples = list(group_members(found, shard=str(ours), caps=CAPS))
        with wds.TarWriter(str(tmp_path / shard.name), **fixed) as writer:
            for raw in samples:
                members = {field: raw.payload(field) for field in reversed(raw.fields)}
                writer.write({"__key__": raw.key} | members)
        assert ours.read_bytes() == (tmp_path / shard.name).read_bytes()


def test_branches_are_carried_over(tmp_path: Path, images: Path) -> None:
    asked = {"from": "human", "value": "<image>\nWhich?"}
    record = {"image": "a.png", "conversations": [asked]}
    record["branches"] = [[{"from": "gpt", "value": "A cat."}], "A dog."]
    (tmp_path / "b.jsonl").write_text(json.dumps(record) + "\n")
    run(tmp_path / "b.jsonl", tmp_path / "out", images)
    [path] = (tmp_path / "out").glob("*.tar")
    with path.open("rb") as stream:
        size = path.stat().st_size
        members = read_members(stream, size, shard=str(path), max_member_bytes=1 << 30)
        [raw] = group_members(members, shard=str(path), caps=CAPS)
    samples = [cook(raw, number) for number in range(2)]
    assert [sample.messages[-1].text for sample in samples] == ["A cat.", "A dog."]
    assert all(sample.images == ((images / "a.png").read_bytes(),) for sample in samples)


def test_a_sample_that_no_reader_takes_is_a_bad_record(tmp_path: Path, images: Path) -> None:
    """Too many bytes together, or in its conversation: a conversion stopped at a shard of it."""
    source = tmp_path / "llava.json"
    long = {"id": "long", "conversations": [TURNS[2], {"from": "gpt", "value": "Yes. " * 260}]}
    source.write_text(json.dumps([LLAVA[2], LLAVA[1], long]))
    size = -(-len((images / "a.png").read_bytes()) // 512) * 512
    for caps, words, left in (
        (SampleCaps(max_sample_bytes=1535 + size), "2 members and .* bytes; at most", [0, 2]),
        (SampleCaps(max_json_bytes=1000), "the conversation would have .* bytes; at most", [0, 1]),
    ):
        with pytest.raises(DataError, match=words) as told:
            run(source, tmp_path / "none", images, caps=caps, overwrite=True)
        assert told.value.error_class == "integrity"
        report = run(source, tmp_path / "out", images, caps=caps, overwrite=True, skip_bad=True)
        assert len(report.skipped) == 1 and report.samples == 2
        assert [int(sample.key) for sample in cooked(tmp_path / "out")] == left
