// What a block of threads does: the elements of a leaf from `start` on. `whole` is at most THREADS, as CHUNK is THREADS * LANES.
static __device__ __forceinline__ void run_block(const Leaf& leaf, u64 start) {
    const u64 end = leaf.length - start < CHUNK ? leaf.length : start + CHUNK;
    const u64 whole = leaf.aligned ? (end - start) / LANES : 0;
    if (threadIdx.x < whole) run<LANES>(leaf, start + threadIdx.x * LANES);
    for (u64 i = start + whole * LANES + threadIdx.x; i < end; i += THREADS) run<1>(leaf, i);
}
