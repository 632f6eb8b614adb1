"""benchmarks/gpu.py without a GPU: the rehearsal runs every job to its end and writes every file."""

import csv
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(*arguments, **environment):
    command = [sys.executable, BENCHMARKS / "gpu.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed")
def test_rehearsal(tmp_path):
    done = run("--rehearse", "--out", tmp_path, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    times, model = rows(tmp_path / "times.csv"), rows(tmp_path / "model.csv")
    assert {line["outcome"] for line in rows(tmp_path / "jobs.csv")} == {"done"}
    assert {line["right"] for line in rows(tmp_path / "checks.csv")} == {"True"}
    assert {line["backend"] for line in times} == {"flash", "triton", "chunked", "chunked compiled"}
    assert {line["what"] for line in model} == {"training", "training, compiled", "decoding", "decoding, CUDA graph"}
    assert all(float(line["ms"]) > 0 and not line["note"] for line in times + model)
    about = json.loads((tmp_path / "gpu.json").read_text())
    assert about["versions"]["torch"] and "triton" in about["versions"] and about["goals"]
    assert "0 of 5 checks failed; 0 of 9 jobs" in done.stdout


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu"), importlib.import_module("gpu_jobs"), importlib.import_module("gpu_clock")


def test_what_fails_or_is_slow_is_listed_and_the_rest_measured(modules):
    gpu, _, gpu_clock = modules

    def refused():
        raise ValueError("no\nreason")

    runs = {"good": lambda: None, "refused": refused, "slow": lambda: time.sleep(0.2)}
    seconds, skipped = gpu.take_turns(gpu_clock.Rehearsal(), runs, budget=0, most=0.1)
    assert set(seconds) == {"good"} and len(seconds["good"]) == 3
    assert skipped["refused"] == "failed: ValueError no" and "a call takes 0.2 s" in skipped["slow"]


def test_lines_of_a_job_that_dies_or_hangs_are_kept(modules, tmp_path):
    _, gpu_jobs, _ = modules
    files = gpu_jobs.Files(tmp_path)
    code = "import os, time; print('{\"n\": 1}', flush=True); "
    for name, end in (("dies", "os.abort()"), ("hangs", "time.sleep(600)"), ("works", "pass")):
        job = gpu_jobs.Job("all", lambda: iter(()), 5)
        gpu_jobs.run_job(name, job, files, [sys.executable, "-c", code + end], time.monotonic() + 100)
    gpu_jobs.run_job("late", job, files, [], time.monotonic())
    assert [line["n"] for line in rows(tmp_path / "all.csv")] == ["1", "1", "1"]
    outcomes = [line["outcome"] for line in rows(tmp_path / "jobs.csv")]
    assert outcomes == ["failed with -6: ", "stopped after 5 s", "done", "not begun: no time was left"]
