"""Questions of `zdc demo` about facts that stand far back in real text."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from convert.demo_checkpoint.facts import Fact, draw_facts
from zdc_jax.conversation.prompt import chat_prompt, opening
from zdc_jax.errors import ConversionError
from zdc_jax.generation.api import generate
from zdc_jax.generation.request import Prompt
from zdc_jax.loading import LanguageModel

PREFILL_CHUNK = 256
"""Longest prefill chunk; the last chunk is padded, so that short ones save time."""
ANSWER_TOKENS = 24
"""Tokens that are generated for each question."""


@dataclass(frozen=True)
class Question:
    """A question at the end of a long text that contains the answer."""

    fact: Fact
    text: str


@dataclass(frozen=True)
class Answers:
    """One line of generated text for each question, and the speed of decoding."""

    lines: tuple[str, ...]
    right: tuple[bool, ...]
    tokens_per_second: float

    @property
    def score(self) -> str:
        """Number of right answers, such as `12/12`."""
        return f"{sum(self.right)}/{len(self.right)}"


def write_questions(
    model: LanguageModel, prose: str, *, count: int, lead: int, distance: int
) -> list[Question]:
    """Hide a fact in each of several passages, after `lead` and before `distance` tokens of text.

    Raises:
      ConversionError: the model has no tokenizer.
    """
    if model.tokenizer is None:
        raise ConversionError("the model has no tokenizer, the demo needs one")
    offsets = model.tokenizer.encode(prose, add_special_tokens=False).offsets
    size = lead + distance
    facts = draw_facts(np.random.default_rng(0), min(count, (len(offsets) - 1) // size), held_out=True)
    questions = []
    for index, fact in enumerate(facts):
        begin, middle, end = (offsets[index * size + each][0] for each in (0, lead, size))
        in_chat = f"\n\nQuestion: {fact.question} Answer with a number from the text."
        ending = in_chat if model.chat_template else fact.prompt
        questions.append(Question(fact, hide_fact(fact, prose[begin:end], middle - begin) + ending))
    return questions


def hide_fact(fact: Fact, passage: str, place: int) -> str:
    """Write a fact as a paragraph of its own in front of the line that holds the character at `place`."""
    place = passage.rfind("\n", 0, place) + 1
    return f"{passage[:place].rstrip()}\n\n{fact.statement}\n\n{passage[place:].strip()}"


def make_prompt(model: LanguageModel, question: Question) -> Prompt:
    """Return the text that is continued, or the tokens of a message to a chat model."""
    return chat_prompt(model, opening(None, question.text)) if model.chat_template else question.text


def answer_questions(model: LanguageModel, questions: Sequence[Question]) -> Answers:
    """Generate an answer to each question in two batches; the second is timed, because the first compiles."""
    lines, speed = list[str](), 0.0
    batch = -(-len(questions) // 2)
    for start in range(0, len(questions), batch):
        prompts = [make_prompt(model, question) for question in questions[start : start + batch]]
        result = generate(model, prompts, ANSWER_TOKENS, stop_tokens=(), prefill_chunk=PREFILL_CHUNK)
        lines += [take_line(completion.text or "") for completion in result.completions]
        speed = result.timings.tokens_per_second(len(prompts) * (ANSWER_TOKENS - 1))
    right = (str(question.fact.number) in line for question, line in zip(questions, lines, strict=True))
    return Answers(tuple(lines), tuple(right), speed)


def take_line(text: str) -> str:
    """Return the first line that holds text."""
    return next((line.strip() for line in text.split("\n") if line.strip()), "")
