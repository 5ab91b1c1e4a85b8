"""Each known way to get parallelism wrong is found; its unbroken twin is not.

A comparison that accepts any of these would prove nothing.

Run in ranks: known ways to get parallelism wrong, each beside its unbroken twin.

    torchrun --nproc-per-node 2 test_mcore_negative_controls.py FOLDER NAME...

Writes what `support.layouts.Trained` writes, under the layout's name and under each control's.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from backends.mcore.launches import once
from support import layouts
from support.forked import check_ranks
from support.layouts import LAYOUTS, Trained, make_megatron, one_layout, stepper_with, train
from support.layouts import whole_weights as collect_weights

from vlmpack.backends.collectives import gather_features, gather_slices
from vlmpack.backends.mcore import attention, config, engine, model, stage
from vlmpack.backends.recompute import recompute_modules
from vlmpack.distributed import Ranks, stop_process_group
from vlmpack.packing import IGNORE_INDEX, context
from vlmpack.packing.context import slice_for_context, zigzag_index


def labels_shifted_after_slicing(batch: Any, **arguments: Any) -> Any:
    """The slice of unshifted labels, shifted there: the chunks' last tokens learn other ones."""
    whole = slice_for_context(batch, **arguments)
    unshifted = torch.full_like(batch.labels.flatten(), IGNORE_INDEX)
    unshifted[1:] = batch.labels.flatten()[:-1]
    local = unshifted[whole.context.row_index]
    shifted = torch.cat((local[1:], local.new_full((1,), IGNORE_INDEX)))
    positions = (shifted != IGNORE_INDEX).nonzero().squeeze(1)
    return replace(
        whole,
        context=replace(whole.context, label_positions=positions, targets=shifted[positions]),
    )


def zigzag_over_the_row(segment_lengths: Any, *, rank: int, size: int) -> Any:
    """One zigzag for all segments."""
    return zigzag_index([sum(segment_lengths)], rank=rank, size=size)


def slice_before_merge(self: Any, batch: Any) -> Any:
    """The placeholders of this rank's ids take the features from the first on."""
    ids = batch.input_ids.flatten()
    is_placeholder = torch.zeros_like(ids, dtype=torch.bool)
    is_placeholder[batch.media_positions] = True
    mine = batch.context.row_index
    embeds = self.gpt.embedding.word_embeddings(ids[mine][None]).flatten(0, 1)
    features = self._features(batch.media)
    if batch.media_part is None:
        return model.MergedRow(embeds + 0.0 * features.sum())
    if batch.media is None:
        features = 0.0 * features[:0] + 0.0 * features.sum()
    features = gather_features(
        features,
        batch.media_part.order,
        batch.media_part.counts,
        group=self.groups.tp_cp,
        cp_group=self.groups.cp,
    )
    local = is_placeholder[mine].nonzero().squeeze(1)
    return model.MergedRow(embeds.index_copy(0, local, features[: local.shape[0]]))


def already_sliced(self: Any, embeds: Any, batch: Any) -> Any:
    """What follows the wrong merge."""
    return embeds[:, None]


def positions_from_the_slice(self: Any, batch: Any, *rest: Any) -> Any:
    """Angles of the row's first tokens instead of this rank's."""
    tokens = batch.context.row_index.shape[0]
    first = replace(batch.context, row_index=torch.arange(tokens))
    made = row_params(self, replace(batch, context=first), *rest)
    made.context = batch.context
    return made


row_params = model.MegatronVLM._row_params


class _GatherWithoutSum(torch.autograd.Function):
    """The backward pass of the gather keeps this rank's share and forgets the others'."""

    @staticmethod
    def forward(ctx: Any, local: Any, natural_order: Any, group: Any) -> Any:
        ctx.save_for_backward(natural_order)
        ctx.start, ctx.rows = group.rank() * local.shape[0], local.shape[0]
        return gather_slices(local, natural_order, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (natural_order,) = ctx.saved_tensors
        by_rank = torch.empty_like(grads[0]).index_copy_(0, natural_order, grads[0])
        return by_rank[ctx.start : ctx.start + ctx.rows], None, None


def gather_without_sum(local: Any, natural_order: Any, group: Any) -> Any:
    """See above."""
    return _GatherWithoutSum.apply(local, natural_order, group)


def features_without_sum(*arguments: Any, cp_group: Any, **keywords: Any) -> Any:
    """Each CP rank sends back the gradient of its own tokens alone."""
    alone = SimpleNamespace(size=lambda: 1)
    return gather_features(*arguments, cp_group=alone, **keywords)


class UnmarkedNorm(config.RMSNorm):
    """Without the flag by which Megatron sums its gradient over the TP ranks."""

    def __init__(self, config: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(config, *arguments, **keywords)
        self.weight.sequence_parallel = False


def sums_in_kept_products(layers: Any, value: Any) -> None:
    """Products are kept where Megatron sums them over the TP ranks in place, twice then."""
    recompute_modules(layers, "selective")


@dataclass(frozen=True)
class Control:
    """One way to be wrong.

    Args:
        layout: the unbroken twin.
        owner, attribute, replacement: what is patched.
        also: a second patch.
    """

    layout: str
    owner: Any
    attribute: str
    replacement: Any
    also: tuple[Any, str, Any] | None = None

    def applied(self) -> AbstractContextManager[Any]:
        """The first patch."""
        return patch.object(self.owner, self.attribute, self.replacement)

    def second(self) -> AbstractContextManager[Any]:
        """The second one, if any."""
        return patch.object(*self.also) if self.also else nullcontext()


VLM = model.MegatronVLM
CONTROLS = {
    "labels shifted after slicing": Control(
        "cp2", engine, "slice_for_context", labels_shifted_after_slicing
    ),
    "zigzag over the row": Control("cp2", context, "zigzag_index", zigzag_over_the_row),
    "slice before merge": Control(
        "cp2", VLM, "merge", slice_before_merge, (VLM, "_scatter", already_sliced)
    ),
    "positions from the slice": Control("cp2", VLM, "_row_params", positions_from_the_slice),
    "keys and values without a sum": Control("cp2", attention, "gather_slices", gather_without_sum),
    "features without a sum": Control("cp2", model, "gather_features", features_without_sum),
    "norms without the flag": Control("tp2-sp", config, "RMSNorm", UnmarkedNorm),
    "tower without a sum": Control("tp2", stage, "gradients_over_tp", lambda ddp: []),
    "sums in kept products": Control("tp2", engine, "recompute_modules", sums_in_kept_products),
    "head without a sum": Control(
        "tp2", model, "copy_to_tensor_model_parallel_region", lambda hidden, group: hidden
    ),
    "tied weight without a sum": Control(
        "pp2",
        import_module("megatron.core.distributed.finalize_model_grads"),
        "_allreduce_word_embedding_grads",
        lambda *arguments, **keywords: None,
    ),
}


def run(layout: str, ranks: Ranks, stem: Path) -> None:
    """One step with SGD, whose updates are the gradients."""
    stepper = stepper_with(make_megatron(LAYOUTS[layout], ranks), "sgd")
    rows = train(stepper, LAYOUTS[layout], steps=1)
    weights, _ = collect_weights(stepper.engine)
    if ranks.is_main:
        Trained(rows, weights).save(stem)


def main(folder: Path, names: list[str]) -> None:
    """Some controls, those of a layout after their twin."""
    chosen = {name: CONTROLS[name] for name in names}
    for layout in sorted({control.layout for control in chosen.values()}):
        with one_layout(LAYOUTS[layout]) as ranks:
            run(layout, ranks, folder / layout)
            for name, control in chosen.items():
                if control.layout == layout:
                    with control.applied(), control.second():
                        run(layout, ranks, folder / name)
    stop_process_group()


pytestmark = pytest.mark.slow

FORWARD_IS_WRONG = {
    "labels shifted after slicing",
    "zigzag over the row",
    "slice before merge",
    "positions from the slice",
}
"""The others spoil gradients alone."""
IN_CI = (
    *("labels shifted after slicing", "zigzag over the row", "features without a sum"),
    *("norms without the flag", "tied weight without a sum"),
)
FURTHER = [name for name in CONTROLS if name not in IN_CI]
TWINS = {CONTROLS[name].layout: name for name in (*FURTHER, *IN_CI)}
"""By layout, a control whose launch has it unbroken as well."""


def marked(value, control):
    """With the mark of the control's launch."""
    return pytest.param(value, marks=() if control in IN_CI else pytest.mark.soak)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What a control, or a layout that is not broken, led to; those of a mark share a launch."""
    folder = tmp_path_factory.mktemp("broken")

    @once
    def launch(in_ci):
        check_ranks([__file__, folder, *(IN_CI if in_ci else FURTHER)], 2)

    def load(name):
        launch(TWINS.get(name, name) in IN_CI)
        return layouts.Trained.load(folder / name)

    return load


@pytest.fixture(scope="module")
def expected():
    return layouts.train_reference("sgd", steps=1)


@pytest.fixture(scope="module")
def start():
    return layouts.start_weights()


@pytest.mark.parametrize("layout", [marked(layout, name) for layout, name in TWINS.items()])
def test_the_unbroken_twin_is_accepted(found, expected, start, layout):
    errors = layouts.worst_errors(found(layout), expected, start)
    assert layouts.beyond_tolerance(errors) == {}


@pytest.mark.parametrize("name", [marked(name, name) for name in CONTROLS])
def test_a_broken_layout_is_found(found, expected, start, name):
    errors = layouts.worst_errors(found(name), expected, start)
    print(f"\n{name}: {', '.join(f'{what} {error:.1e}' for what, error in errors.items())}")
    wrong = {"gradient norm", "weights", "updates"} | (
        {"loss"} if name in FORWARD_IS_WRONG else set()
    )
    assert layouts.beyond_tolerance(errors).keys() == wrong
    assert errors["gradient norm"] >= 10 * layouts.TOLERANCES["gradient norm"]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
