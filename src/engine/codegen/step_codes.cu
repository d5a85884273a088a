extern "C" __global__ void __launch_bounds__(THREADS) optimiser(const Leaf* leaves, const unsigned int* block_offsets, unsigned int count) {
    const unsigned int number = leaf_of(blockIdx.x, block_offsets, count);
    const Leaf leaf = leaves[number];
    const u64 start = (u64)(blockIdx.x - block_offsets[number]) * CHUNK;
    const u64 end = leaf.length - start < CHUNK ? leaf.length : start + CHUNK;
    for (u64 first = start; first < end; first += THREADS) {
        const u64 i = first + threadIdx.x;
        real next[CODED] = {};
        if (i < end) run<1>(leaf, i, next);
        encode_all(leaf, i, i < end, next);
    }
}
