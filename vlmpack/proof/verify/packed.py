"""The recipe's engine as it is verified, and its run on the rows.

It is built as the run builds it, without random or rounded parts, and runs forward, backward and
one optimizer step. That works on any engine and layout. Losses come from the forward step by slot.
Gradients are read from AdamW's first moment after one step, which is (1 - beta1) times the
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vlmpack.backends.boxes import TensorSlice
from vlmpack.backends.cross_entropy import capped
from vlmpack.backends.engine import Engine, ForwardStep, LossFunction
from vlmpack.build.engine import EngineSpec, build_engine
from vlmpack.distributed import Ranks
from vlmpack.packing import Batch
from vlmpack.proof.measure import full_float32
from vlmpack.proof.verify.samples import VerifiedRow
from vlmpack.proof.verify.unpacked import Point, captured, patches_of
from vlmpack.training.checkpoint.index import random_state, restore_random_state
from vlmpack.training.objective import SFT, cross_entropy, forward_step

if TYPE_CHECKING:
    from vlmpack.backends.hf.model import PackedLM


Dtype = Literal["float32", "recipe"]


def verified_spec(spec: EngineSpec, dtype: torch.dtype) -> EngineSpec:
    """The engine spec with the changes that verifying needs.

    In float32, kernels for bfloat16 alone give way to the automatic choice. 4-bit weights, dropout
    and trained adapters are dropped, since the stock model has none. The experts' auxiliary loss is
    dropped, since it is no part of a sample's loss. torch's AdamW is used, for its moments.
    """
    model, policy = spec.model, spec.policy
    exact = dtype is torch.float32
    needs_bfloat16 = model.attention not in ("auto", "segments")
    changed = model.model_copy(
        update={
            "path": str(spec.encoder.folder),
            "adapter": None,
            "dtype": "float32" if exact else "bfloat16",
            "attention": "auto" if exact and needs_bfloat16 else model.attention,
            "recurrence": "auto" if exact and model.recurrence == "kernels" else model.recurrence,
            "router_aux_loss_coef": 0.0,
        }
    )
    trainable = policy.trainable
    lora = trainable.lora.model_copy(update={"dropout": 0.0, "quantize": "none"})
    policy = replace(
        policy,
        trainable=trainable.model_copy(update={"lora": lora}),
        optim=policy.optim.model_copy(update={"name": "adamw", "master": "float32"}),
    )
    return replace(spec, model=changed, policy=policy)


def build_verified_engine(spec: EngineSpec) -> Engine:
    engine = build_engine(spec)
    for module in engine.module.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "drop_prob", None), float):  # of whole residual branches
            vars(module)["drop_prob"] = 0.0
    return engine


@contextmanager
def as_it_was() -> Iterator[None]:
    """Full float32 in a block, and random states restored after it.

    With less precision, rounding of the measurement would look like an error of packing.
    """
    states = random_state()
    try:
        with full_float32():
            yield
    finally:
        restore_random_state(states)


Look = Callable[[Tensor, Batch], None]
"""(L,) losses of a row's label tokens, and its batch -> keeps what it needs of them."""

SlotLosses = dict[int, dict[int, float]]
"""Row -> flat slot -> loss of the label token there."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The results of the rows, on CPU, on the main rank.

    Args:
        losses: of each row by slot.
        outputs: of each row, (rows, D) by point; empty where the engine's model is not
            transformers' own.
        hidden: of each row (T, D), final hidden states of all its slots; empty likewise.
        reports: the sums of each row, as the engine hands them back on this rank.
    """

    losses: SlotLosses
    outputs: list[dict[str, Tensor]]
    hidden: list[Tensor]
    reports: list[dict[str, Tensor]] = field(default_factory=list)


def plain_step(look: Look) -> ForwardStep:
    """Cross entropy; `look` sees the losses."""
    return SFT.shown_to(look).step_with()


class PackedRun:
    """Runs rows through an engine.

    Args:
        ranks: who this process is; all replicas run the same rows.
    """

    def __init__(
        self, engine: Engine, ranks: Ranks, points: Sequence[Point], kept: Sequence[Tensor]
    ) -> None:
        self.engine, self.ranks, self.points, self.kept = engine, ranks, points, kept
        module = packed_module(engine)
        self.packed = module
        self.model = None if module is None else module.model
        self.logit_cap = None if module is None else module.logit_cap

    def run(
        self,
        rows: Sequence[VerifiedRow],
        *,
        backward: bool,
        make_step: Callable[[Look], ForwardStep] = plain_step,
    ) -> Packed:
        """All rows as the micro-batches of one optimizer step; gradients are accumulated.

        Args:
            make_step: the forward step of a row, which shows its losses to what it is given.
        """
        losses: SlotLosses = {}
        outputs: list[dict[str, Tensor]] = []
        hidden: list[Tensor] = []
        numbers = count()

        def record(number: int, values: Tensor, batch: Batch) -> None:
            slots = _label_slots(batch).tolist()
            losses[number] = dict(zip(slots, values.float().tolist(), strict=True))

        def step(data_iterator: Iterator[Batch], model: nn.Module) -> tuple[Tensor, LossFunction]:
            number = next(numbers)
            computed = partial(make_step(partial(record, number)), data_iterator, model)
            if self.model is None:
                return computed()
            last, row = self.points[-1], rows[number]
            patches = patches_of([row.batch.media])
            with (
                captured(self.model, self.points, self.row_slots(row), patches) as captures,
                captured(self.model, [last]) as whole,
            ):
                result = computed()
            outputs.append(captures)
            hidden.append(whole[last.path])
            return result

        reports = self.engine.forward_backward(
            step,
            iter([row.batch for row in rows]),
            num_microbatches=len(rows),
            forward_only=not backward,
        )
        return Packed(self._gathered(losses), outputs, hidden, reports)

    def input_gradient(self, row: VerifiedRow, start: int, end: int) -> Tensor:
        """(T, D) gradients of the decoder's inputs, of the losses at slots `start` to `end` alone.

        Only for an engine whose model is transformers' own. Collective.
        """
        gradients: list[Tensor] = []
        looks_up: list[bool] = []

        def kept(embeds: Tensor) -> Tensor:
            if not embeds.requires_grad:  # nothing below is trained
                embeds = embeds.detach().requires_grad_()
            embeds.register_hook(lambda gradient: gradients.append(gradient.detach()))
            return embeds

        def keep(_module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
            looks_up[:] = [given.get("inputs_embeds") is None]
            embeds = None if looks_up[0] else kept(given["inputs_embeds"])
            return args, {**given, **({} if embeds is None else {"inputs_embeds": embeds})}

        def keep_looked_up(_module: nn.Module, _args: Any, embeds: Tensor) -> Tensor:
            return kept(embeds) if looks_up == [True] else embeds

        def own(values: Tensor, batch: Batch) -> Mapping[str, Tensor]:
            slots = _label_slots(batch)
            counts = (slots >= start) & (slots < end)
            return cross_entropy(torch.where(counts, values, 0.0), batch)

        def step(data_iterator: Iterator[Batch], model: nn.Module) -> tuple[Tensor, LossFunction]:
            return forward_step(data_iterator, model, own)

        assert self.model is not None
        decoder = self.model.get_submodule(self.points[-1].path)
        table: nn.Module = self.model.get_input_embeddings()
        with (
            decoder.register_forward_pre_hook(keep, with_kwargs=True),
            table.register_forward_hook(keep_looked_up),
        ):
            self.engine.forward_backward(
                step, iter([row.batch]), num_microbatches=1, forward_only=False
            )
        return gradients[0].flatten(0, -2).float().cpu()

    def row_slots(self, row: VerifiedRow) -> Tensor:
        """(n,) flat slots of a row: those that are kept of its samples, in their order."""
        return torch.cat(
            [self.kept[n] + start for n, start in zip(row.numbers, row.starts, strict=True)]
        )

    def _gathered(self, losses: SlotLosses) -> SlotLosses:
        """The first replica's, from whichever ranks computed them."""
        mine = losses if self.ranks.dp_rank == 0 else {}
        gathered: SlotLosses = {}
        for part in self.ranks.gather_objects(mine):
            for number, values in part.items():
                gathered.setdefault(number, {}).update(values)
        return gathered

    def gradients(self, beta1: float) -> Iterator[tuple[str, Tensor]]:
        """Every trained parameter's gradient, whole, after the first optimizer step. Collective."""
        boxes: dict[str, list[tuple[TensorSlice, Tensor]]] = {}
        for kind, box, values in self.engine.owned_slices():
            if kind == "exp_avg":
                boxes.setdefault(box.name, []).append((box, values))
        device = self.engine.device
        trained = sorted({n for names in self.ranks.gather_objects([*boxes]) for n in names})
        shapes = self.engine.parameter_shapes()
        for name in trained:
            whole = torch.zeros(shapes[name], dtype=torch.float32, device=device)
            for box, values in boxes.get(name, ()):
                whole[box.index] = values.to(device).float()
            if self.ranks.world_size > 1:
                dist.all_reduce(whole)  # each element was filled in by one rank: the sum is exact
            yield name, whole.cpu() / (1 - beta1)

    def logits(self, hidden: Tensor) -> Tensor:
        """(n, V) of (n, D) final hidden states, by the head of the engine's own model."""
        assert self.packed is not None
        weight = self.packed.head.weight.detach()
        hidden = self.packed.before_head(hidden)
        if isinstance(weight, DTensor):
            weight = weight.full_tensor()
        logits: Tensor = (hidden.to(weight.device, weight.dtype) @ weight.T).float()
        return capped(logits, self.logit_cap).cpu()


def packed_module(engine: Engine) -> PackedLM | None:
    """The wrapper of a transformers model in an engine's module; None if the model is its own, or
    if its layers see a part of each row."""
    from vlmpack.backends.hf.model import PackedLM

    wrappers = (m for m in engine.module.modules() if isinstance(m, PackedLM))
    return next((m for m in wrappers if m.context_group is None), None)


def _label_slots(batch: Batch) -> Tensor:
    """(l,) flat slots of the row whose losses this rank computes."""
    if batch.context is not None:
        return batch.context.row_index[batch.context.label_positions]
    return batch.label_positions
