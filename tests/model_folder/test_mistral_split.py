"""A Mistral model whose tokenizer.json splits texts as Llama 3's is encoded as it was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.families import tiny_family_folder
from transformers import AutoTokenizer

from vlmpack.backends.export import save_model_folder
from vlmpack.backends.hf.load import load_model
from vlmpack.encode import Encoder
from vlmpack.errors import ModelError
from vlmpack.model_folder.load import load_tokenizer
from vlmpack.model_folder.mistral_split import LLAMA_3, is_corrected, may_be_wrong

TEXT = "12 eggs"
MOST = 100_000
"""Tokens up to which transformers takes a tokenizer for one of another line."""


def split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            },
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": False,
            },
        ],
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mistral 3 with a token for 12, which Mistral's split never reaches."""
    folder = tiny_family_folder("mistral3", tmp_path_factory.mktemp("mistral3"))
    tokens = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokens["model"]["vocab"]
    tokens["model"]["merges"].insert(0, ["1", "2"])
    vocabulary["12"] = 1000
    vocabulary |= {f"<spare {n}>": 1001 + n for n in range(MOST)}
    tokens["pre_tokenizer"] = split(LLAMA_3)
    (folder / "tokenizer.json").write_text(json.dumps(tokens), encoding="utf-8")
    return folder


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    """As it was published."""
    for path in source.iterdir():
        (tmp_path / path.name).symlink_to(path)
    write(tmp_path / "config.json", transformers_version="4.50.3")
    return tmp_path


def write(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    path.unlink()
    path.write_text(json.dumps(content), encoding="utf-8")


def ids(tokenizer: Any) -> list[str]:
    return [str(one) for one in tokenizer.tokenize(TEXT)]


@pytest.mark.slow
def test_the_corrected_split_is_taken_recorded_and_exported(folder: Path, tmp_path: Path) -> None:
    encoder = Encoder(folder)
    found = encoder.tokenizer
    assert ids(found)[:2] == ["1", "2"]
    assert is_corrected(found)
    exported = tmp_path / "export"
    model = load_model(folder)
    save_model_folder(model, model.state_dict(), exported, processor_from=folder, dtype=None)
    plain = AutoTokenizer.from_pretrained(str(exported))  # nobody asks for a correction
    assert ids(plain) == ids(found)
    assert not is_corrected(load_tokenizer(exported))
    # What packs and runs go by has it: the file alone does not say it.
    write(folder / "config.json", transformers_version="5.24.0")
    untouched = Encoder(folder)
    assert ids(untouched.tokenizer)[0] == "12"
    assert untouched.fingerprint != encoder.fingerprint
    theirs, ours = untouched.fingerprint_parts, encoder.fingerprint_parts
    assert {name for name in ours if ours[name] != theirs[name]} == {"tokenizer"}


@pytest.mark.soak
def test_a_folder_may_say_what_is_right(folder: Path) -> None:
    write(folder / "tokenizer_config.json", fix_mistral_regex=False)
    kept = load_tokenizer(folder)
    assert ids(kept)[0] == "12" and not is_corrected(kept)
    write(folder / "tokenizer_config.json", fix_mistral_regex=True)
    assert ids(load_tokenizer(folder))[:2] == ["1", "2"]


@pytest.mark.soak
def test_another_split_is_neither_kept_nor_replaced_unasked(folder: Path) -> None:
    write(folder / "tokenizer.json", pre_tokenizer=split(r"\\s+|\\S+"))
    assert not may_be_wrong(folder)
    with pytest.raises(ModelError, match=r'Set "fix_mistral_regex" in tokenizer_config.json'):
        load_tokenizer(folder)
    right = AutoTokenizer.from_pretrained(str(folder), fix_mistral_regex=True)
    write(folder / "tokenizer.json", **json.loads(right.backend_tokenizer.to_str()))
    assert not is_corrected(load_tokenizer(folder))  # it is right as it is, and warned of


@pytest.mark.soak
def test_llama_3_itself_is_left_alone(folder: Path) -> None:
    write(folder / "config.json", model_type="llama")
    assert may_be_wrong(folder)
    assert ids(load_tokenizer(folder))[0] == "12"
