"""Retrieval and aggregation tasks of RULER (Hsieh et al., 2024, arXiv 2404.06654).

Prompts and their lengths follow the code of NVIDIA/RULER (Apache-2.0, commit c3f5e3b), with its templates for
base models. `RECIPES` has the tasks that need no data set. Tasks with `needs_text` hide their needles in the
user's text, where RULER uses essays, so their scores do not compare with published ones.
"""

from collections.abc import Mapping

from zdc_jax.evaluation.ruler.coded_words import CodedWords
from zdc_jax.evaluation.ruler.common_words import CommonWords
from zdc_jax.evaluation.ruler.needles import Needles
from zdc_jax.evaluation.ruler.prompt import Recipe
from zdc_jax.evaluation.ruler.variables import Variables

RECIPES: Mapping[str, Recipe] = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("text"),
    "niah_single_3": Needles("text", value="uuids"),
    "niah_multikey_1": Needles("text", keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", key="uuids", value="uuids"),
    "niah_multivalue": Needles("text", values=4),
    "niah_multiquery": Needles("text", keys=4, queries=4),
    "vt": Variables(),
    "cwe": CommonWords(),
    "fwe": CodedWords(),
}
"""Recipe of each task, by RULER's name."""
ALL = "ruler"
"""Name that selects all tasks of `RECIPES`."""
