// Copies of KV on the calling thread, without a team.
#include <cstring>

#include "api.h"
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t LINE = 64;

// Whole cache lines go past the caches where the processor can: otherwise each would be read before it is written, and others
// would make room for it.
#if defined(__SSE2__)
void write_lines(char* to, const char* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += LINE)
        for (int64_t i = at; i < at + LINE; i += 16)
            _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
}
void finish_lines() { _mm_sfence(); }
#else
void write_lines(char* to, const char* from, int64_t bytes) { std::memcpy(to, from, bytes); }
void finish_lines() {}
#endif

}  // namespace

void kv_scatter_rows(void* planes, int64_t plane_stride, int32_t num_planes, const int64_t* rows, int32_t num_rows,
                     int64_t row_bytes, const void* packed, int64_t packed_stride) {
    const bool are_lines = (reinterpret_cast<uintptr_t>(planes) | uint64_t(plane_stride) | uint64_t(row_bytes)) % LINE == 0;
    for (int p = 0; p < num_planes; ++p) {
        char* plane = static_cast<char*>(planes) + p * plane_stride;
        const char* from = static_cast<const char*>(packed) + p * packed_stride;
        for (int i = 0; i < num_rows; ++i, from += row_bytes) {
            char* to = plane + rows[i] * row_bytes;
            are_lines ? write_lines(to, from, row_bytes) : void(std::memcpy(to, from, row_bytes));
        }
    }
    if (are_lines) finish_lines();
}
