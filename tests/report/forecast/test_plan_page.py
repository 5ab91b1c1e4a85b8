"""The plan as a page for the terminal, as HTML and as JSON."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support.made_plans import large_plan, source

from vlmpack.cli.plan import print_sections
from vlmpack.forecast.figures import ReferenceFigures, RunPlan
from vlmpack.report.document import compact, share
from vlmpack.report.forecast import as_json, sections, write_page
from vlmpack.words import counted, sized


@pytest.fixture
def plan() -> RunPlan:
    return large_plan()


@pytest.mark.parametrize("is_kept", [True, False])
def test_pairs_are_called_pairs(plan: RunPlan, is_kept: bool) -> None:
    reference = ReferenceFigures(
        num_pairs=1000, num_tokens=2_000_000, num_patches=3000, steps=41_152.0, num_bytes=24_000,
        is_kept=is_kept,
    )  # fmt: skip
    batch = replace(plan.batch, counts_rows=False, keeping_size=None, scaled_learning_rate=None)
    pairs = replace(plan, unit="pair", reference=reference, batch=batch)
    out = io.StringIO()
    print_sections(sections(pairs), Console(file=out, width=80, highlight=False))
    words = re.sub(r"\s+", " ", out.getvalue())
    assert not re.search(r"\bsamples?\b", words)
    assert "1024 / 12.30 = 83" in words
    assert "exactly 1024 pairs" in words
    assert "1,000 pairs (2,000,000 tokens, 3,000 patches), about as long as 41,152" in words
    assert ("on disk 0.024 MB" in words) == is_kept
    assert ("adapters off in each step" in words) != is_kept
    assert "CUDA graphs" not in words, "rows of pairs have no fixed shape"


def test_rows_of_a_step_wait_for_no_sample_of_another(plan: RunPlan) -> None:
    waits, ends = "64 samples wait", "no sample of the step is left that fits"
    follows = "the next sample did not fit"
    batch = replace(plan, sequences=replace(plan.sequences, mode="own, batch"))
    kept = replace(plan, sequences=replace(plan.sequences, mode="own, stream", waiting=1))
    cases = ((plan, waits, ends), (batch, ends, waits), (kept, follows, "wait;"))
    for found, has, lacks in cases:
        out = io.StringIO()
        print_sections(sections(found), Console(file=out, width=80, highlight=False))
        words = re.sub(r"\s+", " ", out.getvalue())
        assert has in words and lacks not in words


@pytest.mark.parametrize("width", [80, 120])
def test_the_page_fits_the_terminal(plan: RunPlan, width: int) -> None:
    out = io.StringIO()
    print_sections(sections(plan), Console(file=out, width=width, highlight=False))
    lines = out.getvalue().splitlines()
    assert len(lines) > 60
    assert max(map(len, lines)) <= width
    assert "\u2026" not in out.getvalue(), "a figure was cut"
    words = re.sub(r"\s+", " ", out.getvalue())
    for text in ("online, stream", "370,368 steps", "1.160", "counts rows", "2205.10287",
                 "42.5 GiB", "12,345,678 trained on that rank",
                 "fill 90% of the 80.0 GiB of an assumed GPU"):  # fmt: skip
        assert text in words, text
    (none, *fitting) = [line.split() for line in lines if "GiB  all but matrix" in line]
    assert none[2:4] == ["none", "0"] and fitting[1][:5] == [
        "*",
        "4",
        "512",
        "1,422,272",
        "5,689,088",
    ]
    assert sum(line.startswith("*") for line in lines) == 7  # what the recipe has, and the legend
    assert "2 more sources" in words


def test_the_hint_for_a_batch_in_rows(plan: RunPlan) -> None:
    """80 rows of 12.3 samples are 984, not 1,024; 83 are 1,021; other modes need no hint."""

    def lines(keeping: int | None) -> str:
        batch = replace(plan.batch, keeping_size=keeping)
        found = sections(replace(plan, batch=batch))
        return " ".join(next(s for s in found if s.title == "Effective batch").lines)

    assert "a step trains about 12,595 samples, not 1,024; packing.scope: batch" in lines(80)
    said = "training.global_batch_size=80 about 984, a multiple of the 16 model copies"
    assert said in lines(80)
    assert "global_batch_size=83 about 1,021, " in lines(83)
    assert "global_batch_size=" not in lines(1024)
    assert "counts rows" not in lines(None) and "learning rate" in lines(None)


def test_html_has_the_pictures_and_escapes_names(plan: RunPlan, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    write_page(plan, page, title="recipes/<x>.yaml")
    text = page.read_text()
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(set(ids)) == len(ids) > 40, "a name in one drawing is that of no other"
    assert set(re.findall(r'(?:url\(|href=")#([^)"]+)', text)) <= set(ids)
    assert "recipes/&lt;x&gt;.yaml" in text
    for raw in ("<x>", "<b>", "<m>", "k<1>", "<too many>"):
        assert raw not in text
    assert "source of documents 13" in text, "all sources are in the page"
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)", text), "needs nothing beside it"
    assert text.count("<figure>") == text.count('<svg viewBox="') == 4
    assert len(re.findall("fill: var\\(--blue\\)|fill: #2563a8", text)) > 20
    assert "#2563a8" not in text.split("</style>")[1], "a colour of the palette is there by name"


def test_without_balance_there_is_no_picture_of_it(plan: RunPlan, tmp_path: Path) -> None:
    bare = replace(plan, imbalance=(), memory=None, left_out=(), sources=plan.sources[:1])
    write_page(bare, tmp_path / "p.html", title="r")
    assert (tmp_path / "p.html").read_text().count("<figure>") == 3
    titles = [section.title for section in sections(bare)]
    assert "Memory of a rank" in titles
    assert any("no estimate: the sizes of the model are not known" in line for line in _lines(bare))
    assert not any("computes in float32" in line for line in _lines(bare))
    assert any("computes in float32" in line for line in _lines(plan))
    assert any("nothing to share out" in line for s in sections(bare) for line in s.lines)


def _lines(plan: RunPlan) -> list[str]:
    return [line for section in sections(plan) for line in section.lines]


def test_what_weights_draw_is_shown_where_there_are_some(plan: RunPlan) -> None:
    """100 samples of 10 tokens drawn 300 times, and 1,000 of 2 drawn 500 times: 3 to 1."""

    def table(*drawn: int) -> tuple[list[str], list[tuple[str, ...]]]:
        sizes = ((100, 1000, drawn[0]), (1000, 2000, drawn[1]))
        two = tuple(
            replace(source("s"), num_samples=n, num_usable=n, num_drawn=d, num_tokens=t,
                    num_bad={}, num_dropped={})
            for n, t, d in sizes
        )  # fmt: skip
        total = replace(two[0], num_samples=1100, num_usable=1100, num_drawn=sum(drawn))
        data = sections(replace(plan, sources=two, total=total))[0]
        return [column.name for column in data.columns], list(data.rows)

    names, rows = table(300, 500)
    place = names.index("drawn")
    assert names[place + 1] == "share"
    assert [row[place : place + 2] for row in rows] == [
        ("300", "75%"), ("500", "25%"), ("800", "100%"),
    ]  # fmt: skip
    names, rows = table(100, 1000)
    assert "drawn" not in names and all(len(row) == len(names) for row in rows)


@pytest.mark.parametrize("shrunk", [0, 5])
@pytest.mark.parametrize("dropped", [0, 2])
def test_shrunk_images_are_not_said_to_be_none(plan: RunPlan, shrunk: int, dropped: int) -> None:
    names = {"longer than training.seq_length 8192": dropped} if dropped else {}
    total = replace(plan.total, num_shrunk=shrunk, num_dropped=names, num_bad={})
    left_out = plan.left_out if dropped else ()
    lines = sections(replace(plan, total=total, left_out=left_out))[0].lines
    text = "\n".join(lines)
    assert ("5 samples with images made smaller to fit" in text) is bool(shrunk)
    assert ("nothing is dropped, shrunk or known to be bad" in text) is (not shrunk and not dropped)
    for place, line in enumerate(lines):
        if line.startswith("the first of them: "):
            assert "2 samples dropped: longer" in lines[place - 1], "of those that are dropped"


def test_json_has_every_figure(plan: RunPlan) -> None:
    content = json.loads(json.dumps(as_json(plan)))
    assert content["vlmpack_format"] == 1
    (own,) = [one for one in content["modes"] if one["is_recipes"]]
    assert own["fill"] == pytest.approx(987_654_321 / 1_987_654_321)
    assert own["padding"] == pytest.approx(1 - own["fill"])
    assert own["row_fill"] == pytest.approx(987_654_321 / (1_234_567 * 16_384))
    assert content["memory"]["total"] == plan.memory.total  # type: ignore[union-attr]
    assert content["batch"]["growth"] == plan.batch.growth
    assert content["total"]["vision_share"] == plan.total.vision_share
    assert len(content["sources"]) == 14
    assert content["sequences"]["choices"][3]["basis"] == "p99.9"


def test_numbers_are_short_and_never_lie() -> None:
    assert [compact(n) for n in (7, 999.6, 1234, 9999, 10_000, 179_816, 1_234_567, 2.5e9)] == [
        "7", "1,000", "1,234", "9,999", "10k", "179.8k", "1.23M", "2.5G",
    ]  # fmt: skip
    assert compact(15.93) == "15.9"
    assert compact(999_960) == "1M"
    assert [share(v) for v in (0, 1, 0.5, 0.0001, 0.99999)] == [
        "0.0%", "100.0%", "50.0%", "<0.1%", ">99.9%",
    ]  # fmt: skip
    assert sized(0) == "0" and sized(1 << 29) == "512.0 MiB" and sized(3 << 40) == "3,072.0 GiB"
    assert counted(1, "copy", "copies") == "1 copy" and counted(2, "copy", "copies") == "2 copies"
    assert counted(1, "image") == "1 image" and counted(1234, "image") == "1,234 images"
