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
// Without this, inline assembly elsewhere in the function makes accesses through pointers from tables generic.
static __device__ __forceinline__ void in_global_memory(const void* place) { __builtin_assume(__isGlobal(place)); }

