"""Run in ranks: answers of a model before and after a step, however its weights lie.

    torchrun --nproc-per-node 2 whole_answers.py FOLDER FAMILY WAY SHARDING

FOLDER/FAMILY is a model folder. Writes FOLDER/<family>-<way>-<sharding>-<rank>.pt, what `asked`
found there.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.engines import engine_of, make_stepper, policy
from support.families import tiny_family_folder
from support.layouts import BINS, SGD_LR, use_sgd
from support.shards import mixed_samples, text_samples
from torch import Tensor

from vlmpack.backends.boxes import Kind, TensorSlice
from vlmpack.backends.policy import is_adapter
from vlmpack.backends.skeleton import model_skeleton
from vlmpack.distributed import Ranks, start_process_group, stop_process_group
from vlmpack.encode import Encoder
from vlmpack.evaluation.generation import answer_over_ranks
from vlmpack.evaluation.predictions import Question
from vlmpack.families.base import stock_arguments
from vlmpack.families.registry import family_of
from vlmpack.packing import PackCollator
from vlmpack.recipe.schema import ModelSection, ParallelismSection

NUM_NEW = 6
ADAPTERS = {"vision": "frozen", "projector": "frozen", "language": "lora"}
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "frozen": {"vision": "frozen"},
    "lora": ADAPTERS,
    "dora": {**ADAPTERS, "dora": True},
}
"""What is trained."""


def write_family(family: str, folder: Path) -> Path:
    """A tiny model, in an empty folder, whose saved buffers are others than its class makes."""
    made = tiny_family_folder(family, folder)
    if made == folder:
        weights = load_file(str(made / "model.safetensors"))
        draw = torch.Generator().manual_seed(0)
        for name in saved_buffers(made, weights):
            weights[name] = weights[name] + 0.3 * torch.rand(weights[name].shape, generator=draw)
        save_file(weights, str(made / "model.safetensors"), metadata={"format": "pt"})
    return made


def saved_buffers(folder: Path, weights: dict[str, Tensor]) -> list[str]:
    """Names in a folder's file, which may have other prefixes than the model."""
    model = model_skeleton(family_of(folder).auto_class(), folder)
    kept = {name for name, _ in model.named_buffers()} & model.state_dict().keys()
    ends = {name.rpartition(".")[2] for name in kept}
    return [name for name in weights if name.rpartition(".")[2] in ends]


def _some_training(kind: Kind, box: TensorSlice) -> Tensor | None:
    """Values of B, which is zero at first, so that adapters that are lost are seen."""
    if kind != "model" or not is_adapter(box.name) or ".lora_B." not in box.name:
        return None
    draw = torch.Generator().manual_seed(zlib.crc32(box.name.encode()))
    return 0.2 * torch.randn(box.shape, generator=draw)[box.index]


def make(folder: Path, ranks: Ranks, way: str, dtype: str = "float32", **split: Any) -> Any:
    """An engine, with adapters that say something."""
    model: Any = {"path": str(folder), "dtype": dtype, "attention": "segments"}
    parts = (ModelSection(**model), ParallelismSection(**split), Encoder(folder), ranks)
    engine = engine_of(*parts, policy(**WAYS[way]))
    engine.load_slices(_some_training, optimizer_steps=0)
    return engine


def take_step(engine: Any, folder: Path) -> None:
    """A large one, by SGD."""
    encoder, ranks = Encoder(folder), engine.ranks
    encoded = [encoder.encode(sample) for sample in cooked(encoder)]
    stepper = make_stepper(engine, max_grad_norm=None)
    use_sgd(engine)
    stepper.schedule = lambda step: 10 * SGD_LR
    collate = PackCollator(
        pad_token_id=encoder.pad_token_id, num_position_axes=encoder.num_position_axes
    )
    mine = BINS[ranks.dp_rank :: ranks.dp_size]
    batches = [collate([encoded[index] for index in bin_]) for bin_ in mine]
    stepper.train(0, batches, num_skipped=0, stop=False)


def cooked(encoder: Encoder) -> list[Any]:
    """Six samples."""
    raw = mixed_samples() if encoder.takes_images else text_samples()
    return [sample.cooked() for sample in raw]


def logits(model: Any, folder: Path) -> list[Tensor]:
    """Of two samples, by the class's own forward pass."""
    encoder = Encoder(folder)
    given = [
        stock_arguments(encoder.family, encoder.encode(sample), **encoder.placeholders)
        for sample in cooked(encoder)[:2]
    ]
    with torch.no_grad():
        return [model(use_cache=False, **each).logits.float() for each in given]


def asked(folder: Path, ranks: Ranks, way: str, **split: Any) -> dict[str, Any]:
    """Answers and logits before and after a step."""
    engine, encoder = make(folder, ranks, way, **split), Encoder(folder)
    questions = [Question.from_sample(sample) for sample in cooked(encoder)]
    found: dict[str, Any] = {"sharded": engine.sharded}
    for when in ("before", "after"):
        if when == "after":
            take_step(engine, folder)
        answers = answer_over_ranks(
            engine, encoder, questions, ranks=ranks, batch_size=2, max_new_tokens=NUM_NEW
        )
        with engine.generation() as model:
            found[when] = {"answers": answers, "logits": logits(model, folder)}
            found[when]["buffers"] = {name: b.clone() for name, b in model.named_buffers()}
    return found


def main(folder: Path, family: str, way: str, sharding: str) -> None:
    """One case."""
    ranks = start_process_group()
    found = asked(folder / family, ranks, way, sharding=sharding)
    torch.save(found, folder / f"{family}-{way}-{sharding}-{ranks.rank}.pt")
    stop_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
