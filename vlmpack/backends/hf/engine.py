"""transformers + accelerate: one process, DDP or FSDP2 under torchrun."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vlmpack.attention import choose_attention
from vlmpack.attention.varlen import AttentionName
from vlmpack.backends.adamw import AdamWConfig, build_adamw
from vlmpack.backends.engine import ForwardStep, compute_dtype
from vlmpack.backends.export import save_model_folder
from vlmpack.backends.hf.attention import register_attention
from vlmpack.backends.hf.load import load_model
from vlmpack.backends.hf.model import packed_model
from vlmpack.backends.hf.schedule import forward_backward_no_pipelining
from vlmpack.backends.hf.sharding import local_slice, shard_model, spread_by_size
from vlmpack.backends.slices import Kind, ReadSlice, TensorSlice
from vlmpack.distributed import Ranks
from vlmpack.families import Encoder
from vlmpack.packing import Batch

MOMENTS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class HFEngineConfig:
    """What the recipe says about the model.

    Args:
        folder: model folder in transformers format.
        dtype: compute dtype; auto is bfloat16 on CUDA and float32 on CPU. Weights and moments
            stay float32.
        attention: varlen implementation of the language model.
        activation_checkpointing: recompute each layer in the backward pass.
        sharding: none (one process, or DDP) or fsdp (FSDP2).
    """

    folder: Path
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    attention: AttentionName | Literal["auto"] = "auto"
    activation_checkpointing: bool = False
    sharding: Literal["none", "fsdp"] = "none"


class HFEngine:
    """See `vlmpack.backends.engine.Engine`.

    Args:
        config: what the recipe says.
        encoder: the model folder's processor.
        ranks: who this process is.
        optimizer: AdamW's hyper-parameters.

    Raises:
        ModelError: the folder cannot be loaded.
        CapabilityError: the attention implementation cannot run here.
    """

    def __init__(
        self, config: HFEngineConfig, encoder: Encoder, ranks: Ranks, optimizer: AdamWConfig
    ) -> None:
        from accelerate import Accelerator

        self.ranks = ranks
        self.device = ranks.device
        self.compute_dtype = compute_dtype(config.dtype, ranks.device)
        choice = choose_attention(config.attention, device=ranks.device, dtype=self.compute_dtype)
        model = load_model(config.folder)
        model.get_submodule(encoder.family.modules.language).set_attn_implementation(
            register_attention(choice)
        )
        if config.activation_checkpointing:
            with warnings.catch_warnings():
                # transformers 5.17 has this name alone; newer ones rename it and keep it until 6.
                warnings.simplefilter("ignore", FutureWarning)
                model.gradient_checkpointing_enable({"use_reentrant": False})
        self.vlm = packed_model(model, encoder)
        self.sharded = config.sharding == "fsdp" and ranks.world_size > 1
        self._module: nn.Module = self.vlm
        # Autocast is ours: accelerate keeps its mixed precision per process, not per model.
        self.accelerator = Accelerator(cpu=ranks.device.type == "cpu", mixed_precision="no")
        if self.sharded:
            shard_model(self.vlm, ranks, compute_dtype=self.compute_dtype)
        else:
            self._module = self.accelerator.prepare_model(self.vlm.to(ranks.device))
        self.optimizer = build_adamw(self.parameters(), optimizer, fused=not self.sharded)
        self.optimizer_steps = 0
        self.description = {
            "engine": "hf (transformers + accelerate)",
            "processes": f"{ranks.world_size} ({_replicas(ranks, sharded=self.sharded)})",
            "device": str(ranks.device),
            "compute dtype": str(self.compute_dtype).removeprefix("torch."),
            "attention": f"{choice.name} ({choice.reason})",
            "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        }

    @property
    def module(self) -> nn.Module:
        """The model as forward steps call it."""
        return self._module

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Trainable parameters under transformers' names."""
        return [
            (name, parameter)
            for name, parameter in self.vlm.model.named_parameters()
            if parameter.requires_grad
        ]

    def forward_backward(
        self,
        forward_step: ForwardStep,
        data_iterator: Iterator[Batch],
        *,
        num_microbatches: int,
        forward_only: bool = False,
    ) -> list[dict[str, Tensor]]:
        """Run the micro-batches of one optimizer step."""
        self._module.train(not forward_only)
        reports = forward_backward_no_pipelining(
            forward_step,
            data_iterator,
            self._module,
            num_microbatches=num_microbatches,
            forward_only=forward_only,
            synchronise=self._synchronise,
            autocast=self._autocast,
        )
        if self.sharded and forward_only:
            # FSDP2 keeps the root's weights gathered for a backward pass that does not come; its
            # parameters would then be others than those that the optimizer has moments of.
            module: Any = self.vlm
            module.reshard()
        return reports

    def _autocast(self) -> AbstractContextManager[object]:
        """bfloat16 matmuls over float32 weights; FSDP2 gathers its weights in bfloat16 instead."""
        if self.sharded or self.compute_dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def _synchronise(self, last: bool) -> Any:
        if self.sharded:
            module: Any = self.vlm
            module.set_requires_gradient_sync(last)
            return nullcontext()
        if self.ranks.world_size == 1 or last:
            return nullcontext()
        return self.accelerator.no_sync(self._module)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for _, p in self.parameters() if p.grad is not None]

    def zero_gradients(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def finish_gradients(self, num_label_tokens: Tensor, max_norm: float | None) -> Tensor:
        """Normalise and clip; the global norm before clipping.

        DDP and FSDP2 average the replicas' gradients of sums: dp / labels turns that into the
        gradient of the mean over all label tokens of the global batch.
        """
        scale = (self.ranks.dp_size / num_label_tokens.clamp(min=1)).float()
        gradients = self._gradients()
        for gradient in gradients:
            gradient.mul_(scale)
        norm = torch.nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_([p for _, p in self.parameters()], max_norm, norm)
        return norm

    def step(self, lr: float) -> None:
        """One AdamW step."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer_steps += 1

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes, also of sharded parameters."""
        return {name: tuple(parameter.shape) for name, parameter in self.parameters()}

    def owned_slices(self) -> Iterator[tuple[Kind, TensorSlice, Tensor]]:
        """Shards of this rank, and its part of the parameters that every rank holds."""
        sizes = {
            name: parameter.numel()
            for name, parameter in self.parameters()
            if not isinstance(parameter, DTensor)
        }
        owners = spread_by_size(sizes, self.ranks.world_size)
        for name, parameter in self.parameters():
            box = local_slice(name, parameter)
            if 0 in box.lengths or owners.get(name, self.ranks.rank) != self.ranks.rank:
                continue
            yield "model", box, _local(parameter)
            if self.optimizer_steps:
                moments = self.optimizer.state.get(parameter, {})
                for kind in MOMENTS:  # AdamW makes none for a parameter without a gradient
                    value = moments.get(kind)
                    yield kind, box, _local(torch.zeros_like(parameter) if value is None else value)

    def load_slices(self, read: ReadSlice, *, optimizer_steps: int) -> None:
        """Copy each box into what this rank holds of the parameter."""
        self.optimizer.state.clear()
        for name, parameter in self.parameters():
            box = local_slice(name, parameter)
            _fill(parameter, read("model", box))
            if optimizer_steps == 0:
                continue
            # A fused AdamW keeps its step count beside the weights, the plain one on the CPU.
            home = self.device if self.optimizer.defaults["fused"] else "cpu"
            state: dict[str, Tensor] = {"step": torch.tensor(float(optimizer_steps), device=home)}
            for kind in MOMENTS:
                state[kind] = torch.zeros_like(parameter, requires_grad=False)
                _fill(state[kind], read(kind, box))
            self.optimizer.state[parameter] = state
        self.optimizer_steps = optimizer_steps

    def export(self, folder: Path, *, processor_from: Path, dtype: torch.dtype | None) -> None:
        """Write config, weights and processor files for `from_pretrained`."""
        state: dict[str, Tensor] = {}
        for name, value in self.vlm.model.state_dict().items():
            # Collective for shards: every rank takes part, one keeps it.
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if self.ranks.is_main:
                state[name] = whole.detach().to("cpu", copy=True)
        if self.ranks.is_main:
            save_model_folder(
                self.vlm.model, state, folder, processor_from=processor_from, dtype=dtype
            )

    @contextmanager
    def generation(self) -> Iterator[Any]:
        """The bare model with stock attention; what training uses is restored afterwards."""
        model: Any = self.vlm.model
        language = self.vlm.language
        ours = language.config._attn_implementation
        was_training = model.training
        language.set_attn_implementation("sdpa")
        model.eval()
        try:
            with torch.no_grad(), self._autocast():
                yield model
        finally:
            language.set_attn_implementation(ours)
            model.train(was_training)


def _local(value: Tensor) -> Tensor:
    """What this rank holds of a tensor; a view."""
    data = value.detach()
    return data.to_local() if isinstance(data, DTensor) else data


def _fill(value: Tensor, box: Tensor | None) -> None:
    """Copy a box into what this rank holds of a tensor; without one it stays as it is."""
    if box is not None:
        _local(value).copy_(box)


def _replicas(ranks: Ranks, *, sharded: bool) -> str:
    if ranks.world_size == 1:
        return "no replicas"
    return "FSDP2" if sharded else "DDP"
