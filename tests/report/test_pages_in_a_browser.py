"""Every page in Chromium, on a telephone and on a desk, light and dark: nothing overflows, no two
texts overlap, no word is broken, and all text can be read.

A page as Chromium shows it: what a script that looks at it finds.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fake_runs import write_run
from support.made_plans import large_plan

from vlmpack.evaluation.predictions import (
    PREDICTIONS_AFTER,
    predictions_at,
    read_predictions,
    write_predictions,
)
from vlmpack.file_format import RUN
from vlmpack.proof.rows.checks import check_row
from vlmpack.report import write_report
from vlmpack.report.compare import compare_runs
from vlmpack.report.compare.page import render_page as render_comparison
from vlmpack.report.forecast import write_page
from vlmpack.report.inspect.page import render_page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
"""Looked for on PATH, unless CHROMIUM names a program."""

AROUND = """<!doctype html><meta name="color-scheme" content="light dark">
<pre id="found"></pre>
<script>
onmessage = (said) => { document.getElementById("found").textContent += said.data + "\\n"; };
</script>
"""
FRAME = '<iframe src="{page}" style="width: {width}px; height: 2000px; border: 0"></iframe>'
"""No window is narrower than 500 pixels, a frame may be."""


def chromium() -> str:
    """The program; skips the test where there is none."""
    named = os.environ.get("CHROMIUM")
    found = next(filter(None, map(shutil.which, [named] if named else NAMES)), None)
    if found is None:
        pytest.skip(
            f"no {named or ' or '.join(NAMES[:3])}: apt-get install chromium, or set CHROMIUM"
        )
    return found


def looked_at(
    page: str, script: Path, folder: Path, *, widths: Sequence[int], dark: bool
) -> dict[int, dict[str, Any]]:
    """What a script in a page posts to the page around it as JSON, by the page's width.

    Args:
        page: its HTML.
        script: what looks at it, run at its end.
        folder: for the page and the browser's profile.
        widths: that it has, in pixels.
        dark: the colour scheme that the page is told to prefer.
    """
    file = folder / "page.html"
    code = script.read_text(encoding="utf-8")
    file.write_text(page.replace("</body>", f"<script>{code}</script></body>"), encoding="utf-8")
    frame = folder / "frame.html"
    frames = [FRAME.format(width=width, page=file.name) for width in widths]
    frame.write_text(AROUND + "".join(frames), encoding="utf-8")
    command = [
        chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}", "--window-size=1400,2200",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--virtual-time-budget=3000",
        "--dump-dom", frame.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    shown = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert shown and shown[1], f"the script did not end:\n{done.stderr[-2000:]}"
    found = [json.loads(line) for line in html.unescape(shown[1]).splitlines()]
    assert {(one["width"], one["dark"]) for one in found} == {(w, dark) for w in widths}, (
        "guard: the page was shown as asked"
    )
    return {one["width"]: one for one in found}


LOOK = Path(__file__).with_name("look.js")
FAULTS = ("overflow", "outside", "overlap", "broken", "faint")
WIDTHS = (400, 1280)
pytestmark = pytest.mark.slow


def run_page(folder: Path, _: Any) -> str:
    """With more steps than pixels, experts, answers on the way, and a task whose words are longer
    than a line."""
    run = folder / "a-run"
    asked = write_run(run, num_steps=800, num_questions=60)
    rows = read_predictions(run / PREDICTIONS_AFTER)
    long = {"question": "W" * 300, "answer": "M" * 300, "truth": "x" * 300, "task": "Q" * 90}
    rows[::4] = [replace(row, **long) for row in rows[::4]]
    write_predictions(run / PREDICTIONS_AFTER, rows)
    for step in range(100, 800, 100):
        write_predictions(run / predictions_at(step), rows)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row | ({"router_loss": 1.5} if "loss" in row else {}) for row in steps]
    scores = {"answers_exact_match": 0.1234, "answers_relaxed_accuracy": 0.5}
    steps += [{"step": step, **scores} for step in range(100, 800, 100)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    write_report(run, asked)
    page = (run / "report" / "index.html").read_text(encoding="utf-8")
    assert "Metrics by step" in page, "guard: there are answers on the way"
    return page


def plan_page(folder: Path, _: Any) -> str:
    """Every figure as wide as it gets."""
    write_page(large_plan(), folder / "plan.html", title="recipes/a-recipe-of-mine.yaml")
    return (folder / "plan.html").read_text(encoding="utf-8")


def row_page(_: Path, opened: Any) -> str:
    """Samples with images, gaps and a tail on two context-parallel ranks."""
    row, _settings, encoder = opened
    return render_page(row, check_row(row), encoder, "recipes/a-recipe-of-mine.yaml")


def comparison_page(folder: Path, _: Any) -> str:
    """Two runs with the same steps and long values that differ."""
    for name, nudge in (("one-run", 1.0), ("another-run-of-mine", 1.00001)):
        write_run(folder / name, num_steps=300, num_questions=4)
        file = folder / name / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        rows = [row | ({"loss": row["loss"] * nudge} if "loss" in row else {}) for row in rows]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        identity = {"training.a_long_key.of_a_recipe": f"{nudge} " + "W" * 90, "optim.lr": nudge}
        (folder / name / "identity.json").write_text(json.dumps(RUN.mark(identity)))
    return render_comparison(compare_runs(folder / "one-run", folder / "another-run-of-mine"))


PAGES = {"run": run_page, "plan": plan_page, "row": row_page, "comparison": comparison_page}


def faults(found: dict[str, Any]) -> dict[str, list[str]]:
    return {kind: found[kind] for kind in FAULTS if found[kind]}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_can_be_read_at_any_width_and_in_the_dark(
    name: str, tmp_path: Path, opened_row: Any
) -> None:
    chromium()
    page = PAGES[name](tmp_path, opened_row)
    for dark in (False, True):
        for width, found in looked_at(page, LOOK, tmp_path, widths=WIDTHS, dark=dark).items():
            assert faults(found) == {}, f"{name} page, {width} px, {'dark' if dark else 'light'}"
            assert (found["ground"] < 0.05) if dark else (found["ground"] > 0.9)
            assert found["texts"] > 60 and found["labels"] > 12, "guard: there was much to see"


PLANTED = (
    ("overflow", "page 1", '<p style="width: 1500px">wide</p>'),
    ("outside", "far far", '<p style="white-space: nowrap">' + "far " * 500 + "</p>"),
    ("overlap", "under", '<p>under</p><p style="margin-top: -2.6rem">over</p>'),
    ("overlap", "one | 2",
     '<svg viewBox="0 0 300 40"><text y="20">one</text><text y="22">2</text></svg>'),
    ("broken", "parameters", '<p style="width: 2.5rem; word-break: break-all">parameters</p>'),
    ("faint", "grey", '<p style="color: #8a8a8a; background: #777">grey</p>'),
    ("faint", "pale", '<p style="opacity: .3">pale</p>'),
    ("faint", "drawn",
     '<svg viewBox="0 0 300 40"><rect width="300" height="40" fill="#888"/>'
     '<text y="20" fill="#999">drawn</text></svg>'),
    ("faint", "px small",
     '<svg viewBox="0 0 3000 40"><text y="20" font-size="10">small</text></svg>'),
)  # fmt: skip
"""(kind of fault, what is said of it, a page's markup that has it)."""


def test_planted_faults_are_seen(tmp_path: Path) -> None:
    """Negative control, in the page of the plan."""
    chromium()
    head, body = plan_page(tmp_path, None).split("<body>")
    page = head + "<body>" + "".join(markup for *_, markup in PLANTED) + body
    for dark in (False, True):
        for found in looked_at(page, LOOK, tmp_path, widths=WIDTHS, dark=dark).values():
            for kind, said, markup in PLANTED:
                assert any(said in one for one in found[kind]), f"{markup}: {found[kind]}"
