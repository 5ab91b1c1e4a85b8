"""Code of a model folder never runs, whatever is answered on standard input."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.payloads import PAYLOADS, marker_of, payload_folder, plant, say
from support.recipes import run_settings, write_recipe
from support.shards import TINY_MODEL
from transformers import AutoModelForImageTextToText, dynamic_module_utils

from vlmpack.cli import main
from vlmpack.encode import Encoder
from vlmpack.errors import ModelError, VlmpackError
from vlmpack.evaluation.generation import load_for_generation
from vlmpack.model_folder.load import load_config, load_image_processor, load_tokenizer
from vlmpack.model_folder.weights import weight_files


@pytest.fixture(autouse=True)
def always_yes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever asks gets a `y`, as often as wanted; transformers is as it was imported."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 1000))
    monkeypatch.setattr(dynamic_module_utils, "TIME_OUT_REMOTE_CODE", 15)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.mark.parametrize(
    "name", ["an unknown image processor", "a processor inside the image processor"]
)
def test_the_payloads_are_live(tmp_path: Path, name: str) -> None:
    """Without the door they run; else nothing here would show anything."""
    from transformers import AutoImageProcessor

    folder = payload_folder(tmp_path / "model", name)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        AutoImageProcessor.from_pretrained(str(folder), local_files_only=True)
    assert marker_of(folder).exists()


@pytest.mark.cases(quick=0.3, slow="*")
@pytest.mark.parametrize("name", PAYLOADS)
def test_a_payload_is_passed_over_or_refused(tmp_path: Path, name: str) -> None:
    """The encoder and the model of every folder; those with a class of transformers' own answer."""
    folder = payload_folder(tmp_path / "model", name)
    refused = PAYLOADS[name][1]
    try:
        model, encoder = load_for_generation(folder)
        encoder.load()
    except VlmpackError as error:
        assert refused, error
        assert str(folder) in str(error)
    else:
        assert not refused
        assert type(model).__module__.startswith("transformers.")
        assert type(encoder.tokenizer).__module__.startswith("transformers.")
        assert "custom_generate" not in vars(model)
    assert not marker_of(folder).exists()


def test_code_is_refused_by_name(tmp_path: Path) -> None:
    folder = payload_folder(tmp_path / "model", "an unknown image processor")
    with pytest.raises(ModelError) as caught:
        Encoder(folder).load()
    message = str(caught.value)
    assert "wants to run its own code (preprocessor_config.json: payload.Payload" in message
    assert "trust_remote_code" not in message


@pytest.mark.parametrize("load", [load_config, load_tokenizer, load_image_processor])
def test_a_call_that_lost_the_flag_raises_instead_of_asking(
    tmp_path: Path, load: Callable[[Path], Any]
) -> None:
    """Behind the door no time is left for an answer, in calls of others too."""
    load(TINY_MODEL)
    folder = payload_folder(tmp_path / "model", "an unknown model type")
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForImageTextToText.from_pretrained(str(folder))
    assert not marker_of(folder).exists()


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/etc/model.safetensors", "a/model.safetensors", "x\\y.safetensors"],
)
def test_listed_weights_lie_in_the_folder(tmp_path: Path, name: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ModelError, match=r"expected names of .* files in the same folder"):
        weight_files(tmp_path)


def test_links_into_a_cache_are_followed(tmp_path: Path) -> None:
    """As the Hub's cache lays its snapshots out."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for path in TINY_MODEL.iterdir():
        blob = tmp_path / "blobs" / f"0{path.name[:3]}{len(path.name)}{path.stat().st_size}"
        blob.write_bytes(path.read_bytes())
        (tmp_path / "snapshot" / path.name).symlink_to(Path("../blobs") / blob.name)
    model, _ = load_for_generation(tmp_path / "snapshot")
    assert sum(parameter.numel() for parameter in model.parameters()) > 1e6


def test_weights_from_elsewhere_are_refused(tmp_path: Path) -> None:
    folder = payload_folder(tmp_path / "model", "a generate function")
    say(folder, "config.json", transformers_weights="other.safetensors")
    with pytest.raises(ModelError, match="would be loaded in place of the folder's weights"):
        load_for_generation(folder)


GENERATE = "generate hello --model MODEL --image IMAGE --max-new-tokens 2"
COMMANDS = (
    "recipe check RECIPE",
    "recipe show RECIPE",
    "families MODEL",
    "plan RECIPE",
    "inspect RECIPE --row 0 -o OUT",
    "pack RECIPE packing.mode=offline -o OUT",
    "verify RECIPE",
    "verify RECIPE --tiny",
    "data show RECIPE --batch 0",
    "data lint --recipe RECIPE",
    "index --recipe RECIPE",
    GENERATE,
    "finetune RECIPE",
    "finetune RECIPE trainable.language=lora run_dir=OUT",
    "finetune RECIPE model.backend=mcore run_dir=OUT",
    "export RUN -o OUT",
    "export RUN --merge -o OUT",
)


def run(command: str, folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a command on a model folder."""
    place.mkdir(parents=True, exist_ok=True)
    recipe = place / "recipe.yaml"
    if not recipe.exists():
        settings = run_settings(
            place,
            model__path=str(folder),
            packing__mode="online",
            training__seq_length=256,
            training__micro_batch_size=1,
            training__global_batch_size=2,
            training__max_steps=1,
        )
        write_recipe(recipe, settings)
    names = {
        "RECIPE": recipe,
        "MODEL": folder,
        "OUT": place / f"out-{sum(1 for _ in place.iterdir())}",
        "RUN": place / "run",
        "IMAGE": place / "image.png",
    }
    Image.new("RGB", (56, 56)).save(names["IMAGE"])
    words = [
        "=".join(str(names.get(part, part)) for part in word.split("=")) for word in command.split()
    ]
    monkeypatch.setattr(sys, "argv", ["vlmpack", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


REFUSED = ("families MODEL", "plan RECIPE", GENERATE, "finetune RECIPE")


@pytest.mark.cases(quick="families MODEL", slow="finetune RECIPE")
@pytest.mark.parametrize("command", REFUSED)
def test_a_command_refuses_a_payload(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder = payload_folder(tmp_path / "model", "an unknown image processor")
    code = run(command, folder, tmp_path / "work", monkeypatch)
    if command.split()[0] != "families":
        assert code == 1
        assert "wants to run its own code" in capsys.readouterr().err
    assert not marker_of(folder).exists()


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::FutureWarning:torch\\.")  # Megatron's calls, after a run on hf
@pytest.mark.parametrize("name", PAYLOADS)
def test_no_command_runs_a_payload(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All commands, on a folder that gets its payload after a run was made from it."""
    folder = shutil.copytree(TINY_MODEL, tmp_path / "model")
    work = tmp_path / "work"
    assert [run(command, folder, work, monkeypatch) for command in COMMANDS] == [0] * len(COMMANDS)
    plant(folder, name)
    longer = ("finetune RECIPE training.max_steps=2", "finetune RECIPE run_dir=OUT")
    codes = {cmd: run(cmd, folder, work, monkeypatch) for cmd in (*COMMANDS, *longer)}
    assert not marker_of(folder).exists()
    works = [codes[command] == 0 for command in (GENERATE, "verify RECIPE", longer[1])]
    assert works == [not PAYLOADS[name][1]] * 3, codes
