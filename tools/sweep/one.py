"""One class: is there a word for it, and which.

a tiny folder of the class, a shard -> `vlmpack verify`     packed equals stock one by one
200 image sizes -> `_get_num_multimodal_tokens`             what the processor counts
an export, reloaded by transformers -> the same logits
"""

from __future__ import annotations

import io
import json
import logging
import random
import sys
import tarfile
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from PIL.Image import frombytes
from torch import Tensor

from tools.sweep.folder import write_folder
from vlmpack.backends.hf.load import load_model
from vlmpack.build.data import DataSpec, build_encoder, data_spec, open_split
from vlmpack.build.engine import EngineSpec, build_engine, engine_spec
from vlmpack.capabilities import refused
from vlmpack.capabilities.refused import Swept
from vlmpack.data.loading.ledger import Ledger
from vlmpack.distributed import process_group
from vlmpack.encode import Encoder
from vlmpack.errors import VlmpackError
from vlmpack.families.base import stock_arguments
from vlmpack.families.generic import GenericVLM
from vlmpack.families.generic_images import open_processor
from vlmpack.families.registry import family_of
from vlmpack.packing import EncodedSample
from vlmpack.proof.measure import EXPORT_BOUND, LOSS_BOUND, OUTPUT_BOUND, relative_l2
from vlmpack.proof.stock import require_finite_losses
from vlmpack.proof.verify import Verification, VerifyOptions, verify_recipe
from vlmpack.proof.verify.compare import SAMPLE_LOSSES
from vlmpack.proof.verify.samples import choose_samples
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
        encoder = build_encoder(recipe)
        data, engine = data_spec(recipe, encoder, ranks), engine_spec(recipe, encoder, ranks)
        wrong = wrong_export(data, engine, root / "export")
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


MOVED = 0.01
"""What is added to each weight, times noise of deviation 1: an export of the source's own weights
is not what is looked for."""


def wrong_export(data: DataSpec, spec: EngineSpec, folder: Path) -> str:
    """What is wrong with logits of the reloaded export; empty where nothing is.

    Args:
        data, spec: of one process.
        folder: written anew.
    """
    train = open_split(data, "data.train", Ledger(None))
    assert train is not None  # data.train is required
    try:
        samples = [each.sample for each in choose_samples(train, 4, min_labels=0)]
    finally:
        train.split.close()
    sample = max(samples, key=lambda one: len(one.media.grid_thw) if one.media is not None else 0)
    engine: Any = build_engine(spec)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.add_(MOVED * torch.randn(parameter.shape, generator=draw))
    source = spec.encoder.folder
    engine.export(folder, processor_from=source, dtype=torch.float32)
    with engine.generation() as model:
        ours = _logits(model, spec.encoder, sample)
    theirs = _logits(load_model(folder).eval(), spec.encoder, sample)
    before = _logits(load_model(source).eval(), spec.encoder, sample)
    error, moved = relative_l2(ours, theirs), relative_l2(before, theirs)
    if moved < 100 * EXPORT_BOUND:
        return f"the export's logits are those of the model before training ({moved:.1e})"
    if not error <= EXPORT_BOUND:
        return f"the export reloads with other logits than the trained model's ({error:.1e})"
    return ""


@torch.no_grad()
def _logits(model: Any, encoder: Encoder, sample: EncodedSample) -> Tensor:
    """(s, V) of one sample, by the class's own forward pass."""
    given = stock_arguments(encoder.family, sample, **encoder.placeholders)
    logits: Tensor = model(use_cache=False, **given).logits[0]
    name = f"the model on {sample.key}"
    require_finite_losses(name, model, [logits], lambda: model(use_cache=False, **given))
    return logits.float()


COUNTS = (2, 0, 1, 3, 0, 1, 2, 1)
"""Images of each sample."""

SIDES = (32, 140)
"""Least and largest side of an image in pixels."""


def write_shard(path: Path, *, images: bool, seed: int = 0) -> None:
    """The samples, in their order.

    Args:
        images: whether there are any.
    """
    draw = random.Random(seed)
    with tarfile.open(path, "w") as tar:
        for number, count in enumerate(COUNTS):
            parts: list[dict[str, str]] = []
            for place in range(count if images else 0):
                name = f"{place}.png"
                _add(tar, f"{number:06d}.{name}", _picture(draw))
                parts.append({"type": "image", "image": name})
                parts.append({"type": "text", "text": _words(draw, 1 + place)})
            parts.append({"type": "text", "text": _words(draw, draw.randint(1, 9))})
            messages = [
                {"role": "user", "content": parts},
                {
                    "role": "assistant",
                    "content": [{"type": "text", "text": _words(draw, draw.randint(1, 5))}],
                },
            ]
            _add(tar, f"{number:06d}.json", json.dumps({"messages": messages}).encode())


def _words(draw: random.Random, count: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return " ".join("".join(draw.choices(letters, k=draw.randint(2, 6))) for _ in range(count))


def _picture(draw: random.Random) -> bytes:
    width, height = (draw.randint(*SIDES) for _ in range(2))
    out = io.BytesIO()
    frombytes("RGB", (width, height), draw.randbytes(3 * width * height)).save(out, format="PNG")
    return out.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))


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
