// Small floats in blocks, each with one f32 as its unit. A record is the unit, then a code for each element. All of it as in `codes.rs`.
template <bool SIGNED> static __device__ __forceinline__ real decode(const unsigned char* records, u64 element) {
    in_global_memory(records);
    const unsigned char* record = records + element / BLOCK * RECORD;
    const float unit = *reinterpret_cast<const float*>(record);
    const unsigned int top = SIGNED ? 0x7f : 0xff, code = record[sizeof(float) + element % BLOCK], size = code & top;
    const unsigned int bits = size == 0 ? 0 : size + (0x3f8 - top) << 20;
    return __uint_as_float(SIGNED ? bits | (code & 0x80u) << 24 : bits) * unit;
}

// All threads call it together. Those of a block of codes find its unit.
template <bool SIGNED> static __device__ __forceinline__ void encode(unsigned char* records, u64 element, bool exists, real value) {
    __shared__ unsigned int largest[THREADS / BLOCK];
    const unsigned int own = threadIdx.x / BLOCK;
    const float number = (float)value;
    if (threadIdx.x % BLOCK == 0) largest[own] = 0;
    __syncthreads();
    if (exists) atomicMax(&largest[own], __float_as_uint(number) & 0x7fffffffu);
    __syncthreads();
    const unsigned int most = largest[own];
    __syncthreads();
    if (!exists) return;
    const bool finite = most < 0x7f800000u;
    const unsigned int unit = !finite ? 0x7fc00000u : most != 0 && most < 0x00800000u ? 0x00800000u : most;
    const float inverse = most == 0 ? 0.0f : __uint_as_float(__float_as_uint(1.0f / __uint_as_float(unit)) + 2u);
    const unsigned int bits = __float_as_uint(number * inverse), size = bits & 0x7fffffffu;
    const unsigned int up = SIGNED ? 1u << 19 : (bits ^ unit) * 0x9e3779b1u >> 12;
    const int top = SIGNED ? 0x7f : 0xff, least = !SIGNED && number > 0 ? 1 : 0, near = (int)(size + up >> 20) - (0x3f8 - top);
    const int code = near < least ? least : near > top ? top : near;
    unsigned char* record = records + element / BLOCK * RECORD;
    in_global_memory(record);
    record[sizeof(float) + element % BLOCK] = (unsigned char)(!finite ? 0 : SIGNED ? code | bits >> 24 & 0x80u : code);
    if (element % BLOCK == 0) *reinterpret_cast<unsigned int*>(record) = unit;
}

