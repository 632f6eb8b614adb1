import io
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dcformer import training
from dcformer.cli import run
from dcformer.studies import compare as comparison

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]
TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with text, a tiny configuration and files that are no good."""
    folder, draw = tmp_path_factory.mktemp("place"), random.Random(0)
    (folder / "text").mkdir()
    for number in range(12):
        (folder / "text" / f"{number}.txt").write_text(" ".join(draw.choices(WORDS, k=200)) + "\n")
    (folder / "tiny.json").write_text(json.dumps(TINY))
    (folder / "unknown.json").write_text(json.dumps({**TINY, "num_haeds": 2}))
    (folder / "wrong_type.json").write_text(json.dumps({**TINY, "hidden_size": "many"}))
    (folder / "broken.json").write_text('{"hidden_size": 16')
    (folder / "list.json").write_text("[1, 2]")
    (folder / "empty.txt").write_text("")
    (folder / "binary.txt").write_bytes(b"\0\1\2\xff" * 100)
    return folder


@pytest.fixture
def dcformer(place, monkeypatch, call):
    """Runs the command line in `place`; gives exit code, stdout and stderr."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    return call


DATA = ("--data", "text", "--vocab-size", "300", "--block-size", "16")
SHORT = (*DATA, "--config", "tiny.json", "--steps", "4", "--batch-size", "2", "--eval-rows", "4")


@pytest.fixture(scope="module")
def checkpoint(place):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.chdir(place)
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        run(["train", "--out", "run", *SHORT])
    assert not stop.value.code
    return place / "run"


def copied(checkpoint, target):
    target.mkdir()
    for path in checkpoint.iterdir():
        if path.is_file():
            (target / path.name).write_bytes(path.read_bytes())
    return target


def test_doctor_says_what_is_taken_and_why(dcformer):
    code, out, _ = dcformer("doctor")
    assert code == 0
    assert f"torch {torch.__version__}" in out and "compiler: " in out and "processor: " in out
    assert "cpu float32: auto takes" in out and "reference: the specification" in out


def test_doctor_without_a_compiler(tmp_path):
    command = [sys.executable, "-m", "dcformer", "doctor"]
    done = subprocess.run(command, env={"PATH": "", "XDG_CACHE_HOME": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0
    assert "compiler: none found; install g++" in done.stdout
    assert "cpu float32: auto takes 'chunked'\n  cpu: the kernel could not be built: no C++ compiler found" in done.stdout


COMMANDS = ("train", "compare", "generate", "chat", "evaluate", "analyze", "explain", "serve", "convert", "doctor", "study")


def test_help_names_every_command(dcformer):
    for arguments in (["--help"], []):
        code, out, _ = dcformer(*arguments)
        assert code == 0
        for command in COMMANDS:
            assert f"│ {command} " in out
    for command in COMMANDS:
        assert dcformer(command, "--help")[0] == 0


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom dcformer.cli import run\ntry:\n    run(['train', '--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'datasets', 'matplotlib', 'numpy'} & set(sys.modules)\nassert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("missing", "extra", "arguments"),
    [
        ("typer", "train", "--help"),
        ("datasets", "train", "train --out x --steps 1"),
        ("lm_eval", "eval", "evaluate x --tasks y --out z"),
        ("openai", "serve", "serve x"),
    ],
)
def test_a_missing_extra_is_named_in_one_line(missing, extra, arguments, tmp_path):
    code = (
        f"import sys\nsys.modules[{missing!r}] = None\nsys.argv[1:] = {arguments.split()!r}\n"
        "from dcformer.__main__ import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"dcformer: the command line needs {missing}: pip install 'dcformer[{extra}]'\n"


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        ("trian", 2, ["trian"]),
        ("train --steps 1", 2, ["--out"]),
        ("train --out x", 2, ["--steps"]),
        ("train --out x --steps 1 --tokens 1", 2, ["--steps", "--tokens"]),
        ("train --out x --steps 1 --size 3M --config tiny.json", 2, ["--size", "--config"]),
        ("train --out x --steps 0", 2, ["--steps"]),
        ("train --out x --steps many", 2, ["--steps"]),
        ("train --out x --stepps 1", 2, ["--stepps"]),
        ("train --out x --steps 1 --size 4M", 1, ["'4M'", "405M"]),
        ("train --out x --steps 1 --config nowhere.json", 1, ["nowhere.json"]),
        ("train --out x --steps 1 --config broken.json", 1, ["broken.json"]),
        ("train --out x --steps 1 --config list.json", 1, ["list.json"]),
        ("train --out x --steps 1 --config unknown.json", 1, ["unknown.json", "num_haeds"]),
        ("train --out x --steps 1 --config wrong_type.json", 1, ["wrong_type.json", "hidden_size", "'many'"]),
        ("train --out x --steps 1 --data nowhere.txt", 1, ["nowhere.txt"]),
        ("train --out x --steps 1 --data empty.txt", 1, ["empty.txt", "empty"]),
        ("train --out x --steps 1 --data binary.txt", 1, ["binary.txt", "binary"]),
        ("train --out x --steps 1 --data text --block-size 100000 --vocab-size 300", 1, ["block_size=100000"]),
        ("train --out tiny.json --steps 1 --data text --vocab-size 300 --block-size 16", 1, ["tiny.json"]),
        ("compare --out x", 2, ["--steps"]),
        ("compare --out x --seeds 0 --preset demo", 2, ["--seeds"]),
        ("compare --out x --preset demmo", 2, ["--preset", "demmo"]),
        ("compare --out x --equal size --steps 1", 2, ["--equal", "size"]),
        ("generate", 2, ["checkpoint"]),
        ("generate nowhere", 1, ["nowhere/config.json"]),
        ("generate text", 1, ["text/config.json"]),
        ("generate x --temperature 0", 2, ["--temperature", "--greedy"]),
        ("generate x --temperature nan", 2, ["--temperature"]),
        ("generate x --top-p 1.5", 2, ["--top-p", "1.5"]),
        ("generate x --top-k -1", 2, ["--top-k"]),
        ("generate x --max-new-tokens 0", 2, ["--max-new-tokens"]),
        ("chat", 2, ["checkpoint"]),
        ("chat nowhere", 1, ["nowhere/config.json"]),
        ("chat x --top-p 0", 2, ["--top-p"]),
        ("evaluate text --out x", 2, ["--tasks"]),
        ("evaluate text --tasks x", 2, ["--out"]),
        ("evaluate text --tasks x --out x", 1, ["text/config.json"]),
    ],
)
def test_a_users_mistake_is_one_line_that_names_it(dcformer, place, arguments, code, named):
    got, out, err = dcformer(*arguments.split())
    assert (got, out) == (code, "")
    assert err.count("\n") == 1 and err.startswith("dcformer: ")
    for name in named:
        assert name in err
    assert not (place / "x").exists()


def test_other_errors_keep_their_traceback(dcformer, place, monkeypatch):
    def accident(settings):
        return int("not a number")

    monkeypatch.setattr(training, "prepare_data", accident)
    with pytest.raises(ValueError, match="not a number"):
        run(["train", "--out", "x", "--steps", "1"])


def test_a_sample_on_a_full_disk(dcformer, place, checkpoint, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dcformer.training.files.write_text", full)
    code, _, err = dcformer("generate", checkpoint, "--max-new-tokens", "2", "--out", "sample.txt")
    assert code == 1
    assert "could not write the sample in" in err and "No space left on device" in err and "bytes are free there" in err
    assert not (place / "sample.txt").exists()


def test_a_full_disk_is_one_line(dcformer, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "could not write the checkpoint of step 2 in x: No space left on device")

    monkeypatch.setattr(training, "train", full)
    code, _, err = dcformer("train", "--out", "x", *SHORT)
    assert code == 1 and err.count("\n") == 1
    assert "could not write the checkpoint of step 2 in x" in err


def test_train_then_the_same_command_again(dcformer, checkpoint):
    written = (checkpoint / "model.safetensors").stat().st_mtime_ns
    code, out, _ = dcformer("train", "--out", "run", *SHORT)
    assert code == 0 and "4 steps" in out and "bits per byte" in out
    assert (checkpoint / "model.safetensors").stat().st_mtime_ns == written
    code, _, err = dcformer("train", "--out", "run", *SHORT, "--lr", "0.5")
    assert code == 1 and err.count("\n") == 1 and "learning_rate" in err


def test_options_reach_the_trainer(dcformer, monkeypatch):
    seen = {}

    def remember(config, data, settings, *, console):
        seen.update(config=config, data=data, settings=settings)
        evaluation = {"loss": 1.0, "perplexity": 2.0, "bits_per_byte": 3.0}
        return training.TrainResult(settings.out, settings.steps, 1, [evaluation], 1.0, 1.0)

    monkeypatch.setattr(training, "train", remember)
    options = "--batch-size 4 --gradient-accumulation 2 --lr 0.01 --warmup-steps 3 --seed 7 --eval-every 5 --eval-rows 6"
    flags = "--bf16 --compile --gradient-checkpointing --plain"
    code, _, _ = dcformer("train", "--out", "x", *DATA, "--tokens", "1000", *options.split(), *flags.split())
    assert code == 0
    settings = seen["settings"]
    assert settings.steps == 8  # 1000 tokens in steps of 4 * 2 * 16, rounded up
    assert (settings.batch_size, settings.gradient_accumulation, settings.learning_rate) == (4, 2, 0.01)
    assert (settings.warmup_steps, settings.seed, settings.eval_every, settings.eval_rows) == (3, 7, 5, 6)
    assert settings.bf16 is settings.compile is settings.gradient_checkpointing is True
    assert seen["config"].compose is None and seen["config"].hidden_size == 192  # the default size, 3M
    assert seen["config"].vocab_size == len(seen["data"].tokenizer) <= 300
    assert len(seen["data"].train[0]["input_ids"]) == 16

    assert dcformer("train", "--out", "x", *SHORT, "--no-bf16")[0] == 0
    assert seen["settings"] == training.TrainSettings(out="x", steps=4, batch_size=2, eval_rows=4, bf16=False)
    assert seen["config"].compose is not None and seen["config"].hidden_size == 16


OVERRIDES = ("--vocab-size", "999", "--lr", "0.5", "--config", "tiny.json")


def test_options_win_over_the_preset(dcformer, monkeypatch):
    seen = {}

    def remember(config, data, settings, **options):
        seen.update(config=config, data=data, settings=settings, options=options)
        raise ValueError("enough")

    monkeypatch.setattr(comparison, "compare", remember)
    preset = comparison.PRESETS["demo"]
    with pytest.raises(ValueError, match="enough"):
        run(["compare", "--out", "x", "--preset", "demo"])
    assert seen["data"] == preset.data and seen["settings"] == training.TrainSettings(out="x", **preset.train)
    assert all(getattr(seen["config"], name) == value for name, value in preset.model.items())
    with pytest.raises(ValueError, match="enough"):
        run(
            [
                "compare",
                "--out",
                "x",
                "--preset",
                "demo",
                "--seeds",
                "3",
                "--equal",
                "shape",
                "--vocab-size",
                "999",
                "--lr",
                "0.5",
                "--config",
                "tiny.json",
            ]
        )
    assert seen["data"].vocab_size == 999 and seen["data"].block_size == preset.data.block_size
    assert seen["settings"].learning_rate == 0.5 and seen["settings"].batch_size == preset.train["batch_size"]
    assert seen["options"]["seeds"] == 3 and seen["options"]["equal"] == "shape"
    assert seen["config"].hidden_size == 16


def test_compare_prints_a_table_and_the_verdict(dcformer, place):
    code, out, _ = dcformer("compare", "--out", "both", *SHORT)
    assert code == 0
    assert "DCFormer" in out and "Transformer" in out and "bits/byte" in out
    report = json.loads((place / "both" / "compare.json").read_text())
    assert report["verdict"] in " ".join(out.split())
    assert "both/compare.json" in out
    code, out, _ = dcformer("generate", "both/transformer", "--prompt", "alpha", "--max-new-tokens", "3")
    assert code == 0 and out.startswith("alpha")


def test_generate_streams_what_it_writes(dcformer, checkpoint, place):
    arguments = ("generate", "run", "--prompt", "alpha beta", "--max-new-tokens", "12")
    code, first, _ = dcformer(*arguments, "--seed", "3", "--out", "deep/sample.txt")
    assert code == 0 and first.startswith("alpha beta") and len(first) > len("alpha beta\n")
    assert (place / "deep" / "sample.txt").read_text() == first
    assert [path.name for path in (place / "deep").iterdir()] == ["sample.txt"]
    assert dcformer(*arguments, "--seed", "3")[1] == first
    assert any(dcformer(*arguments, "--seed", seed)[1] != first for seed in range(4, 8))
    greedy = [dcformer(*arguments, "--greedy", "--seed", seed)[1] for seed in (1, 2)]
    assert greedy[0] == greedy[1] == dcformer(*arguments, "--top-k", "1")[1]


def test_generate_without_a_prompt_and_from_standard_input(dcformer, checkpoint, monkeypatch):
    code, out, _ = dcformer("generate", "run", "--max-new-tokens", "4", "--greedy")
    assert code == 0 and out.strip()
    monkeypatch.setattr(sys, "stdin", io.StringIO("gamma delta"))
    code, out, _ = dcformer("generate", "run", "--prompt", "-", "--max-new-tokens", "4")
    assert code == 0 and out.startswith("gamma delta")


def _truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _garble(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 1000)


def _drop_weight(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _reshape_weight(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(5)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _add_code(folder):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights | {"model.norm.weight": Code(folder / "run")}, folder / "pytorch_model.bin")


class Code:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def _change_config(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_truncate, "cannot be loaded"),
        (_garble, "cannot be loaded"),
        (_drop_weight, "model.norm.weight"),
        (_reshape_weight, "model.norm.weight [5] in place of [16]"),
        (_add_code, "code beside its weights"),
        (lambda folder: (folder / "model.safetensors").unlink(), "cannot be loaded"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "cannot be loaded"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": '), "cannot be loaded"),
        (_change_config(num_haeds=4), "num_haeds"),
        (_change_config(model_type="dcforma"), "dcforma"),
        (_change_config(num_attention_heads=3), "num_attention_heads=3"),
    ],
)
def test_a_corrupt_checkpoint_is_one_line(dcformer, checkpoint, tmp_path, damage, named):
    folder = copied(checkpoint, tmp_path / "damaged")
    damage(folder)
    code, out, err = dcformer("generate", folder, "--prompt", "alpha")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1 and str(folder) in err and named in err
    assert not (folder / "run").exists()


def test_the_makefile_calls_what_exists(dcformer):
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    calls = [line.split("$(RUN)dcformer ")[1].split() for line in makefile.splitlines() if "$(RUN)dcformer " in line]
    assert {call[0] for call in calls} == {"compare", "generate"}
    for call in calls:
        options = {word for word in call if word.startswith("--")}
        _, out, _ = dcformer(call[0], "--help")
        assert all(option in out for option in options)
