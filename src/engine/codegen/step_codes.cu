// What a block of threads does: the elements of a leaf from `start` on. Those beyond the end take part, because a warp encodes together.
static __device__ __forceinline__ void run_block(const Leaf& leaf, u64 start) {
    const u64 i = start + threadIdx.x * LANES;
    const unsigned int count = leaf.length <= i ? 0 : leaf.length - i < LANES ? (unsigned int)(leaf.length - i) : LANES;
    real next[CODED * LANES] = {};
    if (leaf.aligned && count == LANES) {
        run<LANES>(leaf, i, next);
    } else {
#pragma unroll
        for (unsigned int j = 0; j < LANES; ++j)
            if (j < count) run<1>(leaf, i + j, next + j);
    }
    encode_all(leaf, i, count, next);
}
