"""Rebuild the assets: `python -m assets.build [STEP ...]`, from the root.

The steps: tokenizer, digits, pretrain, text, text-model. Without arguments all are made, in that
order (pretraining takes about twenty minutes on two cores).
"""

from __future__ import annotations

import argparse
from pathlib import Path

ASSETS = Path(__file__).resolve().parents[1]
STEPS = ("tokenizer", "digits", "pretrain", "text", "text-model")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m assets.build", description=__doc__)
    parser.add_argument("steps", nargs="*", help=f"any of {', '.join(STEPS)}; default: all")
    parser.add_argument("--out", type=Path, default=ASSETS, help="folder to write into")
    args = parser.parse_args()
    steps = args.steps or STEPS
    if unknown := set(steps) - set(STEPS):
        parser.error(f"unknown step {sorted(unknown)}; choose from {', '.join(STEPS)}")
    model_folder = args.out / "tiny-qwen2_5_vl"
    if "tokenizer" in steps:
        from assets.build.tokenizer import write_tokenizer

        write_tokenizer(model_folder)
    if "digits" in steps:
        from assets.build.digits import write_digits

        write_digits(args.out / "digits")
    if "pretrain" in steps:
        from assets.build.pretrain import pretrain

        pretrain(model_folder)
    if "text" in steps:
        from assets.build.text import write_text

        write_text(args.out / "text")
    if "text-model" in steps:
        from assets.build.text_model import write_text_model

        made = model_folder if "tokenizer" in steps else ASSETS / "tiny-qwen2_5_vl"
        write_text_model(args.out / "tiny-qwen3", made)


if __name__ == "__main__":
    main()
