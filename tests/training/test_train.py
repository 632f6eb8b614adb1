import io
import json
import math
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from rich.console import Console
from tiny_run import tiny_config, tiny_settings
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.utils import logging

from dcformer.training import exact_trainer, train
from dcformer.training import trainer as trainer_module
from dcformer.training.metrics import read_metrics


def lines(out, split):
    return [line for line in read_metrics(out / "metrics.jsonl") if line["split"] == split]


def test_a_run_leaves_a_model_that_does_what_was_measured(data, tmp_path):
    config = tiny_config()
    before = config.to_dict()
    result = train(config, data, tiny_settings(tmp_path / "run", eval_rows=None))
    assert config.to_dict() == before
    out = tmp_path / "run"
    names = {path.name for path in out.iterdir()} - {"tensorboard"}
    assert {"config.json", "model.safetensors", "tokenizer.json", "metrics.jsonl", "run.json", "result.json"} <= names
    assert not any(name.endswith((".bin", ".pt", ".pth")) or name.startswith(("checkpoint", ".")) for name in names)

    model = AutoModelForCausalLM.from_pretrained(out).eval()
    assert model.config.use_cache == config.use_cache
    rows = torch.tensor(data.validation["input_ids"])
    with torch.no_grad():
        logits = model(rows).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).item()
    last = result.evaluations[-1]
    assert last["loss"] == pytest.approx(loss, rel=1e-5)
    assert last["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert last["bits_per_byte"] == pytest.approx(loss / math.log(2) / data.bytes_per_token, rel=1e-5)
    assert (last["step"], last["tokens"]) == (8, 8 * 2 * 32)
    assert result.parameters == sum(p.numel() for p in model.parameters())
    assert result.tokens_per_second == pytest.approx(last["tokens"] / result.seconds)

    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer("alpha beta")["input_ids"]) == "alpha beta"
    assert model.config.eos_token_id == tokenizer.eos_token_id
    continued = model.generate(rows[:1, :4], max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert continued.shape == (1, 7)


def test_it_learns(data, tmp_path):
    result = train(
        tiny_config(),
        data,
        tiny_settings(tmp_path / "run", steps=40, learning_rate=2e-2, batch_size=8, save_every=40, eval_every=40),
    )
    first, last = lines(tmp_path / "run", "train")[0], result.evaluations[-1]
    assert last["loss"] < first["loss"] - 1.5


def test_metrics_have_every_step_and_evaluation(data, tmp_path):
    train(tiny_config(), data, tiny_settings(tmp_path / "run", steps=7, eval_every=3))
    assert [line["step"] for line in lines(tmp_path / "run", "train")] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["step"] for line in lines(tmp_path / "run", "validation")] == [3, 6, 7]
    for line in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        assert all(math.isfinite(value) for name, value in line.items() if name != "split")
    if find_spec("tensorboard"):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
        assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6, 7]
        assert len(events.Scalars("validation/bits_per_byte")) == 3


def test_the_schedule_warms_up_and_ends_at_the_floor(data, tmp_path):
    settings = tiny_settings(tmp_path / "run", steps=10, warmup_steps=4, learning_rate=0.01, min_learning_rate_ratio=0.2)
    train(tiny_config(), data, settings)
    rates = [line["learning_rate"] for line in lines(tmp_path / "run", "train")]
    expected = [0.0025, 0.005, 0.0075, 0.01]
    expected += [0.01 * (0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * step / 6))) for step in range(1, 7)]
    assert rates == pytest.approx(expected)
    assert rates[-1] == pytest.approx(0.002)


def test_composition_weights_have_their_own_learning_rate(data, tmp_path, monkeypatch):
    """AdamW's first step moves a weight by its learning rate, whatever the gradient; a share of 0 moves none."""
    moved = {}

    def step(self, closure=None):
        before = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]
        result = original(self, closure)
        for group, old in zip(self.param_groups, before, strict=True):
            for p, o in zip(group["params"], old, strict=True):
                moved.setdefault(p.shape, []).append((p.detach() - o).abs().max().item())
        return result

    original = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    settings = {"steps": 1, "warmup_steps": 0, "learning_rate": 0.01, "min_learning_rate_ratio": 1.0, "weight_decay": 0.0}
    for ratio in (0.3, 0.0):
        moved.clear()
        train(tiny_config(), data, tiny_settings(tmp_path / str(ratio), composition_learning_rate_ratio=ratio, **settings))
        # Only composition weights have more than two dimensions here.
        composed, others = (
            [max(sizes) for shape, sizes in moved.items() if (len(shape) > 2) == is_composed] for is_composed in (True, False)
        )
        assert len(composed) == 3 and len(others) >= 5
        assert max(others) == pytest.approx(0.01, rel=0.01)
        assert composed == pytest.approx([0.01 * ratio] * 3, rel=0.01)


def test_gradients_are_clipped_and_only_matrices_decay(data, tmp_path, monkeypatch):
    seen = []
    original = torch.optim.AdamW.step

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        seen.append((torch.nn.utils.get_total_norm(gradients).item(), self.param_groups))
        return original(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    train(tiny_config(), data, tiny_settings(tmp_path / "run", max_grad_norm=0.01, weight_decay=0.3, beta2=0.9))
    norms = [line["grad_norm"] for line in lines(tmp_path / "run", "train")]
    assert min(norms) > 0.02
    assert [norm for norm, _ in seen] == pytest.approx([0.01] * 8, rel=1e-3)
    for group in seen[0][1]:
        assert group["betas"] == (0.9, 0.9)
        assert {p.ndim >= 2 for p in group["params"]} == {group["weight_decay"] == 0.3}
    assert {group["weight_decay"] for group in seen[0][1]} == {0.3, 0.0}


@pytest.mark.parametrize("unequal", [False, True])
def test_accumulation_equals_one_large_batch(data, tmp_path, monkeypatch, unequal):
    def masked(rows):
        """Labels of very different number in each row."""
        batch = exact_trainer.collate(rows)
        labels = batch["labels"].clone()
        for row in labels:
            row[2 + row[0] * row[1] % 28 :] = -100
        return {**batch, "labels": labels}

    if unequal:
        monkeypatch.setattr(trainer_module, "collate", masked)
    config = tiny_config(attention_dropout=0.0)
    train(config, data, tiny_settings(tmp_path / "large", batch_size=8, max_grad_norm=100.0))
    train(config, data, tiny_settings(tmp_path / "small", batch_size=2, gradient_accumulation=4, max_grad_norm=100.0))
    for name in ("loss", "grad_norm"):
        large, small = ([line[name] for line in lines(tmp_path / run, "train")] for run in ("large", "small"))
        assert small == pytest.approx(large, rel=2e-5)


def test_the_order_of_rows_depends_on_the_seed_alone(data, tmp_path, monkeypatch):
    seen = {}

    def watch(name):
        seen[name] = []

        def collate(rows):
            seen[name] += [tuple(row["input_ids"].tolist()) for row in rows]
            return exact_trainer.collate(rows)

        monkeypatch.setattr(trainer_module, "collate", collate)
        return tmp_path / name

    llama = LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, attention_dropout=0.3
    )
    settings = tiny_settings("", steps=8, batch_size=16, eval_every=8, save_every=8)
    train(tiny_config(), data, replace(settings, out=str(watch("dcformer"))))
    train(llama, data, replace(settings, out=str(watch("llama")), learning_rate=1e-2))
    train(llama, data, replace(settings, out=str(watch("seed")), seed=1))
    assert seen["dcformer"] == seen["llama"] != seen["seed"]
    rows = [tuple(row) for row in data.train["input_ids"]]
    assert len(rows) < 8 * 16
    assert sorted(seen["seed"][: len(rows)]) == sorted(rows)
    assert seen["seed"][len(rows) :] != seen["seed"][: 8 * 16 - len(rows)]


def test_the_same_seed_gives_the_same_run_and_another_another(data, tmp_path):
    losses = [
        train(tiny_config(), data, tiny_settings(tmp_path / name, seed=seed)).evaluations[-1]["loss"]
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert losses[0] == losses[1] != losses[2]


def test_checkpointing_activations_changes_nothing(data, tmp_path):
    plain, saving = (
        train(tiny_config(), data, tiny_settings(tmp_path / str(on), gradient_checkpointing=on)) for on in (False, True)
    )
    assert [e["loss"] for e in saving.evaluations] == pytest.approx([e["loss"] for e in plain.evaluations], rel=1e-6)


def test_bf16_computes_in_bf16_and_keeps_weights_in_fp32(data, tmp_path, monkeypatch):
    dtypes = set()
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *a: dtypes.add((out := linear(*a)).dtype) or out)
    half = train(tiny_config(), data, tiny_settings(tmp_path / "half", bf16=True))
    assert torch.bfloat16 in dtypes
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.float32
    full = train(tiny_config(), data, tiny_settings(tmp_path / "full", bf16=False))
    assert half.evaluations[-1]["loss"] != full.evaluations[-1]["loss"]
    assert half.evaluations[-1]["loss"] == pytest.approx(full.evaluations[-1]["loss"], rel=0.01)


def test_compiled_equals_eager(data, tmp_path, monkeypatch):
    compiler = torch.compile
    # Traces the model as always, but does not spend a minute in the C++ compiler.
    monkeypatch.setattr(torch, "compile", lambda model, **kwargs: compiler(model, **{**kwargs, "backend": "eager"}))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = tiny_config(attention_dropout=0.0)
    eager, compiled = (train(config, data, tiny_settings(tmp_path / str(on), compile=on)) for on in (False, True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert compiled.evaluations[-1]["loss"] == pytest.approx(eager.evaluations[-1]["loss"], rel=1e-4)
    assert set(AutoModelForCausalLM.from_pretrained(tmp_path / "True").state_dict()) == set(
        AutoModelForCausalLM.from_pretrained(tmp_path / "False").state_dict()
    )


def test_a_finished_run_is_not_run_again(data, tmp_path, monkeypatch):
    settings = tiny_settings(tmp_path / "run")
    first = train(tiny_config(), data, settings)
    monkeypatch.setattr(trainer_module, "_run", lambda *args: pytest.fail("trained again"))
    assert train(tiny_config(), data, replace(settings, save_every=3, keep_checkpoints=1)) == first


def test_another_run_in_the_same_folder_is_refused(data, tmp_path):
    settings = tiny_settings(tmp_path / "run")
    train(tiny_config(), data, settings)
    with pytest.raises(ValueError, match=r"another run: settings\.learning_rate is 0\.001 there and 0\.002 here"):
        train(tiny_config(), data, replace(settings, learning_rate=0.002))
    with pytest.raises(ValueError, match=r"config\.compose is \{.*\} there and None here"):
        train(tiny_config(compose=None), data, settings)
    with pytest.raises(ValueError, match=r"another run: data is '.*' there and 'else' here"):
        train(tiny_config(), data._replace(summary={**data.summary, "fingerprint": "else"}), settings)


def test_folders_with_something_else_are_refused(data, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a model that no run here wrote"):
        train(tiny_config(), data, tiny_settings(tmp_path / "model"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        train(tiny_config(), data, tiny_settings(tmp_path / "file"))
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"gradient_accumulation": 0}, "gradient_accumulation=0"),
        ({"eval_every": 0}, "eval_every=0"),
        ({"keep_checkpoints": 0}, "keep_checkpoints=0"),
        ({"learning_rate": -1.0}, r"learning_rate=-1\.0"),
        ({"learning_rate": math.nan}, "learning_rate=nan"),
        ({"min_learning_rate_ratio": 1.5}, r"min_learning_rate_ratio=1\.5"),
        ({"warmup_steps": 9}, r"warmup_steps=9 must be at most steps=8"),
    ],
)
def test_settings_out_of_range(data, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train(tiny_config(), data, tiny_settings(tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused(data, tmp_path):
    with pytest.raises(ValueError, match=rf"config\.vocab_size=260 must be at least {len(data.tokenizer)}"):
        train(tiny_config(vocab_size=260), data, tiny_settings(tmp_path / "run"))


def test_divergence_stops_with_the_step_and_keeps_the_metrics(data, tmp_path):
    with pytest.raises(FloatingPointError, match=r"training diverged: .* at step \d.*metrics\.jsonl") as raised:
        train(tiny_config(), data, tiny_settings(tmp_path / "run", learning_rate=1e30, warmup_steps=0, save_every=100))
    kept = lines(tmp_path / "run", "train")
    assert kept
    assert f"at step {kept[-1]['step'] + 1}." in str(raised.value)
    assert not (tmp_path / "run" / "result.json").exists()
    assert not list((tmp_path / "run").glob("checkpoint-*"))


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_shown_and_transformers_is_quiet(data, tmp_path, capfd, terminal):
    verbosity = logging.get_verbosity()
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    train(tiny_config(), data, tiny_settings(tmp_path / "run"), console=console)
    text = console.file.getvalue()
    assert "validation loss" in text and "bits per byte" in text
    assert "8/8" in text and "tokens/s" in text
    assert ("\x1b[" in text) == terminal
    assert capfd.readouterr() == ("", "")
    assert logging.get_verbosity() == verbosity


def test_metrics_are_json(data, tmp_path):
    train(tiny_config(), data, tiny_settings(tmp_path / "run"))
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
