"""What one rank keeps for the backward pass of a long row, at CP 1, 2 and 4."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from models import write_wide_model

HERE = Path(__file__).resolve().parent
TOKENS, WIDTH, LAYERS = 16_384, 512, 4


def saved_mib(folder: str, context: int, *mode: str, tokens: int = TOKENS) -> float:
    """MiB of distinct saved tensors, on the rank that keeps most."""
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"),
            f"--nproc-per-node={context}",
            *(str(HERE / "context_memory.py"), folder, str(tokens), *mode),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    saved: float = json.loads(done.stdout.strip().splitlines()[-1])["saved_mib"]
    return saved


def bench_context_memory() -> dict[str, object]:
    """Forward once in each layout, with and without recomputation."""
    with tempfile.TemporaryDirectory() as folder:
        write_wide_model(Path(folder), WIDTH, layers=LAYERS)
        figures: dict[str, object] = {
            "model": f"tiny-qwen2_5_vl's shape, width {WIDTH}, {LAYERS} layers, float32",
            "tokens": TOKENS,
        }
        for mode in (("keep",), ("recompute",), ("keep", "--backend", "hf")):
            for context in (1, 2, 4):
                name = f"saved_mib_{mode[0]}{'_hf' * (len(mode) > 1)}_cp{context}"
                figures[name] = saved_mib(folder, context, *mode)
    return figures
