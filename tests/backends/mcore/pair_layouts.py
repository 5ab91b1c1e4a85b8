"""Run in ranks: a step of preference training on the Megatron engine, in double, in some layouts.

    torchrun --nproc-per-node N pair_layouts.py FOLDER JOB [JOB ...]

A job is LAYOUT:KIND, KIND being `packed`, `padded`, or a name of `CONTROLS`: a way to get it wrong.
FOLDER/reference.pt holds the reference's log-probabilities of `four_pairs`. Writes FOLDER/<job>.pt:
log p of each sequence, and by loss the step's value, its totals and whole gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from support.doubles import use_double
from support.engines import EVERYTHING, make_stepper
from support.layouts import LAYOUTS, Layout, collator, one_layout
from support.pairs import cooked_pair, raw_pairs
from support.shards import TINY_MODEL
from torch import Tensor

from vlmpack.build.engine import resolved_compute
from vlmpack.distributed import Ranks, stop_process_group
from vlmpack.encode import Encoder
from vlmpack.packing import IGNORE_INDEX, Batch, EncodedSample, PadCollator
from vlmpack.packing.pairs import sequences_of
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.recipe.schema import ModelSection
from vlmpack.training.preference import dpo
from vlmpack.training.reference import log_probabilities

KNOBS = {
    "sigmoid": ObjectiveSection(name="dpo", beta=0.2, label_smoothing=0.1, sft_weight=0.3),
    "ipo": ObjectiveSection(name="dpo", beta=0.3, loss="ipo", sft_weight=0.5),
    "hinge": ObjectiveSection(name="dpo", beta=0.1, loss="hinge"),
}
ROWS = {"packed": ((2, 0), (), (1,), (3,)), "padded": ((0, 1), (3, 2))}
"""Micro-batches of a step, by the places of their pairs; an empty row among them."""


def four_pairs() -> tuple[Encoder, list[EncodedSample]]:
    """On 2, 0, 1 and 3 images; the answers of the last one are one token each, so that of two
    context-parallel ranks one has no label of theirs. A power of two: engines divide gradients by
    it in float32."""
    encoder = Encoder(TINY_MODEL).replace(pairs=True)
    pairs = [encoder.encode(cooked_pair(*pair)) for pair in raw_pairs(least=4)]
    short = pairs[-1].labels.clone()
    for part, start in zip(sequences_of(pairs[-1]), (0, pairs[-1].sequences[0]), strict=True):
        [*places] = (part.labels != IGNORE_INDEX).nonzero()[:-1, 0].tolist()
        short[[start + place for place in places]] = IGNORE_INDEX
    return encoder, [*pairs[:-1], replace(pairs[-1], labels=short)]


def batches_of(
    layout: Layout, kind: str, pairs: Sequence[EncodedSample], reference: Tensor
) -> list[Batch]:
    """The step's micro-batches as a recipe's rules would have them."""
    collate: Any = collator(layout)
    if kind == "padded":
        collate = PadCollator(
            pad_token_id=collate.pad_token_id,
            num_position_axes=3,
            pad_to_multiple_of=collate.total_multiple_of,
        )
    return [
        replace(
            collate([pairs[place] for place in row]),
            reference=reference[[2 * place + k for place in row for k in (0, 1)]],
        )
        for row in ROWS[kind]
    ]


@contextmanager
def in_double() -> Iterator[None]:
    """Gradients are added up in the weights' type, which a run of float32 and bfloat16 never is."""
    from vlmpack.backends.mcore import stage

    config = partial(
        lambda made, **given: made(**given | {"grad_reduce_in_fp32": False}),
        stage.DistributedDataParallelConfig,
    )
    with ExitStack() as stack:
        use_double(lambda *arguments: stack.enter_context(patch.object(*arguments)))
        stack.enter_context(patch.object(stage, "DistributedDataParallelConfig", config))
        yield


def make_double(layout: Layout, ranks: Ranks, encoder: Encoder) -> Any:
    """The engine, all of it float64; Megatron's sharded optimizer takes no such weights."""
    from vlmpack.backends.mcore.engine import MegatronEngine

    split = replace(layout, distributed=False).sizes
    model = ModelSection(
        path=str(TINY_MODEL),
        backend="mcore",
        dtype="float32",
        attention="segments",
        activation_checkpointing=layout.recompute,
    )
    compute = resolved_compute(model, split, encoder, ranks.device)
    compute = replace(compute, dtype=torch.float64)
    engine = MegatronEngine(model, split, encoder, ranks, EVERYTHING, compute)
    if engine.model.vision is not None:
        engine.model.vision.double()  # the rotary frequencies, as in transformers' own double
    return engine


def whole_gradients(engine: Any) -> dict[str, Tensor]:
    """Of every parameter under transformers' names, on every rank."""
    mine = []
    for local in engine.layout.parameters:
        for piece in local.pieces:
            values = local.parameter.main_grad[piece.start : piece.stop].clone()  # not the buffer
            mine.append((piece.box, values.view(piece.box.lengths)))
    found = {name: torch.full(shape, torch.nan).double() for name, shape in engine.shapes.items()}
    for box, values in chain.from_iterable(engine.ranks.gather_objects(mine)):
        found[box.name][box.index] = values
    return found


def _factor_of_ranks() -> AbstractContextManager[Any]:
    """The sum's gradient is summed once more, as a plain differentiable all-reduce does."""
    from vlmpack.backends import collectives

    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * torch.distributed.get_world_size(), None

    return patch.object(collectives._SumParts, "backward", staticmethod(backward))


def _parts_alone() -> AbstractContextManager[Any]:
    """Each context-parallel rank takes its part for the whole."""
    from vlmpack.backends.mcore import engine

    return patch.object(engine, "sum_parts", lambda part, group: part)


def _labels_shifted_after_slicing() -> AbstractContextManager[Any]:
    """Unshifted labels are sliced, and shifted there."""
    from vlmpack.backends.mcore import engine

    own = engine.slice_for_context

    def sliced(batch: Any, **arguments: Any) -> Any:
        unshifted = torch.full_like(batch.labels, IGNORE_INDEX)
        unshifted[0, 1:] = batch.labels[0, :-1]
        whole = own(batch, **arguments)
        index = whole.context.row_index
        shifted = torch.roll(unshifted.flatten()[index], -1)
        at = (shifted != IGNORE_INDEX).nonzero()[:, 0]
        places = torch.searchsorted(batch.label_positions, index.roll(-1)[at] - 1)
        found = replace(whole.context, label_positions=at, targets=shifted[at], label_places=places)
        return replace(whole, context=found)

    return patch.object(engine, "slice_for_context", sliced)


def _no_sum_over_the_vocabulary() -> AbstractContextManager[Any]:
    """Each tensor-parallel rank normalises over its rows of the head."""
    from vlmpack.backends.mcore.model import MegatronVLM

    own = MegatronVLM._shard

    def shard(self: Any, start: int) -> Any:
        return replace(own(self, start), all_sum=lambda values: values)

    return patch.object(MegatronVLM, "_shard", shard)


def _every_rank_reports() -> AbstractContextManager[Any]:
    """The context-parallel ranks that share a row count its sums as often as they are."""
    from vlmpack.training import objective

    own = objective.forward_step
    return patch.object(
        objective,
        "forward_step",
        lambda *given, of_rows, **more: own(*given, of_rows=False, **more),
    )


CONTROLS = {
    "factor of ranks": _factor_of_ranks,
    "parts alone": _parts_alone,
    "labels shifted after slicing": _labels_shifted_after_slicing,
    "no sum over the vocabulary": _no_sum_over_the_vocabulary,
    "every rank reports": _every_rank_reports,
}


def run_job(engine: Any, layout: Layout, kind: str, folder: Path, pairs: Any) -> dict[str, Any]:
    """Log p of the reference's pass, and a step of each loss; of a control the first alone."""
    reference = torch.load(folder / "reference.pt")
    batches = batches_of(layout, kind if kind in ROWS else "packed", pairs, reference)
    steps = {}
    with CONTROLS[kind]() if kind in CONTROLS else nullcontext():
        computed = [log_probabilities(engine, batch) for batch in batches]
        shares = engine.ranks.gather_objects(computed)
        for loss in KNOBS if kind in ROWS else list(KNOBS)[:1]:
            stepper = make_stepper(engine, objective=dpo(KNOBS[loss]), max_grad_norm=None)
            stepper.schedule = lambda step: 0.0
            sums, _ = stepper.train(0, batches, num_skipped=0, stop=False)
            gradients = whole_gradients(engine)
            evaluated = stepper.evaluate(batches)
            steps[loss] = (sums.loss, dict(sums.totals), gradients, evaluated.loss)
    said = [share for share in shares if any(share)]
    assert len(said) == 1 or kind == "every rank reports", "one rank of a replica says log p"
    return {"log_p": torch.tensor(list(chain(*said[0])), dtype=torch.float64), "steps": steps}


def main(folder: Path, jobs: list[str]) -> None:
    """One engine for each layout."""
    encoder, pairs = four_pairs()
    for name in dict.fromkeys(job.partition(":")[0] for job in jobs):
        with one_layout(LAYOUTS[name]) as ranks, in_double():
            engine = make_double(LAYOUTS[name], ranks, encoder)
            for job in jobs:
                layout, _, kind = job.partition(":")
                if layout == name:
                    found = run_job(engine, LAYOUTS[name], kind, folder, pairs)
                    if ranks.is_main:
                        torch.save(found, folder / f"{job}.pt")
    stop_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
