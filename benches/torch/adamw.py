"""Measures torch's AdamW(fused=True) on a CUDA device, in cases of the `step` benchmark.

Per case one line, the median over rounds in nanoseconds per parameter:
`torch <case> ns_per_element=<x>`.
"""

import argparse
import math
import statistics
import time

import torch

SMALL = (2000, 4096)


def tensors(sizes, value, dtype):
    return [torch.full((size,), value, dtype=dtype, device="cuda") for size in sizes]


def plain(sizes):
    """f32 throughout."""
    parameters, gradients = tensors(sizes, 0.5, torch.float32), tensors(sizes, 1e-3, torch.float32)
    return adamw(parameters, gradients).step


def mixed(sizes):
    """bf16 parameters and gradients; the step is on f32 masters, which gradients are copied to and parameters from."""
    parameters, gradients = tensors(sizes, 0.5, torch.bfloat16), tensors(sizes, 1e-3, torch.bfloat16)
    masters, master_gradients = tensors(sizes, 0.5, torch.float32), tensors(sizes, 0.0, torch.float32)
    optimiser = adamw(masters, master_gradients)

    def step():
        torch._foreach_copy_(master_gradients, gradients)
        optimiser.step()
        torch._foreach_copy_(parameters, masters)

    return torch.no_grad()(step)


def adamw(parameters, gradients):
    for parameter, gradient in zip(parameters, gradients):
        parameter.requires_grad_()
        parameter.grad = gradient
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, fused=True)


def seconds(step, steps):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(name, case, sizes, rounds):
    step = case(sizes)
    samples = []
    for _ in range(rounds + 1):
        seconds(step, 1)
        steps = math.ceil(0.2 / seconds(step, 1))
        samples.append(seconds(step, steps) / steps)
    # The first round touches fresh memory.
    nanoseconds = statistics.median(samples[1:]) * 1e9 / sum(sizes)
    print(f"torch {name} ns_per_element={nanoseconds:.6f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=10**9, help="parameters of the large cases")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print(f"torch={torch.__version__} rounds={options.rounds} device={torch.cuda.get_device_name()!r}")
    large = [math.ceil(options.elements / 2)] * 2
    small = [SMALL[1]] * SMALL[0]
    for name, case, sizes in (("adamw_f32", plain, large), ("mixed_bf16_adamw", mixed, large), ("small_f32", plain, small)):
        measure(name, case, sizes, options.rounds)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
