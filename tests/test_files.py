"""An old file stays until the new one is whole; JSON of any depth is read or refused."""

import pytest

from zdc_jax.files import load_json, whole_file


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


def test_json_without_end_is_a_value_error(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": [1, null]}')
    assert load_json(path) == {"a": [1, None]}
    path.write_text("[" * 10**5)
    with pytest.raises(ValueError, match="nested too deep"):
        load_json(path)
