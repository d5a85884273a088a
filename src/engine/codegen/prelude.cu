typedef unsigned long long u64;

struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };

// A number as the arithmetic has it.
static __device__ __forceinline__ real widen(float a) { return a; }
static __device__ __forceinline__ real widen(double a) { return a; }
static __device__ __forceinline__ real widen(f16 a) { return half_to_float(a.bits); }
static __device__ __forceinline__ real widen(bf16 a) { return __uint_as_float((unsigned int)a.bits << 16); }

// An f32 that, rounded once more to 16 bits, gives what rounding the number itself would: an inexact one has an odd last bit.
static __device__ __forceinline__ float to_odd(float a) { return a; }
static __device__ __forceinline__ float to_odd(double a) {
    const float near = (float)a;
    const unsigned int bits = __float_as_uint(near);
    if ((double)near == a || a != a || bits & 1u) return near;
    if ((bits & 0x7fffffffu) == 0x7f800000u) return copysignf(3.402823466e38f, near);
    return __uint_as_float(fabs(a) > fabs((double)near) ? bits + 1u : bits - 1u);
}

// A number as it is stored: to nearest, ties to even.
static __device__ __forceinline__ void narrow(real a, float& to) { to = (float)a; }
static __device__ __forceinline__ void narrow(real a, double& to) { to = a; }
static __device__ __forceinline__ void narrow(real a, f16& to) { to.bits = float_to_half(to_odd(a)); }
static __device__ __forceinline__ void narrow(real a, bf16& to) {
    const unsigned int bits = __float_as_uint(to_odd(a));
    const unsigned int even = bits + 0x7fffu + (bits >> 16 & 1u);
    to.bits = (unsigned short)((a != a ? bits | 0x400000u : even) >> 16);
}

// A bf16, the nearest to an f32, and what it lacks of it, in units of the last place.
static __device__ __forceinline__ real join(bf16 high, int low) { return __uint_as_float(((unsigned int)high.bits << 16) + (unsigned int)low); }
static __device__ __forceinline__ void split(real a, bf16& high, int& low) {
    const float near = (float)a;
    const unsigned int bits = near != near ? 0x7fc00000u : __float_as_uint(near);
    high.bits = (unsigned short)(bits + 0x7fffu + (bits >> 16 & 1u) >> 16);
    low = (bits & 0x1ffffu) == 0x8000u ? 0x8000 : (int)(short)(bits & 0xffffu);
}

// With 8 low bits: the number is rounded to 24 first, and ties go away from zero.
static __device__ __forceinline__ real join(bf16 high, unsigned char low) { return join(high, (int)(short)(low << 8)); }
static __device__ __forceinline__ void split(real a, bf16& high, unsigned char& low) {
    const float near = (float)a;
    const unsigned int all = near != near ? 0x7fc00000u : __float_as_uint(near), bits = all + 0x7fu + (all >> 8 & 1u) & ~0xffu;
    high.bits = (unsigned short)(bits + 0x8000u >> 16);
    low = (unsigned char)(bits >> 8);
}

// 32 random bits for an element: lowbias32 (Wellons 2018) between the two words of the key.
static __device__ __forceinline__ unsigned int random_bits(u64 key, u64 element) {
    unsigned int x = (unsigned int)element ^ (unsigned int)key;
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return (x ^ x >> 16) + ((unsigned int)(key >> 32) ^ (unsigned int)(element >> 32));
}

// One of the two stored numbers next to a, the nearer with the greater probability. Beyond the largest it is the nearest: half a unit stands for the random bits.
static __device__ __forceinline__ void narrow_at_random(real a, unsigned int random, bf16& to) {
    const unsigned int bits = __float_as_uint((float)a);
    const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
    const unsigned int kept = bits >> 16 | (a != a ? 0x40u : 0u);
    const unsigned int added = (bits & 0x7fffffffu) > 0x7f7f0000u ? 0x80000000u : random;
    to.bits = (unsigned short)(finite ? bits + (added >> 16) >> 16 : kept);
}
static __device__ __forceinline__ void narrow_at_random(real a, unsigned int random, f16& to) {
    const float value = (float)a;
    const unsigned int bits = __float_as_uint(value);
    const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
    const unsigned int added = fabsf(value) > 65504.0f ? 0x80000000u : random;
    const float normal = __uint_as_float(bits + (added >> 19) & ~0x1fffu);
    // Below 2^-14 the unit of f16 is 2^-24: in units, plus a number in [0, 1) of 11 bits.
    const float part = (float)(random >> 21) * (1.0f / 2048.0f);
    const float subnormal = copysignf(floorf(fabsf(value) / 5.9604645e-8f + part) * 5.9604645e-8f, value);
    const float rounded = fabsf(value) < 6.1035156e-5f ? subnormal : normal;
    to.bits = float_to_half(finite ? rounded : value);
}
static __device__ __forceinline__ void narrow_at_random(real a, unsigned int, float& to) { to = (float)a; }
static __device__ __forceinline__ void narrow_at_random(real a, unsigned int, double& to) { to = a; }

// Neighbouring elements that are read and written in one access.
template <typename T, int N> struct __align__(sizeof(T) * N) Lanes { T at[N]; };

template <int N, typename T> static __device__ __forceinline__ Lanes<T, N> load(const T* from, u64 element) {
    in_global_memory(from);
    return *reinterpret_cast<const Lanes<T, N>*>(from + element);
}
template <int N, typename T> static __device__ __forceinline__ void store(T* to, u64 element, const Lanes<T, N>& lanes) {
    in_global_memory(to);
    *reinterpret_cast<Lanes<T, N>*>(to + element) = lanes;
}
