"""Run in ranks: optimizer steps of the Megatron engine in parallel layouts.

    torchrun --nproc-per-node N layouts.py FOLDER LAYOUT[,LAYOUT...] [adamw,sgd]

Writes, for each layout, FOLDER/<layout>-<optimizer>.json (loss and gradient norm by step, as rank 0
sees them), .safetensors (whole parameters afterwards, under transformers' names) and
FOLDER/<layout>.json (how each process was placed and what it held).
"""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from support.engines import EVERYTHING, engine_of, make_engine, make_stepper
from support.runs import relative_l2
from support.shards import TINY_MODEL, mixed_samples, text_samples
from torch import Tensor

from vlmpack.backends import recompute
from vlmpack.backends.policy import TrainingPolicy
from vlmpack.distributed import Ranks, start_process_group, stop_process_group
from vlmpack.encode import Encoder
from vlmpack.packing import EncodedSample, FixedShape, PackCollator, PackedBatch, alignment
from vlmpack.recipe.schema import ModelSection, ParallelismSection, Recomputed
from vlmpack.training.step import Stepper

TESTS = Path(__file__).resolve().parents[1]
STEPS = 5
PAD = 561
OPTIMIZERS = ("adamw", "sgd")

SGD_LR = 0.002
"""Large enough that five steps move every weight well beyond rounding."""

FIXED = FixedShape(row_tokens=512, max_sequences=6)
"""Wider than every bin, so that each row has a ghost segment and boundaries that are repeated."""

TOLERANCES = {"loss": 1e-5, "gradient norm": 1e-5, "weights": 1e-5, "updates": 1e-3}
"""Relative. 1e-5 is the stated bound of the project. Some weights move by 1e-5 of themselves in
five steps, so what they move by has a bound too, above the rounding of the weights."""


@dataclass(frozen=True)
class Layout:
    """One way to spread the model.

    Args:
        tensor, context, pipeline, sequence: TP, CP, PP, SP.
        dp: replicas.
        distributed: shard the optimizer.
        recompute: what is computed again in the backward pass.
        expert: EP, of the processes above.
        fixed: give every row one width and one number of boundaries.
        captured: record the decoder once, and replay it for every row.
        overlap: communicate beside compute.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    sequence: bool = False
    dp: int = 1
    distributed: bool = False
    recompute: Recomputed = "none"
    expert: int = 1
    fixed: bool = False
    captured: bool = False
    overlap: bool = False

    @property
    def sizes(self) -> Any:
        """As the engine takes them."""
        return ParallelismSection(
            tensor=self.tensor,
            context=self.context,
            pipeline=self.pipeline,
            expert=self.expert,
            sequence=self.sequence,
            distributed_optimizer=self.distributed,
            overlap=self.overlap,
        )

    @property
    def processes(self) -> int:
        """World size."""
        return self.tensor * self.pipeline * self.context * self.dp


LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(tensor=2),
    "tp2-sp": Layout(tensor=2, sequence=True, recompute="selective"),
    "cp2": Layout(context=2, distributed=True),
    "cp2-fixed": Layout(context=2, fixed=True),
    "pp2": Layout(pipeline=2, recompute=4),
    "dp2": Layout(dp=2, distributed=True),
    "tp2-captured": Layout(tensor=2, fixed=True, captured=True),
    "tp2-sp-captured": Layout(tensor=2, sequence=True, recompute="full", fixed=True, captured=True),
    "dp2-captured": Layout(dp=2, distributed=True, fixed=True, captured=True),
    "tp2-cp2": Layout(tensor=2, context=2, sequence=True),
    "cp2-pp2": Layout(context=2, pipeline=2, distributed=True),
    "tp2-pp2": Layout(tensor=2, pipeline=2, sequence=True),
    "tp2-dp2": Layout(tensor=2, dp=2, sequence=True, distributed=True),
    "tp2-cp2-pp2": Layout(tensor=2, context=2, pipeline=2, sequence=True),
}

BINS: list[list[int]] = [[0, 1, 2, 3], [4, 1], [5], [4]]
"""Micro-batches of a step: indices into `samples()`.

1 and 4 are text-only, so the second of two replicas has no image; the row of 5 has one image, fewer
than the ranks that share it out; the row of 4 has one label, so one of two CP ranks has none.
"""


@cache
def samples(folder: Path = TINY_MODEL) -> list[EncodedSample]:
    """Six samples, those with images where the model has a tower, one of them of three tokens:
    shorter than 2 * CP at CP 2."""
    encoder = Encoder(folder)
    raw = mixed_samples() if encoder.takes_images else text_samples()
    found = [encoder.encode(sample.cooked()) for sample in raw]
    found[4] = EncodedSample(
        key="three tokens",
        input_ids=torch.tensor([5, 6, 7]),
        labels=torch.tensor([6, -100, -100]),
        position_ids=torch.arange(3).expand(encoder.num_position_axes, -1),
        media_positions=torch.empty(0, dtype=torch.int64),
    )
    return found


def collator(layout: Layout, axes: int = 3) -> PackCollator:
    """Rows as the recipe's rules would have them."""
    multiples = alignment(
        context_parallel=layout.context,
        tensor_parallel=layout.tensor,
        sequence_parallel=layout.sequence,
    )
    return PackCollator(
        pad_token_id=PAD,
        num_position_axes=axes,
        pad_to_multiple_of=multiples.sequence,
        total_multiple_of=multiples.row,
        fixed=FIXED if layout.fixed else None,
    )


def make_megatron(
    layout: Layout,
    ranks: Ranks,
    folder: Path = TINY_MODEL,
    *,
    aux_loss: float = 0.0,
    policy: TrainingPolicy = EVERYTHING,
) -> Any:
    """A float32 engine with the per-segment attention, or the one that can be captured."""
    model = ModelSection(
        path=str(folder),
        backend="mcore",
        dtype="float32",
        attention="auto" if layout.captured else "segments",
        activation_checkpointing=layout.recompute,
        router_aux_loss_coef=aux_loss,
    )
    parts = (model, layout.sizes, Encoder(folder), ranks, policy)
    return engine_of(*parts, captures=layout.captured)


def use_sgd(engine: Any) -> None:
    """Replace the torch optimizers inside an engine's by plain SGD.

    AdamW divides by the root of tiny second moments and so amplifies rounding; SGD moves a weight
    by its gradient, so that weights after some steps compare gradients.
    """
    parts = getattr(engine.optimizer, "parts", [engine])
    for part in parts:
        groups = part.optimizer.param_groups
        part.optimizer = torch.optim.SGD([torch.zeros(())], lr=0.0)
        defaults = part.optimizer.defaults
        # Assigned, as Megatron does it: its shards are views, which torch's constructor refuses.
        part.optimizer.param_groups = [group | defaults for group in groups]


def stepper_with(engine: Any, optimizer: str) -> Stepper:
    """AdamW with clipping, or SGD without."""
    if optimizer == "adamw":
        return make_stepper(engine)
    stepper = make_stepper(engine, max_grad_norm=None)
    use_sgd(engine)
    stepper.schedule = lambda step: SGD_LR
    return stepper


def train(
    stepper: Stepper, layout: Layout, steps: int = STEPS, folder: Path = TINY_MODEL
) -> list[list[float]]:
    """(loss, gradient norm, what else is reported) by step, on samples as the folder's processor
    encodes them."""
    everything = samples(folder)
    collate = collator(layout, everything[0].position_ids.shape[0])
    mine = BINS[stepper.ranks.dp_rank :: layout.dp]
    rows = []
    for step in range(steps):
        batches = [collate([everything[index] for index in bin_]) for bin_ in mine]
        sums, _ = stepper.train(step, batches, num_skipped=0, stop=False)
        assert sums.num_samples == sum(map(len, BINS))
        rows.append([sums.loss, sums.grad_norm, *stepper.reported(sums).values()])
    return rows


@dataclass(frozen=True)
class Trained:
    """What some steps led to.

    Args:
        rows: (loss, gradient norm, and what else is reported) by step.
        weights: whole parameters afterwards, under transformers' names.
    """

    rows: list[list[float]]
    weights: dict[str, Tensor]

    @classmethod
    def load(cls, stem: Path) -> Trained:
        """As `save` wrote it."""
        rows = json.loads(stem.with_suffix(".json").read_text(encoding="utf-8"))
        return cls(rows, load_file(str(stem.with_suffix(".safetensors"))))

    def save(self, stem: Path) -> None:
        """Two files."""
        stem.with_suffix(".json").write_text(json.dumps(self.rows), encoding="utf-8")
        save_file(self.weights, str(stem.with_suffix(".safetensors")))


def train_reference(optimizer: str, steps: int = STEPS, folder: Path = TINY_MODEL) -> Trained:
    """The hf engine in one process."""
    engine = make_engine(folder, Encoder(folder))
    rows = train(stepper_with(engine, optimizer), LAYOUTS["one"], steps, folder)
    return Trained(rows, {name: p.detach().clone() for name, p in engine.parameters()})


def start_weights(folder: Path = TINY_MODEL) -> dict[str, Tensor]:
    """Parameters before the first step."""
    engine = make_engine(folder, Encoder(folder))
    return {name: p.detach() for name, p in engine.parameters()}


def _relative(found: float, expected: float) -> float:
    return abs(found - expected) / expected if math.isfinite(found) else math.inf


def worst_errors(found: Trained, expected: Trained, start: dict[str, Tensor]) -> dict[str, float]:
    """Largest relative errors, for rows of both of one length.

    loss and gradient norm of any step; the L2 of any parameter; the L2 of what any parameter was
    changed by.
    """
    assert found.weights.keys() == expected.weights.keys() == start.keys()
    steps = list(zip(found.rows, expected.rows, strict=True))
    return {
        "loss": max(_relative(ours[0], theirs[0]) for ours, theirs in steps),
        "gradient norm": max(_relative(ours[1], theirs[1]) for ours, theirs in steps),
        "weights": max(relative_l2(found.weights[n], expected.weights[n]) for n in start),
        "updates": max(
            relative_l2(found.weights[n] - start[n], expected.weights[n] - start[n]) for n in start
        ),
    }


def beyond_tolerance(errors: dict[str, float]) -> dict[str, float]:
    """The errors that are too large."""
    return {what: error for what, error in errors.items() if not error <= TOLERANCES[what]}


@contextmanager
def one_layout(layout: Layout) -> Iterator[Ranks]:
    """This process's place in a layout; another may follow in the same processes.

    All groups but the world end with it: each has a thread that polls, and Megatron makes dozens.
    """
    from vlmpack.backends.mcore.groups import stop_model_parallel

    yield start_process_group(
        tensor=layout.tensor, context=layout.context, pipeline=layout.pipeline
    )
    stop_model_parallel()
    for group in [*dist.distributed_c10d._world.pg_map]:
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


class Placement:
    """What one process of a layout held and computed in its first step."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.tokens: list[int] = []
        self.patches: list[int] = []
        self.hooks = [
            engine.model.gpt.decoder.register_forward_hook(
                lambda _, args, output: self.tokens.append(output.shape[0])
            )
        ]
        if engine.model.vision is not None:
            self.hooks.append(
                engine.model.vision.register_forward_hook(
                    lambda _, args, output: self.patches.append(args[0].shape[0])
                )
            )

    def finish(self, num_batches: int) -> dict[str, Any]:
        """Facts for the tests; tokens and patches of the first micro-batches."""
        for hook in self.hooks:
            hook.remove()
        engine = self.engine
        graph = engine.model.graph
        held = [engine.optimizer.main_parameter(p) for p in engine.model.parameters()]
        return {
            "world": torch.distributed.get_world_size(),
            "place": {
                name: getattr(engine.groups, name).rank() for name in ("tp", "cp", "pp", "dp")
            },
            "dp_rank": engine.ranks.dp_rank,
            "layers": [layer.layer_number for layer in engine.model.gpt.decoder.layers],
            "again": [
                layer.layer_number
                for layer in engine.model.gpt.decoder.layers
                if getattr(vars(layer).get("forward"), "__module__", "") == recompute.__name__
            ],
            "shapes": {
                name: list(parameter.shape) for name, parameter in engine.model.named_parameters()
            },
            "elements": sum(p.numel() for p in engine.model.parameters()),
            "optimized": sum(part[1].numel() for part in held if part is not None),
            "graph": None if graph is None else [graph.captures, graph.replays],
            "tokens": self.tokens[:num_batches],
            "patches": self.patches[:num_batches],
        }


def whole_weights(engine: Any) -> tuple[dict[str, Tensor], bool]:
    """Whole parameters, and whether every copy of them on every rank has the same bits."""
    weights = {name: value.clone() for name, value in engine.whole_tensors()}
    same = all(
        torch.equal(
            local.parameter[piece.start : piece.stop],
            weights[piece.box.name][piece.box.index].view(-1, *local.parameter.shape[1:]),
        )
        for local in engine.layout.parameters
        for piece in local.pieces
    )
    return weights, same


def run_layout(
    name: str, optimizer: str, ranks: Ranks, steps: int = STEPS
) -> tuple[Trained, dict[str, Any]]:
    """Train one layout; the facts about this rank."""
    layout = LAYOUTS[name]
    engine = make_megatron(layout, ranks)
    placement = Placement(engine)
    rows = train(stepper_with(engine, optimizer), layout, steps)
    weights, same = whole_weights(engine)
    return Trained(rows, weights), placement.finish(len(BINS) // layout.dp) | {"copies_agree": same}


def main(folder: Path, names: Sequence[str], optimizers: Sequence[str]) -> None:
    """Train each layout with each optimizer."""
    for name in names:
        with one_layout(LAYOUTS[name]) as ranks:
            for optimizer in optimizers:
                trained, facts = run_layout(name, optimizer, ranks)
                everywhere = ranks.gather_objects(facts)
                if ranks.is_main:
                    trained.save(folder / f"{name}-{optimizer}")
                    facts_file = folder / f"{name}.json"
                    facts_file.write_text(json.dumps(everywhere), encoding="utf-8")
    stop_process_group()


def torchrun(
    script: Path,
    processes: int,
    *arguments: str,
    timeout: int = 500,
    python: str | Path = sys.executable,
) -> None:
    """Run a script of the tests in processes of its own, under this Python or another.

    Raises:
        AssertionError: it failed.
    """
    done = subprocess.run(
        [
            *(str(python), "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={processes}", str(script), *arguments),
        ],
        env=os.environ
        | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent))),
            "PYTHONWARNINGS": "ignore",  # on stderr they would hide what failed
        },
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]


def batches_of(layout: Layout) -> list[PackedBatch]:
    """The micro-batches of a step."""
    everything = samples()
    return [collator(layout)([everything[index] for index in bin_]) for bin_ in BINS]


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        sys.argv[2].split(","),
        sys.argv[3].split(",") if len(sys.argv) > 3 else OPTIMIZERS,
    )
