"""Named sets of shapes that `bench` races."""

from __future__ import annotations


def _shapes(tokens: tuple[int, ...], k: int, h: int) -> tuple[str, ...]:
    return tuple(f"{m}x{k}x{h}" for m in tokens)


_MODEL_TOKENS = (16, 256, 1024, 4096)

PRESETS: dict[str, tuple[str, ...]] = {
    # The sizes of the CTA-pipelining paper (arXiv 2607.07862).
    "paper": _shapes((1024, 2048, 4096, 8192, 16384, 32768), 8192, 8192),
    "decode": _shapes((1, 16, 64, 128, 256, 512), 8192, 8192),
    # Hidden and intermediate size from the models' config.json.
    "llama-3-8b": _shapes(_MODEL_TOKENS, 4096, 14336),
    "llama-3-70b": _shapes(_MODEL_TOKENS, 8192, 28672),
    "qwen-2.5-32b": _shapes(_MODEL_TOKENS, 5120, 27648),
}
