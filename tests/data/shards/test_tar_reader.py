"""Every fault that tarfile and webdataset pass over silently is an error with a place."""

from __future__ import annotations

import io
import random
import tarfile
import zlib
from pathlib import Path

import pytest
from support.shard_fakes import key_of, sample_fields, write_shard
from webdataset.tariterators import base_plus_ext

from vlmpack.data.index.table import SampleRef
from vlmpack.data.loading.read import SampleReader
from vlmpack.data.shards.naming import SampleCaps, split_name
from vlmpack.data.shards.samples import RawSample, cook, group_members, parse_span
from vlmpack.data.shards.tar import parse_header, read_members
from vlmpack.errors import DataError
from vlmpack.storage.fetch import LocalFetcher, ShardStamp

CAPS = SampleCaps()


def scan(data: bytes) -> list[RawSample]:
    members = read_members(
        io.BytesIO(data), len(data), shard="s.tar", max_member_bytes=CAPS.max_member_bytes
    )
    return list(group_members(members, shard="s.tar", caps=CAPS))


def make_tar(members: list[tuple[str, bytes]], **options: object) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", **options) as archive:  # type: ignore[call-overload]
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


@pytest.fixture
def shard(tmp_path: Path) -> bytes:
    path = write_shard(tmp_path / "s.tar", ((key_of(n), sample_fields(n)) for n in range(5)))
    return path.read_bytes()


def content_end(shard: bytes) -> int:
    """Where the two zero blocks that end the archive begin."""
    return max(sample.offset + sample.length for sample in scan(shard))


def test_a_good_shard_reads_as_tarfile_does(shard: bytes) -> None:
    with tarfile.open(fileobj=io.BytesIO(shard)) as archive:
        expected = {m.name: archive.extractfile(m).read() for m in archive}  # type: ignore[union-attr]
    found = {
        f"{sample.key}.{member.field}": member.data
        for sample in scan(shard)
        for member in sample.members
    }
    assert found == expected
    assert len(scan(shard)) == 5


def test_keys_are_webdatasets() -> None:
    names = [
        "a.jpg",
        "a.b.jpg",
        "d/a.jpg",
        "d.e/a.JPG",
        "./a.json",
        "d/e/f.x.y.z",
        "a.",
        "v1.5_img.jpg",
        "noext",
        ".hidden",
        ".hidden.jpg",
        "d/noext",
        "a b.c",
        "\u00e9.txt",
    ]
    for name in names:
        key, field = base_plus_ext(name)
        expected = None if key is None else (key, field.lower())
        assert split_name(name) == expected, name


def test_meta_and_hidden_members_belong_to_no_sample() -> None:
    assert split_name("__meta__.json") is None or split_name("__meta__") is None
    assert split_name("__meta__/x.json") is None
    assert split_name("d/._a.jpg") is None, "webdataset would make a sample with the key 'd/'"
    assert split_name("__half.json") == ("__half", "json")


def test_span_crc_covers_exactly_the_span(shard: bytes) -> None:
    for sample in scan(shard):
        span = shard[sample.offset : sample.offset + sample.length]
        assert zlib.crc32(span) == sample.crc32
        again = parse_span(span, shard="s.tar", offset=sample.offset, caps=CAPS)
        assert again == sample


def test_truncation_at_every_block_is_detected(shard: bytes) -> None:
    end = content_end(shard)
    for cut in range(0, len(shard), 512):
        if cut >= end + 1024:
            assert len(scan(shard[:cut])) == 5  # only padding behind the end was lost
            continue
        with pytest.raises(DataError) as caught:
            scan(shard[:cut])
        assert caught.value.error_class == "integrity"
        assert caught.value.shard == "s.tar"
        assert caught.value.offset is not None


def test_truncation_inside_blocks_is_detected(shard: bytes) -> None:
    end = content_end(shard)
    for cut in random.Random(0).sample(range(1, end + 1024), 60):
        with pytest.raises(DataError):
            scan(shard[:cut])


def test_a_shard_cut_after_it_was_indexed_is_detected_at_read(shard: bytes, tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    samples = scan(shard)
    reader = SampleReader(LocalFetcher())
    last = samples[-1]
    ref = SampleRef(
        0, last.key, ShardStamp(str(path), 0, ""), last.offset, last.length, last.crc32, 1
    )
    path.write_bytes(shard[: last.offset + last.length - 1])
    with pytest.raises(DataError, match="shortened after it was indexed") as caught:
        reader.read(ref)
    assert (caught.value.error_class, caught.value.offset) == ("integrity", last.offset)


def test_flipped_bytes_are_detected_or_harmless(shard: bytes, tmp_path: Path) -> None:
    """400 flips: found by the structure, or by the checksum at read; none changes a sample."""
    path = tmp_path / "s.tar"
    samples = scan(shard)
    truth = {sample.key: cook(sample) for sample in samples}
    refs = [
        SampleRef(n, s.key, ShardStamp(str(path), 0, ""), s.offset, s.length, s.crc32, 1)
        for n, s in enumerate(samples)
    ]
    generator = random.Random(1)
    detected = harmless = 0
    for _ in range(400):
        place = generator.randrange(len(shard))
        damaged = bytearray(shard)
        damaged[place] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        reader = SampleReader(LocalFetcher())
        hit = False
        for ref in refs:
            try:
                assert reader.read(ref).messages == truth[ref.key].messages
                assert reader.read(ref).images == truth[ref.key].images
            except DataError as error:
                assert error.error_class == "integrity"
                hit = True
        detected, harmless = detected + hit, harmless + (not hit)
    end = content_end(shard)
    assert detected > 400 * 0.5 * end / len(shard)
    assert harmless < 400, "no flip was found: the test shows nothing"


def test_a_flipped_header_is_found_while_indexing(shard: bytes) -> None:
    for sample in scan(shard):
        for byte in (0, 100, 124, 148, 156, 257, 511):
            damaged = bytearray(shard)
            damaged[sample.offset + byte] ^= 0x01
            with pytest.raises(DataError, match="checksum") as caught:
                scan(bytes(damaged))
            assert caught.value.offset == sample.offset


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"<html><body>404 Not Found</body></html>", "cut short"),
        (b"<html>" + b"x" * 2000, "no tar file"),
        (b"\0" * 512, "two zero blocks"),
    ],
)
def test_what_is_no_tar_is_named(data: bytes, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        scan(data)


def test_an_archive_without_samples_is_valid() -> None:
    assert scan(b"\0" * 10240) == []


def test_a_zeroed_header_does_not_end_the_shard_silently(shard: bytes) -> None:
    middle = scan(shard)[2].offset
    damaged = shard[:middle] + b"\0" * 512 + shard[middle + 512 :]
    with pytest.raises(DataError, match="after the archive's end"):
        scan(damaged)


def test_two_tars_in_one_file_are_refused(shard: bytes) -> None:
    with pytest.raises(DataError, match="two tars"):
        scan(shard + shard)


@pytest.mark.parametrize("layout", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_of_every_format(layout: int) -> None:
    folder = "/".join(["folder-of-some-length"] * 6)
    name = f"{folder}/{'k' * 60}.json"
    if layout != tarfile.USTAR_FORMAT:
        name = f"{folder}/{'k' * 150}-\u00e9.json"
    data = make_tar([(name, b"{}"), ("b.json", b"{}")], format=layout)
    assert [sample.key for sample in scan(data)] == [name[:-5], "b"]
    for sample in scan(data):
        span = data[sample.offset : sample.offset + sample.length]
        assert zlib.crc32(span) == sample.crc32


def test_what_belongs_to_no_sample_does_not_split_one() -> None:
    members = [("a.json", b"{}"), ("._a.jpg", b"mac"), ("a.jpg", b"x"), ("README", b"hi")]
    data = make_tar(members)
    (sample,) = scan(data)
    assert sample.fields == ("json", "jpg")
    span = data[sample.offset : sample.offset + sample.length]
    assert zlib.crc32(span) == sample.crc32
    assert parse_span(span, shard="s", offset=sample.offset, caps=CAPS).fields == ("json", "jpg")


def test_a_verified_span_is_read_without_checksums(
    shard: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with them, and with every other check."""
    samples = scan(shard)
    spans = [shard[sample.offset : sample.offset + sample.length] for sample in samples]
    sums = [zlib.crc32(span) for span in spans]

    def read(span: bytes, offset: int, verified: int) -> RawSample:
        return parse_span(span, shard="s.tar", offset=offset, caps=CAPS, verified=verified)

    with monkeypatch.context() as patched:
        for name in ("crc32", "adler32"):
            patched.delattr(f"zlib.{name}")
        found = [
            read(span, sample.offset, verified)
            for span, sample, verified in zip(spans, samples, sums, strict=True)
        ]
    assert [sample.crc32 for sample in found] == sums == [sample.crc32 for sample in samples]
    for one, other in zip(found, samples, strict=True):
        assert one.key == other.key
        assert [m._replace(crc32=0) for m in one.members] == [
            m._replace(crc32=0) for m in other.members
        ]
    first, two = samples[0], spans[0] + spans[1]
    with pytest.raises(DataError, match="2 samples instead of 1"):
        read(two, first.offset, zlib.crc32(two))
    cut = spans[0][:-512]
    with pytest.raises(DataError, match="ends inside"):
        read(cut, first.offset, zlib.crc32(cut))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (tarfile.SYMTYPE, "symbolic link"),
        (tarfile.LNKTYPE, "hard link"),
        (tarfile.CHRTYPE, "character device"),
        (tarfile.FIFOTYPE, "pipe"),
        (tarfile.GNUTYPE_SPARSE, "sparse"),
    ],
)
def test_only_regular_files(kind: bytes, reason: str) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        info = tarfile.TarInfo("a.json")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    with pytest.raises(DataError, match=reason) as caught:
        scan(stream.getvalue())
    assert "'a.json'" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "/etc/a.json",
        "../a.json",
        "x/../../a.json",
        "a\tb.json",
        "a\n.json",
        "\x1b[2Ja.json",
        "a\x7f.json",
        "a\u009b2J.json",
    ],
)
def test_unsafe_names_are_refused(name: str) -> None:
    with pytest.raises(DataError, match="unsafe name") as caught:
        scan(make_tar([(name, b"{}")]))
    assert str(caught.value).isprintable()


def test_names_in_any_language_are_kept() -> None:
    key = "\u043a\u043b\u044e\u0447-\u65e5\u672c e\u0301"
    (sample,) = scan(make_tar([(f"{key}.json", b"{}")]))
    assert sample.key == key


@pytest.mark.parametrize("field", ["pyd", "pkl", "pickle", "pth", "pt", "x.pkl"])
def test_pickles_are_refused_by_name(field: str) -> None:
    (sample,) = scan(make_tar([("a.json", b"{}"), (f"a.{field}", b"x")]))
    assert sample.fault is not None
    assert field in sample.fault
    assert "pickle" in sample.fault
    with pytest.raises(DataError):
        sample.check()


def test_numpy_objects_are_refused_and_plain_arrays_are_not() -> None:
    import numpy as np

    faults = []
    for array in (np.zeros(3), np.array([{}], dtype=object)):
        stream = io.BytesIO()
        np.save(stream, array, allow_pickle=True)
        (sample,) = scan(make_tar([("a.json", b"{}"), ("a.npy", stream.getvalue())]))
        faults.append(sample.fault)
    assert faults[0] is None
    assert faults[1] is not None and "pickle" in faults[1]


def test_a_member_above_the_cap_is_a_fault_and_not_kept() -> None:
    data = make_tar([("a.json", b"{}"), ("a.jpg", b"x" * 5000), ("b.json", b"{}")])
    caps = SampleCaps(max_member_bytes=4096)
    members = read_members(io.BytesIO(data), len(data), shard="s", max_member_bytes=4096)
    first, second = group_members(members, shard="s", caps=caps)
    assert first.fault is not None and "5000 bytes" in first.fault and "4096" in first.fault
    assert first.members[1].data is None
    assert second.fault is None
    assert first.crc32 == zlib.crc32(data[first.offset : first.offset + first.length])


def test_dotted_names_follow_webdataset_and_say_so() -> None:
    (sample,) = scan(make_tar([("v1.5_img.jpg", b"x"), ("v1.5_img.json", b"{}")]))
    assert (sample.key, sample.fields) == ("v1", ("5_img.jpg", "5_img.json"))
    assert sample.fault is not None and "first dot" in sample.fault


def test_the_header_checksum_is_the_sum_of_all_bytes() -> None:
    """Against the plain sum, also above 65535, where a short-cut could lose count."""
    draw = random.Random(4)
    large = 0
    for turn in range(300):
        block = bytearray(draw.choices(range(1 if turn % 2 else 200, 256), k=512))
        block[124:136] = b"00000000017\0"
        total = sum(block[:148]) + 8 * 32 + sum(block[156:])
        large += total > 65535
        block[148:156] = f"{total:07o}\0".encode()
        assert parse_header(bytes(block)).size == 15
        for stated in (total - 255, total - 1, total + 1, total + 255):
            block[148:156] = f"{stated:07o}\0".encode()
            with pytest.raises(ValueError, match="wrong checksum"):
                parse_header(bytes(block))
    assert 100 < large < 300
