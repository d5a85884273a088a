extern "C" __global__ void __launch_bounds__(THREADS) optimiser(const Leaf* leaves, const unsigned int* block_offsets, unsigned int count) {
    const unsigned int number = leaf_of(blockIdx.x, block_offsets, count);
    const Leaf leaf = leaves[number];
    run_block(leaf, (u64)(blockIdx.x - block_offsets[number]) * CHUNK);
}
