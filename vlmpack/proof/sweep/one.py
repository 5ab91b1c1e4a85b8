"""One class: is there a word for it, and which.

a tiny folder of the class, a shard -> `vlmpack verify`     packed equals stock one by one
200 image sizes -> `_get_num_multimodal_tokens`             what the processor counts
an export, reloaded by transformers -> the same logits
"""

from __future__ import annotations

import json
import logging
import random
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vlmpack.build.data import build_encoder
from vlmpack.build.setup import Setup
from vlmpack.capabilities import refused
from vlmpack.capabilities.swept import Swept
from vlmpack.distributed import process_group
from vlmpack.errors import VlmpackError
from vlmpack.families.generic import GenericVLM
from vlmpack.families.generic_images import open_processor
from vlmpack.families.registry import family_of
from vlmpack.proof.sweep.exported import wrong_export
from vlmpack.proof.sweep.folder import write_folder
from vlmpack.proof.sweep.samples import SIDES, write_shard
from vlmpack.proof.verify import Verification, VerifyOptions, verify_recipe
from vlmpack.proof.verify.compare import SAMPLE_LOSSES
from vlmpack.proof.verify.figures import LOSS_BOUND, OUTPUT_BOUND
from vlmpack.recipe import Recipe, load_recipe
from vlmpack.terminal import say

NUM_SIZES = 200

LONGEST = 300
"""Characters of a reason."""


def try_class(model_type: str) -> Swept:
    """The word of a class, by trying."""
    with _no_word_of_any_class(), tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        try:
            return _tried(model_type, root)
        except VlmpackError as error:
            return Swept("refused", _said(error, root))
        except Exception as error:  # a class may fail anywhere
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}, line {place.lineno}"
            said = f"{type(error).__name__}: {_said(error, root)}"
            return Swept("refused", f"a tiny model of it fails in {where}: {said}"[:LONGEST])


@contextmanager
def _no_word_of_any_class() -> Iterator[None]:
    """Without what an earlier sweep found."""
    said = vars(refused)["SWEPT"]
    vars(refused)["SWEPT"] = {}
    try:
        yield
    finally:
        vars(refused)["SWEPT"] = said


def _tried(model_type: str, root: Path) -> Swept:
    open_processor.cache_clear()
    (root / "model").mkdir()
    folder = write_folder(model_type, root / "model")
    family = family_of(folder)
    write_shard(root / "train.tar", images=isinstance(family, GenericVLM))
    if isinstance(family, GenericVLM):
        wrong = wrong_counts(family)
        if wrong:
            return Swept("refused", wrong)
    with process_group(tensor=1, context=1, pipeline=1, timeout_seconds=600) as ranks:
        recipe = _recipe(root)
        found = verify_recipe(recipe, ranks, VerifyOptions(scratch=root / "verify"))
        if wrong := wrong_numbers(found):
            return Swept("refused", f"verify: {wrong}")
        setup = Setup(recipe=recipe, ranks=ranks, encoder=build_encoder(recipe))
        wrong = wrong_export(setup, root / "export")
    return Swept("refused", wrong) if wrong else Swept("proven")


def wrong_numbers(found: Verification) -> str:
    """What verify found wrong; empty where nothing is. A class is held to the bounds that verify
    states, which it raises for a user's model to what the unpacked run differs from itself by."""
    for check in found.checks:
        if check.fails:
            return f"{check.name}: {check.sentence}"
        stated = LOSS_BOUND if check.name.endswith(SAMPLE_LOSSES) else OUTPUT_BOUND
        if check.noise is not None and not (check.measured or 0.0) <= stated:
            return f"{check.name}: {check.measured:.1e}, and {stated:.0e} is the bound of a class"
    return ""


def wrong_counts(family: GenericVLM) -> str:
    """What is wrong with the numbers of placeholders of 200 image sizes; empty where nothing is, or
    where the processor does not count."""
    processor = open_processor(family.folder)
    tokenizer = processor.tokenizer
    if not hasattr(processor, "_get_num_multimodal_tokens"):
        return ""
    draw = random.Random(1)
    sizes = [(draw.randint(*SIDES), draw.randint(*SIDES)) for _ in range(NUM_SIZES)]
    counted: Any = processor._get_num_multimodal_tokens(
        [(height, width) for width, height in sizes]
    )
    for size, count in zip(sizes, counted["num_image_tokens"], strict=True):
        written = family.rule.layout(*size).num_tokens
        with_others = len(tokenizer.tokenize(family.rule.facts(*size).replacement))
        if count not in (written, with_others):
            return (
                f"its processor writes {written} placeholders for an image of {size[0]} x "
                f"{size[1]} pixels, {with_others} tokens in all, and counts {count}"
            )
    return ""


def _recipe(root: Path) -> Recipe:
    return load_recipe(
        {
            "model": {"path": str(root / "model"), "attention": "segments", "dtype": "float32"},
            "data": {
                "train": str(root / "train.tar"),
                "num_workers": 0,
                "index_dir": str(root / "index"),
            },
            "packing": {"mode": "in_batch"},
            "training": {
                "micro_batch_size": 8,
                "global_batch_size": 8,
                "seq_length": 16384,
                "max_steps": 1,
            },
            "optim": {"lr": 1e-4},
            "run_dir": str(root / "run"),
        }
    )


def _said(error: Exception, root: Path) -> str:
    """A message without what is true of this run alone."""
    text = " ".join(str(error).replace(str(root / "model"), "its folder").split())
    for start in ("model.path: ", "its folder: "):
        text = text.removeprefix(start)
    return text.encode("ascii", "replace").decode("ascii")[:LONGEST]


def main(names: Sequence[str]) -> None:
    """A line of JSON for each class, as soon as it is known."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    for name in names:
        say(json.dumps(asdict(try_class(name))))


if __name__ == "__main__":
    main(sys.argv[1:])
