"""megatron-core: tensor, sequence, context, pipeline and data parallelism.

Some parts of a layer run as one kernel. Norms and rotations are ours, by `model.fused_layers`; with
Transformer Engine norms are its own. Megatron's flag `bias_activation_fusion` lets torch compile
SwiGLU.

Weights are read box by box (`pretrained`). Some families have files with so many other names that
`pretrained` does not know them. Their weights are read by the names that transformers gives them on
load.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor, nn

from vlmpack.backends.boxes import Kind, ReadSlice, TensorSlice, digests, whole
from vlmpack.backends.collectives import sum_parts
from vlmpack.backends.decoder_graph import recorder_on as recorder
from vlmpack.backends.engine import Compute, ForwardStep, autocast_to, norms_by_component, or_one
from vlmpack.backends.export import save_model_folder
from vlmpack.backends.fused import FusedOps, choose_fused
from vlmpack.backends.hf.adapters import modules_in_full, save_adapter
from vlmpack.backends.hf.load import open_model
from vlmpack.backends.hf.router_loss import set_experts
from vlmpack.backends.hf.whole_copy import copy_buffers, fill_whole, shared_names
from vlmpack.backends.mcore.config import transformer_config
from vlmpack.backends.mcore.decoder_graph import recomputed_parts
from vlmpack.backends.mcore.groups import in_words, megatron_on_cpu, start_model_parallel
from vlmpack.backends.mcore.layout import LocalParameter, WeightLayout, local_parameters
from vlmpack.backends.mcore.model import MegatronVLM, tower_prefix, vision_tower
from vlmpack.backends.mcore.model_adapters import ModelAdapters
from vlmpack.backends.mcore.optimizer import MegatronAdamW
from vlmpack.backends.mcore.overlap import overlap_in_words
from vlmpack.backends.mcore.pretrained import KeptBuffers, PretrainedReader
from vlmpack.backends.mcore.router import report_routers
from vlmpack.backends.mcore.stage import (
    LookedAhead,
    Stage,
    mark_trained,
    refuse_adapters,
    stage_exchange,
)
from vlmpack.backends.mcore.versions import let_go_after_forward
from vlmpack.backends.mcore.weights import megatron_family
from vlmpack.backends.mcore.weights.dims import LanguageDims
from vlmpack.backends.mcore.weights.language import language_dims
from vlmpack.backends.policy import (
    ComponentCount,
    TrainingPolicy,
    count_components,
    describe_counts,
    is_adapter,
    is_untouched,
)
from vlmpack.backends.recompute import recompute_modules
from vlmpack.backends.skeleton import model_skeleton
from vlmpack.distributed import Ranks
from vlmpack.distributed.launch_order import VARIABLE
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError
from vlmpack.kernel_operators import is_plain
from vlmpack.packing import (
    Batch,
    PackedBatch,
    PaddedBatch,
    deal_media,
    padded_as_row,
    padding_mask,
    pin_batch,
    slice_for_context,
)
from vlmpack.packing.media import tell_tower
from vlmpack.recipe.schema import ModelSection, ParallelismSection, described
from vlmpack.recurrence import RecurrenceChoice, choose_recurrence


@dataclass(frozen=True, slots=True)
class FusedParts:
    """The fused parts of layers."""

    ops: FusedOps | None
    activation: bool
    described: str

    @classmethod
    def of(
        cls, model: ModelSection, device: torch.device, *, transformer_engine: bool
    ) -> FusedParts:
        """The fused parts of a recipe on a device.

        Raises:
            CapabilityError: what is asked for by name cannot run here.
        """
        ops, why = choose_fused(model.fused_layers, device)
        activation = model.fused_layers != "none" and (ops is not None or device.type == "cuda")
        own = f"none ({why})" if ops is None else f"{ops.name} ({ops.reason})"
        said = {"norms and rotations": own}
        if transformer_engine:
            said = {"norms": "Transformer Engine's", "rotations": own}
        said["SwiGLU"] = "Megatron's" if activation else "none"
        return cls(ops, activation, "; ".join(f"{part}: {runs}" for part, runs in said.items()))


def launch_queues(split: ParallelismSection, device: torch.device) -> dict[str, str]:
    """The value of CUDA_DEVICE_MAX_CONNECTIONS for the log, if tensor or context parallelism needs
    it. `vlmpack.distributed.launch_order` says why, and sets it."""
    found = os.environ.get(VARIABLE)
    if device.type != "cuda" or max(split.tensor, split.context) == 1:
        return {}
    said = "1" if found == "1" else f"{found or 'not set'}; up to Hopper GPUs set it to 1"
    return {VARIABLE: said}


class MegatronEngine:
    """See `vlmpack.backends.engine.Engine`.

    Args:
        model: where it lies; weights of main copy and moments are float32 whatever its dtype.
        ranks: laid out by `start_process_group` with the same sizes.

    Raises:
        ModelError: the folder cannot be loaded.
        CapabilityError: the model, a size or the policy cannot run here.
    """

    def __init__(
        self,
        model: ModelSection,
        split: ParallelismSection,
        encoder: Encoder,
        ranks: Ranks,
        policy: TrainingPolicy,
        compute: Compute,
    ) -> None:
        on_te = compute.attention is None
        refuse_adapters(policy, transformer_engine=on_te)
        self.ranks, self.config, self.split, self.policy = ranks, model, split, policy
        self.device, self.compute_dtype = ranks.device, compute.dtype
        self.optimizer_steps = 0
        folder, family = Path(model.path), encoder.family
        self.skeleton = model_skeleton(family.auto_class(), folder)
        self.paths = family.modules
        pretrained = {name: tuple(p.shape) for name, p in self.skeleton.named_parameters()}
        self.buffers = KeptBuffers.of(self.skeleton, family)
        self.adapters = ModelAdapters.of(self.skeleton, self.paths, policy)
        self.shapes = pretrained | self.adapters.shapes
        self.components: Sequence[ComponentCount] = count_components(
            self.shapes.items(), policy, self.paths
        )
        self.known = megatron_family(self.skeleton.config.model_type)
        padding = self.skeleton.get_input_embeddings().padding_idx
        dims = replace(language_dims(self.skeleton.config, self.known), padding=padding)
        dims.check(split)
        fused = FusedParts.of(model, self.device, transformer_engine=on_te)
        recurrence = self._recurrence(dims, compute)
        self.folder = folder
        reader = PretrainedReader(folder)
        reader.check(pretrained | self.buffers.shapes)
        with megatron_on_cpu():
            self.groups = start_model_parallel(split)
            config = transformer_config(
                dims, model, split, dtype=compute.dtype, fused_activation=fused.activation
            )
            model_parallel_cuda_manual_seed(0)  # recomputation wants generators; dropout is 0
            self.model: MegatronVLM = MegatronVLM(
                config,
                dims,
                split,
                self.groups,
                varlen=None if compute.attention is None else compute.attention.function,
                tower=vision_tower(config, self.skeleton, encoder, model.recomputed, folder),
                fused=fused.ops,
                recurrence=recurrence,
            ).to(self.device)
            self.buffers.fill(self.model.gpt.decoder.layers, reader, family.modules.language)
            self.buffers.fill_tower(self.model.vision, tower_prefix(family), reader)
            self.adapters.add_to(self.model, family)
            let_go_after_forward(self.model)
            for layers in recomputed_parts(self.model, captured=compute.captures):
                recompute_modules(layers, model.recomputed)
            if compute.captures:
                self.model.capture_decoder(recorder(self.device))
            self.router_sum = None
            if model.router_aux_loss_coef and dims.experts is not None:
                self.router_sum = report_routers(self.model, len(dims.experts.layers))
            self.first, self.last = self.model.pre_process, self.model.post_process
            parameters = local_parameters(self.model, family, self.shapes)
            self._check_coverage(parameters)
            mark_trained(parameters, policy, self.paths)
            self.stage = Stage(self.model, split, self.device)
            self.ddp = self.stage.ddp
            self.module: nn.Module = self.ddp
            self.optimizer = MegatronAdamW(
                self.ddp,
                policy.optim,
                distributed=split.distributed_optimizer,
                bf16=compute.dtype is torch.bfloat16,
            )
            self.layout = WeightLayout(parameters, self.optimizer)
            self.layout.load(self.adapters.start(reader), optimizer_steps=0)
            self.adapters.drawn.clear()
        self.description = self._described(compute, fused, recurrence)

    def _recurrence(self, dims: LanguageDims, compute: Compute) -> RecurrenceChoice:
        return choose_recurrence(
            self.config.recurrence,
            device=self.device,
            dtype=compute.dtype,
            fixed_shape=compute.captures,
            kinds=dims.state_kinds,
        )

    def _described(
        self, compute: Compute, fused: FusedParts, recurrence: RecurrenceChoice
    ) -> dict[str, str]:
        """What was chosen, for the log and the report."""
        ranks, kinds = self.ranks, self.model.dims.state_kinds
        return {
            "engine": f"mcore (megatron-core {version('megatron-core')})",
            "processes": f"{ranks.world_size} ({in_words(self.split)}, {ranks.dp_size} replicas)",
            "device": str(ranks.device),
            **compute.described(),
            **({"recurrence": recurrence.described(kinds)} if kinds else {}),
            "fused layers": fused.described,
            "overlap": overlap_in_words(
                self.split, self.device, transformer_engine=compute.attention is None
            ),
            **launch_queues(self.split, self.device),
            "recomputed": described(self.config.recomputed),
            "optimizer": "distributed" if self.split.distributed_optimizer else "replicated",
            "parameters": f"{sum(count.parameters for count in self.components):,}",
            "trained": describe_counts(self.components),
        }

    def _check_coverage(self, parameters: list[LocalParameter]) -> None:
        """Raise CapabilityError, on all ranks alike, for weights that no rank has built."""
        mine = {piece.box.name for local in parameters for piece in local.pieces}
        built = set().union(*self.ranks.gather_objects(mine))
        missing = sorted(n for n in set(self.shapes) - built if not is_untouched(n, self.paths))
        if missing:
            raise CapabilityError(
                f"the mcore engine builds no place for {len(missing)} tensors of this model: "
                f"{', '.join(missing[:3])} ...; use model.backend: hf"
            )

    @property
    def draws(self) -> bool:
        """Adapters alone have dropout here."""
        return self.policy.lora is not None and self.policy.lora.dropout > 0

    @property
    def has_plain_path(self) -> bool:
        """Layers of Transformer Engine have none."""
        return self.model.has_plain_path

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes of trained parameters under transformers' names."""
        return {
            name: shape
            for name, shape in self.shapes.items()
            if self.policy.trains_parameter(name, self.paths)
        }

    def forward_backward(
        self,
        forward_step: ForwardStep,
        data_iterator: Iterator[Batch],
        *,
        num_microbatches: int,
        forward_only: bool = False,
    ) -> list[dict[str, Tensor]]:
        """Run the micro-batches of one optimizer step through Megatron's schedule."""
        self.ddp.train(not forward_only)
        batches = LookedAhead(map(self.prepare, data_iterator))
        with megatron_on_cpu(), torch.set_grad_enabled(not forward_only), self._unfused():
            reports: list[dict[str, Tensor]] = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=batches,
                model=[self.ddp],
                num_microbatches=num_microbatches,
                seq_length=1,  # rows differ: variable_seq_lengths
                micro_batch_size=1,
                forward_only=forward_only,
                **stage_exchange(self.model.config, self.groups, batches),
            )
        # Every TP rank of the last stage computes the same losses; the first one counts them.
        counts = self.last and self.groups.tp.rank() == 0
        return reports if counts else [{} for _ in range(num_microbatches)]

    @contextmanager
    def _unfused(self) -> Iterator[None]:
        """On the plain path activations run one operator after the other."""
        config = self.model.config
        fuses = config.bias_activation_fusion
        config.bias_activation_fusion = fuses and not is_plain()
        try:
            yield
        finally:
            config.bias_activation_fusion = fuses

    def prepare(self, batch: Batch) -> PackedBatch:
        """This rank's view of a micro-batch, worked out on CPU."""
        row = padded_as_row(batch) if isinstance(batch, PaddedBatch) else batch
        if self.config.router_aux_loss_coef:
            row = replace(row, padding_mask=padding_mask(row))
        if self.split.context > 1:
            group = self.groups.cp
            all_sum = partial(sum_parts, group=group)
            row = slice_for_context(row, rank=group.rank(), size=group.size(), all_sum=all_sum)
        if not self.first:
            row = replace(row, media=None)
        elif self.groups.tp_cp.size() > 1:
            row = deal_media(row, rank=self.groups.tp_cp.rank(), size=self.groups.tp_cp.size())
            if row.media is not None and row.media.tower is None:
                tower = self.model.tower
                row = tell_tower(row, None if tower is None else tower.rule)
        return pin_batch(row) if self.device.type == "cuda" else row

    def zero_gradients(self) -> None:
        """Drop the accumulated gradients."""
        self.stage.zero_gradients()
        self.optimizer.zero_grad()
        if self.router_sum is not None:
            self.router_sum.clear()

    def finish_gradients(self, divisor: Tensor, max_norm: float | None) -> Tensor:
        """Divide gradients of sums by the global batch's divisor, clip them, return the norm."""
        with megatron_on_cpu(), torch.no_grad():
            self.ddp.scale_gradients(or_one(divisor).reciprocal().float())
            return self.optimizer.prepare(max_norm)

    def step(self, lr: float) -> None:
        """One optimizer step."""
        with megatron_on_cpu():
            self.stage.finish_gathers()
            self.optimizer.step(lr)
            self.stage.gather()
        self.optimizer_steps += 1

    def owned_slices(self, *, moments: bool = True) -> Iterator[tuple[Kind, TensorSlice, Tensor]]:
        """The boxes that this rank writes into a checkpoint."""
        self.stage.finish_gathers()
        return self.layout.owned(moments=moments and self.optimizer_steps > 0)

    def load_slices(self, read: ReadSlice, *, optimizer_steps: int) -> None:
        """Fill this rank's parameters and moments."""
        self.stage.finish_gathers()
        self.layout.load(read, optimizer_steps=optimizer_steps)
        self.optimizer_steps = optimizer_steps

    def gradient_norms(self) -> Tensor:
        """By component, over the world; see `vlmpack.backends.engine.Engine`."""
        held = (
            (local.pieces[0].box.name, self.optimizer.main_parameter(local.parameter))
            for local in self.layout.parameters
        )
        gradients = ((name, part.weight.grad) for name, part in held if part is not None)
        return norms_by_component(self, ((name, g) for name, g in gradients if g is not None))

    def frozen_digests(self) -> tuple[list[str], Tensor]:
        """Names and digests of what this rank holds of frozen parameters."""
        held = {
            local.pieces[0].box.name: local.parameter
            for local in self.layout.parameters
            if not local.parameter.requires_grad
        }
        return list(held), digests(held.values(), self.device)

    def held_parts(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters, this rank's main weights and moments of them, and the stage's buffers."""
        self.stage.finish_gathers()
        yield from self.layout.held(moments=self.optimizer_steps > 0)
        stage = self.groups.pp.rank()
        for name, buffer in self.model.named_buffers():
            yield f"buffer {name} of stage {stage}", buffer

    def whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every whole parameter, float32, one after the other, on every rank. Collective.

        Frozen ones come from the model folder, which may be more precise than `model.dtype`.
        """
        with self._whole() as whole_of:
            for name in self.shapes:
                yield name, whole_of(name)

    def merged_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """As `whole_tensors`, with adapters merged into their weights."""
        with self._whole() as whole_of:
            for name in self.shapes:
                if not is_adapter(name):
                    yield name, self.adapters.merged(name, whole_of)

    @contextmanager
    def _whole(self) -> Iterator[Callable[[str], Tensor]]:
        """What makes one whole parameter by its name, on every rank. Collective to call."""
        self.stage.finish_gathers()
        mine: dict[str, list[tuple[TensorSlice, Tensor]]] = {}
        for _, box, values in self.layout.owned(moments=False):
            mine.setdefault(box.name, []).append((box, values))
        trained = self.parameter_shapes()
        reader = PretrainedReader(self.folder)

        def whole_of(name: str) -> Tensor:
            if name not in trained:
                frozen = reader("model", whole(name, self.shapes[name]))
                assert frozen is not None
                return frozen.to(self.device)
            tensor = torch.zeros(self.shapes[name], dtype=torch.float32, device=self.device)
            for box, values in mine.get(name, ()):
                tensor[box.index] = values
            dist.all_reduce(tensor)  # each element was filled in by one rank: the sum is exact
            return tensor

        yield whole_of

    def export(self, folder: Path, *, processor_from: Path, dtype: torch.dtype | None) -> None:
        """Write config, weights and processor files for `from_pretrained`."""
        state: dict[str, Tensor] = {}
        for name, tensor in self.merged_tensors():
            if self.ranks.is_main:
                state[name] = tensor.to(dtype or torch.float32).cpu()
        if self.ranks.is_main:
            state |= self.buffers.read(PretrainedReader(self.folder))
        write = partial(save_model_folder, self.skeleton, state, folder, dtype=dtype)
        self.ranks.on_main(partial(write, processor_from=processor_from))

    def export_adapter(self, folder: Path, *, base: str) -> None:
        """Write the adapters in peft's format."""
        in_full = modules_in_full(self.skeleton, self.paths, self.policy)
        state: dict[str, Tensor] = {}
        with self._whole() as whole_of:
            for name in self.parameter_shapes():
                tensor = whole_of(name)
                if self.ranks.is_main:
                    state[name] = tensor.cpu()
        for tied, source in self.skeleton.all_tied_weights_keys.items():
            if source in state:
                state[tied] = state[source]
        write = partial(save_adapter, self.skeleton, state, folder, in_full=in_full, base=base)
        self.ranks.on_main(partial(write, lora=self.policy.trainable.lora))

    def adapters_off(self) -> AbstractContextManager[None]:
        """The recipe's rules do not allow it on this engine."""
        raise CapabilityError(
            "objective.reference: adapters_off needs model.backend: hf. Use reference: cached"
        )

    @contextmanager
    def generation(self) -> Iterator[Any]:
        """A transformers copy of the model on each rank, freed afterwards. Collective to enter."""
        # A config of its own: the tower's, which the skeleton shares, names the attention of rows.
        model = open_model(self.folder)
        set_experts(model.get_submodule(self.paths.language))
        copy_buffers(model, model, self.device)
        names = {each[0]: each for each in shared_names(model)}
        tensors = ((names[name], tensor) for name, tensor in self.merged_tensors())
        fill_whole(model, tensors, self.compute_dtype)  # adapters are merged in float32
        with torch.no_grad(), autocast_to(self.compute_dtype, self.device):
            yield model
