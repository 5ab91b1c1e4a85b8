"""`benchmarks/gpu_table.py` without a GPU: its list runs, and its figures follow from the rows."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from support.shards import ROOT

BENCHMARKS = str(ROOT / "benchmarks")
with patch.object(sys, "path", [BENCHMARKS, *sys.path]):  # it has a run.py, as tests/ has a run/
    import gpu_table
    from gpu_row import KERNELS
    from gpu_table import ROWS, Row, factors, go_down, has_model, measured, modelled

needs_no_gpu = pytest.mark.skipif(
    gpu_table.torch.cuda.is_available(), reason="it says what a machine without a GPU says"
)


@needs_no_gpu
def test_without_a_gpu_it_says_so_and_prints_the_model(capsys):
    with pytest.raises(SystemExit) as ended:
        gpu_table.main([])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert "No GPU was found: this torch is" in said and "add --fake" in said
    assert "These are the model's figures. Nothing here was measured." in said
    for row in ROWS:
        if has_model(row):
            assert f"| {row.name} | - | " in said, "a row has no figure: --record writes it"
        elif row.asked:
            assert f"- {row.name}: the recorder does not make this step" in said


def test_rows_that_are_left_out_are_named_and_each_is_saved(monkeypatch):
    clock, saved = iter((0, 0, 0, 30, 30, 30, 55, 55)), []
    monkeypatch.setattr(gpu_table, "measured", lambda row, seconds, fake: {"got": seconds})
    found = go_down(
        ROWS[:3],
        minutes=1.0,
        fake=True,
        save=lambda rows: saved.append(json.loads(json.dumps(rows))),
        now=lambda: next(clock),
    )
    first, second, third = (row.name for row in ROWS[:3])
    assert found[first] == {"got": 60, "wall_seconds": 30}
    assert found[second] == {"got": 30, "wall_seconds": 25}
    assert found[third] == {"left_out": "time up"}
    assert [len(each) for each in saved] == [1, 2, 3]
    page = gpu_table.page(
        {"command": "", "date": "", "here": {"card": "-"}, "rows": found}, ROWS[:3], fake=True
    )
    assert f"- {third}: time up" in page


def test_a_row_says_why_it_has_no_figures(monkeypatch):
    row = Row("one", "kernels", needs=("no_such_module",))
    assert measured(row, 60, fake=True) == {"left_out": "package missing: no_such_module"}
    assert measured(Row("one", "kernels"), 0.01, fake=True) == {"left_out": "killed after 0 s"}
    failed = measured(Row("one", "no such kind"), 60, fake=True)
    assert failed["left_out"] == "failed: KeyError: 'no such kind'"
    full = SimpleNamespace(returncode=1, stdout="", stderr="torch.OutOfMemoryError: CUDA ...")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: full)
    assert measured(Row("one", "kernels"), 60, fake=True)["left_out"] == "out of memory"


def test_the_card_s_factors_are_those_of_the_kernels():
    """Products may be slower than the model by one factor and copies by another. The odd product
    does not count, since the package pads it."""
    slower = {"products": 1.2, "bytes": 1.3, "attention": 1.5}
    found = {
        kernel.name: [slower[kernel.kind] * cost.seconds for cost in modelled(kernel)]
        for kernel in KERNELS
    }
    assert factors(found) == pytest.approx(slower)
    odd = next(kernel.name for kernel in KERNELS if not kernel.counts)
    assert factors({**found, odd: [1.0]}) == pytest.approx(slower)
    assert factors({**found, KERNELS[0].name: [1.0]})["products"] > 10
    step = {"seconds": {"products": 1.0, "bytes": 2.0, "attention": 3.0}, "calls": 1000}
    assert gpu_table.predicted_seconds(step, slower) == pytest.approx(1.2 + 2 * 1.3 + 3 * 1.5)
    hosted = {**step, "calls": 1e6}
    assert gpu_table.predicted_seconds(hosted, slower) == pytest.approx(24.0), "the host is slower"


def test_a_measured_table_has_the_card_beside_the_model():
    """A card that takes 1.25 times the model's time for everything is predicted, once its kernels
    are timed. A row of the Trainer stands beside the row whose samples it takes."""
    model = gpu_table.read_model()["full"]
    seconds = 1.25 * sum(model["seconds"].values())
    kernels = {
        kernel.name: [1.25 * cost.seconds for cost in modelled(kernel)] for kernel in KERNELS
    }
    step = {"step_seconds": [9.0, seconds, 0.1], "tokens": model["tokens"], "losses": [2.5]}
    trainer = {**step, "step_seconds": [2 * seconds]}
    found = {"kernels": {"seconds": kernels}, "full": step, ROWS[2].name: trainer}
    here = {"card": "NVIDIA H200"}
    content = {"command": "this", "date": "today", "here": here, "rows": found}
    page = gpu_table.page(content, ROWS, fake=False)
    assert "`this`, today, one NVIDIA H200" in page
    assert "products 1.25, bytes 1.25, attention 1.25" in page
    assert "| 528 TFLOP/s | 660 TFLOP/s | 1.25 |" in page
    lines = {
        line.split("|")[1].strip(): line.split("|")[2:] for line in page.splitlines() if "|" in line
    }
    rate, plain, scaled, time = (float(cell.replace(",", "")) for cell in lines["full"][:4])
    assert rate == pytest.approx(model["tokens"] / seconds, abs=1)
    assert plain == pytest.approx(1.25 * rate, abs=2) and (scaled, time) == (rate, 1.0)
    assert lines[ROWS[2].name][5].strip() == "0.50 x full"


def test_a_kernel_s_model_is_that_of_the_constants():
    """By hand, from the sizes of two of them: 660 TFLOP/s, and 4 TB/s of three tensors."""
    by_name = {kernel.name: modelled(kernel) for kernel in KERNELS}
    product = by_name["mm 8,192 x 2,048 x 11,008"][0]
    assert product.seconds == pytest.approx(2 * 8192 * 2048 * 11008 / 660e12)
    copy = by_name["add of 67 MB in float32"][0]
    assert copy.seconds == pytest.approx(3 * 67_108_864 / 4.0e12)


@pytest.mark.slow
def test_the_whole_list_runs_on_a_cpu(tmp_path):
    """Each row runs with tiny shapes. The Trainer is an independent reference: it has the losses of
    the rows whose samples it takes, step by step."""
    out = tmp_path / "table.json"
    command = [f"{BENCHMARKS}/gpu_table.py", "--fake", "--minutes", "20", "--save", str(out)]
    ran = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = json.loads(out.read_text())["rows"]
    assert list(rows) == [row.name for row in ROWS]
    left = {name: row["left_out"] for name, row in rows.items() if "left_out" in row}
    assert all(why.startswith("package missing: ") for why in left.values()), left
    for row in ROWS:
        if row.kind == "step" and row.name not in left:
            assert rows[row.name]["loss_difference"] < 1e-6
        if row.kind == "trainer" and row.name not in left:
            ours, theirs = rows[row.beside], rows[row.name]
            assert theirs["tokens"] == ours["tokens"]
            # Adapters draw their first weights, which the first loss does not see.
            same = 1 if row.asked.get("language") == "lora" else 3
            assert theirs["losses"][:same] == pytest.approx(ours["losses"][:same], rel=1e-6)
    third = [rows[name]["losses"][2] for name in ("full", "lora")]
    assert abs(third[0] - third[1]) > 1e-2 * third[0], "a loss that no training moves"
    assert "No figure says anything of a GPU" in out.with_suffix(".md").read_text()
