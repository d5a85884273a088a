// What a block of threads does: the elements of a leaf from `start` on.
static __device__ __forceinline__ void run_block(const Leaf& leaf, u64 start) {
    const u64 end = leaf.length - start < CHUNK ? leaf.length : start + CHUNK;
    for (u64 first = start; first < end; first += THREADS) {
        const u64 i = first + threadIdx.x;
        real next[CODED] = {};
        if (i < end) run<1>(leaf, i, next);
        encode_all(leaf, i, i < end, next);
    }
}

