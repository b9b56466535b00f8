"""Answers that a network generates after the prompts of a task."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from zdc_jax.evaluation.answers import Protocol, read_prompts
from zdc_jax.evaluation.batches import padded_batches
from zdc_jax.evaluation.greedy import generate_greedy
from zdc_jax.evaluation.ruler.prompt import RulerTask
from zdc_jax.evaluation.ruler.score import score_answer
from zdc_jax.generation.chunks import bucket, padded
from zdc_jax.model.transformer import Transformer


def score_task(
    network: Transformer,
    task: RulerTask,
    *,
    protocol: Protocol,
    batch: int = 1,
    watch: Callable[[int], None] = lambda _: None,
) -> Float[np.ndarray, " samples"]:
    """Return the score of a network on each sample of a task, 0 to 1.

    Prompts are padded to the context length, so that all tasks of one length share most programs.

    Args:
      network: network to run.
      task: samples to answer.
      protocol: how prompts are read.
      batch: prompts to run at once.
      watch: function called after each batch with the number of samples answered.

    Raises:
      CacheMemoryError: the caches do not fit into memory.
    """
    scores: list[float] = []
    for part, count in padded_batches(task.samples, batch):
        answers = _answer(network, task, [sample.tokens for sample in part], protocol)
        pairs = list(zip(answers, part, strict=True))[:count]
        scores += [score_answer(answer, sample.references) for answer, sample in pairs]
        watch(len(scores))
    return np.array(scores)


def _answer(
    network: Transformer, task: RulerTask, prompts: list[np.ndarray], protocol: Protocol
) -> list[str]:
    """Return the text that greedy decoding adds to each prompt, without the stop token."""
    context, stop = task.setting.length, network.config.eos_ids
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    hidden, cache = read_prompts(
        network, padded(prompts, context), lengths, capacity=context, protocol=protocol
    )
    count = task.answer_tokens
    tokens, counts = generate_greedy(network, hidden, cache, count, stop=stop, steps=bucket(count, 128))
    return [
        task.setting.tokenizer.decode(row[:end].tolist(), skip_special_tokens=True)
        for row, end in zip(tokens, counts, strict=True)
    ]
