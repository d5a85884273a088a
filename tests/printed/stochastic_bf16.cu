enum : unsigned int { THREADS = 256, LANES = 8, CHUNK = THREADS * LANES };

struct Leaf {
    u64 length;
    u64 aligned;
    u64 key;
    bf16* x;
    const bf16* dx;
    real k[1];
};

template <int N> static __device__ __forceinline__ void run(const Leaf& leaf, u64 i) {
    Lanes<bf16, N> x_now = load<N>(leaf.x, i);
    Lanes<bf16, N> dx_now = load<N>(leaf.dx, i);
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const real x = widen(x_now.at[j]);
        const real dx = widen(dx_now.at[j]);
        const real a3 = dx * leaf.k[0];
        const real a4 = x - a3;
        narrow_at_random(a4, random_bits(leaf.key, i + j), x_now.at[j]);
    }
    store<N>(leaf.x, i, x_now);
}

// What a block of threads does: the elements of a leaf from `start` on. `whole` is at most THREADS, as CHUNK is THREADS * LANES.
static __device__ __forceinline__ void run_block(const Leaf& leaf, u64 start) {
    const u64 end = leaf.length - start < CHUNK ? leaf.length : start + CHUNK;
    const u64 whole = leaf.aligned ? (end - start) / LANES : 0;
    if (threadIdx.x < whole) run<LANES>(leaf, start + threadIdx.x * LANES);
    for (u64 i = start + whole * LANES + threadIdx.x; i < end; i += THREADS) run<1>(leaf, i);
}

