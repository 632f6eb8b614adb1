import os
import random
import signal
import socket
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest
import torch
from tiny_run import die, fill_disk, tiny_config, tiny_settings, train_tiny

from dcformer.training import train
from dcformer.training.metrics import read_metrics
from dcformer.training.run_folder import RunFolder

TIMES = ("seconds", "tokens_per_second")


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory, processes):
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    assert finish(processes, out, data) == 0
    return out


def start(processes, out, data, arrange=None, **changes):
    process = processes.Process(target=train_tiny, args=(str(out), data, arrange), kwargs=changes)
    process.start()
    return process


def finish(processes, *args, **changes):
    process = start(processes, *args, **changes)
    process.join(300)
    return process.exitcode


def record(out):
    lines = read_metrics(out / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def assert_same_run(out, other):
    assert record(out) == record(other)
    assert (out / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    files = [{path.relative_to(run) for path in run.rglob("*") if "tensorboard" not in path.parts} for run in (out, other)]
    assert files[0] == files[1]


# When to die, and what is there then and what is not. The run replaces run.json and metrics.jsonl; at steps 2, 4, 6 and 8 it
# saves weights, then arguments, optimizer, schedule and random numbers (torch.save), and replaces the manifest and the
# checkpoint; at 6 and 8 the oldest checkpoint is renamed; at the end it replaces the model's five files and result.json.
MOMENTS = {
    "before run.json": ("os.replace", 1, "before", ".run.json.partial", "run.json"),
    "weights halfway": (
        "transformers.modeling_utils.safe_save_file",
        2,
        "halfway",
        ".partial/checkpoint-4/model.safetensors",
        ".partial/checkpoint-4/optimizer.pt",
    ),
    "optimizer halfway": ("torch.save", 6, "halfway", ".partial/checkpoint-4/optimizer.pt", "checkpoint-4"),
    "checkpoint without its name": ("os.replace", 4, "before", ".partial/checkpoint-2/manifest.json", "checkpoint-2"),
    "checkpoint just there": ("os.replace", 4, "after", "checkpoint-2", ".partial/checkpoint-2"),
    "old checkpoint out of the way": ("os.rename", 1, "after", ".partial/old-checkpoint-2", "checkpoint-2"),
    "last checkpoint just there": ("os.replace", 10, "after", "checkpoint-8", "config.json"),
    "some files of the model in place": ("os.replace", 12, "after", "config.json", "model.safetensors"),
    "before result.json": ("os.replace", 16, "before", "model.safetensors", "result.json"),
    "result.json just there": ("os.replace", 16, "after", "checkpoint-8", ".result.json.partial"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_at_this_moment_ends_as_if_undisturbed(moment, undisturbed, data, tmp_path, processes):
    out = tmp_path / "run"
    function, count, when, there, missing = MOMENTS[moment]
    assert finish(processes, out, data, partial(die, function, count, when)) == -signal.SIGKILL
    assert (out / there).exists()
    assert not (out / missing).exists()
    assert finish(processes, out, data) == 0
    assert_same_run(out, undisturbed)


def test_a_run_killed_at_random_times_ends_as_if_undisturbed(undisturbed, data, tmp_path, processes, seed):
    out = tmp_path / "run"
    draw = random.Random(seed)
    for _ in range(4):
        process = start(processes, out, data)
        wait_for_step(out, draw.randint(1, 8), process)
        time.sleep(draw.uniform(0, 0.05))
        process.kill()
        process.join()
    assert finish(processes, out, data) == 0
    assert_same_run(out, undisturbed)


def wait_for_step(out, step, process):
    end = time.monotonic() + 60
    while process.is_alive() and time.monotonic() < end:
        lines = read_metrics(out / "metrics.jsonl")
        if lines and lines[-1]["step"] >= step:
            return
        time.sleep(0.005)


def test_resuming_goes_on_from_the_checkpoint_and_counts_all_time(data, tmp_path, processes):
    out = tmp_path / "run"
    assert (
        finish(processes, out, data, partial(die, "dcformer.training.metrics.MetricsCallback._draw", 8, "before"))
        == -signal.SIGKILL
    )
    before = [line for line in read_metrics(out / "metrics.jsonl") if line["step"] <= 6]
    assert before[-1]["step"] == 6
    result = train(tiny_config(), data, tiny_settings(out))
    after = read_metrics(out / "metrics.jsonl")
    assert after[: len(before)] == before
    assert result.seconds > before[-1]["seconds"]
    steps = [line["step"] for line in after if line["split"] == "train"]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8]


def test_old_checkpoints_go_and_the_number_kept_may_change(data, tmp_path, processes):
    out = tmp_path / "run"
    dying = partial(die, "torch.save", 13, "before")  # in the fourth checkpoint
    assert finish(processes, out, data, dying, keep_checkpoints=1) == -signal.SIGKILL
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-6"]
    assert finish(processes, out, data, keep_checkpoints=3, save_every=1) == 0


@pytest.fixture
def interrupted(data, tmp_path, processes):
    """A run that has checkpoints of steps 2 and 4."""
    out = tmp_path / "run"
    assert finish(processes, out, data, partial(die, "torch.save", 9, "before")) == -signal.SIGKILL
    assert RunFolder(str(out)).last_checkpoint().name == "checkpoint-4"
    return out


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("model.safetensors", truncate, "content is not what was written"),
        ("model.safetensors", flip, "content is not what was written"),
        ("optimizer.pt", truncate, "content is not what was written"),
        ("rng_state.pth", os.unlink, "missing"),
        ("manifest.json", truncate, ""),
    ],
)
def test_a_corrupt_checkpoint_is_named_and_nothing_changes(name, damage, reason, interrupted, data, undisturbed):
    damage(interrupted / "checkpoint-4" / name)
    before = record(interrupted)
    with pytest.raises(ValueError, match=rf"corrupt checkpoint: .*checkpoint-4/{name}: .*{reason}.* Remove .*checkpoint-4 to"):
        train(tiny_config(), data, tiny_settings(interrupted))
    assert record(interrupted) == before
    assert (interrupted / "checkpoint-2").exists()


def test_after_removing_the_corrupt_checkpoint_it_goes_on_from_the_one_before(interrupted, data, undisturbed, processes):
    truncate(interrupted / "checkpoint-4" / "model.safetensors")
    for path in (interrupted / "checkpoint-4").iterdir():
        path.unlink()
    (interrupted / "checkpoint-4").rmdir()
    assert finish(processes, interrupted, data) == 0
    assert_same_run(interrupted, undisturbed)


@pytest.mark.parametrize(
    ("function", "call", "what", "newest"),
    [
        ("transformers.modeling_utils.safe_save_file", 1, "the checkpoint of step 6", 4),
        ("torch.save", 2, "the checkpoint of step 6", 4),
        ("dcformer.training.metrics.MetricsCallback.on_log", 1, "metrics", 4),
        ("dcformer.training.run_folder.RunFolder.finish", 1, "the trained model", 8),
    ],
)
def test_a_full_disk_is_named_and_leaves_checkpoints(function, call, what, newest, interrupted, data, undisturbed, processes):
    with ProcessPoolExecutor(1, processes) as pool, pytest.raises(OSError) as raised:
        pool.submit(train_tiny, str(interrupted), data, partial(fill_disk, function, call)).result()
    assert f"could not write {what} in {interrupted}: " in str(raised.value)
    assert "bytes are free there" in str(raised.value)
    assert ("It takes about " in str(raised.value)) == (what != "metrics")
    assert RunFolder(str(interrupted)).last_checkpoint().name == f"checkpoint-{newest}"
    assert not [path for path in interrupted.iterdir() if path.name.startswith(".")]
    assert not (interrupted / "model.safetensors").exists()
    assert finish(processes, interrupted, data) == 0
    assert_same_run(interrupted, undisturbed)


def distributed(rank, port, out, data):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    train(tiny_config(attention_dropout=0.0), data, tiny_settings(out, batch_size=2))
    torch.distributed.destroy_process_group()


def test_two_processes_equal_one_with_twice_the_batch(data, tmp_path, processes):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pair = [processes.Process(target=distributed, args=(rank, port, str(tmp_path / "two"), data)) for rank in (0, 1)]
    for process in pair:
        process.start()
    for process in pair:
        process.join(60)
    assert [process.exitcode for process in pair] == [0, 0]
    train(tiny_config(attention_dropout=0.0), data, tiny_settings(tmp_path / "one", batch_size=4))
    one, two = record(tmp_path / "one"), record(tmp_path / "two")
    for line, other in zip(one, two, strict=True):
        assert line.pop("split") == other.pop("split")
        assert other == pytest.approx(line, rel=1e-4)
