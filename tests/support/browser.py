"""A page as Chromium shows it: what a script that looks at it finds."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

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
