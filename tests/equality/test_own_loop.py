"""The loops of docs/own-loop.md compute what the stock model computes, one sample at a time."""

from __future__ import annotations

import json
import pickle
import re
import runpy
import subprocess
import sys

import pytest
import torch
from support.runs import GRADIENT_TOLERANCE, LOSS_TOLERANCE, NO_GRADIENT, relative_l2
from support.shards import ROOT
from torch.optim.optimizer import register_optimizer_step_pre_hook

import vlmpack
from vlmpack.errors import DataError, PackingError

PAGE = ROOT / "docs" / "own-loop.md"
LOOPS = dict(
    zip(
        ("accelerate", "trainer", "trl"),
        re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL),
        strict=True,
    )
)


def image_names(count):
    return [f"{place}.jpg" for place in range(count)]


@pytest.fixture
def records(mixed):
    """What a user of the page holds: records, and image files by name."""
    return [
        ({"messages": s.messages}, dict(zip(image_names(len(s.images)), s.images, strict=True)))
        for s in mixed
    ]


@pytest.fixture
def run(tmp_path, monkeypatch, tiny_folder, records):
    """Run one of the page's loops for one step of two rows; the loss, and gradients by name."""

    def runs(loop, change=lambda names: None):
        if loop == "trl":
            pytest.importorskip("trl", reason="trl is not installed: docs/conformance.md says how")
        file = tmp_path / f"{loop}.py"
        file.write_text(LOOPS[loop])
        monkeypatch.chdir(tmp_path)
        names = runpy.run_path(str(file))
        change(names)
        seen = []

        def keep(optimizer, *_):
            groups = optimizer.param_groups
            seen.append({id(p): p.grad.clone() for g in groups for p in g["params"]})

        hook = register_optimizer_step_pre_hook(keep)
        trainer = {
            "per_device_train_batch_size": 3,
            "gradient_accumulation_steps": 2,
            "num_train_epochs": 1,
            "logging_steps": 1,
            "max_grad_norm": 0.0,
            "train_sampling_strategy": "sequential",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
        }
        sizes = {
            "accelerate": {"samples_a_row": 3, "rows_a_step": 2},
            "trainer": trainer,
            "trl": trainer,
        }[loop]
        try:
            model, losses = names["train"](tiny_folder, records, **sizes)
        finally:
            hook.remove()
        (gradients,), (loss,) = seen, losses
        return loss, {name: gradients[id(p)] for name, p in model.named_parameters()}

    return runs


def differences(found, reference):
    """What of a step's loss and gradients is not that of the samples one by one."""
    loss, gradients = found
    theirs = float(torch.cat(list(reference.losses.values())).double().mean())
    wrong = [f"loss {loss} for {theirs}"] if abs(loss - theirs) > LOSS_TOLERANCE * theirs else []
    assert gradients.keys() == reference.gradients.keys() and len(gradients) > 50
    for name, gradient in reference.gradients.items():
        assert not NO_GRADIENT.search(name)
        error = relative_l2(gradients[name], gradient)
        if not error <= GRADIENT_TOLERANCE:
            wrong.append(f"gradient of {name}: {error:.1e}")
    return wrong


@pytest.mark.cases(quick="accelerate", slow="trainer")
@pytest.mark.parametrize("loop", LOOPS)
def test_a_step_is_that_of_the_samples_one_by_one(loop, run, reference):
    assert differences(run(loop), reference) == []


def mislabelled(names):
    """Each label is that of the label token before it: off by one."""
    pack = names["pack_batch_sequences"]

    def broken(samples, **options):
        row = pack(samples, **options)
        row.labels[0, row.label_positions] = row.labels[0, row.label_positions].roll(1)
        return row

    return broken


def unbounded(names):
    """One sample from end to end."""
    pack = names["pack_batch_sequences"]

    def broken(samples, **options):
        row = pack(samples, **options)
        ends = row.cu_seqlens[[0, -1]]
        return type(row)(
            **{name: getattr(row, name) for name in row.__dataclass_fields__}
            | {"cu_seqlens": ends, "segment_lengths": (row.num_slots,)}
        )

    return broken


@pytest.mark.cases(quick="accelerate-*", slow="trainer-mislabelled")
@pytest.mark.parametrize("fault", [mislabelled, unbounded])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_broken_row_is_seen(loop, fault, run, reference):
    def change(names):
        names["train"].__globals__["pack_batch_sequences"] = fault(names)

    assert len(differences(run(loop, change), reference)) > 50


def test_a_mean_of_means_is_seen(run, reference):
    """The division that the page warns of."""

    def change(names):
        plain = names["vlm_step"]

        def mean_of_row(rows, model):
            (row,) = rows
            losses, sum_up = plain(iter([row]), model)
            return losses / row.num_label_tokens * 10, sum_up

        names["train"].__globals__["vlm_step"] = mean_of_row

    assert len(differences(run("accelerate", change), reference)) > 50


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_has_at_most_40_lines_and_imports_nothing_but_the_public_names(loop):
    lines = LOOPS[loop].splitlines()
    assert len(lines) <= 40
    ours = [line for line in lines if "vlmpack" in line and "import" in line]
    (line,) = ours
    assert line.startswith("from vlmpack import ")
    names = line.removeprefix("from vlmpack import ").split(", ")
    assert {"pack_batch_sequences", "vlm_step"} < set(names) <= set(vlmpack.__all__)


@pytest.mark.soak
def test_the_accelerate_loop_runs_as_a_script():
    command = [sys.executable, "-c", LOOPS["accelerate"]]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    first, last = json.loads(done.stdout)
    assert 0 < last < first


PROGRAM = """
import json, os, pickle, runpy, sys
from pathlib import Path
from torch.nn.utils import get_total_norm
from torch.optim.optimizer import register_optimizer_step_pre_hook
loop, records, folder, rows = sys.argv[1:]
norms = []
hook = register_optimizer_step_pre_hook(
    lambda optimizer, *_: norms.append(
        float(get_total_norm([p.grad for g in optimizer.param_groups for p in g["params"]]))
    )
)
train = runpy.run_path(loop)["train"]
records = pickle.loads(Path(records).read_bytes())
_, history = train(folder, records, samples_a_row=3, rows_a_step=int(rows))
Path("history" + os.environ["RANK"]).write_text(json.dumps([history, norms]))
"""


@pytest.mark.soak
def test_two_processes_take_the_steps_of_one(tmp_path, monkeypatch, records, tiny_folder):
    loop, data, program = (tmp_path / name for name in ("loop.py", "records", "program.py"))
    loop.write_text(LOOPS["accelerate"])
    data.write_bytes(pickle.dumps(records * 2))
    program.write_text(PROGRAM)
    arguments = [str(program), str(loop), str(data), str(tiny_folder)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", [*arguments, "2"])
    runpy.run_path(str(program))["hook"].remove()
    losses, norms = json.loads((tmp_path / "history0").read_text())
    assert losses[1] < 0.99 * losses[0], "no step was taken"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # as `accelerate launch --cpu` does
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([sys.executable, *launch, *arguments, "1"], check=True, timeout=300)
    for rank in range(2):
        ours = json.loads((tmp_path / f"history{rank}").read_text())
        assert ours[0] == pytest.approx(losses, rel=LOSS_TOLERANCE)
        assert ours[1] == pytest.approx(norms, rel=GRADIENT_TOLERANCE)


def test_a_sample_is_that_of_a_shard(encoder, mixed, encoded, records):
    for raw, theirs, pair in zip(mixed, encoded, records, strict=True):
        ours = vlmpack.encode_sample(encoder, *pair, key=raw.key)
        assert ours.key == theirs.key
        for name in ("input_ids", "labels", "position_ids", "media_positions"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        assert (ours.media is None) == (theirs.media is None)
        if theirs.media is not None:
            assert torch.equal(ours.media.pixel_values, theirs.media.pixel_values)


def test_what_is_wrong_with_a_record_is_said(encoder):
    asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Read it."}]}
    record = {"messages": [asked, {"role": "assistant", "content": "31"}]}
    with pytest.raises(DataError, match=r"sample 'mine'.*1 image placeholder.*0 image members"):
        vlmpack.encode_sample(encoder, record, key="mine")
    with pytest.raises(PackingError, match="the list of samples is empty"):
        vlmpack.pack_batch_sequences([], pad_token_id=0)
