"""Records with a `rollout` are read alike in every form, and plain training ignores it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.record_data import KINDS, write_records, write_same_shards
from support.rollout_records import rollout
from support.shard_fakes import micro_batches, open_data

from vlmpack.data.pipeline import TrainData
from vlmpack.encode.rollouts import rollout_of
from vlmpack.errors import DataError
from vlmpack.recipe.sources import Source

COUNT = 12


def drawn(number: int) -> dict[str, Any]:
    ids = [*range(5, 6 + number % 4), 2]
    return {
        "rollout": rollout(
            {"temperature": 0.5 + number % 2 / 2, "log_probs": "after_temperature"},
            token_ids=ids,
            log_probs=[-0.25 * (1 + place) for place in range(len(ids))],
            group=f"group {number // 4}",
            number=number % 4,
            reward=number / 8,
            rewards={"exact": number / 8, "short": -1.5} if number % 3 else {"exact": 0.0},
            finish="length" if number % 2 else "stop",
        )
    }


def opened(path: str, index_dir: Path, **changes: Any) -> TrainData:
    return open_data("", index_dir, sources=(Source(name="d", path=path),), **changes)


@pytest.mark.cases(quick=("json", "csv", "parquet", "tar"), slow=("jsonl", "tsv", "arrow"))
@pytest.mark.parametrize("kind", [*KINDS, "tar"])
def test_every_form_of_records_has_rollouts(tmp_path: Path, kind: str) -> None:
    numbers = range(COUNT)
    if kind == "tar":
        path = write_same_shards(tmp_path / "d", numbers, more=drawn)
    else:
        path = write_records(tmp_path / "d", kind, numbers, more=drawn)
    data = opened(path, tmp_path / "i", shuffle="global")
    found = [sample.rollout for sample in data.samples()]
    assert found == [rollout_of(drawn(number)["rollout"]) for number in numbers]
    assert len({*found}) == COUNT


def test_plain_training_ignores_them(tmp_path: Path) -> None:
    batches = []
    for name, more in (("with", drawn), ("without", lambda number: {})):
        path = write_records(tmp_path / name, "jsonl", range(COUNT), more=more)
        data = opened(path, tmp_path / "i", shuffle="global")
        assert not data.summary().unknown_keys
        batches.append(micro_batches(data, 3))
    assert len(batches[0]) == len(batches[1]) > 2
    for one, two in zip(*batches, strict=True):
        assert one.batch.rollouts is None and one.batch.label_sequences is None
        assert torch.equal(one.batch.input_ids, two.batch.input_ids)
        assert torch.equal(one.batch.labels, two.batch.labels)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_what_is_not_as_expected_is_a_fault_of_the_record(tmp_path: Path, kind: str) -> None:
    def more(number: int) -> dict[str, Any]:
        return drawn(number) if number != 5 else {"rollout": drawn(5)["rollout"] | {"number": -4}}

    path = write_records(tmp_path / "d", kind, range(COUNT), more=more)
    with pytest.raises(DataError, match=r"rollout\.number is -4; expected") as caught:
        opened(path, tmp_path / "i")
    assert (caught.value.error_class, caught.value.key) == ("schema", "000000005")


def test_a_misspelt_key_and_several_answers_are_refused(tmp_path: Path) -> None:
    def misspelt(number: int) -> dict[str, Any]:
        return {"rollouts": drawn(number)["rollout"]}

    path = write_records(tmp_path / "a", "jsonl", range(COUNT), more=misspelt)
    with pytest.raises(DataError, match="did you mean 'rollout'"):
        opened(path, tmp_path / "i")

    def branched(number: int) -> dict[str, Any]:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        return drawn(number) | {"branches": [turns]}

    path = write_records(tmp_path / "b", "jsonl", range(COUNT), more=branched)
    with pytest.raises(DataError, match="'branches' and 'rollout', which is of one answer"):
        opened(path, tmp_path / "i")
