"""Which tile a problem gets, with a fake timer and a device that is short of shared memory."""

import pytest
import torch

pytest.importorskip("triton")
from triton.runtime.errors import OutOfResources

from dcformer.ops.mixers.triton import launch, tuning

GPU = torch.device("cuda", 0)
MILLISECONDS = {"first": 3.0, "wide": 1.0, "small": 2.0, "smallest": 4.0}
TILES = list(MILLISECONDS)


@pytest.fixture
def device(monkeypatch):
    """A pretended GPU: what it ran, what does not fit, whether a graph records."""

    class Device:
        def __init__(self):
            self.ran, self.too_large, self.capturing = [], set(), False

        def run(self, tile):
            if tile in self.too_large:
                raise OutOfResources(200_000, 100_000, "shared memory")
            self.ran.append(tile)

        def choose(self, problem="problem", timed=True, device=GPU):
            self.ran = []
            return tuning.choose(problem, TILES, lambda: self.run, device, timed)

    pretended = Device()

    def milliseconds(run):
        run()
        return MILLISECONDS[pretended.ran[-1]]

    monkeypatch.delenv("DCFORMER_AUTOTUNE", raising=False)
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setattr(tuning, "milliseconds", milliseconds)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pretended.capturing)
    return pretended


def test_the_fastest_is_found_once_a_problem(device):
    assert device.choose() == "wide" and device.ran == TILES
    assert device.choose() == "wide" and device.ran == []
    assert device.choose("another") == "wide" and device.ran == TILES
    assert device.choose(device=torch.device("cuda", 1)) == "wide" and device.ran == TILES


@pytest.mark.parametrize("too_large, fastest, first", [(1, "wide", "wide"), (2, "small", "small"), (4, "smallest", "smallest")])
def test_a_smaller_tile_where_shared_memory_is_short(device, too_large, fastest, first):
    device.too_large = set(TILES[:too_large])
    assert device.choose() == fastest
    assert device.choose(timed=False) == first and device.ran == [first][: len(TILES) - too_large]


def test_nothing_is_timed_where_it_is_turned_off(device, monkeypatch):
    monkeypatch.setenv("DCFORMER_AUTOTUNE", "0")
    assert device.choose() == "first" and device.ran == ["first"]
    assert device.choose() == "first" and device.ran == []
    monkeypatch.setenv("DCFORMER_AUTOTUNE", "1")
    assert device.choose() == "wide"
    assert device.choose(timed=False) == "first"
    torch.use_deterministic_algorithms(True)
    try:
        assert device.choose() == "first"
    finally:
        torch.use_deterministic_algorithms(False)


def test_nothing_is_tried_while_a_graph_records_or_without_a_gpu(device):
    device.capturing = True
    assert device.choose() == "first" and device.ran == []
    device.capturing = False
    assert device.choose(device=torch.device("cpu")) == "first" and device.ran == []
    assert device.choose() == "wide"
    device.capturing = True
    assert device.choose() == "wide" and device.ran == []


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("has_base", [False, True])
@pytest.mark.parametrize("rank", [0, 2, 4])
@pytest.mark.parametrize("heads", [1, 3, 16, 25, 32, 64])
def test_tiles(heads, rank, has_base, backward):
    """Few, different, powers of two, no smaller than a product on tensor cores takes, with all heads in each."""
    tiles = launch.tiles_of(heads, rank, has_base, backward)
    assert 1 <= len(tiles) <= 4 and len(set(tiles)) == len(tiles)
    for tile in tiles:
        assert all(size > 0 and size & (size - 1) == 0 for size in tile)
        assert heads <= tile.NP and tile.CHUNK % tile.BT == 0
        assert not has_base or (tile.NP >= 16 and tile.BS >= 8)
    narrow = [tile.BT * tile.BS for tile in tiles if tile.warps == tiles[0].warps]
    assert narrow == sorted(narrow, reverse=True)
