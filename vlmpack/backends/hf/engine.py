"""transformers + accelerate: one process, DDP or FSDP2 under torchrun."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from vlmpack.attention import choose_attention
from vlmpack.attention.varlen import AttentionName
from vlmpack.backends.engine import ForwardStep
from vlmpack.backends.hf.attention import register_attention
from vlmpack.backends.hf.load import load_model
from vlmpack.backends.hf.model import PackedVLM
from vlmpack.backends.hf.schedule import forward_backward_no_pipelining
from vlmpack.backends.hf.sharding import shard_model
from vlmpack.distributed import Ranks
from vlmpack.families import PROCESSOR_FILES, Encoder
from vlmpack.packing import Batch


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

    Raises:
        ModelError: the folder cannot be loaded.
        CapabilityError: the attention implementation cannot run here.
    """

    def __init__(self, config: HFEngineConfig, encoder: Encoder, ranks: Ranks) -> None:
        from accelerate import Accelerator

        self.ranks = ranks
        self.device = ranks.device
        self.compute_dtype = _compute_dtype(config.dtype, ranks.device)
        choice = choose_attention(config.attention, device=ranks.device, dtype=self.compute_dtype)
        model = load_model(config.folder)
        family = encoder.family
        model.get_submodule(family.modules.language).set_attn_implementation(
            register_attention(choice)
        )
        if config.activation_checkpointing:
            with warnings.catch_warnings():
                # transformers 5.17 has this name alone; newer ones rename it and keep it until 6.
                warnings.simplefilter("ignore", FutureWarning)
                model.gradient_checkpointing_enable({"use_reentrant": False})
        self.vlm = PackedVLM(model, family.modules, encoder.image_rule.smallest())
        self.sharded = config.sharding == "fsdp" and ranks.world_size > 1
        self._module: nn.Module = self.vlm
        # Autocast is ours: accelerate keeps its mixed precision per process, not per model.
        self.accelerator = Accelerator(cpu=ranks.device.type == "cpu", mixed_precision="no")
        if self.sharded:
            shard_model(self.vlm, ranks, compute_dtype=self.compute_dtype)
        else:
            self._module = self.accelerator.prepare_model(self.vlm.to(ranks.device))
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
        return forward_backward_no_pipelining(
            forward_step,
            data_iterator,
            self._module,
            num_microbatches=num_microbatches,
            forward_only=forward_only,
            synchronise=self._synchronise,
            autocast=self._autocast,
        )

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

    def scale_gradients(self, scale: Tensor) -> None:
        """Multiply all gradients by a 0-d tensor."""
        for gradient in self._gradients():
            gradient.mul_(scale)

    def clip_gradients(self, max_norm: float | None) -> Tensor:
        """Global norm before clipping."""
        norm = torch.nn.utils.get_total_norm(self._gradients())
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_([p for _, p in self.parameters()], max_norm, norm)
        return norm

    def full_tensor(self, value: Tensor) -> Tensor:
        """One whole CPU tensor, a copy."""
        whole = value.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        return whole.to("cpu", copy=True)

    def like_parameter(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """A whole tensor in the layout of `parameter`."""
        value = whole.to(self.device)
        data = parameter.detach()
        if isinstance(data, DTensor):
            return distribute_tensor(value, data.device_mesh, data.placements)
        return value

    def export(self, folder: Path, *, processor_from: Path, dtype: torch.dtype | None) -> None:
        """Write config, weights and processor files for `from_pretrained`."""
        state: dict[str, Tensor] = {}
        for name, value in self.vlm.model.state_dict().items():
            whole = self.full_tensor(value)  # collective: every rank takes part, one keeps it
            if self.ranks.is_main:
                state[name] = whole
        if not self.ranks.is_main:
            return
        if dtype is not None:
            state = {
                name: value.to(dtype) if value.is_floating_point() else value
                for name, value in state.items()
            }
        model: Any = self.vlm.model
        for tied in getattr(model, "all_tied_weights_keys", {}):
            state.pop(tied, None)  # saved once, under the name it is tied to
        saved_dtype = next(iter(state.values())).dtype
        model.save_pretrained(str(folder), state_dict=state, max_shard_size="5GB")
        _set_config_dtype(folder / "config.json", saved_dtype)
        for name in PROCESSOR_FILES:
            if (processor_from / name).is_file():
                shutil.copyfile(processor_from / name, folder / name)

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


def _compute_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def _replicas(ranks: Ranks, *, sharded: bool) -> str:
    if ranks.world_size == 1:
        return "no replicas"
    return "FSDP2" if sharded else "DDP"


def _set_config_dtype(config: Path, dtype: torch.dtype) -> None:
    """Say in config.json what dtype the saved weights have."""
    import json

    content = json.loads(config.read_text(encoding="utf-8"))
    name = str(dtype).removeprefix("torch.")
    content["dtype"] = name
    for section in ("text_config", "vision_config"):
        if isinstance(content.get(section), dict) and "dtype" in content[section]:
            content[section]["dtype"] = name
    config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
