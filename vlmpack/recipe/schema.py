"""The recipe: every knob of a run, its meaning and its unit, as frozen, strict models.

The string under each field is its documentation; `vlmpack recipe schema` hands it to editors.
What can be computed is not a field (see `derived.py`); what spans two sections is a rule (see
`rules.py`). Recipes are built by `load_recipe`, which checks both.

What the recipe knows of each packing mode is plain facts (`FACTS`), for its rules, the run's
identity and those who describe a run. `vlmpack/data/modes.py` says how rows are cut and made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from vlmpack.capabilities.limits import Feature
from vlmpack.recipe.data import DataSection, ImagesSection
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.recipe.sources import Count, Section, as_tuple, one_of
from vlmpack.recipe.trainable import OptimSection, TrainableSection

ModeName = Literal["none", "in_batch", "online", "offline"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeFacts:
    """What the recipe knows of one mode."""

    feature: Feature | None
    """The column of the capability table that it falls under; None for padded rows."""

    pads: bool = False
    """Whether rows are padded, one a sample; else samples share rows."""

    plans_rows: bool = False
    """Whether rows are planned by a token budget: a micro-batch is then one row, and the fields of
    the section that describe planned rows mean something."""

    reads_packs: bool = False
    """Whether the rows are saved ones, in the folder `packing.path`."""

    least_samples: int = 1
    """Samples that a micro-batch has at least."""

    identity: tuple[str, ...] = ("mode",)
    """Fields of the section that a run cannot change on the way."""


_PLANNED = ("mode", "max_tokens", "max_vision_patches", "max_sequences", "scope")

FACTS: Mapping[ModeName, ModeFacts] = {
    "none": ModeFacts(feature=None, pads=True),
    "in_batch": ModeFacts(feature="in_batch", least_samples=2),
    "online": ModeFacts(feature="online", plans_rows=True, identity=_PLANNED),
    "offline": ModeFacts(feature="offline", plans_rows=True, reads_packs=True, identity=_PLANNED),
}


class CheckpointSection(Section):
    """When the run's state is saved, and whether a run continues from it."""

    interval_steps: Count | None = None
    """Optimizer steps between two checkpoints. Null: only at the end and on SIGTERM."""

    keep: Count = 2
    """Newest checkpoints that stay on disk."""

    asynchronous: bool = False
    """Copy the state and write it while training goes on; needs host memory for a copy of each
    process's share. The last checkpoint, and the one on SIGTERM, are always waited for."""

    resume: Literal["auto", "never", "required"] = "auto"
    """`auto`: continue from the run folder's newest checkpoint if it has one; `never`: start
    anew; `required`: stop if there is none."""

    on_data_change: Literal["refuse", "new_era"] = "refuse"
    """A resume with other shards, rewritten ones, or other weights: stop with the differences, or
    go on with the new data from the next global batch, as a new era that begins an epoch."""


class ExportSection(Section):
    """The finetuned model as a transformers folder, at the end of the run."""

    enabled: bool = True
    """Write it."""

    weights: Literal["last", "best"] = "last"
    """Those of the last step, or those of the best one by `evaluation.best`, which the questions
    are then answered with after training too. `vlmpack export` takes the same."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the exported weights. `auto`: as in the folder `model.path`."""


Recomputed = Literal["none", "selective", "full"] | int
"""What is computed again in the backward pass; a number n: every n-th layer."""


def _no_bool(value: object) -> object:
    """A bool would be taken for the number 0 or 1."""
    if isinstance(value, bool):
        raise ValueError("expected none, selective, full, auto, or n for every n-th layer")
    return value


Recomputation = Annotated[
    Literal["none", "selective", "full", "auto"] | Annotated[int, Field(ge=1)],
    BeforeValidator(_no_bool),
]


def is_recomputed(place: int, value: Recomputed) -> bool:
    """Whether a layer is computed again.

    Args:
        place: of the layer among its stack's, from 0.
        value: of the recipe.
    """
    if isinstance(value, int):
        return (place + 1) % value == 0
    return value != "none"


def described(value: Recomputed) -> str:
    """The recipe's value, for the log and the report."""
    if isinstance(value, int):
        return f"one layer in {value}" if value > 1 else "every layer"
    return {"none": "nothing", "selective": "all but matrix products and attention"}.get(
        value, "every layer"
    )


Tracker = Literal[
    "tensorboard", "wandb", "mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab", "trackio"
]


class ModelSection(Section):
    """What is finetuned, and by which engine."""

    path: str = Field(min_length=1, examples=["models/Qwen2.5-VL-3B-Instruct"])
    """Local folder of the model in transformers format: config, tokenizer, processor, weights."""

    adapter: str | None = Field(default=None, min_length=1, examples=["runs/lora/adapter"])
    """Folder of adapters in peft's format that training goes on with; `trainable.lora` says the
    same of them. Null: new ones, which begin without effect."""

    backend: Literal["hf", "mcore"] = "hf"
    """Engine: `hf` (transformers + accelerate, any device) or `mcore` (megatron-core)."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type. `auto`: bfloat16 on CUDA, float32 on CPU."""

    attention: Literal["auto", "segments", "torch_varlen", "flash_attn", "transformer_engine"] = (
        "auto"
    )
    """Attention over packed rows: a loop over segments (any device), torch's varlen kernel or
    flash-attn (CUDA), or Transformer Engine's (mcore engine, CUDA). `auto`: the fastest one that
    this machine has; with context parallelism `segments`; Transformer Engine by name, until its
    version is among those that the tests have passed with on a GPU."""

    recurrence: Literal["auto", "torch", "kernels"] = "auto"
    """What runs layers that carry state over packed rows. `torch`: torch's operators (any device).
    `kernels`: flash-linear-attention, causal-conv1d or mamba-ssm (CUDA) for every
    kind of layer that the model has, or an error. `auto`: kernels where one can run, else torch."""

    fused_layers: Literal["auto", "none", "liger", "compile"] = "auto"
    """What runs RMS norms, the activation of gated MLPs and the rotation of queries and keys: the
    model's own code (`none`), liger's kernels (CUDA, `pip install liger-kernel`), or what
    torch.compile makes of the formulas (any device). `auto`: on CUDA liger where it is installed,
    and on the mcore engine Megatron's fused SwiGLU. Modules of another formula keep their own."""

    activation_checkpointing: Recomputation = "none"
    """What is computed again in the backward pass, not kept. `selective`: all but matrix products
    and attention; n: every n-th layer of decoder and tower; `full`: every layer, a third more
    compute. `auto`: the least (n is 4, 3, 2) that by plan's estimate fits 90% of the memory."""

    memory_gib: float | None = Field(default=None, gt=0)
    """What `activation_checkpointing: auto` may count on. Null: what the device at hand has."""

    router_aux_loss_coef: float = Field(default=0.0, ge=0)
    """Mixtures of experts: weight of the load-balancing loss, which is a mean over all tokens of a
    row; beside the mean loss of label tokens it counts tokens / label tokens times. It takes the
    place of `output_router_logits` and `router_aux_loss_coef` in config.json."""

    @property
    def recomputes_what_fits(self) -> bool:
        """Whether the memory decides what is computed again."""
        return self.activation_checkpointing == "auto"

    @property
    def recomputed(self) -> Recomputed:
        """What is computed again; all, where nobody has settled what `auto` is."""
        asked = self.activation_checkpointing
        return "full" if asked == "auto" else asked

    def settled(self, auto: Literal["float32", "bfloat16"]) -> ModelSection:
        """With what `dtype: auto` is on the device at hand."""
        return self if self.dtype != "auto" else self.model_copy(update={"dtype": auto})


class PackingSection(Section):
    """How samples share a row."""

    mode: ModeName = "in_batch"
    """`none`: padded rows, the baseline. `in_batch`: the samples of one micro-batch become one
    row. `online`, `offline`: rows planned by a token budget, while training or beforehand."""

    max_tokens: Count | None = None
    """Tokens that a planned row holds at most, each sample's length rounded up to `alignment`.
    Null: `training.seq_length`, rounded up likewise."""

    max_vision_patches: Count | None = None
    """Vision patches that a planned row holds at most: bounds the vision tower's memory and time. A
    sample with more is treated by `data.over_long`. Null: no bound."""

    max_sequences: Count | Literal["auto"] = "auto"
    """Samples that a planned row holds at most. `auto`: from a dry run of the packer (the 99.9th
    percentile, rounded up to a multiple of 8); 32 where shards are indexed as the run goes on."""

    scope: Literal["stream", "batch"] = "stream"
    """Where planned rows are filled, while training or by `vlmpack pack`. `stream`: over one
    shuffle window, and `training.global_batch_size` counts rows. `batch`: inside fixed sets of
    `global_batch_size` samples, so that each optimizer step trains the samples that it would have
    trained unpacked."""

    balance: Literal["none", "cost"] = "cost"
    """Which data-parallel process gets which rows of a global batch. `cost`: whole rows are dealt
    out so that the processes finish together, by the FLOPs of their tokens, their squared lengths
    and their vision patches; the members of the batch stay the same. `none`: in turn."""

    path: str | None = Field(default=None, min_length=1, examples=["packs/first"])
    """Mode `offline`: the folder that `vlmpack pack` wrote."""

    pad_to_max_length: bool = False
    """Planned rows are filled up to exactly `max_tokens` by a tail segment of their own."""

    pad_cu_seqlens: bool = False
    """`cu_seqlens` of planned rows gets exactly `max_sequences` + 2 entries, its last value
    repeated (fixed shapes, for CUDA graphs). Needs `pad_to_max_length`."""

    share_prefix: bool = False
    """Neighbours in a row that begin alike have that once: the prompt and images of a pair, the
    image of several questions. Exact; what may be shared ends behind the images or the prompt."""

    alignment: Count | None = None
    """Planned lengths are rounded up to a multiple of this many tokens, so a run can resume at
    any context parallelism CP whose 2*CP divides it. Null: the multiple of 2*CP from 8 up."""

    @property
    def facts(self) -> ModeFacts:
        """What the mode is."""
        return FACTS[self.mode]

    @property
    def counts_rows(self) -> bool:
        """Whether `training.global_batch_size` counts rows instead of samples."""
        return self.facts.plans_rows and self.scope == "stream"

    @property
    def varies_in_rows(self) -> bool:
        """Whether a step trains a fixed set of samples, in as many rows as they happen to fill."""
        return self.facts.plans_rows and self.scope == "batch"


class ParallelismSection(Section):
    """How one model copy is spread over processes: the `mcore` engine's, but for `sharding`. The
    number of copies is derived: world size / (tensor x pipeline x context)."""

    tensor: Count = 1
    """Processes that share each layer's matrices (TP)."""

    pipeline: Count = 1
    """Stages that the layers are divided into (PP)."""

    context: Count = 1
    """Processes that share each row's tokens (CP)."""

    expert: Count = 1
    """Processes that share the experts of a mixture-of-experts layer (EP)."""

    sequence: bool = False
    """Sequence parallelism: shard activations between the tensor-parallel regions."""

    sharding: Literal["none", "fsdp"] = "none"
    """hf engine: `none` keeps a full copy on each process (DDP), `fsdp` shards parameters,
    gradients and optimizer state over the data-parallel processes (FSDP2)."""

    replicate: Count = 1
    """hf engine, `fsdp`: groups of processes with a whole sharded copy each (HSDP); nodes, say."""

    gradient_sync: Literal["step", "micro_batch"] = "step"
    """hf engine, `fsdp`: when gradients are reduce-scattered; they lie whole until then."""

    distributed_optimizer: bool = True
    """mcore engine: shard AdamW's state over the data- and context-parallel processes."""

    overlap: bool | None = None
    """mcore engine: reduce gradients, and gather parameters, beside compute; left out: on CUDA."""

    timeout_seconds: float = Field(default=1800.0, gt=0, le=86400)
    """The longest wait of a process for the others, after which it ends with an error: at launch,
    in the first optimizer step, in validation, saving and export."""

    step_timeout_seconds: float = Field(default=900.0, gt=0, le=86400)
    """The same in every later optimizer step. It includes the wait for another process's data, for
    which 600 seconds are allowed, so a lower one cuts that short."""


class TrainingSection(Section):
    """Batch sizes, length of the run, seed. Set exactly one of `max_steps` and `num_epochs`."""

    micro_batch_size: int = Field(ge=1, examples=[8])
    """Samples per forward pass and process; rows, hence 1, in packing modes `online`, `offline`."""

    global_batch_size: int = Field(ge=1, examples=[64])
    """Samples per optimizer step over all processes; in packing modes `online` and `offline` rows,
    but for `packing.scope: batch`. Gradient accumulation follows from it."""

    seq_length: int = Field(ge=1, examples=[4096])
    """Longest sample, in tokens, image tokens included. See `data.over_long`."""

    max_steps: Count | None = None
    """Length of the run in optimizer steps."""

    num_epochs: Count | None = None
    """Length of the run in passes over the training data."""

    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of the sample order and of every random number of the run."""

    cuda_graphs: Literal["none", "decoder"] = "none"
    """`decoder`: CUDA graphs replay the decoder of planned rows, filled up to `packing.max_tokens`;
    what is trained stays the same. On a CPU: to try it, not to be fast."""

    cuda_graph_max_sequences: Count | Literal["auto"] = "auto"
    """Samples up to which a row fits the graph; a row of more runs without, and is counted. `auto`:
    the fullest row of a dry run of the packer, rounded up to a multiple of 8."""

    verify: bool = False
    """Before the first step, do what `vlmpack verify` does, on 8 samples in float32, and stop if
    packed samples do not compute what each computes alone. Loads the model twice more."""


METRIC_NAMES = ("exact_match", "characters", "contains", "anls", "relaxed_accuracy")
"""Metrics of answers that are there without a program's; `evaluation.metrics` has their code."""
MetricName = Annotated[
    str,
    AfterValidator(one_of(METRIC_NAMES)),
    WithJsonSchema({"type": "string", "enum": [*METRIC_NAMES]}),
]


class EvaluationSection(Section):
    """Validation loss on the way; generation-based evaluation before and after."""

    interval_steps: Count | None = None
    """Optimizer steps between two validation losses. Null: only at the end."""

    max_samples: Count | None = None
    """Validation samples per loss, the first ones of the split. Null: all."""

    generate: bool = False
    """Answer the questions of `data.test` before and after training, and score the answers."""

    generate_interval_steps: Count | None = None
    """Optimizer steps between two such evaluations on the way. Null: none."""

    best: str | None = Field(default=None, min_length=1, examples=["validation_loss"])
    """Which figure says what the best step is: `validation_loss`, or one of `metrics`. The
    checkpoint of that step is kept beside the newest ones. Null: none is."""

    patience: Count | None = None
    """Evaluations of `best` in a row without a better one after which the run stops. Null: it takes
    all its steps."""

    metrics: Annotated[
        tuple[MetricName, ...],
        BeforeValidator(as_tuple),
        Field(min_length=1),
    ] = ("exact_match",)
    """What the answers are scored by. `exact_match`: share of answers that are the true one.
    `characters`: share of the true answers' characters in their place, in questions whose task is
    `read` or that have none. `contains`: share of answers in which the true one stands. `anls`:
    DocVQA's similarity. `relaxed_accuracy`: ChartQA's, numbers within 5%. `python:NAME`: a metric
    that a program hands to `vlmpack.finetune`."""

    generate_max_samples: Count | None = None
    """Test samples that are answered, the first ones of the split. Null: all."""

    max_new_tokens: Count = 64
    """Longest generated answer, in tokens."""

    batch_size: Count = 16
    """Samples per forward pass and process, for the loss and for generation."""


class LoggingSection(Section):
    """What is shown and recorded while training."""

    interval_steps: Count = 10
    """Optimizer steps between two lines of plain progress and between two points in trackers.
    `metrics.jsonl` has every step."""

    trackers: Annotated[tuple[Tracker, ...], BeforeValidator(as_tuple)] = ("tensorboard",)
    """Experiment trackers, beside `metrics.jsonl`. All but tensorboard need their own package."""

    project: str = Field(default="vlmpack", min_length=1)
    """Project that trackers file the run under; MLflow's experiment."""

    name: str | None = Field(default=None, min_length=1)
    """The run's name there. Null: that of the run folder."""

    tags: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = ()
    """The run's tags there."""

    group: str | None = Field(default=None, min_length=1)
    """Group of runs that it belongs to there; a tag of MLflow."""

    offline: bool = False
    """W&B, SwanLab and MLflow write to `tracking` in the run folder and send nothing. False: as
    their own settings and environment variables say."""

    tracker_seconds: float = Field(default=60.0, ge=1, le=3600)
    """How long a launch waits for trackers to start, and the end of a run for them to finish. A
    tracker that takes longer is named, and keeps nothing waiting."""

    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    """Progress display. `auto`: `rich` on a terminal, `plain` lines elsewhere."""

    watch_seconds: float = Field(default=60.0, ge=1, le=86400)
    """The longest silence while nothing moves: by then a line says what is waited for, and which
    process, loader or store keeps the others waiting."""


class Recipe(Section):
    """Everything that defines a run. Build it with `load_recipe`, which also checks the rules."""

    model: ModelSection
    data: DataSection
    images: ImagesSection = ImagesSection()
    packing: PackingSection = PackingSection()
    parallelism: ParallelismSection = ParallelismSection()
    training: TrainingSection
    trainable: TrainableSection = TrainableSection()
    objective: ObjectiveSection = ObjectiveSection()
    optim: OptimSection
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    logging: LoggingSection = LoggingSection()
    export: ExportSection = ExportSection()
    run_dir: str = Field(min_length=1, examples=["runs/first"])
    """Folder for everything the run writes. Relative paths start at the current directory."""
