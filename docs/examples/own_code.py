"""An objective, a metric and a callback of your own.

Run from the repository: python docs/examples/own_code.py RUN_DIR [STEPS]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import SequenceMatcher

from torch import Tensor

import vlmpack


def focal(losses: Tensor, batch: object) -> dict[str, Tensor]:
    """Focal Loss (1708.02002): tokens that the model is sure of count less.

    `losses` are -log p of the micro-batch's label tokens, (L,). The sum is divided by the label
    tokens of the whole global batch, once.
    """
    missed = 1 - (-losses).exp()
    return {"loss_sum": (missed**2 * losses).sum()}


def similarity(predictions: Sequence[object]) -> float:
    """How much of an answer is in the true one, 0 to 1; a mean over questions."""
    ratios = [SequenceMatcher(None, row.answer, row.truth).ratio() for row in predictions]
    return sum(ratios) / len(ratios)


class BestLoss(vlmpack.Callback):
    """Keeps the lowest loss, and says so at the end."""

    lowest = float("inf")

    def on_step(self, event: vlmpack.Event) -> None:
        """`event.figures` is the step's row of metrics.jsonl, read-only."""
        self.lowest = min(self.lowest, event.figures["loss"])

    def on_end(self, event: vlmpack.Event) -> None:
        """`event.figures` is result.json."""
        after = event.figures["metrics_after"]["python:similarity"]
        print(f"lowest loss {self.lowest:.3f}, similarity {after:.1%}")


def main(run_dir: str, steps: int) -> None:
    """Train some steps by it."""
    vlmpack.finetune(
        "recipes/digits-demo.yaml",
        objective=focal,
        metrics={"similarity": similarity},
        callbacks=[BestLoss()],
        evaluation__generate_max_samples=32,
        run_dir=run_dir,
        training__max_steps=steps,
        optim__warmup_steps=1,
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20)
