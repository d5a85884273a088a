enum : unsigned int { THREADS = 256, LANES = 4, CHUNK = THREADS * LANES };

struct Leaf {
    u64 length;
    u64 aligned;
    float* x;
    const bf16* dx;
    float* state_m_2;
    float* state_v_3;
    bf16* parameter;
    real k[8];
};

template <int N> static __device__ __forceinline__ void run(const Leaf& leaf, u64 i) {
    Lanes<float, N> x_now = load<N>(leaf.x, i);
    Lanes<bf16, N> dx_now = load<N>(leaf.dx, i);
    Lanes<float, N> state_m_2_now = load<N>(leaf.state_m_2, i);
    Lanes<float, N> state_v_3_now = load<N>(leaf.state_v_3, i);
    Lanes<bf16, N> parameter_now;
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const real x = widen(x_now.at[j]);
        const real dx = widen(dx_now.at[j]);
        const real state_m_2 = widen(state_m_2_now.at[j]);
        const real state_v_3 = widen(state_v_3_now.at[j]);
        const real a5 = state_m_2 * leaf.k[0];
        const real a7 = dx * leaf.k[1];
        const real a8 = a5 + a7;
        const real a9 = dx * dx;
        const real a11 = state_v_3 * leaf.k[2];
        const real a13 = a9 * leaf.k[3];
        const real a14 = a11 + a13;
        const real a16 = a8 * leaf.k[4];
        const real a18 = a14 * leaf.k[5];
        const real a19 = sqrtf(a18);
        const real a21 = a19 + leaf.k[6];
        const real a22 = a16 / a21;
        const real a24 = x * leaf.k[7];
        const real a25 = a22 + a24;
        const real a26 = x - a25;
        narrow(a8, state_m_2_now.at[j]);
        narrow(a14, state_v_3_now.at[j]);
        narrow(a26, x_now.at[j]);
        narrow(widen(x_now.at[j]), parameter_now.at[j]);
    }
    store<N>(leaf.x, i, x_now);
    store<N>(leaf.state_m_2, i, state_m_2_now);
    store<N>(leaf.state_v_3, i, state_v_3_now);
    store<N>(leaf.parameter, i, parameter_now);
}

// What a block of threads does: the elements of a leaf from `start` on. `whole` is at most THREADS, as CHUNK is THREADS * LANES.
static __device__ __forceinline__ void run_block(const Leaf& leaf, u64 start) {
    const u64 end = leaf.length - start < CHUNK ? leaf.length : start + CHUNK;
    const u64 whole = leaf.aligned ? (end - start) / LANES : 0;
    if (threadIdx.x < whole) run<LANES>(leaf, start + threadIdx.x * LANES);
    for (u64 i = start + whole * LANES + threadIdx.x; i < end; i += THREADS) run<1>(leaf, i);
}

