enum : unsigned int { THREADS = 256, LANES = 8, CHUNK = THREADS * LANES };

struct Leaf {
    u64 length;
    u64 aligned;
    u64 chunk;
    const bf16* dx;
};

static __device__ __forceinline__ double joined(double a, double b) { return a + b; }

template <int N> static __device__ __forceinline__ void run(const Leaf& leaf, u64 i, double& sum) {
    Lanes<bf16, N> dx_now = load<N>(leaf.dx, i);
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const real dx = widen(dx_now.at[j]);
        sum = joined(sum, (double)dx * (double)dx);
    }
}


enum : unsigned int { THREADS = 256, LANES = 4, CHUNK = THREADS * LANES };

struct Leaf {
    u64 length;
    u64 aligned;
    u64 chunk;
    const float* x;
    const bf16* dx;
    const float* state_m_2;
    const float* state_v_3;
    real k[9];
};

static __device__ __forceinline__ double joined(double a, double b) { return a + b; }

template <int N> static __device__ __forceinline__ void run(const Leaf& leaf, u64 i, double& sum) {
    Lanes<float, N> x_now = load<N>(leaf.x, i);
    Lanes<bf16, N> dx_now = load<N>(leaf.dx, i);
    Lanes<float, N> state_m_2_now = load<N>(leaf.state_m_2, i);
    Lanes<float, N> state_v_3_now = load<N>(leaf.state_v_3, i);
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const real x = widen(x_now.at[j]);
        const real dx = widen(dx_now.at[j]);
        const real state_m_2 = widen(state_m_2_now.at[j]);
        const real state_v_3 = widen(state_v_3_now.at[j]);
        const real a3 = dx * leaf.k[0];
        const real a7 = state_m_2 * leaf.k[1];
        const real a9 = a3 * leaf.k[2];
        const real a10 = a7 + a9;
        const real a11 = a3 * a3;
        const real a13 = state_v_3 * leaf.k[3];
        const real a15 = a11 * leaf.k[4];
        const real a16 = a13 + a15;
        const real a18 = a10 * leaf.k[5];
        const real a20 = a16 * leaf.k[6];
        const real a21 = sqrtf(a20);
        const real a23 = a21 + leaf.k[7];
        const real a24 = a18 / a23;
        const real a26 = x * leaf.k[8];
        const real a27 = a24 + a26;
        sum = joined(sum, (double)a27 * (double)a27);
    }
}


enum : unsigned int { THREADS = 256, LANES = 4, CHUNK = THREADS * LANES };

struct Leaf {
    u64 length;
    u64 aligned;
    u64 chunk;
    const float* x;
};

static __device__ __forceinline__ double joined(double a, double b) { return a + b; }

template <int N> static __device__ __forceinline__ void run(const Leaf& leaf, u64 i, double& sum) {
    Lanes<float, N> x_now = load<N>(leaf.x, i);
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const real x = widen(x_now.at[j]);
        sum = joined(sum, (double)x * (double)x);
    }
}


enum : unsigned int { THREADS = 256, LANES = 4, CHUNK = THREADS * LANES };

struct Leaf {
    u64 length;
    u64 aligned;
    float* x;
    const bf16* dx;
    float* state_m_2;
    float* state_v_3;
    bf16* parameter;
    real k[10];
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
        const real a3 = dx * leaf.k[0];
        const real a7 = state_m_2 * leaf.k[1];
        const real a9 = a3 * leaf.k[2];
        const real a10 = a7 + a9;
        const real a11 = a3 * a3;
        const real a13 = state_v_3 * leaf.k[3];
        const real a15 = a11 * leaf.k[4];
        const real a16 = a13 + a15;
        const real a18 = a10 * leaf.k[5];
        const real a20 = a16 * leaf.k[6];
        const real a21 = sqrtf(a20);
        const real a23 = a21 + leaf.k[7];
        const real a24 = a18 / a23;
        const real a26 = x * leaf.k[8];
        const real a27 = a24 + a26;
        const real a29 = a27 * leaf.k[9];
        const real a30 = x - a29;
        narrow(a10, state_m_2_now.at[j]);
        narrow(a16, state_v_3_now.at[j]);
        narrow(a30, x_now.at[j]);
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

