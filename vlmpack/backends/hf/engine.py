"""transformers + accelerate: one process, DDP or FSDP2 under torchrun."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vlmpack.backends.boxes import Kind, ReadSlice, TensorSlice, digests
from vlmpack.backends.decoder_graph import recorder_on as recorder
from vlmpack.backends.engine import (
    Compute,
    ForwardStep,
    autocast_to,
    clip_factor,
    multiply_all,
    norms_by_component,
    or_one,
)
from vlmpack.backends.export import save_model_folder
from vlmpack.backends.fused import choose_fused
from vlmpack.backends.hf.adapters import (
    adapter_targets,
    adapters_off,
    apply_policy,
    held_layers,
    inject_adapters,
    merged_state,
    modules_in_full,
    save_adapter,
)
from vlmpack.backends.hf.attention import register_attention
from vlmpack.backends.hf.compiled_layers import DRAWS_IN_COMPILED, CompiledLayers
from vlmpack.backends.hf.context import ContextGroup
from vlmpack.backends.hf.deferred import read_whole
from vlmpack.backends.hf.frozen import (
    check_quantization,
    hold_narrow,
    keep_packed,
    pack_as,
    packed_layers,
)
from vlmpack.backends.hf.fused_layers import Fused, fuse_layers
from vlmpack.backends.hf.load import deferred_model, load_model, open_model, read_parameters
from vlmpack.backends.hf.model import packed_model
from vlmpack.backends.hf.optimizer import build_optimizer, moments_of, set_learning_rate
from vlmpack.backends.hf.recurrence import recurrence_kinds, replace_kernels
from vlmpack.backends.hf.ring import CELLS_OF_A_SLOT
from vlmpack.backends.hf.router_loss import describe_router_loss, router_loss, set_experts
from vlmpack.backends.hf.sharding import (
    load_slices,
    local_part,
    local_slice,
    owned_slices,
    shard_model,
    whole_shapes,
    whole_state,
)
from vlmpack.backends.hf.tiled_mlp import tile_mlps
from vlmpack.backends.hf.whole_copy import (
    copy_buffers,
    fill_whole,
    whole_parameters,
    without_values,
)
from vlmpack.backends.hf.working_weights import WorkingWeights, hold_rounded
from vlmpack.backends.linear_layers import group_products, ungroup
from vlmpack.backends.policy import (
    ComponentCount,
    TrainingPolicy,
    count_components,
    describe_counts,
)
from vlmpack.backends.recompute import draws_random_numbers, recompute_layers
from vlmpack.distributed import Ranks
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError
from vlmpack.families.base import ModulePaths
from vlmpack.model_folder.quantised import is_quantised
from vlmpack.packing import Batch
from vlmpack.recipe.engine_rules import read_model_config
from vlmpack.recipe.head_degrees import HeadDegrees
from vlmpack.recipe.schema import ModelSection, ParallelismSection, described
from vlmpack.recurrence import choose_recurrence

logger = logging.getLogger("vlmpack")

DRAWS_IN_GRAPHS = (
    "config.json of the model has dropout or jitter above 0. A layer that is computed again must "
    "draw the same numbers, and no graph reads their state. Set it to 0 there, or "
    "training.cuda_graphs: none, or model.activation_checkpointing: none"
)

DRAWS_IN_TILES = (
    "model.tiled_mlp: the model draws random numbers, for dropout or jitter, and a tile that is "
    "computed again would draw others; set them to 0, or tiled_mlp: false"
)


class HFEngine:
    """See `vlmpack.backends.engine.Engine`.

    Args:
        model: the model section; weights and moments are float32 whatever its dtype.

    Raises:
        ModelError: the folder cannot be loaded.
        CapabilityError: the policy cannot run here.
    """

    has_plain_path = True

    def __init__(
        self,
        model: ModelSection,
        split: ParallelismSection,
        encoder: Encoder,
        ranks: Ranks,
        policy: TrainingPolicy,
        compute: Compute,
    ) -> None:
        self.ranks, self.device, self.folder = ranks, ranks.device, Path(model.path)
        self.policy, self.paths = policy, encoder.family.modules
        self.compute_dtype = compute.dtype
        assert compute.attention is not None  # the recipe's rules see to it
        if policy.lora is not None and policy.lora.quantize != "none":
            check_quantization(policy.lora.quantize)
        self.sharded = split.sharding == "fsdp" and ranks.world_size > 1
        loaded = _loaded(self.folder, policy, self.paths, sharded=self.sharded)
        language = loaded.get_submodule(self.paths.language)
        language.set_attn_implementation(register_attention(compute.attention))
        experts = set_experts(language)
        recurrences = replace_kernels(
            language,
            choose_recurrence(
                requested=model.recurrence,
                device=ranks.device,
                dtype=compute.dtype,
                fixed_shape=compute.captures,
                kinds=recurrence_kinds(language),
            ),
        )
        # A class of the generic family may have trained weights that no sample reaches.
        stranger = encoder.family.proven_by_verify
        self.fused, why_none = _fused(loaded, model, ranks.device, narrow=not stranger)
        self.draws = self._draws(loaded, model, captures=compute.captures)
        away = ranks.device if model.activation_offloading else None
        recompute_layers(loaded, model.recomputed, draws=self.draws, offloaded_from=away)
        self.components, self.adapted = self._adapt(loaded)
        tiled = tile_mlps(language) if model.tiled_mlp else 0
        narrow = self._narrowed(loaded) if self._is_narrow() else 0
        self.vlm = packed_model(loaded, encoder)
        balance = self.vlm.router_loss = router_loss(language, model.router_aux_loss_coef)
        self.router_sum = None if balance is None else balance.sum
        self.compiled = CompiledLayers(loaded) if model.compile else None
        self.context = self.vlm.context_group = _context(ranks, model, split)
        self.sync_each = split.gradient_sync == "micro_batch"
        self.module: nn.Module = self.vlm
        # Autocast is ours: accelerate keeps its mixed precision per process, not per model.
        self.accelerator = _accelerator(ranks, find_unused=stranger)
        if self.sharded:
            shard_model(self.vlm, ranks, compute_dtype=compute.dtype, replicate=split.replicate)
        else:
            self.module = _ordered(self.accelerator.prepare_model(self.vlm.to(ranks.device)))
        rounded = self._round_weights() if policy.optim.rounds else 0
        self.working = None if compute.captures or rounded else self._working_weights()
        if self.compiled is not None:
            ungroup(self.vlm.model)
        self.graph = self.vlm.capture_decoder(recorder(self.device)) if compute.captures else None
        # DDP's buckets hold them; but weights that no sample reaches must have none, or they decay.
        self.drops_gradients = self.sharded or ranks.world_size == 1 or stranger
        self.trained = [(n, p) for n, p in self.vlm.model.named_parameters() if p.requires_grad]
        self.optimizer = self._built_optimizer()
        self.optimizer_steps = 0
        self.module.eval()  # peft adds layers in training mode, and later the root alone is asked
        self.description = {
            "engine": "hf (transformers + accelerate)",
            "processes": f"{ranks.world_size} ({_replicas(ranks, split, self.context)})",
            "device": str(ranks.device),
            **compute.described(),
            **experts,
            **describe_router_loss(language, model.router_aux_loss_coef),
            **recurrences,
            "fused layers": f"none ({why_none})" if self.fused is None else self.fused.described(),
            **({} if self.compiled is None else {"compiled layers": self.compiled.described()}),
            "recomputed": described(model.recomputed),
            **_described_savings(model, tiled),
            **self._described_parameters(narrow, rounded),
        }

    def _adapt(self, loaded: Any) -> tuple[Sequence[ComponentCount], str]:
        """Apply the policy; what it trains, and what has adapters."""
        policy, paths = self.policy, self.paths
        added = apply_policy(loaded, paths, policy, device=self.device)
        return count_components(whole_shapes(loaded), policy, paths), added

    def _draws(self, loaded: Any, model: ModelSection, *, captures: bool) -> bool:
        """Whether layers draw random numbers."""
        dropout = self.policy.lora.dropout if self.policy.lora is not None else 0.0
        draws = draws_random_numbers(loaded, adapter_dropout=dropout)
        if draws and captures and model.recomputed != "none":
            raise CapabilityError(DRAWS_IN_GRAPHS)
        if draws and model.compile:
            raise CapabilityError(DRAWS_IN_COMPILED)
        if draws and model.tiled_mlp:
            raise CapabilityError(DRAWS_IN_TILES)
        return draws

    def _is_narrow(self) -> bool:
        """Whether float32 parameters are read in bfloat16; FSDP2 gathers them in it."""
        return self.compute_dtype is torch.bfloat16 and not self.sharded

    def _narrowed(self, model: nn.Module) -> int:
        """Hold frozen weights in bfloat16, and group products that read it; how many weights."""
        if self.fused is not None and self.fused.narrowed:
            group_products(model)
        return hold_narrow(model)

    def _working_weights(self) -> WorkingWeights | None:
        """None where autocast casts weights: DDP reduces the gradients that autograd gives it, and
        a captured decoder casts by itself."""
        if not self._is_narrow() or self.ranks.world_size > 1:
            return None
        model, head = self.vlm.model, self.vlm.head
        return WorkingWeights(model, head, self.compute_dtype, dora=self.policy.has_dora)

    def _round_weights(self) -> int:
        """Hold weights in bfloat16 for an optimizer that rounds its steps; how many."""
        if not self._is_narrow() or self.ranks.world_size > 1:
            raise CapabilityError(
                f"optim.master: {self.policy.optim.master} needs one process that computes in "
                f"bfloat16, here are {self.ranks.world_size} in {self.compute_dtype}; use float32, "
                "or model.dtype: bfloat16"
            )
        return hold_rounded(self.vlm.model, self.vlm.head, dora=self.policy.has_dora)

    def _built_optimizer(self) -> torch.optim.Optimizer:
        policy = self.policy
        return build_optimizer(
            self.parameters(),
            policy.optim,
            policy_of=lambda name, ndim: policy.of_parameter(name, ndim, self.paths),
            seed=policy.seed,
            taken=lambda: self.optimizer_steps,
        )

    def _described_parameters(self, narrow: int, rounded: int) -> dict[str, str]:
        """How many there are, which are trained, and how those that are not lie in memory."""
        counted = {
            **({"adapters": self.adapted} if self.adapted else {}),
            "parameters": f"{sum(count.parameters for count in self.components):,}",
            "trained": describe_counts(self.components),
        }
        if self.working is not None and self.working.weights:
            count = sum(weight.numel() for weight in self.working.weights)
            counted["working weights"] = f"{count:,} in bfloat16, cast once a step"
        if packed := packed_layers(self.vlm.model).values():
            bits = " and ".join(sorted({layer.packing.kind for layer in packed}))
            slow = ", which is slow on a CPU" if self.device.type == "cpu" else ""
            count = sum(layer.in_features * layer.out_features for layer in packed)
            counted["packed"] = f"{count:,} weights in {bits}, unpacked for each product{slow}"
        if rounded:
            counted["rounded"] = f"{rounded:,} weights in bfloat16, stochastically in each step"
        if narrow:
            counted["frozen"] = f"{narrow:,} weights in bfloat16, as the folder has them"
        return counted

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Trainable parameters under transformers' names."""
        return self.trained

    def forward_backward(
        self,
        forward_step: ForwardStep,
        data_iterator: Iterator[Batch],
        *,
        num_microbatches: int,
        forward_only: bool = False,
    ) -> list[dict[str, Tensor]]:
        """Run the micro-batches of one optimizer step."""
        if self.vlm.model.training is forward_only:  # a walk over all modules
            self.module.train(not forward_only)
        self._cast_weights()
        if self.context is not None:
            deals = self.paths.whole is None
            data_iterator = map(partial(self.context.part_of, deals_images=deals), data_iterator)
        reports: list[dict[str, Tensor]] = []
        with nullcontext() if forward_only else self._counting():
            for number in range(num_microbatches):
                last = number == num_microbatches - 1  # only its backward reduces over the replicas
                with self._synchronise(last), torch.set_grad_enabled(not forward_only):
                    with self._autocast():
                        output, loss_function = forward_step(data_iterator, self.module)
                        loss_sum, _, sums = loss_function(output)
                    if not forward_only:
                        loss_sum.backward()
                reports.append(sums)
        if self.sharded and forward_only:
            # FSDP2 keeps the root's weights gathered for a backward pass that does not come; its
            # parameters would then be others than those that the optimizer has moments of.
            module: Any = self.vlm
            module.reshard()
        return reports

    def _cast_weights(self) -> None:
        if self.working is not None:
            self.working.refresh()

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Count what the first step of training runs fused or compiled, and say so."""
        fused, compiled = self.fused, self.compiled
        if fused is not None and not fused.ran.counted:
            with fused.counting():
                yield
            self._say("fused layers", fused.described())
        else:
            yield
        if compiled is not None and not compiled.counted:
            compiled.counted = True
            self._say("compiled layers", compiled.described())

    def _say(self, fact: str, what: str) -> None:
        self.description[fact] = what
        logger.info("%-14s %s", fact, what)

    def _autocast(self) -> AbstractContextManager[object]:
        """bfloat16 matmuls over float32 weights; FSDP2 gathers its weights in bfloat16 instead."""
        return nullcontext() if self.sharded else autocast_to(self.compute_dtype, self.device)

    def _synchronise(self, last: bool) -> Any:
        if self.sharded:
            module: Any = self.vlm
            module.set_requires_gradient_sync(last or self.sync_each)
            module.set_requires_all_reduce(last)  # over the copies of HSDP
            return nullcontext()
        if self.ranks.world_size == 1 or last:
            return nullcontext()
        return self.accelerator.no_sync(self.module)

    def _gradients(self) -> list[tuple[str, Tensor]]:
        return [(name, p.grad) for name, p in self.parameters() if p.grad is not None]

    def zero_gradients(self) -> None:
        """Drop the gradients, or set them to zero where they lie."""
        self.optimizer.zero_grad(set_to_none=self.drops_gradients)
        if self.router_sum is not None:
            self.router_sum.clear()

    def finish_gradients(self, divisor: Tensor, max_norm: float | None) -> Tensor:
        """Divide the summed gradients by the divisor, and clip them.

        DDP and FSDP average over all ranks, which multiplying by their number undoes. Those that
        share a row have gradients of its parts, which are added up as well.

        Returns:
            The global norm before clipping.
        """
        gradients = [gradient for _, gradient in self._gradients()]
        held = gradients
        if self.sharded:  # products of what this rank holds need no dispatch
            held = [local_part(gradient) for gradient in gradients]
        factor = self.ranks.world_size / or_one(divisor)
        norm = torch.nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        norm = norm * factor
        if max_norm is not None:
            factor = factor * clip_factor(norm, max_norm)
        multiply_all(held, factor)  # once, for both
        return norm

    def step(self, lr: float) -> None:
        """One AdamW step."""
        set_learning_rate(self.optimizer.param_groups, lr)
        self.optimizer.step()
        self.optimizer_steps += 1

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes, also of sharded parameters."""
        return {name: tuple(parameter.shape) for name, parameter in self.parameters()}

    def owned_slices(self, *, moments: bool = True) -> Iterator[tuple[Kind, TensorSlice, Tensor]]:
        """The boxes that this rank writes into a checkpoint."""
        moments = moments and self.optimizer_steps > 0
        return owned_slices(self.parameters(), self.optimizer, self.ranks, moments=moments)

    def load_slices(self, read: ReadSlice, *, optimizer_steps: int) -> None:
        """Fill this rank's parameters and moments."""
        load_slices(self.parameters(), self.optimizer, read, optimizer_steps=optimizer_steps)
        self.optimizer_steps = optimizer_steps
        self._cast_weights()

    def gradient_norms(self) -> Tensor:
        """By component, over the world; see `vlmpack.backends.engine.Engine`."""
        return norms_by_component(self, ((name, local_part(g)) for name, g in self._gradients()))

    def frozen_digests(self) -> tuple[list[str], Tensor]:
        """Names and digests of what this rank holds of frozen parameters."""
        held = {
            name: local_part(parameter)
            for name, parameter in self.vlm.model.named_parameters()
            if not self.policy.trains_parameter(name, self.paths)
        }
        return list(held), digests(held.values(), self.device)

    def held_parts(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and moments, or this rank's shards of them, and buffers."""
        for name, parameter in self.vlm.model.named_parameters():
            box = local_slice(name, parameter)
            yield box.words, local_part(parameter)
            if parameter.requires_grad and self.optimizer_steps:
                for kind, value in moments_of(self.optimizer, parameter).items():
                    yield f"{kind} of {box.words}", local_part(value)
        yield from self.vlm.model.named_buffers()

    def export(self, folder: Path, *, processor_from: Path, dtype: torch.dtype | None) -> None:
        """Write config, weights and processor files for `from_pretrained`."""
        state = whole_state(self.vlm.model, keep=self.ranks.is_main)
        self.ranks.on_main(
            lambda: save_model_folder(
                self.vlm.model,
                merged_state(self.vlm.model, state, self.policy.lora),
                folder,
                processor_from=processor_from,
                dtype=dtype,
            )
        )

    def export_adapter(self, folder: Path, *, base: str) -> None:
        """Write the adapters in peft's format."""
        model = self.vlm.model
        in_full = modules_in_full(model, self.paths, self.policy)  # raises on every rank, or none
        state = whole_state(model, keep=self.ranks.is_main)
        lora = self.policy.trainable.lora
        self.ranks.on_main(
            lambda: save_adapter(model, state, folder, in_full=in_full, base=base, lora=lora)
        )

    def adapters_off(self) -> AbstractContextManager[None]:
        """While it is open, forward passes leave adapters out."""
        return adapters_off(self.vlm.model)

    @contextmanager
    def generation(self) -> Iterator[Any]:
        """The bare model with stock attention. Training's attention is restored afterwards. If the
        model is sharded, each rank gets a whole copy, freed afterwards. All ranks must enter."""
        model: Any = self.vlm.model
        self._cast_weights()
        with torch.no_grad(), autocast_to(self.compute_dtype, self.device):
            if self.sharded:
                yield self._whole_copy(model)
                return
            language, was_training = self.vlm.language, model.training
            ours = language.config._attn_implementation
            # Mamba-2 has no attention, and transformers refuses sdpa there.
            language.set_attn_implementation("sdpa" if language._supports_sdpa else "eager")
            model.eval()
            try:
                yield model
            finally:
                language.set_attn_implementation(ours)
                model.train(was_training)

    def _whole_copy(self, model: Any) -> Any:
        copy = without_values(self.vlm.family.auto_class(), self.folder)
        set_experts(copy.get_submodule(self.paths.language))
        pack_as(copy, model)
        if self.policy.lora is not None:
            targets = adapter_targets(copy, self.paths, self.policy)
            inject_adapters(copy, targets, self.policy.lora, empty=True)
        copy.generation_config = deepcopy(model.generation_config)
        copy_buffers(model, copy, self.device)
        return fill_whole(copy, whole_parameters(model), self.compute_dtype)


def _described_savings(model: ModelSection, tiled: int) -> dict[str, str]:
    """What long rows are given up time for."""
    return {
        **({"tiles": f"{tiled} MLPs, by tokens"} if tiled else {}),
        **({"offloaded": "inputs of recomputed layers"} if model.activation_offloading else {}),
    }


def _loaded(folder: Path, policy: TrainingPolicy, paths: ModulePaths, *, sharded: bool) -> Any:
    """The pretrained model, its weights not read yet where they will be sharded."""
    if is_quantised(folder):
        model = deferred_model(folder)
        keep_packed(model, held_layers(model, paths, policy), read_whole)
        return model if sharded and not policy.has_dora else read_parameters(folder, model)
    if not sharded:
        return load_model(folder)
    whole = "DoRA begins with the norms of its weights" if policy.has_dora else ""
    return open_model(folder, whole=whole)


def _fused(
    loaded: Any, model: ModelSection, device: torch.device, *, narrow: bool
) -> tuple[Fused | None, str]:
    """The fused layers of a model; None with the reason."""
    if model.compile:
        return None, "compiled with their layers"
    ops, why_none = choose_fused(model.fused_layers, device)
    if ops is None:
        return None, why_none
    return fuse_layers(loaded, ops, narrow=narrow), why_none


def _context(ranks: Ranks, model: ModelSection, split: ParallelismSection) -> ContextGroup | None:
    """The ranks that share rows with this one; None where none does.

    Raises:
        CapabilityError: the model's heads cannot be exchanged so.
    """
    if split.context == 1:
        return None
    config = read_model_config(model)
    degrees = HeadDegrees() if config is None else config.head_degrees
    try:
        heads = degrees.chosen(split, model.recomputed)
    except ValueError as error:
        raise CapabilityError(f"parallelism.context: {error}") from error
    return ContextGroup.of(ranks, split.context, heads, degrees.keys_of_query * CELLS_OF_A_SLOT)


def _replicas(ranks: Ranks, split: ParallelismSection, context: ContextGroup | None) -> str:
    if ranks.world_size == 1:
        return "no replicas"
    copies, shared = split.replicate, ""
    if context is not None:
        shared = f"; {split.context} share each row by {context.described()}"
    if split.sharding == "none":
        return f"DDP{shared}"
    if copies == 1:
        return f"FSDP2{shared}"
    return f"HSDP: {copies} copies over {ranks.world_size // copies}{shared}"


def _ordered(module: Any) -> Any:
    """A model whose buckets DDP has put into their last order, by zeros for gradients.

    It does so after its first backward, and a ring of three or more sums the parts of a bucket in
    an order that depends on where they lie: the first step after a resume would differ by rounding.
    """
    is_ddp = isinstance(module, nn.parallel.DistributedDataParallel)
    if is_ddp and module.process_group.size() > 2 and not module.find_unused_parameters:
        module.reducer.prepare_for_backward([])
        with torch.enable_grad():
            zeros = [value.sum() * 0 for value in module.parameters() if value.requires_grad]
            torch.stack([zero.float() for zero in zeros]).sum().backward()
    return module


def _accelerator(ranks: Ranks, *, find_unused: bool) -> Any:
    """What wraps the model in DDP, whose buckets are where gradients lie."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    replicas = DistributedDataParallelKwargs(
        find_unused_parameters=find_unused, gradient_as_bucket_view=True
    )
    return Accelerator(
        cpu=ranks.device.type == "cpu", mixed_precision="no", kwargs_handlers=[replicas]
    )
