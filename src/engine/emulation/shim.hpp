// What a CUDA compiler knows by itself, for a C++ compiler. A block's threads run one after another; they switch at barriers.
#ifdef WAITS
// `_FORTIFY_SOURCE`, which some compilers define, rejects `longjmp` between the stacks of threads.
#undef _FORTIFY_SOURCE
#include <setjmp.h>
#include <ucontext.h>
#endif
// Hidden, because otherwise a library would run the kernel of an earlier library that was loaded with
// RTLD_GLOBAL.
#define __global__ __attribute__((visibility("hidden")))
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __align__(bytes) alignas(bytes)
#define __shared__ static thread_local

static thread_local struct { unsigned int x; } threadIdx, blockIdx;

static inline unsigned int __float_as_uint(float a) { unsigned int bits; __builtin_memcpy(&bits, &a, 4); return bits; }
static inline float __uint_as_float(unsigned int bits) { float a; __builtin_memcpy(&a, &bits, 4); return a; }
static inline float sqrtf(float a) { return __builtin_sqrtf(a); }
static inline double sqrt(double a) { return __builtin_sqrt(a); }
static inline float fabsf(float a) { return __builtin_fabsf(a); }
static inline double fabs(double a) { return __builtin_fabs(a); }
static inline float floorf(float a) { return __builtin_floorf(a); }
static inline float copysignf(float a, float sign) { return __builtin_copysignf(a, sign); }
static inline double pow(double a, double power) { return __builtin_pow(a, power); }

static inline float half_to_float(unsigned short half) {
    const unsigned int sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31u, fraction = half & 1023u;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    if (exponent == 0) return copysignf((float)fraction * (1.0f / 16777216.0f), __uint_as_float(sign | 0x3f800000u));
    return __uint_as_float(sign | (exponent + 112u) << 23 | fraction << 13);
}

static inline unsigned short float_to_half(float a) {
    const unsigned int bits = __float_as_uint(a), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return (unsigned short)(sign | 0x7e00u | (size >> 13 & 1023u));
    if (size >= 0x477ff000u) return (unsigned short)(sign | 0x7c00u);
    // Below 2^-14 the unit is 2^-24, which is that of a float next to a half.
    if (size < 0x38800000u) return (unsigned short)(sign | (__float_as_uint(__uint_as_float(size) + 0.5f) - 0x3f000000u));
    return (unsigned short)(sign | (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13);
}

static inline void atomicXor(unsigned int* bits, unsigned int value) { *bits ^= value; }

static inline void in_global_memory(const void*) {}

#ifdef WAITS
// Where the threads of a block wait, and where the one that runs goes back to.
enum { STACK = 1 << 16 };
static thread_local jmp_buf* waiting;
static thread_local jmp_buf scheduler;

// Without `swapcontext`, which asks the kernel for the mask of signals each time.
static inline void __syncthreads() {
    if (!_setjmp(waiting[threadIdx.x])) _longjmp(scheduler, 1);
}

static inline unsigned int warp_largest(unsigned int own) {
    static thread_local unsigned int numbers[1024];
    numbers[threadIdx.x] = own;
    __syncthreads();
    const unsigned int first = threadIdx.x / 32 * 32;
    for (unsigned int i = first; i < first + 32; ++i) own = numbers[i] > own ? numbers[i] : own;
    __syncthreads();
    return own;
}
#endif
