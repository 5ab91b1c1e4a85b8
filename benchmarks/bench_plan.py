"""`vlmpack plan` on a million samples: seconds and peak memory of a process of its own.

- the figures alone: a table of random lengths (text, images, long and very long samples) in two
  sources; every figure of the page is computed from it, all packing modes included.
- the command: 100 shards of 10,000 samples that are indexed already. One is made of the digits and
  indexed; the others are links to it, and their index is its copy under their names.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from lengths import mixed_lengths

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = 1_000_000
CAPACITY = 8192
MODES = ("in_batch", "online")

Lengths = Callable[[int, int], tuple[np.ndarray, np.ndarray]]


def bench_plan() -> dict[str, object]:
    """A fresh process a mode."""
    found: dict[str, object] = {"samples": SAMPLES}
    for mode in MODES:
        command = [sys.executable, str(Path(__file__).resolve()), "--mode", mode]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found |= {f"{mode}: {k}": v for k, v in json.loads(done.stdout.splitlines()[-1]).items()}
    with tempfile.TemporaryDirectory(prefix="vlmpack-bench-") as folder:
        return found | bench_command(Path(folder))


def bench_command(folder: Path) -> dict[str, object]:
    """`vlmpack plan` from its launch to its last line, the index of its shards being there."""
    settings = [
        f"data.train={folder}/train-*.tar",
        f"data.index_dir={folder}/index",
        "data.shuffle=global",
        "packing.mode=online",
        "training.micro_batch_size=1",
        "training.max_steps=null",
        "training.num_epochs=1",
    ]
    write_index(folder)
    out = folder / "plan.json"
    command = [sys.executable, "-m", "vlmpack", "plan", "recipes/digits-demo.yaml", *settings]
    start = time.perf_counter()
    process = subprocess.Popen([*command, "--json", str(out)], cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise RuntimeError(f"vlmpack plan ended with status {status}")
    plan = json.loads(out.read_text())
    return {
        "command: samples": plan["total"]["num_samples"],
        "command: seconds": seconds,
        "command: processor seconds": usage.ru_utime + usage.ru_stime,
        "command: peak memory, MiB": usage.ru_maxrss / 1024,
    }


def write_index(folder: Path, *, shards: int = 100, samples: int = 10_000) -> None:
    """Shards that share their bytes, and the index of all of them."""
    from vlmpack.alignment import Alignment
    from vlmpack.data.config import DataConfig
    from vlmpack.data.index.parts import part_for, read_part, write_part
    from vlmpack.data.modes import InBatch
    from vlmpack.data.splits.survey import make_builder
    from vlmpack.encode import Encoder
    from vlmpack.packing.budget import RowBudget
    from vlmpack.recipe.data import DataSection
    from vlmpack.recipe.schema import PackingSection, TrainingSection
    from vlmpack.recipe.sources import Source
    from vlmpack.storage.fetch import LocalFetcher

    first = folder / "train-0000.tar"
    _repeat_samples(ROOT / "assets/digits/train-000000.tar", first, samples)
    encoder, fetcher = Encoder(ROOT / "assets/tiny-qwen2_5_vl"), LocalFetcher()
    index = folder / "index"
    index.mkdir()
    config = DataConfig(
        data=DataSection(train=(Source(name="x", path=str(first)),), index_dir=str(index)),
        training=TrainingSection(micro_batch_size=1, global_batch_size=1, seq_length=1024),
        mode=InBatch(
            packing=PackingSection(), budget=RowBudget(max_tokens=1024), multiples=Alignment(1, 1)
        ),
    )
    builder = make_builder(config, encoder, fetcher)
    rules = (builder.rule, builder.lengths.rule)
    made = [part_for(index, fetcher.head(str(first)), rule) for rule in rules]
    builder.lengths.index(made[0])
    builder.lengths(made[1])
    for number in range(1, shards):
        path = folder / f"train-{number:04d}.tar"
        os.link(first, path)
        for part, rule in zip(made, rules, strict=True):
            table = read_part(part.path)
            target = part_for(index, fetcher.head(str(path)), rule).path
            write_part(target, table, table.schema.metadata or {})


def _repeat_samples(source: Path, target: Path, count: int) -> None:
    """The samples of a shard again and again, under new keys."""
    with tarfile.open(source) as tar:
        members = [(entry.name, tar.extractfile(entry).read()) for entry in tar]
    keys = list(dict.fromkeys(name.partition(".")[0] for name, _ in members))
    with tarfile.open(target, "w") as out:
        for number in range(count):
            key = keys[number % len(keys)]
            for name, data in members[_first(members, key) :]:
                stem, _, suffix = name.partition(".")
                if stem != key:
                    break
                entry = tarfile.TarInfo(f"{number:06d}.{suffix}")
                entry.size = len(data)
                out.addfile(entry, io.BytesIO(data))


def _first(members: list[tuple[str, bytes]], key: str) -> int:
    return next(i for i, (name, _) in enumerate(members) if name.partition(".")[0] == key)


def synthetic_inputs(count: int, mode: str, lengths: Lengths = mixed_lengths, **settings: object):
    """What `plan_figures` takes, over a table of that many samples.

    Args:
        mode: packing.mode.
        lengths: (samples, tokens of a row) -> tokens and patches of each.
        settings: dotted keys of the recipe with `__` for dots.
    """
    from vlmpack.build.data import packing_mode
    from vlmpack.build.engine import engine_spec
    from vlmpack.data.config import DataConfig
    from vlmpack.data.index.table import SampleLimits
    from vlmpack.data.splits.indexed import make_plan
    from vlmpack.data.splits.split import KnownSplit
    from vlmpack.distributed import Ranks
    from vlmpack.encode import Encoder
    from vlmpack.forecast.make import PlanInputs
    from vlmpack.forecast.parameters import read_sizes
    from vlmpack.recipe import load_recipe
    from vlmpack.recipe.data import DataSection
    from vlmpack.recipe.sources import Source

    online = mode == "online"
    recipe = load_recipe(
        ROOT / "recipes/digits-demo.yaml",
        {
            "model.path": str(ROOT / "assets/tiny-qwen2_5_vl"),
            "packing.mode": mode,
            "training.seq_length": CAPACITY,
            "training.micro_batch_size": 1 if online else 4,
            "training.global_batch_size": 64,
            "training.max_steps": None,
            "training.num_epochs": 1,
            **{key.replace("__", "."): value for key, value in settings.items()},
        },
    )
    training = recipe.training
    config = DataConfig(
        data=DataSection(
            train=(Source(name="a", path="a"), Source(name="b", path="b")), over_long="drop"
        ),
        training=training,
        mode=packing_mode(recipe),
    )
    fitted = fit(synthetic_table(count, lengths), SampleLimits(CAPACITY))
    plan, _ = make_plan(config, fitted, "global")
    split = KnownSplit(config, fitted, {}, plan)
    sizes = read_sizes(Path(recipe.model.path))
    config = replace(config, mode=config.mode.resolved(plan.packer))
    return PlanInputs(
        engine=engine_spec(recipe, Encoder(Path(recipe.model.path)), Ranks()),
        objective=recipe.objective,
        packing=recipe.packing,
        config=config,
        split=split,
        sizes=sizes,
        world_size=8,
        answers=recipe.evaluation.generate,
    )


def synthetic_table(count: int, lengths: Lengths = mixed_lengths):
    """A table of two sources of one shard each; a thousandth of the samples is bad."""
    from vlmpack.data.index.table import SampleTable
    from vlmpack.data.packs.manifest import SavedKeys
    from vlmpack.storage.fetch import ShardStamp

    drawn, patches = lengths(count, CAPACITY)
    tokens, images = np.maximum(drawn, 16), patches // 4
    tokens[::997] = CAPACITY + 1
    bad = np.zeros(count, np.bool_)
    bad[500::1000] = True
    for column in (tokens, images):
        column[bad] = 0
    edges = np.asarray([0, count // 2, count])
    zeros = np.zeros(count, np.int64)
    return SampleTable(
        shards=(ShardStamp("a.tar", 1, "1"), ShardStamp("b.tar", 1, "1")),
        shard_starts=edges,
        source_starts=edges,
        offsets=zeros,
        lengths=zeros,
        crc32s=zeros,
        num_tokens=tokens,
        num_image_tokens=images,
        num_label_tokens=(tokens - images) // 3,
        num_patches=4 * images,
        bad=bad,
        keys=SavedKeys(pa.chunked_array([[f"{number:08d}" for number in range(count)]])),
        faults=dict.fromkeys(np.flatnonzero(bad).tolist(), ("decode", "cannot be decoded")),
        shrunk={},
    )


def fit(table, limits):
    """The over-long policy `drop`."""
    from vlmpack.data.index.table import apply_over_long

    return apply_over_long(table, policy="drop", limits=limits, encoder=None, read_text=None)


def main() -> None:
    """One mode, in this process: the time and memory of the figures, imports included."""
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    arguments = parser.parse_args()
    from vlmpack.forecast.make import plan_figures

    inputs = synthetic_inputs(arguments.samples, arguments.mode)
    made, processor = time.perf_counter(), time.process_time()
    plan = plan_figures(inputs)
    done = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kibibytes
    figures = {
        "seconds": done - made,
        "processor seconds": time.process_time() - processor,
        "seconds, imports and table included": done - start,
        "peak memory, MiB": peak / 1024,
        "steps": plan.run_steps,
        "samples in a row": plan.sequences.mean,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
