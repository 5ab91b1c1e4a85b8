"""Each guide of docs/guides is followed from an empty folder: its blocks of bash, in their order.

Variables that a guide lets its reader set (`${NAME:-default}`) make models small and runs short.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from vlmpack.data.index.table_file import LARGE
from vlmpack.data.plan.batches import MANY_SOURCES
from vlmpack.storage.cache.cached import MAX_BLOCKS_NOTED, BlockUse
from vlmpack.storage.fetch import HEADS_AT_ONCE
from vlmpack.storage.remote import REQUEST_BYTES

ROOT = Path(__file__).resolve().parents[2]
GUIDES = {path.stem: path for path in sorted((ROOT / "docs/guides").glob("*.md"))}
FEW = (
    "model.dtype=float32 training.num_epochs=null training.max_steps=4 optim.warmup_steps=1 "
    "data.num_workers=1 evaluation.max_samples=16"
)
FULL = f"{FEW} training.seq_length=1024 training.global_batch_size=8"


def blocks(page: str) -> list[str]:
    """What a reader of a guide runs."""
    return re.findall(r"^```bash\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def follow(page: str, folder: Path, **variables: str) -> str:
    """Run a guide's blocks in one shell; what it said."""
    home = folder.parent / "commands"
    home.mkdir()
    for name, module in (("vlmpack", "vlmpack"), ("torchrun", "torch.distributed.run")):
        (home / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
    (home / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for command in home.iterdir():
        command.chmod(0o755)
    given = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
    given |= {"PATH": f"{home}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    given |= {"PYTHONPATH": str(ROOT), "VLMPACK": str(ROOT), "VLMPACK_CACHE": str(folder / "cache")}
    script = "set -euo pipefail\n" + "\n".join(blocks(page))
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=given | variables,
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


@pytest.fixture
def empty(tmp_path):
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


@pytest.mark.slow
def test_own_data(empty):
    page = GUIDES["own-data"].read_text()
    assert page.count("max_steps: 60") == 1
    said = follow(page.replace("max_steps: 60", "max_steps: 12"), empty)
    assert "packed equals unpacked" in said and "proven:" in said
    assert (empty / "inspect/row-0.html").is_file()
    assert (empty / "runs/photos/report/index.html").is_file()


@pytest.mark.slow
def test_lora(empty):
    model = str(ROOT / "assets/tiny-qwen3_5")
    said = follow(GUIDES["lora"].read_text(), empty, MODEL=model, MORE=FEW)
    assert "packed equals unpacked" in said and "adapter_config.json" in said
    rows = [json.loads(line) for line in (empty / "answers.jsonl").read_text().splitlines()]
    asked = (empty / "my-folder/conversations.jsonl").read_text().splitlines()
    assert len(rows) == len(asked) == 240
    assert all(row["question"] == "Which?" and isinstance(row["answer"], str) for row in rows)
    assert said.splitlines().count(rows[0]["answer"]) >= 2, "with the adapters, and merged"


@pytest.mark.soak
def test_eight_gpus_on_two_processes(empty):
    given = {"MODEL": "assets/tiny-qwen2_5_vl", "TRAIN": "assets/digits/train-*.tar"}
    given = {name: str(ROOT / place) for name, place in given.items()}
    validation = str(ROOT / "assets/digits/val-*.tar")
    page = GUIDES["eight-gpus"].read_text()
    said = follow(page, empty, GPUS="2", VALIDATION=validation, MORE=FULL, **given)
    assert "proven: 4 global batches" in said


@pytest.mark.soak
@pytest.mark.megatron
def test_megatron(empty):
    more = "training.max_steps=6 evaluation.generate=false data.num_workers=0"
    said = follow(
        GUIDES["megatron"].read_text().replace("max_steps=60", "max_steps=8"), empty, MORE=more
    )
    assert "packed equals unpacked" in said and "resumed from" in said


@pytest.mark.soak
def test_dpo(empty):
    said = follow(GUIDES["dpo"].read_text(), empty)
    assert "packed equals unpacked" in said and '"margin"' in said


@pytest.mark.soak
def test_object_storage(empty):
    pytest.importorskip("moto", reason="the guide installs it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    said = follow(GUIDES["object-storage"].read_text(), empty, PORT=port)
    assert "proven: 10 global batches" in said


@pytest.mark.soak
def test_serving(empty):
    said = follow(GUIDES["serving"].read_text(), empty)
    assert "README.md" in said and "adapter_config.json" in said
    answers = [json.loads(line) for line in (empty / "answers.jsonl").read_text().splitlines()]
    assert [row["place"] for row in answers] == [f"questions.jsonl, line {n}" for n in (1, 2, 3)]
    assert said.splitlines().count(answers[0]["answer"]) >= 3, "merged, adapters, a chat"


@pytest.mark.soak
def test_how_large(empty):
    given = {"TRAIN": str(ROOT / "assets/digits/train-*.tar"), "INDEX": str(empty / "index")}
    given |= {"MODEL": str(ROOT / "assets/tiny-qwen2_5_vl"), "WORLD": "2", "BATCH": "4"}
    said = follow(GUIDES["how-large"].read_text(), empty, **given)
    assert "on 2 model copies of 2 processes" in said
    assert list((empty / "index").glob("*.part"))


def test_the_examples_of_how_large_follow_from_its_formulas():
    page = " ".join(GUIDES["how-large"].read_text().split()) + " "
    samples, size, seconds, ranks, nodes = 100e6, 2.6e12, 12_000, 1024, 128
    window = max(4096, 128 * 4096)
    assert f"| W | samples of a shuffle window | samples | {window:,} |" in page
    for found in (
        f"100M / 12,000 = {samples / seconds:,.0f} ",
        f"2.6 TB / (1,024 x 12,000) = {size / (ranks * seconds) / 1e3:.0f} kB/s ",
        f"D / T {size / seconds / 1e6:.0f} MB/s ",
        f"(8 MiB x 12,000) = {nodes * size / (8 * 2**20 * seconds):,.0f} ",
        f"n x D / T {nodes * size / seconds / 1e9:.1f} GB/s ",
        f"x 52 MB = {2 * (window / 2000 + 1) * 52e6 / 1e9:.1f} GB ",
        f"50,000 x 0.04 / {HEADS_AT_ONCE} = {50_000 * 0.04 / HEADS_AT_ONCE:.0f} s ",
        f"fetches whole shards ahead of use. A request asks for at most {REQUEST_BYTES >> 20} MiB",
        f"remembers how {MAX_BLOCKS_NOTED:,} blocks were used, which are "
        f"{MAX_BLOCKS_NOTED * BlockUse().block_bytes >> 30} GiB",
        f"with more than {MANY_SOURCES} sources, each has a cursor",
        f"Below {LARGE // 1_000_000} million samples a process also",
        f"From {LARGE // 1_000_000} million samples of a source on, the order",
    ):
        assert found in page, found
    assert size / 50_000 == 52e6 and samples / 50_000 == 2000


def test_every_guide_is_followed_and_a_wrong_command_is_seen(empty):
    followed = re.findall(r'GUIDES\["([\w-]+)"\]', Path(__file__).read_text())
    assert set(followed) == {*GUIDES}
    assert all(blocks(page.read_text()) for page in GUIDES.values())
    with pytest.raises(AssertionError, match="no-such"):
        follow("```bash\ncat no-such-file\ntrue\n```\n", empty)
