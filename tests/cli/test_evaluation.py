import json
import random

import pytest
import torch
import yaml
from tiny_models import WORDS, goes_on, tokenizer, write_checkpoint

ROWS, TOKENS = 12, 4
METRICS = {
    "choose": ("multiple_choice", "acc"),
    "last_word": ("loglikelihood", "perplexity"),
    "go_on": ("generate_until", "exact_match"),
}


def log_likelihood(model, asked, answer):
    ids = tokenizer(f"{asked} {answer}", return_tensors="pt")["input_ids"]
    start = len(tokenizer.encode(asked))
    with torch.no_grad():
        likely = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
    return likely[start - 1 :].sum().item()


@pytest.fixture
def sets(tmp_path, seed):
    """A model, a folder with three tasks about it, and the figures that it must reach there."""
    model = write_checkpoint(tmp_path / "model")
    draw, rows, right, likelihoods = random.Random(seed), [], 0, []
    for _ in range(ROWS):
        asked = " ".join(draw.choices(WORDS, k=draw.randint(1, 9)))
        choices = draw.sample(WORDS, 3)
        favourite = max(range(3), key=lambda number: log_likelihood(model, asked, choices[number]))
        known = draw.random() < 0.5
        right += known
        written = goes_on(model, asked, TOKENS)
        rows.append(
            {
                "asked": asked,
                "choices": choices,
                "answer": favourite if known else (favourite + 1) % 3,
                "written": written if known else f"{written}?",
                "last": choices[0],
            }
        )
        likelihoods.append(log_likelihood(model, asked, choices[0]))
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = {
        "choose": {"doc_to_target": "answer", "doc_to_choice": "choices"},
        "last_word": {"doc_to_target": " {{last}}"},
        "go_on": {
            "doc_to_target": "{{written}}",
            "generation_kwargs": {"until": ["never"], "max_gen_toks": TOKENS, "do_sample": False},
        },
    }
    for task, (kind, metric) in METRICS.items():
        settings = {
            "task": task,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
            "test_split": "test",
            "output_type": kind,
            "doc_to_text": "{{asked}}",
            "metric_list": [{"metric": metric}],
        }
        (folder / f"{task}.yaml").write_text(yaml.safe_dump(settings | answers[task]))
    perplexity = torch.tensor(likelihoods, dtype=torch.float64).mean().neg().exp().item()
    return tmp_path / "model", folder, {"choose": right / ROWS, "go_on": right / ROWS, "last_word": perplexity}


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def test_figures_of_local_tasks_of_every_kind(call, sets, tmp_path):
    model, folder, expected = sets
    out = tmp_path / "deep" / "figures.json"
    arguments = ("evaluate", model, "--include-path", folder, "--tasks", "choose, go_on", "--tasks", "last_word", "--out", out)
    code, shown, _ = call(*arguments)
    assert code == 0 and "choose: guessing gives 0.3333" in shown
    report = json.loads(out.read_text())
    figures = {task: report["results"][task][f"{metric},none"] for task, (_, metric) in METRICS.items()}
    assert figures == pytest.approx(expected, rel=1e-4)
    assert report["checkpoint"] == str(model)
    assert report["settings"] == {
        "tasks": ["choose", "go_on", "last_word"],
        "num_fewshot": None,
        "limit": None,
        "batch_size": 8,
    }
    assert report["chance"] == pytest.approx({"choose": 1 / 3}) and report["provenance"]["versions"]["lm_eval"]
    assert [path.name for path in out.parent.iterdir()] == ["figures.json"]


def out_of_memory(*arguments, **options):
    raise MemoryError


def test_a_stopped_command_goes_on(call, sets, tmp_path, monkeypatch):
    model, folder, expected = sets
    arguments = ("evaluate", model, "--include-path", folder, "--tasks", "choose,go_on", "--out", tmp_path / "figures.json")
    calls = []
    forward = "dcformer.models.dcformer.modeling_dcformer.DCFormerForCausalLM.forward"
    generate = "transformers.generation.GenerationMixin.generate"
    with monkeypatch.context() as patch:
        patch.setattr(generate, out_of_memory)
        with pytest.raises(MemoryError):
            call(*arguments)
    with monkeypatch.context() as patch:
        patch.setattr(generate, lambda model, input_ids, **options: calls.append("generate") or input_ids)
        patch.setattr(forward, lambda *_, **__: calls.append("forward"))
        assert call(*arguments)[0] == 0
    assert set(calls) == {"generate"}
    assert json.loads((tmp_path / "figures.json").read_text())["results"]["choose"]["acc,none"] == expected["choose"]


def test_mistakes_are_one_line(call, sets, tmp_path):
    model, folder, _ = sets
    for arguments, named in [
        (("--tasks", "choose", "--include-path", tmp_path / "nowhere"), ["include_path", "nowhere"]),
        (("--tasks", "chose,go_on", "--include-path", folder), ["chose", str(folder)]),
    ]:
        code, out, err = call("evaluate", model, *arguments, "--out", tmp_path / "figures.json")
        assert (code, out) == (1, "") and err.count("\n") == 1
        assert all(name in err for name in named)
