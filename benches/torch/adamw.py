"""Measures torch's AdamW(fused=True), and DeepSpeed's on the CPU, in cases of the `step` benchmark.

Per case one line, the median over rounds in nanoseconds per parameter:
`torch <case> ns_per_element=<x>` or `deepspeed <case> ns_per_element=<x>`.

DeepSpeed compiles its kernels at the first use: it needs ninja and a C++ compiler.
"""

import argparse
import importlib.metadata
import math
import statistics
import time

import torch

SMALL = (2000, 4096)


class Torch:
    """torch's fused kernel."""

    name = "torch"

    def optimiser(self, parameters):
        return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, fused=True)


class DeepSpeed:
    """The kernel of ZeRO-Offload."""

    name = "deepspeed"

    def optimiser(self, parameters):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(parameters, lr=1e-3, weight_decay=0.01, adamw_mode=True)


class Cases:
    """The cases on a device."""

    def __init__(self, device, peer):
        self.device, self.peer = device, peer

    def tensors(self, sizes, value, dtype):
        return [torch.full((size,), value, dtype=dtype, device=self.device) for size in sizes]

    def adamw(self, parameters, gradients):
        for parameter, gradient in zip(parameters, gradients):
            parameter.requires_grad_()
            parameter.grad = gradient
        return self.peer.optimiser(parameters)

    def plain(self, sizes):
        """f32 throughout."""
        parameters, gradients = self.tensors(sizes, 0.5, torch.float32), self.tensors(sizes, 1e-3, torch.float32)
        return self.adamw(parameters, gradients).step

    def mixed(self, sizes):
        """bf16 parameters and gradients; the step is on f32 masters, which gradients are copied to and parameters from."""
        parameters, gradients = self.tensors(sizes, 0.5, torch.bfloat16), self.tensors(sizes, 1e-3, torch.bfloat16)
        masters, master_gradients = self.tensors(sizes, 0.5, torch.float32), self.tensors(sizes, 0.0, torch.float32)
        optimiser = self.adamw(masters, master_gradients)

        def step():
            torch._foreach_copy_(master_gradients, gradients)
            optimiser.step()
            torch._foreach_copy_(parameters, masters)

        return torch.no_grad()(step)

    def synchronize(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, step, steps):
        self.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        self.synchronize()
        return time.perf_counter() - start


def measure(cases, name, case, sizes, rounds):
    step = case(sizes)
    samples = []
    for _ in range(rounds + 1):
        cases.seconds(step, 1)
        steps = math.ceil(0.2 / cases.seconds(step, 1))
        samples.append(cases.seconds(step, steps) / steps)
    # The first round touches fresh memory.
    nanoseconds = statistics.median(samples[1:]) * 1e9 / sum(sizes)
    print(f"{cases.peer.name} {name} ns_per_element={nanoseconds:.6f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--peer", choices=("torch", "deepspeed"), default="torch", help="deepspeed is on the CPU alone")
    parser.add_argument("--elements", type=int, default=10**9, help="parameters of the large cases")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    peer = {"torch": Torch, "deepspeed": DeepSpeed}[options.peer]()
    if options.device == "cuda":
        device = f"{torch.cuda.get_device_name()!r}"
    else:
        device = f"cpu threads={torch.get_num_threads()} vectors={torch.backends.cpu.get_cpu_capability()!r}"
    version = importlib.metadata.version(peer.name)
    print(f"{peer.name}={version} rounds={options.rounds} device={device}")
    cases = Cases(options.device, peer)
    large = [math.ceil(options.elements / 2)] * 2
    small = [SMALL[1]] * SMALL[0]
    for name, case, sizes in (
        ("adamw_f32", cases.plain, large),
        ("mixed_bf16_adamw", cases.mixed, large),
        ("small_f32", cases.plain, small),
        ("small_mixed_bf16_adamw", cases.mixed, small),
    ):
        measure(cases, name, case, sizes, options.rounds)
        if options.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
