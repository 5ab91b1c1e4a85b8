"""Rebuild the assets: `python -m assets.build [STEP ...]`, from the root.

The steps: tokenizer, digits, pairs, boxes, pretrain (the tiny Qwen2.5-VL), pretrain-qwen3_5 (the
hybrid), text, text-model. Without arguments all are made, in that order (each pretraining takes
about twenty minutes on two cores). Run again, pretraining that was cut goes on.
"""

from __future__ import annotations

import argparse
from pathlib import Path

ASSETS = Path(__file__).resolve().parents[1]
STEPS = (
    "tokenizer",
    "digits",
    "pairs",
    "boxes",
    "pretrain",
    "pretrain-qwen3_5",
    "text",
    "text-model",
)


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
    if "pairs" in steps:
        from assets.build.pairs import write_pairs

        write_pairs(args.out / "pairs")
    if "boxes" in steps:
        from assets.build.boxes import write_boxes

        write_boxes(args.out / "boxes")
    made = model_folder if "tokenizer" in steps else ASSETS / "tiny-qwen2_5_vl"
    if "pretrain" in steps:
        from assets.build.model import QWEN2_5_VL
        from assets.build.pretrain import pretrain

        pretrain(QWEN2_5_VL, model_folder)
    if "pretrain-qwen3_5" in steps:
        from assets.build.model import QWEN3_5
        from assets.build.pretrain import pretrain
        from assets.build.tokenizer import copy_tokenizer

        folder = args.out / QWEN3_5.folder
        copy_tokenizer(made, folder)
        pretrain(QWEN3_5, folder)
    if "text" in steps:
        from assets.build.text import write_text

        write_text(args.out / "text")
    if "text-model" in steps:
        from assets.build.text_model import write_text_model

        write_text_model(args.out / "tiny-qwen3", made)


if __name__ == "__main__":
    main()
