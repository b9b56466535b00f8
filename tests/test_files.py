"""Atomic replacement of files and folders, and JSON of any depth, which is read or refused."""

from pathlib import Path

import pytest

from zdc_jax.files import load_json, replace_folder, whole_file


def test_a_file_is_replaced_at_once(tmp_path):
    path = tmp_path / "a.json"
    for text in ("old", "new"):
        with whole_file(path) as file:
            file.write_text(text)
        assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def test_what_breaks_off_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError), whole_file(path) as file:
        file.write_text("new" * 10_000 + "\ud800", encoding="utf-8")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def folder_of(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "text").write_text(text)
    return path


@pytest.mark.parametrize("old", [True, False])
def test_a_folder_is_replaced(tmp_path, old):
    path, new = tmp_path / "a", folder_of(tmp_path / "new", "new")
    if old:
        folder_of(path, "old")
    replace_folder(new, path, tmp_path / "aside")
    assert (path / "text").read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_replaced_stays(tmp_path):
    path = folder_of(tmp_path / "a", "old")
    with pytest.raises(FileNotFoundError):
        replace_folder(tmp_path / "nowhere", path, tmp_path / "aside")
    assert (path / "text").read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_json_without_end_is_a_value_error(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": [1, null]}')
    assert load_json(path) == {"a": [1, None]}
    path.write_text("[" * 10**5)
    with pytest.raises(ValueError, match="nested too deep"):
        load_json(path)
