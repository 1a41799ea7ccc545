// Shared by all kernels.

#define FULL 0xffffffffu
#define INFINITE __int_as_float(0x7f800000)
#define LOG2E 1.4426950408889634f

__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x << 16); }

__device__ __forceinline__ float low_float(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high_float(u32 x) { return __uint_as_float(x & 0xffff0000u); }

// N consecutive elements; N = 8 needs 16-byte alignment.
__device__ __forceinline__ void load(const bf16* p, float (&v)[1]) { v[0] = to_float(*p); }
__device__ __forceinline__ void load(const bf16* p, float (&v)[8]) {
    uint4 x = *(const uint4*)p;
    v[0] = low_float(x.x), v[1] = high_float(x.x), v[2] = low_float(x.y), v[3] = high_float(x.y);
    v[4] = low_float(x.z), v[5] = high_float(x.z), v[6] = low_float(x.w), v[7] = high_float(x.w);
}
__device__ __forceinline__ void load(const float* p, float (&v)[1]) { v[0] = *p; }
__device__ __forceinline__ void load(const float* p, float (&v)[8]) {
    float4 a = ((const float4*)p)[0], b = ((const float4*)p)[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
__device__ __forceinline__ void store(bf16* p, const float (&v)[1]) { *p = to_bf16(v[0]); }
__device__ __forceinline__ void store(bf16* p, const float (&v)[8]) {
    uint4 x;
    x.x = pack_bf16(v[0], v[1]), x.y = pack_bf16(v[2], v[3]);
    x.z = pack_bf16(v[4], v[5]), x.w = pack_bf16(v[6], v[7]);
    *(uint4*)p = x;
}
__device__ __forceinline__ void store(float* p, const float (&v)[1]) { *p = v[0]; }
__device__ __forceinline__ void store(float* p, const float (&v)[8]) {
    float4 a, b;
    a.x = v[0], a.y = v[1], a.z = v[2], a.w = v[3], b.x = v[4], b.y = v[5], b.z = v[6], b.w = v[7];
    ((float4*)p)[0] = a, ((float4*)p)[1] = b;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(FULL, x, step);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = 16; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(FULL, x, step));
    return x;
}

// Sum over the block in a fixed order, for every thread. `space` holds 33 floats.
__device__ __forceinline__ float block_sum(float x, float* space) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = (blockDim.x + 31) >> 5;
    x = warp_sum(x);
    if (lane == 0) space[warp] = x;
    __syncthreads();
    if (warp == 0) {
        float y = warp_sum(lane < warps ? space[lane] : 0.f);
        if (lane == 0) space[32] = y;
    }
    __syncthreads();
    x = space[32];
    __syncthreads();
    return x;
}

// One thread per N elements of one row; blockIdx.y walks the rows.
#define FOR_EACH(N)                                                       \
    i64 col = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * N;           \
    if (col >= cols) return;                                              \
    for (i64 row = blockIdx.y; row < rows; row += gridDim.y)

// Both variants of a kernel: `_8` needs 16-byte aligned rows of a multiple of 8 columns, `_1` takes anything.
#define BOTH(name, types, names)                                                         \
    extern "C" __global__ void __launch_bounds__(512) name##_8 types { name<8> names; } \
    extern "C" __global__ void __launch_bounds__(512) name##_1 types { name<1> names; }
