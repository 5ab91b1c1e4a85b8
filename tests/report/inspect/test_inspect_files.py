"""The page of `vlmpack inspect` shows the row as it is, to scale, and needs nothing beside it."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from markupsafe import escape
from support.inspected import HOSTILE, HOSTILE_KEY, make_settings
from support.recipes import changed, write_recipe
from support.shards import ROOT
from typer.testing import CliRunner, Result

from vlmpack.cli.app import app
from vlmpack.errors import VlmpackError
from vlmpack.packing import collate
from vlmpack.proof.rows.checks import check_row
from vlmpack.proof.rows.opening import ShownRow
from vlmpack.proof.rows.row import cut_row
from vlmpack.report.document import written_out
from vlmpack.report.inspect.lanes import (
    GUTTER,
    IMAGE_TOKENS,
    LOSS,
    PAD,
    RANK_HEIGHT,
    SAMPLE_HEIGHT,
    STRIP_HEIGHT,
    Canvas,
    Rect,
    Text,
    Thumb,
    draw_lanes,
    fitted,
    rank_color,
    row_lines,
    segment_color,
    svg,
    text_width,
)
from vlmpack.report.inspect.page import COLUMNS, LAYOUTS, render_page, table_rows, write_row

WIDTHS = [width for _, width in LAYOUTS]


@pytest.fixture
def row(opened_row: Any) -> ShownRow:
    return opened_row[0]


def drawn(row: ShownRow, width: float) -> Canvas:
    canvas = Canvas(width)
    draw_lanes(canvas, row)
    return canvas


def boxes(canvas: Canvas, height: float, fill: str) -> list[Rect]:
    return [
        s
        for s in canvas.shapes
        if isinstance(s, Rect) and s.height == height and s.fill == fill and s.hatch is None
    ]


def slots(row: ShownRow, width: float, shapes: list[Rect]) -> list[int]:
    """The slots that some boxes of one lane cover; each line of the row has a lane of its own."""
    canvas, lines = drawn(row, width), row_lines(row, width)
    axis = [s.y for s in canvas.shapes if isinstance(s, Text) and s.text == "slot"]
    assert len(axis) == len(lines)
    found = []
    for shape in shapes:
        line = lines[max(k for k, y in enumerate(axis) if y < shape.y)]
        first = line.start + (shape.x - line.left) / line.scale
        last = first + shape.width / line.scale
        assert abs(first - round(first)) < 0.01 and abs(last - round(last)) < 0.01
        found += range(round(first), round(last))
    return sorted(found)


@pytest.mark.parametrize("width", WIDTHS)
def test_everything_is_drawn_to_scale(row: ShownRow, width: float) -> None:
    """The slots of each colour are those that the tensors say; every image is there once."""
    canvas = drawn(row, width)
    samples = [s for s in row.segments if s.sample is not None]
    assert len(samples) >= 4
    for segment in samples:
        own = [
            s
            for s in canvas.shapes
            if isinstance(s, Rect) and s.tip.startswith(f"{segment.number}: {segment.name},")
        ]
        assert {s.fill for s in own} == {segment_color(segment.number)[0]}
        assert slots(row, width, own) == list(range(segment.start, segment.start + segment.length))
    learnt = (row.batch.labels[0] != -100).nonzero().flatten().tolist()
    assert slots(row, width, boxes(canvas, STRIP_HEIGHT, LOSS)) == learnt
    placeholders = row.batch.media_positions.tolist()
    assert slots(row, width, boxes(canvas, STRIP_HEIGHT, IMAGE_TOKENS)) == placeholders
    for part in row.slices:
        assert not isinstance(part, str)
        held = boxes(canvas, RANK_HEIGHT, rank_color(part.rank, 2)[0])
        assert slots(row, width, held) == sorted(part.row_index.tolist())
    thumbs = [s for s in canvas.shapes if isinstance(s, Thumb)]
    assert sorted(s.image for s in thumbs) == list(range(len(thumbs)))
    assert len(thumbs) == row.batch.media.num_images > 2  # type: ignore[union-attr]
    gaps = [s for s in canvas.shapes if isinstance(s, Rect) and s.tip.startswith("gap behind")]
    assert {s.fill for s in gaps} == {PAD} and all(s.width >= 2 and s.hatch for s in gaps)
    assert len({s.tip for s in gaps}) == sum(s.slots > s.length > 0 for s in row.segments)


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overlaps_or_leaves_the_page(row: ShownRow, width: float) -> None:
    """Labels lie in their own box, images side by side; all inside the drawing."""
    canvas = drawn(row, width)
    bars = [s for s in canvas.shapes if isinstance(s, Rect) and s.height == SAMPLE_HEIGHT]
    labels = [s for s in canvas.shapes if isinstance(s, Text) and s.x > GUTTER and s.size == 11]
    assert len(labels) >= len(row.alone)
    for label in labels:
        box = next(b for b in bars if b.x <= label.x <= b.x + b.width and b.y < label.y < b.y + 23)
        assert label.x + text_width(label.text, 11) <= box.x + box.width
    thumbs = [s for s in canvas.shapes if isinstance(s, Thumb)]
    for left, right in pairwise(thumbs):
        in_one_line = abs(left.y + left.height - right.y - right.height) < 1
        assert not in_one_line or left.x + left.width <= right.x + 0.01
    for shape in canvas.shapes:
        if isinstance(shape, (Rect, Thumb)):
            assert shape.x >= 0 and shape.x + shape.width <= width
            assert shape.y >= 0 and shape.y + shape.height <= canvas.height


class Page(HTMLParser):
    """Tags, addresses and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_and_hostile_text_is_only_text(opened_row: Any) -> None:
    row, _, encoder = opened_row
    assert HOSTILE_KEY in row.batch.keys
    html = render_page(row, check_row(row), encoder, "<b>recipe</b>")
    page = Page(html)
    assert "script" not in page.tags and "b" in page.tags
    assert HOSTILE.replace("\u202e", "\\u202e").replace("\x01", "\\u0001") in page.text
    assert "\u202e" not in html and "<b>recipe" not in html
    images = row.batch.media.num_images
    stored = [a for a in page.addresses if a.startswith("data:image/png;base64,")]
    assert len(stored) == images == page.tags.count("symbol")
    assert {a for a in page.addresses if not a.startswith("data:")} == {
        f"#image-{number}" for number in range(images)
    }
    assert "http" not in re.sub(r"data:[^\"]*", "", html) and "url(http" not in html
    assert page.tags.count("tr") == len(row.segments) + 1
    assert page.text.count("\u2713") == len(check_row(row)) and "\u2717" not in page.text
    for sample in row.shown.samples:
        for run in sample.runs:
            if run.kind == "learnt":
                assert str(escape(written_out(run.text.split("<|")[0]))) in html
    assert page.tags.count("mark") == 1 + sum(
        run.kind == "learnt" for sample in row.shown.samples for run in sample.runs
    )


def test_a_broken_row_has_a_cross(opened_row: Any) -> None:
    row, _, encoder = opened_row
    mask = ~row.batch.loss_mask
    broken = replace(row, batch=replace(row.batch, loss_mask=mask))
    checks = check_row(broken)
    assert [check.fails for check in checks].count(True) == 1
    assert Page(render_page(broken, checks, encoder, "r")).text.count("\u2717") == 1


def test_the_table_is_the_tensors(row: ShownRow) -> None:
    physical = row.batch.cu_seqlens_padded.tolist()  # type: ignore[union-attr]
    logical = row.batch.cu_seqlens.tolist()
    for number, (cells, alone) in enumerate(zip(table_rows(row), row.alone, strict=False)):
        by_name = dict(zip(COLUMNS, cells, strict=True))
        assert by_name["key"] == alone.key and by_name["shard"] == "train-000000.tar"
        assert by_name["tokens"] == str(len(alone.input_ids))
        assert by_name["image"] == str(len(alone.media_positions))
        assert by_name["loss"] == str(int((alone.labels != -100).sum()))
        assert by_name["logical"] == f"{logical[number]}-{logical[number + 1] - 1}"
        assert by_name["physical"] == f"{physical[number]}-{physical[number + 1] - 1}"
        low = alone.position_ids.min(1).values.tolist()
        high = alone.position_ids.max(1).values.tolist()
        ranges = {f"{a}-{b}" for a, b in zip(low, high, strict=True)}
        assert set(by_name["positions"].split(", ")) == ranges


def test_the_page_is_replaced_whole_or_not_at_all(
    opened_row: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, _, encoder = opened_row
    page = tmp_path / "out" / "row.html"
    write_row(row, [], encoder, page, source="r")
    before = page.read_bytes()

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(VlmpackError, match="cannot be written: No space left"):
        write_row(row, [], encoder, page, source="other")
    assert page.read_bytes() == before


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def test_the_command_writes_the_page_and_fails_on_a_cross(
    inspect_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model folder has no weights; a collator that rolls the labels ends in exit code 1."""
    pack_rows = collate.pack_rows

    def rolled(ids: Any, labels: Any, *rest: Any, **named: Any) -> Any:
        return pack_rows(ids, [torch.roll(item, 1) for item in labels], *rest, **named)

    monkeypatch.setattr(collate, "pack_rows", rolled)
    bad = invoke(inspect_recipe, "--batch", 0, "--row", 1, "-o", tmp_path / "b")
    assert bad.exit_code == 1
    assert "\u2717 labels and loss mask: " in bad.output
    page = Page((tmp_path / "b" / "batch-0-row-1.html").read_text())
    assert page.text.count("\u2717") == bad.output.count("\u2717") >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--row", 999), r"--row 999: the first epoch has \d+ rows, counted from 0"),
        (("--batch", 0, "--row", 2), "--row 2: batch 0 has 2 rows"),
        (("--key", "nobody"), "no sample 'nobody'"),
        ((), "expected one of --row N and --key KEY"),
        (("--key", "x", "--row", 1), "expected one of --row N and --key KEY"),
        (("--row", 1, "--shard", "x"), "--shard goes with --key"),
        (("--row", 0, "--cp", 3, "packing.alignment=8"), "--cp 3: packing.alignment: 8 is not"),
    ],
)
def test_what_is_not_there_is_named(inspect_recipe: Path, arguments: Any, message: str) -> None:
    result = invoke(inspect_recipe, *arguments)
    assert result.exit_code != 0 and re.search(message, str(result.exception))


def test_a_folder_that_is_a_file_is_named(opened_row: Any, tmp_path: Path) -> None:
    row, _, encoder = opened_row
    (tmp_path / "file").write_text("")
    with pytest.raises(VlmpackError, match="file cannot be written"):
        write_row(row, [], encoder, tmp_path / "file" / "x.html", source="r")


def test_text_is_cut_to_its_room_and_its_strange_characters_show() -> None:
    assert fitted("short", 11, 100) == "short"
    cut = fitted("W" * 200, 11, 100)
    assert cut.endswith("...") and 80 < text_width(cut, 11) <= 100
    assert fitted("WWWWWW", 11, 4) == ""
    assert written_out("a<b\u202e\x00\n\u4f60") == "a<b\\u202e\\u0000\n\u4f60"


@pytest.mark.parametrize("size", [1, 2, 4, 7, 16, 64])
def test_ranks_have_colours_of_their_own(size: int) -> None:
    colours = [rank_color(rank, size)[0] for rank in range(size)]
    assert len(set(colours)) == size
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)


def test_a_long_row_of_many_samples_stays_legible(row: ShownRow) -> None:
    """30 copies of the samples: numbers are drawn in each, and the drawing stays small."""
    shown, batch = row.shown, row.batch
    count = -(-30 // len(row.alone))
    samples = tuple(
        replace(sample, start=sample.start + copy * row.num_slots)
        for copy in range(count)
        for sample in shown.samples
    )
    starts = [copy * row.num_slots + p for copy in range(count) for p in row.boundaries[:-1]]
    cu = torch.tensor([*starts, count * row.num_slots])
    many = replace(
        batch,
        input_ids=batch.input_ids.repeat(1, count),
        labels=batch.labels.repeat(1, count),
        loss_mask=batch.loss_mask.repeat(1, count),
        position_ids=batch.position_ids.repeat(1, 1, count),
        cu_seqlens=cu,
        cu_seqlens_padded=cu,
        segment_lengths=batch.segment_lengths * count,
        lengths=batch.lengths * count,
        keys=batch.keys * count,
    )
    long = replace(row, shown=replace(shown, samples=samples), batch=many, slices=cut_row(many, 2))
    for width, tallest in ((1180.0, 1000), (368.0, 3100)):
        canvas = drawn(long, width)
        numbers = {s.text.split(" ")[0] for s in canvas.shapes if isinstance(s, Text)}
        assert numbers >= {str(number) for number in range(count * len(row.alone))}
        assert canvas.height < tallest
        assert len(svg(canvas, [(9, 9)] * 99, name="x", label="y")) < 300_000


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "in_batch", "online", "text"])
def test_every_mode_shows_a_right_row(tmp_path: Path, mode: str) -> None:
    values = make_settings(tmp_path)
    if mode == "text":
        values = changed(
            values,
            model__path=str(ROOT / "assets/tiny-qwen3"),
            data__train=str(ROOT / "assets/text/train-000000.tar"),
            training__seq_length=1024,
            packing__max_tokens=1024,
        )
    elif mode != "online":
        packing = {"packing__mode": mode, "packing__max_tokens": None}
        values = changed(values, **packing, training__micro_batch_size=2)
    result = invoke(write_recipe(tmp_path / "r.json", values), "--row", 1, "-o", tmp_path)
    assert result.exit_code == 0, result.output
    assert "\u2717" not in result.output and (tmp_path / "row-1.html").is_file()
    page = (tmp_path / "row-1.html").read_text()
    assert page.count("<symbol") == (0 if mode == "text" else page.count("data:image/png"))
    assert ("pixels in order" in page) == (mode != "text")
    assert ("<b>budget</b>" in page) == (mode in ("online", "text"))
    assert page.count("<section") >= 2 and (mode != "none" or "gap behind" in page)


@pytest.mark.slow
def test_saved_packs_are_shown_as_the_online_plan(inspect_recipe: Path, tmp_path: Path) -> None:
    """The page of a pack, its tokens and images read from the saved folder, is the online run's."""
    packs = tmp_path / "packs"
    arguments = ["pack", str(inspect_recipe), "-o", str(packs), "--kind", "shards"]
    packed = CliRunner().invoke(app, [*arguments, "--processes", "1"])
    assert packed.exit_code == 0, packed.output
    online = invoke(inspect_recipe, "--row", 1, "-o", tmp_path / "on")
    offline = invoke(
        *(inspect_recipe, "--row", 1, "-o", tmp_path / "off", "packing.mode=offline"),
        f"packing.path={packs}",
    )
    assert online.exit_code == 0 and offline.exit_code == 0, offline.output
    pages = [(tmp_path / name / "row-1.html").read_text() for name in ("on", "off")]
    bodies = [re.sub(r"mode \w+|; (user|assistant)(, \w+)*", "", page) for page in pages]
    assert bodies[0] == bodies[1] and len(bodies[0]) > 10_000


def test_a_bin_without_a_sample_left_is_a_cross(inspect_recipe: Path, tmp_path: Path) -> None:
    """Every pack is damaged: one reason for all samples of the bin, and exit code 1."""
    packs = tmp_path / "packs"
    arguments = ["pack", str(inspect_recipe), "-o", str(packs), "--kind", "tokens"]
    assert CliRunner().invoke(app, [*arguments, "--processes", "1"]).exit_code == 0
    for tar in packs.glob("*.tar"):
        data = bytearray(tar.read_bytes())
        data[512::512] = bytes(255 - value for value in data[512::512])
        tar.write_bytes(data)
    asked = ("--row", 1, "-o", tmp_path / "i", "packing.mode=offline", f"packing.path={packs}")
    shown = invoke(inspect_recipe, *asked)
    assert shown.exit_code == 1, shown.output
    assert "\u2717 samples: none of the" in shown.output
    assert shown.output.count("left out: ") == 1
    assert re.search(r"left out: \S+ and \d+ more \(\S*packs-000000.tar\)", shown.output)
