// What the sources use and NVRTC has only with headers.
static __device__ __forceinline__ float half_to_float(unsigned short bits) {
    float a;
    asm("cvt.f32.f16 %0, %1;" : "=f"(a) : "h"(bits));
    return a;
}
static __device__ __forceinline__ unsigned short float_to_half(float a) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(a));
    return bits;
}

// The largest number among the threads of a warp, which all call it together.
static __device__ __forceinline__ unsigned int warp_largest(unsigned int own) {
#if __CUDA_ARCH__ >= 800
    own = __reduce_max_sync(0xffffffffu, own);
#else
    for (int distance = 16; distance > 0; distance /= 2) {
        const unsigned int other = __shfl_xor_sync(0xffffffffu, own, distance);
        own = other > own ? other : own;
    }
#endif
    // What a thread has read another may write now.
    __syncwarp();
    return own;
}

// Without this, inline assembly elsewhere in the function makes accesses through pointers from tables generic.
static __device__ __forceinline__ void in_global_memory(const void* place) { __builtin_assume(__isGlobal(place)); }

