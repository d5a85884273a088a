extern "C" __global__ void __launch_bounds__(THREADS) optimiser(const Leaf* leaves, const unsigned int* block_offsets, unsigned int count) {
    const unsigned int number = leaf_of(blockIdx.x, block_offsets, count);
    const Leaf leaf = leaves[number];
    const u64 start = (u64)(blockIdx.x - block_offsets[number]) * CHUNK;
    const u64 end = leaf.length - start < CHUNK ? leaf.length : start + CHUNK;
    const u64 whole = leaf.aligned ? (end - start) / LANES : 0;
    for (u64 i = threadIdx.x; i < whole; i += THREADS) run<LANES>(leaf, start + i * LANES);
    for (u64 i = start + whole * LANES + threadIdx.x; i < end; i += THREADS) run<1>(leaf, i);
}
