"""What of a recipe's places this disk has not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.recipes import run_settings

from vlmpack.api import resolve
from vlmpack.build.look import missing_places


def test_each_split_has_its_line(tmp_path: Path) -> None:
    recipe = resolve(run_settings(tmp_path), {})
    assert missing_places(recipe) == []
    gone = {"data__train": f"{tmp_path}/no.tar", "data__validation": f"{tmp_path}/none-*.tar"}
    train, validation = missing_places(resolve(run_settings(tmp_path, **gone), {}))
    assert train.startswith(f"data.train: '{tmp_path}/no.tar' matches no file")
    assert validation.startswith(f"data.validation: '{tmp_path}/none-*.tar' matches no file")


OFFLINE = {
    "packing__mode": "offline",
    "packing__max_tokens": 2048,
    "training__micro_batch_size": 1,
}


@pytest.mark.parametrize(
    ("changes", "key", "made", "near"),
    [
        ({"model__path": "{}/modls/tiny"}, "model.path", "models/tiny", "models/tiny"),
        ({"model__path": "{}/modls/tinny"}, "model.path", "Models/Tiny", "Models/Tiny"),
        ({"model__adapter": "{}/adapter"}, "model.adapter", "adapters", "adapters"),
        ({"data__image_root": "{}/photo"}, "data.image_root", "photos", "photos"),
        ({**OFFLINE, "packing__path": "{}/pack"}, "packing.path", "packs", "packs"),
        ({"data__train": "{}/tran-*.jsonl"}, "data.train", "train-0.jsonl", "train-0.jsonl"),
        ({"data__train": "{}/dta/x.jsonl"}, "data.train", "data/x.jsonl", "data/x.jsonl"),
        (
            {"data__validation": {"path": "python:own", "name": "v", "image_root": "{}/photo"}},
            "data.validation.v.image_root",
            "photos",
            "photos",
        ),
    ],
)
def test_each_place_has_its_line_and_a_name_like_it(
    tmp_path: Path, changes: dict[str, Any], key: str, made: str, near: str
) -> None:
    def placed(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: placed(each) for name, each in value.items()}
        return value.replace("{}", str(tmp_path / "here")) if isinstance(value, str) else value

    (tmp_path / "here").mkdir()
    recipe = resolve(run_settings(tmp_path, **placed(changes)), {})
    (line,) = [line for line in missing_places(recipe) if line.startswith(f"{key}: ")]
    assert "did you mean" not in line, "nothing is there"
    (tmp_path / "here" / made).mkdir(parents=True)
    (line,) = [line for line in missing_places(recipe) if line.startswith(f"{key}: ")]
    assert line.endswith(f"; did you mean '{tmp_path}/here/{near}'?")
