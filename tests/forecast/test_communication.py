"""The forecast of a step's messages, beside those that two processes send, counted."""

from __future__ import annotations

import json

import pytest
from forecast import traffic
from support.families import tiny_family_folder
from support.forked import check_ranks
from support.published_folder import published_folder
from support.published_names import PUBLISHED_CONFIGS, published_names
from support.shards import ROOT, TINY_MODEL

from vlmpack.forecast.communication import Links, StepRows, Traffic, traffic_figures
from vlmpack.forecast.parameters import read_sizes
from vlmpack.forecast.trained import EVERY_WEIGHT, TrainedSizes
from vlmpack.recipe.schema import ModelSection, ParallelismSection


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Where the file of a layout is."""
    folder = tmp_path_factory.mktemp("traffic")
    for name in traffic.FAMILIES:
        (folder / name).symlink_to(tiny_family_folder(name, tmp_path_factory.mktemp(name)))

    check_ranks([traffic.__file__, folder, *traffic.LAYOUTS], 2)

    def found(name):
        return folder, json.loads((folder / f"{name}.json").read_text())

    return found


def planned(name, folder, found):
    """What is forecast of a rank."""
    layout = traffic.LAYOUTS[name]
    model = ModelSection(
        path=str(folder),
        backend="mcore",
        dtype="float32",
        activation_checkpointing=layout.recompute,
    )
    slots, _, features = (sum(numbers) for numbers in zip(*found["rows"], strict=True))
    rows = StepRows(micro_batches=len(found["rows"]), slots=slots, features=features)
    sizes = read_sizes(folder)
    return traffic_figures(model, layout.sizes, sizes, rows, world_size=layout.processes).parts


def forecast(name, folder, found):
    """By group and kind: (calls, bytes)."""
    made: dict[tuple[str, str], list[int]] = {}
    for each in planned(name, folder, found):
        entry = made.setdefault((each.group, each.kind), [0, 0])
        entry[0] += each.calls
        entry[1] += each.num_bytes
    return made


def forecast_parts(name, folder, found, key):
    """What has a group and a kind."""
    parts = planned(name, folder, found)
    return [each.what for each in parts if (each.group, each.kind) == key]


@pytest.mark.soak
@pytest.mark.parametrize("name", traffic.LAYOUTS)
def test_bytes_and_messages_are_those_that_were_sent(launched, name):
    """Exact, but for what pads buckets (1%) and features, which are padded to those of the fullest
    rank going out and not coming back. Messages of at most 560 bytes are not counted."""
    folder, ranks = launched(name)
    model = traffic.model_of(name, folder)
    sent, expected = counted(ranks[0]), forecast(name, model, ranks[0])
    assert expected.keys() == sent.keys()
    for key, (calls, size) in sent.items():
        print(f"\n{name} {key}: {calls} calls, {size:,} bytes; forecast {expected[key]}")
        if key == ("EP", "all-to-all"):  # a rank's experts get as many tokens as routers say
            size = sum(counted(rank)[key][1] for rank in ranks)
            each = (forecast(name, model, rank)[key][1] for rank in ranks)
            assert sum(each) == pytest.approx(size, rel=0.01)
        elif key == ("CP", "all-reduce"):
            assert 0.85 * expected[key][1] < size < expected[key][1]
        else:
            assert expected[key][1] == pytest.approx(size, rel=0.01)
        if key[0] != "EP" and "features" not in forecast_parts(name, model, ranks[0], key):
            assert expected[key][0] == calls


def counted(rank):
    """By group and kind: (calls, bytes)."""
    return {(group, kind): (calls, size) for group, kind, calls, size in rank["traffic"]}


def part(**changes):
    values = {"what": "layers", "group": "TP", "kind": "all-reduce", "ranks": 4, "span": 4}
    return Traffic(**{**values, "calls": 3, "num_bytes": 8_000_000_000, **changes})


def test_a_ring_sends_all_but_what_a_rank_keeps():
    links = Links(gpus_per_node=8, node_gbs=100.0, network_gbs=10.0)
    assert part().sent == 12_000_000_000
    assert part(kind="all-gather").sent == part(kind="all-to-all").sent == 6_000_000_000
    assert part(kind="send").sent == 8_000_000_000
    assert part().seconds(links) == pytest.approx(0.12)
    assert part(span=9).seconds(links) == pytest.approx(1.2), "beyond a node"


def figures_of(world_size=8, trained=EVERY_WEIGHT, backend="mcore", **split):
    model = ModelSection(path=str(TINY_MODEL), backend=backend, dtype="bfloat16")
    rows = StepRows(micro_batches=4, slots=4000, features=100)
    return traffic_figures(
        model,
        ParallelismSection(**split),
        read_sizes(TINY_MODEL),
        rows,
        world_size=world_size,
        trained=trained,
    )


def sizes_by_part(figures):
    return {(p.what, p.kind): p.num_bytes for p in figures.parts}


def test_one_process_sends_nothing():
    assert figures_of(world_size=1) is None


def test_what_is_frozen_is_not_reduced():
    whole, frozen = figures_of(), TrainedSizes(language=False, trained_images=1000, images=2000)
    parts = sizes_by_part(figures_of(trained=frozen))
    assert parts["gradients", "reduce-scatter"] == 4000
    assert parts["parameters", "all-gather"] == 2000
    count = read_sizes(TINY_MODEL).parameters
    assert sizes_by_part(whole)["gradients", "reduce-scatter"] == 4 * count


def test_gradients_and_parameters_are_hidden_where_they_overlap():
    on, off = figures_of(tensor=2), figures_of(tensor=2, overlap=False)
    assert off.exposed_seconds == off.seconds == pytest.approx(on.seconds)
    hidden = sum(p.seconds(on.links) for p in on.parts if p.what in ("gradients", "parameters"))
    assert on.exposed_seconds == pytest.approx(on.seconds - hidden) and hidden > 0


def test_the_hf_engine_gathers_for_every_pass_or_not_at_all():
    count = read_sizes(TINY_MODEL).parameters
    (ddp,) = figures_of(backend="hf").parts
    assert (ddp.kind, ddp.num_bytes) == ("all-reduce", 4 * count)
    parts = sizes_by_part(figures_of(backend="hf", sharding="fsdp"))
    assert parts["parameters", "all-gather"] == 2 * 4 * 2 * count
    assert parts["gradients", "reduce-scatter"] == 4 * count
    each = figures_of(backend="hf", sharding="fsdp", gradient_sync="micro_batch", replicate=2)
    parts = sizes_by_part(each)
    assert parts["gradients", "reduce-scatter"] == 4 * 4 * count
    assert parts["gradients", "all-reduce"] == 4 * count


def test_the_page_has_the_formulas_numbers(tmp_path):
    """docs/megatron.md, 64 and 512 GPUs."""
    name, page = "Qwen3.6-27B", (ROOT / "docs/megatron.md").read_text()
    published_folder(tmp_path, name, PUBLISHED_CONFIGS[name], published_names()[name])
    sizes = read_sizes(tmp_path)
    model = ModelSection(
        path=str(tmp_path), backend="mcore", dtype="bfloat16", activation_checkpointing="full"
    )
    split = ParallelismSection(tensor=4, sequence=True, pipeline=2)
    columns = []
    for world_size, count in ((64, 32), (512, 8)):
        rows = StepRows(micro_batches=count, slots=count * 8192, features=count * 2048)
        figures = traffic_figures(model, split, sizes, rows, world_size=world_size)
        columns.append({(p.what, p.kind): cells(p, figures.links) for p in figures.parts})
        assert f"| {1000 * figures.seconds:,.0f} |" in page
        assert f"{figures.exposed_seconds:.1f} s" in page
        compute = 8 * sizes.parameters * count * 8192 / 8 / 400e12
        assert f"{compute:.1f} s" in page
        assert f"{compute / count:.2f} s in" in page, "the bubble"
        [gathers] = [p for p in figures.parts if (p.what, p.kind) == ("layers", "all-gather")]
        assert gathers.calls == 257 * count and gathers.num_bytes == 257 * count * 8192 * 5120 * 2
    assert "257 x 32 rows x 83.9 MB x 3/4 = 517.4 GB" in page
    assert f"{257 * 32 * 83.886080e6 * 3 / 4 / 1e9:.1f}" == "517.4"
    few, many = columns
    del few["norms", "all-reduce"]
    for key, numbers in few.items():
        assert f"| {numbers} | {many[key]} |" in page, key


def cells(part, links):
    return f"{part.calls:,} | {part.sent / 1e9:.2f} GB | {1000 * part.seconds(links):,.0f}"
