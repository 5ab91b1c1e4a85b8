"""You do research on a laptop: your own data, metric and callback, two runs, and a proof.

    python own_research.py MODEL WORK [STEPS]

MODEL: a model folder in transformers format. WORK: where everything is written.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

import vlmpack

COLOURS = ("red", "green", "blue")


class Bars:
    """Two bars, which differ in length: record `number` is always the same."""

    version = 1  # raise it when what it returns changes by more than its source text

    def __init__(self, seed: int, size: int) -> None:
        self.seed, self.size = seed, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> dict[str, Any]:
        draw = random.Random(self.seed * 100_003 + number)
        colours = draw.sample(COLOURS, 2)
        lengths = draw.sample(range(10, 80, 14), 2)
        image = Image.new("RGB", (84, 84), "white")
        for place, (colour, length) in enumerate(zip(colours, lengths, strict=True)):
            top = 10 + 40 * place
            ImageDraw.Draw(image).rectangle((2, top, 2 + length, top + 24), fill=colour)
        longer = colours[lengths.index(max(lengths))]
        return {"question": "Which bar is longer?", "answer": longer, "image": image}


def is_colour(predictions: Sequence[Any]) -> float:
    """The share of answers that are a colour at all."""
    return sum(one.answer in COLOURS for one in predictions) / len(predictions)


class Watch(vlmpack.Callback):
    """Says how the loss falls."""

    def on_step(self, event: vlmpack.Event) -> None:
        """A row of metrics.jsonl, read-only."""
        if event.step % 50 == 0:
            print(f"step {event.step}: loss {event.figures['loss']:.3f}")


def train(model: str, run_dir: Path, steps: int, **changes: Any) -> vlmpack.FinetuneResult:
    """One run of the experiment."""
    recipe = {
        "model": {"path": model},
        "data": {"train": "python:train", "test": "python:test"},
        "training": {"seq_length": 512, "micro_batch_size": 8, "global_batch_size": 8},
        "optim": {"lr": 1e-3, "warmup_steps": 5},
        "evaluation": {
            "generate": True,
            "metrics": ["exact_match", "python:is_colour"],
            "max_new_tokens": 8,
            "batch_size": 8,
        },
    }
    return vlmpack.finetune(
        recipe,
        sources={"train": Bars(0, 400), "test": Bars(1, 24)},
        metrics={"is_colour": is_colour},
        callbacks=[Watch()],
        run_dir=str(run_dir),
        training__max_steps=steps,
        **changes,
    )


def main(model: str, work: Path, steps: int) -> None:
    """Two runs beside each other, and an answer."""
    work.mkdir(parents=True, exist_ok=True)
    one = train(model, work / "packed", steps, training__verify=True)
    train(model, work / "padded", steps, packing__mode="none")
    command = [
        sys.executable,
        "-m",
        "vlmpack",
        "compare",
        str(work / "packed"),
        str(work / "padded"),
    ]
    subprocess.run(command, check=True)
    picture = work / "bars.png"
    record = Bars(2, 1)[0]
    record["image"].save(picture)
    command = [sys.executable, "-m", "vlmpack", "generate", "--model", str(one.export)]
    command += ["--image", str(picture), record["question"]]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (work / "answer.txt").write_text(said)
    print(f"{record['question']} {said.strip()} (true: {record['answer']}, {one.metrics_after})")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 200)
