"""Measures torch's ZeroRedundancyOptimizer over gloo, on the CPU, with the model of the `sharded` benchmark.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benches/torch/zero.py

A step adds the gradients up over the ranks, updates this rank's part and sends the parameters to all. Per case one line, medians over
rounds of the slowest rank, in ns per element of the model:
`torch <case> ns_per_element=<x> ratio=<x to the whole update of the same dtype without communication>`.

There is no case with masters, as torch has none here: `bf16` keeps moments in bf16 as well, and `f32` has twice the bytes on the wire.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer


def sizes(millions):
    return [millions << 18] + (3 * millions // 4) * [1 << 20, 1 << 10]


def parameters(millions, dtype):
    made = [torch.nn.Parameter(torch.full((size,), 0.5, dtype=dtype)) for size in sizes(millions)]
    for parameter in made:
        parameter.grad = torch.full_like(parameter, 1e-3)
    return made


def whole(millions, dtype):
    return torch.optim.AdamW(parameters(millions, dtype), lr=1e-3, weight_decay=0.01, fused=True).step


def sharded(millions, dtype):
    own = parameters(millions, dtype)
    optimiser = ZeroRedundancyOptimizer(own, optimizer_class=torch.optim.AdamW, lr=1e-3, weight_decay=0.01, fused=True)

    def step():
        for parameter in own:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimiser.step()

    return torch.no_grad()(step)


def measure(cases, elements, rounds):
    samples = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, step in cases.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            slowest = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if number > 0:
                samples[name].append(slowest.item() / elements * 1e9)
    return {name: statistics.median(times) for name, times in samples.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=int, default=33)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    dtypes = {"f32": torch.float32, "bf16": torch.bfloat16}
    cases = {}
    for name, dtype in dtypes.items():
        cases[f"whole_{name}"] = whole(options.millions, dtype)
        cases[f"sharded_{name}"] = sharded(options.millions, dtype)
    medians = measure(cases, sum(sizes(options.millions)), options.rounds)
    if dist.get_rank() == 0:
        for name, time_ in medians.items():
            ratio = time_ / medians["whole_" + name.split("_")[1]]
            print(f"torch {name} ns_per_element={time_:.3f} ratio={ratio:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
