"""A plan of a large run, made up, so that every figure is as wide as it gets."""

from __future__ import annotations

from vlmpack.forecast.figures import (
    BatchFigures,
    BoundChoice,
    ImbalanceFigures,
    LeftOut,
    LongestRow,
    LongestRows,
    MeasuredChoice,
    MeasuredFigures,
    MemoryFigures,
    ModeFigures,
    RunPlan,
    SequenceFigures,
    SourceFigures,
    Stage,
    StepSpeed,
)


def source(name: str, count: int = 123_456) -> SourceFigures:
    return SourceFigures(
        name=name,
        num_samples=count,
        num_usable=count - 3,
        num_drawn=count,
        num_dropped={"longer than training.seq_length 8192": 2},
        num_shrunk=5,
        num_bad={"decode": 1},
        num_tokens=987_654_321,
        num_image_tokens=700_000_000,
        num_label_tokens=90_000_000,
        num_patches=2_800_000_000,
        length_percentiles={0: 3, 5: 40, 25: 400, 50: 1200, 75: 2500, 90: 4000, 95: 6543, 99: 8001,
                            100: 8192},
        length_histogram=((2048, 100), (4096, 50), (6144, 20), (8192, 4)),
    )  # fmt: skip


def mode(name: str, **values: object) -> ModeFigures:
    given = {
        "is_recipes": False, "is_estimated": False, "micro_batch_size": 4, "steps": 123_456,
        "counts_rows": False, "samples": 987_654, "rows": 1_234_567, "tokens": 987_654_321,
        "held_tokens": 987_654_321, "slots": 1_987_654_321, "empty_rows": 12, "row_tokens": 0,
        "vision_patches": 3,
        "compute": 0.4321, "max_row_slots": 8192, "max_row_patches": 16_000,
        "mean_batch_samples": 1023.9, "mean_batch_tokens": 1_048_576.5,
    }  # fmt: skip
    return ModeFigures(name=name, **{**given, **values})  # type: ignore[arg-type]


def large_plan() -> RunPlan:
    """64 ranks, 14 sources with long names, every mode."""
    sources = tuple(source(f"<b>a source of documents {n}</b>") for n in range(14))
    choices = ((8, "p50"), (16, "p90"), (24, "p99"), (32, "p99.9"), (40, "max"))
    return RunPlan(
        model="models/<m>",
        world_size=64,
        data_parallel=16,
        sources=sources,
        total=source("total", 14 * 123_456),
        left_out=(LeftOut(key="k<1>", shard="a.tar", reason="9000 tokens <too many>"),),
        steps_per_epoch=123_456,
        epochs=3.0,
        run_steps=370_368,
        modes=(
            mode("none"),
            mode("in_batch"),
            mode("online, stream", is_recipes=True, row_tokens=16_384, counts_rows=True),
            mode("online, batch", row_tokens=16_384, is_estimated=True),
            mode("offline, bfd", row_tokens=16_384, is_estimated=True),
        ),
        sequences=SequenceFigures(
            bound_by={"tokens": 0.95, "sequences": 0.05},
            waiting=64,
            mode="online, stream",
            mean=12.3,
            percentiles={"p50": 12, "p90": 16, "p99": 22, "p99.9": 30, "max": 40},
            histogram=tuple((n, 1000 - 20 * n) for n in range(1, 41)),
            dry_run_samples=65_536,
            choices=tuple(
                BoundChoice(
                    basis=basis, max_sequences=n, covered=1 - 1e-6 * (40 - n), extra_rows=0.00001,
                    tails=0.0123, boundary_bytes=4 * (n + 2),
                    is_recipes=n == 32,
                )
                for n, basis in choices
            ),
        ),
        imbalance=tuple(
            ImbalanceFigures(
                data_parallel=n, micro_batches=64 // n, steps=64, total_dealt=1 + n / 100,
                vision_dealt=1 + n / 50, total_balanced=1.01, vision_balanced=1.02,
                is_recipes=n == 16,
            )
            for n in (2, 4, 8, 16, 32)
        ),
        batch=BatchFigures(
            global_batch_size=1024, counts_rows=True, samples=12_595.2, tokens=16_777_216.0,
            unpacked_samples=1024.0, unpacked_tokens=1_364_001.0, samples_per_row=12.3,
            keeping_size=80, learning_rate=1e-5, scaled_learning_rate=3.5e-5,
        ),
        memory=MemoryFigures(
            parameters=7_000_000_000, tower_parameters=600_000_000, counted_from="5 headers",
            rank_parameters=2_000_000_000, rank_trained=12_345_678,
            where="first pipeline stage", dtype="bfloat16",
            weights=4 << 30, gradients=8 << 30, optimizer=1 << 29, activations=30 << 30,
            again=1 << 30, logits=0, recomputed="every second layer",
            row_tokens=16_384, row_patches=64_000, rows_in_flight=4, formula=("a formula",),
            paged=7 << 30,
        ),
        longest=LongestRows(
            room=77_309_411_328, where="90% of the 80.0 GiB of an assumed GPU", own=4,
            rows=tuple(
                LongestRow(
                    world_size=512, context=n, tokens=1_422_272 * (n > 1),
                    patches=5_689_088 * (n > 1),
                    recomputed="all but matrix products and attention", total=72 << 30,
                )
                for n in (1, 2, 4)
            ),
        ),
        notes=("a note",),
        measured=measured_figures(),
    )  # fmt: skip


def measured_figures() -> MeasuredFigures:
    """A week of a run, with settings of every kind: faster, not told apart, slower, failed."""

    def choice(change: str, seconds: float, passes: int = 1) -> MeasuredChoice:
        speed = StepSpeed(
            measured_steps=8 * passes,
            seconds=seconds,
            data_wait_seconds=0.0123 * seconds,
            slots=16_777_216.0,
            tokens=16_000_000.0,
        )
        return MeasuredChoice(
            change=change, speed=speed, training_seconds=370_368 * seconds, passes=passes
        )

    return MeasuredFigures(
        device="16 x NVIDIA H200",
        processes=16,
        copies=16,
        all_copies=512,
        run_steps=370_368,
        choices=(
            choice("model.activation_checkpointing=selective", 1.2, 2),
            choice("", 1.3, 2),
            choice("data.num_workers=16", 1.31, 2),
            choice("packing.balance=none", 1.9),
            MeasuredChoice(
                change="model.activation_checkpointing=none",
                speed=None,
                training_seconds=None,
                passes=0,
                failure="CUDA out of memory. Tried to allocate 2.00 GiB\n  of many more words",
            ),
        ),
        stages=(
            Stage(what="launch", times=1, seconds=75.0),
            Stage(what="validation", times=370, seconds=61.0),
            Stage(what="answers", times=38, seconds=600.0),
            Stage(what="checkpoint", times=741, seconds=12.0),
            Stage(what="export", times=1, seconds=45.0),
        ),
        spread=0.02,
        notes=("measured with 16 of 512 copies of the model",),
    )
