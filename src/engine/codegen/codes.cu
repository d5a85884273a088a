// Small floats in blocks, each with one f32 as its unit. A record is the unit, then a code for each element. All of it as in `codes.rs`.
template <bool SIGNED> static __device__ __forceinline__ real decode(const unsigned char* records, u64 element) {
    in_global_memory(records);
    const unsigned char* record = records + element / BLOCK * RECORD;
    const float unit = *reinterpret_cast<const float*>(record);
    const unsigned int code = record[sizeof(float) + element % BLOCK], sizes = SIGNED ? 0x7f : 0xff;
    const unsigned int size = code & sizes, special = 0x7f800000u | (sizes - size) << 22;
    const unsigned int bits = size >= sizes - 1 ? special : (size | 0x3f8 & ~sizes) << 20;
    const float number = __uint_as_float(bits | (code & ~sizes) << 24) * unit;
    return size == 0 ? 0 : number;
}

// All threads call it together. Those of a block of codes find its unit.
template <bool SIGNED> static __device__ __forceinline__ void encode(unsigned char* records, u64 element, bool exists, real value) {
    __shared__ unsigned int largest[THREADS / BLOCK];
    const unsigned int own = threadIdx.x / BLOCK;
    const float number = (float)value;
    const unsigned int abs = __float_as_uint(number) & 0x7fffffffu;
    const bool finite = abs < 0x7f800000u;
    if (threadIdx.x % BLOCK == 0) largest[own] = 0;
    __syncthreads();
    if (exists) atomicMax(&largest[own], finite ? abs : 1u);
    __syncthreads();
    const unsigned int most = largest[own];
    __syncthreads();
    if (!exists) return;
    const unsigned int unit = most != 0 && most < 0x00800000u ? 0x00800000u : most;
    const float inverse = most == 0 ? 0.0f : __uint_as_float(__float_as_uint(1.0f / __uint_as_float(unit)) + 2u);
    const unsigned int bits = __float_as_uint(number * inverse), size = bits & 0x7fffffffu;
    const unsigned int near = size + (SIGNED ? 1u << 19 : size * 0x9e3779b1u >> 12);
    const unsigned int least = SIGNED ? 0x38000000u : 0x30100000u, most_near = 0x3f8fffffu;
    const unsigned int code = (near < least ? least : near > most_near ? most_near : near) >> 20;
    const unsigned int stored = SIGNED ? code & 0x7fu | bits >> 24 & 0x80u : number == 0 ? 0 : code;
    const unsigned int infinite = SIGNED ? 0x7fu | __float_as_uint(number) >> 24 & 0x80u : 0xffu;
    const unsigned int special = abs == 0x7f800000u ? infinite : SIGNED ? 0x7eu : 0xfeu;
    unsigned char* record = records + element / BLOCK * RECORD;
    in_global_memory(record);
    record[sizeof(float) + element % BLOCK] = (unsigned char)(finite ? stored : special);
    if (element % BLOCK == 0) *reinterpret_cast<unsigned int*>(record) = unit;
}

