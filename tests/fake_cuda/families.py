"""Run under the device guard: one optimizer step of families on the fake GPU, and the same on CPU.

    python -m fake_cuda.families '[{"family": "qwen3_vl", ...}, ...]'      (fields of `Case`)

The answer has for each case what `Seen` has.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
import warnings
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState
from fake_cuda.device import CUDA, fake_gpu
from fake_cuda.plants import planted
from fake_cuda.stand_ins import installed
from support.engines import ADAMW, engine_of, make_stepper, single_rank
from support.families import tiny_family_folder
from support.shards import mixed_samples, text_samples
from torch import Tensor

from vlmpack.attention import varlen
from vlmpack.backends.hf.engine import HFEngine
from vlmpack.backends.policy import TrainingPolicy
from vlmpack.data.loading.loader import level_scale
from vlmpack.encode import Encoder
from vlmpack.families.qwen_vl import PatchProduct
from vlmpack.packing import Batch, pack_batch_sequences, pin_batch
from vlmpack.packing.media import as_levels, tell_tower
from vlmpack.recipe.schema import ModelSection, ParallelismSection
from vlmpack.recipe.trainable import LoraSection, TrainableSection


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained of which family, and how.

    Args:
        family: one of `support.families.FAMILIES`.
        images: whether samples with images are among the samples.
        vision, language: what is done with them; the projector is trained where there is one.
        attention: `model.attention`.
        recompute: `model.activation_checkpointing`.
        recurrence: `model.recurrence`.
        packages: of stand_ins.py, that are installed.
        levels: whether pixels come to the GPU as levels.
        widest: channels of a head that others' kernels take; wider ones have ours.
        plant: a fault of plants.py.
    """

    family: str
    images: bool = True
    vision: str = "frozen"
    language: str = "lora"
    attention: str = "auto"
    recompute: str = "none"
    recurrence: str = "auto"
    packages: tuple[str, ...] = ()
    levels: bool = False
    widest: int = varlen.LARGEST_HEAD
    plant: str | None = None

    @property
    def name(self) -> str:
        """For the name of a test."""
        parts = ("images" if self.images else "text", self.vision, self.language, self.attention)
        again = {"none": "", "full": "recompute"}.get(self.recompute, self.recompute)
        more = [*parts, *([again] if again else []), *(["levels"] if self.levels else [])]
        more += [f"heads over {self.widest}"] * (self.widest != varlen.LARGEST_HEAD)
        return "-".join([self.family, *more, *(["packages"] if self.packages else [])])


@dataclass(kw_only=True)
class Seen:
    """What came of a case.

    Args:
        error: the traceback of what was raised; empty where nothing was.
        attention, fused: what ran.
        waits: (what, place) of each time that the host waited for the device.
        loss, grad_norm: on the fake GPU, in bfloat16.
        cpu_loss, cpu_grad_norm: of the same step on CPU, in float32.
        trained: names of what trains.
        without_gradient: of these, those that got none, or with images nothing but zeros.
        frozen_with_gradient: names of what does not train and got one.
        unmoved: of these, those that the optimizer left where they were.
        elsewhere: parameters and buffers that are not on the device.
        patch_products: how often patches were embedded by a matrix product.
        operators: how often each ran in the step, by name.
    """

    error: str = ""
    attention: str = ""
    fused: str = ""
    waits: list[tuple[str, str]] = field(default_factory=list)
    loss: float = 0.0
    grad_norm: float = 0.0
    cpu_loss: float = 0.0
    cpu_grad_norm: float = 0.0
    trained: list[str] = field(default_factory=list)
    without_gradient: list[str] = field(default_factory=list)
    frozen_with_gradient: list[str] = field(default_factory=list)
    unmoved: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    patch_products: int = 0
    operators: dict[str, int] = field(default_factory=dict)


def _policy(case: Case, has_tower: bool) -> TrainingPolicy:
    parts = {"vision": case.vision, "projector": "full"} if has_tower else {}
    uses_lora = "lora" in (case.language, *parts.values())
    lora = {"lora": LoraSection(rank=4, alpha=8.0)} if uses_lora else {}
    return TrainingPolicy(
        trainable=TrainableSection(language=case.language, **parts, **lora), optim=ADAMW
    )


def _batches(case: Case, encoder: Encoder) -> list[Batch]:
    """Two micro-batches of one step, of three samples each with gaps between them; with images,
    the first sample but one has none. As a worker makes them: the tower is told of its images."""
    raw = mixed_samples() if case.images and encoder.takes_images else text_samples()[:6]
    samples = [encoder.encode(sample.cooked()) for sample in raw]
    if not encoder.takes_images:
        assert all(sample.media is None for sample in samples)
    rows = [
        pack_batch_sequences(part, pad_to_multiple_of=8, pad_token_id=encoder.pad_token_id)
        for part in (samples[0::2], samples[1::2])
    ]
    rule = encoder.family.tower_rule_of(encoder.folder)
    told = [tell_tower(row, rule) for row in rows]
    if not case.levels:
        return told
    sent = [as_levels(row, level_scale(encoder)) for row in told]
    assert all(row.media.table is not None for row in sent if row.media is not None)
    return sent


def _stepped(case: Case, folder: Path, device: torch.device, seen: Seen) -> tuple[float, float]:
    """Loss and gradient norm of a step; `seen` gets the rest where it is on the GPU."""
    encoder, on_gpu = Encoder(folder), device.type == "cuda"
    compute = {"attention": case.attention, "recurrence": case.recurrence}
    model = ModelSection(
        path=str(folder),
        activation_checkpointing=case.recompute,
        dtype="bfloat16" if on_gpu else "float32",
        **(compute if on_gpu else {"attention": "segments"}),
    )
    ranks = replace(single_rank(), device=device)
    policy = _policy(case, encoder.takes_images)
    batches = _batches(case, encoder)
    with (
        fake_gpu() if on_gpu else nullcontext() as gpu,
        planted(case.plant if on_gpu else None),
        installed(case.packages if on_gpu else ()),
        patch.object(varlen, "LARGEST_HEAD", case.widest),
        patch.object(
            PatchProduct, "product", autospec=True, side_effect=PatchProduct.product
        ) as products,
    ):
        engine = engine_of(model, ParallelismSection(), encoder, ranks, policy)
        stepper = make_stepper(engine)
        _begin(engine)
        before = {name: value.detach().clone() for name, value in engine.parameters()}
        if gpu is not None:
            batches = [pin_batch(batch) for batch in batches]
            gpu.waits.clear()
            gpu.operators.clear()
        sums, _ = stepper.train(0, batches, num_skipped=0, stop=False)
        if gpu is not None:
            seen.patch_products = products.call_count
            seen.operators = dict(gpu.operators)
            seen.waits = [(wait.what, wait.place) for wait in gpu.waits]
            _look(engine, before, seen, with_images=case.images)
    return sums.loss, sums.grad_norm


def _begin(engine: HFEngine) -> None:
    """Adapters as they are a few steps later: the second matrix of new ones is zero, and with it
    the gradient of the first."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in engine.parameters():
            if "lora_B" in name:
                value.copy_(0.02 * torch.randn(value.shape, generator=draw))


def _look(engine: HFEngine, before: dict[str, Tensor], seen: Seen, *, with_images: bool) -> None:
    """What trains, what moved, and what is not on the device."""
    seen.attention = engine.description["attention"]
    seen.fused = engine.description["fused layers"]
    for name, value in engine.vlm.model.named_parameters():
        if value.requires_grad:
            seen.trained.append(name)
            learns = value.grad is not None and bool(value.grad.held.any())
            if value.grad is None or (with_images and not learns):
                seen.without_gradient.append(name)
            if learns and torch.equal(value.held, before[name].held):
                seen.unmoved.append(name)
        elif value.grad is not None:
            seen.frozen_with_gradient.append(name)
    tensors = [*engine.vlm.named_parameters(), *engine.vlm.named_buffers()]
    seen.elsewhere = [name for name, value in tensors if value.device != CUDA]


def look(case: Case) -> Seen:
    """A case, on the fake GPU and on CPU."""
    seen = Seen()
    with tempfile.TemporaryDirectory() as made:
        folder = tiny_family_folder(case.family, Path(made))
        try:
            seen.loss, seen.grad_norm = _stepped(case, folder, CUDA, seen)
            if case.plant is None:
                AcceleratorState._reset_state(True)  # it is one a process, and said to be on CUDA
                cpu = torch.device("cpu")
                seen.cpu_loss, seen.cpu_grad_norm = _stepped(case, folder, cpu, seen)
        except Exception:
            seen.error = traceback.format_exc()
        AcceleratorState._reset_state(True)
    return seen


def main() -> None:
    given = json.loads(sys.argv[1])
    cases = [Case(**{**each, "packages": tuple(each.get("packages", ()))}) for each in given]
    warnings.simplefilter("ignore")
    print(json.dumps([asdict(look(case)) for case in cases]))


if __name__ == "__main__":
    main()
