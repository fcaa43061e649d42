// Linear layers on quantized weights, on a CUDA device: products of few rows with 4 bit weights in groups of inputs,
// dequantizing such weights, quantizing rows of activations, and applying scales to the sums of a product.
// Plain C functions for `common/kernels/cuda_quantized.py`, callable from any thread. Each returns 0, or a message in
// `kvq_error` and -1 for arguments that no kernel takes, else CUDA's error. Every pointer is to contiguous memory of that
// device, aligned to 16 bytes.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>

namespace {

using Fp16 = __half;
using Bf16 = __nv_bfloat16;

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kTileOutputs = 16;     // outputs of a matrix unit's tile
constexpr int kChunk = 128;          // inputs that a warp takes at a time, 32 for each of four lanes
constexpr int kTileRows = 8;         // rows of activations of a matrix unit's tile
constexpr int kValuesPerThread = 8;  // activations that a thread of `quantize_rows` loads at a time
constexpr int kSumsPerThread = 4;    // sums that a thread of `scale_sums` takes at a time

thread_local char message[256];

int failed(const char* why, int code = -1) {
    snprintf(message, sizeof message, "%s", why);
    return code;
}

int launched() {
    const cudaError_t code = cudaGetLastError();
    return code == cudaSuccess ? 0 : failed(cudaGetErrorString(code), code);
}

__device__ float widened(float x) { return x; }
__device__ float widened(Fp16 x) { return __half2float(x); }
__device__ float widened(Bf16 x) { return __bfloat162float(x); }

template <typename T>
__device__ T narrowed(float x);
template <>
__device__ float narrowed<float>(float x) { return x; }
template <>
__device__ Fp16 narrowed<Fp16>(float x) { return __float2half_rn(x); }
template <>
__device__ Bf16 narrowed<Bf16>(float x) { return __float2bfloat16_rn(x); }

// Two numbers in a register. kRaised | code is kOne + code: the code is the lower part of the mantissa.
template <typename T>
struct Two;
template <>
struct Two<Bf16> {
    using Type = __nv_bfloat162;
    static constexpr uint32_t kRaised = 0x43004300;
    static constexpr float kOne = 128.0f;
    static __device__ Type both(float x) { return __float2bfloat162_rn(x); }
};
template <>
struct Two<Fp16> {
    using Type = __half2;
    static constexpr uint32_t kRaised = 0x64006400;
    static constexpr float kOne = 1024.0f;
    static __device__ Type both(float x) { return __float2half2_rn(x); }
};

constexpr float kOffset = 8.0f;  // a weight of 4 bits is (code - kOffset) * scale + shift

// A group's scale and shift, twice each, from the register that holds both.
template <typename T>
struct Factors {
    typename Two<T>::Type scale, shift;

    explicit __device__ Factors(uint32_t both) {
        const uint32_t low = __byte_perm(both, 0, 0x1010), high = __byte_perm(both, 0, 0x3232);
        scale = *reinterpret_cast<const typename Two<T>::Type*>(&low);
        shift = *reinterpret_cast<const typename Two<T>::Type*>(&high);
    }
    // Weights 2 * index and 2 * index + 1 of a word of eight: the even ones' codes are in its lower half.
    __device__ uint32_t weights(uint32_t word, int index) const {
        const uint32_t raised = ((word >> (4 * index)) & 0x000F000F) | Two<T>::kRaised;
        const auto codes = __hadd2(*reinterpret_cast<const typename Two<T>::Type*>(&raised),
                                   Two<T>::both(-Two<T>::kOne - kOffset));
        const auto two = __hfma2(codes, scale, shift);
        return *reinterpret_cast<const uint32_t*>(&two);
    }
};

template <typename T>
__device__ void multiply_tile(float (&sums)[4], const uint32_t (&weights)[4], uint32_t low, uint32_t high);

#define MULTIPLY_TILE(T, name)                                                                              \
    template <>                                                                                             \
    __device__ void multiply_tile<T>(float (&sums)[4], const uint32_t (&weights)[4], uint32_t low, uint32_t high) { \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 "                         \
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                      \
                     : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                           \
                     : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "r"(low), "r"(high)); \
    }
MULTIPLY_TILE(Bf16, "bf16")
MULTIPLY_TILE(Fp16, "f16")
#undef MULTIPLY_TILE

// y = x W^T + bias for up to kTileRows * TILES rows of x. A thread block makes 16 * WIDE outputs, its warps take chunks of
// the inputs in turn. The four lanes that share an output multiply 32 inputs at a time, eight each: the order in which a
// matrix unit sums its inputs is free, as long as weights and activations have the same one. Words of codes lie in the
// order in which lanes take them: [num_out][chunk][lane][32 inputs]. GROUPS: of a chunk, if groups are not larger.
template <typename T, int GROUPS, int TILES, int WIDE>
__global__ void __launch_bounds__(kThreads)
multiply(const T* x, const uint4* codes, const uint32_t* factors, const T* bias, T* y, int rows, int num_in, int num_out,
         int group) {
    constexpr int kOutputs = kTileOutputs * WIDE, kSums = 4 * 32 * WIDE;  // sums of a warp, for one tile of rows
    struct alignas(4 * GROUPS) OfGroups { uint32_t each[GROUPS]; };
    __shared__ float partial[kWarps][kSums];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, place = lane / 4, part = lane % 4;
    const int chunks = num_in / kChunk, per_group = GROUPS == 1 ? group / kChunk : 1;
    int64_t first_chunk[WIDE][2], first_group[WIDE][2];  // of this lane's outputs
    uint4 next[WIDE][2];
    OfGroups next_factors[WIDE][2];
#pragma unroll
    for (int wide = 0; wide < WIDE; ++wide)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int64_t own = min(int(blockIdx.x) * kOutputs + wide * kTileOutputs + place + 8 * i, num_out - 1);
            first_chunk[wide][i] = own * chunks;
            first_group[wide][i] = own * (chunks / per_group);
        }
    const auto load_next = [&](int chunk) {
        const int of_group = per_group == 1 ? chunk : chunk / per_group;
#pragma unroll
        for (int wide = 0; wide < WIDE; ++wide)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                next[wide][i] = __ldcs(codes + (first_chunk[wide][i] + chunk) * 4 + part);
                next_factors[wide][i] = reinterpret_cast<const OfGroups*>(factors)[first_group[wide][i] + of_group];
            }
    };
    float sums[TILES][WIDE][4] = {};
    if (warp < chunks) load_next(warp);
    for (int chunk = warp; chunk < chunks; chunk += kWarps) {
        uint32_t words[WIDE][2][4];
        OfGroups own_factors[WIDE][2];
#pragma unroll
        for (int wide = 0; wide < WIDE; ++wide)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint4 four = next[wide][i];
                words[wide][i][0] = four.x, words[wide][i][1] = four.y;
                words[wide][i][2] = four.z, words[wide][i][3] = four.w;
                own_factors[wide][i] = next_factors[wide][i];
            }
        if (chunk + kWarps < chunks) load_next(chunk + kWarps);
        const T* inputs = x + chunk * kChunk + 8 * part;
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
            uint32_t weights[WIDE][2][4];  // of two steps of a matrix unit
#pragma unroll
            for (int wide = 0; wide < WIDE; ++wide)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const Factors<T> of_group(own_factors[wide][i].each[quarter * GROUPS / 4]);
#pragma unroll
                    for (int index = 0; index < 4; ++index)
                        weights[wide][index / 2][index % 2 * 2 + i] =
                            of_group.weights(words[wide][i][quarter], index);
                }
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const int64_t row = min(tile * kTileRows + place, rows - 1);
                const uint4 some = *reinterpret_cast<const uint4*>(inputs + row * num_in + 32 * quarter);
#pragma unroll
                for (int wide = 0; wide < WIDE; ++wide) {
                    multiply_tile<T>(sums[tile][wide], weights[wide][0], some.x, some.y);
                    multiply_tile<T>(sums[tile][wide], weights[wide][1], some.z, some.w);
                }
            }
        }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        __syncthreads();
#pragma unroll
        for (int wide = 0; wide < WIDE; ++wide)
#pragma unroll
            for (int i = 0; i < 4; ++i) partial[warp][(wide * 4 + i) * 32 + lane] = sums[tile][wide][i];
        __syncthreads();
        for (int index = threadIdx.x; index < kSums; index += kThreads) {
            const int wide = index / 128, i = index / 32 % 4;
            const int row = tile * kTileRows + 2 * part + i % 2;
            const int own = blockIdx.x * kOutputs + wide * kTileOutputs + place + 8 * (i / 2);
            if (row >= rows || own >= num_out) continue;
            float sum = bias ? widened(bias[own]) : 0.0f;
#pragma unroll
            for (int other = 0; other < kWarps; ++other) sum += partial[other][index];
            y[int64_t(row) * num_out + own] = narrowed<T>(sum);
        }
    }
}

// Each thread dequantizes a word of eight codes of 4 bits. In tiles, words are in the order of `multiply`.
template <typename T>
__global__ void __launch_bounds__(kThreads)
dequantize_int4(const uint32_t* words, const T* factors, T* wide, int64_t count, int num_in, int group, bool in_tiles) {
    const int64_t index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (index >= count) return;
    // Of four words that follow in a row, the lanes' are four apart.
    const int64_t stored = in_tiles ? index / 16 * 16 + index % 4 * 4 + index / 4 % 4 : index;
    const uint32_t word = words[stored];
    const int64_t row = index * 8 / num_in, own = row * (num_in / group) + (index * 8 - row * num_in) / group;
    const float scale = widened(factors[2 * own]), shift = widened(factors[2 * own + 1]);
    alignas(16) T values[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        const uint32_t code = word >> (k / 2 * 4 + k % 2 * 16) & 15;
        values[k] = narrowed<T>(fmaf(float(code) - kOffset, scale, shift));
    }
#pragma unroll
    for (int i = 0; i < int(sizeof values / 16); ++i)
        reinterpret_cast<uint4*>(wide + 8 * index)[i] = reinterpret_cast<const uint4*>(values)[i];
}

struct ToInt8 {
    using Code = int8_t;
    static constexpr float kMaxCode = 127.0f, kLeastScale = 1e-20f;
    static __device__ Code code(float x) { return Code(rintf(x)); }
};
struct ToE4m3 {
    using Code = uint8_t;
    static constexpr float kMaxCode = 448.0f, kLeastScale = 1e-12f;
    static __device__ Code code(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
};

// The larger absolute value; NaN if either is, so that a broken row stays one.
__device__ float larger(float most, float x) { return fabsf(x) > most || isnan(x) ? fabsf(x) : most; }

__device__ float largest_of_warp(float x) {
    for (int distance = 16; distance; distance /= 2) x = larger(x, __shfl_xor_sync(~0u, x, distance));
    return x;
}

template <typename To>
__device__ float scale_for(float largest) {
    const float scale = largest / To::kMaxCode;
    return scale < To::kLeastScale ? To::kLeastScale : scale;
}

// A thread block quantizes a row, VECTOR values at a time; rows from `rows` on, and columns from `num_in` on, become zeros.
template <typename T, typename To, int VECTOR>
__global__ void __launch_bounds__(kThreads)
quantize_rows(const T* x, typename To::Code* codes, float* scales, int rows, int num_in, int width) {
    struct alignas(sizeof(T) * VECTOR < 16 ? sizeof(T) * VECTOR : 16) Values { T each[VECTOR]; };
    struct alignas(VECTOR) Quantized { typename To::Code each[VECTOR]; };
    const int64_t row = blockIdx.x;
    const bool is_there = row < rows;
    auto to = reinterpret_cast<Quantized*>(codes + row * width);
    const auto from = reinterpret_cast<const Values*>(x + row * num_in);
    const int vectors = is_there ? num_in / VECTOR : 0;
    float largest = 0.0f;
    for (int index = threadIdx.x; index < vectors; index += kThreads) {
        const Values values = from[index];
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) largest = larger(largest, widened(values.each[k]));
    }
    __shared__ float of_warps[kWarps];
    largest = largest_of_warp(largest);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
    __syncthreads();
    for (int warp = 0; warp < kWarps; ++warp) largest = larger(largest, of_warps[warp]);
    const float scale = scale_for<To>(largest);
    if (threadIdx.x == 0 && is_there) scales[row] = scale;
    for (int index = threadIdx.x; index < width / VECTOR; index += kThreads) {
        Quantized made = {};
        if (index < vectors) {
            const Values values = from[index];
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) made.each[k] = To::code(widened(values.each[k]) / scale);
        }
        to[index] = made;
    }
}

// A warp quantizes a block of 128 values; scales: [num_in / 128, padded_rows].
template <typename T>
__global__ void __launch_bounds__(kThreads)
quantize_blocks(const T* x, uint8_t* codes, float* scales, int rows, int padded_rows, int num_in) {
    const int blocks = num_in / kChunk, lane = threadIdx.x % 32;
    const int64_t index = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
    if (index >= int64_t(padded_rows) * blocks) return;
    const int64_t row = index / blocks, block = index % blocks, first = row * num_in + block * kChunk + 4 * lane;
    float values[4], largest = 0.0f;
    for (int k = 0; k < 4; ++k) {
        values[k] = row < rows ? widened(x[first + k]) : 0.0f;
        largest = larger(largest, values[k]);
    }
    const float scale = scale_for<ToE4m3>(largest_of_warp(largest));
    if (lane == 0) scales[block * padded_rows + row] = scale;
    uint32_t word = 0;
    for (int k = 0; k < 4; ++k) word |= uint32_t(ToE4m3::code(values[k] / scale)) << (8 * k);
    *reinterpret_cast<uint32_t*>(codes + first) = word;
}

// y = sums * row_scale * column_scale + bias; sums: [>= rows, width]. A thread takes VECTOR columns of a row.
template <typename Sum, typename T, int VECTOR>
__global__ void __launch_bounds__(kThreads)
scale_sums(const Sum* sums, const float* row_scales, const float* column_scales, const float* bias, T* y,
           int width, int num_out) {
    struct alignas(sizeof(Sum) * VECTOR) Sums { Sum each[VECTOR]; };
    struct alignas(sizeof(T) * VECTOR) Results { T each[VECTOR]; };
    const int64_t row = blockIdx.x;
    const int column = (blockIdx.y * kThreads + threadIdx.x) * VECTOR;
    if (column >= num_out) return;
    const Sums some = *reinterpret_cast<const Sums*>(sums + row * width + column);
    const float row_scale = row_scales[row];
    Results results;
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) {
        float value = float(some.each[k]) * row_scale * column_scales[column + k];
        if (bias) value += bias[column + k];
        results.each[k] = narrowed<T>(value);
    }
    *reinterpret_cast<Results*>(y + row * num_out + column) = results;
}

template <typename T, int GROUPS>
int multiply_rows(cudaStream_t stream, const void* x, const void* codes, const void* factors, const void* bias, void* y,
                  int rows, int num_in, int num_out, int group) {
    // Many rows: more outputs of a thread block, so that fewer of them read the activations.
#define LAUNCH(TILES, WIDE)                                                                                     \
    multiply<T, GROUPS, TILES, WIDE>                                                                            \
        <<<(num_out + kTileOutputs * WIDE - 1) / (kTileOutputs * WIDE), kThreads, 0, stream>>>(                 \
            static_cast<const T*>(x), static_cast<const uint4*>(codes), static_cast<const uint32_t*>(factors),  \
            static_cast<const T*>(bias), static_cast<T*>(y), rows, num_in, num_out, group)
    if (rows <= kTileRows) LAUNCH(1, 1);
    else if (rows <= 2 * kTileRows) LAUNCH(2, 1);
    else if (rows <= 4 * kTileRows) LAUNCH(4, 2);
    else LAUNCH(8, 2);
#undef LAUNCH
    return launched();
}

template <typename T>
int multiply_groups(cudaStream_t stream, const void* x, const void* codes, const void* factors, const void* bias, void* y,
                    int rows, int num_in, int num_out, int group) {
#define MULTIPLY(GROUPS) \
    multiply_rows<T, GROUPS>(stream, x, codes, factors, bias, y, rows, num_in, num_out, group)
    return group == kChunk / 4 ? MULTIPLY(4) : group == kChunk / 2 ? MULTIPLY(2) : MULTIPLY(1);
#undef MULTIPLY
}

template <typename T>
int dequantize_all(cudaStream_t stream, const void* codes, const void* factors, void* wide, int num_out, int num_in,
              int group, bool in_tiles) {
    const int64_t count = int64_t(num_out) * num_in / 8;
    dequantize_int4<T><<<unsigned((count + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
        static_cast<const uint32_t*>(codes), static_cast<const T*>(factors), static_cast<T*>(wide), count, num_in,
        group, in_tiles);
    return launched();
}

template <typename T>
int quantize(cudaStream_t stream, const void* x, void* codes, bool to_int8, float* scales, int rows, int padded_rows,
             int num_in, int width, bool in_blocks) {
    const T* from = static_cast<const T*>(x);
    if (in_blocks) {
        const int64_t warps = int64_t(padded_rows) * (num_in / kChunk);
        quantize_blocks<T><<<unsigned((warps + kWarps - 1) / kWarps), kThreads, 0, stream>>>(
            from, static_cast<uint8_t*>(codes), scales, rows, padded_rows, num_in);
    } else {
        const bool aligned = num_in % kValuesPerThread == 0 && width % kValuesPerThread == 0;
#define QUANTIZE_ROWS(To, VECTOR)                                                                               \
    quantize_rows<T, To, VECTOR><<<padded_rows, kThreads, 0, stream>>>(from, static_cast<To::Code*>(codes), scales, \
                                                                       rows, num_in, width)
        if (to_int8 && aligned) QUANTIZE_ROWS(ToInt8, kValuesPerThread);
        else if (to_int8) QUANTIZE_ROWS(ToInt8, 1);
        else if (aligned) QUANTIZE_ROWS(ToE4m3, kValuesPerThread);
        else QUANTIZE_ROWS(ToE4m3, 1);
#undef QUANTIZE_ROWS
    }
    return launched();
}

template <typename Sum, typename T>
int scale(cudaStream_t stream, const void* sums, const float* row_scales, const float* column_scales, const float* bias,
          void* y, int rows, int width, int num_out) {
    const auto from = static_cast<const Sum*>(sums);
    const auto to = static_cast<T*>(y);
    if (width % kSumsPerThread == 0 && num_out % kSumsPerThread == 0) {
        const dim3 grid(rows, (num_out + kThreads * kSumsPerThread - 1) / (kThreads * kSumsPerThread));
        scale_sums<Sum, T, kSumsPerThread><<<grid, kThreads, 0, stream>>>(from, row_scales, column_scales, bias, to, width, num_out);
    } else {
        const dim3 grid(rows, (num_out + kThreads - 1) / kThreads);
        scale_sums<Sum, T, 1><<<grid, kThreads, 0, stream>>>(from, row_scales, column_scales, bias, to, width, num_out);
    }
    return launched();
}

// Types of activations, by the numbers that cuda_quantized.py gives them.
enum Type { kBf16, kFp16, kFp32 };

}  // namespace

extern "C" {

// Why the last call of this thread failed.
const char* kvq_error() { return message; }

// y[rows, num_out] = x[rows, num_in] W^T + bias, with W = (code - 8) * scale + shift. Codes are words of eight, those of
// even inputs in the lower half, for each output in the order [num_in / 128][4][4] of the inputs [num_in / 128][4 (2)]
// [4 (1)][8]: as `multiply` takes them; factors: [num_out, num_in / group, 2], scale and shift, of the type of x.
// rows <= 64; num_in a multiple of 128, group 32, 64 or a multiple of 128.
int kvq_multiply(int device, void* stream, int type, const void* x, const void* codes, const void* factors,
                 const void* bias, void* y, int rows, int num_in, int num_out, int group) {
    if (rows == 0) return 0;
    if (rows < 0 || rows > 8 * kTileRows || num_in % kChunk || num_in % group ||
        (group % kChunk && group != kChunk / 2 && group != kChunk / 4))
        return failed("no kernel multiplies matrices of this shape");
    if (cudaSetDevice(device) != cudaSuccess) return launched();
    const auto on_stream = static_cast<cudaStream_t>(stream);
    if (type == kBf16)
        return multiply_groups<Bf16>(on_stream, x, codes, factors, bias, y, rows, num_in, num_out, group);
    if (type == kFp16) return multiply_groups<Fp16>(on_stream, x, codes, factors, bias, y, rows, num_in, num_out, group);
    return failed("products are of 16 bit activations");
}

// wide[num_out, num_in] = (code - 8) * scale + shift, as in kvq_multiply, or, not in tiles, of words in the inputs' order.
// num_in and group: multiples of 8.
int kvq_dequantize(int device, void* stream, int type, const void* codes, const void* factors, void* wide, int num_out,
              int num_in, int group, int in_tiles) {
    if (num_in % 8 || group % 8 || num_in % group || (in_tiles && num_in % kChunk))
        return failed("weights are dequantized in groups of a multiple of 8");
    if (cudaSetDevice(device) != cudaSuccess) return launched();
    const auto on_stream = static_cast<cudaStream_t>(stream);
#define DEQUANTIZE(T) dequantize_all<T>(on_stream, codes, factors, wide, num_out, num_in, group, in_tiles)
    return type == kBf16 ? DEQUANTIZE(Bf16) : type == kFp16 ? DEQUANTIZE(Fp16) : DEQUANTIZE(float);
#undef DEQUANTIZE
}

// codes[padded_rows, width] of x[rows, num_in], int8 or e4m3, zeros elsewhere. A row's scale is its largest absolute value
// over 127 or 448; scales: [rows]. In blocks (e4m3 alone, width = num_in, a multiple of 128) each 128 values have one;
// scales: [num_in / 128, padded_rows].
int kvq_quantize(int device, void* stream, int type, const void* x, void* codes, int to_int8, float* scales, int rows,
                 int padded_rows, int num_in, int width, int in_blocks) {
    if (padded_rows == 0) return 0;
    if (in_blocks && (to_int8 || num_in % kChunk || width != num_in)) return failed("blocks are of 128 e4m3 values");
    if (cudaSetDevice(device) != cudaSuccess) return launched();
    const auto on_stream = static_cast<cudaStream_t>(stream);
#define QUANTIZE(T) quantize<T>(on_stream, x, codes, to_int8, scales, rows, padded_rows, num_in, width, in_blocks)
    return type == kBf16 ? QUANTIZE(Bf16) : type == kFp16 ? QUANTIZE(Fp16) : QUANTIZE(float);
#undef QUANTIZE
}

// y[rows, num_out] = sums[row, column] * row_scales[row] * column_scales[column] + bias[column]; sums: [>= rows, width],
// int32 or float32; bias: float32.
int kvq_scale(int device, void* stream, int type, const void* sums, int are_int32, const float* row_scales,
              const float* column_scales, const float* bias, void* y, int rows, int width, int num_out) {
    if (rows == 0) return 0;
    if (cudaSetDevice(device) != cudaSuccess) return launched();
    const auto on_stream = static_cast<cudaStream_t>(stream);
#define SCALE(T)                                                                                             \
    (are_int32 ? scale<int32_t, T>(on_stream, sums, row_scales, column_scales, bias, y, rows, width, num_out) \
               : scale<float, T>(on_stream, sums, row_scales, column_scales, bias, y, rows, width, num_out))
    return type == kBf16 ? SCALE(Bf16) : type == kFp16 ? SCALE(Fp16) : SCALE(float);
#undef SCALE
}
}
