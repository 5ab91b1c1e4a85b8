"""Nothing from outside steers a terminal, and no secret of an address reaches it."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import vlmpack
from vlmpack.terminal import PrintableFormatter, open_console, printable, say

STEERING = [
    *(chr(code) for code in (*range(9), *range(11, 32), *range(127, 160))),
    *"\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029\ufeff",
    "\U000e0041",
    "\ud800",
]
SECRET = "https://host/hf_canaryCANARY0123456789canary/x.tar?sig=canary#canary"


def test_whatever_steers_is_written_out() -> None:
    for char in STEERING:
        shown = printable(f"a{char}b")
        assert shown.isascii() and shown.isprintable(), repr(char)
        assert shown.startswith("a\\") and shown.endswith("b")
    kept = "\ta\n\u043a\u043b\u044e\u0447 \u65e5\u672c e\u0301 \U0001f469\u200d\U0001f4bb"
    assert printable(kept) == kept


def test_the_log_and_the_console_write_it_out() -> None:
    hostile = "\x1b]0;owned\x07\x9b2J\u202egnp.exe\r" + SECRET
    record = logging.LogRecord("vlmpack", logging.WARNING, "", 0, "%s", (hostile,), None)
    stream = io.StringIO()
    console = open_console(file=stream, force_terminal=True, width=200)
    from rich.table import Table
    from rich.text import Text

    table = Table("column")
    table.add_row(Text(hostile))
    console.print(table)
    console.print(Text(hostile), style="bold")
    colours = re.compile(r"\x1b\[[0-9;]*m")
    assert colours.search(stream.getvalue()), "rich's own colours are kept"
    for text in (PrintableFormatter("%(message)s").format(record), stream.getvalue()):
        plain = colours.sub("", text).replace("\n", "")
        assert plain.isprintable()
        assert r"\x1b]0;owned" in plain and r"\x9b2J\u202egnp.exe" in plain
        assert "canary" not in plain


def test_commands_write_through_one_place() -> None:
    """No other module opens a console or prints."""
    root = Path(vlmpack.__file__).parent
    direct = re.compile(r"(?<![\w.])(?:print|Console)\(|typer\.(?:echo|secho)\(|sys\.stdout\.write")
    files = [path for path in root.rglob("*.py") if path.name != "terminal.py"]
    assert len(files) > 200, "vacuous"
    found = [
        f"{path.relative_to(root)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if direct.search(line) and not line.startswith("print(result.")  # a docstring's example
    ]
    assert found == []


@pytest.mark.slow
def test_a_hostile_shard_is_listed_without_steering(tmp_path: Path) -> None:
    shard = tmp_path / "x\x1b[2J.tar"
    with tarfile.open(shard, "w") as archive:
        for name, data in (("a\u202eb.json", b'{"messages": "\\u001b[2J"}'), ("c.json", b"{}")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    done = subprocess.run(
        [sys.executable, "-m", "vlmpack", "data", "lint", str(shard)],
        capture_output=True,
        check=False,
        cwd=tmp_path,
    )
    shown = (done.stdout + done.stderr).decode()
    assert done.returncode == 1
    assert r"x\x1b[2J.tar" in shown and r"a\u202eb" in shown
    assert shown.replace("\n", "").replace("\t", "").isprintable()


@pytest.mark.parametrize("value", ["\u00b2", "x", "", "-1", "9" * 5000])
def test_an_odd_rank_is_no_reason_for_a_traceback(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vlmpack.cli import app

    monkeypatch.setenv("RANK", value)
    assert app._rank() == 0
    monkeypatch.setenv("RANK", "3")
    assert app._rank() == 3


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "attention      segments (flash_attn needs a CUDA device)",
            ["attention      segments (flash_attn", " " * 15 + "needs a CUDA device)"],
        ),
        (
            "step 6/6  loss 5.5  667 tokens/s  data wait 16%  ETA 0:00",
            ["step 6/6  loss 5.5  667 tokens/s", "          data wait 16%  ETA 0:00"],
        ),
        (
            "  my.yaml:3: training.seq_length: unknown key",
            ["  my.yaml:3: training.seq_length:", "    unknown key"],
        ),
        ("run            /a/folder/whose/name/stays/whole", None),
        ("note: short", None),
    ],
)
def test_a_line_longer_than_the_terminal_goes_on_below_its_text(
    line: str, expected: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the log, on the console and on standard error; in a file it stays whole."""
    stream = io.StringIO()
    record = logging.LogRecord("vlmpack", logging.INFO, "", 0, "%s", (line,), None)

    def shown() -> list[str]:
        stream.seek(stream.truncate(0))
        open_console(file=stream, highlight=False).print(line, soft_wrap=True, markup=False)
        logged = PrintableFormatter("%(message)s").format(record)
        assert stream.getvalue() == logged + "\n"
        return logged.split("\n")

    monkeypatch.delenv("COLUMNS", raising=False)
    assert shown() == [line]
    for odd in ("", "wide", "-5"):
        monkeypatch.setenv("COLUMNS", odd)
        assert shown() == [line]
    monkeypatch.setenv("COLUMNS", "36")
    assert shown() == (expected or [line])


def test_wrapped_lines_keep_their_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "19")
    stream = io.StringIO()
    console = open_console(file=stream, force_terminal=True, color_system="standard")
    console.print("[green]OK[/] a\0b, except for 2 things", soft_wrap=True, highlight=False)
    assert stream.getvalue() == "\x1b[32mOK\x1b[0m a\\x00b, except for\n  2 things\n"


def test_data_on_standard_output_stays_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    answer = "an answer of a model, of one line"
    say(answer, whole=True)
    say(f"{{\n{answer}\n}}")
    assert capsys.readouterr().out == f"{answer}\n{{\n{answer}\n}}\n"
    say(answer)
    say(f"error:\n  {answer}", err=True)
    told = capsys.readouterr()
    assert told.out == "an answer of a\n  model, of one line\n"
    assert told.err == "error:\n  an answer of a\n    model, of one\n    line\n"
