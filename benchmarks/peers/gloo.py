"""torch.distributed with gloo: all-reduce of one vector between two processes."""

import multiprocessing
import socket
import sys

import torch
import torch.distributed

from benchmarks.reductions import COUNTS, ELEMENTS
from benchmarks.report import rate, report


def average(rank: int, port: int, size: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    vector = torch.ones(ELEMENTS[size])

    def step(_):
        torch.distributed.all_reduce(vector)
        vector.mul_(0.5)

    speed = rate(step, COUNTS[size], COUNTS[size] // 5)
    if rank == 0:
        report(f"gloo_{size}", speed, torch.__version__, bytes=4 * ELEMENTS[size], processes=2, times=COUNTS[size])
    torch.distributed.destroy_process_group()


def main(size: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = multiprocessing.get_context("spawn")
    processes = [start.Process(target=average, args=(rank, port, size), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    if any(process.exitcode for process in processes):
        raise RuntimeError(f"gloo left with {[process.exitcode for process in processes]}")


if __name__ == "__main__":
    main(sys.argv[1])
