"""Folders that are quantised already: read as transformers dequantises them, trained as bases.

python -m model_folder.test_quantised_folders FOLDER      (in an environment with both packages)
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from backends.hf import replicas
from safetensors.torch import load_file, save_file
from support.engines import make_engine, make_stepper, policy
from support.quantised_folders import BITSANDBYTES, WORDS, make, their_dense
from support.references import path_of
from support.runs import relative_l2
from support.shards import TINY_MODEL
from support.stock import StockProcessor

from vlmpack.backends.hf.frozen import PackedLinear, packing_error
from vlmpack.backends.hf.load import load_model
from vlmpack.encode import Encoder
from vlmpack.forecast.memory import memory_figures
from vlmpack.forecast.parameters import read_sizes
from vlmpack.forecast.trained import trained_sizes
from vlmpack.model_folder.quantised import dense_headers, dense_tensors
from vlmpack.model_folder.safetensors_read import READABLE, StoredTensor, read_into
from vlmpack.recipe.schema import ModelSection, ParallelismSection
from vlmpack.run.export import merge_folders

KINDS = [*BITSANDBYTES, *WORDS, "fp8"]
DEAL: replicas.Deal = [[[0, 1, 2], [3, 4, 5]]]


def trained(folder: Path, samples: Any, **modes: Any) -> tuple[Any, list[list[float]]]:
    """An engine, and its first steps."""
    chosen = policy("frozen", "full", "lora", seed=3, **modes)
    stepper = make_stepper(make_engine(folder, Encoder(folder), policy=chosen))
    stepper.schedule = lambda step: 0.01
    return stepper.engine, replicas.train(stepper, DEAL, samples, count=3)


def planned(folder: Path, engine: Any) -> int:
    figures = memory_figures(
        ModelSection(path=str(folder), dtype="float32"),
        ParallelismSection(),
        read_sizes(folder),
        replicas_mode(),
        global_batch_size=6,
        world_size=1,
        trained=trained_sizes(engine.policy, Encoder(folder)),
    )
    return figures.weights


def replicas_mode() -> Any:
    from support.plans import mode_of

    return mode_of(max_row_slots=512, max_row_patches=64)


def looked_at(kind: str, folder: Path, samples: Any, cooked: Any) -> dict[str, Any]:
    """One folder: its weights and logits, and training on it and on a dense one like it."""
    make(kind, folder)
    theirs, ours = their_dense(kind, folder).eval(), load_model(folder).eval()
    arguments = StockProcessor(TINY_MODEL)(cooked).arguments()
    with torch.no_grad():
        logits = [model(**arguments).logits for model in (ours, theirs)]
    right, own = dict(theirs.named_parameters()), dict(ours.named_parameters())
    plain = dict(load_model(TINY_MODEL).named_parameters())
    dense = folder.parent / f"{kind} dense"
    ours.save_pretrained(dense)
    for path in TINY_MODEL.iterdir():
        if path.is_file() and not (dense / path.name).exists() and path.suffix == ".json":
            (dense / path.name).write_bytes(path.read_bytes())
    engine, rows = trained(folder, samples)
    held = [p.nbytes for p in engine.vlm.model.parameters()]
    packed = [m for m in engine.vlm.model.modules() if isinstance(m, PackedLinear)]
    return {
        "same names": right.keys() == own.keys(),
        "weights": max(relative_l2(own[n].detach(), right[n].detach()) for n in right),
        "logits": relative_l2(*logits),
        "lost": max(relative_l2(own[n].detach(), plain[n].detach()) for n in plain),
        "packed": len(packed),
        "rows": rows,
        "dense": trained(dense, samples)[1],
        "held": sum(held),
        "planned": planned(folder, engine),
        "config": "quantization_config" in (dense / "config.json").read_text(),
    }


def main(folder: Path) -> None:
    """All kinds, into FOLDER/found.json."""
    from support.shards import mixed_samples

    samples, mixed = replicas.encoded_samples(), mixed_samples()
    found = {kind: looked_at(kind, folder / kind, samples, mixed[0]) for kind in KINDS}
    (folder / "found.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("quantised")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "model_folder.test_quantised_folders", folder],
        env=path_of("bitsandbytes compressed_tensors loguru", folder),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads((folder / "found.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_that_transformers_dequantises(
    results: dict[str, dict[str, Any]], kind: str
) -> None:
    found = results[kind]
    assert found["same names"]
    assert found["weights"] < 1e-6
    assert found["logits"] < 1e-5
    assert 5e-3 < found["lost"] < 0.2, "guard: nothing was quantised"
    assert not found["config"], "what is written is dense"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_base_trains_as_its_dense_weights_do(
    results: dict[str, dict[str, Any]], kind: str
) -> None:
    """Frozen layers of bitsandbytes stay packed, and `plan` knows it."""
    found = results[kind]
    for ours, theirs in zip(found["rows"], found["dense"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert found["rows"][0][0] - found["rows"][-1][0] > 0.05, "nothing was learnt"
    assert (found["packed"] >= 28) == (kind in BITSANDBYTES)
    assert found["planned"] == found["held"]


def stored_whole(stored: StoredTensor) -> torch.Tensor:
    made = torch.empty(stored.shape, dtype=READABLE[stored.dtype])
    read_into(made, stored, tuple(slice(0, n) for n in stored.shape))
    return made


def folder_of(folder: Path, tensors: dict[str, torch.Tensor], **section: Any) -> Path:
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "qwen2_5_vl", "quantization_config": section}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_a_merge_is_dense_in_16_bits_and_says_what_that_loses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, out = make("fp8", tmp_path / "fp8"), tmp_path / "merged"
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    (codes, *_) = [name for name in tensors if name.endswith("_scale_inv")]
    for name in (codes, codes.removesuffix("_scale_inv")):  # a layer that predicts further tokens
        tensors[f"mtp.{name}"] = tensors[name].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    chosen = policy("frozen", "frozen", "lora", seed=3)
    engine = make_engine(folder, Encoder(folder), policy=chosen)
    for name, value in engine.parameters():
        value.data += 1e-3 * ("lora_B" in name)
    engine.export_adapter(tmp_path / "adapters", base=str(folder))
    assert merge_folders(folder, [tmp_path / "adapters"], out, dtype="auto") is torch.bfloat16
    (note,) = [line for line in caplog.messages if "is quantised, and what" in line]
    said = float(note.partition(" merged ones by ")[2].split()[0])
    engine.export(tmp_path / "wide", processor_from=folder, dtype=torch.float32)
    wide, written = (load_file(at / "model.safetensors") for at in (tmp_path / "wide", out))
    assert {value.dtype for value in written.values()} == {torch.bfloat16}
    assert not [name for name in written if name.startswith("mtp.")]
    (left,) = {line for line in caplog.messages if "are not in the export" in line}
    assert "mtp." in left
    assert "quantization_config" not in (out / "config.json").read_text()
    flat = [
        torch.cat([each[n].float().flatten() for n in sorted(wide)]) for each in (written, wide)
    ]
    assert 1e-5 < said < 4e-3
    assert relative_l2(*flat) == pytest.approx(said, rel=0.05)


@pytest.mark.slow
def test_the_error_of_packing_is_that_of_the_weights() -> None:
    chosen = policy("frozen", "frozen", "lora", quantize="int8")
    engine = make_engine(TINY_MODEL, Encoder(TINY_MODEL), policy=chosen)
    found = packing_error(engine.vlm.model, load_model(TINY_MODEL))
    plain = dict(load_model(TINY_MODEL).named_parameters())
    weights = [v.detach() for n, v in plain.items() if "visual" not in n and "_proj.weight" in n]
    lost = [rounded(value) for value in weights]
    expected = relative_l2(*(torch.cat([x.flatten() for x in each]) for each in (lost, weights)))
    assert len(weights) == 28 and 1e-3 < expected < 2e-2
    assert found == pytest.approx(expected, rel=1e-4)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """A row's largest value is 127."""
    step = weight.abs().amax(1, keepdim=True) / 127
    return (weight / step).round() * step


def test_blocks_at_the_edges_are_smaller(tmp_path: Path) -> None:
    """Published folders of 128 x 128 blocks have them; transformers refuses these."""
    scales = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    tensors = {"a.weight": torch.ones(5, 6).to(torch.float8_e4m3fn), "a.weight_scale_inv": scales}
    folder = folder_of(tmp_path, tensors, quant_method="fp8", weight_block_size=[3, 4])
    found = dense_tensors(folder, stored_whole).tensors
    expected = torch.ones(5, 6)
    for row in range(5):
        for column in range(6):
            expected[row, column] = scales[row // 3, column // 4]
    assert found.keys() == {"a.weight"}
    assert torch.equal(found["a.weight"].float(), expected)
    assert dense_headers(folder)["a.weight"].shape == (5, 6)


def test_a_folder_without_its_scales_is_refused(tmp_path: Path) -> None:
    from vlmpack.errors import ModelError

    words = torch.zeros(4, 2, dtype=torch.int32)
    groups = {"group_0": {"weights": {"type": "int", "num_bits": 4}}}
    section = {"format": "pack-quantized", "config_groups": groups}
    tensors = {"a.weight_packed": words}
    folder = folder_of(tmp_path, tensors, quant_method="compressed-tensors", **section)
    with pytest.raises(ModelError, match=r"cannot be read: KeyError: 'a\.weight_scale'"):
        dense_headers(folder)


@pytest.mark.parametrize("groups", [2, 3])
def test_groups_of_unequal_sizes_are_refused(tmp_path: Path, groups: int) -> None:
    """compressed-tensors warns of them when it writes, and cannot read them."""
    from vlmpack.errors import ModelError

    tensors = {
        "a.weight_packed": torch.full((4, 2), 0x11111111, dtype=torch.int32),
        "a.weight_scale": torch.ones(4, groups),
        "a.weight_shape": torch.tensor([4, 16]),
    }
    section: dict[str, Any] = {
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 4}}},
    }
    folder = folder_of(tmp_path, tensors, quant_method="compressed-tensors", **section)
    if groups == 2:
        found = dense_tensors(folder, stored_whole).tensors["a.weight"]
        assert torch.equal(found, torch.full((4, 16), -7.0))
        return
    with pytest.raises(ModelError, match="a has 16 columns in 3 groups"):
        dense_headers(folder)


@pytest.mark.parametrize("order", [0, 2])
def test_codes_in_the_order_of_a_kernel_are_refused(tmp_path: Path, order: int) -> None:
    """Early versions of bitsandbytes saved them so, under names that say nothing of it."""
    from vlmpack.errors import ModelError

    tensors = {
        "a.weight": torch.ones(4, 8, dtype=torch.int8),
        "a.SCB": torch.full((4,), 127.0),
        "a.weight_format": torch.tensor(order, dtype=torch.uint8),
    }
    folder = folder_of(tmp_path, tensors, quant_method="bitsandbytes", load_in_8bit=True)
    if order == 0:
        assert torch.equal(
            dense_tensors(folder, stored_whole).tensors["a.weight"], torch.ones(4, 8)
        )
        return
    with pytest.raises(ModelError, match="a has its codes in order 2, expected 0"):
        dense_headers(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
