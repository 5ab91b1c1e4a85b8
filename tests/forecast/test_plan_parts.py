"""The parts of `vlmpack plan`, each against a count of its own."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.kept import kept_bytes
from support.plans import mode_of, plan_inputs
from support.shards import ROOT, TINY_MODEL
from support.weight_headers import write_headers

from vlmpack.alignment import Alignment
from vlmpack.data.index.table import Int64s
from vlmpack.data.modes import Online, RowShape
from vlmpack.data.plan.packers import Bin, BudgetPacker
from vlmpack.data.plan.rank_bins import Known, bins_by_rank, token_cost
from vlmpack.errors import ModelError
from vlmpack.forecast.make import batch_figures, imbalance_figures
from vlmpack.forecast.memory import memory_figures
from vlmpack.forecast.modes import PlannedMode, lay_out, layout_of
from vlmpack.forecast.parameters import LayerSizes, read_shapes, read_sizes
from vlmpack.forecast.sources import bound_choices, sequence_figures
from vlmpack.packing.balance import CostModel
from vlmpack.packing.budget import RowBudget
from vlmpack.recipe import load_recipe
from vlmpack.recipe.derived import data_parallel_size
from vlmpack.recipe.schema import ModelSection, PackingSection, ParallelismSection

MODE = Online(
    packing=PackingSection(mode="online"),
    budget=RowBudget(max_tokens=512),
    multiples=Alignment(1, 1),
)
COSTS = CostModel(per_token=10.0, per_squared_length=0.01, per_patch=6.0)


def test_slots_of_rows_by_hand() -> None:
    lengths = np.asarray([5, 7, 3, 0, 9, 0])
    layout = layout_of(
        [[((0, 1), (2, 3))], [((4,), (5,))]],
        lambda n: (lengths[n], 2 * lengths[n]),
        lambda n: lengths[n][:, None],
    )
    assert layout.bins.tolist() == [2, 2, 1, 1]
    assert layout.steps.tolist() == [2, 2]
    assert layout.trained.tolist() == [2, 1, 1, 0]
    padded = lay_out(layout, RowShape(padded=True, row_multiple=2))
    assert padded.slots.tolist() == [2 * 8, 4, 10, 2]
    assert padded.rows.tolist() == [2, 1, 1, 1]
    assert padded.squares.tolist() == [2 * 64, 16, 100, 4]
    packed = lay_out(layout, RowShape(sequence_multiple=4, row_multiple=8))
    assert packed.slots.tolist() == [16, 8, 16, 8]
    assert packed.squares.tolist() == [64 + 64, 16 + 16, 144 + 16, 64]
    assert lay_out(layout, RowShape(width=20)).slots.tolist() == [20] * 4


def test_a_bound_covers_and_costs_what_packing_says() -> None:
    rng = np.random.default_rng(3)
    tokens = np.clip(rng.lognormal(3, 1.6, 4000), 1, 512).astype(np.int64)
    patches = np.zeros_like(tokens)
    open_budget = RowBudget(max_tokens=512, alignment=8)
    budget = replace(open_budget, max_sequences=8)
    aligned = -(-tokens // 8) * 8
    rows = open_budget.rows(tokens, patches)
    free = [len(row) for row in rows]
    choices = bound_choices(replace(MODE, budget=budget), aligned, patches)
    assert [choice.max_sequences for choice in choices if choice.is_recipes] == [8]
    assert choices[-1].covered == 1.0 and choices[-1].extra_rows == 0.0
    assert choices[-1].max_sequences - 8 < max(free) <= choices[-1].max_sequences
    assert len(choices) >= 3
    for choice in choices:
        enforced = replace(open_budget, max_sequences=choice.max_sequences)
        bounded = enforced.rows(tokens, patches)
        assert choice.extra_rows == pytest.approx(len(bounded) / len(free) - 1)
        assert choice.covered == np.mean(np.asarray(free) <= choice.max_sequences)
        slots = [512 if len(row) <= choice.max_sequences else sum(aligned[row]) for row in rows]
        assert choice.tails == pytest.approx(1 - sum(aligned) / sum(slots))
        assert choice.boundary_bytes == 4 * (choice.max_sequences + 2)
    assert choices[0].covered < 0.9 and choices[0].extra_rows > 0
    assert 0 < choices[0].tails <= choices[-1].tails


class OneByOne(BudgetPacker):
    """Rows of one sample each."""

    def rows(self, order: Int64s) -> list[Bin]:
        return [(sample,) for sample in order.tolist()]


class Alone(Online):
    packer = OneByOne


def test_a_mode_with_a_packer_of_its_own_has_choices_of_its_rows() -> None:
    budget = RowBudget(max_tokens=512, max_sequences=8)
    mode = Alone(packing=MODE.packing, budget=budget, multiples=MODE.multiples)
    tokens = np.full(100, 10)
    for choice in bound_choices(mode, tokens, tokens * 0):
        assert choice.covered == 1.0 and choice.max_sequences == 8
    (free, *_) = bound_choices(replace(MODE, budget=budget), tokens, tokens * 0)
    assert free.covered < 1 or free.max_sequences > 8, "rows of `online` hold more"


def test_plan_says_what_ended_the_rows() -> None:
    """By hand: a mean sample has 10 tokens, one with patches 8."""
    lengths = np.asarray([20, 20, 19, 1, 8, 4, 4, 4, 10, 10, 10, 10])
    patches = np.asarray([0, 0, 0, 0, 8, 8, 0, 0, 0, 8, 0, 0])
    rows = ((0, 1), (2, 3, 8), (4, 5), (6, 7, 9, 10), (11,))
    budget = RowBudget(max_tokens=40, max_patches=20, max_sequences=4)
    layout = layout_of([[rows]], lambda n: (lengths[n], patches[n]), lambda n: lengths[n][:, None])
    mode = PlannedMode(mode=replace(MODE, budget=budget), layout=layout, micro_batch_size=1)
    figures = sequence_figures(mode, lengths, patches)
    # 40, 30, 12, 28 and 10 of 40 tokens; the third has 16 of 20 patches, the fourth 4 samples.
    assert figures.bound_by == {
        "tokens": 0.2,
        "vision budget": 0.2,
        "sequences": 0.2,
        "buffer": 0.4,
    }
    assert figures.waiting == 64
    short = np.full(4000, 63)
    for buffer, found in ((None, {"tokens"}), (64, {"buffer"})):
        budget = RowBudget(max_tokens=8192, max_sequences=256, buffer=buffer)
        packed = tuple(map(tuple, budget.rows(short, 0 * short)))
        layout = layout_of([[packed]], lambda n: (short[n], 0 * n), lambda n: short[n][:, None])
        mode = PlannedMode(mode=replace(MODE, budget=budget), layout=layout, micro_batch_size=1)
        figures = sequence_figures(mode, short, 0 * short)
        main = {name for name, share in figures.bound_by.items() if share > 0.1}
        assert main == found and figures.waiting == (buffer or 261)


@pytest.mark.parametrize("ranks", [2, 4])
def test_imbalance_is_what_the_pipeline_deals(ranks: int) -> None:
    rng = np.random.default_rng(5)
    tokens = rng.integers(50, 2000, 8 * 12)
    patches = np.where(rng.random(96) < 0.5, 2 * tokens, 0)
    batches = [tuple((n,) for n in range(at, at + 12)) for at in range(0, 96, 12)]

    def sizes(numbers: Any) -> Any:
        return tokens[numbers], patches[numbers]

    known = Known(sizes=sizes, sequence_tokens=lambda numbers: tokens[numbers][:, None])
    layout = layout_of([batches], sizes, known.sequence_tokens)
    mode = PlannedMode(mode=MODE, layout=layout, micro_batch_size=1, is_recipes=True)
    figures = {one.data_parallel: one for one in imbalance_figures(mode, ranks, COSTS)}
    found = figures[ranks]
    assert found.is_recipes and found.steps == 8 and found.micro_batches == 12 // ranks
    for balanced, value in ((False, found.total_dealt), (True, found.total_balanced)):
        shares = [
            bins_by_rank(batch, ranks, known=known, row_cost=COSTS, balanced=balanced).imbalance
            for batch in batches
        ]
        assert value == pytest.approx(np.mean(shares))
    assert 1 < found.total_balanced < found.total_dealt
    assert 1 < found.vision_balanced < found.vision_dealt
    (plain,) = [i for i in imbalance_figures(mode, ranks, token_cost) if i.is_recipes]
    assert plain.vision_dealt == 1.0, "no vision phase, no vision figure"


def test_hints_of_batch_and_learning_rate() -> None:
    recipe = load_recipe(
        ROOT / "recipes/digits-demo.yaml", {"model.path": str(TINY_MODEL), "optim.lr": 1e-4}
    )
    rows = mode_of(name="online, stream", counts_rows=True, mean_batch_samples=64.0)
    unpacked = mode_of(name="none")
    grown = batch_figures(plan_inputs(recipe), rows, unpacked, 4.0)
    assert grown.keeping_size == 4  # 16 samples in rows of 4
    assert grown.growth == 4.0
    assert grown.scaled_learning_rate == pytest.approx(2e-4)
    same = batch_figures(plan_inputs(recipe, world_size=8), unpacked, unpacked, 4.0)
    assert same.keeping_size == 8 and same.scaled_learning_rate is None
    assert (grown.kept_samples, same.kept_samples) == (16, 32)
    scoped = recipe.model_copy(
        update={"packing": recipe.packing.model_copy(update={"mode": "online", "scope": "batch"})}
    )
    kept = batch_figures(plan_inputs(scoped), unpacked, unpacked, 4.0)
    assert kept.keeping_size is None, "a step has the unpacked run's samples already"


def test_parameters_are_counted_from_headers() -> None:
    from safetensors import safe_open

    with safe_open(str(TINY_MODEL / "model.safetensors"), "np") as file:
        names = list(file.keys())
        counts = {n: int(np.prod(file.get_slice(n).get_shape())) for n in names}
    sizes = read_sizes(TINY_MODEL)
    assert sizes is not None
    assert sizes.parameters == sum(counts.values()) > 1_000_000
    assert sizes.tower == sum(n for name, n in counts.items() if "visual." in name)
    assert sizes.vision is not None and sizes.vision.blocks == 4
    assert sizes.decoder == (LayerSizes(query=128, key=64, mlp=384),) * 4
    assert not sizes.experts


@pytest.mark.parametrize("data", [b"", b"{}", struct.pack("<Q", 4) + b"nope"])
def test_a_damaged_header_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or cut off"):
        read_shapes(tmp_path / "model.safetensors")
    assert read_sizes(tmp_path / "nowhere") is None


def write_model(folder: Path, shapes: dict[str, tuple[int, ...]], text: dict[str, Any]) -> Path:
    """A folder with headers alone: nobody reads a weight."""
    folder.mkdir()
    write_headers(folder, shapes)
    (folder / "config.json").write_text(json.dumps(text))
    return folder


def test_weights_that_lie_there_twice_count_once(tmp_path: Path) -> None:
    """Mistral's folders hold them under names of Mistral's own too, in a file that is not read."""
    folder = tmp_path / "model"
    shutil.copytree(TINY_MODEL, folder)
    header = json.dumps(
        {"layers.0.w": {"dtype": "BF16", "shape": [9, 9], "data_offsets": [0, 0]}}
    ).encode()
    second = folder / "consolidated.safetensors"
    second.write_bytes(struct.pack("<Q", len(header)) + header)
    assert read_shapes(second)
    assert read_sizes(folder) == read_sizes(TINY_MODEL)


def test_what_a_rank_holds_under_each_sharding(tmp_path: Path) -> None:
    text = {
        "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 4, "intermediate_size": 256, "vocab_size": 1000,
    }  # fmt: skip
    layers = {f"model.layers.{i}.mlp.up_proj.weight": (256, 64) for i in range(4)}
    shapes = {"model.embed_tokens.weight": (1000, 64), "lm_head.weight": (1000, 64), **layers}
    sizes = read_sizes(write_model(tmp_path / "m", shapes, text))
    assert sizes is not None
    count, layer = 2 * 64_000 + 4 * 16_384, 16_384
    assert sizes.parameters == count and sizes.largest_block == layer

    def memory(world_size: int, copies: int, **changes: Any) -> Any:
        values = {"model.path": str(TINY_MODEL), "model.dtype": "bfloat16"}
        values |= {key.replace("__", "."): value for key, value in changes.items()}
        recipe = load_recipe(ROOT / "recipes/digits-demo.yaml", values)
        split, whole = recipe.parallelism, recipe.training.global_batch_size
        assert data_parallel_size(split, world_size) == copies
        return memory_figures(
            recipe.model, split, sizes, mode_of(), global_batch_size=whole, world_size=world_size
        )

    plain = memory(4, 4)
    assert (plain.weights, plain.gradients, plain.optimizer) == (6 * count, 4 * count, 8 * count)
    sharded = memory(4, 4, parallelism__sharding="fsdp")
    assert sharded.optimizer == 2 * count
    assert sharded.weights == count + 2 * (128_000 + 2 * layer)
    fsdp = {"parallelism__sharding": "fsdp", "training__global_batch_size": 256}
    assert memory(4, 4, **fsdp).gradients == 4 * count + count, "whole until the step's last"
    assert memory(4, 4, parallelism__gradient_sync="micro_batch", **fsdp).gradients == count
    assert memory(4, 4, **{**fsdp, "training__global_batch_size": 64}).gradients == count
    copies = memory(4, 4, parallelism__replicate=2, **fsdp)
    assert (copies.gradients, copies.optimizer) == (4 * count + 2 * count, 4 * count)
    mcore = memory(4, 4, model__backend="mcore")
    assert (mcore.weights, mcore.gradients, mcore.optimizer) == (2 * count, 4 * count, 3 * count)
    kept = memory(4, 4, model__backend="mcore", parallelism__distributed_optimizer=False)
    assert kept.optimizer == 12 * count
    cut = memory(4, 2, model__backend="mcore", parallelism__tensor=2)
    assert cut.rank_parameters == count // 2 and cut.weights == count
    staged = memory(4, 2, model__backend="mcore", parallelism__pipeline=2)
    assert staged.rank_parameters == 64_000 + 2 * layer
    assert staged.activations < plain.activations
    stages = {"model__backend": "mcore", "parallelism__pipeline": 2}
    fourth = memory(4, 2, model__activation_checkpointing=4, **stages)
    # The fourth layer is the last stage's. Two norms keep 8 bytes a column; Megatron's attention
    # 3 of queries and of keys, its MLP 5 columns, of 2 bytes. The layer's input was held anyway,
    # and there are gradients of 3 MLP columns.
    whole = 2 * 8 * 64 + 2 * (3 * 64 + 3 * 32 + 5 * 256)
    assert fourth.again == 1000 * (whole - 2 * 64 + 3 * 2 * 256)
    second = memory(4, 2, model__activation_checkpointing=2, **stages)
    assert second.again and second.activations - second.again < staged.activations
    lean = memory(4, 4, model__activation_checkpointing="full")
    assert lean.activations < plain.activations / 2
    assert plain.activations == 1000 * 4 * (26 * 64 + 2 * (2 * 64 + 2 * 32 + 4 * 256))


@pytest.mark.slow
def test_activations_beside_what_autograd_keeps() -> None:
    """The segment loop of the CPU keeps its outputs twice, so a little more than the formula."""
    from support.engines import make_engine
    from support.shards import read_shard

    from vlmpack.encode import Encoder
    from vlmpack.packing import pack_batch_sequences

    encoder = Encoder(TINY_MODEL)
    engine = make_engine(TINY_MODEL, encoder)
    batch = pack_batch_sequences(
        [encoder.encode(sample.cooked()) for sample in read_shard(limit=40)],
        pad_to_multiple_of=1,
        pad_token_id=encoder.pad_token_id,
    )
    measured = kept_bytes(
        lambda: engine.module(batch, batch.packed_seq_params()).sum(), engine.vlm.parameters()
    )
    assert batch.media is not None
    patches = sum(t * h * w for t, h, w in batch.media.grid_thw)
    model = ModelSection(path=str(TINY_MODEL), dtype="float32")
    sizes = read_sizes(TINY_MODEL)
    assert sizes is not None
    mode = mode_of(max_row_slots=batch.num_slots, max_row_patches=patches)
    estimate = memory_figures(
        model, ParallelismSection(), sizes, mode, global_batch_size=16, world_size=1
    ).activations
    assert 1.0 < measured / estimate < 1.3
