"""Runs the MLP of a small torch module on two GPUs, eagerly and inside a CUDA graph.

The weights are those of two `torch.nn.Linear` without bias, as any checkpoint keeps them. Needs
torch and two H200:  python examples/torch_mlp.py
"""

from __future__ import annotations

import torch
from torch import nn

import ctatune

WIDTH, HIDDEN, TOKENS = 4096, 14336, 64


class Block(nn.Module):
    """A residual block whose MLP has no activation (ctatune has none yet)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.up_proj(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def swap(block: Block, tokens: int) -> ctatune.Mlp:
    """Let ctatune compute the MLP of a block from now on. Close what is returned at the end."""
    fast = ctatune.Mlp(block.up_proj.weight.detach(), block.down_proj.weight.detach(), gpus=2)
    fast.warm_up(tokens)

    def mlp(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape[0], WIDTH, dtype=torch.bfloat16, device=x.device)
        return fast(x, out)

    block.mlp = mlp  # type: ignore[method-assign]
    return fast


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    block = Block().to("cuda:0", torch.bfloat16)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, device="cuda:0")
    wanted = block(x)
    with swap(block, TOKENS) as fast:
        print("plan:", fast.plan(TOKENS))
        print("largest difference, eager:", (block(x) - wanted).abs().max().item())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = block(x)
        x.copy_(torch.randn_like(x))  # other inputs in the same buffer
        graph.replay()
        eager = block(x)
        print("largest difference, replayed:", (y - eager).abs().max().item())
        fast.check()


if __name__ == "__main__":
    main()
