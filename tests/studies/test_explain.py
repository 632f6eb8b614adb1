import base64
import html.parser
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch

from dcformer import DCFormerConfig, DCFormerForCausalLM
from dcformer.studies.explain import MAX_TOKENS, explain
from dcformer.studies.heads import attention_inputs, maps, mixing
from dcformer.training.tokenizer import train_tokenizer

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TEXT = 'a</script><b onclick="evil()">&amp; <!-- {{data}} é\n\t$& b'
NAME = "runs/<i>'one\"{{data}}"
SHAPE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(iter(["some text to learn from"]), 300)


@pytest.fixture
def model(tokenizer):
    model = DCFormerForCausalLM(DCFormerConfig(vocab_size=len(tokenizer), initializer_range=0.3, **SHAPE)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".compose." in name:
                parameter.normal_(0, 0.2)
    return model


class Elements(html.parser.HTMLParser):
    """Tags with their attributes, and the text of elements that have an id."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text, self.open = [], {}, None
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.open = dict(attributes).get("id")

    def handle_data(self, data):
        if self.open:
            self.text[self.open] = self.text.get(self.open, "") + data

    def handle_endtag(self, tag):
        self.open = None


def numbers(packed):
    return torch.from_numpy(np.frombuffer(base64.b64decode(packed["data"]), "<i2") * packed["scale"]).float()


def close(found, expected):
    torch.testing.assert_close(found, expected.flatten(), rtol=0, atol=expected.abs().max().item() / 60000 + 1e-6)


def test_the_page_holds_what_the_model_computes(model, tokenizer):
    ids = tokenizer.encode(TEXT)
    T = len(ids)
    data = json.loads(Elements(explain(model, tokenizer, TEXT, checkpoint="mine")).text["data"])
    assert data["heads"] == 4 and len(data["tokens"]) == T and data["tokens"][:2] == ["a", "<"]
    for layer, inputs in zip(data["layers"], attention_inputs(model, torch.tensor([ids])), strict=True):
        found, below = maps(inputs), torch.ones(T, T, dtype=torch.bool).tril()
        for name in ("raw", "composed"):
            close(numbers(layer[name]), getattr(found, name)[0][:, below])
        for side in ("pre", "post"):
            matrices = mixing(getattr(inputs, side), 1, T, 4)
            for name in ("base", "query", "key"):
                close(numbers(layer[side][name]), getattr(matrices, name))


def test_text_and_name_stay_text(model, tokenizer):
    page = explain(model, tokenizer, TEXT, checkpoint=NAME)
    found, plain = Elements(page), Elements(explain(model, tokenizer, "a", checkpoint="mine"))
    assert [tag for tag, _ in found.tags] == [tag for tag, _ in plain.tags]
    assert found.text["data"].startswith('{"tokens"')
    assert "<b onclick" not in page and page.count("</script>") == 2
    assert page.count("runs/&lt;i&gt;&#x27;one&quot;{{data}}") == 2


def test_the_page_needs_nothing_else(model, tokenizer):
    page = explain(model, tokenizer, "a", checkpoint="mine")
    tags = Elements(page).tags
    assert not [
        tag for tag, attributes in tags if "src" in attributes or not attributes.get("href", "data:").startswith("data:")
    ]
    assert "default-src 'none'" in page and not re.search(r"fetch\(|import |@import|url\(", page)


def test_plain_models_have_maps_and_no_flow(tokenizer):
    config = DCFormerConfig(vocab_size=len(tokenizer), compose=None, **SHAPE)
    data = json.loads(Elements(explain(DCFormerForCausalLM(config), tokenizer, "a b", checkpoint="plain")).text["data"])
    for layer in data["layers"]:
        assert layer["pre"] is layer["post"] is None and layer["raw"] == layer["composed"]


@pytest.mark.parametrize("text", ["", "?" * (MAX_TOKENS + 1)])
def test_texts_that_do_not_fit_are_refused(model, tokenizer, text):
    with pytest.raises(ValueError, match=rf"text has {len(text)} tokens; it must have 1 to {MAX_TOKENS}"):
        explain(model, tokenizer, text, checkpoint="mine")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_in_a_browser(model, tokenizer, tmp_path):
    """Another layer, head and pair of tokens than the page opens with: its numbers, and no complaint."""
    (tmp_path / "page.html").write_text(explain(model, tokenizer, TEXT, checkpoint=NAME))
    ids = tokenizer.encode(TEXT)
    layer, head, query, key = 1, 2, len(ids) - 3, 4
    address = f"{(tmp_path / 'page.html').as_uri()}#layer={layer}&head={head}&query={query}&key={key}"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "CONSOLE" not in done.stderr
    shown = Elements(done.stdout)
    inputs = attention_inputs(model, torch.tensor([ids]))[layer]
    found = maps(inputs)
    for kind in ("raw", "composed"):
        value = getattr(found, kind)[0, head, query, key].item()
        assert float(shown.text[f"value-{kind}"].replace("\N{MINUS SIGN}", "-")) == pytest.approx(value, abs=6e-4)
    rows = re.search(r'<tbody id="sources">(.*?)</tbody>', done.stdout)[1].split("</tr>")[:-1]
    cells = torch.tensor([[float(x.replace("\N{MINUS SIGN}", "-")) for x in re.findall(r">([^<>]+)<", row)] for row in rows])
    flows = []
    for side in (inputs.pre, inputs.post):
        matrices = mixing(side, 1, len(ids), 4)
        flows.append((matrices.base + matrices.query[0, query] + matrices.key[0, key] + torch.eye(4))[:, head])
    values = [getattr(found, kind)[0, :, query, key] for kind in ("raw", "composed")]
    expected = torch.stack([torch.arange(4.0), *flows, *values], dim=1)
    torch.testing.assert_close(cells, expected, rtol=1e-3, atol=2e-3)
    tokens = re.findall(r"<button[^>]*>([^<]*)</button>", done.stdout)
    assert len(tokens) == 3 * len(ids) and tokens[1] == "&lt;"
