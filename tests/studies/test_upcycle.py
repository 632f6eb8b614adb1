"""The upcycling study end to end, on a tiny model."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dcformer.studies import upcycle as study
from dcformer.studies.upcycle import WAYS, upcycle
from dcformer.training import DataSettings, TrainSettings
from dcformer.training.tokenizer import train_tokenizer

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {file}}}}}
validation_split: validation
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture
def pretrained(tmp_path):
    tokenizer = train_tokenizer(iter([" ".join(WORDS)] * 4), 300)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(8):
        (texts / f"{i}.txt").write_text(" ".join(WORDS[j] for j in torch.randint(len(WORDS), (100,)).tolist()))
    rows = [{"question": "alpha", "choices": [" beta", " gamma"], "answer": 0}] * 3
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "words.yaml").write_text(TASK.format(name="words", file=tmp_path / "rows.jsonl"))
    return tmp_path


def test_each_way_is_trained_once(pretrained, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(pretrained / "cache"))

    def run(**changes):
        return upcycle(
            str(pretrained / "model"),
            DataSettings(data=(str(pretrained / "texts"),), block_size=16, cache_dir=str(pretrained / "cache")),
            TrainSettings(out=str(pretrained / "work"), steps=2, batch_size=2, eval_rows=4),
            pretrained / "out",
            learning_rates=(1e-3, 1e-2),
            new_weights_learning_rates=(1e-2,),
            include_path=pretrained / "tasks",
            **{"tasks": ["words"], **changes},
        )

    report = run()
    assert report == json.loads((pretrained / "out" / "upcycle.json").read_text())
    assert {path.name for path in (pretrained / "out").iterdir()} == {"upcycle.json", "upcycle.png", "upcycle.svg"}
    assert report["identity"]["generation_is_equal"] and report["identity"]["largest_difference"] < 2e-5
    assert list(report["best"]) == list(WAYS) and list(report["evaluations"]) == ["pretrained", *report["best"].values()]
    assert len(report["runs"]) == 6 and all(len(run["evaluations"]) == 2 for run in report["runs"].values())
    for way in ("everything", "control"):
        losses = {name: run["evaluations"][-1]["loss"] for name, run in report["runs"].items() if run["way"] == way}
        assert report["best"][way] == min(losses, key=losses.get)
    composition, lora = report["parameters"]["composition"], report["runs"]["lora-0.01"]["trained_parameters"]
    assert report["runs"]["composition-0.01"]["trained_parameters"] == composition
    assert abs(lora / composition - 1) < 0.5
    trained = AutoModelForCausalLM.from_pretrained(pretrained / "work" / report["best"]["composition"])
    base = AutoModelForCausalLM.from_pretrained(pretrained / "model")
    for name, parameter in base.named_parameters():
        assert torch.equal(trained.get_parameter(name), parameter)

    monkeypatch.setattr(study, "evaluate", None)
    monkeypatch.setattr("dcformer.training.trainer.ExactTrainer", None)
    assert {**run(), "provenance": None} == {**report, "provenance": None}
    with pytest.raises(ValueError, match="of another study: settings differ"):
        run(limit=1)
