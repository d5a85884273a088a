enum : unsigned int { THREADS = 256, CHUNK = 16384, LANES = 4 };

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
        const bool a3 = leaf.k[0] <= dx;
        const real a4 = a3 ? dx : leaf.k[0];
        const bool a5 = dx == dx;
        const real a6 = a5 ? a4 : dx;
        const bool a8 = a6 <= leaf.k[1];
        const real a9 = a8 ? a6 : leaf.k[1];
        const bool a10 = a6 == a6;
        const real a11 = a10 ? a9 : a6;
        const real a13 = x * leaf.k[2];
        const real a14 = a11 + a13;
        const real a18 = state_m_2 * leaf.k[3];
        const real a20 = a14 * leaf.k[4];
        const real a21 = a18 + a20;
        const real a22 = a14 * a14;
        const real a24 = state_v_3 * leaf.k[5];
        const real a26 = a22 * leaf.k[6];
        const real a27 = a24 + a26;
        const real a29 = a21 * leaf.k[7];
        const real a31 = a27 * leaf.k[8];
        const real a32 = sqrtf(a31);
        const real a34 = a32 + leaf.k[9];
        const real a35 = a29 / a34;
        const real a36 = x - a35;
        narrow(a21, state_m_2_now.at[j]);
        narrow(a27, state_v_3_now.at[j]);
        narrow(a36, x_now.at[j]);
    }
    store<N>(leaf.x, i, x_now);
    store<N>(leaf.state_m_2, i, state_m_2_now);
    store<N>(leaf.state_v_3, i, state_v_3_now);
}

// What a block of threads does: the elements of a leaf from `start` on.
static __device__ __forceinline__ void run_block(const Leaf& leaf, u64 start) {
    const u64 end = leaf.length - start < CHUNK ? leaf.length : start + CHUNK;
    const u64 whole = leaf.aligned ? (end - start) / LANES : 0;
    for (u64 i = threadIdx.x; i < whole; i += THREADS) run<LANES>(leaf, start + i * LANES);
    for (u64 i = start + whole * LANES + threadIdx.x; i < end; i += THREADS) run<1>(leaf, i);
}

