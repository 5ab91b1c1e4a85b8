"""`benchmarks/gpu.py` without a GPU: the command works, and what it counts is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GPU = str(ROOT / "benchmarks/gpu.py")


@pytest.mark.soak
def test_the_tiny_shape_is_measured(tmp_path):
    out = tmp_path / "figures.json"
    command = [GPU, "--shape", "tiny", "--steps", "7", "--only", "in_batch", "--save", str(out)]
    command += ["--work", str(tmp_path / "not/there/yet"), "--set", "trainable.language=lora"]
    command += ["--set", "trainable.vision=frozen", "--set", "trainable.lora.rank=4"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = json.loads(out.read_text())
    assert written["given"]["trainable.lora.rank"] == 4
    found = written["shapes"]["tiny"]["results"]["in_batch"]
    assert found["steps"] == 2
    assert found["fill"] == 1.0
    assert found["loss_difference"] < 1e-6
    assert found["flops_per_second"] > 6 * found["tokens_per_second"] * 1e5  # the layers' weights
    assert "| in_batch |" in done.stdout
    assert "running: in_batch, 7 steps" in done.stderr, "minutes without a word"


@pytest.mark.slow
def test_a_large_shape_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", [GPU, "--shape", "qwen2_5_vl-3b"])
    import gpu

    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main()
    assert "--shape tiny runs without one" in capsys.readouterr().err


def test_a_name_of_no_row_is_refused_with_the_names(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", [GPU, "--shape", "tiny", "--only", "inbatch"])
    import gpu

    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main()
    assert "--only inbatch is in no row's name; here they are none; in_batch; online" in (
        capsys.readouterr().err
    )


def test_steps_that_all_warm_up_are_refused(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", [GPU, "--shape", "tiny", "--steps", "5"])
    import gpu

    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main()
    assert "--steps 5: the first 5 warm up" in capsys.readouterr().err


def test_a_device_that_is_not_known_has_no_peak(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    assert gpu.peak_flops("NVIDIA H200") == 989e12
    assert gpu.peak_flops("cpu") is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl-3b", "qwen3_5-2b"])
def test_shapes_have_the_parameters_of_their_names(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import torch
    from gpu_shapes import SHAPES, shaped_config
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(shaped_config(SHAPES[name]))
    count = sum(parameter.numel() for parameter in model.parameters())
    low, high = {"qwen2_5_vl-3b": (3.7e9, 3.8e9), "qwen3_5-2b": (1.9e9, 2.4e9)}[name]
    assert low < count < high
