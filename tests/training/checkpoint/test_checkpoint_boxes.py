"""Boxes of tensors: written once each, read back in any other cut, one at a time in memory."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import textwrap
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import MemoryEngine, content_of, save_engine, stored_tensors
from support.engines import single_rank

from vlmpack.backends.boxes import TensorSlice, whole
from vlmpack.distributed import Ranks
from vlmpack.errors import CheckpointError
from vlmpack.model_folder import safetensors_read
from vlmpack.model_folder.safetensors_read import DTYPES, read_into, tensors_of
from vlmpack.packing.image_owners import spread_by_size
from vlmpack.training.checkpoint import CheckpointReader, Saver, load_checkpoint, step_folder
from vlmpack.training.checkpoint.index import StoredBox, TensorIndex, box_key
from vlmpack.training.checkpoint.safetensors_file import (
    TensorEntry,
    TensorWriter,
    read_tensors,
    write_tensors,
)
from vlmpack.training.checkpoint.save import write_rank_part

TESTS = Path(__file__).resolve().parents[2]


class ScriptedRanks(Ranks):
    """The main rank of several whose other members' gathered values are at hand."""

    others: list = []  # noqa: RUF012

    def gather_objects(self, value):
        return [value, *self.others]

    def broadcast_object(self, value):
        return value


def scripted(*others):
    base = single_rank()
    ranks = ScriptedRanks(
        **{name: getattr(base, name) for name in Ranks.__slots__} | {"world_size": 1 + len(others)}
    )
    ScriptedRanks.others = list(others)
    return ranks


def cut(draw, shape, parts):
    """Random boxes that cover a shape exactly: one box is split again and again."""
    boxes = [((0,) * len(shape), tuple(shape))]
    for _ in range(parts * 3):
        if len(boxes) == parts or not shape:
            break
        place = draw.randrange(len(boxes))
        start, stop = boxes[place]
        axis = draw.randrange(len(shape))
        if stop[axis] - start[axis] < 2:
            continue
        at = draw.randrange(start[axis] + 1, stop[axis])
        left = (start, (*stop[:axis], at, *stop[axis + 1 :]))
        right = ((*start[:axis], at, *start[axis + 1 :]), stop)
        boxes[place : place + 1] = [left, right]
    draw.shuffle(boxes)
    return boxes


def box_of(name, shape, start, stop):
    return TensorSlice(name=name, shape=tuple(shape), start=tuple(start), stop=tuple(stop))


def save_in_shares(root, wholes, deal, *, world_size, step=0):
    """Every rank's boxes written as that rank would; published by the main rank."""
    engine = MemoryEngine(wholes)
    boxes = {rank: [] for rank in range(world_size)}
    for name, tensor in wholes.items():
        for rank, (start, stop) in deal[name]:
            box = box_of(name, tensor.shape, start, stop)
            boxes[rank].append(("model", box, tensor[box.index]))
    written = []
    ranks = scripted()

    class Late(ScriptedRanks):
        def gather_objects(self, value):
            folder = next(root.glob(".tmp-*"))
            written.extend(
                write_rank_part(folder, lambda r=r: boxes[r], rank=r, world_size=world_size)
                for r in range(1, world_size)
            )
            return [value, *written]

    late = Late(
        **{name: getattr(ranks, name) for name in Ranks.__slots__} | {"world_size": world_size}
    )
    Saver(root, late, keep=1).save(content_of(engine, step), lambda: boxes[0])
    return step_folder(root, step)


SHAPES = {
    "vector": (13,),
    "matrix": (9, 14),
    "convolution": (5, 3, 2, 7),
    "scalar": (),
    "one": (1, 1),
}


def wholes_of(seed):
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("seed", range(12))
def test_any_cut_is_read_in_any_other_cut(tmp_path, seed):
    draw = random.Random(seed)
    wholes = wholes_of(seed)
    world = draw.randint(1, 4)
    deal = {
        name: [(draw.randrange(world), box) for box in cut(draw, shape, draw.randint(1, 6))]
        for name, shape in SHAPES.items()
    }
    folder = save_in_shares(tmp_path, wholes, deal, world_size=world)
    stored = stored_tensors(folder)
    assert all(torch.equal(stored[f"model.{name}"], wholes[name]) for name in wholes)
    read_boxes = 0
    reader = CheckpointReader(folder)
    reader.check({name: tuple(shape) for name, shape in SHAPES.items()})
    for name, shape in SHAPES.items():
        values = wholes[name].numpy()
        for start, stop in [*cut(draw, shape, 5), ((0,) * len(shape), shape)]:
            box = box_of(name, shape, start, stop)
            found = reader.read("model", box)
            assert np.array_equal(found.numpy(), values[box.index]), box
            read_boxes += 1
    assert reader.read("exp_avg", whole("matrix", SHAPES["matrix"])) is None
    empty = box_of("matrix", (9, 14), (9, 0), (9, 14))
    assert reader.read("model", empty).shape == (0, 14)
    assert read_boxes > 10


def test_reads_that_are_longer_than_a_chunk(tmp_path, monkeypatch):
    wholes = {"w": torch.randn(50, 7)}
    deal = {"w": [(0, ((0, 0), (33, 7))), (1, ((33, 0), (50, 7)))]}
    folder = save_in_shares(tmp_path, wholes, deal, world_size=2)
    for chunk in (1, 28, 60, 1000):
        monkeypatch.setattr(safetensors_read, "CHUNK_BYTES", chunk)
        found = CheckpointReader(folder).read("model", box_of("w", (50, 7), (3, 2), (47, 6)))
        assert torch.equal(found, wholes["w"][3:47, 2:6]), chunk


def test_a_rank_that_owns_nothing_writes_no_file(tmp_path):
    folder = save_in_shares(
        tmp_path, {"w": torch.ones(4)}, {"w": [(0, ((0,), (4,)))]}, world_size=3
    )
    assert [path.name for path in folder.glob("*-of-*")] == ["model-00000-of-00003.safetensors"]


def test_keys_are_the_name_or_the_name_and_the_box():
    assert box_key("model", whole("a.b", (2, 3))) == "a.b"
    assert box_key("exp_avg", box_of("a.b", (2, 3), (1, 0), (2, 3))) == "exp_avg.a.b@1:2,0:3"
    assert box_key("exp_avg_sq", whole("a.b", ())) == "exp_avg_sq.a.b"


@pytest.mark.parametrize(
    ("boxes", "problem"),
    [
        ([((0, 0), (2, 4))], "hold 8 elements, expected 16"),
        ([((0, 0), (3, 4)), ((2, 0), (4, 4))], "overlap"),
        ([((0, 0), (4, 2)), ((0, 1), (4, 3))], "overlap"),
        ([((0, 0), (4, 4)), ((0, 0), (4, 4))], "overlap"),
        ([((0, 0), (4, 5))], "outside shape"),
        ([((0, 0), (2, 2)), ((2, 2), (4, 4)), ((0, 2), (2, 4))], "hold 12 elements"),
    ],
)
def test_a_cover_with_a_gap_or_an_overlap_is_seen(boxes, problem):
    index = TensorIndex.of(
        StoredBox(kind="model", box=box_of("w", (4, 4), *ends), dtype="F32", file="f")
        for ends in boxes
    )
    assert problem in index.find_mismatch({"w": (4, 4)}, optimizer_steps=0)
    whole_index = TensorIndex.of(
        [StoredBox(kind="model", box=whole("w", (4, 4)), dtype="F32", file="f")]
    )
    assert whole_index.find_mismatch({"w": (4, 4)}, optimizer_steps=0) is None
    problem = whole_index.find_mismatch({"w": (4, 4)}, optimizer_steps=1)
    assert problem == "0 exp_avg tensors, expected 1 (missing: w)"


def test_shares_that_make_no_whole_are_not_published(tmp_path):
    save_engine(tmp_path, 1, MemoryEngine({"w": torch.ones(4)}), keep=1)
    with pytest.raises(CheckpointError, match="hold 3 elements, expected 4"):
        save_in_shares(
            tmp_path, {"w": torch.ones(4)}, {"w": [(1, ((1,), (4,)))]}, world_size=2, step=2
        )
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_share_that_failed_elsewhere_fails_the_save_here(tmp_path):
    engine = MemoryEngine({"w": torch.ones(4)})
    save_engine(tmp_path, 1, engine, keep=1)
    mine = write_rank_part(tmp_path, engine.owned_slices, rank=5, world_size=6)
    (tmp_path / next(iter(mine.files))).unlink()
    failed = replace(mine, rank=1, files={}, boxes=(), error="rank 1 on b: No space left")
    with pytest.raises(CheckpointError, match="step 2 cannot be written: rank 1 on b: No space"):
        save_engine(tmp_path, 2, engine, keep=1, ranks=scripted(failed))
    unseen = replace(mine, rank=1, boxes=())
    with pytest.raises(CheckpointError, match=r"written by rank 1, is not visible to rank 0"):
        save_engine(tmp_path, 2, engine, keep=1, ranks=scripted(unseen))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    with pytest.raises(OSError, match="file system that all machines share"):
        write_rank_part(tmp_path / "elsewhere", engine.owned_slices, rank=1, world_size=2)


def test_a_failing_engine_fails_the_save_and_not_the_process_group(tmp_path):
    engine = MemoryEngine({"w": torch.ones(4)})

    def owned():
        yield from engine.owned_slices()
        raise RuntimeError("CUDA error")

    with pytest.raises(CheckpointError, match="RuntimeError: CUDA error"):
        Saver(tmp_path, single_rank(), keep=1).save(content_of(engine, 1), owned)
    assert not list(tmp_path.iterdir())


def test_a_problem_of_another_rank_is_raised_here_too(tmp_path):
    engine = MemoryEngine({"w": torch.ones(4)})
    folder = save_engine(tmp_path, 1, engine, keep=1)
    with pytest.raises(CheckpointError, match="rank 1 cannot read"):
        load_checkpoint(folder, engine, scripted("rank 1 cannot read"))


def test_files_are_what_the_safetensors_library_writes_and_reads(tmp_path):
    draw = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}-{shape}": (10 * torch.randn(shape, generator=draw)).to(dtype)
        for name, dtype in DTYPES.items()
        for shape in ((3, 5), (), (0, 4), (7,))
    }
    tensors["turned"] = torch.arange(12.0).view(3, 4).T
    write_tensors(tmp_path / "ours", tensors)
    theirs = load_file(str(tmp_path / "ours"))
    assert theirs.keys() == tensors.keys()
    save_file({key: value.contiguous() for key, value in tensors.items()}, str(tmp_path / "theirs"))
    ours = read_tensors(tmp_path / "theirs")
    assert ours.keys() == tensors.keys()
    for key, value in tensors.items():
        for found in (theirs[key], ours[key]):
            assert found.dtype == value.dtype
            assert torch.equal(found, value), key


def test_a_dtype_that_is_not_safetensors_is_refused(tmp_path):
    with pytest.raises(TypeError, match="complex64"):
        write_tensors(tmp_path / "x", {"w": torch.zeros(1, dtype=torch.complex64)})


def test_a_writer_holds_to_its_header(tmp_path):
    entries = [TensorEntry(key=key, dtype="F32", shape=(2,)) for key in "ab"]
    with (
        closing(TensorWriter(tmp_path / "x", entries)) as writer,
        pytest.raises(ValueError, match="not what the header"),
    ):
        writer.write("b", torch.zeros(2))
    with closing(TensorWriter(tmp_path / "y", entries)) as writer:
        writer.write("a", torch.zeros(2))
        with pytest.raises(ValueError, match="key='b'"):
            writer.finish()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"{..}",
        b"\x40" + bytes(7) + b'{"w":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}         ',
        b"\x40" + bytes(7) + b'{"w":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}          ',
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path, data):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises((ValueError, KeyError), match=r"damaged or cut off|F99"):
        read_tensors(tmp_path / "x")


def test_parameters_are_spread_evenly_and_alike():
    sizes = {f"p{i}": size for i, size in enumerate([7, 5, 4, 4, 3, 1, 1, 1])}
    owners = spread_by_size(sizes, 2)
    assert owners == spread_by_size(dict(reversed(sizes.items())), 2)
    loads = [sum(sizes[name] for name, owner in owners.items() if owner == rank) for rank in (0, 1)]
    assert loads == [13, 13]
    assert spread_by_size({"a": 1}, 3) == {"a": 0}


MEGABYTE = 1 << 20
MEMORY = """
    import json, re, sys
    from pathlib import Path
    import torch
    from support.checkpoints import MemoryEngine, save_engine
    from support.engines import single_rank
    from vlmpack.training.checkpoint import load_checkpoint, step_folder

    def peak():
        return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

    def extra(work, *arguments, **options):
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is what is in use
        before = peak()
        work(*arguments, **options)
        return peak() - before

    class Filled(MemoryEngine):
        # As engines do: boxes are copied into the tensors of the model.
        def load_slices(self, read, *, optimizer_steps):
            for kind, box, value in self.owned_slices():
                value.copy_(read(kind, box))
                del value

    root, found = Path(sys.argv[1]), {}
    small = {"w": torch.ones(2)}
    save_engine(root / "warm", 1, MemoryEngine(small), keep=1)
    load_checkpoint(step_folder(root / "warm", 1), Filled(small), single_rank())
    plain = {f"w{i}": torch.full((1024, 1024), float(i)) for i in range(64)}
    turned = {name: value.T for name, value in plain.items()}
    for layout, wholes in {"plain": plain, "turned": turned}.items():
        saving = extra(save_engine, root / layout, 1, MemoryEngine(wholes), keep=1)
        for value in wholes.values():
            value.fill_(-1)
        saved = step_folder(root / layout, 1)
        loading = extra(load_checkpoint, saved, Filled(wholes), single_rank())
        assert all(float(v[0, 0]) == float(n[1:]) for n, v in wholes.items())
        found[layout] = {"save": saving, "load": loading}
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def extra_memory(tmp_path_factory):
    """Peak resident bytes beyond a share of 64 tensors of 4 MB, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY), str(tmp_path_factory.mktemp("memory"))],
        # A fixed threshold: glibc's own grows, and what was freed then stays in its heap or not.
        env=os.environ
        | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "131072"},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's peak counter")
@pytest.mark.parametrize("layout", ["plain", "turned"])
def test_saving_and_loading_need_one_tensor_beyond_the_share(extra_memory, layout):
    """The share is 256 MB; one tensor is 4 MB, and so is a chunk of a file."""
    extra = extra_memory[layout]
    print(f"\n{layout}: " + ", ".join(f"{a} {n / MEGABYTE:.1f} MB" for a, n in extra.items()))
    assert max(extra.values()) < 12 * MEGABYTE


def test_reads_that_return_less_than_they_are_asked_for(tmp_path, monkeypatch):
    """As network mounts do, and Linux beyond 2 GiB."""
    content = {"w": torch.arange(3000.0).reshape(30, 100)}
    write_tensors(tmp_path / "f.safetensors", content)

    (stored,) = tensors_of(tmp_path / "f.safetensors")

    class Short(io.FileIO):
        def readinto(self, view):
            return super().readinto(memoryview(view)[:1000])

    monkeypatch.setattr(Path, "open", lambda path, *_, **__: Short(path))
    target = torch.empty(30, 100)
    read_into(target, stored, (slice(0, 30), slice(0, 100)))
    assert torch.equal(target, content["w"])
