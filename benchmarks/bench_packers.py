"""Choosing what shares a pack: seconds and packs against TRL and Megatron-Bridge, fill, balance.

Peers are named by the environment, since they live in environments of their own; one that is not
named is reported as absent:

- VLMPACK_TRL_PYTHON: an interpreter that can import trl.
- VLMPACK_BRIDGE_WHEEL: a wheel of megatron-bridge, of whose files one is loaded; it runs in the
  interpreter above if that is named (it needs numpy and tqdm), else in this one.

Every packer runs in a process of its own on the same lengths, in turn; ratios are of medians. All
times are CPU seconds of one thread: what an idle core takes, whatever else runs on the machine.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from lengths import mixed_lengths
from timing import processor_medians

from vlmpack.packing import StreamPacker, balance, plan_packs

HERE = Path(__file__).resolve().parent
LENGTHS, CAPACITY = 1_000_000, 8192


def bench_packers(rounds: int) -> dict[str, object]:
    """All figures of one run."""
    return {
        **_bench_offline(rounds),
        **_wikipedia(),
        **_bench_stream(rounds),
        **_bench_balance(),
    }


def lognormal_lengths(count: int) -> np.ndarray:
    """(count,) median 400, sigma 0.9, clipped to the capacity."""
    drawn = np.random.default_rng(0).lognormal(np.log(400), 0.9, count)
    return np.clip(drawn, 1, CAPACITY).astype(np.int64)


class Process:
    """A packer that waits for runs."""

    def __init__(self, python: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [python, str(HERE / "packer_process.py"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version: str = self._answer()["version"]
        self.runs: list[float] = []
        self.packs = 0

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self) -> None:
        """Once more."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.runs.append(answer["seconds"])
        self.packs = answer["packs"]

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def _bench_offline(rounds: int) -> dict[str, object]:
    lengths = lognormal_lengths(LENGTHS)
    least = -(-int(lengths.sum()) // CAPACITY)
    trl, wheel = os.environ.get("VLMPACK_TRL_PYTHON"), os.environ.get("VLMPACK_BRIDGE_WHEEL")
    figures: dict[str, object] = {"lengths": LENGTHS, "capacity": CAPACITY, "lower_bound": least}
    with tempfile.TemporaryDirectory(prefix="vlmpack-bench-") as folder:
        path = f"{folder}/lengths.npy"
        np.save(path, lengths)
        packers = {"plan_packs": Process(sys.executable, "vlmpack", path, str(CAPACITY))}
        if trl:
            packers["trl"] = Process(trl, "trl", path, str(CAPACITY))
        if wheel:
            python = trl or sys.executable
            packers["bridge"] = Process(python, "bridge", path, str(CAPACITY), wheel)
        for _ in range(min(rounds, 3)):
            for packer in packers.values():
                packer.run()
        for packer in packers.values():
            packer.close()
    ours = statistics.median(packers["plan_packs"].runs)
    for name in ("plan_packs", "trl", "bridge"):
        if name not in packers:
            figures[name] = "absent"
            continue
        packer = packers[name]
        seconds = statistics.median(packer.runs)
        figures[f"{name}_version"] = packer.version
        figures[f"{name}_seconds"] = seconds
        figures[f"{name}_packs_above_lower_bound"] = packer.packs - least
        if name != "plan_packs":
            figures[f"{name}_over_plan_packs"] = seconds / ours
    return figures


def _wikipedia() -> dict[str, object]:
    """Fill on a 64th of the histogram of Krell et al. (2107.02027)."""
    file = HERE.parent / "tests" / "packing" / "wikipedia_512.json"
    counts = np.array(json.loads(file.read_text())["counts"])
    lengths = np.repeat(np.arange(1, 513), counts // 64)
    return {"wikipedia_512_fill": int(lengths.sum()) / (512 * len(plan_packs(lengths, 512)))}


def _bench_stream(rounds: int) -> dict[str, object]:
    """Packs of 20,000 samples; the last buffer's packs are left out of the fill."""
    figures: dict[str, object] = {}
    for capacity in (4096, 8192, 16384):
        lengths, _ = mixed_lengths(20_000, capacity)
        for alignment in (1, 8):
            seconds, packs = [], []
            for _ in range(rounds):
                packer = StreamPacker(capacity, alignment=alignment)
                started = time.process_time()
                packs = [pack for length in lengths.tolist() for pack in packer.push(length)]
                seconds.append(time.process_time() - started)
            held = -(-lengths // alignment) * alignment
            name = f"stream_{capacity}_alignment_{alignment}"
            full = sum(int(held[pack].sum()) for pack in packs) / (capacity * len(packs))
            figures[f"{name}_fill"] = round(full, 5)
            figures[f"{name}_samples_per_second"] = len(lengths) / statistics.median(seconds)
            figures[f"{name}_most_sequences"] = max(map(len, packs))
    return figures


def _bench_balance() -> dict[str, object]:
    """64 ranks, 4 packs each, of the mixed stream at 8192; FLOPs of Qwen2.5-VL-3B."""
    lengths, patches = mixed_lengths(40_000, CAPACITY)
    packer = StreamPacker(CAPACITY, alignment=8)
    packs = [pack for length in lengths.tolist() for pack in packer.push(length)]
    sums = [[lengths[p].sum(), (lengths[p] ** 2).sum(), patches[p].sum()] for p in packs]
    tokens, squares, vision = np.array(sums, dtype=np.float64).T
    costs = np.stack([16.6e9 * tokens + 4.42e5 * squares, 3.87e9 * vision], axis=1)
    many = costs[np.random.default_rng(0).integers(0, len(costs), 4 * 4096)]
    dealing = {"many": lambda: balance(many, 4096)}
    seconds, balanced, in_order = [], [], []
    for start in range(0, len(costs) - 255, 256):
        step = costs[start : start + 256]
        started = time.process_time()
        dealt = balance(step, 64)
        seconds.append(time.process_time() - started)
        balanced.append(_spread(step[dealt].sum(axis=1)))
        in_order.append(_spread(step.reshape(64, 4, 2).sum(axis=1)))
    return {
        **_bench_skewed(),
        "balance_4096_ranks_milliseconds": 1e3 * processor_medians(dealing, rounds=9)["many"],
        "balance_4096_ranks_max_over_mean": max(_spread(many[balance(many, 4096)].sum(axis=1))),
        "balance_steps": len(seconds),
        "balance_milliseconds": 1e3 * statistics.median(seconds),
        "balance_total_max_over_mean": max(total for total, _ in balanced),
        "balance_vision_max_over_mean": max(vision for _, vision in balanced),
        "in_order_total_max_over_mean": max(total for total, _ in in_order),
        "in_order_vision_max_over_mean": max(vision for _, vision in in_order),
    }


def _bench_skewed() -> dict[str, object]:
    """8 ranks, 256 rows each, 5% of the rows with vision of a long tail."""
    random = np.random.default_rng(0)
    seconds, balanced = [], []
    for _ in range(5):
        vision = np.where(random.random(2048) < 0.05, random.lognormal(0, 1.2, 2048), 0.0)
        step = np.stack([random.normal(1, 0.1, 2048).clip(0.5), vision.clip(0, 20)], axis=1)
        started = time.process_time()
        dealt = balance(step, 8)
        seconds.append(time.process_time() - started)
        balanced.append(_spread(step[dealt].sum(axis=1)))
    return {
        "skewed_balance_milliseconds": 1e3 * statistics.median(seconds),
        "skewed_balance_total_max_over_mean": max(total for total, _ in balanced),
        "skewed_balance_vision_max_over_mean": max(vision for _, vision in balanced),
    }


def _spread(loads: np.ndarray) -> tuple[float, float]:
    """Largest over mean: of the total, of vision."""
    total, vision = loads.sum(axis=1), loads[:, 1]
    return float(total.max() / total.mean()), float(vision.max() / vision.mean())
