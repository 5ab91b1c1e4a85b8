"""Shards that hold nothing but JSON: converted, indexed, linted, planned and shown."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

from support.shard_fakes import config_for
from support.shards import ROOT

from vlmpack.convert import ConvertSettings, convert, open_records
from vlmpack.data.config import DataConfig
from vlmpack.data.pipeline import TrainData
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.data.tools.lint import LintOne
from vlmpack.encode import Encoder
from vlmpack.proof.rows.opening import load_bin, view_row
from vlmpack.storage.fetch import LocalFetcher
from vlmpack.storage.sources import FoundShard

MODEL = ROOT / "assets" / "tiny-qwen3"
IMAGES = ROOT / "assets" / "digits" / "val-000000.tar"
COUNT = 10


def chats(path: Path) -> Path:
    """Conversations of various lengths in both schemas, and no image."""
    lines = []
    for number in range(COUNT):
        question, answer = f"Count to {number}.", " ".join(map(str, range(number + 1)))
        record = {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": [{"type": "text", "text": answer}]},
            ]
        }
        if number % 3 == 0:
            record = {
                "conversations": [
                    {"from": "system", "value": "Count."},
                    {"from": "human", "value": question},
                    {"from": "gpt", "value": answer},
                ]
            }
        lines.append(json.dumps(record))
    path.write_text("\n".join(lines))
    return path


def config(pattern: str, index_dir: Path) -> DataConfig:
    return config_for(pattern, index_dir, seq_length=512)


def test_json_lines_become_rows(tmp_path: Path) -> None:
    encoder = Encoder(MODEL)
    settings = ConvertSettings(
        folder=tmp_path, image_root=tmp_path, index_dir=tmp_path / "index", prefix="chat"
    )
    convert(open_records(chats(tmp_path / "chats.jsonl"), "auto", None), settings)
    shard = tmp_path / "chat-000000.tar"
    with tarfile.open(shard) as tar:
        assert [Path(name).suffix for name in tar.getnames()] == [".json"] * COUNT

    report = LintOne(LocalFetcher(), SampleCaps(), encoder)(FoundShard(str(shard)))
    assert (report.samples, report.images, report.findings) == (COUNT, 0, ())

    train = TrainData.open(config(str(shard), tmp_path / "index"), encoder)
    summary = train.summary()
    assert summary.num_usable == summary.num_samples == COUNT
    refs = [train.split.ref(number) for number in range(COUNT)]
    shown = view_row(*load_bin(train, refs), encoder, "all")
    assert len(shown.samples) == COUNT
    for sample in shown.samples:
        assert (sample.images, sample.media) == ((), None)
        number = int(sample.key)
        said = " ".join(map(str, range(number + 1))) + "<|im_end|>"
        assert [run.text for run in sample.runs if run.kind == "learnt"] == [said]
        assert {run.kind for run in sample.runs} == {"given", "learnt"}


def test_samples_with_images_are_findings(tmp_path: Path) -> None:
    report = LintOne(LocalFetcher(), SampleCaps(), Encoder(MODEL))(FoundShard(str(IMAGES)))
    assert 100 < len(report.findings) < report.samples, "some have no image"
    assert {finding.error_class for finding in report.findings} == {"schema"}
    assert all("no vision tower" in finding.reason for finding in report.findings)
