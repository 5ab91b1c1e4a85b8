"""The recipe: every knob of a run, its meaning and its unit, as frozen, strict models.

The string under each field is its documentation. `vlmpack recipe schema` hands it to editors. A
value that can be computed is no field (`derived.py`). A condition on two sections is a rule
(`rules.py`). `load_recipe` builds recipes and checks fields and rules.

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

    shares_prefixes: bool = True
    """Whether `packing.share_prefix` means something."""

    least_samples: int = 1
    """Samples that a micro-batch has at least."""

    identity: tuple[str, ...] = ("mode",)
    """Fields of the section that a run cannot change on the way."""


_PLANNED = ("mode", "max_tokens", "max_vision_patches", "max_sequences", "scope")

FACTS: Mapping[ModeName, ModeFacts] = {
    "none": ModeFacts(feature=None, pads=True, shares_prefixes=False),
    "in_batch": ModeFacts(feature="in_batch", least_samples=2),
    "online": ModeFacts(feature="online", plans_rows=True, identity=_PLANNED),
    "offline": ModeFacts(feature="offline", plans_rows=True, reads_packs=True, identity=_PLANNED),
}


class CheckpointSection(Section):
    """When the run's state is saved, and whether a run continues from it."""

    interval_steps: Count | None = None
    """Optimizer steps between two checkpoints. If null, the run saves only at the end and on
    SIGTERM."""

    keep: Count = 2
    """How many of the newest checkpoints stay on disk."""

    asynchronous: bool = False
    """Copy the state and write it while training goes on. This needs host memory for a copy of each
    process's part of the state. A run always waits for its last checkpoint, and for the one on
    SIGTERM."""

    resume: Literal["auto", "never", "required"] = "auto"
    """`auto` continues from the newest checkpoint of the run folder if there is one. `never` starts
    anew. `required` stops if there is none."""

    on_data_change: Literal["refuse", "new_era"] = "refuse"
    """What a resume does if it finds other shards, rewritten shards or other weights. `refuse`
    stops and lists the differences. `new_era` goes on with the new data from the next global batch.
    The new era begins an epoch."""


class ExportSection(Section):
    """The finetuned model as a transformers folder, written at the end of the run."""

    enabled: bool = True
    """Write the folder."""

    weights: Literal["last", "best"] = "last"
    """`last` exports the weights of the last step. `best` exports those of the best step by
    `evaluation.best`, and after training the test questions are answered with them too. `vlmpack
    export` takes the same weights."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the exported weights. `auto` keeps the type in the folder `model.path`."""


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
    """Local folder of the model in transformers format, with config, tokenizer, processor and
    weights."""

    adapter: str | None = Field(default=None, min_length=1, examples=["runs/lora/adapter"])
    """Folder of adapters in peft's format to continue training from. What `trainable.lora` leaves
    out is as they have it, and the rest must agree. If null, training starts with new adapters,
    which have no effect at first."""

    backend: Literal["hf", "mcore"] = "hf"
    """The engine. `hf` is transformers with accelerate and runs on any device. `mcore` is
    megatron-core."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type. `auto` is bfloat16 on CUDA and float32 on CPU."""

    attention: Literal[
        "auto",
        "segments",
        "torch_varlen",
        "flash_attn",
        "flash_attn_3",
        "flash_attn_4",
        "transformer_engine",
    ] = "auto"
    """Attention over packed rows. `segments` is a loop over segments and runs on any device.
    `torch_varlen` is torch's kernel and `flash_attn` is flash-attn's, both for CUDA.
    `flash_attn_3` and `flash_attn_4` are its next versions, from their packages or from files that
    the package `kernels` finds on this machine. No GPU has run them yet, so `auto` takes neither.
    `transformer_engine` needs CUDA and the mcore engine. `auto` takes the fastest one that this
    machine has, or `segments` with context parallelism on the mcore engine. It takes Transformer
    Engine only in versions that have passed the tests on a GPU."""

    recurrence: Literal["auto", "torch", "kernels"] = "auto"
    """What runs layers that carry state over packed rows. `torch` uses torch's operators on any
    device. `kernels` uses flash-linear-attention, causal-conv1d or mamba-ssm on CUDA. It is an
    error if one kind of layer in the model has no kernel. `auto` uses kernels where one can run,
    and torch elsewhere."""

    fused_layers: Literal["auto", "none", "liger", "compile"] = "auto"
    """What runs RMS norms, the activation of gated MLPs and the rotation of queries and keys.
    `none` is the model's own code. `auto` takes kernels of this package for norms and rotations on
    CUDA, liger's for activations if it is installed (`pip install liger-kernel`), and Megatron's
    fused SwiGLU on the mcore engine. `liger` is the same, and an error without liger. `compile`
    runs on any device, and torch.compile makes the activations. Modules with another formula keep
    their own code."""

    compile: Literal[False, "layers"] = False
    """For the hf engine. `layers` has torch.compile make one code object for each kind of layer,
    which fuses norms, activations and rotations. `activation_checkpointing: selective` then leaves
    to the compiler what is kept, and `vlmpack plan` counts as if all were. The first step takes
    minutes. It is off by default, since no GPU has run it."""

    activation_checkpointing: Recomputation = "auto"
    """What the backward pass computes again instead of keeping it. `selective` recomputes all but
    matrix products and attention. A number n recomputes every n-th layer of decoder and tower.
    `full` recomputes every layer, which costs a third more compute. `auto` recomputes the least
    that fits 90% of the free memory by plan's estimate, and tries 4, 3 and 2 for n. A launch logs
    what it took."""

    activation_offloading: bool = False
    """For the hf engine on CUDA; a launch on a CPU refuses it. Inputs of layers that are computed
    again wait for the backward pass in pinned host memory. They are copied while the layers beside
    them run."""

    tiled_mlp: bool = False
    """For the hf engine. MLPs of the decoder are computed in tiles of tokens, of which the backward
    pass runs one at a time again. This helps rows of which a process holds more tokens than the
    model is wide."""

    memory_gib: float | None = Field(default=None, gt=0)
    """Memory that `activation_checkpointing: auto` may count on. If null, what is free on the
    device at hand."""

    router_aux_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss in mixtures of experts. That loss is a mean over all tokens
    of a row, while the main loss is a mean over label tokens. Beside the main loss it therefore
    counts tokens / label tokens times. It replaces `output_router_logits` and
    `router_aux_loss_coef` of config.json."""

    @property
    def recomputes_what_fits(self) -> bool:
        """Whether the memory decides what is computed again."""
        return self.activation_checkpointing == "auto"

    @property
    def recomputed(self) -> Recomputed:
        """What is computed again; nothing, where nobody has resolved `auto`, and where a compiler
        chooses."""
        asked = self.activation_checkpointing
        if asked == "auto" or (asked == "selective" and self.compile):
            return "none"
        return asked

    def resolved(self, auto: Literal["float32", "bfloat16"]) -> ModelSection:
        """With what `dtype: auto` is on the device at hand."""
        return self if self.dtype != "auto" else self.model_copy(update={"dtype": auto})


class PackingSection(Section):
    """How samples share a row."""

    mode: ModeName = "in_batch"
    """`none` pads rows and is the baseline. `in_batch` makes one row of the samples of a
    micro-batch. `online` plans rows by a token budget while training, `offline` beforehand."""

    max_tokens: Count | None = None
    """Most tokens in a planned row, with each sample's length rounded up to `alignment`. If null,
    `training.seq_length`, rounded up likewise."""

    max_vision_patches: Count | None = None
    """Most vision patches in a planned row. It bounds the vision tower's memory and time.
    `data.over_long` decides about a sample with more. If null, there is no bound."""

    max_sequences: Count | Literal["auto"] = "auto"
    """Most samples in a planned row. `auto` takes the 99.9th percentile of a dry run of the packer,
    rounded up to a multiple of 8. It is 32 if shards are indexed as the run goes on."""

    scope: Literal["stream", "batch"] = "stream"
    """Where planned rows are filled, while training or by `vlmpack pack`. `stream` fills them over
    one shuffle window, and `training.global_batch_size` counts rows. `batch` fills them inside
    fixed sets of `global_batch_size` samples. Each optimizer step then trains the samples that it
    would have trained unpacked."""

    balance: Literal["none", "cost"] = "cost"
    """Which data-parallel process gets which rows of a global batch. `cost` deals out whole rows so
    that the processes finish together. It counts the FLOPs of their tokens, their squared lengths
    and their vision patches. The members of the batch stay the same. `none` deals them out in
    turn."""

    path: str | None = Field(default=None, min_length=1, examples=["packs/first"])
    """For mode `offline`, the folder that `vlmpack pack` wrote."""

    pad_to_max_length: bool = False
    """Fill planned rows up to exactly `max_tokens` with a separate tail segment."""

    pad_cu_seqlens: bool = False
    """Give `cu_seqlens` of planned rows exactly `max_sequences` + 2 entries by repeating the last
    value. CUDA graphs need such fixed shapes. Needs `pad_to_max_length`."""

    share_prefix: bool = False
    """Neighbours in a row that begin alike hold that prefix once. Examples are the prompt and
    images of a pair, and the image of several questions. The result is exact. A shared prefix ends
    behind the images or the prompt."""

    alignment: Count | None = None
    """Planned lengths are rounded up to a multiple of this many tokens. A run can then resume at
    any context parallelism CP whose 2*CP divides it. If null, the smallest multiple of 2*CP from 8
    up."""

    @property
    def facts(self) -> ModeFacts:
        """What the mode is."""
        return FACTS[self.mode]

    @property
    def counts_rows(self) -> bool:
        """Whether `training.global_batch_size` counts rows instead of samples."""
        return self.facts.plans_rows and self.scope == "stream"

    @property
    def packs_by_batch(self) -> bool:
        """Whether a step trains a fixed set of samples, in as many rows as they happen to fill."""
        return self.facts.plans_rows and self.scope == "batch"


class ParallelismSection(Section):
    """How one model copy is spread over processes. The `hf` engine takes `sharding` and `context`.
    The number of copies follows as world size / (tensor x pipeline x context)."""

    tensor: Count = 1
    """Processes that share each layer's matrices (TP)."""

    pipeline: Count = 1
    """Stages that the layers are divided into (PP)."""

    context: Count = 1
    """Processes that share each row's tokens (CP). On the hf engine they exchange heads for
    attention, and those with the same heads are a ring over keys and values."""

    context_heads: Count | None = None
    """For the hf engine. How many neighbours of the processes of a row exchange heads. It divides
    `context` and the query heads of every layer. If null, it is at most the number of key-value
    heads, unless copies of them send less than the ring."""

    expert: Count = 1
    """Processes that share the experts of a mixture-of-experts layer (EP)."""

    sequence: bool = False
    """Sequence parallelism, which shards activations between the tensor-parallel regions."""

    sharding: Literal["none", "fsdp"] = "none"
    """For the hf engine. `none` keeps a full copy on each process (DDP). `fsdp` shards parameters,
    gradients and optimizer state over the data-parallel processes (FSDP2)."""

    replicate: Count = 1
    """For the hf engine with `fsdp`. Number of groups of processes, such as nodes, that hold a
    whole sharded copy each (HSDP)."""

    gradient_sync: Literal["step", "micro_batch"] = "step"
    """For the hf engine with `fsdp`. When gradients are reduce-scattered. They are kept whole until
    then."""

    distributed_optimizer: bool = True
    """For the mcore engine. Shard AdamW's state over the data- and context-parallel processes."""

    overlap: bool | None = None
    """For the mcore engine. Reduce gradients and gather parameters during compute. If null, this is
    on with CUDA."""

    timeout_seconds: float = Field(default=1800.0, gt=0, le=86400)
    """Longest wait of a process for the others, after which it ends with an error. It applies at
    launch, in the first optimizer step, in validation, saving and export."""

    step_timeout_seconds: float = Field(default=900.0, gt=0, le=86400)
    """The same in every later optimizer step. It includes the wait for another process's data. That
    wait may take 600 seconds, so a lower value cuts it short."""


class TrainingSection(Section):
    """Batch sizes, length of the run and seed. Set exactly one of `max_steps` and `num_epochs`."""

    micro_batch_size: int = Field(ge=1, examples=[8])
    """Samples per forward pass and process. Packing modes `online` and `offline` count rows, so it
    is 1 there."""

    global_batch_size: int = Field(ge=1, examples=[64])
    """Samples per optimizer step over all processes. Packing modes `online` and `offline` count
    rows, unless `packing.scope` is `batch`. Gradient accumulation follows from it."""

    seq_length: int = Field(ge=1, examples=[4096])
    """Longest sample, in tokens, image tokens included. See `data.over_long`."""

    max_steps: Count | None = None
    """Length of the run in optimizer steps."""

    num_epochs: Count | None = None
    """Length of the run in passes over the training data."""

    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of the sample order and of every random number of the run."""

    on_non_finite: Literal["stop", "skip"] = "stop"
    """A step whose loss or gradient norm is not finite ends the run. `skip` leaves out its update
    and goes on. Both write a dump of the step, which `vlmpack replay` looks into."""

    max_skipped_steps: Count = 5
    """With `skip`, the most steps that may be skipped in any 1,000. Ten in a row always end the
    run."""

    dump_pixels: bool = False
    """Beside the dump of a step, each process writes the token ids and pixels of its rows as
    safetensors. They show the images that were trained, so keep them where the data may be."""

    cuda_graphs: Literal["none", "decoder"] = "none"
    """`decoder` replays the decoder of planned rows with CUDA graphs. Rows are filled up to
    `packing.max_tokens`, and what is trained stays the same. A CPU can run it for a try, but not
    fast."""

    cuda_graph_max_sequences: Count | Literal["auto"] = "auto"
    """Most samples of a row that fits the graph. A row with more runs without it, and is counted.
    `auto` takes the fullest row of a dry run of the packer, rounded up to a multiple of 8."""

    sentinel_interval: Count | None = None
    """Optimizer steps between two looks of the sentinel. It runs one sample of a trained row alone,
    without fused layers, kernels and graphs, and compares the losses of its tokens. A run is the
    same with it. 500 is a good value. If null, it never looks."""

    on_sentinel: Literal["stop", "warn"] = "stop"
    """What happens if these losses differ beyond the bound of the compute dtype. `stop` ends the
    run before the optimizer step. `warn` logs it."""

    verify: bool = False
    """Before the first step, do what `vlmpack verify` does, on 8 samples in float32. Stop if packed
    samples do not compute what each computes alone. This loads the model twice more."""


METRIC_NAMES = (
    "exact_match", "characters", "contains", "anls", "relaxed_accuracy",
    "box_iou", "box_f1", "box_f1_75", "point_accuracy",
)  # fmt: skip
"""Metrics of answers that are there without a program's; `evaluation.metrics` has their code."""
MetricName = Annotated[
    str,
    AfterValidator(one_of(METRIC_NAMES)),
    WithJsonSchema({"type": "string", "enum": [*METRIC_NAMES]}),
]


class EvaluationSection(Section):
    """Validation loss during training, and generated answers before and after it."""

    interval_steps: Count | None = None
    """Optimizer steps between two validation losses. If null, only at the end."""

    max_samples: Count | None = None
    """Validation samples per loss, the first ones of the split. If null, all."""

    generate: bool = False
    """Answer the questions of `data.test` before and after training, and score the answers."""

    generate_interval_steps: Count | None = None
    """Optimizer steps between two such evaluations during training. If null, none."""

    best: str | None = Field(default=None, min_length=1, examples=["validation_loss"])
    """Figure that decides which step is the best, `validation_loss` or one of `metrics`. The
    checkpoint of that step is kept beside the newest ones. If null, none is."""

    patience: Count | None = None
    """Stop after this many evaluations of `best` in a row without a better one. If null, the run
    takes all its steps."""

    metrics: Annotated[
        tuple[MetricName, ...],
        BeforeValidator(as_tuple),
        Field(min_length=1),
    ] = ("exact_match",)
    """What the answers are scored by. `exact_match` is the share of answers that are the true one.
    `characters` is the share of the true answers' characters in their place, in questions whose
    task is `read` or that have none. `contains` is the share of answers that contain the true one.
    `anls` is DocVQA's similarity. `relaxed_accuracy` is ChartQA's, with numbers within 5%. Of
    records with objects, `box_iou` is the mean overlap of boxes, `box_f1` and `box_f1_75` are their
    F1 at an overlap of 0.5 and 0.75, and `point_accuracy` is the share of points that are found.
    `python:NAME` is a metric that a program passes to `vlmpack.finetune`."""

    generate_max_samples: Count | None = None
    """Test samples that are answered, the first ones of the split. If null, all."""

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
    """Project of the run in trackers. MLflow calls it the experiment."""

    name: str | None = Field(default=None, min_length=1)
    """Name of the run in trackers. If null, that of the run folder."""

    tags: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = ()
    """Tags of the run in trackers."""

    group: str | None = Field(default=None, min_length=1)
    """Group of runs that it belongs to in trackers. In MLflow it is a tag."""

    offline: bool = False
    """W&B, SwanLab and MLflow write to `tracking` in the run folder and send nothing. If false,
    their own settings and environment variables decide."""

    tracker_seconds: float = Field(default=60.0, ge=1, le=3600)
    """How long a launch waits for trackers to start, and the end of a run for them to finish. A
    tracker that takes longer is named, and nothing waits for it."""

    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    """Progress display. `auto` is `rich` on a terminal and `plain` lines elsewhere."""

    watch_seconds: float = Field(default=60.0, ge=1, le=86400)
    """Longest silence while nothing moves. After it, a line says what is waited for, and which
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
