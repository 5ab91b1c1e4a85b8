"""One optimizer step on a GPU that is not there, and what each of its calls costs.

    python -m operator_step '[{"shape": ...}, ...]'      (fields of `Asked`)

`operators.py` starts it, under the guard of tests/fake_cuda.

The step is the hf engine's, at full width and few layers, on tensors without numbers. What one more
layer of a kind adds is the difference of two steps. So a whole model's step is a sum over kinds of
layers, and no rule says which operator is whose.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState
from fake_cuda import stand_ins
from fake_cuda.device import CUDA, fake_gpu
from fake_cuda.meta import MODULES, Call, MetaCuda, active_gpu
from gpu_run import flops_of
from gpu_shapes import SHAPES, Shape, shaped_config, write_processor
from models import ROOT
from operator_cost import Cost, cost_of
from operator_layers import of_layers
from support.engines import ADAMW, engine_of, make_stepper, single_rank
from support.families import tiny_family_folder
from torch import Tensor

import vlmpack.attention.varlen as varlen
import vlmpack.backends.hf.engine as hf
from vlmpack.backends import linear_layers
from vlmpack.backends.hf import working_weights
from vlmpack.backends.policy import TrainingPolicy
from vlmpack.encode import Encoder
from vlmpack.packing import Batch, EncodedSample, Media, PackCollator, PadCollator, pin_batch
from vlmpack.packing.media import tell_tower
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.recipe.schema import ImagesSection, ModelSection, ParallelismSection
from vlmpack.recipe.trainable import LoraSection, TrainableSection
from vlmpack.training.objective import SFT, Objective
from vlmpack.training.preference import dpo


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A step.

    Args:
        shape: of `gpu_shapes.SHAPES`.
        rows, tokens: micro-batches of the step, and slots of each; or
        samples: of each micro-batch, where rows follow no budget of tokens.
        language, vision, projector: what is done with them.
        recompute: `model.activation_checkpointing`.
        fused: `model.fused_layers`.
        attention: `model.attention`.
        quantize: `trainable.lora.quantize`.
        padded: whether samples are padded to one width, as mode `none` does.
        pairs: whether samples are pairs of answers, for DPO with a cached reference.
        grouped: whether varlen attention takes fewer heads of keys than of queries; torch 2.11's
            does not.
        packages: of `fake_cuda.meta.MODULES`, that are installed.
        layers: text layers and tower blocks, by kind; see `operator_layers.kinds_of`.
        plant: a fault to be found: "cast".
    """

    shape: str
    rows: int
    tokens: int = 0
    samples: int = 0
    language: str = "full"
    vision: str = "full"
    projector: str = "full"
    recompute: str = "full"
    fused: str = "auto"
    attention: str = "auto"
    quantize: str = "none"
    padded: bool = False
    pairs: bool = False
    grouped: bool = False
    packages: Sequence[str] = tuple(MODULES)
    layers: Mapping[str, int]
    plant: str = ""


def write_folder(shape: Shape, folder: Path) -> Any:
    """Config and processor, no weights; transformers' config."""
    source = ROOT / "assets" / shape.folder
    if not source.is_dir():
        source = tiny_family_folder(shape.folder, folder.with_name(f"{folder.name}-tiny"))
    config = shaped_config(shape, source)
    config.save_pretrained(folder)
    write_processor(shape, config, source, folder)
    return config


def drawn_samples(shape: Shape, encoder: Encoder, count: int) -> list[EncodedSample]:
    """Samples of the lengths that `gpu_shapes` writes, as the encoder would make them."""
    rule: Any = None
    if encoder.takes_images:
        rule = encoder.family.image_rule(encoder.folder, ImagesSection())
    draw, found, axes = random.Random(0), [], encoder.num_position_axes
    width = rule.smallest().pixel_values.shape[1] if rule else 0
    for number in range(count):
        images = draw.choice((0, 0, 1, 1, 2)) if rule else 0
        short, long = shape.words
        words = round(short * (long / short) ** draw.random())
        sides = [(draw.randint(*shape.sides), draw.randint(*shape.sides)) for _ in range(images)]
        grids = tuple(rule.grid(*each) for each in sides)
        sample = _sample(f"{number:06d}", grids, answer=2 * words + 2, width=width)
        positions = torch.arange(sample.length).expand(axes, -1).contiguous()
        found.append(replace(sample, position_ids=positions))
    return found


def _sample(key: str, grids: Any, *, answer: int, width: int) -> EncodedSample:
    counts = tuple(t * h * w // 4 for t, h, w in grids)
    places, at = [torch.zeros(0, dtype=torch.int64)], 14  # of what comes before the first image
    for count in counts:
        places.append(torch.arange(at + 1, at + 1 + count))
        at += count + 2
    length = at + 8 + answer
    labels = torch.full((length,), -100)
    labels[-answer - 1 : -1] = 5
    media = None
    if grids:
        patches = sum(t * h * w for t, h, w in grids)
        pixels = torch.empty(patches, width)
        media = Media(pixel_values=pixels, grid_thw=grids, num_tokens=counts)
    return EncodedSample(
        key=key,
        input_ids=torch.full((length,), 7),
        labels=labels,
        position_ids=torch.arange(length)[None],
        media=media,
        media_positions=torch.cat(places),
    )


def groups_of(asked: Asked, samples: list[EncodedSample]) -> list[list[EncodedSample]]:
    """The samples of each micro-batch. Rows are filled first fit, or take so many samples each."""
    groups, rest = [], [_pair(sample) if asked.pairs else sample for sample in samples]
    for _ in range(asked.rows):
        row, left, later = [], asked.tokens, []
        for place, sample in enumerate(rest):
            fits = len(sample.input_ids) <= left if asked.tokens else place < asked.samples
            (row if fits else later).append(sample)
            left -= len(sample.input_ids) if fits else 0
        groups.append(row)
        rest = later
    return groups


def micro_batches(
    asked: Asked, encoder: Encoder, groups: Sequence[Sequence[EncodedSample]]
) -> list[Batch]:
    """A batch of each group."""
    rule = encoder.family.tower_rule_of(encoder.folder) if encoder.takes_images else None
    collate: Any = (PadCollator if asked.padded else PackCollator)(
        pad_token_id=encoder.pad_token_id, num_position_axes=encoder.num_position_axes
    )
    told = [tell_tower(collate(group), rule) for group in groups]
    if not asked.pairs:
        return told
    references = [torch.zeros(2 * len(group), dtype=torch.float64) for group in groups]
    return [replace(row, reference=r) for row, r in zip(told, references, strict=True)]


def _pair(sample: EncodedSample) -> EncodedSample:
    """A sample whose answer is both, the chosen one and the rejected one."""
    length = len(sample.input_ids)
    return replace(
        sample,
        input_ids=sample.input_ids.repeat(2),
        labels=sample.labels.repeat(2),
        position_ids=sample.position_ids.repeat(1, 2),
        media_positions=torch.cat([sample.media_positions, sample.media_positions + length]),
        sequences=(length, length),
    )


class Stream:
    """Adds up the calls of a step; `on` while it listens."""

    def __init__(self) -> None:
        self.on, self.phase, self.in_backward = False, "forward", False
        self.modules: list[str] = []
        self.of_node: dict[int, str] = {}
        self.costs: dict[tuple[str, str, str], Cost] = defaultdict(Cost)
        self.peaks: Counter[str] = Counter()

    def __call__(self, call: Call) -> None:
        phase, module = self._where()
        if self.on:
            key = (phase, module, call.name.removeprefix("aten::") + _dtypes(call))
            self.costs[key] += cost_of(call)
            held = active_gpu().bytes
            self.peaks[phase] = max(self.peaks[phase], held)

    def _where(self) -> tuple[str, str]:
        if self.in_backward and not self.modules:
            node = torch._C._current_autograd_node()
            return "backward", "" if node is None else self.of_node.get(node._sequence_nr(), "")
        module = self.modules[-1] if self.modules else ""
        if self.in_backward:
            return "recompute", module
        # The node of this operator is there already, and is the last.
        self.of_node.setdefault(torch.autograd._get_sequence_nr() - 1, module)
        return self.phase, module

    def watch(self, model: torch.nn.Module, stack: ExitStack) -> None:
        """Be told which module runs, and when the backward pass does."""
        names = {id(module): _numberless(name) for name, module in model.named_modules()}
        backward = Tensor.backward

        def enter(module: Any, _: Any) -> None:
            self.modules.append(names.get(id(module), ""))

        def leave(*_: Any) -> None:
            self.modules.pop()

        def watched(*args: Any, **options: Any) -> None:
            self.in_backward = True
            try:
                backward(*args, **options)
            finally:
                self.in_backward = False
                self.modules.clear()  # a layer that is computed again may stop in the middle

        hooks = torch.nn.modules.module
        stack.callback(hooks.register_module_forward_pre_hook(enter).remove)
        stack.callback(hooks.register_module_forward_hook(leave, always_call=True).remove)
        stack.enter_context(patch.object(Tensor, "backward", watched))


def _numberless(name: str) -> str:
    return ".".join("N" if part.isdigit() else part for part in name.split("."))


def _dtypes(call: Call) -> str:
    if call.name != "aten::_to_copy":
        return ""
    source, made = ([str(x.dtype)[6:] for x in part] for part in (call.reads, call.writes))
    return f" {source[0]} -> {made[0]}"


def record(asked: Asked) -> dict[str, Any]:
    """The costs of a step, and what it trained on."""
    shape = of_layers(SHAPES[asked.shape], asked.layers)
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        folder, whole = Path(made) / "model", Path(made) / "whole"
        config = write_folder(shape, folder)
        write_folder(SHAPES[asked.shape], whole)
        encoder = Encoder(folder)
        groups = groups_of(asked, drawn_samples(shape, encoder, 300))
        batches = micro_batches(asked, encoder, groups)
        cost_model = encoder.family.cost_model(json.loads((whole / "config.json").read_text()))
        stream = Stream()
        _install(asked, stream, config, stack)
        engine = engine_of_step(asked, folder, encoder, CUDA)
        stream.watch(engine.vlm.model, stack)
        objective = dpo(ObjectiveSection(name="dpo")) if asked.pairs else SFT
        _step(engine, objective, batches, stream)
        AcceleratorState._reset_state(True)
    return {
        "peaks": stream.peaks,
        "costs": [[*key, asdict(cost)] for key, cost in stream.costs.items()],
        "tokens": sum(sum(batch.lengths) for batch in batches),
        "flops": sum(flops_of(batch, cost_model) for batch in batches),
        "description": engine.description,
    }


def _install(asked: Asked, stream: Stream, config: Any, stack: ExitStack) -> None:
    """The device, its packages, and a model without numbers."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    def load(_: Any) -> Any:
        sees = hasattr(config, "vision_config")
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        with torch.device("meta"):
            return kind.from_config(config, dtype=torch.float32)

    equal = torch.equal
    for target, name, value in (
        (hf, "load_model", load),
        (torch, "equal", lambda a, b: a.device.type == "meta" or equal(a, b)),
        (varlen, "_takes_groups", lambda _: asked.grouped),
        (stand_ins, "MODULES", MODULES),
    ):
        stack.enter_context(patch.object(target, name, value))
    stack.enter_context(fake_gpu(MetaCuda(stream)))
    stack.enter_context(stand_ins.installed(asked.packages))
    if asked.plant == "cast":
        _cast_inputs(stack)


def _cast_inputs(stack: ExitStack) -> None:
    """Widen the input of every linear layer, with working weights and without."""
    of_layers = ((module, "linear_product") for module in (working_weights, linear_layers))
    for owner, name in ((torch.nn.Linear, "forward"), *of_layers):
        product = getattr(owner, name)

        def widened(layer: Any, x: Any, product: Any = product) -> Any:
            return product(layer, x.float())

        stack.enter_context(patch.object(owner, name, widened))


def engine_of_step(
    asked: Asked, folder: Path, encoder: Encoder, device: torch.device, dtype: str = "bfloat16"
) -> Any:
    """The hf engine of a step, on the device."""
    parts: dict[str, Any] = {"language": asked.language}
    parts["lora"] = LoraSection(quantize=asked.quantize)  # type: ignore[arg-type]
    if encoder.takes_images:
        parts |= {"vision": asked.vision, "projector": asked.projector}
    policy = TrainingPolicy(trainable=TrainableSection(**parts), optim=ADAMW)
    model = ModelSection(
        path=str(folder),
        dtype=dtype,
        attention=asked.attention,
        fused_layers=asked.fused,
        activation_checkpointing=asked.recompute,
    )
    ranks = replace(single_rank(), device=device)
    return engine_of(model, ParallelismSection(), encoder, ranks, policy)


def _step(engine: Any, objective: Objective, batches: Sequence[Batch], stream: Stream) -> None:
    """The second step, as every later one is."""
    stepper = make_stepper(engine, objective=objective)
    pinned = [pin_batch(batch) for batch in batches]
    stepper.train(0, pinned, num_skipped=0, stop=False)
    step, finish = engine.step, engine.finish_gradients

    def in_phase(function: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            stream.phase = "optimizer"
            return function(*args, **options)

        return run

    with (
        patch.object(engine, "step", in_phase(step)),
        patch.object(engine, "finish_gradients", in_phase(finish)),
    ):
        stream.of_node.clear()
        stream.on, stream.phase = True, "forward"
        stepper.train(1, pinned, num_skipped=0, stop=False)
        stream.on = False


def main() -> None:
    """Answer with one JSON object for each step that is asked for."""
    warnings.simplefilter("ignore")
    print(json.dumps([record(Asked(**each)) for each in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
