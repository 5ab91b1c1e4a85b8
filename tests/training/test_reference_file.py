"""The kept log-probabilities: whole, resumable, and of nothing else."""

from __future__ import annotations

import json

import numpy as np
import pytest

from vlmpack.errors import ReferenceCacheError
from vlmpack.training import reference_file
from vlmpack.training.reference_file import ReferenceFile

FACTS = {"weights": "ab", "dtype": "float32"}


def file(folder, **changes):
    return ReferenceFile(folder / "reference", FACTS | changes, 4)


def test_what_is_written_is_read_bit_by_bit(tmp_path):
    assert np.isnan(file(tmp_path).read()).all()
    file(tmp_path).write([(2, -1 / 3, -2.5), (0, -1e-300, -7.0)])
    file(tmp_path).write([(3, -4.0, -5.0)])
    file(tmp_path).write([])
    found = file(tmp_path).read()
    assert found[[0, 2, 3]].tolist() == [[-1e-300, -7.0], [-1 / 3, -2.5], [-4.0, -5.0]]
    assert np.isnan(found[1]).all(), "what is missing is made by the next pass"


def test_another_reference_is_refused_with_every_difference(tmp_path):
    file(tmp_path).write([(0, 1.0, 2.0)])
    with pytest.raises(ReferenceCacheError) as caught:
        file(tmp_path, weights="cd", date="2026-11-22").read()
    text = str(caught.value)
    assert "weights: ab there, cd here" in text
    assert "date: absent there, 2026-11-22 here" in text
    assert "dtype" not in text
    assert "objective.reference_dir, by default `reference` in run_dir" in text
    assert "may be another run's" in text
    assert "emove" not in text
    assert file(tmp_path).is_there
    assert not file(tmp_path / "other").is_there


def test_a_damaged_part_is_made_again_and_a_damaged_record_refused(tmp_path, caplog):
    file(tmp_path).write([(0, 1.0, 2.0)])
    file(tmp_path).write([(1, 3.0, 4.0)])
    first = min((tmp_path / "reference").glob("*.part"))
    data = bytearray(first.read_bytes())
    data[9] ^= 1
    first.write_bytes(data)
    found = file(tmp_path).read()
    assert np.isnan(found[0]).all()
    assert found[1].tolist() == [3.0, 4.0]
    assert "is damaged; its pairs are computed again" in caplog.text
    record = tmp_path / "reference" / "reference.json"
    record.write_text(record.read_text().replace('"vlmpack_format": 1', '"vlmpack_format": 9'))
    with pytest.raises(
        ReferenceCacheError, match=r"has vlmpack_format 9.* another objective\.reference_dir"
    ):
        file(tmp_path).read()
    record.write_text("{")
    with pytest.raises(
        ReferenceCacheError,
        match=r"is damaged: .*put the file back, or have .*objective.reference_dir",
    ):
        file(tmp_path).read()


@pytest.mark.parametrize("record", ["lost", "new", "another's"])
def test_a_part_of_another_reference_is_refused_by_name_whatever_the_record_says(tmp_path, record):
    other, own = file(tmp_path, weights="cd"), file(tmp_path)
    other.write([(0, 1.0, 2.0)])
    own_record = file(tmp_path / "own")
    own_record.write([(0, 3.0, 4.0)])
    there = tmp_path / "reference" / "reference.json"
    there.unlink()
    if record == "new":
        there.write_bytes((tmp_path / "own" / "reference" / "reference.json").read_bytes())
    if record == "another's":  # the records were exchanged
        own = file(tmp_path, weights="ef")
        there.write_text(json.dumps({"vlmpack_format": 1, "facts": dict(own.facts)}))
    [part] = there.parent.glob("*.part")
    words = rf"{part} holds log-probabilities of another reference, whatever reference.json .*_dir"
    assert own.is_there, "a launch looks before it loads a model"
    for refused in (own.refuse_other, own.read):
        with pytest.raises(ReferenceCacheError, match=words):
            refused()


def test_a_record_that_is_lost_is_written_anew_beside_parts_of_the_same_reference(tmp_path):
    file(tmp_path).write([(0, 1.0, 2.0)])
    record = tmp_path / "reference" / "reference.json"
    whole = record.read_bytes()
    record.unlink()
    assert file(tmp_path).read()[0].tolist() == [1.0, 2.0]
    file(tmp_path).write([(1, 3.0, 4.0)])
    assert record.read_bytes() == whole


def test_two_runs_that_begin_one_folder_do_not_mix(tmp_path):
    file(tmp_path).write([(0, 1.0, 2.0)])
    with pytest.raises(ReferenceCacheError, match="weights: ab there, cd here"):
        file(tmp_path, weights="cd").write([(1, 3.0, 4.0)])
    assert file(tmp_path).read()[0].tolist() == [1.0, 2.0]


def test_a_part_of_an_earlier_version_is_refused(tmp_path):
    """It has a seal over its rows alone."""
    data = np.array([(0, 1.0, 2.0)], dtype=reference_file._ROW).tobytes()
    folder = tmp_path / "reference"
    folder.mkdir()
    (folder / "000000000-00000000.part").write_bytes(data + reference_file._digest(data))
    with pytest.raises(ReferenceCacheError, match="another reference"):
        file(tmp_path).read()


def test_a_folder_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "reference").write_text("a file")
    with pytest.raises(ReferenceCacheError, match="cannot be written"):
        file(tmp_path).write([(0, 1.0, 2.0)])
