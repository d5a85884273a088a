// What the bf16s of a block of elements lack: 16 bits of each, and one that is set for half a unit above, which 16 bits have as half a unit below.
struct low_record { short low[BLOCK]; unsigned int above[BLOCK / 32]; };
template <int N> struct Lanes<low_record, N> { int at[N]; unsigned int above; };

template <int N> static __device__ __forceinline__ Lanes<low_record, N> load(const low_record* from, u64 element) {
    in_global_memory(from);
    const low_record* record = from + element / BLOCK;
    const Lanes<short, N> low = *reinterpret_cast<const Lanes<short, N>*>(record->low + element % BLOCK);
    Lanes<low_record, N> lanes;
    lanes.above = record->above[element % BLOCK / 32] >> element % 32 & (1u << N) - 1u;
    for (int j = 0; j < N; ++j) lanes.at[j] = lanes.above >> j & 1u ? 0x8000 : low.at[j];
    return lanes;
}

// Threads share the word of the further bits, so that one changes those of its own elements. That is rare.
template <int N> static __device__ __forceinline__ void store(low_record* to, u64 element, const Lanes<low_record, N>& lanes) {
    in_global_memory(to);
    low_record* record = to + element / BLOCK;
    Lanes<short, N> low;
    unsigned int above = 0;
    for (int j = 0; j < N; ++j) {
        low.at[j] = (short)lanes.at[j];
        above |= (lanes.at[j] == 0x8000 ? 1u : 0u) << j;
    }
    *reinterpret_cast<Lanes<short, N>*>(record->low + element % BLOCK) = low;
    if (above != lanes.above) atomicXor(&record->above[element % BLOCK / 32], (above ^ lanes.above) << element % 32);
}
