"""Pre-tokenizers of byte-level vocabularies by their GGUF name, `tokenizer.ggml.pre`.

A file has only the name of its pre-tokenizer. The patterns here are those of the original tokenizers, as
quoted by llama.cpp (`llm_tokenizer_bpe` in src/llama-vocab.cpp).
"""

import warnings
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

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
    """A way to split text into words, which tokens do not cross.

    Attributes:
      pattern: regular expression of the words; None for the pattern of GPT-2.
      digits: whether each digit is a word, before the pattern applies.
      keeps_tokens: whether a word that is a token is used as it is, without merges.
      adds_bos: whether texts begin with the BOS token unless the file says otherwise.
      nfc: whether text is first normalized to Unicode's NFC.
    """

    pattern: str | None = None
    digits: bool = False
    keeps_tokens: bool = False
    adds_bos: bool = False
    nfc: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Build the pre-tokenizer of the `tokenizers` library."""
        steps: list[pre_tokenizers.PreTokenizer]
        if self.pattern is None:
            steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        else:
            split = pre_tokenizers.Split(Regex(self.pattern), "isolated")
            steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        if self.digits:
            steps = [pre_tokenizers.Digits(individual_digits=True), *steps]
        return pre_tokenizers.Sequence(steps)


_LLAMA3_SPLIT = PreTokenization(_LLAMA3, keeps_tokens=True, adds_bos=True)
_DIGITS_SPLIT = PreTokenization(digits=True)
PRE_TOKENIZATIONS = {
    "gpt-2": PreTokenization(),
    "smollm": _DIGITS_SPLIT,
    "starcoder": _DIGITS_SPLIT,
    "refact": _DIGITS_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "falcon3": _LLAMA3_SPLIT,
    "dbrx": PreTokenization(_LLAMA3),
    "smaug-bpe": PreTokenization(_LLAMA3),
    "qwen2": PreTokenization(_QWEN2, nfc=True),
    "deepseek-r1-qwen": PreTokenization(_QWEN2),
    "tekken": PreTokenization(_TEKKEN, keeps_tokens=True, adds_bos=True),
    "gpt-4o": PreTokenization(_GPT4O),
}
UNNAMED = ("", "default")
"""Names in files of old converters, and of converters that did not recognize the pre-tokenizer."""


def get_pre_tokenization(name: object) -> PreTokenization:
    """Return a pre-tokenization by name; without a name, warn and return that of GPT-2.

    Raises:
      ConversionError: the name is unknown. A wrong split would silently produce other tokens.
    """
    if name in UNNAMED:
        warnings.warn(
            "the file does not name its pre-tokenizer (tokenizer.ggml.pre), so text is split as for GPT-2; "
            "tokens may differ from those of the model's training",
            stacklevel=2,
        )
        return PreTokenization()
    if not isinstance(name, str) or name not in PRE_TOKENIZATIONS:
        raise ConversionError(
            f"tokenizer.ggml.pre={name!r:.80} is not supported; supported are {sorted(PRE_TOKENIZATIONS)}"
        )
    return PRE_TOKENIZATIONS[name]
