// Linear layers on quantized weights, on a CUDA device: products of few rows with weights in groups of inputs, widening
// such weights, quantizing rows of activations, and applying scales to the sums of a product.
// Plain C functions for `common/kernels/cuda_quantized.py`, callable from any thread. Each returns 0, or -1 with a
// message in `kvq_error`. Every pointer is to contiguous memory of that device, aligned to 16 bytes.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>

namespace {

using Half = __half;
using Brain = __nv_bfloat16;

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kTileOutputs = 16;  // outputs of a matrix unit's tile
constexpr int kChunk = 128;   // inputs that a warp takes at a time, 32 for each of four lanes
constexpr int kTileRows = 8;  // rows of activations of a matrix unit's tile
constexpr int kVector = 8;    // activations that a thread of `quantize_rows` loads at a time
constexpr int kScaled = 4;    // sums that a thread of `scale_sums` takes at a time

thread_local char message[256];

int failed(const char* why) {
    snprintf(message, sizeof message, "%s", why);
    return -1;
}

int launched() {
    const cudaError_t code = cudaGetLastError();
    return code == cudaSuccess ? 0 : failed(cudaGetErrorString(code));
}

__device__ float widened(float x) { return x; }
__device__ float widened(Half x) { return __half2float(x); }
__device__ float widened(Brain x) { return __bfloat162float(x); }

template <typename T>
__device__ T narrowed(float x);
template <>
__device__ float narrowed<float>(float x) { return x; }
template <>
__device__ Half narrowed<Half>(float x) { return __float2half_rn(x); }
template <>
__device__ Brain narrowed<Brain>(float x) { return __float2bfloat16_rn(x); }

template <typename T>
__device__ uint32_t pair(float low, float high);
template <>
__device__ uint32_t pair<Half>(float low, float high) {
    const __half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
}
template <>
__device__ uint32_t pair<Brain>(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
}

// kOne + code as a float, made of bits: the code is the upper part of the mantissa.
template <int BITS>
struct Codes {
    static constexpr uint32_t kOneBits = BITS == 4 ? 0x43000000u : 0x43800000u;
    static constexpr float kOne = BITS == 4 ? 128.0f : 256.0f;
    static constexpr int kShift = BITS == 4 ? 16 : 15;
    // Code `index` of those in `words`, the first in the lowest bits. `index` is known when this is compiled.
    static __device__ float raised(const uint32_t* words, int index) {
        constexpr int kPerWord = 32 / BITS;
        const uint32_t word = words[index / kPerWord];
        const int from = index % kPerWord * BITS;
        const uint32_t moved = from < kShift ? word << (kShift - from) : word >> (from - kShift);
        return __uint_as_float(kOneBits | (moved & (((1u << BITS) - 1) << kShift)));
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
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
MULTIPLY_TILE(Brain, "bf16")
MULTIPLY_TILE(Half, "f16")
#else
template <>
__device__ void multiply_tile<Brain>(float (&)[4], const uint32_t (&)[4], uint32_t, uint32_t) {}
template <>
__device__ void multiply_tile<Half>(float (&)[4], const uint32_t (&)[4], uint32_t, uint32_t) {}
#endif

// What a lane needs of a chunk for one of its outputs: weight = (kOne + code) * scale + shift.
template <int BITS>
struct Part {
    uint32_t words[BITS];
    float scale, shift;

    __device__ void load(const uint8_t* codes, const float* scales, const float* zeros, int column, int group) {
#pragma unroll
        for (int i = 0; i < BITS / 4; ++i) {
            const uint4 four = __ldcs(reinterpret_cast<const uint4*>(codes + column * BITS / 8) + i);
            words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
        }
        scale = scales[column / group];
        shift = zeros[column / group];
    }
    __device__ void finish() { shift = -(Codes<BITS>::kOne + shift) * scale; }
    __device__ float weight(int index) const { return fmaf(Codes<BITS>::raised(words, index), scale, shift); }
};

// y = x W^T + bias for up to kTileRows * TILES rows of x. A thread block makes 16 * WIDE outputs, its warps take chunks of
// the inputs in turn. In a chunk the four lanes that share an output have 32 consecutive inputs each: the order in which
// a matrix unit sums its inputs is free, as long as weights and activations have the same one.
template <typename T, int BITS, int TILES, int WIDE>
__global__ void __launch_bounds__(kThreads)
multiply(const T* x, const uint8_t* codes, const float* scales, const float* zeros, const T* bias, T* y, int rows,
         int num_in, int num_out, int group) {
    constexpr int kOutputs = kTileOutputs * WIDE, kSums = 4 * 32 * WIDE;  // sums of a warp, for one tile of rows
    __shared__ float partial[kWarps][kSums];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, place = lane / 4, part = lane % 4;
    const int chunks = num_in / kChunk, groups = num_in / group;
    Part<BITS> now[WIDE][2], next[WIDE][2];
    const auto load_next = [&](int chunk) {
#pragma unroll
        for (int wide = 0; wide < WIDE; ++wide)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int64_t own = min(int(blockIdx.x) * kOutputs + wide * kTileOutputs + place + 8 * i, num_out - 1);
                next[wide][i].load(codes + own * num_in * BITS / 8, scales + own * groups, zeros + own * groups,
                                   chunk * kChunk + 32 * part, group);
            }
    };
    float sums[TILES][WIDE][4] = {};
    if (warp < chunks) load_next(warp);
    for (int chunk = warp; chunk < chunks; chunk += kWarps) {
#pragma unroll
        for (int wide = 0; wide < WIDE; ++wide)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                now[wide][i] = next[wide][i];
                now[wide][i].finish();
            }
        if (chunk + kWarps < chunks) load_next(chunk + kWarps);
        const T* inputs = x + chunk * kChunk + 32 * part;
#pragma unroll
        for (int eight = 0; eight < 4; ++eight) {
            uint32_t weights[WIDE][2][4];  // of two steps of four inputs
#pragma unroll
            for (int wide = 0; wide < WIDE; ++wide)
#pragma unroll
                for (int step = 0; step < 2; ++step)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const Part<BITS>& own = now[wide][i];
                        const int first = 8 * eight + 4 * step;
                        weights[wide][step][i] = pair<T>(own.weight(first), own.weight(first + 1));
                        weights[wide][step][2 + i] = pair<T>(own.weight(first + 2), own.weight(first + 3));
                    }
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const int64_t row = min(tile * kTileRows + place, rows - 1);
                const uint4 some = *reinterpret_cast<const uint4*>(inputs + row * num_in + 8 * eight);
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

// Each thread widens 8 codes.
template <typename T, int BITS>
__global__ void __launch_bounds__(kThreads)
widen(const uint8_t* codes, const float* scales, const float* zeros, T* wide, int64_t eights, int num_in, int group) {
    const int64_t index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (index >= eights) return;
    uint32_t words[BITS / 4];
#pragma unroll
    for (int i = 0; i < BITS / 4; ++i) words[i] = reinterpret_cast<const uint32_t*>(codes)[index * (BITS / 4) + i];
    const int64_t row = index * 8 / num_in, own = row * (num_in / group) + (index * 8 - row * num_in) / group;
    const float scale = scales[own], shift = -(Codes<BITS>::kOne + zeros[own]) * scale;
    alignas(16) T values[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) values[k] = narrowed<T>(fmaf(Codes<BITS>::raised(words, k), scale, shift));
#pragma unroll
    for (int i = 0; i < int(sizeof values / 16); ++i)
        reinterpret_cast<uint4*>(wide + 8 * index)[i] = reinterpret_cast<const uint4*>(values)[i];
}

struct ToInt8 {
    using Code = int8_t;
    static constexpr float kMost = 127.0f, kLeastScale = 1e-20f;
    static __device__ Code code(float x) { return Code(rintf(x)); }
};
struct ToE4m3 {
    using Code = uint8_t;
    static constexpr float kMost = 448.0f, kLeastScale = 1e-12f;
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
    const float scale = largest / To::kMost;
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
scale_sums(const Sum* sums, const float* row_scales, const float* column_scales, const T* bias, T* y, int width,
           int num_out) {
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
        if (bias) value += widened(bias[column + k]);
        results.each[k] = narrowed<T>(value);
    }
    *reinterpret_cast<Results*>(y + row * num_out + column) = results;
}

template <typename T, int BITS>
int multiply_rows(cudaStream_t stream, const void* x, const uint8_t* codes, const float* scales, const float* zeros,
                  const void* bias, void* y, int rows, int num_in, int num_out, int group) {
    // Many rows: more outputs of a thread block, so that fewer of them read the activations.
#define LAUNCH(TILES, WIDE)                                                                                     \
    multiply<T, BITS, TILES, WIDE>                                                                              \
        <<<(num_out + kTileOutputs * WIDE - 1) / (kTileOutputs * WIDE), kThreads, 0, stream>>>(                 \
            static_cast<const T*>(x), codes, scales, zeros, static_cast<const T*>(bias), static_cast<T*>(y), rows, \
            num_in, num_out, group)
    if (rows <= kTileRows) LAUNCH(1, 1);
    else if (rows <= 2 * kTileRows) LAUNCH(2, 1);
    else if (rows <= 4 * kTileRows) LAUNCH(4, 2);
    else LAUNCH(8, 2);
#undef LAUNCH
    return launched();
}

template <typename T>
int widen_all(cudaStream_t stream, const uint8_t* codes, int bits, const float* scales, const float* zeros, void* wide,
              int num_out, int num_in, int group) {
    const int64_t eights = int64_t(num_out) * num_in / 8;
    const unsigned grid = unsigned((eights + kThreads - 1) / kThreads);
    T* to = static_cast<T*>(wide);
    if (bits == 4) widen<T, 4><<<grid, kThreads, 0, stream>>>(codes, scales, zeros, to, eights, num_in, group);
    else widen<T, 8><<<grid, kThreads, 0, stream>>>(codes, scales, zeros, to, eights, num_in, group);
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
        const bool aligned = num_in % kVector == 0 && width % kVector == 0;
#define QUANTIZE_ROWS(To, VECTOR)                                                                               \
    quantize_rows<T, To, VECTOR><<<padded_rows, kThreads, 0, stream>>>(from, static_cast<To::Code*>(codes), scales, \
                                                                       rows, num_in, width)
        if (to_int8 && aligned) QUANTIZE_ROWS(ToInt8, kVector);
        else if (to_int8) QUANTIZE_ROWS(ToInt8, 1);
        else if (aligned) QUANTIZE_ROWS(ToE4m3, kVector);
        else QUANTIZE_ROWS(ToE4m3, 1);
#undef QUANTIZE_ROWS
    }
    return launched();
}

template <typename Sum, typename T>
int scale(cudaStream_t stream, const void* sums, const float* row_scales, const float* column_scales, const void* bias,
          void* y, int rows, int width, int num_out) {
    const auto from = static_cast<const Sum*>(sums);
    const auto added = static_cast<const T*>(bias);
    const auto to = static_cast<T*>(y);
    if (width % kScaled == 0 && num_out % kScaled == 0) {
        const dim3 grid(rows, (num_out + kThreads * kScaled - 1) / (kThreads * kScaled));
        scale_sums<Sum, T, kScaled><<<grid, kThreads, 0, stream>>>(from, row_scales, column_scales, added, to, width, num_out);
    } else {
        const dim3 grid(rows, (num_out + kThreads - 1) / kThreads);
        scale_sums<Sum, T, 1><<<grid, kThreads, 0, stream>>>(from, row_scales, column_scales, added, to, width, num_out);
    }
    return launched();
}

// Types of activations, by the numbers that cuda_quantized.py gives them.
enum Type { kBrain, kHalf, kFloat };

}  // namespace

extern "C" {

// Why the last call of this thread failed.
const char* kvq_error() { return message; }

// y[rows, num_out] = x[rows, num_in] W^T + bias, with W = scale * (code - zero). bits: 4 (two codes in a byte, the first
// in its lower half) or 8; scales, zeros: [num_out, num_in / group]. rows <= 64, num_in a multiple of 128, group of 32.
int kvq_multiply(int device, void* stream, int type, const void* x, const uint8_t* codes, int bits, const float* scales,
                 const float* zeros, const void* bias, void* y, int rows, int num_in, int num_out, int group) {
    if (rows < 1 || rows > 8 * kTileRows || num_in % kChunk || group % 32 || num_in % group)
        return failed("no kernel multiplies matrices of this shape");
    if (cudaSetDevice(device) != cudaSuccess) return launched();
    const auto queue = static_cast<cudaStream_t>(stream);
#define MULTIPLY(T, BITS) \
    multiply_rows<T, BITS>(queue, x, codes, scales, zeros, bias, y, rows, num_in, num_out, group)
    if (type == kBrain) return bits == 4 ? MULTIPLY(Brain, 4) : MULTIPLY(Brain, 8);
    if (type == kHalf) return bits == 4 ? MULTIPLY(Half, 4) : MULTIPLY(Half, 8);
#undef MULTIPLY
    return failed("products are of 16 bit activations");
}

// wide[num_out, num_in] = scale * (code - zero), as in kvq_multiply. num_in and group: multiples of 8.
int kvq_widen(int device, void* stream, int type, const uint8_t* codes, int bits, const float* scales,
              const float* zeros, void* wide, int num_out, int num_in, int group) {
    if (num_in % 8 || group % 8 || num_in % group) return failed("weights are widened in groups of a multiple of 8");
    if (cudaSetDevice(device) != cudaSuccess) return launched();
    const auto queue = static_cast<cudaStream_t>(stream);
    if (type == kBrain) return widen_all<Brain>(queue, codes, bits, scales, zeros, wide, num_out, num_in, group);
    if (type == kHalf) return widen_all<Half>(queue, codes, bits, scales, zeros, wide, num_out, num_in, group);
    return widen_all<float>(queue, codes, bits, scales, zeros, wide, num_out, num_in, group);
}

// codes[padded_rows, width] of x[rows, num_in], int8 or e4m3, zeros elsewhere. A row's scale is its largest absolute value
// over 127 or 448; scales: [rows]. In blocks (e4m3 alone, width = num_in, a multiple of 128) each 128 values have one;
// scales: [num_in / 128, padded_rows].
int kvq_quantize(int device, void* stream, int type, const void* x, void* codes, int to_int8, float* scales, int rows,
                 int padded_rows, int num_in, int width, int in_blocks) {
    if (in_blocks && (to_int8 || num_in % kChunk || width != num_in)) return failed("blocks are of 128 e4m3 values");
    if (cudaSetDevice(device) != cudaSuccess) return launched();
    const auto queue = static_cast<cudaStream_t>(stream);
#define QUANTIZE(T) quantize<T>(queue, x, codes, to_int8, scales, rows, padded_rows, num_in, width, in_blocks)
    return type == kBrain ? QUANTIZE(Brain) : type == kHalf ? QUANTIZE(Half) : QUANTIZE(float);
#undef QUANTIZE
}

// y[rows, num_out] = sums[row, column] * row_scales[row] * column_scales[column] + bias[column]; sums: [>= rows, width],
// int32 or float32.
int kvq_scale(int device, void* stream, int type, const void* sums, int are_int32, const float* row_scales,
              const float* column_scales, const void* bias, void* y, int rows, int width, int num_out) {
    if (cudaSetDevice(device) != cudaSuccess) return launched();
    const auto queue = static_cast<cudaStream_t>(stream);
#define SCALE(T)                                                                                             \
    (are_int32 ? scale<int32_t, T>(queue, sums, row_scales, column_scales, bias, y, rows, width, num_out) \
               : scale<float, T>(queue, sums, row_scales, column_scales, bias, y, rows, width, num_out))
    return type == kBrain ? SCALE(Brain) : type == kHalf ? SCALE(Half) : SCALE(float);
#undef SCALE
}
}
