"""Finetune the tiny model from Python; what `vlmpack finetune` does, as a function.

Run from the repository: python docs/examples/finetune_digits.py RUN_DIR [STEPS]
"""

from __future__ import annotations

import sys

import vlmpack


def main(run_dir: str, steps: int) -> None:
    """Train some steps on the handwritten digits and say where the model is."""
    result = vlmpack.finetune(
        "recipes/digits-demo.yaml",
        run_dir=run_dir,
        training__max_steps=steps,
        optim__warmup_steps=min(50, steps),
        evaluation__generate=False,
    )
    removed = 1 - result.real_tokens / result.padded_tokens
    print(f"{result.steps} steps, {result.real_tokens} tokens; padding removed: {removed:.0%}")
    print(f"model: {result.export}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 100)
