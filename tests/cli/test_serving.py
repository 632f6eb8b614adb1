import os
import random
import signal
import socket
import subprocess
import sys
import time

import openai
import pytest
from tiny_models import TEMPLATE, WORDS, goes_on, tokenizer, write_checkpoint
from transformers import LlamaConfig, LlavaConfig
from transformers.cli.serving.model_manager import ModelLoader

from dcformer import DCFormerForCausalLM
from dcformer.cli.loader import Loader

TOKENS = 8
LIKELIEST = {"max_tokens": TOKENS, "temperature": 0}
HALF = "\N{REPLACEMENT CHARACTER}"  # bytes that make no character yet; they are not streamed


class Server:
    """`dcformer serve` in a process of its own, without a network."""

    def __init__(self, folder, *options):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "dcformer", "serve", str(folder), "--host", "127.0.0.1", "--port", str(port), *options]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder)}
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=30)
        self.model = str(folder)

    def ready(self):
        """Waits until it answers."""
        for _ in range(600):
            assert self.process.poll() is None, self.process.stdout.read()
            try:
                return self.client.models.list()
            except openai.APIConnectionError:
                time.sleep(0.1)
        raise TimeoutError

    def stop(self, number):
        """Sends a signal; gives the exit code and all that was printed."""
        self.process.send_signal(number)
        out, _ = self.process.communicate(timeout=20)
        return self.process.returncode, out


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    model, server = write_checkpoint(folder, chat_template=TEMPLATE), Server(folder)
    server.ready()
    yield server, model
    server.process.kill()
    server.process.wait()


@pytest.fixture
def prompt(served, seed):
    """One that goes on with more characters than a token has, so that they come in parts; other bytes make none."""
    rng, longest = random.Random(seed), max(map(len, WORDS)) + 1
    while True:
        drawn = " ".join(rng.choices(WORDS, k=5))
        if len(goes_on(served[1], drawn, TOKENS).replace(HALF, "")) > longest:
            return drawn


def test_completions_whole_and_streamed(served, prompt):
    server, model = served
    expected = goes_on(model, prompt, TOKENS)
    whole = server.client.completions.create(model=server.model, prompt=prompt, **LIKELIEST)
    assert whole.choices[0].text == expected
    assert whole.usage.prompt_tokens == len(tokenizer.encode(prompt))
    chunks = list(server.client.completions.create(model=server.model, prompt=prompt, stream=True, **LIKELIEST))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.rstrip(HALF)
    assert sum(bool(chunk.choices[0].text) for chunk in chunks) > 1


def test_chats_whole_and_streamed(served, prompt):
    server, model = served
    messages = [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": "eta"},
        {"role": "user", "content": "iota"},
    ]
    expected = goes_on(model, f"<user>{prompt}\n<assistant>eta\n<user>iota\n<assistant>", TOKENS)
    whole = server.client.chat.completions.create(model=server.model, messages=messages, **LIKELIEST)
    assert whole.choices[0].message.content == expected
    chunks = list(server.client.chat.completions.create(model=server.model, messages=messages, stream=True, **LIKELIEST))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.rstrip(HALF)
    assert chunks[0].choices[0].delta.role == "assistant"


def test_it_lists_its_model_and_refuses_others(served, prompt):
    server, _ = served
    assert [model.id for model in server.client.models.list()] == [server.model]
    with pytest.raises(openai.BadRequestError):
        server.client.completions.create(model="other", prompt=prompt)


def test_a_client_that_leaves_is_not_missed(served, prompt):
    server, model = served
    with server.client.completions.create(model=server.model, prompt=prompt, max_tokens=1000, stream=True) as stream:
        next(iter(stream))
    again = server.client.completions.create(model=server.model, prompt=prompt, **LIKELIEST)
    assert again.choices[0].text == goes_on(model, prompt, TOKENS)


def test_control_c_ends_it(served):
    server, _ = served
    code, out = server.stop(signal.SIGINT)
    assert code == 0 and "Traceback" not in out and "Application shutdown complete" in out


def test_what_transformers_has_is_loaded_as_it_does(tmp_path, monkeypatch):
    """Vision-language models too, of classes that only it knows how to choose."""
    monkeypatch.setattr(ModelLoader, "_load_model", lambda self, model_id, *_: model_id)
    loader = Loader("cpu")
    for name, config in (("llava", LlavaConfig(architectures=["LlavaForConditionalGeneration"])), ("gguf", LlamaConfig())):
        config.save_pretrained(tmp_path / name)
        assert loader._load_model(str(tmp_path / name)) == str(tmp_path / name)
    write_checkpoint(tmp_path / "ours")
    assert isinstance(loader._load_model(str(tmp_path / "ours")), DCFormerForCausalLM)


def test_help_and_mistakes(call, tmp_path):
    code, out, _ = call("serve", "--help")
    assert code == 0 and "dcformer serve" in out and "--port" in out
    code, out, err = call("serve", tmp_path, "--prot", "1")
    assert (code, out) == (2, "") and err.count("\n") == 1 and "--prot" in err
