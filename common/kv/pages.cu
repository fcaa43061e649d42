// KV blocks on a CUDA device: copies of many runs of equal size, and memory that another process of this host can map.
// Plain C functions for `common/kv/cuda_pages.py`, callable from any thread. Each returns 0, or -1 with a message in
// `kv_error`.

#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;

thread_local char message[256];

int failed(const char* what, const char* why) {
    snprintf(message, sizeof message, "%s: %s", what, why);
    return -1;
}

int check(const char* what, cudaError_t code) {
    return code == cudaSuccess ? 0 : failed(what, cudaGetErrorString(code));
}

// Source or destination of a copy. Run (plane, block) begins at base + plane * plane_bytes + ids[block] * block_bytes;
// without ids, at base + plane * plane_bytes + block * block_bytes.
struct Side {
    char* base;
    int64_t plane_bytes;
    int64_t block_bytes;
    const int64_t* ids;
};

template <typename Word>
__device__ Word* run_of(const Side& side, int64_t plane, int64_t block) {
    int64_t id = side.ids ? side.ids[block] : block;
    return reinterpret_cast<Word*>(side.base + plane * side.plane_bytes + id * side.block_bytes);
}

// A thread block copies one tile of a run at a time, with kUnroll loads of each thread in flight.
template <typename Word>
__global__ void __launch_bounds__(kThreads) copy_runs(Side dst, Side src, int64_t planes, int64_t blocks, int64_t words) {
    constexpr int kTile = kThreads * kUnroll;
    const int64_t tiles = (words + kTile - 1) / kTile;
    for (int64_t tile = blockIdx.x; tile < planes * blocks * tiles; tile += gridDim.x) {
        const int64_t run = tile / tiles;
        const int64_t first = tile % tiles * kTile + threadIdx.x;
        const Word* from = run_of<Word>(src, run / blocks, run % blocks);
        Word* to = run_of<Word>(dst, run / blocks, run % blocks);
        Word held[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i)
            if (first + i * kThreads < words) held[i] = from[first + i * kThreads];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i)
            if (first + i * kThreads < words) to[first + i * kThreads] = held[i];
    }
}

template <typename Word>
int launch(const Side& dst, const Side& src, int64_t planes, int64_t blocks, int64_t run_bytes, int grid, cudaStream_t stream) {
    constexpr int64_t kTileBytes = int64_t(kThreads) * kUnroll * sizeof(Word);
    const int64_t tiles = planes * blocks * ((run_bytes + kTileBytes - 1) / kTileBytes);
    copy_runs<Word><<<unsigned(tiles < grid ? tiles : grid), kThreads, 0, stream>>>(
        dst, src, planes, blocks, run_bytes / int64_t(sizeof(Word)));
    return check("copying KV", cudaGetLastError());
}

// The driver's functions are looked up when first used, so that this library loads on machines without a driver.
template <typename Function>
Function driver(const char* name) {
    static void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    return library ? reinterpret_cast<Function>(dlsym(library, name)) : nullptr;
}

#define DRIVER(name, ...)                                                          \
    do {                                                                           \
        static auto function = driver<decltype(&name)>(#name);                     \
        if (!function) return failed(#name, "the CUDA driver does not have it");   \
        CUresult result = function(__VA_ARGS__);                                   \
        if (result != CUDA_SUCCESS) return failed(#name, driver_text(result));     \
    } while (0)

const char* driver_text(CUresult result) {
    static auto name_of = driver<decltype(&cuGetErrorName)>("cuGetErrorName");
    const char* text = nullptr;
    if (name_of) name_of(result, &text);
    return text ? text : "unknown error";
}

CUmemAllocationProp shareable(int device) {
    CUmemAllocationProp wanted = {};
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.location.id = device;
    wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return wanted;
}

int granularity(int device, size_t* bytes) {
    CUmemAllocationProp wanted = shareable(device);
    DRIVER(cuMemGetAllocationGranularity, bytes, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    return 0;
}

int map_reserved(int device, CUdeviceptr address, size_t bytes, CUmemGenericAllocationHandle handle) {
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    DRIVER(cuMemMap, address, bytes, 0, handle, 0);
    DRIVER(cuMemSetAccess, address, bytes, &access, 1);
    return 0;
}

// Maps `bytes` of `handle` for `device`. The mapping then keeps the memory alive; the handle is always released.
int map(int device, size_t bytes, CUmemGenericAllocationHandle handle, void** address) {
    CUdeviceptr place = 0;
    static auto reserve = driver<decltype(&cuMemAddressReserve)>("cuMemAddressReserve");
    static auto unreserve = driver<decltype(&cuMemAddressFree)>("cuMemAddressFree");
    static auto unmap = driver<decltype(&cuMemUnmap)>("cuMemUnmap");
    static auto release = driver<decltype(&cuMemRelease)>("cuMemRelease");
    if (!reserve || !unreserve || !unmap || !release) return failed("mapping memory", "the CUDA driver cannot");
    CUresult reserved = reserve(&place, bytes, 0, 0, 0);
    int code = reserved == CUDA_SUCCESS ? map_reserved(device, place, bytes, handle)
                                        : failed("cuMemAddressReserve", driver_text(reserved));
    release(handle);
    if (code != 0 && place != 0) {
        unmap(place, bytes);
        unreserve(place, bytes);
    }
    *address = reinterpret_cast<void*>(place);
    return code;
}

int export_handle(CUmemGenericAllocationHandle handle, int* fd) {
    DRIVER(cuMemExportToShareableHandle, fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    return 0;
}

}  // namespace

extern "C" {

// Why the last call of this thread failed.
const char* kv_error() { return message; }

// Copies planes * blocks runs of run_bytes. `grid` bounds the thread blocks, so that other kernels can run beside it.
int kv_copy_runs(int device, void* stream, char* dst, int64_t dst_plane, int64_t dst_block, const int64_t* dst_ids,
                 char* src, int64_t src_plane, int64_t src_block, const int64_t* src_ids, int64_t planes,
                 int64_t blocks, int64_t run_bytes, int grid) {
    if (planes <= 0 || blocks <= 0 || run_bytes <= 0 || grid <= 0) return failed("copying KV", "nothing to copy");
    if (check("choosing a GPU", cudaSetDevice(device))) return -1;
    const Side to = {dst, dst_plane, dst_block, dst_ids}, from = {src, src_plane, src_block, src_ids};
    const int64_t all = reinterpret_cast<int64_t>(dst) | reinterpret_cast<int64_t>(src) | dst_plane | dst_block |
                        src_plane | src_block | run_bytes;
    const auto queue = static_cast<cudaStream_t>(stream);
    if (all % 16 == 0) return launch<int4>(to, from, planes, blocks, run_bytes, grid, queue);
    if (all % 4 == 0) return launch<int>(to, from, planes, blocks, run_bytes, grid, queue);
    return launch<char>(to, from, planes, blocks, run_bytes, grid, queue);
}

// Allocates at least `bytes` on `device`. Sets its address, its true size, and a file descriptor for other processes.
int kv_allocate(int device, size_t bytes, void** address, size_t* mapped, int* fd) {
    if (check("choosing a GPU", cudaSetDevice(device)) || check("choosing a GPU", cudaFree(nullptr))) return -1;
    size_t unit = 0;
    if (granularity(device, &unit)) return -1;
    *mapped = (bytes + unit - 1) / unit * unit;
    CUmemAllocationProp wanted = shareable(device);
    CUmemGenericAllocationHandle handle = 0;
    DRIVER(cuMemCreate, &handle, *mapped, &wanted, 0);
    int code = export_handle(handle, fd);
    if (code != 0) {
        static auto release = driver<decltype(&cuMemRelease)>("cuMemRelease");
        release(handle);
        return code;
    }
    code = map(device, *mapped, handle, address);
    if (code != 0) close(*fd);
    return code;
}

// Maps memory that another process allocated, so that `device` can read it. `bytes` is the size requested there. `fd`
// stays open.
int kv_open(int device, int fd, size_t bytes, void** address, size_t* mapped) {
    if (check("choosing a GPU", cudaSetDevice(device)) || check("choosing a GPU", cudaFree(nullptr))) return -1;
    size_t unit = 0;
    if (granularity(device, &unit)) return -1;
    *mapped = (bytes + unit - 1) / unit * unit;
    CUmemGenericAllocationHandle handle = 0;
    DRIVER(cuMemImportFromShareableHandle, &handle, reinterpret_cast<void*>(static_cast<uintptr_t>(fd)),
           CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    return map(device, *mapped, handle, address);
}

// Ends a mapping. The memory is freed when no process has a mapping or a file descriptor of it any more.
int kv_unmap(void* address, size_t mapped) {
    DRIVER(cuMemUnmap, reinterpret_cast<CUdeviceptr>(address), mapped);
    DRIVER(cuMemAddressFree, reinterpret_cast<CUdeviceptr>(address), mapped);
    return 0;
}
}
