"""A training step of a hybrid in a process of its own: how far its memory rises, and the estimate.

    python -m support.step_peak MODEL_TYPE

Prints two integers, bytes: the rise of resident memory over what the process held after a step of a
few tokens, and the estimate of activations and logits.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from threading import Event, Thread

import torch
from support.engines import EVERYTHING, engine_of, make_stepper, single_rank
from support.families import tiny_family_folder
from support.hybrids import hybrid
from support.plans import mode_of
from support.samples import text_sample

from vlmpack.encode import Encoder
from vlmpack.forecast.activations import forms_on
from vlmpack.forecast.memory import memory_figures
from vlmpack.forecast.parameters import read_sizes
from vlmpack.packing import PackedBatch, pack_batch_sequences
from vlmpack.recipe.schema import ModelSection, ParallelismSection

_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
SIZES = {
    "qwen3_5_text": {
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "num_hidden_layers": 8,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    },
    "nemotron_h": {
        "mamba_num_heads": 16,
        "mamba_head_dim": 32,
        "ssm_state_size": 32,
        "layers_block_type": ["linear_attention", "mlp"] * 3 + ["full_attention", "mlp"],
    },
}
"""Large enough that activations are most of what a step takes: gigabytes."""
LENGTHS = (1024,) * 8


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def _batch(encoder: Encoder, lengths: tuple[int, ...]) -> PackedBatch:
    axes = encoder.family.num_position_axes
    samples = [
        text_sample(str(n), [i % 200 for i in range(length)], axes=axes, num_targets=length - 1)
        for n, length in enumerate(lengths)
    ]
    return pack_batch_sequences(samples, pad_token_id=encoder.pad_token_id)


def main(model_type: str, folder: Path) -> None:
    tiny_family_folder(model_type, folder)
    sizes = {"hidden_size": 256, "intermediate_size": 768, **_HEADS, **SIZES[model_type]}
    hybrid(model_type, **sizes).save_pretrained(folder)
    encoder = Encoder(folder)
    model = ModelSection(path=str(folder), dtype="float32", attention="segments")
    engine = engine_of(model, ParallelismSection(), encoder, single_rank(), EVERYTHING)
    stepper = make_stepper(engine)
    stepper.train(0, [_batch(encoder, (16, 16))], num_skipped=0, stop=False)
    held = [_resident()]
    done = Event()

    def watch() -> None:
        while not done.is_set():
            held.append(_resident())
            time.sleep(0.002)

    watching = Thread(target=watch)
    watching.start()
    stepper.train(1, [_batch(encoder, LENGTHS)], num_skipped=0, stop=False)
    done.set()
    watching.join()
    found = read_sizes(folder)
    assert found is not None
    figures = memory_figures(
        model,
        ParallelismSection(),
        found,
        mode_of(max_row_slots=sum(LENGTHS), max_row_patches=0),
        global_batch_size=16,
        world_size=1,
        forms=forms_on(torch.device("cpu"), model),
    )
    print(max(held) - held[0], figures.activations + figures.logits)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(sys.argv[1], Path(made))
