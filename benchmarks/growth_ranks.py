"""What a launch costs on a large index: seconds to the first batch, and memory, of ranks of a node.

    python benchmarks/growth_ranks.py --samples 1000000 --shards 500
    python benchmarks/growth_ranks.py --samples 100000000 --shards 50000 --folder DIR

The index is made up. Every shard is one more name of one tar of texts, so its samples can be read
and lie nowhere else. The table has the seal and the form of any other. Eight ranks open it at once,
without a model: the table, the order, the plan of the first window, two loader workers and the
first batch. Memory is the proportional set size (PSS) of a rank and its workers. Files that are
read by offset are in no process, and the kernel's cache of them is not counted.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from time import perf_counter
from typing import Any

HERE = Path(__file__).resolve().parent
MODEL = HERE.parent / "assets" / "tiny-qwen2_5_vl"
STEPS = 4


def write_texts(path: Path, count: int) -> None:
    """A tar of conversations of 20 to 400 words."""
    with tarfile.open(path, "w") as tar:
        for number in range(count):
            words = " ".join(f"w{number * k % 97}" for k in range(20 + number * 37 % 380))
            turns = [("user", f"question {number}"), ("assistant", words)]
            listed = [{"role": role, "content": text} for role, text in turns]
            data = json.dumps({"messages": listed}).encode()
            member = tarfile.TarInfo(f"sample-{number:07d}.json")
            member.size = len(data)
            tar.addfile(member, BytesIO(data))


def recipe_in(folder: Path) -> Path:
    path = folder / "recipe.yaml"
    recipe = {
        "run_dir": str(folder / "run"),
        "model": {"path": str(MODEL)},
        "data": {
            "train": str(folder / "data" / "s-*.tar"),
            "index_dir": str(folder / "index"),
            "shuffle": "global",
            "num_workers": 2,
        },
        "training": {
            "seq_length": 4096,
            "micro_batch_size": 1,
            "global_batch_size": 64,
            "num_epochs": 1,
        },
        "optim": {"lr": 1e-5},
        "packing": {"mode": "online"},
    }
    path.write_text(json.dumps(recipe))
    return path


def opened_recipe(path: Path) -> tuple[Any, Any]:
    """A recipe, and what its splits are opened from."""
    from vlmpack.build.data import build_encoder, data_spec
    from vlmpack.distributed.ranks import start_process_group
    from vlmpack.recipe import load_recipe

    recipe = load_recipe(path, [])
    return recipe, data_spec(recipe, build_encoder(recipe), start_process_group())


def make_index(folder: Path, samples: int, shards: int) -> float:
    """Seconds to write the table of an index that is made up."""
    from vlmpack.build.data import build_fetcher
    from vlmpack.data.index.lengths import open_lengths
    from vlmpack.data.index.parts import BuildSettings
    from vlmpack.data.index.shard_index import open_index
    from vlmpack.data.index.table_file import TableWriter, table_parts
    from vlmpack.data.splits.survey import list_shards, make_builder
    from vlmpack.whole_file import written_whole

    data = folder / "data"
    data.mkdir()
    write_texts(folder / "texts.tar", samples // shards)
    for number in range(shards):
        (data / f"s-{number:06d}.tar").hardlink_to(folder / "texts.tar")
    recipe, spec = opened_recipe(recipe_in(folder))
    config, fetcher = spec.train, build_fetcher(recipe)
    builder = make_builder(config, spec.encoder, fetcher)
    [stamps] = list_shards(config, fetcher)
    assert len(stamps) == shards
    settings = BuildSettings(directory=folder / "index")
    [index] = open_index(stamps[:1], builder, settings)
    [lengths] = open_lengths([index], builder.lengths, settings)
    path = table_parts(stamps, builder, settings)[2]
    started = perf_counter()
    with written_whole(path) as stream:
        writer = TableWriter(stream, path.name)
        for stamp in stamps:
            writer.add(replace(index, stamp=stamp), lengths)
        writer.finish()
    print(f"table: {path.stat().st_size / samples:.1f} bytes a sample", flush=True)
    return perf_counter() - started


def pss(process: int) -> int:
    """KiB of a process and of all that it started."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    own = sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return own + sum(pss(int(child)) for child in children)


def rank(recipe: Path, number: int, count: int) -> None:
    """A rank's launch without a model, to its first steps. Prints what it took as JSON."""
    started = perf_counter()
    logging.disable(logging.INFO)
    from vlmpack.build.data import open_split
    from vlmpack.data.loading.ledger import Ledger

    _, spec = opened_recipe(recipe)
    imported = perf_counter()
    train = open_split(spec, "data.train", Ledger(None))
    assert train is not None
    planned = perf_counter()
    summary = train.summary()
    steps = train.batches(train.start(), rank=number, dp=count, max_steps=None)
    first = [micro.samples for micro in next(steps).micro_batches]
    ended = perf_counter()
    assert any(first), "a batch without samples"
    for _ in range(STEPS):
        next(steps)
    took = {
        "samples": summary.num_samples,
        "before": imported - started,
        "open": planned - imported,
        "first batch": ended - planned,
        "whole": ended - started,
        "MiB": pss(os.getpid()) / 1024,
        "state": len(train.start().to_json()),
    }
    print(json.dumps(took), flush=True)
    sys.stdin.read(1)  # until every rank was measured
    steps.close()


def run_ranks(recipe: Path, count: int) -> list[dict[str, float]]:
    """What each of some ranks took, all started at once."""
    command = [sys.executable, __file__, "--recipe", str(recipe), "--ranks", str(count)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    group["LOCAL_WORLD_SIZE"] = str(count)
    ranks = []
    for number in range(count):
        own = {**os.environ, **group, "RANK": str(number), "LOCAL_RANK": str(number)}
        ranks.append(subprocess.Popen([*command, "--rank", str(number)], env=own, **pipes))
    found = [json.loads(each.stdout.readline()) for each in ranks]
    for each in ranks:
        each.communicate("x")
    return found


def run_plan(recipe: Path) -> tuple[float, float]:
    """Seconds and MiB at the peak of `vlmpack plan`."""
    started = perf_counter()
    command = [sys.executable, "-m", "vlmpack", "plan", str(recipe)]
    code = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, "
    code += "stdout=subprocess.DEVNULL); "
    code += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    done = subprocess.run(
        [sys.executable, "-c", code, *command], check=True, stdout=subprocess.PIPE, text=True
    )
    return perf_counter() - started, int(done.stdout) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--shards", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="kept, and used again where it is there")
    parser.add_argument("--no-plan", action="store_true")
    parser.add_argument("--recipe", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if asked.rank is not None:
        rank(asked.recipe, asked.rank, asked.ranks)
        return
    with tempfile.TemporaryDirectory() as made:
        folder = asked.folder or Path(made)
        folder.mkdir(exist_ok=True)
        if not (folder / "index").exists():
            print(f"table: {make_index(folder, asked.samples, asked.shards):.1f} s", flush=True)
        recipe = recipe_in(folder)
        for name in ("first launch", "again"):
            found = run_ranks(recipe, asked.ranks)
            worst = {key: max(each[key] for each in found) for key in found[0]}
            said = ", ".join(f"{key} {value:,.1f}" for key, value in worst.items())
            print(f"{name}, worst of {asked.ranks} ranks: {said}", flush=True)
        if not asked.no_plan:
            seconds, mib = run_plan(recipe)
            print(f"plan: {seconds:.1f} s, {mib:.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
