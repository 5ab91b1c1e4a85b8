"""Every packing mode on one GPU, one command, one table: `python benchmarks/gpu.py`.

Each mode is a run of `vlmpack finetune` in a process of its own, on the same mixed samples, full
finetuning unless `--set` says otherwise: modes none and in_batch, and the two planned ones with
CUDA graphs of the decoder and without. What is quoted is of the same command: tokens/s are real
ones, padding is not counted; MFU is model FLOPs over the device's dense bf16 peak, the FLOPs of
PaLM's formula (2204.02311, B) as `vlmpack.families.flops` counts them, 3 x (2 T P + 2 L n d sum s^2
+ head on label tokens) and the tower's in the same way, recomputation never, and gradients of
weights whether they are trained or not; `loss` is the first step's rows against the same samples
one by one, relative.

Without a GPU `--shape tiny` shows that the command works, and no speed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_run import WARM_UP
from gpu_shapes import SHAPES, Shape, write_model, write_shards

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"

DENSE_BF16_TFLOPS = {"A100": 312.0, "H100": 989.0, "H200": 989.0, "B200": 2250.0}
"""Peaks of data sheets, SXM forms, without sparsity, by what a device's name contains."""

SAMPLES_A_STEP = 16
ROWS_A_STEP = 2


@dataclass(frozen=True, slots=True)
class Variant:
    """A row of the table.

    Args:
        name: its first column.
        overrides: of the recipe.
        packs: whether `vlmpack pack` goes before.
        graphs: whether the decoder is replayed as a CUDA graph.
    """

    name: str
    overrides: Mapping[str, Any]
    packs: bool = False
    graphs: bool = False


def variants(shape: Shape, *, graphs: bool) -> list[Variant]:
    """The rows of the table."""
    rows = {"training.global_batch_size": ROWS_A_STEP, "training.micro_batch_size": 1}
    samples = {"training.global_batch_size": SAMPLES_A_STEP, "training.micro_batch_size": 4}
    most = {"packing.max_tokens": shape.max_tokens}
    found = [
        Variant("none", {"packing.mode": "none", **samples}),
        Variant("in_batch", {"packing.mode": "in_batch", **samples}),
        Variant("online", {"packing.mode": "online", **rows, **most}),
        Variant("offline", {"packing.mode": "offline", **rows, **most}, packs=True),
    ]
    if not graphs:
        return found
    captured = {"training.cuda_graphs": "decoder"}
    return found + [
        Variant(f"{one.name}, graphs", {**one.overrides, **captured}, one.packs, graphs=True)
        for one in found[2:]
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One shape in a folder of its own.

    Args:
        shape: of the model.
        work: where model, shards, packs and runs are written.
        steps: of each run.
        given: overrides of every run, which win over its own.
    """

    shape: Shape
    work: Path
    steps: int
    given: Mapping[str, Any] = field(default_factory=dict)

    def prepare(self, device: torch.device) -> int:
        """Model and shards; the model's parameters."""
        parameters = write_model(self.shape, self.work / "model", device)
        shards = write_shards(
            self.shape, self.work / "data", samples=SAMPLES_A_STEP * (self.steps + 2)
        )
        recipe = {
            "model": {"path": str(self.work / "model"), "dtype": "bfloat16"},
            "data": {"train": shards, "num_workers": min(8, os.cpu_count() or 1)},
            "training": {"seq_length": self.shape.max_tokens, "max_steps": self.steps + 1},
            "optim": {"lr": 1e-6},
            "logging": {"trackers": []},
            "run_dir": str(self.work / "run"),
        }
        if device.type == "cpu":
            recipe["model"]["dtype"] = "float32"  # type: ignore[index]
        else:  # with all activations a row of the large shapes takes 140 GiB
            recipe["model"]["activation_checkpointing"] = "auto"  # type: ignore[index]
        (self.work / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
        return parameters

    def measured(self, variant: Variant) -> dict[str, Any]:
        """Figures of one run, or why there are none."""
        print(f"running: {variant.name}, {self.steps} steps", file=sys.stderr, flush=True)
        overrides = {**variant.overrides, **self.given}
        name = variant.name.replace(", ", "-")
        try:
            if variant.packs:
                packs = self.work / "packs"
                overrides["packing.path"] = str(packs)
                if not packs.exists():
                    self._vlmpack("pack", *self._pairs(overrides), "-o", str(packs))
            overrides["run_dir"] = str(self.work / f"run-{name}")
            out = self.work / f"{name}.json"
            recipe = str(self.work / "recipe.yaml")
            pairs = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
            _run([str(HERE / "gpu_run.py"), str(out), str(self.steps), recipe, *pairs])
            plan = self._planned_bytes(overrides)
        except subprocess.CalledProcessError as error:
            return {"failed": (error.stderr or "").strip()[-2000:]}
        return {**json.loads(out.read_text()), "planned_bytes": plan}

    def _planned_bytes(self, overrides: Mapping[str, Any]) -> int | None:
        """What `vlmpack plan` says of the fullest rank."""
        out = self.work / "plan.json"
        self._vlmpack("plan", *self._pairs(overrides), "--json", str(out), "--world-size", "1")
        memory = json.loads(out.read_text())["memory"]
        parts = ("weights", "gradients", "optimizer", "activations", "logits")
        return None if memory is None else sum(memory[part] for part in parts)

    def _pairs(self, overrides: Mapping[str, Any]) -> list[str]:
        shown = [f"{key}={value}" for key, value in overrides.items()]
        return [str(self.work / "recipe.yaml"), *shown]

    def _vlmpack(self, *arguments: str) -> None:
        _run(["-m", "vlmpack", *arguments])


def _run(arguments: list[str]) -> None:
    """A Python process; its errors are raised with what it said."""
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True)


def _pair(text: str) -> tuple[str, Any]:
    """KEY=VALUE; what is no JSON is a word."""
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def peak_flops(name: str) -> float | None:
    """Dense bf16 FLOPs/s of a device by its name; None for one that is not known."""
    known = [peak for part, peak in DENSE_BF16_TFLOPS.items() if part in name]
    return known[0] * 1e12 if known else None


def table(results: Mapping[str, Mapping[str, Any]], peak: float | None) -> str:
    """The figures as Markdown."""
    lines = [
        "| mode | real tokens/s | MFU | fill | data wait | peak GiB | of plan | loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        if "failed" in found:
            lines.append(f"| {name} | failed: {found['failed'].splitlines()[-1]} |")
            continue
        bytes_, planned = found["peak_bytes"], found["planned_bytes"]
        cells = (
            name,
            f"{found['tokens_per_second']:,.0f}",
            f"{found['flops_per_second'] / peak:.1%}" if peak else "-",
            f"{found['fill']:.1%}",
            f"{found['data_wait_share']:.1%}",
            f"{bytes_ / 2**30:.1f}" if bytes_ else "-",
            f"{bytes_ / planned:.2f}" if bytes_ and planned else "-",
            f"{found['loss_difference']:.1e}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), action="append", help="default: the large")
    parser.add_argument(
        "--steps", type=int, default=20, help=f"of each run; the first {WARM_UP} warm up"
    )
    parser.add_argument("--only", help="rows whose name contains this")
    parser.add_argument(
        "--work", type=Path, help="where temporary files lie; default: the system's"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of every run's recipe"
    )
    parser.add_argument("--save", type=Path, help="default: benchmarks/results, where a GPU is")
    asked = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    shapes = asked.shape or [name for name, shape in SHAPES.items() if shape.vision]
    if not on_gpu and shapes != ["tiny"]:
        parser.error("no CUDA device was found; --shape tiny runs without one")
    names = [one.name for one in variants(SHAPES[shapes[0]], graphs=on_gpu)]
    if not any((asked.only or "") in one for one in names):
        parser.error(f"--only {asked.only} is in no row's name; here they are {'; '.join(names)}")
    if asked.steps <= WARM_UP:
        parser.error(f"--steps {asked.steps}: the first {WARM_UP} warm up; ask for more than those")
    if asked.work is not None:
        asked.work.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    given = dict(map(_pair, asked.set))
    content: dict[str, Any] = {
        "device": name,
        "torch": torch.__version__,
        "given": given,
        "shapes": {},
    }
    for shape in shapes:
        with tempfile.TemporaryDirectory(dir=asked.work) as folder:
            bench = Bench(shape=SHAPES[shape], work=Path(folder), steps=asked.steps, given=given)
            parameters = bench.prepare(device)
            if on_gpu:
                torch.cuda.empty_cache()
            results = {
                one.name: bench.measured(one)
                for one in variants(SHAPES[shape], graphs=on_gpu)
                if not asked.only or asked.only in one.name
            }
        content["shapes"][shape] = {"parameters": parameters, "results": results}
        print(f"\n{shape}, {parameters / 1e9:.2f}e9 parameters, {name}\n")
        print(table(results, peak_flops(name)), flush=True)
    path = asked.save or (RESULTS / f"gpu-{time.strftime('%Y-%m-%d')}.json" if on_gpu else None)
    if path is not None:
        path.write_text(json.dumps(content, indent=2) + "\n")
    failed = [one for shape in content["shapes"].values() for one in shape["results"].values()]
    sys.exit(any("failed" in one for one in failed))


if __name__ == "__main__":
    main()
