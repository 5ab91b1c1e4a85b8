"""Data of your own: a map-style source, and a function over records of a file.

Run from the repository: python docs/examples/own_data.py RUN_DIR [STEPS]
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

import vlmpack

COLOURS = ("red", "green", "blue", "black")


class Squares:
    """Drawn on demand: the same number is always the same record."""

    version = 1  # raise it when what it returns changes by more than its source text

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> dict[str, Any]:
        rng = random.Random(number)
        colour, side = rng.choice(COLOURS), rng.randint(12, 40)
        image = Image.new("RGB", (56, 56), "white")
        ImageDraw.Draw(image).rectangle((4, 4, side, side), fill=colour)
        return {"question": "Which colour?", "answer": colour, "image": image}


def to_messages(record: dict[str, Any]) -> list[dict[str, Any]]:
    """A record of a file as somebody had it -> turns."""
    return [
        {"role": "user", "content": f"{record['left']} + {record['right']} ="},
        {"role": "assistant", "content": str(record["left"] + record["right"])},
    ]


def main(run_dir: str, steps: int) -> None:
    """Train some steps on both."""
    sums = Path(run_dir).with_suffix(".jsonl")
    rows = [{"left": n % 10, "right": n // 10} for n in range(100)]
    sums.parent.mkdir(parents=True, exist_ok=True)
    sums.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = vlmpack.finetune(
        "recipes/digits-demo.yaml",
        sources={"squares": Squares(200), "to_messages": to_messages},
        data__train=[
            {"path": "python:squares"},
            {"path": str(sums), "columns": "python:to_messages"},
        ],
        data__validation=None,
        data__test=None,
        evaluation__interval_steps=None,
        evaluation__generate=False,
        run_dir=run_dir,
        training__max_steps=steps,
        optim__warmup_steps=1,
    )
    print(f"{result.figures['samples']} samples, {result.real_tokens} tokens; {result.export}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20)
