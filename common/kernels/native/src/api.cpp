// The parts of the C interface that have no variants: the choice of a variant, teams, and checks of batches.
#include "api.h"

#include <cstring>
#include <system_error>

#include "team.h"
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace {

#if defined(__x86_64__)
// Registers that the operating system saves: bits 1, 2 for AVX; 5, 6, 7 for AVX-512; 17, 18 for tiles.
__attribute__((target("xsave"))) uint64_t saved_registers() { return _xgetbv(0); }

// Linux lets a process use tiles after it has asked for them, once; the threads that it starts then may use them too.
bool may_use_tiles() {
#if defined(__linux__)
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    static const bool is_granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
    return is_granted;
#else
    return false;
#endif
}

struct Features {
    bool amx = false, avx2 = false, avx512 = false, avx512bf16 = false, is_intel = false;

    Features() {
        unsigned a, b, c, d;
        is_intel = __get_cpuid(0, &a, &b, &c, &d) && b == signature_INTEL_ebx;
        if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return;
        const bool has_fma = (c & bit_FMA) && (c & bit_F16C);
        const uint64_t saved = saved_registers();
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
        avx2 = has_fma && (b & bit_AVX2) && (saved & 0x6) == 0x6;
        const unsigned tiles = 1u << 22 | 1u << 24 | 1u << 25;  // bfloat16 products, tiles themselves, int8 products
        const bool has_tiles = (d & tiles) == tiles && (saved & 0x60000) == 0x60000;
        const unsigned needed = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
        avx512 = avx2 && (b & needed) == needed && (c & (1u << 11)) && (saved & 0xe6) == 0xe6;  // bit 11: VNNI
        avx512bf16 = avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5));
        amx = avx512bf16 && has_tiles;
    }
};
#endif

struct Entry {
    const char* name;
    bool is_supported;
};

}  // namespace

const char* kv_best_variant(const char* limit) {
#if defined(__x86_64__)
    static const Features has;
    const bool wants_amx = !*limit || !std::strcmp(limit, "amx");
    const bool has_amx = wants_amx && has.amx && may_use_tiles();
    // Intel's cores begin one bfloat16 product of 16 pairs in two cycles, and four multiply-adds of 16 float32 in the same time.
    if (!*limit && has.is_intel && !has_amx) limit = "avx512";
    const Entry entries[] = {
        {"amx_emulated", *limit != 0},  // for tests
        {"amx", has_amx},
        {"avx512bf16", has.avx512bf16},
        {"avx512", has.avx512},
        {"avx2", has.avx2},
        {"portable", true},
    };
#elif defined(__aarch64__) && defined(__linux__)
    // Bit 14: bfloat16 products; bit 20: products of int8, which the variant is compiled with and bfloat16 does not imply.
    const bool has_neonbf16 = (getauxval(AT_HWCAP2) & (1ul << 14)) && (getauxval(AT_HWCAP) & (1ul << 20));
    const Entry entries[] = {{"neonbf16", has_neonbf16}, {"portable", true}};
#else
    const Entry entries[] = {{"portable", true}};
#endif
    bool is_allowed = !*limit;
    for (const Entry& entry : entries) {
        is_allowed |= !std::strcmp(limit, entry.name);
        if (is_allowed && entry.is_supported) return entry.name;
    }
    return nullptr;
}

kv_team* kv_team_new(int32_t threads) {
    auto* team = new kv_team(threads);
    try {
        team->start_threads();
        return team;
    } catch (const std::system_error&) {
        return nullptr;  // the threads that did start use the team's memory
    }
}

int32_t kv_check_batch(const kv_batch* batch, int32_t num_blocks, int32_t block_size) {
    for (int32_t i = 0; i < batch->num_entries; ++i) {
        const int32_t first = batch->first_rows[i], rows = batch->first_rows[i + 1] - first;
        if (rows < 1 || (!batch->row_ends && rows > batch->context_lens[i])) return KV_BATCH_ROWS;
        for (int32_t row = 0, start = 0, end = 0; batch->row_ends && row < rows; ++row) {
            const int32_t next_start = batch->row_starts[first + row], next_end = batch->row_ends[first + row];
            if (next_start < start || next_end < end || next_start > next_end || next_end > batch->context_lens[i])
                return KV_BATCH_ROWS;
            start = next_start, end = next_end;
        }
    }
    for (int32_t i = 0; i < batch->first_blocks[batch->num_entries]; ++i)
        if (batch->block_ids[i] < 0 || batch->block_ids[i] >= num_blocks) return KV_BATCH_BLOCK;
    for (int32_t i = 0; i < batch->num_rows; ++i)
        if (batch->slots[i] < (batch->row_ends ? -1 : 0) || batch->slots[i] >= int64_t(num_blocks) * block_size) return KV_BATCH_SLOT;
    return KV_BATCH_OK;
}
