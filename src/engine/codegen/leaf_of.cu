// The leaf of a block: the last one whose first block is not after it.
static __device__ __forceinline__ unsigned int leaf_of(unsigned int block, const unsigned int* block_offsets, unsigned int leaves) {
    unsigned int low = 0, high = leaves;
    while (high - low > 1) {
        const unsigned int middle = low + (high - low) / 2;
        if (block_offsets[middle] <= block) low = middle; else high = middle;
    }
    return low;
}
