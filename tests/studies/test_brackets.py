import json
import math
from pathlib import Path

import pytest
import torch
from transformers import PretrainedConfig

from dcformer import DCFormerConfig, DCFormerForCausalLM
from dcformer.studies.brackets import bracket_accuracy, read_tasks, report_on, task, without_brackets
from dcformer.training.tokenizer import train_tokenizer

AUTHORS = Path(__file__).parents[3] / "shared" / "synthetic_tasks.jsonl"
ROWS = [
    ("owns", "\nAda owns a fig. => fruit\nBo owns a lute. => a kind of [ musical instrument ]\nCy owns a bee. => [ insect ]\n"),
    ("likes", "\nAda likes Bern.\nBo likes Rome. => [ Rome ]\n"),
    ("owns", "\nCy owns a car, => [ a car ]\n"),
    ("nothing", "\nno brackets here\n"),
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(iter([without_brackets(text) for _, text in ROWS] * 5), 330)


@pytest.fixture
def model(tokenizer):
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return DCFormerForCausalLM(DCFormerConfig(vocab_size=len(tokenizer), initializer_range=0.5, **shape)).eval()


def written(folder, rows):
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps({"task_id": family, "texts": text}) + "\n" for family, text in rows))
    return path


def test_brackets_are_taken_out_and_remembered():
    found = task(*ROWS[0])
    assert found.text == without_brackets(ROWS[0][1]) == ROWS[0][1].replace("[ ", "").replace(" ]", "")
    assert [found.text[start:end] for start, end in found.answers] == ["musical instrument", "insect"]


def test_accuracy_and_loss_are_those_of_each_word_alone(model, tokenizer, tmp_path):
    """Against the model asked for one word at a time, without batches and padding."""
    expected = {}
    for family, text in ROWS:
        start = 0
        while (start := text.find("[ ", start)) >= 0:
            before, word = without_brackets(text[:start].rstrip()), without_brackets(text[start : text.index(" ]", start) + 2])
            prompt = tokenizer.encode(before)
            whole = tokenizer.encode(f"{before} {word}")
            assert whole[: len(prompt)] == prompt
            with torch.no_grad():
                losses = model(torch.tensor([whole])).logits[0].log_softmax(-1)
            places = range(len(prompt), len(whole))
            right = all(losses[i - 1].argmax() == whole[i] for i in places)
            expected.setdefault(family, []).append((right, -sum(losses[i - 1, whole[i]].item() for i in places)))
            start += 2
    tasks = read_tasks(written(tmp_path, ROWS))
    for batch_size in (1, 3, 8):
        found = bracket_accuracy(model, tokenizer, tasks, batch_size=batch_size)
        assert list(found) == ["owns", "likes"]
        for family, words in expected.items():
            assert found[family]["words"] == len(words)
            assert found[family]["accuracy"] == sum(right for right, _ in words) / len(words)
            assert found[family]["loss"] == pytest.approx(sum(loss for _, loss in words) / len(words), rel=1e-4)


def test_a_word_is_right_only_if_all_its_tokens_are(tokenizer):
    class Oracle(torch.nn.Module):
        """Knows every next token but those after a given one."""

        config, device, unknown_after = PretrainedConfig(), torch.device("cpu"), torch.tensor([])

        def forward(self, input_ids, use_cache):
            logits = 100.0 * torch.nn.functional.one_hot(input_ids.roll(-1, 1), len(tokenizer))
            logits[torch.isin(input_ids, self.unknown_after)] = 0
            return type("Output", (), {"logits": logits})

    text = "a kind of [ musical instrument ]"
    musical = tokenizer.encode("a kind of musical")
    oracle = Oracle()
    for unknown_after, accuracy in (([], 1), (musical[-1:], 0)):
        oracle.unknown_after = torch.tensor(unknown_after)
        found = bracket_accuracy(oracle, tokenizer, [task("one", text)])["one"]
        assert found["accuracy"] == accuracy
        assert found["loss"] == pytest.approx(0 if accuracy else math.log(len(tokenizer)), abs=1e-3)


def test_a_word_without_anything_before_it_is_left_out(model, tokenizer):
    found = bracket_accuracy(model, tokenizer, [task("one", "[ Ada ] owns a [ fig ]"), task("two", "[ Bo ]")])
    assert {family: figures["words"] for family, figures in found.items()} == {"one": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"task_id": "a", "texts": "[ b ]"}\n{"task_id": "a"}\n', "line 2, must be such as .*: KeyError"),
        ("no JSON\n", 'line 1, must be such as {"task_id"'),
        ('{"task_id": "a", "texts": 3}\n', "line 1, must be such as"),
        ("null\n", "line 1, must be such as"),
        ('{"task_id": "a", "texts": "b [ \\ud800 ]"}\n', "line 1, must be such as .*: UnicodeEncodeError"),
        ('{"task_id": "a", "texts": "b [ \u00df ]"}\n'.encode("latin-1"), "must be UTF-8: .* byte 0xdf"),
        ('{"task_id": "a", "texts": "plain"}\n', "has no words in brackets"),
        ('{"task_id": "a", "texts": "[ alone ]"}\n', "has no words in brackets"),
        ("", "has no words in brackets"),
        (None, "is no file"),
    ],
)
def test_files_that_are_none_are_named(tmp_path, content, message):
    path = tmp_path / "tasks.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        read_tasks(path)


def test_files_of_other_systems_are_read_alike(tmp_path):
    rows = [json.dumps({"task_id": "a", "texts": f"x\u2028{i} [ \u00df ]"}, ensure_ascii=False) for i in range(2)]
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(("\ufeff" + "\r\n".join([*rows, "", ""])).encode())
    assert [each.text for each in read_tasks(path)] == [f"x\u2028{i} \u00df" for i in range(2)]


def test_a_text_longer_than_the_context_is_named(model, tokenizer):
    tasks = [task("short", ROWS[1][1]), task("long", ROWS[0][1])]
    model.config.max_position_embeddings = length = len(tokenizer(tasks[1].text)["input_ids"])
    bracket_accuracy(model, tokenizer, tasks)
    model.config.max_position_embeddings -= 1
    with pytest.raises(ValueError, match=f"'long' has {length} tokens; the model takes at most {length - 1}"):
        bracket_accuracy(model, tokenizer, tasks)


def test_report(model, tokenizer, tmp_path):
    path = written(tmp_path, ROWS)
    found = bracket_accuracy(model, tokenizer, read_tasks(path))
    report = report_on(path, found, "mine")
    assert report["tasks"]["file"] == "tasks.jsonl" and len(report["tasks"]["sha256"]) == 64
    assert report["accuracy"] == pytest.approx((found["owns"]["accuracy"] + found["likes"]["accuracy"]) / 2)
    assert report["checkpoint"] == "mine" and report["provenance"]["versions"]["torch"]
    json.dumps(report, allow_nan=False)


@pytest.mark.skipif(not AUTHORS.exists(), reason="the authors' tasks are not here")
def test_the_authors_tasks(model, tokenizer):
    tasks = read_tasks(AUTHORS)
    assert len(tasks) == 888 and len({each.family for each in tasks}) == 74
    assert all(len(each.answers) == 6 and "[" not in each.text for each in tasks)
    found = bracket_accuracy(model, tokenizer, tasks[:4])
    assert found["task0"]["words"] == 24
