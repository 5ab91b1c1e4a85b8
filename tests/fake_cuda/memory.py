"""Run under the device guard: bytes that one rank holds in a layout, and what `vlmpack plan` says.

    python -m fake_cuda.memory '[{"name": "fsdp", ...}, ...]'      (fields of `Layout`)

Ranks of a world of 8 are one process in torch's fake process group, whose collectives give tensors
of the right shapes and move nothing. Layouts of one process in bfloat16 are on the fake GPU, whose
autocast is CUDA's. The answer has for each layout what `Bytes` has, counted and planned.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from fake_cuda.device import CUDA, FakeCudaTensor, fake_gpu
from fake_cuda.stand_ins import liger_everywhere
from support.engines import ADAMW, engine_of, single_rank
from support.plans import mode_of
from support.shards import mixed_samples
from support.wide import write_wide_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from vlmpack.backends.hf.sharding import local_part
from vlmpack.backends.policy import TrainingPolicy
from vlmpack.distributed import Ranks
from vlmpack.encode import Encoder
from vlmpack.forecast.activations import forms_on
from vlmpack.forecast.memory import memory_figures
from vlmpack.forecast.parameters import read_sizes
from vlmpack.forecast.trained import trained_sizes
from vlmpack.packing import PackedBatch, pack_batch_sequences
from vlmpack.recipe.schema import ModelSection, ParallelismSection
from vlmpack.recipe.trainable import LoraSection, TrainableSection
from vlmpack.training.objective import forward_step

WORLD = 8
REPEATS = 2
"""Of the mixed samples in the row."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model is trained.

    Args:
        name: for messages.
        backend, dtype: the recipe's.
        split: of `parallelism`; none for one process.
        vision, language: what is done with them; the projector is trained.
        fused: `model.fused_layers`; with `liger` it is there, on CPU too.
        stored: what the folder's weights are.
        master: `optim.master`.
    """

    name: str
    backend: str = "hf"
    dtype: str = "bfloat16"
    split: dict[str, Any] | None = None
    vision: str = "full"
    language: str = "full"
    fused: str = "none"
    stored: str = "float32"
    master: str = "float32"


@dataclass(kw_only=True)
class Bytes:
    """Of one rank.

    Args:
        parameters: those that it computes with, copies in another dtype included.
        activations: of one micro-batch.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int


@dataclass(kw_only=True)
class Compared:
    """A layout's bytes."""

    counted: Bytes
    planned: Bytes
    where: str
    notes: dict[str, int] = field(default_factory=dict)


def _numbers(tensor: Tensor) -> Tensor:
    """What really lies in memory."""
    tensor = local_part(tensor)
    return tensor.held if isinstance(tensor, FakeCudaTensor) else tensor


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of their storages, each once."""
    storages = {s._cdata: s for s in (_numbers(x).untyped_storage() for x in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


class _Copies(TorchDispatchMode):
    """Copies of parameters in another dtype, which autocast makes."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self.of = {_numbers(x).untyped_storage()._cdata for x in parameters}
        self.made: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_copy = func is torch.ops.aten._to_copy.default
        if is_copy and _numbers(args[0]).untyped_storage()._cdata in self.of:
            self.made.append(out)
        return out


def _gathered(module: nn.Module) -> dict[str, list[Tensor]]:
    """What FSDP2 gathers parameters into, by block; the root's under an empty name."""
    found: dict[str, list[Tensor]] = {}
    for name, part in module.named_modules():
        if isinstance(part, FSDPModule):
            group = part._get_fsdp_state()._fsdp_param_group
            found[name] = [
                output for each in group.fsdp_params for output in each.all_gather_outputs
            ]
    return found


def _sizes_of_blocks(module: nn.Module, itemsize: int) -> list[int]:
    """Bytes of each block's gathered parameters."""
    found = []
    for name, part in module.named_modules():
        if isinstance(part, FSDPModule) and name:
            group = part._get_fsdp_state()._fsdp_param_group
            found.append(itemsize * sum(each._orig_size.numel() for each in group.fsdp_params))
    return sorted(found)


def _reduced(buckets, bucket):  # DDP compares annotations with types, and these are strings
    """What DDP's reduction gives for a bucket; the fake group's says nothing."""
    buckets.append(bucket.buffer())
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _hf(engine: Any, batch: PackedBatch) -> tuple[Bytes, dict[str, int]]:
    parameters = [*engine.vlm.parameters()]
    working = [] if engine.working is None else engine.working.weights
    buckets: list[Tensor] = []
    if isinstance(engine.module, nn.parallel.DistributedDataParallel):
        engine.module.register_comm_hook(buckets, _reduced)
    engine.module.train()
    kept: list[Tensor] = []
    copies = _Copies(parameters)
    keeping = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)
    with engine._autocast(), keeping, copies:
        losses, loss_function = forward_step(iter([batch]), engine.module)
        loss = loss_function(losses)[0]
    gathered = _gathered(engine.vlm) if engine.sharded else {}
    own = [*parameters, *working, *copies.made, *(x for part in gathered.values() for x in part)]
    theirs = {_numbers(x).untyped_storage()._cdata for x in own}
    activations = _bytes(x for x in kept if _numbers(x).untyped_storage()._cdata not in theirs)
    live = {_numbers(x).untyped_storage()._cdata for x in kept}
    copied = _bytes(x for x in copies.made if _numbers(x).untyped_storage()._cdata in live)
    if engine.sharded:
        blocks = _sizes_of_blocks(engine.vlm, engine.compute_dtype.itemsize)
        copied = _bytes(gathered[""]) + 2 * blocks[-1]  # the next one is gathered ahead
    loss.backward()
    engine.optimizer.step()
    states = [x for state in engine.optimizer.state.values() for x in state.values() if x.ndim]
    counted = Bytes(
        parameters=_bytes([*parameters, *working]) + copied,
        gradients=_bytes([*(p.grad for p in parameters if p.grad is not None), *buckets]),
        optimizer=_bytes(states),
        activations=activations,
    )
    return counted, {"copies": copied}


def _mcore(engine: Any, batch: PackedBatch) -> tuple[Bytes, dict[str, int]]:
    from vlmpack.backends.mcore.groups import megatron_on_cpu

    engine.ddp.train()
    parameters = [*engine.model.parameters()]
    buffers = [*engine.ddp.buffers, *engine.ddp.expert_parallel_buffers]
    kept: list[Tensor] = []
    keeping = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)
    with megatron_on_cpu():
        with keeping:
            out, _ = forward_step(iter([engine.prepare(batch)]), engine.ddp)
        theirs = {x.untyped_storage()._cdata for x in parameters}
        activations = _bytes(x for x in kept if x.untyped_storage()._cdata not in theirs)
        out.float().sum().backward()
    engine.finish_gradients(torch.ones(()), None)
    engine.step(1e-4)
    states, mains = [], []
    for part in engine.optimizer.parts:
        for group in part.optimizer.param_groups:
            mains += [p for p in group["params"] if p.untyped_storage()._cdata not in theirs]
        states += [x for s in part.optimizer.state.values() for x in s.values() if x.ndim]
    counted = Bytes(
        parameters=_bytes(parameters),
        gradients=_bytes(buffer.grad_data for buffer in buffers),
        optimizer=_bytes([*states, *mains]),
        activations=activations,
    )
    return counted, {}


_GENERATOR = torch.Generator


def _generator(device: Any = None) -> torch.Generator:
    """On the CPU, which computes for the fake GPU."""
    return _GENERATOR()


@contextmanager
def fake_world(rank: int = 0) -> Iterator[None]:
    """One rank of 8, the first unless it is said."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    surroundings = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(WORLD)}
    surroundings |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    new_group = dist.new_group

    def fake(*args: Any, **options: Any) -> Any:
        return new_group(*args, **{**options, "backend": "fake"})

    with patch.dict(os.environ, surroundings), patch.object(dist, "new_group", fake):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
        try:
            yield
        finally:
            dist.destroy_process_group()


def compare(layout: Layout, folder: Path) -> Compared:
    """A layout's bytes, counted and planned."""
    AcceleratorState._reset_state(True)
    encoder = Encoder(folder)
    raw = mixed_samples() * REPEATS
    samples = [replace(encoder.encode(r.cooked()), key=str(n)) for n, r in enumerate(raw)]
    batch = pack_batch_sequences(
        samples, pad_to_multiple_of=8, total_multiple_of=8, pad_token_id=encoder.pad_token_id
    )
    assert batch.media is not None
    lora = LoraSection(rank=8, alpha=8.0) if layout.language == "lora" else None
    modes = TrainableSection(
        vision=layout.vision, language=layout.language, **({"lora": lora} if lora else {})
    )
    optim = ADAMW.model_copy(update={"master": layout.master})
    policy = TrainingPolicy(trainable=modes, optim=optim)
    on_gpu = layout.split is None and layout.dtype == "bfloat16"
    model = ModelSection(
        path=str(folder),
        backend=layout.backend,
        dtype=layout.dtype,
        attention="auto" if on_gpu else "segments",
        activation_checkpointing="none",
        fused_layers=layout.fused,
    )
    split = ParallelismSection(**(layout.split or {}))
    world = 1 if layout.split is None else WORLD
    replica = split.tensor * split.context * split.pipeline
    ranks = Ranks(world_size=world, dp_size=world // replica, replica_size=replica)
    ranks = replace(single_rank(), device=CUDA) if on_gpu else ranks
    with (
        fake_gpu() if on_gpu else nullcontext(),
        fake_world() if world > 1 else nullcontext(),
        patch.object(torch, "Generator", _generator) if on_gpu else nullcontext(),
        liger_everywhere() if layout.fused == "liger" else nullcontext(),
    ):
        with patch.object(Ranks, "gather_objects", lambda _, mine: [mine]):
            engine = _built(model, split, encoder, ranks, policy)
        counted, notes = (_mcore if layout.backend == "mcore" else _hf)(engine, batch)
    figures = memory_figures(
        model,
        split,
        read_sizes(folder),
        mode_of(max_row_slots=batch.num_slots, max_row_patches=batch.media.pixel_values.shape[0]),
        # One micro-batch a rank, as is counted; stages want many.
        global_batch_size=16 * (64 if split.pipeline > 1 else world),
        world_size=world,
        trained=trained_sizes(policy, encoder),
        forms=forms_on(ranks.device, model),
    )
    planned = Bytes(
        parameters=figures.weights,
        gradients=figures.gradients,
        optimizer=figures.optimizer,
        activations=figures.activations // figures.rows_in_flight,
    )
    return Compared(counted=counted, planned=planned, where=figures.where, notes=notes)


def _built(
    model: ModelSection,
    split: ParallelismSection,
    encoder: Encoder,
    ranks: Ranks,
    policy: TrainingPolicy,
) -> Any:
    if model.backend == "hf":
        return engine_of(model, split, encoder, ranks, policy)
    from vlmpack.backends.mcore.engine import MegatronEngine

    # Tensors of other stages and ranks are nowhere: they are no processes.
    with patch.object(MegatronEngine, "_check_coverage", lambda *_: None):
        return engine_of(model, split, encoder, ranks, policy)


def main() -> None:
    warnings.simplefilter("ignore")
    answers = []
    with tempfile.TemporaryDirectory() as made:
        folder = write_wide_model(Path(made) / "wide", width=256, layers=6)
        narrow = write_wide_model(Path(made) / "narrow", width=256, layers=6, dtype=torch.bfloat16)
        for given in json.loads(sys.argv[1]):
            layout = Layout(**given)
            try:
                at = narrow if layout.stored == "bfloat16" else folder
                answers.append(asdict(compare(layout, at)))
            except Exception:
                import traceback

                answers.append({"error": traceback.format_exc()})
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
