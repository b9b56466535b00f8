"""Replies on a kept cache: equal to `generate` on all tokens, while only new tokens are prefilled."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import numpy as np
import pytest
from chat_templates import CHATML, GEMMA, THINKING
from conftest import LLAMA, OPT, TinyModel
from tiny_tokenizers import chat_tokenizer, sentencepiece

from zdc_jax import CompressionPlan, LanguageModel, Sampling, chat, chat_prompt, generate
from zdc_jax.config import ModelConfig
from zdc_jax.conversation.chat import keeps_cache, tokenize_after
from zdc_jax.conversation.prompt import chat_stop_tokens
from zdc_jax.conversation.template import ChatTemplate
from zdc_jax.errors import ChatError, PromptError
from zdc_jax.generation import run, steps
from zdc_jax.generation.chunks import bucket
from zdc_jax.generation.token_bytes import get_token_bytes
from zdc_jax.loading import TextSide
from zdc_jax.methods import token_classes
from zdc_jax.parallel.mesh import MeshConfig

SHORT = replace(LLAMA, layers=LLAMA.layers[:2])
SLIDING = replace(SHORT, layers=(LLAMA.layers[0], replace(LLAMA.layers[0], window=12)))
SMALL_OPT = replace(OPT, layers=OPT.layers[:2])
MESSAGES = ("the end", "Is it?", "not on these terms, no")


def classes(config: ModelConfig, **near: int) -> CompressionPlan:
    settings = token_classes.Settings(group=config.num_layers, first=0.4, last=0.4, block=8)
    return replace(
        CompressionPlan.uniform(config, qk=32, v=32, **near), method="token_classes", settings=settings
    )


PLANS: dict[str, tuple[ModelConfig, Callable[[ModelConfig], CompressionPlan]]] = {
    "no plan": (SMALL_OPT, CompressionPlan.full),
    "window and sinks": (SHORT, partial(CompressionPlan.uniform, qk=16, v=16, window=8, sinks=2)),
    "sliding layers": (SLIDING, partial(CompressionPlan.uniform, qk=16, v=16, window=8, sinks=2)),
    "token classes": (SHORT, partial(classes, window=8, sinks=2)),
}


def chatty(config: ModelConfig, plan: CompressionPlan, template: str = CHATML) -> LanguageModel:
    """Return a tiny model that generates no special tokens, since their tied embeddings are tiny."""
    tiny = TinyModel(config)
    tokens = np.array(tiny.embeddings["tokens"])
    tokens[:3] *= 1e-3
    tiny.embeddings = tiny.embeddings | {"tokens": tokens}
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    return replace(
        tiny.model(plan), tokenizer=chat_tokenizer(), chat_template=ChatTemplate(template, special)
    )


@pytest.fixture(scope="module", params=PLANS)
def model(request) -> LanguageModel:
    config, plan = PLANS[request.param]
    return chatty(config, plan(config))


@pytest.fixture(scope="module")
def plain() -> LanguageModel:
    config, plan = PLANS["window and sinks"]
    return chatty(config, plan(config))


@dataclass
class Read:
    """Prefill inputs of each turn: tokens of the chat, number already in the cache, widths of chunks."""

    prompts: list[list[int]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    widths: list[list[int]] = field(default_factory=list)


@pytest.fixture
def read(monkeypatch) -> Read:
    seen = Read()
    deltas = run.Run.deltas

    def spied(self, *rest):
        (prompt,) = self.request.prompts
        seen.prompts.append(prompt.tolist())
        seen.held.append(0 if self.cache is None else int(self.cache.lengths[0]))
        seen.widths.append([])
        return deltas(self, *rest)

    def spy_on(piece):
        def spied_piece(network, state, tokens, *rest, **options):
            seen.widths[-1].append(tokens.shape[1])
            return piece(network, state, tokens, *rest, **options)

        return spied_piece

    monkeypatch.setattr(run.Run, "deltas", spied)
    for name in ("prefill", "prefill_new"):
        monkeypatch.setattr(run, name, spy_on(getattr(run, name)))
    return seen


def anew(model: LanguageModel, prompt: list[int], count: int, **options) -> tuple[int, ...]:
    """Generate a reply to a prompt that is prefilled whole."""
    return generate(model, [prompt], count, **options).completions[0].tokens


def without_a_cache(model: LanguageModel, prompt: list[int], reply: tuple[int, ...]) -> tuple[int, ...]:
    """Return the likeliest token at each place of a reply, by one forward pass over all tokens."""
    tokens = np.zeros((1, 128), np.int32)
    tokens[0, : len(prompt) + len(reply)] = [*prompt, *reply]
    logits = _whole(model.network, tokens)[0, len(prompt) - 1 :][: len(reply)]
    return tuple(np.asarray(logits).argmax(-1).tolist())


_whole = jax.jit(lambda network, tokens: network(tokens))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.2, top_k=30, seed=5)], ids=["greedy", "drawn"])
@pytest.mark.matrix
def test_a_kept_cache_gives_what_reading_all_again_gives(model, read, sampling):
    # All turns together are far longer than the window, and replies end at their limit.
    conversation = chat(model, system="hold on", max_new_tokens=9, stop_tokens=(), sampling=sampling)
    turns = []
    for message in MESSAGES:
        reply = conversation.say(message)
        turns.append(conversation.turn)
        assert conversation.history[-1] == {"role": "assistant", "content": reply}
    seen = Read(read.prompts[:], read.held[:], read.widths[:])
    for prompt, turn in zip(seen.prompts, turns, strict=True):
        (completion,) = turn.generation.completions
        assert completion.tokens == anew(model, prompt, 9, stop_tokens=(), sampling=sampling)
        assert turn.prompt_tokens == len(prompt)
        if not sampling.temperature and keeps_cache(model):
            assert completion.tokens == without_a_cache(model, prompt, completion.tokens)
    assert [turn.cached_tokens for turn in turns] == seen.held
    if sampling.temperature:  # A sampled token may be special, and then it is not part of a reply's text.
        return
    # All but the newest token of the turn before are in the cache, and only one small chunk is read.
    kept = [0, *(len(prompt) + 8 for prompt in seen.prompts[:-1])] if keeps_cache(model) else [0, 0, 0]
    assert seen.held == kept
    new = [len(prompt) - held for prompt, held in zip(seen.prompts, kept, strict=True)]
    assert seen.widths == [[bucket(count)] for count in new]
    assert keeps_cache(model) == (model.plan.method != "token_classes")


@pytest.mark.full
def test_the_tokens_are_those_of_the_template_around_what_the_model_chose(plain, read):
    conversation = chat(plain, max_new_tokens=20, stop_tokens=(), sampling=Sampling(1.0, top_k=20))
    for message in MESSAGES:
        conversation.say(message)
    decode = partial(plain.tokenizer.decode, skip_special_tokens=False)
    for turn, prompt in enumerate(read.prompts):
        messages = conversation.history[: 2 * turn + 1]
        assert decode(prompt) == plain.chat_template.render(messages)
    assert read.prompts[0] == chat_prompt(plain, conversation.history[:1])
    # The model generated other tokens than the tokenizer's for the same text, and the cache keeps them.
    assert read.held[1] > 0
    assert any(
        prompt != chat_prompt(plain, conversation.history[: 2 * turn + 1])
        for turn, prompt in enumerate(read.prompts)
    )


def ending(model: LanguageModel, prompt: list[int], place: int) -> int:
    """Return a token that ends the greedy reply after `place` tokens."""
    free = anew(model, prompt, 12, stop_tokens=())
    return next(token for i, token in enumerate(free) if i >= place and token not in free[:i])


@pytest.mark.parametrize("tail", ["", " ", "\n"])
def test_a_stop_token_is_part_of_the_text_that_the_template_writes(plain, read, tail):
    # Some templates, such as Llama 2's, put text between the reply and its end.
    hello = "<{{ messages[0].content }}>"
    prompt = chat_prompt(
        replace(plain, chat_template=ChatTemplate(hello)), [{"role": "user", "content": "a"}]
    )
    stop = ending(plain, prompt, 3)
    source = (
        "{% for m in messages %}{{ '<' + m.content + '>' if m.role == 'user' else m.content + tail + "
        "eos_token }}{% endfor %}"
    )
    name = plain.tokenizer.decode([stop])
    template = ChatTemplate(source, {"eos_token": name})
    model = replace(plain, chat_template=template)
    conversation = chat(model, max_new_tokens=12, template_options={"tail": tail})
    assert stop in chat_stop_tokens(model)
    first = conversation.say("a")
    assert name not in first
    assert conversation.turn.generation.completions[0].finish_reason == "stop"
    count = len(conversation.turn.generation.completions[0].tokens)
    conversation.say("b")
    assert read.held[1:] == [0, len(prompt) + count - 1]
    assert plain.tokenizer.decode(read.prompts[2]) == f"<a>{first}{tail}{name}<b>"
    reply = conversation.turn.generation.completions[0].tokens
    assert reply == anew(plain, read.prompts[2], 12, stop_tokens=chat_stop_tokens(model))


@pytest.mark.full
def test_a_full_cache_gives_way_to_one_with_room_for_as_much_again(plain, read):
    conversation = chat(plain, max_new_tokens=10, stop_tokens=())
    capacities = []
    for message in MESSAGES * 2:
        conversation.say(message)
        capacities.append(conversation.turn.generation.capacity)
        assert conversation.turn.generation.kv_bytes == plain.plan.bytes(capacities[-1], 1, "float32")
    assert capacities == [128, 128, 256, 256, 256, 256]
    assert [held > 0 for held in read.held] == [False, True, False, True, True, True]
    prompt, (completion,) = read.prompts[5], conversation.turn.generation.completions
    assert completion.tokens == anew(plain, prompt, 10, stop_tokens=())


@pytest.mark.full
def test_replies_shorten_where_positions_end_and_then_there_are_none(plain):
    conversation = chat(plain, max_new_tokens=200, stop_tokens=())
    conversation.say("a")
    before = conversation.history
    tokens = conversation.turn.prompt_tokens + 200
    conversation.say("b")
    turn = conversation.turn
    assert turn.prompt_tokens + len(turn.generation.completions[0].tokens) == LLAMA.max_positions
    assert turn.prompt_tokens > tokens
    assert turn.generation.capacity == LLAMA.max_positions
    after = conversation.history
    with pytest.raises(PromptError, match="no room for a reply within the model's 256 positions; start over"):
        conversation.say("c")
    assert conversation.history == after == [*before, *after[2:]]
    conversation.start_over()
    assert conversation.history == []
    assert conversation.say("a") == before[1]["content"]


@pytest.mark.full
def test_a_template_that_rewrites_history_is_read_anew(plain, read):
    # This template removes text before an "e", like templates that remove thoughts.
    shorter = CHATML.replace(
        "message['content'] +", "(message['content'] if loop.last else message['content'].split('e')[-1]) +"
    )
    model = replace(plain, chat_template=ChatTemplate(shorter, plain.chat_template.special_tokens))
    conversation = chat(model, max_new_tokens=9, stop_tokens=())
    for message in ("the end", "Is", "no"):
        conversation.say(message)
    assert read.held == [0, 0, 0]
    rendered = chat_prompt(model, conversation.history[:-1])
    assert read.prompts[2] == rendered
    assert len(rendered) < len(chat_prompt(plain, conversation.history[:-1]))


def test_a_stop_string_ends_a_reply_and_leaves_more_in_the_cache(plain, read):
    free = chat(plain, max_new_tokens=20, stop_tokens=()).say("the end")
    stop = free[7:9]
    conversation = chat(plain, max_new_tokens=20, stop_tokens=(), stop=stop)
    pieces = list(conversation.stream("the end"))
    assert "".join(pieces) == free[: free.index(stop)] == conversation.history[-1]["content"]
    conversation.say("Is it?")
    assert read.held == [0, 0, 0]
    assert read.prompts[2] == chat_prompt(plain, conversation.history[:-1])


@pytest.mark.full
def test_a_reply_that_is_not_read_to_its_end_counts_as_far_as_it_was(plain, read):
    whole = chat(plain, max_new_tokens=40, stop_tokens=()).say("the end")
    conversation = chat(plain, max_new_tokens=40, stop_tokens=())
    reply = conversation.stream("the end")
    assert conversation.history == []
    given = next(reply) + next(reply)
    reply.close()
    assert conversation.turn is None
    assert conversation.history[1:] == [{"role": "assistant", "content": given}]
    assert whole.startswith(given) and given != whole  # noqa: PT018
    conversation.say("Is it?")
    assert read.held == [0, 0, 0]
    assert read.prompts[2] == chat_prompt(plain, conversation.history[:-1])


def test_a_conversation_starts_over_with_what_it_was_told(plain, read):
    conversation = chat(plain, system="hold on", max_new_tokens=9, stop_tokens=())
    first = conversation.say("the end")
    conversation.start_over()
    assert conversation.history == [{"role": "system", "content": "hold on"}]
    assert conversation.turn is None
    assert conversation.say("the end") == first
    assert read.held == [0, 0]
    conversation.history.clear()
    assert len(conversation.history) == 3


def test_a_refused_turn_leaves_the_conversation_as_it_was(plain, read):
    conversation = chat(plain, max_new_tokens=9, stop_tokens=())
    conversation.say("the end")
    before, held = conversation.history, read.held[:]
    with pytest.raises(ChatError, match="content=3 must be a string"):
        conversation.say(3)
    assert (conversation.history, read.held) == (before, held)
    conversation.say("Is it?")
    assert read.held[1] > 0


@pytest.mark.full
def test_prompts_of_a_mesh_are_read_whole(plain):
    mesh = MeshConfig(sequence=1).create()
    model = replace(plain, network=plain.network.on_mesh(mesh))
    conversations = [chat(one, max_new_tokens=9, stop_tokens=()) for one in (plain, model)]
    for message in MESSAGES[:2]:
        alone, on_mesh = (conversation.say(message) for conversation in conversations)
        assert on_mesh == alone
    assert [conversation.turn.cached_tokens > 0 for conversation in conversations] == [True, False]


@pytest.mark.full
def test_lengths_beyond_calibration_are_said_when_the_cache_grows(plain):
    # The basis was calibrated on 64 tokens; a turn that fits gets no warning.
    model = replace(plain, basis=TinyModel(SHORT).basis())
    conversation = chat(model, max_new_tokens=10, stop_tokens=())
    conversation.say("a")
    with pytest.warns(UserWarning, match="sequences may have 1.. tokens, but the basis was .* 64:"):
        conversation.say("a long message " * 8)
    conversation.say("b")


def test_new_turns_do_not_recompile(plain):
    conversation = chat(plain, max_new_tokens=9, stop_tokens=())
    conversation.say("the end")
    conversation.say("Is it?")
    sizes = steps.prefill._cache_size(), steps.decode._cache_size()
    conversation.say("no")
    assert (steps.prefill._cache_size(), steps.decode._cache_size()) == sizes


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"max_new_tokens": 0}, PromptError, "max_new_tokens=0"),
        ({"max_new_tokens": True}, PromptError, "max_new_tokens=True"),
        ({"sampling": [Sampling()] * 2}, PromptError, "sampling has 2"),
        ({"stop": [""]}, PromptError, "empty string"),
        ({"stop_tokens": "x"}, PromptError, "stop_tokens='x'"),
        ({"prefill_chunk": 33}, PromptError, "prefill_chunk=33"),
        ({"system": 3}, ChatError, "content=3"),
        ({"template_options": {"enable_thinking": False}}, ChatError, "template options: enable_thinking"),
        ({"template_options": {"messages": []}}, ChatError, "unknown template options: messages"),
        ({"template_options": {"self": 1}}, ChatError, "unknown template options: self"),
    ],
)
def test_bad_options_are_refused_at_once(plain, options, error, said):
    with pytest.raises(error, match=said):
        chat(plain, **options)


def test_a_system_message_that_the_template_refuses_is_refused_at_once(plain):
    model = replace(plain, chat_template=ChatTemplate(GEMMA))
    with pytest.raises(ChatError, match="System role not supported"):
        chat(model, system="hold on")


def test_what_is_missing_is_named(plain):
    for model, named in (
        (replace(plain, chat_template=None), "no chat template"),
        (replace(plain, tokenizer=None), "no tokenizer"),
    ):
        for call in (
            chat,
            chat_stop_tokens,
            partial(chat_prompt, messages=[{"role": "user", "content": "x"}]),
        ):
            with pytest.raises(ChatError, match=named):
                call(model)


def test_stop_tokens_are_those_of_model_and_tokenizer(plain):
    assert chat_stop_tokens(plain) == (2, 1)
    for special in ({}, {"eos_token": "</s>"}, {"eos_token": "nowhere"}):
        assert chat_stop_tokens(replace(plain, chat_template=ChatTemplate(CHATML, special))) == (2,)


def test_stop_tokens_outside_the_vocabulary_are_none(plain):
    # Otherwise `chat` itself would fail.
    config = replace(plain.config, vocab_size=2)
    assert chat_stop_tokens(TextSide(config, plain.tokenizer, plain.chat_template)) == (1,)


def test_template_options_reach_the_template(plain, read):
    model = replace(plain, chat_template=ChatTemplate(THINKING))
    chat(model, max_new_tokens=1, template_options={"enable_thinking": False}).say("a")
    assert plain.tokenizer.decode(read.prompts[0]).endswith("<think>\n\n</think>\n\n")


def test_text_of_tokens_where_they_stand():
    # A decoder that strips the space before a first word must not strip it before later words.
    tokenizer = sentencepiece()
    prompt, chosen = tokenizer.encode("It is").ids, tokenizer.encode(" the man").ids
    assert tokenizer.decode(chosen) == "the man"
    join = get_token_bytes(tokenizer).join
    assert join(chosen, before=prompt) == " the man"
    end = tokenizer.token_to_id("</s>")
    assert join([*chosen, end], before=prompt) == " the man</s>"


def test_tokens_after_a_beginning():
    tokenizer = chat_tokenizer()

    def behind(beginning, text):
        return tokenize_after(tokenizer, beginning, text, tokenizer.encode(text).ids)

    assert behind("a", "a the") == tokenizer.encode(" the").ids
    assert behind("b", "a the") is None
    assert behind("a th", "a the") == tokenizer.encode("e").ids
    assert behind("at", "ath") is None  # The text is "a" and "th".
    assert behind("a", "a") == []


def test_a_folder_is_no_model():
    with pytest.raises(ChatError, match=r"model='folder' must be a model; pass zdc_jax.load\(FOLDER\)"):
        chat_stop_tokens("folder")
