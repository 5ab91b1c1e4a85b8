"""Runs with a base in 4 and 8 bits: what they learn, with evaluation in the middle, and sharded.

Run in ranks, in an environment with bitsandbytes:

    torchrun --nproc-per-node 2 test_packed_bases.py FOLDER

One rank writes FOLDER/one-<kind>.json; two write FOLDER/two-<kind>.json, from FSDP2 and DDP.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from backends.hf import replicas
from support.checkpoints import save_engine
from support.engines import make_engine, make_stepper, policy
from support.forked import RankServer, run_ranks
from support.plans import mode_of
from support.quantised_folders import make
from support.references import path_of
from support.shards import TINY_MODEL
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from vlmpack.backends.hf.frozen import PackedLinear
from vlmpack.distributed import Ranks, start_process_group, stop_process_group
from vlmpack.encode import Encoder
from vlmpack.forecast.memory import memory_figures
from vlmpack.forecast.parameters import read_sizes
from vlmpack.forecast.trained import trained_sizes
from vlmpack.recipe.schema import ModelSection, ParallelismSection
from vlmpack.training.checkpoint import load_checkpoint, step_folder
from vlmpack.training.step import Stepper

KINDS = ("nf4", "int8", "of a folder")
"""The last is a folder that bitsandbytes has quantised to nf4."""
ONE: replicas.Deal = [[[0, 1, 2], [3, 4, 5]]]
TWO: replicas.Deal = [[[0], [1, 2]], [[3], [4, 5]]]
STEPS = 3
RATE = 0.01


def stepper_of(kind: str, ranks: Ranks, folder: Path, **split: Any) -> Stepper:
    """Adapters beside packed layers of tower and language model.

    Args:
        folder: where there may be a quantised folder; or a model.
    """
    quantize = kind if kind in ("nf4", "int8") else "none"
    if kind == "of a folder":
        folder = folder / "quantised"
    elif not (folder / "config.json").is_file():
        folder = TINY_MODEL
    chosen = policy("lora", "frozen", "lora", quantize=quantize, seed=3)
    engine = make_engine(folder, Encoder(folder), ranks=ranks, policy=chosen, **split)
    stepper = make_stepper(engine)
    stepper.schedule = lambda step: RATE
    return stepper


def evaluated(stepper: Stepper, samples: Any) -> Tensor:
    """An answer's logits, as evaluation asks for them between steps."""
    batch = replicas.COLLATE([samples[1]])
    with stepper.engine.generation() as model:
        logits: Tensor = model(input_ids=batch.input_ids).logits
    return logits.float()


def frozen_digest(stepper: Stepper) -> list[int]:
    _, found = stepper.engine.frozen_digests()
    return found.tolist()


def trained(stepper: Stepper, samples: Any, deal: Any, start: int, count: int) -> list[list[float]]:
    return replicas.train(stepper, deal, samples, start=start, count=count)


def repacking(own: Any) -> Any:
    """As bitsandbytes' own layer on some CPUs: the first answer rewrites the weight."""

    def forward(self: PackedLinear, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            self.weight.data[:64] = self.weight.data[:64].flip(0)
        output: Tensor = own(self, x)
        return output

    return forward


def in_the_middle(kind: str, samples: Any, folder: Path) -> tuple[list[list[float]], bool]:
    """Steps around an evaluation, and whether frozen weights are as before."""
    stepper = stepper_of(kind, Ranks(), folder)
    before = frozen_digest(stepper)
    rows = trained(stepper, samples, ONE, 0, 1)
    evaluated(stepper, samples)
    rows += trained(stepper, samples, ONE, 1, STEPS - 1)
    return rows, frozen_digest(stepper) == before


def alone(kind: str, samples: Any, folder: Path) -> dict[str, Any]:
    """One process: beside a dense model of the unpacked weights, and around an evaluation."""
    stepper = stepper_of(kind, Ranks(), folder)
    layers = [m for m in stepper.engine.module.modules() if isinstance(m, PackedLinear)]
    stepper.engine.export(folder / kind, processor_from=TINY_MODEL, dtype=torch.float32)
    rows = trained(stepper, samples, ONE, 0, STEPS)
    own = PackedLinear.forward
    kept, whole = in_the_middle(kind, samples, folder)
    found = {
        "layers": len(layers),
        "rows": rows,
        "kept": kept == rows and whole,
        "answers": evaluated(stepper, samples).flatten().tolist(),
    }
    if kind != "nf4":  # families with int8 are compared elsewhere, and so are folders
        return found
    try:
        PackedLinear.forward = repacking(own)  # type: ignore[method-assign]
        control, broken = in_the_middle(kind, samples, folder)
    finally:
        PackedLinear.forward = own  # type: ignore[method-assign]
    dense = stepper_of("none", Ranks(), folder / kind)
    return found | {
        "dense": trained(dense, samples, ONE, 0, STEPS),
        "plain": trained(stepper_of("none", Ranks(), folder), samples, ONE, 0, STEPS),
        "control": control == rows or broken,
    }


def watch_gathers(engine: Any) -> dict[str, int]:
    """By block, the bytes of parameters that its forward pass has whole."""
    gathered: dict[str, int] = {}
    for name, module in engine.vlm.named_modules():
        if isinstance(module, FSDPModule):

            def see(module: Any, _: Any, name: str = name) -> None:
                whole = [p for p in module.parameters() if not isinstance(p, DTensor)]
                gathered[name] = sum(p.nbytes for p in whole)

            module.register_forward_pre_hook(see)  # type: ignore[attr-defined]
    return gathered


def held_bytes(engine: Any) -> int:
    """Of weights and moments, of this rank and gathered around a block."""
    buffers = {name for name, _ in engine.vlm.model.named_buffers()}
    held = sum(part.nbytes for name, part in engine.held_parts() if name not in buffers)
    *blocks, root = sorted(engine.gathered.values(), key=lambda of: of == engine.gathered[""])
    return int(held + root + 2 * max(blocks))


def planned_bytes(stepper: Stepper, ranks: Ranks, folder: Path) -> int:
    """What `vlmpack plan` says of the same."""
    engine: Any = stepper.engine
    figures = memory_figures(
        ModelSection(path=str(folder), dtype="float32"),
        ParallelismSection(sharding="fsdp"),
        read_sizes(folder),
        mode_of(max_row_slots=512, max_row_patches=64),
        global_batch_size=6,
        world_size=ranks.world_size,
        trained=trained_sizes(engine.policy, Encoder(folder)),
    )
    return figures.weights + figures.optimizer


def together(kind: str, samples: Any, folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Two processes: FSDP2 and its resume, and DDP."""
    stepper = stepper_of(kind, ranks, folder, sharding="fsdp")
    engine: Any = stepper.engine
    engine.gathered = watch_gathers(engine)
    rows = trained(stepper, samples, TWO, 0, 1)
    evaluated(stepper, samples)
    save_engine(folder / f"checkpoints-{kind}", 1, engine, keep=1, ranks=ranks)
    rows += trained(stepper, samples, TWO, 1, STEPS - 1)
    again = stepper_of(kind, ranks, folder, sharding="fsdp")
    load_checkpoint(step_folder(folder / f"checkpoints-{kind}", 1), again.engine, ranks)
    return {
        "held": held_bytes(engine),
        "planned": planned_bytes(stepper, ranks, engine.folder),
        "rows": rows,
        "resumed": trained(again, samples, TWO, 1, STEPS - 1),
        "ddp": trained(stepper_of(kind, ranks, folder), samples, TWO, 0, STEPS),
        "answers": evaluated(stepper, samples).flatten().tolist(),
    }


def main(folder: Path) -> None:
    """Everything of this number of ranks."""
    ranks = start_process_group()
    samples = replicas.encoded_samples()
    if ranks.world_size == 1:
        make("nf4", folder / "quantised")
    for kind in KINDS:
        if ranks.world_size == 1:
            found = alone(kind, samples, folder)
        else:
            found = together(kind, samples, folder, ranks)
        if ranks.is_main:
            name = "one" if ranks.world_size == 1 else "two"
            (folder / f"{name}-{kind}.json").write_text(json.dumps(found))
    stop_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("packed")
    first = path_of("bitsandbytes", folder)["PYTHONPATH"].split(":")[0]
    server = RankServer(path=[Path(first)])
    try:
        for count in (1, 2):
            ended = run_ranks([__file__, folder], count, server=server)
            assert ended.returncode == 0, ended.stderr[-3000:]
    finally:
        server.close()
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def close(found: Any, expected: Any, rel: float) -> bool:
    """Losses and norms by step."""
    return all(a == pytest.approx(b, rel=rel) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
def test_a_packed_base_learns_what_its_unpacked_weights_do(
    results: dict[str, dict[str, Any]],
) -> None:
    found = results["one-nf4"]
    assert found["layers"] >= 28 + 20
    assert found["rows"][0][0] - found["rows"][-1][0] > 0.05, "nothing was learnt"
    assert close(found["rows"], found["dense"], 1e-5)
    assert not close(found["rows"], found["plain"], 1e-4), "guard: nothing was packed"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_leaves_gradients_and_weights_as_they_are(
    results: dict[str, dict[str, Any]], kind: str
) -> None:
    found = results[f"one-{kind}"]
    assert found["kept"], "bit for bit"
    assert not results["one-nf4"]["control"], "a weight that was rewritten is not seen"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_take_the_steps_of_one(results: dict[str, dict[str, Any]], kind: str) -> None:
    """Whole and sharded, with an evaluation in the middle; a resume is the same bit for bit."""
    one, two = results[f"one-{kind}"], results[f"two-{kind}"]
    assert close(two["rows"], one["rows"], 1e-5)
    assert close(two["ddp"], one["rows"], 1e-5)
    assert two["resumed"] == two["rows"][1:]
    assert two["planned"] == pytest.approx(two["held"], rel=0.1)
    answers, expected = torch.tensor(two["answers"]), torch.tensor(one["answers"])
    assert (answers - expected).norm() < 1e-4 * expected.norm()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
