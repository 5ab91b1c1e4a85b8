"""Files of ours say their format; one without it is refused by name, whatever number it had."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.carded import a_run

from vlmpack import file_format
from vlmpack.data.index import parts
from vlmpack.data.loading.checked_lines import checked_line
from vlmpack.data.packs.manifest import read_manifest
from vlmpack.data.plan.state import DataState
from vlmpack.encode.settings import NOTES
from vlmpack.errors import PacksError, VlmpackError
from vlmpack.file_format import FORMAT, FileKind
from vlmpack.model_folder.digests import RememberedDigests, SeenFile
from vlmpack.proof.verify import gate
from vlmpack.report.run_files import read_run
from vlmpack.run.card import card_of
from vlmpack.run.replay import read_dump
from vlmpack.run.sample import _Parts
from vlmpack.training.checkpoint import CheckpointReader, find_damage
from vlmpack.training.model_watch import ModelRecord
from vlmpack.training.record import read_launches
from vlmpack.training.reference import ReferenceFile
from vlmpack.training.run_dir import RunDir

KINDS = {name: kind for name, kind in vars(file_format).items() if isinstance(kind, FileKind)}
WRITTEN_ALONE = {"PLAN", "CONVERSION"}
"""Kinds that no part of vlmpack reads again."""


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_kind_takes_its_own_format_alone(kind: FileKind) -> None:
    content = kind.mark({"x": 1})
    assert content == {FORMAT: 1, "x": 1}, "0.1.0 has the first formats"
    kind.take(content, "it", PacksError)
    assert content == {"x": 1}
    words = rf"^it was written by an unreleased vlmpack; remake it with {re.escape(kind.remake)}$"
    with pytest.raises(PacksError, match=words):
        kind.take({"version": 1}, "it", PacksError)
    with pytest.raises(PacksError, match="it has vlmpack_format 2, and this vlmpack reads 1; use"):
        kind.take({FORMAT: 2}, "it", PacksError)
    assert kind.refusal("1", Path("it")) is not None


def written(folder: Path, name: str, content: object) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def raised(read: Callable[[], object]) -> str:
    with pytest.raises(VlmpackError) as error:
        read()
    return str(error.value)


def packs(folder: Path, old: object) -> str:
    written(folder, "pack.json", old)
    return raised(lambda: read_manifest(folder))


def checkpoint(folder: Path, old: object) -> str:
    written(folder, "state.json", old)
    return raised(lambda: CheckpointReader(folder))


def dump(folder: Path, old: object) -> str:
    written(folder, "step-00000001.json", old)
    return raised(lambda: read_dump(folder / "step-00000001.json"))


def complete(folder: Path, old: object) -> str:
    """The end of a checkpoint, which named no digest once."""
    written(folder, "manifest.json", {"files": {}})
    written(folder, "COMPLETE", old)
    return find_damage(folder) or ""


def data_state(_: Path, old: object) -> str:
    return raised(lambda: DataState.from_json(json.dumps(old)))


def model_record(folder: Path, old: object) -> str:
    return raised(lambda: ModelRecord.read(written(folder, "model.json", old)))


def reference(folder: Path, old: object) -> str:
    written(folder, "reference.json", old)
    return raised(ReferenceFile(folder, {}, 1).read)


def rollouts(folder: Path, old: object) -> str:
    """Answers of a sampling that broke off."""
    path = written(folder, "drawn.part", json.dumps(old) + "\n")
    return raised(lambda: _Parts.at(path, {}))


def run(folder: Path, old: object) -> str:
    written(folder, "identity.json", old)
    return raised(RunDir(folder).recorded_identity) + raised(lambda: read_run(folder))


def result(folder: Path, old: object) -> str:
    written(folder, "result.json", old)
    return raised(RunDir(folder).final_figures) + raised(lambda: read_run(folder))


def record(folder: Path, old: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "launches.jsonl").write_bytes(checked_line(old))
    return raised(lambda: read_launches(folder))


def card(folder: Path, name: str, old: object) -> str:
    found, recipe = a_run(folder, steps=1)
    written(found.path, name, old)
    return card_of(found, *recipe, adapter=False, step=1)


def audit(folder: Path, old: object) -> str:
    return card(folder, "audit.json", old)


def verification(folder: Path, old: object) -> str:
    assert gate._kept(written(folder, "kept.json", old), folder / "run") is None
    return card(folder, "verify/verify.json", old)


def index(folder: Path, old: Any, caplog: pytest.LogCaptureFixture) -> str:
    """A part that is sound, with the metadata of then."""
    path = str(folder / "a.0.1.index.part")
    content = io.BytesIO()
    pq.write_table(pa.table({"key": ["k"]}).replace_schema_metadata(old), content)
    Path(path).write_bytes(content.getvalue() + parts.seal(path, content.getvalue()))
    assert parts.read_part(path) is None
    return caplog.text


def digests(folder: Path, old: Any) -> str:
    """They are a cache that nobody is told of: the weights are hashed again."""
    seen, store = SeenFile("1-2-3-4-5", is_young=False), RememberedDigests(folder)
    store.put(seen, {"w": "00"})
    [path] = folder.glob("*.json")
    assert store.get(seen) == {"w": "00"}
    content = json.loads(path.read_text())
    del content[FORMAT]
    written(folder, path.name, content | old)
    assert store.get(seen) is None
    return str(file_format.DIGESTS.refusal(None, path))


def notes(folder: Path, old: Any) -> str:
    for note in NOTES:
        written(folder, note.file, old)
    return "".join(raised(partial(note.read, folder, str)) for note in NOTES)


OLD: list[tuple[str, Callable[..., str], object]] = [
    *(("PACKS", packs, {"version": number, "digest": "0"}) for number in range(1, 6)),
    *(("CHECKPOINT", checkpoint, {"format_version": number}) for number in (1, 2)),
    ("CHECKPOINT", complete, "step 1\n"),
    ("DATA_STATE", data_state, {"version": 1, "epoch": 0, "segments": []}),
    ("MODEL_RECORD", model_record, {"version": 1, "check": "0"}),
    *(("REFERENCE", reference, {"version": number, "facts": {}}) for number in (1, 2)),
    ("ROLLOUTS", rollouts, {"seed": 0}),
    ("RUN", run, {"optim.lr": 0.1}),
    ("RESULT", result, {"steps": 1, "digit_accuracy_after": 0.5}),
    ("SAMPLE_RECORD", record, {"launch": 1, "start": 0, "dp": 1, "state": {}}),
    ("DUMP", dump, {"step": 1, "repeats": True}),
    ("AUDIT", audit, {"proven": True, "batches": 1}),
    ("VERIFICATION", verification, {"passes": True, "checks": [{"name": "loss"}]}),
    ("INDEX", index, {"vlmpack.content": "0"}),
    ("INDEX", index, {"vlmpack.content": "0", "vlmpack.reads": "videos, numbers, no image"}),
    *(("DIGESTS", digests, old) for old in ({}, {"version": 2})),
    (
        "EXPORT_NOTE",
        notes,
        {"date": "2026-01-01", "special_tokens": [], "chat_template_kwargs": {}},
    ),
]


@pytest.mark.parametrize(("name", "read", "old"), OLD)
def test_a_file_of_an_unreleased_version_is_refused_by_name(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    read: Callable[..., str],
    old: object,
) -> None:
    caplog.set_level(logging.INFO, "vlmpack")
    said = read(tmp_path, old, caplog) if read is index else read(tmp_path, old)
    assert "was written by an unreleased vlmpack; remake it with " in said
    assert KINDS[name].remake in said


def test_each_kind_is_among_them() -> None:
    assert {name for name, _, _ in OLD} | WRITTEN_ALONE == KINDS.keys()
    assert not {name for name, _, _ in OLD} & WRITTEN_ALONE


def test_what_a_reference_was_made_from_holds_its_format() -> None:
    """So a part of then is another reference's, whatever the record beside it says."""
    now = ReferenceFile(Path(), {"weights": "ab"}, 1)._digest
    then = json.dumps([2, {"weights": "ab"}], sort_keys=True).encode()
    assert now != hashlib.blake2b(then, digest_size=16).digest()
