// Tiles of matrix units (AMX): eight registers of up to 16 rows by 64 bytes. A variant has them with -DKV_HAS_TILES; with
// -DKV_EMULATES_TILES their operations are this file's own arithmetic, for tests on other processors.
//
// In a product tiles 0 to 3 are sums of two blocks of up to 16 rows by two halves of a panel, tiles 4 and 5 the two blocks' rows,
// tiles 6 and 7 the halves' weights.
#pragma once
#ifdef KV_HAS_TILES
#include <algorithm>
#include <bit>

#include "simd.h"

namespace KV_VARIANT::tiles {

constexpr int ROWS = 16, ROW_BYTES = 64;
constexpr int BLOCKS = 2;  // of rows that are multiplied at once
constexpr int UNITS = 16;  // of 4 bytes in a row: one operation takes as many of each output's weights
enum Kind { BF16, INT8 };  // of products; INT8: unsigned bytes of rows by signed bytes of weights

#ifdef KV_EMULATES_TILES
struct Register {
    int rows;
    union {
        float sums[ROWS][LANES];
        int32_t whole_sums[ROWS][LANES];
        uint32_t units[ROWS][UNITS];
        uint8_t bytes[ROWS][ROW_BYTES];
    };
};
inline thread_local Register registers[8];

// Traps if the tile has no shape, as processors do.
template <int T>
KV_INLINE Register& shaped() {
    if (!registers[T].rows) __builtin_trap();
    return registers[T];
}

KV_INLINE void configure(int rows0, int rows1) {
    const int rows[8] = {rows0, rows0, rows1, rows1, rows0, rows1, ROWS, ROWS};
    for (int t = 0; t < 8; ++t) {
        std::memset(&registers[t], 0, sizeof registers[t]);
        registers[t].rows = rows[t];
    }
}
KV_INLINE void release() { configure(0, 0); }
template <int T>
KV_INLINE void load(const void* from, int64_t stride) {
    for (int m = 0; m < shaped<T>().rows; ++m)
        std::memcpy(shaped<T>().bytes[m], static_cast<const char*>(from) + m * stride, ROW_BYTES);
}
template <int T>
KV_INLINE void store(void* to, int64_t stride) {
    for (int m = 0; m < shaped<T>().rows; ++m)
        std::memcpy(static_cast<char*>(to) + m * stride, shaped<T>().bytes[m], ROW_BYTES);
}
template <int T>
KV_INLINE void clear() {
    std::memset(shaped<T>().bytes, 0, sizeof shaped<T>().bytes);
}
template <Kind KIND, int SUMS, int A, int B>
KV_INLINE void add() {
    const Register &rows = shaped<A>(), &weights = shaped<B>();
    for (int m = 0; m < shaped<SUMS>().rows; ++m)
        for (int n = 0; n < LANES; ++n)
            if (KIND == INT8) {
                for (int i = 0; i < ROW_BYTES; ++i)
                    shaped<SUMS>().whole_sums[m][n] += rows.bytes[m][i] * int8_t(weights.bytes[i / 4][4 * n + i % 4]);
            } else {
                // The processor sums the products of even and of odd inputs apart, each in one rounding, and adds both sums.
                // Source: Intel 64 and IA-32 Architectures Software Developer's Manual, TDPBF16PS.
                const auto wide = [](uint32_t bits) { return std::bit_cast<float>(bits); };
                float even = 0, odd = 0;
                for (int k = 0; k < UNITS; ++k) {
                    const uint32_t a = rows.units[m][k], b = weights.units[k][n];
                    even = std::fma(wide(a << 16), wide(b << 16), even);
                    odd = std::fma(wide(a & 0xffff0000u), wide(b & 0xffff0000u), odd);
                }
                shaped<SUMS>().sums[m][n] += even + odd;
            }
}
#else
struct Configuration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};
KV_INLINE void configure(int rows0, int rows1) {
    Configuration all;
    const int rows[8] = {rows0, rows0, rows1, rows1, rows0, rows1, ROWS, ROWS};
    for (int t = 0; t < 8; ++t) {
        all.rows[t] = uint8_t(rows[t]);
        all.row_bytes[t] = rows[t] ? ROW_BYTES : 0;
    }
    asm volatile("ldtilecfg %0" ::"m"(all));
}
KV_INLINE void release() { asm volatile("tilerelease"); }
// Not the compiler's own functions: gcc 12's do not say which memory they read.
template <int T>
KV_INLINE void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
KV_INLINE void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
template <int T>
KV_INLINE void clear() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <Kind KIND, int SUMS, int A, int B>
KV_INLINE void add() {
    if constexpr (KIND == INT8)
        asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
    else
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
}
#endif

// This thread's tiles while it multiplies. A thread that sleeps must have none, because each switch of threads would save them.
class Shapes {
  public:
    Shapes() = default;
    Shapes(const Shapes&) = delete;
    ~Shapes() {
        if (num_rows_) release();
    }
    // For products of 1 to 32 rows.
    void set(int num_rows) {
        if (num_rows == num_rows_) return;
        num_rows_ = num_rows;
        configure(std::min(num_rows, ROWS), std::max(num_rows - ROWS, 0));
    }

  private:
    int num_rows_ = 0;
};

// Sums += the next `steps` times 64 bytes of each row, which are row_stride bytes apart, times a panel: [16 * steps][32] units.
template <Kind KIND, bool HAS_TWO, class F>
KV_INLINE void add_steps(const char* rows, int64_t row_stride, const char* panel, int steps, F& fetch) {
    constexpr int PANEL_ROW = 2 * ROW_BYTES;
    for (int s = 0; s < steps; ++s, rows += ROW_BYTES, panel += UNITS * PANEL_ROW) {
        fetch();
        load<4>(rows, row_stride);
        load<6>(panel, PANEL_ROW);
        load<7>(panel + ROW_BYTES, PANEL_ROW);
        if constexpr (HAS_TWO) load<5>(rows + ROWS * row_stride, row_stride);
        add<KIND, 0, 4, 6>();
        add<KIND, 1, 4, 7>();
        if constexpr (HAS_TWO) {
            add<KIND, 2, 5, 6>();
            add<KIND, 3, 5, 7>();
        }
    }
}

// Sums to [rows][32] of 4 bytes each, rows out_stride bytes apart.
template <bool HAS_TWO>
KV_INLINE void store_sums(char* out, int64_t out_stride) {
    store<0>(out, out_stride);
    store<1>(out + ROW_BYTES, out_stride);
    if constexpr (HAS_TWO) {
        store<2>(out + ROWS * out_stride, out_stride);
        store<3>(out + ROWS * out_stride + ROW_BYTES, out_stride);
    }
}

template <bool HAS_TWO>
KV_INLINE void clear_sums() {
    clear<0>();
    clear<1>();
    if constexpr (HAS_TWO) {
        clear<2>();
        clear<3>();
    }
}

}  // namespace KV_VARIANT::tiles
#endif
