import io
import os
import random
import signal
import sys

import pytest
from tiny_models import KINDS, TEMPLATE, WORDS, goes_on, tokenizer, write_checkpoint

TOKENS = 6
GREEDY = ("--greedy", "--max-new-tokens", TOKENS)


@pytest.fixture
def questions(seed):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=3)) for _ in range(3)]


@pytest.fixture
def typed(monkeypatch):
    return lambda lines: monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_each_answer_goes_on_from_all_that_was_said(call, tmp_path, questions, typed, kind, template):
    model = write_checkpoint(tmp_path, kind, template)
    said, answers = "", []
    for question in questions:
        said += f"<user>{question}\n<assistant>" if template else question
        answers.append(goes_on(model, said, TOKENS))
        said += answers[-1] + "\n"
    typed([questions[0], "", *questions[1:]])
    code, out, _ = call("chat", tmp_path, *GREEDY)
    assert code == 0
    assert out == "".join(f"{answer}\n" for answer in answers)


def test_the_oldest_is_forgotten_where_the_context_ends(call, tmp_path, questions, typed):
    asked = [f"<user>{question}\n<assistant>" for question in questions]
    room = max(len(tokenizer.encode(text)) for text in asked)
    model = write_checkpoint(tmp_path, "dcformer", TEMPLATE, max_position_embeddings=room + TOKENS)
    typed(questions)
    code, out, _ = call("chat", tmp_path, *GREEDY)
    assert code == 0
    assert out == "".join(f"{goes_on(model, text, TOKENS)}\n" for text in asked)


def test_the_same_seed_says_the_same(call, tmp_path, questions, typed):
    write_checkpoint(tmp_path)

    def chat(seed):
        typed(questions)
        return call("chat", tmp_path, "--max-new-tokens", 20, "--temperature", 5, "--seed", seed)[1]

    first = chat(1)
    assert chat(1) == first != chat(2)


@pytest.mark.parametrize(("when", "name"), [("waiting", "builtins.input"), ("answering", "transformers.TextStreamer.put")])
def test_control_c_leaves(call, tmp_path, questions, typed, monkeypatch, when, name):
    write_checkpoint(tmp_path)
    typed(questions)
    monkeypatch.setattr(name, lambda *arguments: os.kill(os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        assert call("chat", tmp_path, *GREEDY)[:2] == (0, "\n")
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("kind", KINDS)
def test_generate_takes_any_model_of_transformers(call, tmp_path, questions, kind):
    model = write_checkpoint(tmp_path, kind)
    code, out, _ = call("generate", tmp_path, "--prompt", questions[0], *GREEDY)
    assert (code, out) == (0, f"{questions[0]}{goes_on(model, questions[0], TOKENS)}\n")


def test_a_hub_name_that_cannot_be_fetched_is_one_line(call, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, out, err = call("generate", "nobody/nothing")
    assert (code, out) == (1, "") and err.count("\n") == 1 and "nobody/nothing cannot be loaded" in err
