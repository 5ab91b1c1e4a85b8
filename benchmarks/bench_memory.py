"""What one rank keeps for the backward pass of a long row, at CP 1, 2 and 4.

python benchmarks/bench_memory.py [ROW ...]     (names of `ROWS`; all of them by default)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from models import write_wide_model

HERE = Path(__file__).resolve().parent
TOKENS, WIDTH, LAYERS = 16_384, 512, 4


def saved_mib(folder: str, context: int, *options: str, tokens: int = TOKENS) -> float:
    """MiB of distinct saved tensors, on the rank that keeps most."""
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"),
            f"--nproc-per-node={context}",
            *(str(HERE / "context_memory.py"), folder, str(tokens), *options),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    saved: float = json.loads(done.stdout.strip().splitlines()[-1])["saved_mib"]
    return saved


ROWS: dict[str, tuple[str, ...]] = {
    "keep": (),
    "recompute": ("--recompute", "full"),
    "keep_hf": ("--backend", "hf"),
    "keep_hf_images": ("--backend", "hf", "--images"),
    "keep_hf_one_kv_head": ("--backend", "hf"),
}


def bench_context_memory(rows: Sequence[str] = tuple(ROWS)) -> dict[str, object]:
    """Forward once in each layout: with and without recomputation, on both engines, with images,
    and with one key-value head."""
    figures: dict[str, object] = {
        "model": f"tiny-qwen2_5_vl's shape, width {WIDTH}, {LAYERS} layers, float32",
        "tokens": TOKENS,
    }
    for name in rows:
        with tempfile.TemporaryDirectory() as folder:
            key_heads = 1 if "one_kv_head" in name else 2
            write_wide_model(Path(folder), WIDTH, layers=LAYERS, key_heads=key_heads)
            for context in (1, 2, 4):
                figures[f"saved_mib_{name}_cp{context}"] = saved_mib(folder, context, *ROWS[name])
    return figures


if __name__ == "__main__":
    print(json.dumps(bench_context_memory(sys.argv[1:] or tuple(ROWS)), indent=2))
