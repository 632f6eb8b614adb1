"""`dcformer convert MODEL --out DIR`, `dcformer train --from DIR`: composable heads for a pretrained model, trained further."""

import torch
from tiny_models import WORDS, goes_on, tokenizer, write_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

import dcformer


def few_texts(folder):
    folder.mkdir()
    for i in range(20):
        order = torch.randperm(len(WORDS)).tolist() * 20
        (folder / f"{i}.txt").write_text(" ".join(WORDS[j] for j in order))
    return folder


def test_convert_then_train_the_composition_then_everything(call, tmp_path):
    base = write_checkpoint(tmp_path / "base", "llama")
    code, out, err = call("convert", tmp_path / "base", "--out", tmp_path / "dc", "--rank", 1, "--no-gates")
    assert (code, err) == (0, "") and "model.safetensors" in out and "tokenizer.json" in out
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "dc").eval()
    assert type(converted).__name__ == "DCLlamaForCausalLM" and converted.config.composition["gates"] is False
    assert goes_on(converted, "alpha beta", 8) == goes_on(base, "alpha beta", 8)

    few = ["--data", few_texts(tmp_path / "texts"), "--block-size", 32, "--steps", 3, "--batch-size", 2, "--lr", 0.01]
    for trainable in ("composition", "all"):
        run = tmp_path / trainable
        arguments = ("train", "--from", tmp_path / "dc", "--out", run, "--trainable", trainable, "--eval-every", 2, *few)
        code, out, err = call(*arguments)
        assert code == 0 and "validation loss" in out, err
        assert len(AutoTokenizer.from_pretrained(run)) == len(tokenizer)
        trained = AutoModelForCausalLM.from_pretrained(run)
        moved = {name for name, p in trained.named_parameters() if not torch.equal(p, converted.get_parameter(name))}
        assert moved == {name for name, _ in converted.named_parameters() if trainable == "all" or ".compose." in name}
        assert call(*arguments)[0] == 0  # it is finished


def test_the_composition_alone(call, tmp_path):
    base = write_checkpoint(tmp_path / "base", "llama")
    code, out, err = call("convert", tmp_path / "base", "--out", tmp_path / "dc", "--adapter-only", "--layers", "layers.1")
    assert (code, err) == (0, "") and "composition.safetensors" in out and "model.safetensors" not in out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dc")
    assert goes_on(model, "gamma", 8) == goes_on(base, "gamma", 8)
    few = ["--data", few_texts(tmp_path / "texts"), "--block-size", 32, "--steps", 2, "--batch-size", 2, "--lr", 0.01]
    code, _, err = call("train", "--from", tmp_path / "dc", "--out", tmp_path / "run", *few)
    assert code == 0, err
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert not [name for name, p in base.named_parameters() if torch.equal(p, trained.get_parameter(name))]
    code, out, err = call("generate", tmp_path / "dc", "--prompt", "gamma", "--max-new-tokens", 8, "--greedy")
    assert code == 0 and goes_on(base, "gamma", 8) in out, err


def test_wrong_use(call, tmp_path):
    write_checkpoint(tmp_path / "base", "llama")
    write_checkpoint(tmp_path / "ours")
    few = ("--out", tmp_path / "new", "--steps", 1, "--data", few_texts(tmp_path / "texts"), "--block-size", 32)
    for arguments, code, words in (
        (("convert", tmp_path / "ours", "--out", tmp_path / "new"), 1, "composable heads already"),
        (("convert", tmp_path / "base", "--out", tmp_path / "new", "--rank", 9), 1, "rank=9 is over the 4 heads"),
        (("convert", tmp_path / "base", "--out", tmp_path / "new", "--to", "hf"), 2, "give both"),
        (("convert", tmp_path / "ours", "--out", tmp_path / "new", "--from", "hf", "--to", "hf", "--rank", 1), 2, "--rank"),
        (("convert", tmp_path / "nothing", "--out", tmp_path / "new"), 1, "is no checkpoint"),
        (("train", "--from", tmp_path / "base", "--size", "1M", "--out", tmp_path / "new", "--steps", 1), 2, "--from"),
        (("train", "--from", tmp_path / "base", "--trainable", "composition", *few), 1, "needs a model with composable heads"),
    ):
        found, _, err = call(*arguments)
        assert found == code and words in " ".join(err.replace("│", " ").split()), (arguments, err)
    assert not list((tmp_path / "new").glob("model*"))


def test_names(call):
    assert "--adapter-only" in call("convert", "--help")[1]
    assert dcformer.convert.__module__ == "dcformer.conversion.convert"
