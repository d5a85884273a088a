enum : unsigned int { THREADS = 256, LANES = 4, CHUNK = THREADS * LANES };

struct Leaf {
    u64 length;
    u64 aligned;
    float* x;
    const float* dx;
    float* state_m_2;
    float* state_v_3;
    real k[10];
};

template <int N> static __device__ __forceinline__ void run(const Leaf& leaf, u64 i) {
    Lanes<float, N> x_now = load<N>(leaf.x, i);
    Lanes<float, N> dx_now = load<N>(leaf.dx, i);
    Lanes<float, N> state_m_2_now = load<N>(leaf.state_m_2, i);
    Lanes<float, N> state_v_3_now = load<N>(leaf.state_v_3, i);
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const real x = widen(x_now.at[j]);
        const real dx = widen(dx_now.at[j]);
        const real state_m_2 = widen(state_m_2_now.at[j]);
        const real state_v_3 = widen(state_v_3_now.at[j]);
        const bool a4 = dx < leaf.k[0];
        const real a5 = a4 ? leaf.k[0] : dx;
        const bool a6 = leaf.k[1] < a5;
        const real a7 = a6 ? leaf.k[1] : a5;
        const real a9 = x * leaf.k[2];
        const real a10 = a7 + a9;
        const real a14 = state_m_2 * leaf.k[3];
        const real a16 = a10 * leaf.k[4];
        const real a17 = a14 + a16;
        const real a18 = a10 * a10;
        const real a20 = state_v_3 * leaf.k[5];
        const real a22 = a18 * leaf.k[6];
        const real a23 = a20 + a22;
        const real a25 = a17 * leaf.k[7];
        const real a27 = a23 * leaf.k[8];
        const real a28 = sqrtf(a27);
        const real a30 = a28 + leaf.k[9];
        const real a31 = a25 / a30;
        const real a32 = x - a31;
        narrow(a17, state_m_2_now.at[j]);
        narrow(a23, state_v_3_now.at[j]);
        narrow(a32, x_now.at[j]);
    }
    store<N>(leaf.x, i, x_now);
    store<N>(leaf.state_m_2, i, state_m_2_now);
    store<N>(leaf.state_v_3, i, state_v_3_now);
}

// What a block of threads does: the elements of a leaf from `start` on. `whole` is at most THREADS, as CHUNK is THREADS * LANES.
static __device__ __forceinline__ void run_block(const Leaf& leaf, u64 start) {
    const u64 end = leaf.length - start < CHUNK ? leaf.length : start + CHUNK;
    const u64 whole = leaf.aligned ? (end - start) / LANES : 0;
    if (threadIdx.x < whole) run<LANES>(leaf, start + threadIdx.x * LANES);
    for (u64 i = start + whole * LANES + threadIdx.x; i < end; i += THREADS) run<1>(leaf, i);
}

