"""One row of `gpu_table.py`, in a process of its own: `python -m gpu_row '{"kind": ...}'`.

The last line of stdout is a JSON object. Kinds are

- `kernels`: seconds of single products, of an addition and of varlen attention;
- `step`: the optimizer step that `operator_step.py` records, now on real tensors;
- `trainer`: transformers' Trainer, with peft or without, on the samples of that step.

Weights are random and the same in each row of a shape.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

WARM_UP = 2
"""Steps that are left out of every rate."""
STEPS = 20
"""Most steps that are measured."""
FAKE_STEPS = 1
SECONDS = 10.0
"""After which no further step begins."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """What is timed alone.

    Args:
        kind: "products", "bytes" or "attention", which share a rate.
        sizes: of the product, rows x inner x columns; of the addition, of a tensor; of attention,
            slots, length of a segment, heads, width of a head.
        causal: of attention.
        counts: whether its kind's factor is taken from it.
    """

    name: str
    kind: str
    sizes: tuple[int, ...]
    causal: bool = False
    counts: bool = True


KERNELS = (
    Kernel("mm 8,192 x 2,048 x 11,008", "products", (8192, 2048, 11008)),
    Kernel("mm 8,192 x 11,008 x 2,048, back", "products", (8192, 11008, 2048)),
    Kernel("mm 2,048 x 8,192 x 11,008, of the weight", "products", (2048, 8192, 11008)),
    Kernel("mm 17,776 x 1,280 x 3,420, odd", "products", (17776, 1280, 3420), counts=False),
    Kernel("mm 17,776 x 1,280 x 3,424", "products", (17776, 1280, 3424)),
    Kernel("mm 1,766 x 2,048 x 151,936", "products", (1766, 2048, 151936)),
    Kernel("add of 67 MB in float32", "bytes", (8192, 2048)),
    Kernel("varlen attention, 1,200 tokens, causal", "attention", (16800, 1200, 16, 128), True),
    Kernel("varlen attention, 64 tokens", "attention", (16384, 64, 16, 80)),
)
SMALLER = 64
"""A CPU's sizes are so much smaller."""


def sizes_of(kernel: Kernel, *, fake: bool) -> tuple[int, ...]:
    """Its sizes on the device at hand."""
    if not fake:
        return kernel.sizes
    if kernel.kind == "attention":
        length = kernel.sizes[1]
        return (2 * length, *kernel.sizes[1:])
    return tuple(-(-size // SMALLER) for size in kernel.sizes)


def on(fake: bool) -> torch.device:
    """The device that computes."""
    return torch.device("cpu") if fake else torch.device("cuda", 0)


def wait(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], object], device: torch.device, *, fake: bool) -> float:
    """The median of 5 rounds; each is at least 20 calls or 50 ms."""
    for _ in range(3):
        run()
    wait(device)
    started = time.perf_counter()
    run()
    wait(device)
    calls = 1 if fake else max(20, min(1000, int(0.05 / (time.perf_counter() - started))))
    found = []
    for _ in range(5):
        wait(device)
        started = time.perf_counter()
        for _ in range(calls):
            run()
        wait(device)
        found.append((time.perf_counter() - started) / calls)
    return sorted(found)[2]


def kernels(*, fake: bool) -> dict[str, Any]:
    """Seconds of each of `KERNELS`; of attention forward, and forward and backward together."""
    device, found, dtype = on(fake), {}, torch.float32 if fake else torch.bfloat16
    for kernel in KERNELS:
        sizes = sizes_of(kernel, fake=fake)
        if kernel.kind == "products":
            rows, inner, columns = sizes
            a = torch.randn(rows, inner, device=device, dtype=dtype)
            b = torch.randn(columns, inner, device=device, dtype=dtype)
            found[kernel.name] = [seconds_of(lambda a=a, b=b: a @ b.T, device, fake=fake)]
        elif kernel.kind == "bytes":
            x, y = (torch.randn(sizes, device=device) for _ in range(2))
            found[kernel.name] = [seconds_of(lambda x=x, y=y: x + y, device, fake=fake)]
        else:
            forward, both = _attention(sizes, kernel.causal, device, dtype)
            found[kernel.name] = [seconds_of(each, device, fake=fake) for each in (forward, both)]
    return {"seconds": found}


def _attention(
    sizes: Sequence[int], causal: bool, device: torch.device, dtype: torch.dtype
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Forward, and forward and backward, by the kernel that `model.attention: auto` takes."""
    from vlmpack.attention import choose_attention
    from vlmpack.packing.batch import PackedSeqParams

    slots, length, heads, width = sizes
    cu = torch.arange(0, slots + 1, length, dtype=torch.int32, device=device)
    params = PackedSeqParams(
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=length,
        max_seqlen_kv=length,
        segment_lengths=(length,) * (slots // length),
    )
    attend = choose_attention("auto", device=device, dtype=dtype).function
    query, key, value = (
        torch.randn(slots, heads, width, device=device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    grad = torch.randn(slots, heads, width, device=device, dtype=dtype)

    def forward() -> Tensor:
        return attend(query, key, value, params, causal=causal)

    def plain() -> None:
        with torch.no_grad():
            forward()

    def both() -> None:
        torch.autograd.grad(forward(), (query, key, value), grad)

    return plain, both


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step's model folder and samples.

    Args:
        asked: the step.
        folder: config and processor, no weights.
        config: transformers'.
        encoder: of the folder.
        groups: the samples of each micro-batch.
    """

    asked: Any
    folder: Path
    config: Any
    encoder: Any
    groups: list[Any]

    @property
    def tokens(self) -> int:
        """Real ones of a step, of both sequences of a pair."""
        return sum(len(sample.input_ids) for group in self.groups for sample in group)


def prepared(asked: Mapping[str, Any], made: Path) -> Prepared:
    """The samples that the recorder takes, with numbers in them."""
    import operator_step
    from gpu_shapes import SHAPES

    from vlmpack.encode import Encoder

    step = operator_step.Asked(**asked, layers={})
    shape, folder = SHAPES[step.shape], made / "model"
    config = operator_step.write_folder(shape, folder)
    encoder = Encoder(folder)
    samples = operator_step.drawn_samples(shape, encoder, 300)
    groups = operator_step.groups_of(step, samples)
    draw = torch.Generator().manual_seed(0)
    filled = [[with_numbers(sample, encoder, draw) for sample in group] for group in groups]
    return Prepared(step, folder, config, encoder, filled)


def with_numbers(sample: Any, encoder: Any, draw: torch.Generator) -> Any:
    """Random ids and pixels, placeholders where an image's features go."""
    known = [one for one in range(200) if one not in encoder.placeholder_ids]
    text = torch.tensor(known)
    ids = text[torch.randint(len(known), sample.input_ids.shape, generator=draw)]
    media = sample.media
    if media is not None:
        ids[sample.media_positions] = encoder.placeholder_id
        pixels = torch.randn(media.pixel_values.shape, generator=draw)
        media = replace(media, pixel_values=pixels)
    labels = sample.labels.clone()
    taught = labels != -100
    labels[:-1][taught[:-1]] = ids[1:][taught[:-1]]  # what comes next
    return replace(sample, input_ids=ids, labels=labels, media=media)


def random_model(config: Any, device: torch.device, **options: Any) -> Any:
    """transformers' class with random weights, float32 numbers that bfloat16 holds as well."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    sees = hasattr(config, "vision_config")
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    torch.manual_seed(0)
    with device:
        model = kind.from_config(deepcopy(config), dtype=torch.float32, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def step(asked: Mapping[str, Any], *, fake: bool) -> dict[str, Any]:
    """Steps of the hf engine, and the first one's loss against its samples one by one."""
    import operator_step
    from support.engines import make_stepper

    import vlmpack.backends.hf.engine as hf
    from vlmpack.recipe.objective import ObjectiveSection
    from vlmpack.training.objective import SFT
    from vlmpack.training.preference import dpo

    device = on(fake)
    with tempfile.TemporaryDirectory() as made:
        given = prepared(asked, Path(made))
        with patch.object(hf, "load_model", lambda _: random_model(given.config, device)):
            engine = operator_step.engine_of_step(
                given.asked, given.folder, given.encoder, device, "float32" if fake else "bfloat16"
            )
        alone = [[sample] for group in given.groups for sample in group]
        rows, singles = (
            operator_step.micro_batches(given.asked, given.encoder, groups)
            for groups in (given.groups, alone)
        )
        objective = dpo(ObjectiveSection(name="dpo")) if given.asked.pairs else SFT
        stepper = make_stepper(engine, objective=objective)
        together, one_by_one = (stepper.evaluate(part).loss for part in (rows, singles))
        assert together is not None and one_by_one is not None, "the step has no label token"

        def train(number: int) -> float:
            sums, _ = stepper.train(number, rows, num_skipped=0, stop=False)
            assert sums.loss is not None
            return sums.loss

        figures = timed(train, device, fake=fake)
    return {
        **figures,
        "tokens": given.tokens,
        "loss_difference": abs(together - one_by_one) / abs(one_by_one),
        "description": engine.description,
    }


def timed(train: Callable[[int], float], device: torch.device, *, fake: bool) -> dict[str, Any]:
    """Seconds of each step behind the first ones, their losses, and the peak of memory."""
    losses: list[float] = []
    for number in range(WARM_UP):
        losses.append(train(number))
    wait(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds: list[float] = []
    while len(seconds) < (FAKE_STEPS if fake else STEPS) and sum(seconds) < SECONDS:
        started = time.perf_counter()
        losses.append(train(len(losses)))
        wait(device)
        seconds.append(time.perf_counter() - started)
    return {"step_seconds": seconds, "losses": losses, "peak": _peak(device)}


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def stock_row(samples: Sequence[Any], pad: int | None) -> dict[str, Tensor]:
    """Arguments of transformers' forward for the samples of a micro-batch.

    Args:
        pad: id of padding, for a row for each sample. None for one row of all of them, whose
            samples follow from the positions that begin anew.
    """
    width = max(len(sample.input_ids) for sample in samples)

    def joined(parts: Sequence[Tensor], fill: int) -> Tensor:
        if pad is None:
            return torch.cat(list(parts), dim=-1)[..., None, :]
        grown = [
            torch.nn.functional.pad(part, (0, width - part.shape[-1]), value=fill) for part in parts
        ]
        return torch.stack(grown, dim=-2)

    # transformers shifts the labels itself.
    labels = [
        torch.cat([sample.labels.new_tensor([-100]), sample.labels[:-1]]) for sample in samples
    ]
    positions = [
        torch.cat([torch.arange(sample.length)[None], sample.position_ids]) for sample in samples
    ]
    found = {
        "input_ids": joined([sample.input_ids for sample in samples], pad or 0),
        "labels": joined(labels, -100),
        "position_ids": joined(positions, 0),
    }
    if pad is not None:
        found["position_ids"] = found["position_ids"][1:]
        found["attention_mask"] = joined([torch.ones_like(s.input_ids) for s in samples], 0)
    media = [sample.media for sample in samples if sample.media is not None]
    if media:
        found["pixel_values"] = torch.cat([each.pixel_values for each in media])
        found["image_grid_thw"] = torch.tensor([grid for each in media for grid in each.grid_thw])
    return found


def trainer(
    asked: Mapping[str, Any], *, attention: str, liger: bool = False, fake: bool
) -> dict[str, Any]:
    """Steps of transformers' Trainer on the samples of a step, packed or padded.

    Args:
        attention: transformers' name of it.
        liger: whether the Trainer takes liger's kernels.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    device = on(fake)
    with tempfile.TemporaryDirectory() as made:
        given = prepared(asked, Path(made))
        model = random_model(given.config, device, attn_implementation=attention)
        if given.asked.language == "lora":
            model = _with_adapters(model, given.encoder)
        pad = given.encoder.pad_token_id if given.asked.padded else None
        rows = [stock_row(group, pad) for group in given.groups]
        most = WARM_UP + (FAKE_STEPS if fake else STEPS)
        clock = _Clock(device)

        class Told(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                clock.begin()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                control.should_training_stop |= clock.end()

        class InOrder(Trainer):
            def _get_train_sampler(self, *_: Any) -> Any:
                return torch.utils.data.SequentialSampler(rows * most)

        arguments = TrainingArguments(
            output_dir=str(Path(made) / "run"),
            per_device_train_batch_size=1,
            gradient_accumulation_steps=len(rows),
            max_steps=most,
            learning_rate=2e-4,
            lr_scheduler_type="constant",
            weight_decay=0.01,
            adam_beta2=0.95,
            bf16=not fake,
            gradient_checkpointing=given.asked.recompute == "full",
            use_liger_kernel=liger,
            use_cpu=fake,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        run = InOrder(
            model=model,
            args=arguments,
            train_dataset=rows * most,
            data_collator=lambda batch: batch[0],
            callbacks=[Told()],
        )
        # The class says no, and would have micro-batches weigh alike whatever labels they have.
        run.model_accepts_loss_kwargs = True
        run.train()
    losses = [row["loss"] for row in run.state.log_history if "loss" in row]
    return {
        "step_seconds": clock.seconds[WARM_UP:],
        "losses": losses,
        "peak": _peak(device),
        "tokens": given.tokens,
        "description": {"engine": "transformers Trainer", "attention": attention},
    }


def _with_adapters(model: Any, encoder: Any) -> Any:
    """peft's adapters beside the linear layers of the language model, and nothing else trained."""
    from peft import LoraConfig, get_peft_model

    from vlmpack.recipe.trainable import LoraSection

    section, language = LoraSection(), encoder.family.modules.language
    targets = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.startswith(f"{language}.")
    ]
    config = LoraConfig(r=section.rank, lora_alpha=int(section.alpha), target_modules=targets)
    model.enable_input_require_grads()
    return get_peft_model(model, config)


class _Clock:
    """Seconds of steps; `end` says whether there were enough."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: list[float] = []
        self.started = 0.0

    def begin(self) -> None:
        wait(self.device)
        if len(self.seconds) == WARM_UP and self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.started = time.perf_counter()

    def end(self) -> bool:
        wait(self.device)
        self.seconds.append(time.perf_counter() - self.started)
        return sum(self.seconds[WARM_UP:]) > SECONDS


KINDS: dict[str, Callable[..., dict[str, Any]]] = {
    "kernels": kernels,
    "step": step,
    "trainer": trainer,
}


def main() -> None:
    """Answer with one JSON object."""
    warnings.simplefilter("ignore")
    given = json.loads(sys.argv[1])
    print(json.dumps(KINDS[given.pop("kind")](**given)))


if __name__ == "__main__":
    main()
