"""`vlmpack doctor`: what is there, what is chosen and why not others; what is broken is a line."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from vlmpack.attention import choose_attention
from vlmpack.cli.app import app
from vlmpack.run import doctor
from vlmpack.run.doctor import Line, look


def by_name(lines: list[Line]) -> dict[str, Line]:
    return {line.name: line for line in lines}


def test_versions_and_choices_are_those_of_a_run() -> None:
    found = by_name(look())
    assert torch.__version__.startswith(str(found["torch"].found))  # without a build's name
    assert found["transformers"].found == metadata.version("transformers")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    choice = choose_attention("auto", device=device, dtype=dtype)
    assert found["attention"].found == choice.name and choice.reason in found["attention"].note
    assert not [line for line in found.values() if line.is_bad], "this environment is sound"


def test_broken_old_and_missing_packages_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:

    versions = {"flash-attn": "2.8.0", "peft": "0.1.0"}
    own, own_import = metadata.version, doctor.import_module

    def version(name: str) -> str:
        if name == "safetensors":
            raise metadata.PackageNotFoundError(name)
        return versions[name] if name in versions else own(name)

    def imported(name: str) -> Any:
        if name == "flash_attn":
            raise ImportError(f"{Path.home()}/lib/flash_attn.so: undefined symbol: _ZN3c10")
        return own_import(name)

    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setattr(doctor, "import_module", imported)
    found = by_name(look())
    assert found["flash-attn"].is_bad and "undefined symbol" in found["flash-attn"].note
    assert "~/lib/flash_attn.so" in found["flash-attn"].note
    assert found["peft"].is_bad and found["peft"].note.startswith("expected <1,>=0.20")
    assert found["safetensors"].is_bad and "needed: >=0.5" in found["safetensors"].note


def test_a_report_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "planted")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0 and "planted" not in done.output
    lines = {line["name"]: line for line in json.loads(done.output)["lines"]}
    assert lines["OMP_NUM_THREADS"]["found"] == "3"
    home = str(Path.home())
    assert len(home) < 2 or home not in done.output
    assert sys.version.split()[0] == lines["python"]["found"]


def test_a_section_that_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "choose_recurrence", lambda **_: 1 / 0)
    lines = look()
    assert [line.note for line in lines if line.name == "look"] == [
        "ZeroDivisionError: division by zero"
    ]
    assert by_name(lines)["python"].found
    assert "attention" in by_name(lines), "what the section had found before it failed"
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 0 and "look at: look" in shown.output
