"""The Megatron engine on one process: a packed training step against a padded one.

The measure of bench_step.py: V is what padding does not touch, L the packed language model from
embeddings to the loss and back, r = padded / real tokens; the best possible speed-up of a step is
(V + L r) / (V + L).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from bench_step import batches_of
from models import write_wide_model
from timing import against_ideal, medians

from vlmpack.backends.mcore.engine import MegatronEngine
from vlmpack.backends.mcore.groups import megatron_on_cpu
from vlmpack.backends.mcore.model import MergedRow
from vlmpack.backends.policy import TrainingPolicy
from vlmpack.build.engine import resolved_compute
from vlmpack.distributed import start_process_group
from vlmpack.encode import Encoder
from vlmpack.packing import Batch
from vlmpack.recipe.schema import ModelSection, ParallelismSection
from vlmpack.recipe.trainable import OptimSection, TrainableSection
from vlmpack.training.objective import SFT
from vlmpack.training.step import Schedule, Stepper

OPTIM = OptimSection(lr=1e-30, schedule="constant")
"""The smallest step: what is measured stays the same."""
POLICY = TrainingPolicy(trainable=TrainableSection(), optim=OPTIM)


def _engine(folder: Path, encoder: Encoder) -> MegatronEngine:
    model = ModelSection(path=str(folder), backend="mcore", dtype="float32")
    split = ParallelismSection(distributed_optimizer=False)
    ranks = start_process_group()
    compute = resolved_compute(model, split, encoder, ranks.device)
    return MegatronEngine(model, split, encoder, ranks, POLICY, compute)


def _whole_step(stepper: Stepper, batches: list[Batch]) -> Callable[[], None]:
    def run() -> None:
        for batch in batches:
            stepper.train(0, [batch], num_skipped=0, stop=False)

    return run


def _language_only(engine: MegatronEngine, batches: list[Batch]) -> Callable[[], None]:
    """Embeddings -> decoder -> head -> loss -> back to the embeddings."""
    model = engine.model
    rows = [engine.prepare(batch) for batch in batches]
    with megatron_on_cpu():
        embeds = [model.merge(row).embeds.detach().requires_grad_() for row in rows]

    def run() -> None:
        engine.zero_gradients()
        with megatron_on_cpu():
            for row, embed in zip(rows, embeds, strict=True):
                model.decode(row, row.packed_seq_params(), MergedRow(embed)).sum().backward()

    return run


def bench_megatron_step(
    rounds: int, *, width: int, micro_batch_size: int = 16
) -> dict[str, object]:
    """Packed against padded, whole step and language model alone, both under megatron-core."""
    with tempfile.TemporaryDirectory() as folder:
        write_wide_model(Path(folder), width)
        encoder = Encoder(Path(folder))
        engine = _engine(Path(folder), encoder)
        packed = batches_of(encoder, "in_batch", micro_batch_size, 3)
        padded = batches_of(encoder, "none", micro_batch_size, 3)
    assert [b.keys for b in packed] == [b.keys for b in padded], "not the same samples"
    schedule = Schedule(OPTIM, total_steps=1)
    stepper = Stepper(
        engine=engine, objective=SFT, schedule=schedule, max_grad_norm=1.0, ranks=engine.ranks
    )
    losses = [stepper.evaluate(batches).loss for batches in (packed, padded)]
    assert abs(losses[0] - losses[1]) < 1e-5 * losses[0], f"losses differ: {losses}"
    seconds = medians(
        {
            "language_packed": _language_only(engine, packed),
            "language_padded": _language_only(engine, padded),
            "step_packed": _whole_step(stepper, packed),
            "step_padded": _whole_step(stepper, padded),
        },
        rounds=rounds,
    )
    figures = against_ideal(
        seconds,
        num_batches=len(packed),
        real_tokens=sum(batch.num_tokens for batch in packed),
        padded_slots=sum(batch.num_slots for batch in padded),
    )
    return {
        "model": f"tiny-qwen2_5_vl's shape, width {width}, 8 layers, megatron-core, one process",
        "micro_batch_size": micro_batch_size,
    } | figures
