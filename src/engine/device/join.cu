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
