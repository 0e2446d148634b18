"""One matrix product on one GPU, Y = X W^T, by the MLP kernel: its `down` layer alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from ctatune import abi
from ctatune.abi import ERROR, PARAMS, Argument, Flags
from ctatune.config import Config
from ctatune.gpus import Arena, Gpus
from ctatune.kernel import Kernel
from ctatune.layout import Sizes
from ctatune.limits import TILE_K
from ctatune.schedule import DOWN, Columns, raster, slots


class Gemm:
    """The product of a size, for sets of pointers (x, w, y) on GPU `gpu`.

    To the kernel this is a machine of one GPU whose Y1 is X: in a segment of no tiles, so that it
    is complete from the start. `config` is valid for m rows; its `down` tile and order are used.

    Shapes: see `Sizes`.
    """

    def __init__(
        self,
        gpus: Gpus,
        arena: Arena,
        gpu: int,
        config: Config,
        sizes: Sizes,
        sets: list[tuple[int, int, int]],
    ) -> None:
        self._gpus, self._gpu, self._config = gpus, gpu, config
        self._sizes = sizes
        self._kernel = Kernel(gpus, config)
        self.build = self._kernel.build
        self._panels = -(-sizes.m // config.up.m)
        self._error = arena.zeros(gpu, ERROR.itemsize)
        self._flags = Flags.at(arena.zeros(gpu, Flags.nbytes(self._panels)), self._panels)
        tiles = slots(raster(DOWN, sizes.m, Columns(0, sizes.n), config.down, 0, 0), config)
        self._tiles, self._tile_count = arena.upload(gpu, abi.packed(tiles)), len(tiles)
        self._arguments = [Argument(self._block(x, w, y)) for x, w, y in sets]

    def _block(self, x: int, w: int, y: int) -> Any:
        m, n, k, x_pitch, w_pitch, y_pitch = self._sizes
        config, tile = self._config, self._config.down
        p = np.zeros((), dtype=PARAMS)
        self._flags.write(p)
        p["error"] = self._error
        p["started_out"][0], p["peers"] = self._flags.started, 1
        p["tiles"], p["tile_count"] = self._tiles, self._tile_count
        # The kernel's h and n are also how far apart it takes rows to be: pitches.
        p["m"], p["h"], p["n"] = m, x_pitch, y_pitch
        p["y1"] = abi.in_maps(x, (1, m, k), tile, x_pitch)
        p["y1_box_bytes"] = abi.in_box_bytes(tile, m)
        p["w_down"] = abi.weight_map(w, (n, k), tile, config, w_pitch)
        p["y2_out"][0] = abi.out_map(y, (m, n), tile, y_pitch)
        p["y2_to"][0] = y
        p["y2_outs"] = p["y2_own"] = 1
        p["panel_count"] = self._panels
        p["segment_count"] = p["flag_segments"] = 1
        p["segment_block"][1] = -(-k // TILE_K)
        return p

    def call(self, which: int = 0) -> None:
        """Enqueue the product of set `which` on the stream of its GPU."""
        self._kernel.launch(self._gpu, self._arguments[which % len(self._arguments)])

    def check(self) -> None:
        """Raise PipelineTimeoutError if a poll of a finished call ran out of time."""
        abi.raise_poll_error(self._gpus, self._gpu, self._error)
