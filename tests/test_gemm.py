"""One product by the MLP kernel: its parameter block and tiles, on fakes; hardware: test_gpu.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from mlp_fakes import as_map

from ctatune import abi, gemm
from ctatune.abi import ERROR
from ctatune.config import Config, Tile
from ctatune.gemm import Gemm
from ctatune.gpus import LINE_BYTES
from ctatune.layout import Sizes
from ctatune.schedule import DOWN, NOTHING

WIDE, SMALL = Tile(m=128, n=256, group_m=2), Tile(m=64, n=64, split_k=4)
CONFIGS = {
    "128x256": Config(up=WIDE, down=WIDE, stages=3, d_slabs=4),
    "multicast": Config(up=WIDE, down=WIDE, stages=4, d_slabs=2, multicast=True),
    "64x64/k4": Config(up=SMALL, down=SMALL, stages=13, d_slabs=2, direct=True),
}
BOXES = {"128x256": (128, 256, 128), "multicast": (128, 128, 128), "64x64/k4": (64, 64, 16)}
M, N, K, Y = 200, 712, 328, 768
SETS = [(1 << 20, 2 << 20, 3 << 20), (4 << 20, 5 << 20, 3 << 20)]


class FakeKernel:
    """Keeps the blocks that are launched."""

    def __init__(self, _gpus: Any, config: Config) -> None:
        self.config, self.launched, self.build = config, [], lambda: "build"

    def launch(self, gpu: int, block: Any) -> None:
        self.launched.append((gpu, block))


class FakeArena:
    """Gives addresses, and keeps what is uploaded and how large zeroed memory is."""

    def __init__(self) -> None:
        self.at: dict[int, Any] = {}

    def zeros(self, gpu: int, nbytes: int) -> int:
        assert gpu == 1
        return self.upload(gpu, nbytes)

    def upload(self, _gpu: int, what: Any) -> int:
        address = 0x1000 * (1 + len(self.at))
        self.at[address] = what
        return address


@pytest.fixture(params=CONFIGS)
def made(request, monkeypatch) -> Any:
    """A Gemm on GPU 1 after three calls, its parameter blocks and its memory."""
    monkeypatch.setattr(gemm, "Kernel", FakeKernel)
    monkeypatch.setattr(gemm, "Argument", lambda block: block)
    monkeypatch.setattr(abi, "_tensor_map", as_map)
    arena: Any = FakeArena()
    gpus: Any = None
    product = Gemm(gpus, arena, 1, CONFIGS[request.param], Sizes(M, N, K, K, 384, Y), SETS)
    for which in range(3):
        product.call(which)
    launched = product._kernel.launched  # pyright: ignore[reportAttributeAccessIssue]
    return SimpleNamespace(name=request.param, launched=launched, at=arena.at)


def test_calls_take_sets_in_turn(made):
    assert [gpu for gpu, _ in made.launched] == [1, 1, 1]
    blocks = [block for _, block in made.launched]
    assert blocks[0] is blocks[2]
    assert blocks[0]["y1"][0] != blocks[1]["y1"][0]


def test_a_product_is_down_of_a_machine_of_one_gpu(made):
    in_rows, weight_rows, out_rows = BOXES[made.name]
    for (x, w, y), (_, p) in zip(SETS, made.launched, strict=False):
        for box, rows in enumerate((in_rows, M % in_rows)):
            assert p["y1"][box] == as_map(x, (1, M, K), rows, 64, K)
            assert p["y1_box_bytes"][box] == rows * 128
        assert p["w_down"] == as_map(w, (N, K), weight_rows, 64, 384)
        assert p["y2_out"][0] == as_map(y, (M, N), out_rows, 64, Y)
        assert p["y2_to"].tolist() == [y, *[0] * 7]
        assert (p["m"], p["n"]) == (M, Y)
        ones = ("y2_outs", "y2_own", "peers", "segment_count")
        zeros = ("y1_outs", "y1_own", "arrived_outs", "arrivals", "y1_parity", "pace_ns", "stamps")
        assert [int(p[name]) for name in ones] == [1] * 4
        assert [int(p[name]) for name in zeros] == [0] * 7
        assert not p["segment_tiles"].any()  # X is complete from the start
        assert p["segment_block"].tolist() == [0, 6, *[0] * 7]
        assert not p["y2_gpu"].any()


def test_it_starts_itself_and_polls_flags_that_exist(made):
    config, (_, p) = CONFIGS[made.name], made.launched[0]
    assert p["started_out"].tolist() == [p["started"], *[0] * 7]
    panels = -(-M // config.up.m)
    assert p["panel_count"] == panels
    flags = int(p["panels"])
    for name in ("started", "arrived", "calls"):
        assert 2 * panels * LINE_BYTES <= int(p[name]) - flags < made.at[flags]
    assert made.at[int(p["error"])] == ERROR.itemsize
    assert p["timeout_ns"] > 0


def test_its_tiles_cover_y_once_in_whole_clusters(made):
    config, (_, p) = CONFIGS[made.name], made.launched[0]
    tiles = made.at[int(p["tiles"])]
    assert len(tiles) == p["tile_count"]
    assert len(tiles) % config.cluster == 0
    split = config.down.split_k
    found = [tuple(tile) for tile in tiles.tolist() if tile[0] != NOTHING]
    wanted = {
        (DOWN, row, col, col)
        for row in range(0, M, config.down.m)
        for col in range(0, N, config.down.n)
    }
    assert set(found) == wanted
    assert len(found) == split * len(wanted)
