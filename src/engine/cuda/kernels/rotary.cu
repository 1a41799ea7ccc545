// RMSNorm of each head, then rotary embedding (rotate-half), and its backward. One thread block per row; each
// warp takes heads in turn, so that angles and weights are read once a row.
//
// A lane holds ELEMENTS elements of a head. In the `whole` kernels (rotary over the whole head, head size
// 64 K) it holds the same K elements of both halves, and a pair never leaves the lane. The `any` kernels take
// every head size up to 256 and exchange pairs through shared memory.

// The lane's part of the row's angles; rotation by the negative angle for backward.
template <int K>
__device__ __forceinline__ void load_angles(const float* cos, i64 cos_stride, const float* sin, i64 sin_stride,
                                            i64 position, float (&c)[K], float (&s)[K]) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < K; ++i) {
        c[i] = cos[position * cos_stride + lane * K + i];
        s[i] = sin[position * sin_stride + lane * K + i];
    }
}

template <int K>
__device__ __forceinline__ void load_halves(const bf16* head, float (&low)[K], float (&high)[K]) {
    int at = (threadIdx.x & 31) * K;
#pragma unroll
    for (int i = 0; i < K; ++i) low[i] = to_float(head[at + i]), high[i] = to_float(head[at + 32 * K + i]);
}
template <>
__device__ __forceinline__ void load_halves<2>(const bf16* head, float (&low)[2], float (&high)[2]) {
    int at = threadIdx.x & 31;
    u32 a = ((const u32*)head)[at], b = ((const u32*)head)[at + 32];
    low[0] = low_float(a), low[1] = high_float(a), high[0] = low_float(b), high[1] = high_float(b);
}

template <int K>
__device__ __forceinline__ void store_halves(bf16* head, const float (&low)[K], const float (&high)[K]) {
    int at = (threadIdx.x & 31) * K;
#pragma unroll
    for (int i = 0; i < K; ++i) head[at + i] = to_bf16(low[i]), head[at + 32 * K + i] = to_bf16(high[i]);
}
template <>
__device__ __forceinline__ void store_halves<2>(bf16* head, const float (&low)[2], const float (&high)[2]) {
    int at = threadIdx.x & 31;
    ((u32*)head)[at] = pack_bf16(low[0], low[1]);
    ((u32*)head)[at + 32] = pack_bf16(high[0], high[1]);
}

template <int K>
__device__ void rotate_whole(const bf16* x, i64 x_stride, const float* w, float eps, const u32* positions,
                             const float* cos, i64 cos_stride, const float* sin, i64 sin_stride, bf16* y,
                             i64 y_stride, int heads) {
    const int DIM = 64 * K;
    i64 row = blockIdx.x;
    int lane = threadIdx.x & 31;
    float c[K], s[K], w_low[K], w_high[K];
    load_angles<K>(cos, cos_stride, sin, sin_stride, positions[row], c, s);
#pragma unroll
    for (int i = 0; i < K; ++i) {
        w_low[i] = w ? w[lane * K + i] : 1.f;
        w_high[i] = w ? w[lane * K + i + 32 * K] : 1.f;
    }
    for (int head = threadIdx.x >> 5; head < heads; head += blockDim.x >> 5) {
        float low[K], high[K], r = 1.f;
        load_halves<K>(x + row * x_stride + head * DIM, low, high);
        if (w) {
            float squares = 0.f;
#pragma unroll
            for (int i = 0; i < K; ++i) squares += low[i] * low[i] + high[i] * high[i];
            r = rsqrtf(warp_sum(squares) / DIM + eps);
        }
#pragma unroll
        for (int i = 0; i < K; ++i) {
            float a = low[i] * r * w_low[i], b = high[i] * r * w_high[i];
            low[i] = a * c[i] - b * s[i];
            high[i] = b * c[i] + a * s[i];
        }
        store_halves<K>(y + row * y_stride + head * DIM, low, high);
    }
}

// dx overwritten; partial[block][dim] = sum over the block's rows and heads of the gradient of w.
template <int K>
__device__ void rotate_whole_backward(const bf16* dy, i64 dy_stride, const bf16* x, i64 x_stride, const float* w,
                                      float eps, const u32* positions, const float* cos, i64 cos_stride,
                                      const float* sin, i64 sin_stride, bf16* dx, i64 dx_stride, float* partial,
                                      i64 rows, int heads, float* space) {
    const int DIM = 64 * K;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    float w_low[K], w_high[K], dw_low[K], dw_high[K];
#pragma unroll
    for (int i = 0; i < K; ++i) {
        w_low[i] = w[lane * K + i], w_high[i] = w[lane * K + i + 32 * K];
        dw_low[i] = dw_high[i] = 0.f;
    }
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        float c[K], s[K];
        load_angles<K>(cos, cos_stride, sin, sin_stride, positions[row], c, s);
        for (int head = warp; head < heads; head += warps) {
            float low[K], high[K], d_low[K], d_high[K], squares = 0.f, product = 0.f;
            load_halves<K>(x + row * x_stride + head * DIM, low, high);
            load_halves<K>(dy + row * dy_stride + head * DIM, d_low, d_high);
#pragma unroll
            for (int i = 0; i < K; ++i) {
                float a = d_low[i] * c[i] + d_high[i] * s[i], b = d_high[i] * c[i] - d_low[i] * s[i];
                d_low[i] = a, d_high[i] = b;
                squares += low[i] * low[i] + high[i] * high[i];
                product += a * w_low[i] * low[i] + b * w_high[i] * high[i];
            }
            float r = rsqrtf(warp_sum(squares) / DIM + eps), mean = warp_sum(product) / DIM * r * r;
#pragma unroll
            for (int i = 0; i < K; ++i) {
                dw_low[i] += d_low[i] * low[i] * r;
                dw_high[i] += d_high[i] * high[i] * r;
                low[i] = r * (d_low[i] * w_low[i] - low[i] * mean);
                high[i] = r * (d_high[i] * w_high[i] - high[i] * mean);
            }
            store_halves<K>(dx + row * dx_stride + head * DIM, low, high);
        }
    }
#pragma unroll
    for (int i = 0; i < K; ++i) {
        space[warp * DIM + lane * K + i] = dw_low[i];
        space[warp * DIM + lane * K + i + 32 * K] = dw_high[i];
    }
    __syncthreads();
    for (int e = threadIdx.x; e < DIM; e += blockDim.x) {
        float sum = 0.f;
        for (int i = 0; i < warps; ++i) sum += space[i * DIM + e];
        partial[(i64)blockIdx.x * DIM + e] = sum;
    }
}

#define WARPS 8
#define MOST 8  // elements of a head that a lane holds: 256 / 32

// `half` is the number of angles; elements past 2 half pass through.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    rotate_any(const bf16* x, i64 x_stride, const float* w, float eps, const u32* positions, const float* cos,
               i64 cos_stride, const float* sin, i64 sin_stride, bf16* y, i64 y_stride, u32 heads, u32 dim,
               u32 half) {
    __shared__ float exchange[WARPS][32 * MOST];
    i64 row = blockIdx.x, position = positions[row];
    u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (u32 head = warp; head < heads; head += WARPS) {
        const bf16* in = x + row * x_stride + head * dim;
        bf16* out = y + row * y_stride + head * dim;
        float v[MOST], squares = 0.f, r = 1.f;
#pragma unroll
        for (int i = 0; i < MOST; ++i) {
            u32 e = lane + 32 * i;
            v[i] = e < dim ? to_float(in[e]) : 0.f;
            squares += v[i] * v[i];
        }
        if (w) r = rsqrtf(warp_sum(squares) / dim + eps);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < MOST; ++i) {
            u32 e = lane + 32 * i;
            if (e < dim) exchange[warp][e] = v[i] *= w ? r * w[e] : 1.f;
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < MOST; ++i) {
            u32 e = lane + 32 * i;
            if (e >= dim) continue;
            float z = v[i];
            if (e < half)
                z = z * cos[position * cos_stride + e] - exchange[warp][e + half] * sin[position * sin_stride + e];
            else if (e < 2 * half)
                z = z * cos[position * cos_stride + e - half] +
                    exchange[warp][e - half] * sin[position * sin_stride + e - half];
            out[e] = to_bf16(z);
        }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    rotate_any_backward(const bf16* dy, i64 dy_stride, const bf16* x, i64 x_stride, const float* w, float eps,
                        const u32* positions, const float* cos, i64 cos_stride, const float* sin, i64 sin_stride,
                        bf16* dx, i64 dx_stride, float* partial, i64 rows, u32 heads, u32 dim, u32 half) {
    __shared__ float exchange[WARPS][32 * MOST];
    u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float dw[MOST];
#pragma unroll
    for (int i = 0; i < MOST; ++i) dw[i] = 0.f;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        i64 position = positions[row];
        for (u32 head = warp; head < heads; head += WARPS) {
            const bf16* in = x + row * x_stride + head * dim;
            const bf16* d_in = dy + row * dy_stride + head * dim;
            __syncwarp();
#pragma unroll
            for (int i = 0; i < MOST; ++i) {
                u32 e = lane + 32 * i;
                if (e < dim) exchange[warp][e] = to_float(d_in[e]);
            }
            __syncwarp();
            float v[MOST], d[MOST], squares = 0.f, product = 0.f;
#pragma unroll
            for (int i = 0; i < MOST; ++i) {
                u32 e = lane + 32 * i;
                v[i] = d[i] = 0.f;
                if (e >= dim) continue;
                v[i] = to_float(in[e]);
                d[i] = exchange[warp][e];
                if (e < half)
                    d[i] = d[i] * cos[position * cos_stride + e] +
                           exchange[warp][e + half] * sin[position * sin_stride + e];
                else if (e < 2 * half)
                    d[i] = d[i] * cos[position * cos_stride + e - half] -
                           exchange[warp][e - half] * sin[position * sin_stride + e - half];
                squares += v[i] * v[i];
                product += d[i] * w[e] * v[i];
            }
            float r = rsqrtf(warp_sum(squares) / dim + eps), mean = warp_sum(product) / dim * r * r;
#pragma unroll
            for (int i = 0; i < MOST; ++i) {
                u32 e = lane + 32 * i;
                if (e >= dim) continue;
                dw[i] += d[i] * v[i] * r;
                dx[row * dx_stride + head * dim + e] = to_bf16(r * (d[i] * w[e] - v[i] * mean));
            }
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < MOST; ++i) exchange[warp][lane + 32 * i] = dw[i];
    __syncthreads();
    for (u32 e = threadIdx.x; e < dim; e += blockDim.x) {
        float sum = 0.f;
        for (int i = 0; i < WARPS; ++i) sum += exchange[i][e];
        partial[(i64)blockIdx.x * dim + e] = sum;
    }
}

#define WHOLE(dim, K)                                                                                               \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                        \
        rotate_##dim(const bf16* x, i64 x_stride, const float* w, float eps, const u32* positions,                  \
                     const float* cos, i64 cos_stride, const float* sin, i64 sin_stride, bf16* y, i64 y_stride,     \
                     u32 heads) {                                                                                   \
        rotate_whole<K>(x, x_stride, w, eps, positions, cos, cos_stride, sin, sin_stride, y, y_stride, heads);      \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                        \
        rotate_##dim##_backward(const bf16* dy, i64 dy_stride, const bf16* x, i64 x_stride, const float* w,         \
                                float eps, const u32* positions, const float* cos, i64 cos_stride,                  \
                                const float* sin, i64 sin_stride, bf16* dx, i64 dx_stride, float* partial,          \
                                i64 rows, u32 heads) {                                                              \
        __shared__ float space[WARPS * dim];                                                                        \
        rotate_whole_backward<K>(dy, dy_stride, x, x_stride, w, eps, positions, cos, cos_stride, sin, sin_stride,   \
                                 dx, dx_stride, partial, rows, heads, space);                                       \
    }

WHOLE(64, 1)
WHOLE(128, 2)
