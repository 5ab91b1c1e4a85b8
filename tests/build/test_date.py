"""One date a run, where the template writes the day: ids, resume and packs hold over midnight."""

from __future__ import annotations

import datetime
import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.recipes import changed, rows, run_settings
from support.shards import TINY_MODEL

from vlmpack.api import run_recipe
from vlmpack.build import run as date_module
from vlmpack.build.data import build_encoder
from vlmpack.build.look import open_recipe
from vlmpack.build.run import resolve_date
from vlmpack.data.packs.write import PackOrder
from vlmpack.encode.settings import DATE_NOTE
from vlmpack.errors import PacksError, RecipeError, RunIdentityError
from vlmpack.recipe import identity, load_recipe
from vlmpack.run.packs import pack_recipe

FIRST, SECOND = datetime.date(2024, 3, 1), datetime.date(2024, 12, 24)


@pytest.fixture
def clock(monkeypatch):
    """Says what day it is."""

    def fake(day: datetime.date) -> None:
        monkeypatch.setattr(date_module, "today", lambda: day)

    fake(FIRST)
    return fake


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """The small recipe on a model whose template writes the day."""
    folder = tmp_path / "model"
    shutil.copytree(TINY_MODEL, folder)
    path = folder / "chat_template.jinja"
    path.write_text("{{ strftime_now('%A, %d %B %Y. ') }}" + path.read_text(encoding="utf-8"))
    return changed(run_settings(tmp_path), model__path=str(folder))


def ids(settings: dict[str, Any]) -> list[list[int]]:
    train, encoder = open_recipe(load_recipe(settings))
    return [encoder.encode(sample).input_ids.tolist() for sample in train.samples()]


@pytest.mark.slow
def test_the_same_recipe_on_two_dates_has_the_same_ids(settings, clock):
    dated = changed(settings, data__date="2025-05-05")
    first = ids(dated)
    clock(SECOND)
    assert ids(dated) == first
    assert ids(settings) != first, "any date would have done"
    decoded = build_encoder(load_recipe(dated)).tokenizer.decode(first[0])
    assert decoded.startswith("Monday, 05 May 2025. ")


@pytest.mark.soak
def test_a_run_resumed_after_midnight_is_bit_equal(settings, clock, tmp_path):
    settings = changed(settings, training__max_steps=4, checkpoint__interval_steps=2)
    whole = run_recipe(load_recipe(settings)).run_dir
    stopped = tmp_path / "stopped"
    shutil.copytree(whole, stopped)
    (stopped / "result.json").unlink()
    (later,) = (stopped / "checkpoints").glob("step-*4")
    shutil.rmtree(later)
    lines = (stopped / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line).get("step", 0) <= 2]
    (stopped / "metrics.jsonl").write_text("".join(kept))
    clock(SECOND)
    again = changed(settings, run_dir=str(stopped), export__enabled=True)
    result = run_recipe(load_recipe(again))
    names = ("step", "loss", "grad_norm")
    assert len(kept) < len(lines) and len(rows(stopped, *names)) == 4
    assert rows(stopped, *names) == rows(whole, *names)
    assert json.loads((stopped / "identity.json").read_text())["data.date"] == str(FIRST)
    assert DATE_NOTE.read(result.export, str) == FIRST.isoformat()
    with pytest.raises(
        RunIdentityError, match=r"data\.date: '2024-03-01' in the run folder, '2024"
    ):
        run_recipe(load_recipe(changed(again, data__date=str(SECOND))))


@pytest.mark.slow
def test_packs_bring_their_date(settings, clock, tmp_path):
    settings = changed(
        settings,
        packing={"mode": "online", "max_tokens": 512},
        training__micro_batch_size=1,
        training__global_batch_size=1,
    )
    folder = tmp_path / "packs"
    order = PackOrder(kind="plan", planner="stream", processes=1)
    assert pack_recipe(load_recipe(settings), folder, order).encoder["date"] == str(FIRST)
    clock(SECOND)
    packed = changed(settings, packing={"mode": "offline", "path": str(folder)})
    _, encoder = open_recipe(load_recipe(packed))
    assert encoder.date == FIRST
    with pytest.raises(PacksError, match=r"data\.date: 2024-03-01 in the packs, 2024-12-24 now"):
        open_recipe(load_recipe(changed(packed, data__date=str(SECOND))))


@pytest.mark.slow
def test_packing_that_was_stopped_goes_on_with_the_date_that_it_began_with(
    settings, clock, tmp_path
):
    settings = changed(
        settings, packing__mode="online", training__micro_batch_size=1, data__num_workers=0
    )
    folder = tmp_path / "packs"

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    order = PackOrder(kind="tokens", planner="stream", processes=1)
    with pytest.raises(KeyboardInterrupt):
        pack_recipe(load_recipe(settings), folder, PackOrder(**_fields(order), on_packs=stop))
    assert (folder / "unfinished.json").is_file()
    clock(SECOND)
    assert pack_recipe(load_recipe(settings), folder, order).encoder["date"] == str(FIRST)


def _fields(order: PackOrder) -> dict[str, Any]:
    return {"kind": order.kind, "planner": order.planner, "processes": order.processes}


def test_every_rank_takes_the_main_ranks_date(settings, clock):
    told: Any = SimpleNamespace(on_main=lambda _: "2020-02-02")
    assert resolve_date(load_recipe(settings), told).data.date == "2020-02-02"


def test_a_template_without_a_date_makes_a_run_without_one(settings, clock, caplog):
    here: Any = SimpleNamespace(on_main=lambda function: function())
    plain = changed(settings, model__path=str(TINY_MODEL))
    assert resolve_date(load_recipe(plain), here).data.date is None
    assert not [name for name in identity(load_recipe(plain)) if "date" in name]
    with caplog.at_level(logging.WARNING, "vlmpack"):
        asked = resolve_date(load_recipe(changed(plain, data__date="2020-02-02")), here)
    assert asked.data.date is None and "data.date 2020-02-02 changes nothing" in caplog.text
    assert identity(asked) == identity(load_recipe(plain))


@pytest.mark.parametrize("wrong", ["2026-02-30", "20260203", "3 Feb"])
def test_other_dates_are_refused(settings, wrong):
    with pytest.raises(
        RecipeError, match=r"data\.date: expected a date such as 2026-11-22 or null"
    ):
        load_recipe(changed(settings, data__date=wrong))
