"""A class that no family of ours serves trains only where `verify` has passed on it."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.whole_runs import assert_same_steps, finetune_in_ranks

import vlmpack
from tools.sweep.folder import write_folder
from tools.sweep.one import write_shard
from vlmpack.backends.hf import model as hf_model
from vlmpack.build.data import build_encoder
from vlmpack.build.engine import engine_spec
from vlmpack.capabilities import refused
from vlmpack.distributed import Ranks
from vlmpack.errors import CapabilityError, VerificationError
from vlmpack.model_folder.digests import RememberedDigests, hashing_weights
from vlmpack.proof.verify import gate, memory, run
from vlmpack.proof.verify.run import Verification
from vlmpack.recipe import load_recipe

CLASS = "llava_next"
"""A class that no family of ours serves."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tiny model folder and a shard."""
    root = tmp_path_factory.mktemp("gate")
    (root / "model").mkdir()
    write_folder(CLASS, root / "model")
    write_shard(root / "train.tar", images=True)
    return root


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """No record of anybody's, and no word of a sweep."""
    monkeypatch.setenv("VLMPACK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(refused, "SWEPT", {})


def settings(made: Path, run_dir: Path) -> dict[str, Any]:
    """A run of one step."""
    return {
        "model": {"path": str(made / "model")},
        "data": {"train": str(made / "train.tar"), "num_workers": 0},
        "packing": {"mode": "in_batch"},
        "training": {
            "micro_batch_size": 8,
            "global_batch_size": 8,
            "seq_length": 8192,
            "max_steps": 1,
        },
        "optim": {"lr": 1e-4},
        "logging": {"trackers": [], "progress": "none"},
        "export": {"enabled": False},
        "run_dir": str(run_dir),
    }


def record(run_dir: Path) -> dict[str, Any]:
    """What verify wrote beside the run."""
    found: dict[str, Any] = json.loads((run_dir / "verify" / "verify.json").read_text())
    return found


@pytest.mark.slow
def test_the_first_launch_verifies_and_later_ones_find_its_record(made, tmp_path, monkeypatch):
    vlmpack.finetune(settings(made, tmp_path / "first"))
    assert (tmp_path / "first" / "metrics.jsonl").is_file()
    found = record(tmp_path / "first")
    assert found["passes"] and len(found["checks"]) >= 10
    (kept,) = (tmp_path / "cache" / "proofs").iterdir()

    def never(*args: Any) -> None:
        raise AssertionError("verified again")

    monkeypatch.setattr(gate, "verify_split", never)
    vlmpack.finetune(settings(made, tmp_path / "second"))
    assert record(tmp_path / "second") == json.loads(kept.read_text()) == found
    changed = settings(made, tmp_path / "third")
    changed["packing"]["alignment"] = 16  # other rows are another matter; 8 is the default
    with pytest.raises(AssertionError, match="verified again"):
        vlmpack.finetune(changed)


def test_what_changes_in_the_folder_is_seen_by_its_bytes_wherever_it_lies(made, tmp_path):
    def key(folder: Path) -> str:
        recipe = load_recipe(settings(made, tmp_path / "run") | {"model": {"path": str(folder)}})
        engine = engine_spec(recipe, build_encoder(recipe), Ranks())
        with hashing_weights(folder, Ranks(), RememberedDigests(tmp_path / "digests")) as hashing:
            return gate.proof_key(engine, recipe.objective, recipe.packing, hashing.finish())

    first = key(made / "model")
    copy = tmp_path / "copy"
    shutil.copytree(made / "model", copy)
    assert key(copy) == first
    for name in ("model.safetensors", "chat_template.jinja", "config.json", "tokenizer.model"):
        other = tmp_path / f"other-{name}"
        shutil.copytree(made / "model", other)
        change(other / name)
        assert key(other) != first, name


def change(path: Path) -> None:
    """One byte of a file that was there, at its size and time; a file that was not."""
    if not path.is_file():
        path.write_bytes(b"pieces")
        return
    data, seen = bytearray(path.read_bytes()), path.stat()
    at = len(data) - 2 if path.suffix == ".safetensors" else data.index(b" ")
    data[at] = data[at] ^ 1 if path.suffix == ".safetensors" else ord("\n")
    path.write_bytes(data)
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))


@pytest.mark.soak
def test_a_cache_that_cannot_be_written_costs_the_record_alone(made, tmp_path, monkeypatch, caplog):
    found = Verification(checks=(), facts={"samples": [{"images": 1}]})
    monkeypatch.setattr(gate, "_proven", lambda *given: found)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "proofs").write_text("no folder")
    with caplog.at_level("WARNING", logger="vlmpack"):
        vlmpack.finetune(settings(made, tmp_path / "run"))
    assert (tmp_path / "run" / "metrics.jsonl").is_file()
    assert "the next launch verifies again" in caplog.text


@pytest.mark.soak
def test_text_alone_is_no_proof_for_a_later_launch_with_images(made, tmp_path, caplog):
    write_shard(tmp_path / "texts.tar", images=False)
    texts = settings(made, tmp_path / "run")
    texts["data"]["train"] = str(tmp_path / "texts.tar")
    with caplog.at_level("WARNING", logger="vlmpack"):
        vlmpack.finetune(texts)
    assert record(tmp_path / "run")["passes"]
    assert "no sample that was compared has an image, so the record is not kept" in caplog.text
    assert not (tmp_path / "cache" / "proofs").exists()


@pytest.mark.slow
def test_a_model_that_fails_trains_nothing_and_the_check_is_named(made, tmp_path, monkeypatch):
    monkeypatch.setattr(hf_model, "logit_scale", lambda model: 1.01)  # in ours alone
    with pytest.raises(VerificationError, match=r"serves llava_next, .*loss of each sample"):
        vlmpack.finetune(settings(made, tmp_path / "run"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert not (tmp_path / "cache" / "proofs").exists()
    assert record(tmp_path / "run")["passes"] is False


@pytest.mark.soak
@pytest.mark.parametrize("broken", [False, True])
def test_a_model_too_large_is_verified_tiny_and_by_one_sample(made, tmp_path, monkeypatch, broken):
    read = memory.require_memory

    def small(folder: Path, *args: Any, **options: Any) -> None:
        if folder == made / "model":  # the tiny one fits
            raise memory.TooLarge("verify compares 7 parameters")
        read(folder, *args, **options)

    monkeypatch.setattr(run, "require_memory", small)
    if broken:
        stock = gate._packed_losses
        monkeypatch.setattr(gate, "_packed_losses", lambda *given: stock(*given) * (1 + 1e-4))
        with pytest.raises(VerificationError, match=gate.NAME):
            vlmpack.finetune(settings(made, tmp_path / "run"))
    else:
        vlmpack.finetune(settings(made, tmp_path / "run"))
    found = record(tmp_path / "run")
    assert found["checks"][-1]["name"] == gate.NAME
    assert re.search(r"[1-9]\d* label tokens, 3 images", found["checks"][-1]["detail"])
    assert found["forward_on"] == "the folder's weights" and len(found["checks"]) >= 10
    assert "random weights" in found["weights"]


@pytest.mark.soak
def test_replicas_take_one_processs_steps_where_weights_get_no_gradient(made, tmp_path):
    config = json.loads((made / "model" / "config.json").read_text())
    assert config["vision_feature_layer"] == -2, "the tower's last layer is trained in vain"
    given = settings(made, tmp_path / "one")
    given["training"] |= {"micro_batch_size": 2, "global_batch_size": 4, "max_steps": 2}
    vlmpack.finetune(given)
    recipe = tmp_path / "two.yaml"
    recipe.write_text(json.dumps({**given, "run_dir": str(tmp_path / "two")}))
    done = finetune_in_ranks(recipe, processes=2)
    assert done.returncode == 0, done.stderr[-4000:]
    assert_same_steps(tmp_path / "two", tmp_path / "one", 2)


@pytest.mark.slow
def test_processes_that_share_rows_are_verified_and_take_one_processs_steps(made, tmp_path):
    given = settings(made, tmp_path / "one")
    given["training"] |= {"micro_batch_size": 2, "global_batch_size": 4, "max_steps": 2}
    vlmpack.finetune(given)
    recipe = tmp_path / "two.yaml"
    shared = {**given, "parallelism": {"context": 2}, "run_dir": str(tmp_path / "two")}
    recipe.write_text(json.dumps(shared))
    done = finetune_in_ranks(recipe, processes=2)
    assert done.returncode == 0, done.stderr[-4000:]
    found = record(tmp_path / "two")
    assert found["passes"] and any(
        check["name"].startswith("gradients") for check in found["checks"]
    )
    assert_same_steps(tmp_path / "two", tmp_path / "one", 2)


def test_weights_that_no_host_holds_are_refused_before_they_are_read(made, monkeypatch):
    memory.require_room_for_weights(made / "model")
    monkeypatch.setattr(memory, "available_bytes", lambda: 1 << 10)
    with pytest.raises(CapabilityError, match="one sample on its own weights"):
        memory.require_room_for_weights(made / "model")


def test_a_loop_of_ones_own_has_no_proof(made):
    encoder = vlmpack.Encoder(made / "model")
    with pytest.raises(CapabilityError, match="a training loop outside of it does not"):
        vlmpack.packed_model(None, encoder)
