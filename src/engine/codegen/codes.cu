// Small floats in blocks, each with one f32 as its unit. A record is the unit, then a code for each element. All of it as in `codes.rs`.
//
// A warp has a record: each of its threads has LANES neighbours, whose codes are one access, and the largest number is found among registers. Through shared memory, with a thread for each element, a step took 2.5 times as long on an H200.
template <int N> struct Codes { float unit; Lanes<unsigned char, N> at; };

template <int N> static __device__ __forceinline__ Codes<N> load_codes(const unsigned char* records, u64 element) {
    const unsigned char* record = records + element / BLOCK * RECORD;
    in_global_memory(record);
    Codes<N> codes;
    codes.unit = *reinterpret_cast<const float*>(record);
    codes.at = load<N>(record + sizeof(float), element % BLOCK);
    return codes;
}
template <bool SIGNED> static __device__ __forceinline__ real decode(unsigned int code, float unit) {
    const unsigned int sizes = SIGNED ? 0x7f : 0xff, size = code & sizes, special = 0x7f800000u | (sizes - size) << 22;
    const unsigned int bits = size >= sizes - 1 ? special : (size | 0x3f8 & ~sizes) << 20;
    const float number = __uint_as_float(bits | (code & ~sizes) << 24) * unit;
    return size == 0 ? 0 : number;
}

// The code of a finite number.
template <bool SIGNED> static __device__ __forceinline__ unsigned int code_of(float number, float inverse) {
    const unsigned int bits = __float_as_uint(number * inverse), size = bits & 0x7fffffffu;
    const unsigned int near = size + (size * 0x9e3779b1u >> 12);
    const unsigned int least = SIGNED ? 0x38000000u : 0x30100000u, most = 0x3f8fffffu;
    const unsigned int code = (near < least ? least : near > most ? most : near) >> 20;
    return SIGNED ? code & 0x7fu | bits >> 24 & 0x80u : number == 0 ? 0 : code;
}

// The code of infinity or NaN.
template <bool SIGNED> static __device__ __forceinline__ unsigned int special_code_of(unsigned int bits) {
    const unsigned int infinite = SIGNED ? 0x7fu | bits >> 24 & 0x80u : 0xffu;
    return (bits & 0x7fffffffu) == 0x7f800000u ? infinite : SIGNED ? 0x7eu : 0xfeu;
}

// Stores the first `count` numbers. All threads of a warp call it together.
template <bool SIGNED> static __device__ __forceinline__ void encode(unsigned char* records, u64 element, unsigned int count, const real* numbers) {
    unsigned int bits[LANES], largest = 0;
#pragma unroll
    for (unsigned int j = 0; j < LANES; ++j) {
        bits[j] = j < count ? __float_as_uint((float)numbers[j]) : 0;
        const unsigned int size = bits[j] & 0x7fffffffu;
        largest = size > largest ? size : largest;
    }
    largest = warp_largest(largest);
    // Rare, and the same for the whole warp: the unit is that of the finite numbers.
    const bool all_finite = largest < 0x7f800000u;
    if (!all_finite) {
        largest = 0;
#pragma unroll
        for (unsigned int j = 0; j < LANES; ++j) {
            const unsigned int size = bits[j] & 0x7fffffffu, counted = size < 0x7f800000u ? size : 1u;
            largest = counted > largest ? counted : largest;
        }
        largest = warp_largest(largest);
    }
    const unsigned int unit = largest != 0 && largest < 0x00800000u ? 0x00800000u : largest;
    const float inverse = largest == 0 ? 0.0f : __uint_as_float(__float_as_uint(1.0f / __uint_as_float(unit)) + 2u);
    Lanes<unsigned char, LANES> codes;
#pragma unroll
    for (unsigned int j = 0; j < LANES; ++j) {
        const bool is_finite = all_finite || (bits[j] & 0x7fffffffu) < 0x7f800000u;
        codes.at[j] = (unsigned char)(is_finite ? code_of<SIGNED>(__uint_as_float(bits[j]), inverse) : special_code_of<SIGNED>(bits[j]));
    }
    unsigned char* record = records + element / BLOCK * RECORD;
    in_global_memory(record);
    if (count == LANES) {
        store<LANES>(record + sizeof(float), element % BLOCK, codes);
    } else {
#pragma unroll
        for (unsigned int j = 0; j < LANES; ++j)
            if (j < count) record[sizeof(float) + element % BLOCK + j] = codes.at[j];
    }
    if (count != 0 && element % BLOCK == 0) *reinterpret_cast<unsigned int*>(record) = unit;
}
