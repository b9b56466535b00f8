"""lm-eval's own evaluator on our model and on tasks of our own, without downloads."""
# ruff: noqa: E402 (imports that need lm-eval follow the skip without it)

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from chat_templates import CHATML
from hf_variants import VARIANTS, write_variant
from tiny_tokenizers import chat_tokenizer

os.environ["HF_HUB_OFFLINE"] = "1"
lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is absent: pip install '.[eval]'")

from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from convert.calibration.calibrate import CalibrationOptions, calibrate
from convert.conversion import convert
from zdc_jax import CompressionPlan, LanguageModel, Sampling, generate, load
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.errors import PromptError
from zdc_jax.evaluation.harness import HarnessModel

VARIANT = "llama-head-dim-80"
TEXT = "the rest of the stories is in there. One on one they went to the sea and it was so. "
CHOICES = ["the sea", "a stone", "it is not"]
DOCS = [
    {"question": f"{TEXT[start : start + length]} It went to", "choices": CHOICES, "answer": start % 3}
    for start, length in ((0, 5), (4, 40), (9, 63), (2, 20), (1, 33))
]
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    },
    "answer": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["e", "\n"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
    },
    "text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with model/ with a chat template, plan.json, and tasks/ with their documents."""
    folder = tmp_path_factory.mktemp("harness")
    source = write_variant(VARIANT, folder / "hf")
    (source / "config.json").write_text(json.dumps(VARIANTS[VARIANT].config | {"bos_token_id": 0}))
    tokenizer = json.loads(chat_tokenizer().to_str())
    del tokenizer["model"]["vocab"]["[96]"]  # Neither texts nor the model have this token.
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    (source / "chat_template.jinja").write_text(CHATML)
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (source / "tokenizer_config.json").write_text(json.dumps(special))
    convert(source, folder / "model", progress=False)
    (folder / "a.txt").write_text(40 * TEXT)
    options = CalibrationOptions(tokens=1024, context=128, qk="balanced", vo="balanced")
    calibrate(folder / "model", [folder / "a.txt"], options, progress=False)
    config = Checkpoint.open(folder / "model").config
    CompressionPlan.uniform(config, qk=16, v=16, window=8, sinks=2).save(folder / "plan.json")
    (folder / "tasks").mkdir()
    (folder / "tasks" / "docs.jsonl").write_text("\n".join(map(json.dumps, DOCS)))
    for name, task in TASKS.items():
        files = {
            "data_files": {"test": str(folder / "tasks" / "docs.jsonl")},
            "cache_dir": str(folder / "cache"),
        }
        given = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
        (folder / "tasks" / f"{name}.yaml").write_text(json.dumps(given | task))
    return folder


@pytest.fixture(scope="module")
def model(folder) -> LanguageModel:
    return load(folder / "model", folder / "plan.json")


@pytest.fixture(scope="module")
def harness(folder) -> HarnessModel:
    arguments = f"pretrained={folder / 'model'},plan={folder / 'plan.json'},batch_size=4"
    return get_model("zdc_jax").create_from_arg_string(arguments, {"device": "cuda:0"})


@pytest.fixture(scope="module")
def evaluated(folder, harness) -> dict:
    tasks = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    return lm_eval.simple_evaluate(harness, tasks=list(TASKS), task_manager=tasks, bootstrap_iters=0)


def asked(*arguments) -> list[SimpleNamespace]:
    return [SimpleNamespace(args=one) for one in arguments]


_whole = jax.jit(lambda network, tokens: network(tokens))


def log_softmax(model: LanguageModel, tokens: list[int]) -> np.ndarray:
    """Return float64 log-probabilities [128, V] after at most 128 tokens, without a cache."""
    padded = np.zeros((1, 128), np.int32)
    padded[0, : len(tokens)] = tokens
    logits = np.asarray(_whole(model.network, padded), np.float64)[0]
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def log_probs(model: LanguageModel, context: list[int], continuation: list[int]) -> np.ndarray:
    """Return log-probabilities [C] of a continuation."""
    log_p = log_softmax(model, [*context, *continuation[:-1]])[len(context) - 1 :]
    return log_p[np.arange(len(continuation)), continuation]


def ids(text: str) -> list[int]:
    return chat_tokenizer().encode(text).ids


def test_choices_are_judged_by_the_forward_pass(model, evaluated):
    right = []
    for sample, doc in zip(evaluated["samples"]["choice"], DOCS, strict=True):
        context = ids(doc["question"])
        sums = [
            log_probs(model, context, ids(doc["question"] + f" {choice}")[len(context) :]).sum()
            for choice in CHOICES
        ]
        found = [float(response[0][0]) for response in sample["resps"]]
        np.testing.assert_allclose(found, sums, rtol=1e-4)
        right.append(int(np.argmax(sums)) == doc["answer"])
    assert evaluated["results"]["choice"]["acc,none"] == pytest.approx(np.mean(right))


def test_answers_are_those_of_generate(model, evaluated):
    for sample, doc in zip(evaluated["samples"]["answer"], DOCS, strict=True):
        done = generate(model, doc["question"], 12, stop=["e", "\n"], stop_tokens=[2, 1])
        assert sample["resps"][0][0] == done.completions[0].text


def test_whole_texts_are_scored_behind_the_first_token_of_all(model, evaluated):
    nats = sum(log_probs(model, [0], ids(doc["question"])).sum() for doc in DOCS)
    length = sum(len(doc["question"].encode()) for doc in DOCS)
    found = evaluated["results"]["text"]["byte_perplexity,none"]
    assert found == pytest.approx(math.exp(-nats / length), rel=1e-5)


def test_long_texts_go_in_windows(model, harness):
    # Windows have 128 positions, and each token is scored once, after as many as fit.
    tokens = ids(3 * TEXT)
    assert 128 < len(tokens) < 256
    first, rest = tokens[:128], tokens[128:]
    context = tokens[len(tokens) - 129 : 128]
    expected = log_probs(model, [0], first).sum() + log_probs(model, context, rest).sum()
    (found,) = harness.loglikelihood_rolling(asked((3 * TEXT,)), disable_tqdm=True)
    assert found == pytest.approx(expected, rel=1e-5)


def test_greedy_continuations_are_said_to_be(model, harness):
    # A context that is too long loses its beginning.
    context = 3 * TEXT
    done = generate(model, ids(context)[-120:], 3, stop_tokens=()).completions[0]
    given = [(None, ids(context)[-120:], list(done.tokens)), (None, ids(context), [4])]
    (_, greedy), (found, _) = harness._loglikelihood_tokens(given, disable_tqdm=True)
    assert greedy
    assert found == pytest.approx(log_probs(model, ids(context)[-128:], [4])[0], rel=1e-5)


def test_equal_requests_are_drawn_anew(model, harness):
    options = {"until": [""], "do_sample": True, "temperature": 1.5, "top_k": 20, "max_gen_toks": 8}
    found = harness.generate_until(asked(*[(TEXT, options)] * 6), disable_tqdm=True)
    assert len(set(found)) == 6
    sampling = Sampling(1.5, top_k=20)
    done = generate(model, TEXT, 8, sampling=sampling, stop_tokens=[2, 1])
    assert found[0] == done.completions[0].text


def test_chats(harness):
    chat = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": " It is "}]
    said = "<|im_start|>system\nBe helpful.<|im_end|>\n<|im_start|>user\nIs it?<|im_end|>\n"
    begun = said + "<|im_start|>assistant\n"
    assert harness.apply_chat_template(chat[:1]) == begun
    assert harness.apply_chat_template(chat, add_generation_prompt=False) == begun + " It is "
    assert harness.tok_encode(begun) == chat_tokenizer().encode(begun).ids
    assert harness.chat_template(True) == CHATML
    assert harness.chat_template(False) is None
    assert harness.tokenizer_name.endswith("__model")
    assert (harness.prefix_token_id, harness.eot_token_id, harness.max_length) == (0, 2, 128)


def test_refusals(folder, harness):
    with pytest.raises(ValueError, match="unknown model_args revision, wndow; allowed are pretrained, plan"):
        HarnessModel(folder / "model", wndow=3, revision="main")
    with pytest.raises(ValueError, match="batch_size='auto' must be a whole number >= 1"):
        HarnessModel(folder / "model", batch_size="auto")
    with pytest.raises(ValueError, match="unknown generation options num_beams; allowed are until"):
        harness.generate_until(asked(("a", {"num_beams": 2})))
    with pytest.raises(PromptError, match="max_gen_toks=128 must be less than the model's 128 positions"):
        harness.generate_until(asked(("a", {"max_gen_toks": 128})))
    with pytest.raises(PromptError, match="a continuation of 129 tokens exceeds the model's 128 positions"):
        harness._loglikelihood_tokens([(None, [0], [4] * 129)])
