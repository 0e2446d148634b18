"""Runs an MLP on two GPUs from two processes, as serving engines do: one process for each GPU.

Needs torch and two H200:  torchrun --nproc-per-node 2 examples/two_process.py
"""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

import ctatune

WIDTH, HIDDEN, TOKENS = 4096, 14336, 64


def exchange(message: bytes) -> list[bytes]:
    """What every rank gave, in the order of ranks."""
    everyone: list[bytes] = [b""] * dist.get_world_size()
    dist.all_gather_object(everyone, message)
    return everyone


def random(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
    """The same matrix on every rank, as the seed is the same."""
    return (torch.randn(rows, columns, device="cuda") * scale).to(torch.bfloat16)


def largest(y: torch.Tensor, wanted: torch.Tensor) -> float:
    return (y - wanted).abs().max().item()


@torch.inference_mode()
def main() -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)  # all GPUs are visible: rank is the ordinal too
    torch.manual_seed(0)
    w_up, w_down = random(HIDDEN, WIDTH, WIDTH**-0.5), random(WIDTH, HIDDEN, HIDDEN**-0.5)
    x, y = random(TOKENS, WIDTH), torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16, device="cuda")
    with ctatune.Mlp.for_rank(rank, world, w_up, w_down, exchange=exchange) as mlp:
        mlp.warm_up(TOKENS)  # all ranks together, as the plan and closing
        plan = mlp.plan(TOKENS)
        mlp(x, y)
        print(f"rank {rank}: {plan}")
        print(f"rank {rank}: largest difference, eager: {largest(y, x @ w_up.T @ w_down.T)}")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            mlp(x, y)
        x.copy_(random(TOKENS, WIDTH))  # other inputs in the same buffer
        graph.replay()
        print(f"rank {rank}: largest difference, replayed: {largest(y, x @ w_up.T @ w_down.T)}")
        torch.cuda.synchronize()
        mlp.check()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
