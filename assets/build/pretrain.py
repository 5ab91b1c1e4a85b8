"""Pretraining on rendered type: the model learns the task's form, never a handwritten digit.

First the vision tower alone learns to tell which digit stands where (localise.py); then the whole
model learns to answer, along a curriculum: short rows first, then longer ones and several images.
Rows are drawn on the fly, so no sample comes twice. Batches are small on purpose: early progress
depends on the number of steps far more than on the samples in each. A run that was cut goes on from
its last checkpoint, to the same weights.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import AutoTokenizer, PreTrainedModel

from assets.build import questions
from assets.build.encode import Encoder, Sample
from assets.build.localise import LocalisationLoss, RowMarks
from assets.build.model import Shape, make_config, make_model, write_model, write_processors
from assets.build.rows import Row, RowStyle, draw
from assets.build.typeface import glyph_bank

MAX_MORE_TURNS = 6
# Samples of this many steps are drawn together and sorted by length: less padding.
STEPS_PER_DRAW = 4
# The language model's layer that must know to which image a token belongs.
INDEX_LAYER = 0
CHECKPOINT = "pretraining.pt"
"""What a run that was cut goes on from; in the model's folder, and gone when it is done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainConfig:
    """Everything that shapes the run."""

    seed: int = 1
    tower_steps: int = 1200
    """Steps of the vision tower alone."""
    steps: int = 4800
    """All steps, the tower's included."""
    tower_batch_size: int = 8
    batch_size: int = 8
    learning_rate: float = 1.3e-3
    final_learning_rate: float = 1e-4
    warmup_steps: int = 60
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.98)
    max_grad_norm: float = 1.0
    localisation_weight: float = 0.5
    """Weight of the localisation loss once the whole model trains."""
    glyphs_per_digit: int = 1500
    log_every: int = 50
    checkpoint_every: int = 200


@dataclass(frozen=True, slots=True)
class Stage:
    """What may be asked from this share of the whole model's steps on."""

    start: float
    max_length: int
    tasks: tuple[str, ...]
    max_images: int


ALL_TASKS = ("read", "read", "count", "largest", "compare")
CURRICULUM = (
    Stage(0.00, 3, ("read",), 1),
    Stage(0.05, 5, ALL_TASKS, 2),
    Stage(0.12, 8, ALL_TASKS, 3),
)


class TypeSampler:
    """Draws training samples of type."""

    def __init__(self, bank: list[list[np.ndarray]], rng: np.random.Generator) -> None:
        self.bank = bank
        self.rng = rng
        self.style = RowStyle()

    def sample(self, progress: float) -> Sample:
        """One sample of the stage that `progress` (0..1) has reached."""
        rng = self.rng
        stage = [s for s in CURRICULUM if s.start <= progress][-1]
        if rng.random() < 0.06:
            return Sample([], [questions.ask_text(rng)])
        task = questions.pick(rng, stage.tasks)
        if task == "compare":
            num_images = int(rng.integers(2, stage.max_images + 1))
        else:
            num_images = 1 if rng.random() < 0.6 else int(rng.integers(1, stage.max_images + 1))
        lengths = rng.integers(1, stage.max_length + 1, size=num_images)
        rows = [questions.draw_row(rng, int(n), task) for n in lengths]
        more = int(rng.integers(1, MAX_MORE_TURNS + 1))
        plan = [task, *(questions.pick(rng, stage.tasks) for _ in range(more))]
        if num_images == 1:
            plan = [task for task in plan if task != "compare"]
        turns = questions.conversation(rng, rows, plan)
        drawn = [self.draw(row) for row in rows]
        marks = [RowMarks(row, d.spans) for row, d in zip(rows, drawn, strict=True)]
        return Sample([d.image for d in drawn], turns, marks)

    def row_alone(self) -> Sample:
        """One row of any length, to be localised; its question is not used."""
        row = questions.draw_row(self.rng, int(self.rng.integers(1, 9)), "read")
        drawn = self.draw(row)
        turn = questions.Turn(questions.IMAGE_MARK, "")
        return Sample([drawn.image], [turn], [RowMarks(row, drawn.spans)])

    def draw(self, row: list[int]) -> Row:
        """A row of type; each digit in a font and distortion of its own."""
        glyphs = [self.bank[d][int(self.rng.integers(len(self.bank[d])))] for d in row]
        return draw(glyphs, self.rng, self.style)


def rough_length(sample: Sample) -> int:
    """A number that grows with the sample's token length."""
    text = sum(len(turn.prompt) // 5 + len(turn.answer) + 8 for turn in sample.turns)
    return text + sum(image.width * image.height // 784 for image in sample.images)


class TypeBatches(Dataset[dict[str, torch.Tensor]]):
    """Batch of step i, a function of (seed, i) alone, so that a worker may draw it ahead."""

    def __init__(self, encoder: Encoder, config: PretrainConfig) -> None:
        self.encoder = encoder
        self.config = config
        self.bank = glyph_bank(config.glyphs_per_digit, config.seed)
        self.drawn: tuple[int, list[list[Sample]]] = (-1, [])

    def __len__(self) -> int:
        return self.config.steps

    def draw(self, index: int) -> list[list[Sample]]:
        """The batches of `STEPS_PER_DRAW` consecutive steps, each of similar lengths."""
        config, first = self.config, index * STEPS_PER_DRAW
        rng = np.random.default_rng([config.seed, index])
        sampler = TypeSampler(self.bank, rng)
        if first < config.tower_steps:
            size = config.tower_batch_size
            samples = [sampler.row_alone() for _ in range(size * STEPS_PER_DRAW)]
        else:
            size = config.batch_size
            progress = (first - config.tower_steps) / (config.steps - config.tower_steps)
            samples = [sampler.sample(progress) for _ in range(size * STEPS_PER_DRAW)]
        samples.sort(key=rough_length)
        starts = rng.permutation(STEPS_PER_DRAW) * size
        return [samples[start : start + size] for start in starts]

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        index, offset = divmod(step, STEPS_PER_DRAW)
        if self.drawn[0] != index:
            self.drawn = (index, self.draw(index))
        return self.encoder.batch(self.drawn[1][offset])


def learning_rate(config: PretrainConfig, step: int) -> float:
    """Linear warm-up (again where the whole model starts), flat, then cosine to the final value."""
    since = step if step < config.tower_steps else step - config.tower_steps
    if since < config.warmup_steps:
        return config.learning_rate * (since + 1) / config.warmup_steps
    start = config.tower_steps + (config.steps - config.tower_steps) // 3
    done = max(0.0, (step - start) / (config.steps - start))
    low = config.final_learning_rate
    return low + (config.learning_rate - low) * 0.5 * (1 + math.cos(math.pi * done))


def step_losses(
    model: PreTrainedModel,
    localisation: LocalisationLoss,
    batch: dict[str, torch.Tensor],
    tower_only: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(answer loss, localisation loss); the mean is over the batch's label tokens."""
    targets = batch.pop("token_targets", None)
    if tower_only:
        model.model.visual(batch["pixel_values"], grid_thw=batch["image_grid_thw"])
        return torch.zeros(()), localisation(targets, None)
    answer = model(**batch, use_cache=False).loss
    if targets is None:
        return answer, torch.zeros(())
    return answer, localisation(targets, batch["mm_token_type_ids"] == 1)


class Run:
    """What changes from step to step, and its checkpoint.

    Args:
        model: to be trained.
        localisation: the heads of its loss.
        config: of the run.
        path: of the checkpoint, which is read where it is there.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        localisation: LocalisationLoss,
        config: PretrainConfig,
        path: Path,
    ) -> None:
        self.model, self.localisation, self.path = model, localisation, path
        self.optimizer = torch.optim.AdamW(
            [*model.parameters(), *localisation.parameters()],
            betas=config.betas,
            weight_decay=config.weight_decay,
        )
        self.step = 0
        if path.exists():
            state = torch.load(path, weights_only=True)
            for name, part in self.parts().items():
                part.load_state_dict(state[name])
            self.step = state["step"]

    def parts(self) -> dict[str, Any]:
        """What a checkpoint holds, by name."""
        return {
            "model": self.model,
            "localisation": self.localisation,
            "optimizer": self.optimizer,
        }

    def save(self) -> None:
        """Write the checkpoint, at once or not at all."""
        state = {name: part.state_dict() for name, part in self.parts().items()}
        half = self.path.with_suffix(".part")
        torch.save(state | {"step": self.step}, half)
        half.replace(self.path)


def train(model: PreTrainedModel, encoder: Encoder, config: PretrainConfig, path: Path) -> None:
    """The loop over both phases, one optimizer; `path` is that of the checkpoint."""
    layer = model.model.language_model.layers[INDEX_LAYER]
    width = model.config.vision_config.out_hidden_size
    localisation = LocalisationLoss(model.model.visual, layer, width)
    run = Run(model, localisation, config, path)
    batches = Subset(TypeBatches(encoder, config), range(run.step, config.steps))
    started, sums = time.time(), np.zeros(2)
    model.train()
    for batch in DataLoader(batches, batch_size=None, num_workers=1):
        tower_only = run.step < config.tower_steps
        for group in run.optimizer.param_groups:
            group["lr"] = learning_rate(config, run.step)
        answer, located = step_losses(model, localisation, batch, tower_only)
        weight = 1.0 if tower_only else config.localisation_weight
        run.optimizer.zero_grad()
        (answer + weight * located).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        run.optimizer.step()
        run.step += 1
        sums += [answer.item(), located.item()]
        if run.step % config.log_every == 0:
            mean = sums / config.log_every
            seconds = time.time() - started
            print(
                f"step {run.step} answer {mean[0]:.4f} localisation {mean[1]:.4f} {seconds:.0f} s",
                flush=True,
            )
            sums[:] = 0
        if run.step % config.checkpoint_every == 0:
            run.save()
    localisation.remove_hooks()


def pretrain(shape: Shape, folder: Path, config: PretrainConfig | None = None) -> None:
    """Initialise, train on type and write the model next to its tokenizer in `folder`."""
    config = config or PretrainConfig()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = make_model(make_config(tokenizer, shape), shape, config.seed)
    train(model, Encoder(tokenizer), config, folder / CHECKPOINT)
    write_processors(folder, shape)
    write_model(model, shape, folder)
    (folder / CHECKPOINT).unlink(missing_ok=True)
