"""Run folders as a finished run leaves them, made up: no model, no data."""

from __future__ import annotations

import io
import json
import math
import random
from pathlib import Path

from PIL import Image, ImageDraw

from vlmpack.encode import ImagePart, Message, TextPart
from vlmpack.evaluation.metrics import METRICS, score
from vlmpack.evaluation.predictions import (
    PREDICTIONS_AFTER,
    PREDICTIONS_BEFORE,
    Prediction,
    Question,
    write_predictions,
)
from vlmpack.file_format import RESULT

TASKS = ("read", "count", "largest", "compare")
QUESTIONS = {
    "read": "Which number is written in image 1?",
    "count": "How many times does 4 appear?",
    "largest": "Here is a picture [image 1] of some digits. Which digit is the largest?",
    "compare": "Given [image 1] and [image 2], answer this: Which image starts with the larger "
    "digit?",
}

SCORED = {name: METRICS[name] for name in ("exact_match", "characters")}


def metrics_rows(num_steps: int, *, validate_every: int = 100, seed: int = 0) -> list[dict]:
    rng = random.Random(seed)
    rows: list[dict] = []
    for step in range(1, num_steps + 1):
        loss = 0.05 + 2.4 * math.exp(-6 * step / max(num_steps, 20)) * rng.uniform(0.7, 1.3)
        rate = 2e-3 * min(1, step / 50) * 0.5 * (1 + math.cos(math.pi * step / num_steps))
        rows.append(
            {
                "step": step, "epoch": step // 110, "loss": loss, "grad_norm": 0.7,
                "learning_rate": rate, "num_tokens": 1500, "num_slots": 1504,
                "num_padded_slots": 2900, "num_label_tokens": 90, "num_samples": 12 + step % 9,
                "num_rows": 4, "imbalance": 1 + step % 5 / 50, "padding": 0.003,
                "data_wait_share": 0.025,
                "seconds": 0.08, "data_wait_seconds": 0.002, "forward_backward_seconds": 0.07,
                "optimizer_seconds": 0.008, "tokens_per_second": 18750.0, "fill": 0.997,
            }
        )  # fmt: skip
        if step % validate_every == 0:
            rows.append({"step": step, "validation_loss": 1.1 * loss})
    return rows


def row_of_digits(digits: str) -> bytes:
    image = Image.new("RGB", (22 * len(digits) + 10, 32), "white")
    ImageDraw.Draw(image).text((8, 3), " ".join(digits), fill="black", font_size=22)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def questions(count: int, *, seed: int = 1) -> list[Question]:
    rng = random.Random(seed)
    made: list[Question] = []
    for number in range(count):
        task = "text" if number % 12 == 11 else TASKS[number % 4]
        truth = "".join(rng.choice("0123456789") for _ in range(1 + number % 8))
        num_images = 0 if task == "text" else 2 if task == "compare" else 1 + (number % 9 == 0)
        text = QUESTIONS.get(task, f"Reverse {truth[::-1]}.")
        parts = (*(ImagePart(i) for i in range(num_images)), TextPart(text))
        made.append(
            Question(
                key=f"test{number:05d}",
                shard="data/test-000000.tar",
                messages=(Message("user", parts),),
                images=tuple(row_of_digits(truth[: 1 + 4 * i]) for i in range(num_images)),
                truth=truth,
                task=task,
            )
        )
    return made


def answers(asked: list[Question], share_right: float, *, seed: int = 2) -> list[Prediction]:
    rng = random.Random(seed)
    return [
        Prediction.of(question, question.truth if rng.random() < share_right else "7" * 3)
        for question in asked
    ]


def data_summary(*, mode: str = "in_batch", seed: int = 3, batch: int = 16) -> dict:
    rng = random.Random(seed)
    lengths = [
        rng.choice((rng.randint(17, 30), rng.randint(35, 70), int(rng.triangular(40, 190, 60))))
        for _ in range(1744)
    ]
    batches = [lengths[i : i + batch] for i in range(0, len(lengths), batch)]
    histogram: dict[str, int] = {}
    for length in lengths:
        histogram[str(length)] = histogram.get(str(length), 0) + 1
    return {
        "packing_mode": mode,
        "length_histogram": histogram,
        "padded_tokens_none": sum(len(b) * max(b) for b in batches),
        "packed_tokens": sum(lengths) + 8,
        "real_tokens": sum(lengths),
        "example_micro_batches": batches[:12],
        "test_also_in": [],
    }


def write_run(
    folder: Path,
    *,
    num_steps: int = 400,
    num_questions: int = 120,
    right_before: float = 0.2,
    right_after: float = 0.85,
    mode: str = "in_batch",
) -> list[Question]:
    """A whole run folder; returns the questions that were asked."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = metrics_rows(num_steps, validate_every=max(1, num_steps // 8))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = questions(num_questions)
    before, after = answers(asked, right_before), answers(asked, right_after, seed=5)
    write_predictions(folder / PREDICTIONS_BEFORE, before)
    write_predictions(folder / PREDICTIONS_AFTER, after)
    (folder / "data-summary.json").write_text(json.dumps(data_summary(mode=mode)))
    result = {
        "steps": num_steps, "train_seconds": 0.08 * num_steps, "real_tokens": 1500 * num_steps,
        "padded_tokens": 2900 * num_steps, "computed_tokens": 1504 * num_steps,
        "tokens_per_second": 18750.0, "samples": 16 * num_steps, "skipped_samples": 0,
        "packing_mode": mode, "model": "assets/tiny-qwen2_5_vl",
        "engine": {"engine": "hf", "attention": "segments (CPU)", "compute dtype": "float32"},
        "versions": {"vlmpack": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.9"},
        "finished": "2026-11-21T08:40:00Z",
    }  # fmt: skip
    for when, scores in (("before", score(before, SCORED)), ("after", score(after, SCORED))):
        result[f"metrics_{when}"] = scores.total.shares
    (folder / "result.json").write_text(json.dumps(RESULT.mark(result), indent=2))
    return asked
