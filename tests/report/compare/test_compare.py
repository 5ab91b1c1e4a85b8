"""`vlmpack compare`: losses beside each other, where they part, what differs, and when they may not
be compared; figures from a second reading of the files, and damage that is named."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.recipes import changed, run_settings
from support.recorded import write_record
from typer.testing import CliRunner

import vlmpack
from vlmpack.cli.app import app
from vlmpack.cli.plan import print_sections
from vlmpack.errors import RunDirError, VlmpackError
from vlmpack.file_format import FORMAT, RUN
from vlmpack.report.compare import compare_runs, sections
from vlmpack.report.compare.comparison import mean_loss
from vlmpack.report.compare.page import _draw, draw, verdict
from vlmpack.report.document import figure

STEPS = 12


def row(step: int, loss: float | None, **more: Any) -> dict[str, Any]:
    counts = {"num_samples": 4, "num_tokens": 100 + step, "num_label_tokens": 10 + step}
    return {"step": step, "loss": loss} | counts | more


def made(folder: Path, rows: list[dict[str, Any]], **files: object) -> Path:
    """A run folder of metrics and some files; `samples` is a list of lists of keys by step."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    samples = files.pop("samples", None)
    for name, content in files.items():
        held = {name: content} if name == "shards" else content
        (folder / f"{name}.json").write_text(json.dumps({FORMAT: 1, **held}))  # type: ignore[dict-item]
    if samples is not None:
        write_record(folder / "samples", samples)  # type: ignore[arg-type]
    return folder


def keys(step: int) -> list[str]:
    return [f"k{4 * step + n}" for n in range(4)]


def losses(noise: float = 0.0, apart_from: int = 99, apart: float = 0.0) -> list[dict[str, Any]]:
    return [
        row(n, (2.0 / n) * (1 + noise * (-1) ** n + (apart if n >= apart_from else 0)))
        for n in range(1, STEPS + 1)
    ]


def test_the_first_step_beyond_the_noise_is_found(tmp_path: Path) -> None:
    a = made(tmp_path / "a", losses())
    b = made(tmp_path / "b", losses(1e-7, apart_from=7, apart=1e-3))
    found = compare_runs(a, b)
    assert found.parted is not None and found.parted.first is not None
    assert found.parted.first[0] == 7
    assert found.parted.within == pytest.approx(1e-7, rel=0.01)
    assert any("losses part at step 7" in line and "1.0e-03" in line for line in verdict(found))
    quiet = compare_runs(a, b, noise=1e-2)
    assert quiet.parted is not None and quiet.parted.first is None
    exact = verdict(compare_runs(a, a))
    assert "over those steps every loss is the same to the last digit" in exact


def test_a_coarser_type_has_more_noise(tmp_path: Path) -> None:
    engines = ("float32", "bfloat16")
    a, b, c = (
        made(
            tmp_path / name, losses(1e-3 * (name == "b")), result={"engine": {"compute dtype": of}}
        )
        for name, of in (("a", engines[0]), ("b", engines[0]), ("c", engines[1]))
    )
    assert compare_runs(a, b).parted.first[0] == 1  # type: ignore[index, union-attr]
    assert compare_runs(c, b).parted.first is None  # type: ignore[union-attr]


def test_the_same_samples_on_other_ranks_and_disks_are_the_same(tmp_path: Path) -> None:
    steps = [keys(n) for n in range(STEPS)]
    a = made(tmp_path / "a", losses(), samples=steps)
    b = made(tmp_path / "b", losses())
    write_record(b / "samples", [one[::-1] for one in steps], replicas=2)
    found = compare_runs(a, b)
    assert found.same.is_recorded and found.same.steps == tuple(range(1, STEPS + 1))
    swapped = [*steps[:5], steps[6], steps[5], *steps[7:]]
    c = made(tmp_path / "c", losses(), samples=swapped)
    found = compare_runs(a, c)
    assert found.same.first_other == 6 and set(range(1, 13)) - set(found.same.steps) == {6, 7}
    assert "step 6 is the first with others" in " ".join(verdict(found))


def test_without_a_record_counts_decide_and_it_is_said(tmp_path: Path) -> None:
    a = made(tmp_path / "a", losses(), samples=[keys(n) for n in range(STEPS)])
    rows = losses()
    rows[3]["num_label_tokens"] += 1
    found = compare_runs(a, made(tmp_path / "b", rows))
    assert not found.same.is_recorded and found.same.first_other == 4
    assert "a record of samples is missing" in " ".join(verdict(found))


def test_windows_hold_as_many_samples_of_runs_with_other_batches(tmp_path: Path) -> None:
    """Steps of 4 samples against steps of 12: a hand count of means, weighted by label tokens."""
    rows = [row(n, float(n), num_label_tokens=n) for n in range(1, 31)]
    large = [row(n, 10.0 * n, num_samples=12) for n in range(1, 9)]
    a, b = made(tmp_path / "a", rows), made(tmp_path / "b", large)
    found = compare_runs(a, b).windows
    assert [one.samples for one in found] == [12, 24, 36, 48, 60, 72, 84, 96]
    assert [one.losses[1] for one in found] == [10.0 * n for n in range(1, 9)]
    low, covered = 0, []
    for one in found:
        inside = [n for n in range(1, 31) if low < 4 * n <= one.samples]
        assert one.losses[0] == pytest.approx(sum(n * n for n in inside) / sum(inside))
        low, covered = one.samples, covered + inside
    assert covered == list(range(1, 25)), "each step of A up to the end of B, once"
    assert found[-1].tokens[0] == sum(100 + n for n in range(1, 25))


@pytest.mark.parametrize("sizes", [[4] * 5, [9, 1, 1, 1, 20, 3], [4] * 23])
def test_no_line_of_losses_is_empty(tmp_path: Path, sizes: list[int]) -> None:
    """Of short runs, and where steps differ in size."""
    rows = [row(n, 1.0 / n, num_samples=size) for n, size in enumerate(sizes, start=1)]
    a, b = made(tmp_path / "a", rows), made(tmp_path / "b", rows[:-1])
    by_samples = next(s for s in sections(compare_runs(a, b)) if s.title == "Loss by samples seen")
    assert len(by_samples.rows) == min(10, len(sizes) - 1)
    assert all(cell for cells in by_samples.rows for cell in cells)
    assert by_samples.rows[-1][0] == str(sum(sizes[:-1]))


@pytest.mark.parametrize("width", [60, 80, 160])
def test_keys_are_whole_and_values_fold(tmp_path: Path, width: int) -> None:
    parameters = "vision full, projector full, language full; 2,002,304 of 2,002,304 (100.00%)"
    path, key = "/mnt/" + "a" * 150, "long_" * 12 + "key"
    engines: list[dict[str, str]] = [
        {"engine": "hf", "trained on": parameters, "goes on with": "", key: "1"},
        {"engine": "mcore", "trained on": "", "goes on with": path, key: "2"},
    ]
    runs = []
    for short in (False, True):  # with a key that has room, and with one that has none
        for name, engine in zip("ab", engines, strict=True):
            shown = {k: v for k, v in engine.items() if k != key or not short}
            folder = tmp_path / f"{name}{int(short)}"
            runs.append(made(folder, losses(), result={"engine": shown}))
    for a, b in (runs[:2], runs[2:]):
        out = io.StringIO()
        page = sections(compare_runs(a, b))
        print_sections(page[-1:], Console(file=out, width=width, highlight=False))
        lines = out.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        together = "".join(out.getvalue().split())
        for text in (parameters, path):
            assert "".join(text.split()) in together
    for name in ("engine", "trained on", "goes on with"):
        assert any(line.startswith(f"   engine: {name} ") for line in lines)


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ({"identity": {"objective.name": "dpo"}}, {"identity": {}}, "another objective"),
        ({"shards": [["/x/a.tar", 9, "1"]]}, {"shards": [["b.tar", 9, "1"]]},
         "other training data"),
        ({"identity": {"data.train.0.path": "a"}}, {"identity": {"data.train.0.path": "b"}},
         "other training data"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_said_plainly(
    tmp_path: Path, a: dict[str, Any], b: dict[str, Any], said: str
) -> None:
    rows = losses()
    found = compare_runs(made(tmp_path / "a", rows, **a), made(tmp_path / "b", rows, **b))
    (line,) = verdict(found)
    assert line.startswith("NOT COMPARABLE") and said in line
    assert found.parted is None
    by_samples = next(s for s in sections(found) if s.title == "Loss by samples seen")
    assert {cells[-1] for cells in by_samples.rows} == {""}, "no difference is given"


def test_the_same_shards_elsewhere_are_the_same_data(tmp_path: Path) -> None:
    a = made(tmp_path / "a", losses(), shards=[["/x/a.tar", 9, "1"]],
             identity={"data.train.0.path": "/x/*.tar"})  # fmt: skip
    b = made(tmp_path / "b", losses(), shards=[["s3://y/a.tar", 9, "etag"]],
             identity={"data.train.0.path": "s3://y/*.tar"})  # fmt: skip
    assert compare_runs(a, b).reasons == ()


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 12)
)
"""A kilobyte that stands for 10 ** 12 values."""


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("identity.json", "[1]", "expected dict"),
        ("identity.json", "{", "is damaged"),
        ("recipe.yaml", "a: [", "is damaged"),
        ("recipe.yaml", "word", "expected sections"),
        ("recipe.yaml", BOMB, "recipe.yaml:1: the anchor '&a0' is not allowed"),
        ("recipe.yaml", "a: 1\nb: !!python/object/apply:os.getpid []\n", "recipe.yaml:2: the YAML"),
        ("shards.json", "[1]", "is damaged"),
        ("model.json", "{}", "written by an unreleased vlmpack"),
        ("result.json", "{", "not valid JSON"),
        ("metrics.jsonl", '{"step": 1, "loss": 2}\n!\n{"step": 3, "loss": 2}\n', "line 2"),
        ("metrics.jsonl", '{"step": 1}\n', "no step with a loss"),
        ("samples/launches.jsonl", '{"launch": 1}\n', "launches.jsonl, line 1"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: str, said: str) -> None:
    good = made(tmp_path / "good", losses())
    bad = made(tmp_path / "bad", losses())
    (bad / name).parent.mkdir(exist_ok=True)
    (bad / name).write_text(content)
    for pair in ((good, bad), (bad, good)):
        with pytest.raises(RunDirError, match=said) as error:
            compare_runs(*pair)
        assert str(bad) in str(error.value)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    good = made(tmp_path / "good", losses())
    with pytest.raises(RunDirError, match="not a folder"):
        compare_runs(good, tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunDirError, match="nothing to report"):
        compare_runs(tmp_path / "empty", good)
    result = CliRunner().invoke(app, ["compare", str(good), str(good), "-o", "no/such/p.html"])
    assert isinstance(result.exception, VlmpackError) and "does not exist" in str(result.exception)


def test_a_step_that_was_cut_and_lost_losses_are_passed_over(tmp_path: Path) -> None:
    rows = losses()
    rows[2]["loss"] = None
    a = made(tmp_path / "a", rows)
    with (a / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "lo')
    found = compare_runs(a, made(tmp_path / "b", losses()[2:]))
    assert found.same.steps == tuple(range(4, 13))
    lines = " ".join(line for one in sections(found) for line in one.lines)
    assert "B has no row for 2 steps" in lines and "A has no identity.json" in lines
    assert found.a.losses[4].samples == 16, "a step without a loss was trained"


def test_a_loss_counts_by_what_its_objective_divides_it_by(tmp_path: Path) -> None:
    """A mean over answers, of which the first step has one and the second nine."""
    rows = [row(1, 1.0, loss_divisor=1.0), row(2, 2.0, loss_divisor=9.0)]
    run = made(tmp_path / "a", rows)
    found = compare_runs(run, run)
    assert [one.weight for one in found.a.losses.values()] == [1.0, 9.0]
    assert mean_loss(found.a.losses.values()) == pytest.approx((1 * 1 + 2 * 9) / 10)
    assert found.a.files.unit == "unit of its divisor"
    plain = made(tmp_path / "b", [row(1, 1.0), row(2, 2.0)])
    assert compare_runs(plain, plain).a.files.unit == "label token"


@pytest.mark.cases(slow="identities1")
@pytest.mark.parametrize("identities", [{}, {"identity": {"objective.name": "python:focal"}}])
def test_losses_of_two_units_are_drawn_as_such(tmp_path: Path, identities: dict[str, Any]) -> None:
    """Without an identity.json of both, what they are means over alone says that they differ."""
    a = made(tmp_path / "a", losses())
    rows = [row(n, 1.0 / n, loss_divisor=3.0) for n in range(1, STEPS + 1)]
    b = made(tmp_path / "b", rows, **identities)
    if identities:
        (a / "identity.json").write_text(json.dumps(RUN.mark({"objective.name": "sft"})))
    found = compare_runs(a, b)
    (line,) = verdict(found)
    assert line.startswith("NOT COMPARABLE: another objective: ")
    assert line.endswith("the loss of A is per label token, that of B per unit of its divisor")
    assert ("python:focal" in line) == bool(identities)
    assert found.parted is None
    for pair, said, per in (
        ((a, b), "loss, in two units", "blue (per label token), B in orange (per unit of its"),
        ((b, b), "loss per unit of its divisor", "blue, B in orange"),
    ):
        found = compare_runs(*pair)
        with figure(3.0, 4.0) as drawing:
            _draw(drawing, found, left=0.2, right=0.9)
            assert drawing.axes[0].get_ylabel() == said
        assert per in draw(found).caption


def test_a_run_without_its_divisors_is_comparable(tmp_path: Path) -> None:
    same = {"identity": {"objective.name": "python:focal", "objective.fingerprint": "1"}}
    before = made(tmp_path / "a", losses(), **same)
    rows = [{**one, "loss_divisor": 3.0} for one in losses()]
    assert compare_runs(before, made(tmp_path / "b", rows, **same)).reasons == ()


@pytest.mark.parametrize("noise", [0.0, 1e-9, 1.0])
@pytest.mark.parametrize("apart", [0.0, 1e-3])
def test_any_noise_can_be_drawn(tmp_path: Path, noise: float, apart: float) -> None:
    """On a scale of powers of ten, which 0 has no place on; warnings are errors here."""
    a = made(tmp_path / "a", losses())
    b = made(tmp_path / "b", losses(apart_from=7, apart=apart))
    found = compare_runs(a, b, noise=noise)
    axes = []
    with figure(3.0, 4.0) as drawing:
        _draw(drawing, found, left=0.2, right=0.9)
        drawing.canvas.draw()
        axes = drawing.axes
    assert [one.get_yscale() for one in axes] == ["linear", "log"]
    low, high = axes[1].get_ylim()
    [points] = [line for line in axes[1].lines if line.get_marker() == "o"]
    assert low > 0 and all(low < value < high for value in points.get_ydata())


@pytest.mark.slow
def test_real_runs_by_the_command(tmp_path: Path) -> None:
    """Another split into micro-batches: noise. Another seed: other batches. A row nudged: found."""
    settings, folders = run_settings(tmp_path), {}
    for name, more in (("a", {}), ("split", {"training__micro_batch_size": 2}),
                       ("seed", {"training__seed": 5})):  # fmt: skip
        folders[name] = tmp_path / name
        vlmpack.finetune(changed(settings, run_dir=str(folders[name]), **more))

    def compared(b: str) -> str:
        page = tmp_path / f"{b}.html"
        told = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / b),
                                        "-o", str(page)])  # fmt: skip
        assert told.exit_code == 0, told.output
        words = re.sub(r"\s+", " ", told.output)
        assert "training.seed" not in words or b == "seed"
        assert '<div class="spread"><svg' in page.read_text()
        return words

    split = compared("split")
    assert "the same samples in each of 3 steps of both, by the records of samples" in split
    assert "float noise alone" in split and "training.micro_batch_size 4 2" in split
    read = [
        [json.loads(line) for line in (folders[name] / "metrics.jsonl").read_text().splitlines()]
        for name in ("a", "split")
    ]
    apart = [abs(x["loss"] - y["loss"]) / x["loss"] for x, y in zip(*read, strict=True)]
    assert 0 < max(apart) < 1e-5, "guard: they differ, by noise"
    assert f"at most {max(apart):.1e}" in split
    assert "none of 3 steps of both trained the same samples" in compared("seed")

    shutil.copytree(folders["split"], tmp_path / "nudged")
    rows = read[1]
    rows[2]["loss"] *= 1.001
    text = "".join(json.dumps(one) + "\n" for one in rows)
    (tmp_path / "nudged" / "metrics.jsonl").write_text(text)
    assert "losses part at step 3" in compared("nudged"), "negative control"
