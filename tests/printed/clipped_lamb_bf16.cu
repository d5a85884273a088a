enum : unsigned int { THREADS = 256, CHUNK = 16384, LANES = 8 };

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

extern "C" __global__ void __launch_bounds__(THREADS) optimiser(const Leaf* leaves, const unsigned int* firsts, unsigned int count, double* results) {
    const unsigned int number = leaf_of(blockIdx.x, firsts, count);
    const Leaf leaf = leaves[number];
    const u64 start = (u64)(blockIdx.x - firsts[number]) * leaf.chunk;
    const u64 end = leaf.length - start < leaf.chunk ? leaf.length : start + leaf.chunk;
    const u64 whole = leaf.aligned ? (end - start) / LANES : 0;
    double sum = 0.0;
    for (u64 i = threadIdx.x; i < whole; i += THREADS) run<LANES>(leaf, start + i * LANES, sum);
    for (u64 i = start + whole * LANES + threadIdx.x; i < end; i += THREADS) run<1>(leaf, i, sum);

    __shared__ double sums[THREADS];
    sums[threadIdx.x] = sum;
    for (unsigned int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] = joined(sums[threadIdx.x], sums[threadIdx.x + half]);
    }
    if (threadIdx.x == 0) results[blockIdx.x] = sums[0];
}

enum : unsigned int { THREADS = 256 };

struct Leaf {
    const double* parts;
    u64 parts_count;
    double parts_scale;
};

static __device__ __forceinline__ double joined(double a, double b) { return a + b; }

// The numbers joined in their order, as the host joins them. They are read by all threads and joined by the first, whose result counts.
static __device__ __forceinline__ double total(const double* numbers, u64 count) {
    __shared__ double read[THREADS];
    double total = 0.0;
    for (u64 start = 0; start < count; start += THREADS) {
        const u64 left = count - start < THREADS ? count - start : THREADS;
        if (threadIdx.x < left) read[threadIdx.x] = numbers[start + threadIdx.x];
        __syncthreads();
        if (threadIdx.x == 0) for (u64 i = 0; i < left; ++i) total = joined(total, read[i]);
        __syncthreads();
    }
    return total;
}

extern "C" __global__ void __launch_bounds__(THREADS) optimiser(const Leaf* leaves, const unsigned int*, unsigned int, double* results) {
    const Leaf leaf = leaves[blockIdx.x];
    const real parts = total(leaf.parts, leaf.parts_count) * leaf.parts_scale * leaf.parts_scale;
    if (threadIdx.x == 0) results[blockIdx.x] = parts;
}

enum : unsigned int { THREADS = 256 };

struct Leaf {
    const double* parts;
    u64 parts_count;
    double parts_scale;
};

static __device__ __forceinline__ double joined(double a, double b) { return a + b; }

// The numbers joined in their order, as the host joins them. They are read by all threads and joined by the first, whose result counts.
static __device__ __forceinline__ double total(const double* numbers, u64 count) {
    __shared__ double read[THREADS];
    double total = 0.0;
    for (u64 start = 0; start < count; start += THREADS) {
        const u64 left = count - start < THREADS ? count - start : THREADS;
        if (threadIdx.x < left) read[threadIdx.x] = numbers[start + threadIdx.x];
        __syncthreads();
        if (threadIdx.x == 0) for (u64 i = 0; i < left; ++i) total = joined(total, read[i]);
        __syncthreads();
    }
    return total;
}

extern "C" __global__ void __launch_bounds__(THREADS) optimiser(const Leaf* leaves, const unsigned int*, unsigned int, double* results) {
    const Leaf leaf = leaves[blockIdx.x];
    const real parts = total(leaf.parts, leaf.parts_count) * leaf.parts_scale * leaf.parts_scale;
    if (threadIdx.x == 0) results[blockIdx.x] = parts;
}

enum : unsigned int { THREADS = 256 };

struct Leaf {
    const double* gradient;
    u64 gradient_count;
    double gradient_scale;
    real k[2];
};

static __device__ __forceinline__ double joined(double a, double b) { return a + b; }

// The numbers joined in their order, as the host joins them. They are read by all threads and joined by the first, whose result counts.
static __device__ __forceinline__ double total(const double* numbers, u64 count) {
    __shared__ double read[THREADS];
    double total = 0.0;
    for (u64 start = 0; start < count; start += THREADS) {
        const u64 left = count - start < THREADS ? count - start : THREADS;
        if (threadIdx.x < left) read[threadIdx.x] = numbers[start + threadIdx.x];
        __syncthreads();
        if (threadIdx.x == 0) for (u64 i = 0; i < left; ++i) total = joined(total, read[i]);
        __syncthreads();
    }
    return total;
}

extern "C" __global__ void __launch_bounds__(THREADS) optimiser(const Leaf* leaves, const unsigned int*, unsigned int, double* results) {
    const Leaf leaf = leaves[blockIdx.x];
    const real gradient = sqrt(total(leaf.gradient, leaf.gradient_count) * leaf.gradient_scale * leaf.gradient_scale);
    const bool a3 = leaf.k[0] < gradient;
    const real a4 = leaf.k[0] / gradient;
    const real a6 = a3 ? a4 : leaf.k[1];
    if (threadIdx.x == 0) results[blockIdx.x] = a6;
}

enum : unsigned int { THREADS = 256, CHUNK = 16384, LANES = 4 };

struct Leaf {
    u64 length;
    u64 aligned;
    u64 chunk;
    const float* x;
    const bf16* dx;
    const double* found_2;
    const float* state_m_3;
    const float* state_v_4;
    real k[8];
};

static __device__ __forceinline__ double joined(double a, double b) { return a + b; }

template <int N> static __device__ __forceinline__ void run(const Leaf& leaf, u64 i, double& sum) {
    Lanes<float, N> x_now = load<N>(leaf.x, i);
    Lanes<bf16, N> dx_now = load<N>(leaf.dx, i);
    const real found_2 = (real)*leaf.found_2;
    Lanes<float, N> state_m_3_now = load<N>(leaf.state_m_3, i);
    Lanes<float, N> state_v_4_now = load<N>(leaf.state_v_4, i);
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const real x = widen(x_now.at[j]);
        const real dx = widen(dx_now.at[j]);
        const real state_m_3 = widen(state_m_3_now.at[j]);
        const real state_v_4 = widen(state_v_4_now.at[j]);
        const real a3 = dx * found_2;
        const real a7 = state_m_3 * leaf.k[0];
        const real a9 = a3 * leaf.k[1];
        const real a10 = a7 + a9;
        const real a11 = a3 * a3;
        const real a13 = state_v_4 * leaf.k[2];
        const real a15 = a11 * leaf.k[3];
        const real a16 = a13 + a15;
        const real a18 = a10 * leaf.k[4];
        const real a20 = a16 * leaf.k[5];
        const real a21 = sqrtf(a20);
        const real a23 = a21 + leaf.k[6];
        const real a24 = a18 / a23;
        const real a26 = x * leaf.k[7];
        const real a27 = a24 + a26;
        sum = joined(sum, (double)a27 * (double)a27);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) optimiser(const Leaf* leaves, const unsigned int* firsts, unsigned int count, double* results) {
    const unsigned int number = leaf_of(blockIdx.x, firsts, count);
    const Leaf leaf = leaves[number];
    const u64 start = (u64)(blockIdx.x - firsts[number]) * leaf.chunk;
    const u64 end = leaf.length - start < leaf.chunk ? leaf.length : start + leaf.chunk;
    const u64 whole = leaf.aligned ? (end - start) / LANES : 0;
    double sum = 0.0;
    for (u64 i = threadIdx.x; i < whole; i += THREADS) run<LANES>(leaf, start + i * LANES, sum);
    for (u64 i = start + whole * LANES + threadIdx.x; i < end; i += THREADS) run<1>(leaf, i, sum);

    __shared__ double sums[THREADS];
    sums[threadIdx.x] = sum;
    for (unsigned int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] = joined(sums[threadIdx.x], sums[threadIdx.x + half]);
    }
    if (threadIdx.x == 0) results[blockIdx.x] = sums[0];
}

enum : unsigned int { THREADS = 256, CHUNK = 16384, LANES = 4 };

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

extern "C" __global__ void __launch_bounds__(THREADS) optimiser(const Leaf* leaves, const unsigned int* firsts, unsigned int count, double* results) {
    const unsigned int number = leaf_of(blockIdx.x, firsts, count);
    const Leaf leaf = leaves[number];
    const u64 start = (u64)(blockIdx.x - firsts[number]) * leaf.chunk;
    const u64 end = leaf.length - start < leaf.chunk ? leaf.length : start + leaf.chunk;
    const u64 whole = leaf.aligned ? (end - start) / LANES : 0;
    double sum = 0.0;
    for (u64 i = threadIdx.x; i < whole; i += THREADS) run<LANES>(leaf, start + i * LANES, sum);
    for (u64 i = start + whole * LANES + threadIdx.x; i < end; i += THREADS) run<1>(leaf, i, sum);

    __shared__ double sums[THREADS];
    sums[threadIdx.x] = sum;
    for (unsigned int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] = joined(sums[threadIdx.x], sums[threadIdx.x + half]);
    }
    if (threadIdx.x == 0) results[blockIdx.x] = sums[0];
}

enum : unsigned int { THREADS = 256, CHUNK = 16384, LANES = 4 };

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

extern "C" __global__ void __launch_bounds__(THREADS) optimiser(const Leaf* leaves, const unsigned int* firsts, unsigned int count) {
    const unsigned int number = leaf_of(blockIdx.x, firsts, count);
    const Leaf leaf = leaves[number];
    const u64 start = (u64)(blockIdx.x - firsts[number]) * CHUNK;
    const u64 end = leaf.length - start < CHUNK ? leaf.length : start + CHUNK;
    const u64 whole = leaf.aligned ? (end - start) / LANES : 0;
    for (u64 i = threadIdx.x; i < whole; i += THREADS) run<LANES>(leaf, start + i * LANES);
    for (u64 i = start + whole * LANES + threadIdx.x; i < end; i += THREADS) run<1>(leaf, i);
}
