"""All checks of a recipe in order, on one process or under torchrun, and their result.

The main rank alone runs the stock model, then frees it; every rank runs the engine. The
`Verification` is the same on all ranks. It is written as JSON and summarised in a line.

With `--tiny` the model is a tiny one of the user's own architecture: their config.json with fewer
layers, their tokenizer and processor, seeded random weights. The cut follows from names and lengths
of entries, not from the model's type. A section with layers keeps one period of every kind of
layer. Entries with a value for each layer, or with layer numbers, are cut in the same way.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import accelerate
import torch

from vlmpack.activity import ACTIVITY
from vlmpack.backends.policy import TrainingPolicy
from vlmpack.build.data import DataSpec, build_encoder, data_spec, open_split
from vlmpack.build.engine import EngineSpec, check_model, compute_dtype, engine_spec
from vlmpack.build.run import resolve_date
from vlmpack.capabilities.versions import installed_versions
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.pipeline import TrainData
from vlmpack.data.protocols import Collator
from vlmpack.distributed import Ranks
from vlmpack.encode import Encoder
from vlmpack.errors import ModelError
from vlmpack.families.registry import family_of
from vlmpack.file_format import VERIFICATION
from vlmpack.model_folder.load import build_model, load_config
from vlmpack.proof.measure import FEWEST_LABELS, Check
from vlmpack.proof.rows.checks import check_rows
from vlmpack.proof.verify.answers import check_answers, check_ids
from vlmpack.proof.verify.memory import on_every_rank, require_memory
from vlmpack.proof.verify.numbers import StockRuns, verify_rows
from vlmpack.proof.verify.packed import Dtype, as_it_was, build_verified_engine, verified_spec
from vlmpack.proof.verify.samples import (
    Chosen,
    VerifiedRow,
    check_coordinates,
    choose_samples,
    group_samples,
    layouts,
    make_row,
    rows_in_words,
)
from vlmpack.recipe import Recipe
from vlmpack.recipe.derived import multiples
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.recipe.trainable import LoraSection
from vlmpack.version import __version__
from vlmpack.whole_file import read_json, write_atomically
from vlmpack.words import counted

DEPTHS = ("num_hidden_layers", "depth", "num_layers", "n_layers", "n_layer")
"""Entries that count the layers of a section."""

KINDS = (
    "layer_types",
    "layers_block_type",
    "block_types",
    "mlp_layer_types",
    "hybrid_override_pattern",
)
"""Entries that name the kind of each layer, in a list or by letters (`MEM*`); one that is shorter
than the section is deep is a period. A section that counts no layers is as deep as they are many.
"""

PERIODS = (
    "full_attention_interval",
    "sliding_window_pattern",
    "attn_layer_period",
    "decoder_sparse_step",
    "no_rope_layer_interval",
)
"""Entries by which one kind of layer comes back every so many."""

SHARED = "num_kv_shared_layers"
"""Counts the last layers, which reuse keys and values of earlier ones of their kind."""

FEWEST_LAYERS = 2

_BY_INDEX = ("_indexes", "_indices", "_idxs", "_layers")
"""How entries end that name layers by their numbers."""

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf")

SEED = 0


@contextmanager
def tiny_model(model: Path, scratch: Path, ranks: Ranks) -> Iterator[Path]:
    """The tiny model of a folder, in a folder of its own that is gone afterwards. Collective.

    Args:
        scratch: the folder that it is made in, seen by all ranks. Its other contents stay.
    """

    def own_folder() -> Path:
        scratch.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="tiny-model-", dir=scratch))

    folder = ranks.on_main(own_folder)
    try:
        ranks.on_main(lambda: write_tiny_model(model, folder))
        yield folder
    finally:
        if ranks.is_main:
            shutil.rmtree(folder, ignore_errors=True)


def write_tiny_model(folder: Path, target: Path) -> Path:
    """The tiny model of a folder.

    Args:
        folder: model folder in transformers format; its weights are not read.

    Raises:
        ModelError: transformers does not build a model from the cut configuration.
        CapabilityError: no family serves the model.
    """
    auto_class = family_of(folder).auto_class()
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns(*WEIGHTS, ".*"))
    config = read_json(folder / "config.json")
    (target / "config.json").write_text(json.dumps(cut_layers(config), indent=1), encoding="utf-8")
    try:
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            model = build_model(auto_class, load_config(target))
            stir(model)
        model.save_pretrained(str(target))
    except (ValueError, TypeError, IndexError, RuntimeError, OSError) as error:
        raise ModelError(
            f"--tiny: transformers builds no model from {folder / 'config.json'} with fewer "
            f"layers: {error}"
        ) from error
    return target


def stir(model: Any) -> None:
    """Replace fresh weights of zeros or ones by random values. Zeros would hide everything before
    them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.add_(0.1 * torch.randn_like(parameter))
                continue
            empty = ~parameter.flatten(1).any(dim=1)
            parameter[empty] = torch.randn_like(parameter[empty]).mul_(0.02)


def cut_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with fewer layers in every section that counts some."""
    cut: dict[str, Any] = {
        name: cut_layers(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
    }
    counted = [name for name in DEPTHS if isinstance(cut.get(name), int) and cut[name] > 0]
    depths = {cut[name] for name in counted} or {len(kinds) for kinds in _kinds(cut)}
    for depth in depths:
        keep = _cut_section(cut, depth)
        cut |= {name: keep for name in counted if cut[name] == depth}
    return cut


def _cut_section(section: dict[str, Any], depth: int) -> int:
    """Cut every entry of a section; the number of layers that it keeps."""
    keep = min(depth, _layers_kept(section, depth))
    for key, value in section.items():
        if key in KINDS and isinstance(value, str) and len(value) == depth:
            section[key] = value[:keep]
        elif isinstance(value, list) and value:
            section[key] = _cut_list(key, value, depth, keep)
        elif isinstance(value, Mapping) and value and all(_is_index(each) for each in value):
            section[key] = {each: said for each, said in value.items() if int(each) < keep}
    if section.get(SHARED):
        section[SHARED] = min(section[SHARED], keep // 2)
    for key in ("max_window_layers", "first_k_dense_replace"):
        if isinstance(section.get(key), int):
            section[key] = min(section[key], keep - 1)
    return keep


def _kinds(section: Mapping[str, Any]) -> Iterator[list[Any]]:
    for key in KINDS:
        value = section.get(key)
        if isinstance(value, list | str) and value:
            yield list(value)


def _layers_kept(section: Mapping[str, Any], depth: int) -> int:
    """Layers that hold one period of every kind."""
    layers = FEWEST_LAYERS
    for kinds in _kinds(section):
        layers = max(layers, _period(kinds[:depth]) if len(kinds) >= depth else len(kinds))
    for key in PERIODS:
        if isinstance(section.get(key), int):
            layers = max(layers, section[key])
    for key, value in section.items():  # a kind that is named by its layers: room for one of each
        if _names_layers(key, value, depth):
            layers = max(layers, FEWEST_LAYERS + 1)
    # A period that shares, of one that is shared.
    return 2 * layers if section.get(SHARED) else layers


def _is_index(key: object) -> bool:
    return isinstance(key, int) or (isinstance(key, str) and key.isdecimal())


def _period(kinds: list[Any]) -> int:
    """Layers after which the kinds repeat; else those up to the last new kind."""
    for period in range(1, len(kinds) // 2 + 1):
        if all(kind == kinds[place % period] for place, kind in enumerate(kinds)):
            return period
    first: dict[Any, int] = {kind: place for place, kind in reversed([*enumerate(kinds)])}
    return max(first.values()) + 1


def _names_layers(key: str, value: Any, depth: int) -> bool:
    """Whether an entry lists layers by index: `fullatt_block_indexes`, `mlp_only_layers` ..."""
    return (
        key.endswith(_BY_INDEX)
        and isinstance(value, list)
        and bool(value)
        and all(isinstance(item, int) and 0 <= item < depth for item in value)
        and len(value) < depth
    )


def _cut_list(key: str, value: list[Any], depth: int, keep: int) -> list[Any]:
    if len(value) == depth and not key.endswith(_BY_INDEX[:3]):
        return value[:keep]
    if not _names_layers(key, value, depth):
        return value
    inside = [item for item in value if item < keep]
    return inside or [keep - 1]  # one layer of the kind that the list names


logger = logging.getLogger("vlmpack")

RANDOM_WEIGHTS = "random weights, the folder's weights were not read"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """The scope of a verification.

    Args:
        num_samples: samples in the row.
        dtype: float32, or the recipe's.
        tiny: verify a tiny model of the same architecture.
        scratch: folder in which the tiny model has one of its own for a while, on a file system
            that all ranks see.
    """

    num_samples: int = 8
    dtype: Dtype = "float32"
    tiny: bool = False
    scratch: Path = Path("verify")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of a verification."""

    checks: tuple[Check, ...]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.fails)

    @property
    def passes(self) -> bool:
        return not self.failed


def verify_recipe(recipe: Recipe, ranks: Ranks, options: VerifyOptions) -> Verification:
    """Open a recipe as a run does, and verify it. Collective.

    Raises:
        VlmpackError: what is wrong with model folder or data, or a model that does not fit.
    """
    recipe = resolve_date(recipe, ranks)
    if not options.tiny:
        check_model(Path(recipe.model.path), ranks)
    encoder = build_encoder(recipe)
    data, engine = data_spec(recipe, encoder, ranks), engine_spec(recipe, encoder, ranks)
    verify = verify_tiny if options.tiny else _verify_folder
    return verify(data, engine, recipe.objective, options)


def verify_tiny(
    data: DataSpec, engine: EngineSpec, objective: ObjectiveSection, options: VerifyOptions
) -> Verification:
    with tiny_model(engine.encoder.folder, options.scratch, engine.ranks) as folder:
        encoder = Encoder(folder, engine.encoder.settings)
        model = engine.model.model_copy(update={"path": str(folder)})
        verification = _verify_folder(
            replace(data, encoder=encoder),
            replace(engine, encoder=encoder, model=model, policy=_of_any_layer(engine.policy)),
            objective,
            options,
        )
    return Verification(
        checks=verification.checks, facts=verification.facts | {"model": engine.model.path}
    )


def _of_any_layer(policy: TrainingPolicy) -> TrainingPolicy:
    """The policy with adapters by the last part of names, as a tiny model has few layers."""
    lora = policy.trainable.lora
    targets, modules = (
        each if isinstance(each, str) else tuple({name.rpartition(".")[2] for name in each})
        for each in (lora.targets, lora.modules_to_save)
    )
    ranks, alphas = (
        {name.rpartition(".")[2]: number for name, number in pattern.items()}
        for pattern in (lora.rank_pattern, lora.alpha_pattern)
    )
    lora = LoraSection.model_validate(
        lora.model_dump()
        | {"targets": targets, "modules_to_save": modules}
        | {"rank_pattern": ranks, "alpha_pattern": alphas}
    )
    return replace(policy, trainable=policy.trainable.model_copy(update={"lora": lora}))


def _verify_folder(
    data: DataSpec, engine: EngineSpec, objective: ObjectiveSection, options: VerifyOptions
) -> Verification:
    train = open_split(data, "data.train", Ledger(None))
    assert train is not None  # data.train is required
    try:
        return verify_split(engine, objective, train, options)
    finally:
        train.split.close()


def verify_split(
    engine: EngineSpec, objective: ObjectiveSection, train: TrainData, options: VerifyOptions
) -> Verification:
    """Verify an engine on data that are open. Collective; nothing of the run changes.

    Raises:
        VlmpackError: a model that does not fit, or too few samples.
    """
    started = time.perf_counter()
    ACTIVITY.enter_alone("comparing packed with unpacked")
    ranks, encoder, parallel = engine.ranks, engine.encoder, engine.parallelism
    own = compute_dtype(engine.model, ranks.device)
    dtype = torch.float32 if options.dtype == "float32" else own
    split = parallel.tensor * parallel.pipeline
    if parallel.sharding == "fsdp":
        split *= ranks.dp_size
    on_every_rank(
        ranks,
        lambda: require_memory(
            encoder.folder, encoder.family.modules, engine.policy, ranks.device, split=split
        ),
    )
    chosen = ranks.on_main(
        lambda: choose_samples(
            train,
            options.num_samples,
            min_labels=0 if dtype is torch.float32 else FEWEST_LABELS,
        )
    )
    with as_it_was():
        checks, engine_facts = _all_checks(
            engine, objective, train, chosen, options.num_samples, dtype
        )
    facts = {
        "model": engine.model.path,
        "tiny": options.tiny,
        "weights": RANDOM_WEIGHTS if options.tiny else "the folder's",
        "mode": train.config.mode.name,
        "objective": objective.name,
        "dtype": str(dtype).removeprefix("torch."),
        "engine": engine_facts,
        "samples_wanted": options.num_samples,
        "samples": [
            {
                "key": each.sample.key,
                "shard": each.ref.shard,
                "tokens": each.sample.length,
                "labels": each.num_labels,
                "images": each.num_images,
            }
            for each in chosen
        ],
        "versions": _versions(),
        "seconds": round(time.perf_counter() - started, 1),
    }
    return Verification(checks=tuple(checks), facts=facts)


def _all_checks(
    engine: EngineSpec,
    objective: ObjectiveSection,
    train: TrainData,
    chosen: Sequence[Chosen],
    num_samples: int,
    dtype: torch.dtype,
) -> tuple[list[Check], dict[str, str]]:
    """The checks of every way to lay the samples out, and the engine's description."""
    samples = [each.sample for each in chosen]
    ranks, encoder, context = engine.ranks, engine.encoder, engine.parallelism.context
    changed = verified_spec(engine, dtype)
    held: list[StockRuns] = []  # on the main rank alone: too large to send around

    def run_stock() -> None:
        logger.info("%-14s %d samples, unpacked, one by one", "stock", len(samples))
        held.append(
            StockRuns.make(
                encoder,
                samples,
                ranks.device,
                dtype=dtype,
                half_weights=engine.model.backend == "mcore",
                objective=objective,
            )
        )

    ranks.on_main(run_stock)
    gc.collect()  # models are cycles; memory is needed for the next one now
    messages = [each.messages for each in chosen]
    of_texts = ranks.on_main(
        lambda: [check(encoder, samples, messages) for check in (check_ids, check_answers)]
    )
    checks = [check for check in (*of_texts, check_coordinates(chosen)) if check is not None]
    facts: dict[str, str] = {}
    multiple = multiples(engine.parallelism).row
    for prefix, collator in layouts(engine, train):
        groups = group_samples(
            samples,
            num_samples,
            collator,
            budget=train.config.mode.budget if train.config.mode.facts.plans_rows else None,
        )
        rows = [
            make_row(collator, samples, numbers, encoder, row_multiple=multiple, context=context)
            for numbers in groups
        ]
        logger.info("%-14s %s", "engine", rows_in_words(len(rows), padded=rows[0].is_padded))
        own_checks, facts = verify_layout(
            changed, collator, rows, held[0] if ranks.is_main else None
        )
        gc.collect()
        checks += [replace(check, name=prefix + check.name) for check in own_checks]
    stock = ranks.broadcast_object(held[0].description if ranks.is_main else "")
    return checks, facts | {"stock": stock}


def verify_layout(
    spec: EngineSpec,
    collator: Collator,
    rows: Sequence[VerifiedRow],
    stock: StockRuns | None,
) -> tuple[list[Check], dict[str, str]]:
    """Everything about some rows, on an engine that is built for them. Collective.

    Args:
        spec: of the engine, see `verified_spec`.
        stock: on the main rank.

    Returns:
        The checks, and the engine's description; on every rank the same.
    """

    def without_model() -> list[Check]:
        assert stock is not None
        own, counted_by = stock.positions, stock.positions_of
        return check_rows(
            [
                replace(row, positions=tuple(own[n] for n in row.numbers), counted_by=counted_by)
                for row in rows
            ]
        )

    checks = spec.ranks.on_main(without_model)
    engine = build_verified_engine(spec)
    checks += verify_rows(
        engine,
        spec.ranks,
        rows,
        collator,
        stock,
        encoder=spec.encoder,
        optim=spec.policy.optim,
    )
    return checks, dict(engine.description)


def _versions() -> dict[str, str]:
    own = {
        "vlmpack": __version__,
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
    }
    others = {
        name: version for name, version in installed_versions().items() if version is not None
    }
    return {"python": platform.python_version()} | own | others


EQUAL = "packed equals unpacked"


def as_json(verification: Verification) -> dict[str, Any]:
    """Every figure; numbers that JSON does not have are words."""
    content = {
        "passes": verification.passes,
        "conclusion": conclusion(verification),
        **verification.facts,
        "checks": [
            {name: _number(value) for name, value in asdict(check).items()}
            for check in verification.checks
        ],
    }
    return VERIFICATION.mark(content)


def _number(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def file_name(*, tiny: bool) -> str:
    return "verify-tiny.json" if tiny else "verify.json"


def write_verification(verification: Verification, folder: Path) -> Path:
    """Write verify.json or verify-tiny.json, whole; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(tiny=bool(verification.facts.get("tiny")))
    write_atomically(path, json.dumps(as_json(verification), indent=1) + "\n")
    return path


def conclusion(verification: Verification) -> str:
    """The last line: that packed equals unpacked, or what differs and what to look at."""
    if verification.passes:
        unjudged = [f"{c.name} ({c.detail})" for c in verification.checks if c.status == "too few"]
        return (
            EQUAL
            + (" (of the tiny model)" if verification.facts.get("tiny") else "")
            + (f" in what was judged; too few data for {'; '.join(unjudged)}" if unjudged else "")
        )
    lines = [f"{check.name} ({check.sentence})" for check in verification.failed]
    return f"packed differs from unpacked in {counted(len(lines), 'check')}: {'; '.join(lines)}"
