"""What is converted comes by the readers of training: every kind of file, and folders of splits."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.record_data import KINDS, save_to_disk, write_records, write_same_shards
from support.shard_fakes import image_bytes, open_data
from support.shards import ROOT

from vlmpack.convert import ConvertReport, ConvertSettings, convert, open_records
from vlmpack.data.files.records import FORMATS, Record
from vlmpack.data.shards.samples import cook_text
from vlmpack.encode import Encoder
from vlmpack.errors import DataError, VlmpackError
from vlmpack.recipe.sources import Source

NUMBERS = range(14)
TINY_QWEN3_5 = ROOT / "assets/tiny-qwen3_5"


def converted(source: Path, out: Path, images: Path, split: str | None = None) -> ConvertReport:
    settings = ConvertSettings(folder=out, image_root=images, index_dir=out / "i")
    return convert(open_records(source, "auto", split), settings)


def content(folder: Path) -> dict[str, bytes]:
    """Members of the shards by name."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for entry in tar:
                found[entry.name] = tar.extractfile(entry).read()  # type: ignore[union-attr]
    return found


@pytest.mark.cases(quick=("json", "parquet of bytes"), slow="csv")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_becomes_the_same_shards(tmp_path: Path, kind: str) -> None:
    shards = write_same_shards(tmp_path / "wanted", NUMBERS)
    source = write_records(tmp_path / "files", kind, NUMBERS)
    report = converted(Path(source), tmp_path / "out", tmp_path / "files")
    assert report.samples == len(NUMBERS)
    found, wanted = content(tmp_path / "out"), content(Path(shards).parent)
    assert found == wanted and sum(name.endswith(".png") for name in wanted) == 13


def test_a_split_of_a_saved_data_set_is_chosen(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    folder = tmp_path / "set"
    for name, count in (("train", 3), ("test", 2)):
        save_to_disk(folder / name, pa.Table.from_pylist([{"messages": turns}] * count))
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    with pytest.raises(VlmpackError, match="holds the splits test, train; choose one by --split"):
        open_records(folder)
    with pytest.raises(VlmpackError, match="no split 'val'; it holds test, train"):
        open_records(folder, split="val")
    for name, count in (("train", 3), ("test", 2)):
        assert converted(folder, tmp_path / name, tmp_path, name).samples == count
    with pytest.raises(VlmpackError, match="is one split of a data set by itself"):
        open_records(folder / "train", split="train")
    (folder / "train/state.json").write_text('{"_data_files": [{"filename": "gone.arrow"}]}')
    with pytest.raises(VlmpackError, match=r"lacks gone\.arrow"):
        open_records(folder, split="train")


def test_formats_are_named_for_files_whose_names_do_not_say_it(tmp_path: Path) -> None:
    assert FORMATS == ("auto", "jsonl", "llava", "csv", "tsv", "hf")
    texts = {
        "jsonl": '{"question": "Q", "answer": "A"}\n',
        "llava": '[{"question": "Q", "answer": "A"}]',
        "csv": "question,answer\nQ,A\n",
        "tsv": "question\tanswer\nQ\tA\n",
    }
    source = tmp_path / "file.txt"
    for form, text in texts.items():
        source.write_text(text)
        [record] = open_records(source, form)
        assert record.value == {"question": "Q", "answer": "A"}
    with pytest.raises(VlmpackError, match="the name does not say what it is"):
        open_records(source)
    with pytest.raises(VlmpackError, match=r"is a folder; expected one \.csv file"):
        open_records(tmp_path, "csv")
    with pytest.raises(VlmpackError, match="--split x: only a folder of a data set has splits"):
        open_records(source, "jsonl", "x")


def test_a_bad_record_is_named_by_its_line_blank_ones_counted(tmp_path: Path) -> None:
    source = tmp_path / "x.jsonl"
    source.write_text('{"a": 1}\n\n\n{oops}\n[1]\n{"a": 2}\n')
    found: list[Record] = list(open_records(source))
    assert [record.place.rpartition(", ")[2] for record in found] == [
        "line 1",
        "line 4",
        "line 5",
        "line 6",
    ]
    assert "is no JSON" in str(found[1].fault) and "is a list; expected" in str(found[2].fault)
    source.write_text('{"a": 1}\n\n{"a": ')
    with pytest.raises(DataError, match="ends inside of line 3"):
        list(open_records(source))


def test_large_lines_and_row_groups_are_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training refuses them, and says to convert."""
    monkeypatch.setattr("vlmpack.data.files.tables.MAX_GROUP_BYTES", 10)
    for kind in ("parquet of bytes", "arrow"):
        source = Path(write_records(tmp_path / kind, kind, NUMBERS))
        assert len(list(open_records(source))) == len(NUMBERS)
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"a": "x" * (17 << 20)}) + "\n")
    [record] = open_records(long)
    assert record.value is not None


COCO: dict[str, Any] = {
    "images": [
        {"id": 9, "file_name": "in/b.png", "width": 40, "height": 30},
        {"id": 3, "file_name": "a.png", "width": 40, "height": 30},
    ],
    "categories": [{"id": 1, "name": "cat"}, {"id": 5, "name": "dog"}],
    "annotations": [
        {"image_id": 3, "bbox": [0.1, 2, 0.2, 8.5], "category_id": 5, "iscrowd": 0, "id": 1},
        {"image_id": 9, "bbox": [10, 0, 30, 30], "category_id": 1, "iscrowd": 0, "id": 2},
        {"image_id": 3, "bbox": [1, 1, 38, 28], "category_id": 1, "iscrowd": 0, "id": 3},
        {"image_id": 9, "bbox": [0, 0, 5, 5], "category_id": 1, "iscrowd": 1, "id": 4},
    ],
}


def coco_folder(folder: Path, content: object = COCO) -> Path:
    (folder / "in").mkdir(exist_ok=True)
    for name in ("in/b.png", "a.png"):
        (folder / name).write_bytes(image_bytes(40, 30))
    path = folder / "instances.json"
    path.write_text(json.dumps(content))
    return path


def test_a_coco_file_becomes_a_sample_for_each_image(tmp_path: Path) -> None:
    """Boxes are corners, labels are the categories' names, and a crowd is left out."""
    source = coco_folder(tmp_path)
    settings = ConvertSettings(folder=tmp_path / "out", image_root=tmp_path, index_dir=tmp_path)
    report = convert(open_records(source, question="Find them."), settings)
    assert report.samples == 2 and not report.unknown_keys
    found = content(tmp_path / "out")
    said = [json.loads(data) for name, data in sorted(found.items()) if name.endswith("json")]
    boxes = [{"ref": ["cat"], "bbox": [[10, 0, 40, 30]]}]
    boxes += [{"ref": ["dog", "cat"], "bbox": [[0.1, 2, 0.3, 10.5], [1, 1, 39, 29]]}]
    assert [each["objects"] for each in said] == boxes
    assert [each["messages"][0]["content"][-1]["text"] for each in said] == ["Find them."] * 2
    [sample, _] = [
        cook_text("k", "s", json.dumps(each).encode(), ("json", "0.png")) for each in said
    ]
    text = Encoder(TINY_QWEN3_5).written(sample.sample, [(40, 30)]).messages[-1].text
    assert '{"bbox_2d": [250, 0, 1000, 1000], "label": "cat"}' in text


def test_an_image_without_boxes_is_a_bad_record(tmp_path: Path) -> None:
    source = coco_folder(tmp_path, COCO | {"annotations": COCO["annotations"][:1]})
    with pytest.raises(DataError, match="image 9: has no box, or regions of iscrowd alone"):
        converted(source, tmp_path / "out", tmp_path)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"categories": []},
            r"image 9: annotations\[1\] has category_id 1; expected an id of 'categories' \(none\)",
        ),
        ({"categories": [{}]}, "no COCO file of boxes: categories: KeyError"),
        ({"annotations": [{"image_id": 3, "bbox": [1, 2], "category_id": 1}]}, "is no COCO file"),
        (
            {"annotations": [*COCO["annotations"][:2], {"image_id": 3, "category_id": 1}]},
            r"annotations\[2\]: KeyError\('bbox'\)",
        ),
        (
            {"images": [*COCO["images"], {"id": 5}]},
            r"of boxes: images\[2\]: KeyError\('file_name'\)",
        ),
        (
            {"images": [*COCO["images"], {"id": 9, "file_name": "a.png"}]},
            r"images\[2\]: ValueError\('a second image of the id 9'\)",
        ),
        ({"annotations": "x"}, "is no COCO file"),
    ],
)
def test_a_damaged_coco_file_is_named(tmp_path: Path, changes: Any, why: str) -> None:
    with pytest.raises(DataError, match=why):
        converted(coco_folder(tmp_path, COCO | changes), tmp_path / "out", tmp_path)


def test_a_box_beyond_its_image_is_a_bad_record(tmp_path: Path) -> None:
    boxes = [[10, 0, 30, 31], [-1, 2, 8, 8]]
    other = [{**a, "bbox": b} for a, b in zip(COCO["annotations"], boxes, strict=False)]
    source = coco_folder(tmp_path, COCO | {"annotations": other})
    said = [str(record.fault) for record in open_records(source)]
    assert "has a box from -1, 2 to 7, 10, beyond its 40 x 30 pixels" in said[0]
    assert "has a box from 10, 0 to 40, 31, beyond its 40 x 30 pixels" in said[1]


def test_boxes_of_an_image_of_another_size_are_refused(tmp_path: Path) -> None:
    """The file was resized, or turns by its EXIF, after the boxes were drawn."""
    other = [{**COCO["images"][0], "width": 41, "height": 30}, COCO["images"][1]]
    source = coco_folder(tmp_path, COCO | {"images": other})
    why = r"image 9: its boxes are on an image of 41 x 30 pixels, and 'in/b.png' has 40 x 30"
    with pytest.raises(DataError, match=why):
        converted(source, tmp_path / "out", tmp_path)
    unsaid = [{"id": each["id"], "file_name": each["file_name"]} for each in COCO["images"]]
    source = coco_folder(tmp_path, COCO | {"images": unsaid})
    assert converted(source, tmp_path / "out", tmp_path).samples == 2


def test_boxes_of_images_that_are_not_listed_are_named(tmp_path: Path) -> None:
    far = {"image_id": 77, "bbox": [0, 0, 5, 5], "category_id": 1}
    source = coco_folder(tmp_path, COCO | {"annotations": [far, far, *COCO["annotations"]]})
    *_, last = open_records(source)
    assert last.place.endswith("image 77") and last.value is None
    with pytest.raises(DataError, match=r"image 77: .*has 2 boxes, and 'images' does not list it"):
        converted(source, tmp_path / "out", tmp_path)
    settings = ConvertSettings(
        folder=tmp_path / "o", image_root=tmp_path, index_dir=tmp_path, skip_bad=True
    )
    report = convert(open_records(source), settings)
    assert report.samples == 2 and len(report.skipped) == 1


def test_a_question_is_for_coco_files_alone(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(VlmpackError, match=r"--question: .* is no COCO file"):
        open_records(tmp_path / "a.json", question="Where?")
    path = coco_folder(tmp_path)
    assert len(list(open_records(path))) == 2
    with pytest.raises(
        DataError, match=r"an object; expected a list .* COCO: vlmpack data convert"
    ):
        open_data("", tmp_path / "i", sources=(Source(name="d", path=str(path)),))
