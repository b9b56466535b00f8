"""How byte-level vocabularies split text before their merges apply, by `tokenizer.ggml.pre`.

A file keeps only the name. What it means is that of the original tokenizers, whose patterns llama.cpp quotes
(`llm_tokenizer_bpe` in src/llama-vocab.cpp).
"""

import warnings
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from zdc_jax.errors import ConversionError

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}{_WORDS}\p{{N}}{{1,3}}{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}{_WORDS}\p{{N}}{_REST}"
_TEKKEN = rf"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*|\p{{N}}{_CASED_REST}"
_GPT4O = (
    rf"{_START}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_START}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    rf"{_CASED_REST}"
)


@dataclass(frozen=True)
class PreTokenization:
    """One way to split text into pieces, which tokens do not cross.

    Attributes:
      pattern: of the pieces; None: that of GPT-2.
      digits: each digit is a piece, before the pattern applies.
      whole_pieces: a piece that is a token is not merged from smaller ones.
      adds_bos: the first token of a text begins it, where a file does not say.
      nfc: text is composed (Unicode's NFC) first.
    """

    pattern: str | None = None
    digits: bool = False
    whole_pieces: bool = False
    adds_bos: bool = False
    nfc: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Its form in the `tokenizers` library."""
        steps: list[pre_tokenizers.PreTokenizer]
        if self.pattern is None:
            steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        else:
            pieces = pre_tokenizers.Split(Regex(self.pattern), "isolated")
            steps = [pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        if self.digits:
            steps = [pre_tokenizers.Digits(individual_digits=True), *steps]
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> normalizers.Normalizer | None:
        """Its form in the `tokenizers` library."""
        return normalizers.NFC() if self.nfc else None


_LLAMA3_PIECES = PreTokenization(_LLAMA3, whole_pieces=True, adds_bos=True)
_DIGITS = PreTokenization(digits=True)
PRE_TOKENIZATIONS = {
    "gpt-2": PreTokenization(),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA3_PIECES,
    "llama3": _LLAMA3_PIECES,
    "llama-v3": _LLAMA3_PIECES,
    "falcon3": _LLAMA3_PIECES,
    "dbrx": PreTokenization(_LLAMA3),
    "smaug-bpe": PreTokenization(_LLAMA3),
    "qwen2": PreTokenization(_QWEN2, nfc=True),
    "deepseek-r1-qwen": PreTokenization(_QWEN2),
    "tekken": PreTokenization(_TEKKEN, whole_pieces=True, adds_bos=True),
    "gpt-4o": PreTokenization(_GPT4O),
}
UNNAMED = ("", "default")
"""Files of before the name was kept, and of converters that did not know it."""


def pre_tokenization(name: object) -> PreTokenization:
    """The way to split of that name; files that name none get GPT-2's, with a warning.

    Raises:
      ConversionError: a name that is not known. Another split would give other tokens without a word.
    """
    if name in UNNAMED:
        warnings.warn(
            "the file does not name its pre-tokenizer (tokenizer.ggml.pre), so text is split as GPT-2 does; "
            "tokens may differ from those that the model was trained on",
            stacklevel=2,
        )
        return PreTokenization()
    if not isinstance(name, str) or name not in PRE_TOKENIZATIONS:
        raise ConversionError(
            f"tokenizer.ggml.pre={name!r:.80} is not supported; supported are {sorted(PRE_TOKENIZATIONS)}"
        )
    return PRE_TOKENIZATIONS[name]
