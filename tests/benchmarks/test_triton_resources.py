"""The resources of Triton's kernels are found out without a GPU."""

import os
import runpy
from pathlib import Path

import pytest

pytest.importorskip("triton")
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "triton_resources.py"


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels of the interpreter cannot be compiled")
def test_one_kernel(tmp_path, monkeypatch):
    """Composing scores without spilling, with a static base on tensor cores."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    benchmark = runpy.run_path(str(BENCHMARK))
    first, *others = benchmark["mixer_launches"]("forward", 4, "qkb")
    names = [launch.kernel.__name__ for launch in (first, *others)]
    assert names == ["compose_scores", "unite_statistics", "compose_weights"]
    line = benchmark["measure"]("forward", first, 90, 4, "qkb")
    assert line.tensor_cores and (line.spill_stores, line.spill_loads, line.stack) == (0, 0, 0)
    assert 32 <= line.registers <= 255 and line.shared > 0 and 0 < line.occupancy <= 0.5


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels of the interpreter cannot be compiled")
def test_a_static_base_does_not_spill_backward(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    benchmark = runpy.run_path(str(BENCHMARK))
    launches = benchmark["mixer_launches"]("backward", 16, "qkb")
    assert [launch.kernel.__name__ for launch in launches] == ["backward_of_post", "backward_of_pre"]
    line = benchmark["measure"]("backward", launches[0], 90, 16, "qkb")
    assert line.tensor_cores and (line.spill_stores, line.spill_loads, line.stack) == (0, 0, 0)


def test_decoding():
    """What is launched for one query and its cache is recorded."""
    launches = runpy.run_path(str(BENCHMARK))["decoding_launches"](4, 80, "qkb")
    assert [launch.kernel.__name__ for launch in launches] == ["score_keys", "weigh_values", "add_splits"]


def test_occupancy():
    occupancy = runpy.run_path(str(BENCHMARK))["occupancy"]
    assert occupancy(90, 32, 0, 1) == (0.5, "programs")
    assert occupancy(90, 255, 0, 4) == (0.125, "registers")
    assert occupancy(80, 32, 80 << 10, 1) == (0.031, "shared memory")
    assert occupancy(90, 168, 0, 1) == (0.188, "registers")
    assert occupancy(90, 32, 0, 4)[0] == 1.0
