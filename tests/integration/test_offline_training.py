"""Runs on saved packs: bit for bit the online run; stopped, damaged, refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.recipes import changed, copy_samples, rewrite, rows, write_recipe
from support.shards import ROOT
from support.whole_runs import audited, run_until

from vlmpack.api import resolve, run_recipe
from vlmpack.build.look import open_recipe
from vlmpack.cli import pack as cli
from vlmpack.data.packs.manifest import Manifest, read_manifest
from vlmpack.data.packs.write import PackOrder
from vlmpack.errors import PacksError, RecipeError
from vlmpack.recipe import load_recipe
from vlmpack.run.packs import pack_recipe

SAME = ("step", "epoch", "num_tokens", "num_label_tokens", "num_samples", "num_rows", "num_slots")
BITS = (*SAME, "loss", "grad_norm")


def packed(settings: dict[str, Any], folder: Path, **order: Any) -> Manifest:
    return pack_recipe(load_recipe(settings), folder, PackOrder(**order))


def offline(
    settings: dict[str, Any], folder: Path, run_dir: Path, **changes: Any
) -> dict[str, Any]:
    return changed(
        settings,
        packing__mode="offline",
        packing__path=str(folder),
        run_dir=str(run_dir),
        **changes,
    )


def run(settings: dict[str, Any]) -> Path:
    run_recipe(resolve(settings, {}))
    return Path(settings["run_dir"])


@pytest.mark.soak
def test_every_kind_trains_what_the_online_run_trains_bit_for_bit(
    online: dict[str, Any], tmp_path: Path, shard: Path
) -> None:
    expected = rows(run(changed(online, run_dir=str(tmp_path / "online"))), *BITS)
    assert len(expected) == 3
    kinds: dict[str, dict[str, Any]] = {
        "plan": {"kind": "plan"},
        "tokens": {"kind": "tokens"},
        "shards": {"kind": "shards"},
        "resized": {"kind": "shards", "media": "resized"},
    }
    for name, order in kinds.items():
        manifest = packed(online, tmp_path / name, **order)
        assert not manifest.num_holes and not manifest.num_kept_original
    for name in kinds:
        if kinds[name]["kind"] == "shards":  # the original shards are needed no more
            shard.rename(shard.with_suffix(".gone")) if shard.exists() else None
        found = run(offline(online, tmp_path / name, tmp_path / f"run-{name}"))
        assert rows(found, *BITS) == expected, name
        assert audited(found).problems == [], name
    shard.with_suffix(".gone").rename(shard)
    other = packed(online, tmp_path / "bfd", planner="bfd")
    assert other.num_samples == manifest.num_samples
    found = run(offline(online, tmp_path / "bfd", tmp_path / "run-bfd"))
    assert rows(found, *BITS) != expected, "any packs would have passed"
    assert sum(n for (n,) in rows(found, "num_samples")) == other.num_samples
    assert audited(found).problems == []


@pytest.mark.slow
def test_a_stopped_run_on_packs_goes_on_bit_for_bit_and_later_epochs_permute(
    online: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed(online, tmp_path / "packs", kind="tokens")
    settings = offline(online, tmp_path / "packs", tmp_path / "unbroken", training__num_epochs=2)
    unbroken = run(settings)
    total = len(rows(unbroken, "step"))
    by_epoch = {
        epoch: [n for e, n in rows(unbroken, "epoch", "num_tokens") if e == epoch]
        for epoch in range(2)
    }
    assert len({tuple(tokens) for tokens in by_epoch.values()}) == 2, "the order is the same"
    assert len({sum(tokens) for tokens in by_epoch.values()}) == 1
    broken = changed(settings, run_dir=str(tmp_path / "broken"))
    run_until(broken, total // 2 + 1, monkeypatch, total=total)
    run_until(broken, None, monkeypatch)
    assert rows(tmp_path / "broken", *BITS) == rows(unbroken, *BITS)
    assert audited(unbroken).problems == [] and audited(tmp_path / "broken").problems == []


@pytest.mark.slow
def test_a_damaged_pack_leaves_holes_in_the_ledger(online: dict[str, Any], tmp_path: Path) -> None:
    packed(online, tmp_path / "packs", kind="shards")
    tar = tmp_path / "packs/packs-000000.tar"
    data = bytearray(tar.read_bytes())
    data[2000] ^= 0xFF
    tar.write_bytes(data)
    found = run(offline(online, tmp_path / "packs", tmp_path / "run"))
    lines = [json.loads(line) for line in (found / "data-errors.jsonl").read_text().splitlines()]
    assert lines and {line["class"] for line in lines} == {"integrity"}
    assert all("packs-000000.tar" in line["reason"] for line in lines)
    assert all(line["shard"].endswith("train-000000.tar") for line in lines)
    result = audited(found)
    assert result.problems == [] and sum(epoch.skipped for epoch in result.epochs) == len(lines)
    trained = sum(n for (n,) in rows(found, "num_samples"))
    assert trained == 22 - len(lines) > 0


@pytest.mark.soak
def test_fixed_shapes_change_no_loss(online: dict[str, Any], tmp_path: Path) -> None:
    free = run(changed(online, run_dir=str(tmp_path / "free")))
    fixed = run(
        changed(
            online,
            run_dir=str(tmp_path / "fixed"),
            packing__pad_to_max_length=True,
            packing__pad_cu_seqlens=True,
        )
    )
    widths = {slots / count for slots, count in rows(fixed, "num_slots", "num_rows")}
    assert widths == {256.0}
    assert len({slots / count for slots, count in rows(free, "num_slots", "num_rows")}) > 1
    for ours, theirs in zip(
        rows(fixed, "loss", "grad_norm"), rows(free, "loss", "grad_norm"), strict=True
    ):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.slow
def test_packs_of_something_else_are_refused_with_every_difference(
    online: dict[str, Any], tmp_path: Path, shard: Path
) -> None:
    packed(online, tmp_path / "plan")
    packed(online, tmp_path / "shards", kind="shards")

    def refusal(folder: str, **changes: Any) -> str:
        settings = offline(online, tmp_path / folder, tmp_path / "run", **changes)
        with pytest.raises(PacksError) as error:
            open_recipe(load_recipe(settings))
        return str(error.value)

    model = tmp_path / "model"
    shutil.copytree(online["model"]["path"], model)
    template = model / "chat_template.jinja"
    template.write_text(template.read_text() + "\n")
    message = refusal("shards", model__path=str(model))
    assert "the chat template in model.path: " in message and "tokenizer" not in message
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["version"] = "2.0"
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    processor = json.loads((model / "preprocessor_config.json").read_text())
    processor["image_mean"] = [0.1, 0.2, 0.3]
    (model / "preprocessor_config.json").write_text(json.dumps(processor))
    tokenizer["version"] = "1.0"
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    message = refusal("plan", model__path=str(model))
    for part in ("tokenizer", "chat template", "image processor"):
        assert f"the {part} in model.path: " in message
    message = refusal("shards", training__seq_length=240)
    assert "training.seq_length: 256 in the packs, 240 in the recipe" in message
    assert "packing.max_tokens" not in message, "the recipe leaves it open"
    message = refusal("shards", packing__max_tokens=512)
    assert "packing.max_tokens: 256 in the packs, 512 in the recipe" in message
    message = refusal("plan", packing__max_vision_patches=4000, packing__alignment=16)
    assert "packing.max_vision_patches: missing in the packs, 4000 in the recipe" in message
    assert "packing.alignment: 8 in the packs, 16 in the recipe" in message

    rewrite(shard, lambda name, data: data.replace(b"hat", b"had") if "json" in name else data)
    message = refusal("plan")
    assert "  data.train.test_packs" in message and message.count("'1 shards, 22 samples, ") == 2
    open_recipe(load_recipe(offline(online, tmp_path / "shards", tmp_path / "run")))


def test_packs_bring_their_alignment_and_their_width(
    online: dict[str, Any], tmp_path: Path
) -> None:
    """Made with rows of 256 tokens where this layout, left alone, would plan 248."""
    short = changed(online, training__seq_length=248)
    packed(changed(short, packing__alignment=16), tmp_path / "plan")
    settings = offline(short, tmp_path / "plan", tmp_path / "run", packing__pad_to_max_length=True)
    train, _ = open_recipe(load_recipe(settings))
    (step,) = train.batches(train.start(), rank=0, dp=1, max_steps=1)
    assert {micro_batch.batch.num_slots for micro_batch in step.micro_batches} == {256}
    assert train.identity["packing.alignment"] == 16


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [child for own in map(int, listed) for child in (own, *children(own))]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.soak
def test_a_killed_command_leaves_nothing_that_looks_whole_and_no_process(
    online: dict[str, Any], tmp_path: Path
) -> None:
    copy_samples(ROOT / "assets/digits/train-000001.tar", tmp_path / "more.tar", 40)
    settings = changed(online, data__train=str(tmp_path / "more.tar"))
    recipe = str(write_recipe(tmp_path / "recipe.yaml", settings))
    # so few packs in a tar that many are made, by several processes
    cut = "from vlmpack.data.packs import write; write.PackOrder.__init__.__kwdefaults__"
    script = f"{cut}['part_packs'] = 1\nfrom vlmpack.__main__ import main; main()"
    arguments = [recipe, "-o", str(tmp_path / "packs"), "--kind", "shards", "--processes", "2"]
    process = subprocess.Popen([sys.executable, "-c", script, "pack", *arguments])
    deadline = time.monotonic() + 120
    while not list((tmp_path / "packs").glob("packs-*.json")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    workers = children(process.pid)
    process.kill()
    process.wait()
    assert len(workers) >= 2
    with pytest.raises(PacksError, match=r"packing was stopped before its end; run the same"):
        read_manifest(tmp_path / "packs")
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "packs").glob("packs-*.json")}
    while any(map(is_running, workers)):
        assert time.monotonic() < deadline, "processes stay behind"
        time.sleep(0.1)
    packed(settings, tmp_path / "packs", kind="shards", part_packs=1)
    manifest = read_manifest(tmp_path / "packs")
    tars = sorted((tmp_path / "packs").glob("packs-*.tar"))
    assert manifest.num_samples == 40 and len(tars) == manifest.num_packs > 5
    assert all(path.with_suffix(".tar").stat().st_mtime_ns <= when for path, when in kept.items())
    assert not list((tmp_path / "packs").glob(".*"))


@pytest.mark.slow
def test_bad_input_is_named(online: dict[str, Any], tmp_path: Path) -> None:
    padded = changed(online, packing__mode="in_batch", training__micro_batch_size=2)
    for changes, words in (
        ({}, "in_batch plans no rows.*size then counts rows"),
        ({"objective": {"name": "dpo"}}, "packing.scope: batch and .* goes on counting pairs"),
    ):
        with pytest.raises(RecipeError, match=words):
            packed({**padded, **changes}, tmp_path / "packs")
        assert not (tmp_path / "packs").exists()
    with pytest.raises(PacksError, match=r"holds no finished packs: no such folder"):
        run(offline(online, tmp_path / "packs", tmp_path / "run"))


def test_the_command_says_what_it_made(
    online: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", online)
    changes = ["packing.max_tokens=512"]
    cli.pack(str(recipe), tmp_path / "packs", changes, kind="tokens", processes=1)
    printed = capsys.readouterr().out
    manifest = read_manifest(tmp_path / "packs")
    assert manifest.kind == "tokens" and manifest.budget.max_tokens == 512
    for words in (f"{manifest.num_packs} of up to 512 tokens", "22 (", f"{manifest.fill:.2%}"):
        assert words in printed
