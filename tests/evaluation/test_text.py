"""Documents as they are read, and token windows cut from them."""

import gzip
import lzma
from collections import Counter
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from zdc_jax.errors import TextError
from zdc_jax.evaluation.text import Document, read_documents, token_windows

EOS = 0


class Bytes:
    """A tokenizer with one token per byte, and a count of the characters that it received."""

    def __init__(self):
        self.seen = 0

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        self.seen += len(text)
        return list(text.encode())


def texts(*paths):
    return [(d.topic, d.text) for d in read_documents(paths)]


def test_plain_text_is_split_at_separator_lines(tmp_path):
    path = tmp_path / "tales" / "a.txt"
    path.parent.mkdir()
    path.write_bytes(b"\xef\xbb\xbfone\r\nmore <|endoftext|>\r\n<|endoftext|>\r\n\n<|endoftext|>\ntwo")
    assert texts(path) == [("tales", "one\nmore <|endoftext|>"), ("tales", "two")]


@pytest.mark.parametrize(("suffix", "opener"), [(".xz", lzma.open), (".gz", gzip.open)])
def test_compressed_files_and_json_lines(tmp_path, suffix, opener):
    path = tmp_path / f"a.jsonl{suffix}"
    with opener(path, "wt", encoding="utf-8") as file:
        file.write('{"text": "ä", "kind": "x"}\n\n{"text": "b"}\n')
    assert texts(path) == [(tmp_path.name, "ä"), (tmp_path.name, "b")]


def test_folders_are_read_in_sorted_order_without_hidden_files_and_metadata(tmp_path):
    for name in ("b/x.md", "a/y.txt", "a/deep/z.py", ".git/no.txt", "a/skip.bin"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "stats.json").write_text("{\n}")
    assert texts(tmp_path) == [("deep", "a/deep/z.py"), ("a", "a/y.txt"), ("b", "b/x.md")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pdf", b"x", r"a.pdf: unsupported extension; allowed are \.txt"),
        ("a.txt", b" \n\n", "no text in"),
        ("a.txt", b"good\nb\xffd", r"a.txt:2: not UTF-8"),
        ("a.txt.gz", b"not gzip", "cannot read .*a.txt.gz after line 0"),
        ("a.txt.xz", lzma.compress(b"x" * 999)[:-20], "cannot read .*a.txt.xz"),
        ("a.jsonl", b'{"text": "x"}\n{oops\n', r"a.jsonl:2: not a JSON object on one line"),
        ("a.jsonl", b"[" * 100_000, r"a.jsonl:1: not a JSON object on one line"),
        ("a.jsonl", b"9" * 5000, r"a.jsonl:1: not a JSON object on one line"),
        ("a.json", b"[1]\n", r"a.json:1: each line must be a JSON object, this line is a list"),
        ("a.jsonl", b'{"txt": "x"}', r"a.jsonl:1: no string field 'text'; its fields are 'txt'"),
        ("a.jsonl", b'{"text": 3}', r"a.jsonl:1: no string field 'text'"),
    ],
)
def test_unreadable_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TextError, match=message):
        texts(tmp_path / name)


def test_missing_paths_are_named(tmp_path):
    with pytest.raises(TextError, match=r"text='.*nowhere': no such file or folder; give a text file"):
        texts(tmp_path / "nowhere")
    with pytest.raises(TextError, match="empty list of paths"):
        texts()
    with pytest.raises(TextError, match="no text in"):
        texts(tmp_path)


def test_all_windows_are_the_documents_joined_by_eos():
    documents = [Document("a", "abc"), Document("b", "xyzxyz"), Document("a", "de")]
    windows, topics = token_windows(documents, Bytes(), length=3, eos_id=EOS)
    assert windows.dtype == np.int32
    by_topic = {t: windows[[i for i, s in enumerate(topics) if s == t]] for t in "ab"}
    assert bytes(by_topic["a"].ravel().tolist()) == b"abc\0de"
    assert bytes(by_topic["b"].ravel().tolist()) == b"xyzxyz"
    joined, _ = token_windows(documents[::2], Bytes(), length=5)
    assert bytes(joined.ravel().tolist()) == b"abcde"


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from("abc"),
        st.lists(st.integers(0, 60), min_size=1, max_size=5),
        min_size=1,
    ).filter(lambda sizes: max(map(sum, sizes.values())) >= 7),
    st.integers(1, 7),
    st.integers(1, 30),
    st.integers(0, 9),
)
def test_sampled_windows_are_pure_fair_and_reproducible(sizes, length, num_windows, seed):
    documents = [
        Document(topic, (f"{topic * 4} " * size)[:size]) for topic, many in sizes.items() for size in many
    ]
    sample = partial(token_windows, documents, Bytes(), length=length, num_windows=num_windows, seed=seed)
    windows, topics = sample()
    np.testing.assert_array_equal(windows, sample()[0])
    for window, topic in zip(windows, topics, strict=True):
        assert set(bytes(window.tolist()).decode()) <= {topic, " "}
    available = {topic: sum(many) // length for topic, many in sizes.items()}
    assert windows.shape == (min(num_windows, sum(available.values())), length)
    # Round-robin: a topic falls back only when it has no window left.
    taken = Counter(topics)
    for topic, count in available.items():
        assert taken[topic] == count or taken[topic] >= max(taken.values()) - 1


def test_other_seeds_choose_other_windows():
    documents = [Document("a", " ".join(f"{i:05d}" for i in range(2000)))]
    chosen = {
        token_windows(documents, Bytes(), length=12, num_windows=1, seed=seed)[0].tobytes()
        for seed in range(8)
    }
    assert len(chosen) > 4


def test_sampling_reads_little_of_a_long_document():
    tokenizer = Bytes()
    documents = [Document("book", "word " * 100_000), Document("short", "word " * 3)]
    _, topics = token_windows(documents, tokenizer, length=10, num_windows=3)
    assert sorted(topics) == ["book", "book", "short"]
    assert tokenizer.seen < 1000


def test_too_little_text_says_how_much_there_was():
    documents = [Document("a", "abc"), Document("b", "abcdefg")]
    with pytest.raises(TextError, match="one window of 10 tokens: the longest of 2 topics has 7 tokens"):
        token_windows(documents, Bytes(), length=10)
    with pytest.raises(TextError, match="the longest of 0 topics has 0 tokens"):
        token_windows([], Bytes(), length=10)
    for options in ({"length": 0}, {"length": 4, "num_windows": 0}):
        with pytest.raises(TextError, match="=0 must be >= 1"):
            token_windows(documents, Bytes(), **options)


def test_hugging_face_tokenizers_fit():
    tokenizer = Tokenizer(models.WordLevel({"a": 1, "b": 2}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    windows, _ = token_windows([Document("t", "a b b a")], tokenizer, length=2)
    assert windows.tolist() == [[1, 2], [2, 1]]
